"""The form of a signed record: how its bytes are written, split, verified and parsed; what it holds is the caller's.

    one signer    base64url(body) "." base64url(signature)
    several       base64url(body), then for each signer in the order of key ids "." base64url(key id || signature)

ASCII; the body is canonical JSON, signed as PAE(label, body). Guarantees: one way to write a record, so that no byte
of it changes unseen; a body is parsed only after its signature where one key is expected; every failure is a
`RecordError`. Source: docs/security.md 2.4 to 2.8.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from edgefl_protocol.envelopes.header import MAX_SAFE_INT
from edgefl_protocol.envelopes.keys import SIGNATURE_BYTES, PublicSigningKey, SigningKey
from edgefl_protocol.errors import KeyMaterialError, RecordError, SignatureError
from edgefl_protocol.strict_json import parse_integers, write_json

MAX_RECORD_BYTES: Final = 64 << 10
MAX_AHEAD_MS: Final = 10 * 60 * 1000  # a record dated further ahead of our clock is from the future

Rule = re.Pattern[str] | tuple[int, int] | None  # text form, integer range, or checked elsewhere

WORD: Final = re.compile(r"[a-z0-9-]{1,32}")
HEX64: Final = re.compile(r"[0-9a-f]{64}")
TIMES: Final = (0, MAX_SAFE_INT)
COUNTS: Final = (1, MAX_SAFE_INT)

_ONE: Final = re.compile(rb"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]{86})")
_SEVERAL: Final = re.compile(rb"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]{128}){1,32}")


def make(key: SigningKey, label: str, body: Mapping[str, Any]) -> bytes:
    """Sign a body with one key."""
    encoded = write_json(dict(body))
    return _bounded(_encode(encoded) + b"." + _encode(key.sign(label, encoded)))


def verify(record: bytes, label: str, key: PublicSigningKey) -> dict[str, Any]:
    """Check the one signature, then parse.

    Raises:
        RecordError: not a record, or not signed by this key for this use (`bad_signature`).
    """
    body, signature = split(record)
    try:
        key.verify(signature, label, body)
    except SignatureError:
        raise RecordError("the record is not signed by the expected key for this use", "bad_signature") from None
    return parse(body)


def split(record: bytes) -> tuple[bytes, bytes]:
    """Give body and signature of a record with one signer, neither verified."""
    match = _ONE.fullmatch(_bounded(record))
    if match is None:
        raise RecordError("this is not a signed record")
    body, signature = (_decode(part) for part in match.groups())
    return body, signature


def make_several(keys: Iterable[SigningKey], label: str, body: Mapping[str, Any]) -> bytes:
    """Sign a body with several keys."""
    encoded = write_json(dict(body))
    return _join(encoded, {key.key_id: key.sign(label, encoded) for key in keys})


def add_signature(record: bytes, label: str, key: SigningKey) -> bytes:
    """Give the record with one more signature; the same key again replaces its own."""
    body, signatures = split_several(record)
    return _join(body, {**signatures, key.key_id: key.sign(label, body)})


def split_several(record: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Give the body, and the signatures by key id; none is verified."""
    if _SEVERAL.fullmatch(_bounded(record)) is None:
        raise RecordError("this is not a record with several signers")
    parts = [_decode(part) for part in record.split(b".")]
    signatures = {part[:-SIGNATURE_BYTES].hex(): part[-SIGNATURE_BYTES:] for part in parts[1:]}
    if _join(parts[0], signatures) != record:
        raise RecordError("the record's signatures are not in the order of their keys, or one is listed twice")
    return parts[0], signatures


def holds(key: PublicSigningKey, signatures: Mapping[str, bytes], label: str, body: bytes) -> bool:
    """Tell whether this key is among the signers and its signature is good."""
    signature = signatures.get(key.key_id)
    if signature is None:
        return False
    try:
        key.verify(signature, label, body)
    except SignatureError:
        return False
    return True


def parse(body: bytes) -> dict[str, Any]:
    """Parse a body strictly."""
    try:
        fields = parse_integers(body.decode("ascii"))
    except ValueError:
        raise RecordError("the record's body is not strict JSON") from None
    if type(fields) is not dict:
        raise RecordError("the record's body is not a JSON object")
    return fields


def check_fields(fields: object, forms: Mapping[str, Rule]) -> None:
    """Refuse a record with other keys, or a value that is not of its pattern or within its range."""
    if type(fields) is not dict or fields.keys() != forms.keys():
        raise RecordError(f"the record must hold exactly {', '.join(forms)}")
    for name, form in forms.items():
        value = fields[name]
        if isinstance(form, re.Pattern) and (type(value) is not str or not form.fullmatch(value)):
            raise RecordError(f"record field {name} does not have the form {form.pattern}")
        if isinstance(form, tuple) and (type(value) is not int or not form[0] <= value <= form[1]):
            raise RecordError(f"record field {name} is not an integer from {form[0]} to {form[1]}")


def hex_list(value: object, field: str, most: int) -> list[str]:
    """Give a list of different 64-digit hex texts in ascending order."""
    if type(value) is not list or len(value) > most:
        raise RecordError(f"record field {field} is not a list of at most {most} entries")
    if not all(type(item) is str and HEX64.fullmatch(item) for item in value) or value != sorted(set(value)):
        raise RecordError(f"record field {field} is not a sorted list of different 64-digit hex texts")
    return value


def public_keys(value: object, field: str, most: int) -> tuple[PublicSigningKey, ...]:
    """Give the signing keys of a list."""
    try:
        return tuple(PublicSigningKey(bytes.fromhex(item)) for item in hex_list(value, field, most))
    except KeyMaterialError as error:
        raise RecordError(f"record field {field} holds an unusable key: {error}") from None


def check_scope(found: str, expected: str, expires_ms: int, now_ms: int) -> None:
    """Refuse a record of another federation, or one that has expired."""
    if found != expected:
        raise RecordError(f"the record is of federation {found}, not {expected}", "wrong_federation")
    if now_ms > expires_ms:
        raise RecordError("the record has expired; fetch a new one", "expired")


def check_issued(issued_ms: int, expires_ms: int, now_ms: int, lifetime_ms: int) -> None:
    """Refuse a record from the future, or one that claims a longer life than its kind may have.

    So a thief of an online key cannot make one that outlives the loss of the key, nor one that puts all later out.
    """
    if issued_ms > now_ms + MAX_AHEAD_MS:
        ahead_s = (issued_ms - now_ms) // 1000
        raise RecordError(f"the record is dated {ahead_s} s ahead of this clock; check both clocks", "from_future")
    if expires_ms - issued_ms > lifetime_ms:
        raise RecordError(f"the record is valid for longer than the {lifetime_ms} ms allowed", "bad_lifetime")


def _join(body: bytes, signatures: Mapping[str, bytes]) -> bytes:
    signed = [_encode(bytes.fromhex(key_id) + signatures[key_id]) for key_id in sorted(signatures)]
    return _bounded(b".".join([_encode(body), *signed]))


def _bounded(record: bytes) -> bytes:
    if len(record) > MAX_RECORD_BYTES:
        raise RecordError(f"a record of {len(record)} bytes; at most {MAX_RECORD_BYTES} are allowed", "too_large")
    return record


def _encode(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _decode(part: bytes) -> bytes:
    try:
        data = base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    except binascii.Error:
        raise RecordError("this is not a signed record") from None
    if _encode(data) != part:
        raise RecordError("the record's base64 has stray bits")
    return data
