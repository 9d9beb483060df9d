"""Our payloads inside Flower's records: safetensors bytes under a name each, judged on arrival.

Guarantees: what `unpacked` returns is a payload for every name that was asked for and nothing else, finite, of plain
types and within the limit. Flower's own forms of arrays are refused unread, so nothing unpickles.
"""

from collections.abc import Collection, Mapping

from flwr.app import Array, ArrayRecord, RecordDict

from edgefl_protocol import Payload
from edgefl_protocol.errors import PayloadError

FORM = "edgefl.payload"  # Flower's `stype`: how bytes became of an array
MOST_BYTES = 4 * 1024**3  # of one payload
ONLY = "bytes"  # the one array of a record


def packed(payloads: Mapping[str, Payload]) -> RecordDict:
    """Put each payload into a record of its own; Flower cuts long ones into pieces."""
    return RecordDict({name: ArrayRecord({ONLY: _array(payload)}) for name, payload in payloads.items()})


def unpacked(content: RecordDict, names: Collection[str], most_bytes: int = MOST_BYTES) -> dict[str, Payload]:
    """Read the payloads of these names.

    Raises:
        PayloadError: one is missing, too large or damaged, or there is something else.
    """
    if set(content) != set(names):
        raise PayloadError(f"a message holds other records than {', '.join(sorted(names))}", "bad_message")
    return {name: Payload.from_bytes(_bytes(name, content[name]), most_bytes) for name in names}


def _array(payload: Payload) -> Array:
    data = payload.to_bytes()
    return Array(dtype="uint8", shape=(len(data),), stype=FORM, data=data)


def _bytes(name: str, record: object) -> bytes:
    array = record[ONLY] if isinstance(record, ArrayRecord) and set(record) == {ONLY} else None
    if array is None or array.stype != FORM:
        raise PayloadError(f"the record {name} is not one of EdgeFL's", "bad_message")
    return bytes(array.data)
