"""How much memory this process took at most; and large blocks go back to the system as soon as they are free.

Sources: proc(5), VmHWM: what getrusage(2) tells begins with the peak of the program that started this one, for the
kernel carries it over `exec`, so that a large application would be told its own size for ours. glibc, mallopt(3): with
each large block that is freed, the size from which blocks are mapped apart rises, up to 32 MiB; later blocks then lie
among small ones and stay with the process. For a model and a photograph that was a fifth of the peak
(docs/results/device.md). Setting the size, even to its default, ends the rising.
"""

import contextlib
import ctypes
import resource
import sys
from pathlib import Path
from typing import Final

M_MMAP_THRESHOLD: Final = -3
DEFAULT_BYTES: Final = 128 * 1024
STATUS: Final = Path("/proc/self/status")
_MAXRSS_BYTES: Final = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss
_MIB: Final = 1 << 20


def peak_memory_mib(status: Path = STATUS) -> float:
    """Read this process's largest resident memory so far, from Linux's `status`, else from the system's accounting."""
    with contextlib.suppress(OSError):
        for line in status.read_text(errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES / _MIB


def map_large_blocks_apart() -> bool:
    """Keep glibc's default size from which blocks are mapped apart; False on a system that knows no such setting."""
    try:
        return bool(ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, DEFAULT_BYTES))
    except (OSError, AttributeError, TypeError):  # no such function, or no way to ask for one
        return False
