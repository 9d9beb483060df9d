"""Does this processor multiply 8-bit numbers exactly? Where it does not, 8-bit layers run in float, with equal scores.

x86 without VNNI adds pairs of products in 16 bits, which overflow. Every session that runs a bundle's graph takes
`session_settings`: on a device, and where a bundle is made and judged. Source: docs/decisions/0026.
"""

import platform
from functools import cache

from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import StorageError

_X86 = ("x86_64", "amd64", "i386", "i686", "x86")
_MAX_CPUINFO_BYTES = 16 * 2**20


@cache
def has_vnni(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Tell whether an x86 processor lists that it multiplies and adds bytes in 32 bits (VNNI)."""
    try:
        lines = read_bounded(cpuinfo, _MAX_CPUINFO_BYTES).decode(errors="replace").splitlines()
    except StorageError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return "avx512_vnni" in flags or "avx_vnni" in flags


def multiplies_bytes() -> bool:
    """Tell whether 8-bit products are exact here: with VNNI, and on every processor but x86."""
    return platform.machine().lower() not in _X86 or has_vnni()


def session_settings() -> dict[str, str]:
    """Return what every onnxruntime session of a bundle's graph sets on this processor."""
    return {} if multiplies_bytes() else {"session.disable_quant_qdq": "1"}
