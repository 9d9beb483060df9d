"""A member's change of keys: the new signing and sealing key, signed by the old signing key and by the new one.

Guarantees: what `verify_rotation` returns was signed by the holder of the old key and by the holder of the new one, for
this federation; anybody who keeps the record can prove it later. Source: docs/security.md 2.6.4, check 23.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

from edgefl_protocol.envelopes.keys import PublicSealingKey, PublicSigningKey, SigningKey
from edgefl_protocol.errors import KeyMaterialError, RecordError
from edgefl_protocol.records.record_form import HEX64, TIMES, WORD, Rule, check_fields, holds, make_several, parse
from edgefl_protocol.records.record_form import split_several as _split

ROTATION_LABEL: Final = "eflm1/rotate"
OVERLAP_MS: Final = 7 * 24 * 3600 * 1000  # for which the old signing key goes on counting

_SEALING: Final = re.compile(r"[0-9a-f]{64,2432}")


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """A verified change of keys."""

    federation: str  # in which
    old: PublicSigningKey  # the signing key before
    new: PublicSigningKey  # the signing key from now on
    sealing: PublicSealingKey  # what the coordinator seals answers for from now on
    issued_ms: int  # when the member made it, Unix ms


def make_rotation(
    old: SigningKey, new: SigningKey, sealing: PublicSealingKey, federation: str, issued_ms: int
) -> bytes:
    """Sign a change of keys with both signing keys."""
    body = {
        "federation": federation,
        "old": old.public.hex(),
        "new": new.public.hex(),
        "suite": sealing.suite,
        "sealing": sealing.public.hex(),
        "issued_ms": issued_ms,
    }
    _read(body)
    return make_several([old, new], ROTATION_LABEL, body)


def verify_rotation(record: bytes, federation: str) -> Rotation:
    """Return the change of keys.

    Raises:
        RecordError: code `bad_signature` where either key did not sign it, `wrong_federation` or `bad_record`.
    """
    body, signatures = _split(record)
    found = _read(parse(body))
    if found.federation != federation:
        raise RecordError(f"the change of keys is of federation {found.federation}", "wrong_federation")
    if not all(holds(key, signatures, ROTATION_LABEL, body) for key in (found.old, found.new)):
        raise RecordError("the change of keys is not signed by the old and by the new key", "bad_signature")
    return found


def _read(body: dict[str, Any]) -> Rotation:
    forms: dict[str, Rule] = {"federation": WORD, "old": HEX64, "new": HEX64, "suite": (1, 2), "sealing": _SEALING}
    check_fields(body, forms | {"issued_ms": TIMES})
    try:
        old, new = (PublicSigningKey(bytes.fromhex(body[name])) for name in ("old", "new"))
        sealing = PublicSealingKey(body["suite"], bytes.fromhex(body["sealing"]))
    except (KeyMaterialError, ValueError):
        raise RecordError("the change of keys holds an unusable key") from None
    if old == new:
        raise RecordError("the new signing key is the old one")
    return Rotation(federation=body["federation"], old=old, new=new, sealing=sealing, issued_ms=body["issued_ms"])
