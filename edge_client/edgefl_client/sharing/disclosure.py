"""What a payload would tell its receiver, as numbers: the owner's view of what leaves, before it is sealed.

Everything here is read from the payload's own bytes, so it is what is sealed and not what was meant to be. Only
numbers, names and digests are given; a value itself appears in the extremes alone.
"""

import hashlib
from typing import Any

from edgefl_client.sharing.policy import travels_of
from edgefl_protocol.payload import Payload


def describe(content: bytes) -> dict[str, Any]:
    """Kinds, arrays, scalars, length and digest of a payload.

    Args:
        content: bytes of the payload, as they would be sealed.

    Returns:
        `travels`, `arrays` (name → dtype, shape, min, max, bytes), `scalars`, `bytes` and `sha256`.

    Raises:
        PayloadError: they are no payload.
    """
    payload = Payload.from_bytes(content, len(content))
    return {
        "travels": list(travels_of(payload.arrays)),
        "arrays": {
            name: {
                "dtype": str(array.dtype),
                "shape": list(array.shape),
                "min": array.min().item() if array.size else None,
                "max": array.max().item() if array.size else None,
                "bytes": array.nbytes,
            }
            for name, array in payload.arrays.items()
        },
        "scalars": dict(payload.scalars),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def described_text(found: dict[str, Any]) -> str:
    """A description for a person: a line per array and scalar, then length and digest."""
    lines = [
        f"{name}: {one['dtype']} {'x'.join(map(str, one['shape'])) or 'scalar'}, "
        + ("empty" if one["min"] is None else f"{one['min']:.6g} to {one['max']:.6g}")
        + f", {one['bytes']} bytes"
        for name, one in found["arrays"].items()
    ]
    lines += [f"{name}: {value}" for name, value in found["scalars"].items()]
    return "\n".join([*lines, f"in all {found['bytes']} bytes, SHA-256 {found['sha256']}"])
