"""Signed records: time, index, key record. Sources: docs/security.md 2.4 to 2.8; TUF, timestamp and root."""

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_protocol import generate_sealing_key, generate_signing_key
from edgefl_protocol.errors import RecordError
from edgefl_protocol.records.coordinator_records import (
    Index,
    IndexEntry,
    make_index,
    make_key_record,
    make_time,
    verify_index,
    verify_key_record,
    verify_time,
)

NOW = 1_790_000_000_000
KEY = generate_signing_key()
BOX = generate_sealing_key(2)
NONCE = "n" * 22
ENTRIES = [
    IndexEntry(line="main", task="nevus", version=4, sha256="a" * 64, size=9_000_000),
    IndexEntry(line="main", task="all", version=12, sha256="b" * 64, size=9_000_001),
]
TIME = make_time(KEY, NONCE, NOW)
INDEX = make_index(KEY, "skin", ENTRIES, NOW, NOW + 1000)
KEYS = make_key_record(KEY, "skin", BOX.public_key, 3, NOW, NOW + 1000)


def check(kind, record, **changes):
    """Verify a record of any of the three kinds with arguments that fit, less the changes."""
    base = {"key": KEY.public_key, "federation": "skin", "now_ms": NOW, "nonce": NONCE, "pin": KEY.key_id, "seen": 0}
    a = {**base, **changes}
    if kind == "time":
        return verify_time(record, a["key"], a["nonce"])
    if kind == "index":
        return verify_index(record, a["key"], a["federation"], a["now_ms"], a["seen"])
    return verify_key_record(record, a["pin"], a["federation"], a["now_ms"], a["seen"])


GOOD = {"time": TIME, "index": INDEX, "keys": KEYS}


def forge(record, **changes):
    """Change fields of a record's body and keep its signature."""
    body, signature = record.split(b".")
    fields = json.loads(base64.urlsafe_b64decode(body + b"=="))
    text = json.dumps({**fields, **changes}, sort_keys=True, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=") + b"." + signature


def test_good_records_are_read():
    assert check("time", TIME).now_ms == NOW
    index = check("index", INDEX)
    assert index == Index(federation="skin", issued_ms=NOW, expires_ms=NOW + 1000, entries=tuple(sorted(ENTRIES)))
    assert index.current("main", "all").version == 12 and index.current("main", "other") is None
    keys = check("keys", KEYS)
    assert (keys.number, keys.signing, keys.sealing) == (3, KEY.public_key, BOX.public_key)
    assert make_index(KEY, "skin", ENTRIES[::-1], NOW, NOW + 1000) == INDEX


REFUSALS = [
    ("time", TIME, {"nonce": "m" * 22}, "wrong_nonce"),
    ("time", TIME, {"key": generate_signing_key().public_key}, "bad_signature"),
    ("time", forge(TIME, now_ms=NOW + 1), {}, "bad_signature"),
    ("index", INDEX, {"key": generate_signing_key().public_key}, "bad_signature"),
    ("index", INDEX, {"federation": "eye"}, "wrong_federation"),
    ("index", INDEX, {"now_ms": NOW + 1001}, "expired"),
    ("index", INDEX, {"seen": NOW + 1}, "rolled_back"),
    ("index", INDEX, {"now_ms": NOW - 600_001}, "from_future"),
    ("index", forge(INDEX, expires_ms=NOW * 2), {}, "bad_signature"),
    ("index", forge(INDEX, entries=[]), {}, "bad_signature"),
    ("keys", KEYS, {"pin": "0" * 64}, "wrong_key"),
    ("keys", KEYS, {"federation": "eye"}, "wrong_federation"),
    ("keys", KEYS, {"now_ms": NOW + 1001}, "expired"),
    ("keys", KEYS, {"seen": 4}, "rolled_back"),
    ("keys", forge(KEYS, number=5), {}, "bad_signature"),
    ("keys", forge(KEYS, sealing=generate_sealing_key(2).public.hex()), {}, "bad_signature"),
    ("keys", forge(KEYS, signing=generate_signing_key().public.hex()), {}, "wrong_key"),
]


@pytest.mark.parametrize(("kind", "record", "changes", "code"), REFUSALS)
def test_refusals_name_their_reason(kind, record, changes, code):
    """docs/security.md 2.8, check 26 in part: wrong key, rollback, freeze, other federation, altered fields."""
    with pytest.raises(RecordError) as caught:
        check(kind, record, **changes)
    assert caught.value.code == code


def test_the_edges_are_allowed():
    assert check("index", INDEX, now_ms=NOW + 1000, seen=NOW)
    assert check("index", INDEX, now_ms=NOW - 600_000)  # clocks differ: 10 minutes ahead at most
    assert check("keys", KEYS, now_ms=NOW + 1000, seen=3)


@pytest.mark.parametrize("made", sorted(GOOD))
@pytest.mark.parametrize("asked", sorted(GOOD))
def test_no_record_passes_for_another_kind(made, asked):
    """docs/security.md 2.4: the labels are never shared."""
    if made == asked:
        assert check(asked, GOOD[made])
    else:
        with pytest.raises(RecordError):
            check(asked, GOOD[made])


def test_a_label_alone_keeps_two_uses_apart():
    """The same body signed for another use is refused by its signature, not by its fields."""
    body = {"nonce": NONCE, "now_ms": NOW}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    for label, accepted in [("eflt1/time", True), ("efli1/index", False), ("efl1/sign", False)]:
        parts = (text, KEY.sign(label, text))
        record = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
        if accepted:
            assert check("time", record).now_ms == NOW
        else:
            with pytest.raises(RecordError):
                check("time", record)


@settings(max_examples=300)
@given(st.sampled_from(sorted(GOOD)), st.data())
def test_a_changed_character_is_refused(kind, data):
    """Tamper property: any changed character of any record raises, also the stray bits of base64."""
    record = bytearray(GOOD[kind])
    place = data.draw(st.integers(0, len(record) - 1))
    record[place] = data.draw(st.integers(0, 255).filter(lambda value: value != GOOD[kind][place]))
    with pytest.raises(RecordError):
        check(kind, bytes(record))


@pytest.mark.parametrize(
    "fields",
    [
        {"nonce": NONCE},
        {"nonce": NONCE, "now_ms": NOW, "x": 1},
        {"nonce": NONCE, "now_ms": float(NOW)},
        {"nonce": NONCE, "now_ms": True},
        {"nonce": NONCE, "now_ms": 2**53},
        {"nonce": NONCE, "now_ms": -1},
        {"nonce": [NONCE], "now_ms": NOW},
        [NONCE, NOW],
        "text",
    ],
)
def test_even_a_signed_body_must_have_its_form(fields):
    """A faulty coordinator is not trusted with types."""
    text = json.dumps(fields).encode()
    parts = (text, KEY.sign("eflt1/time", text))
    with pytest.raises(RecordError):
        check("time", b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts))


@pytest.mark.parametrize(
    "record", [b"", b".", b"a.b", b"x" * 70_000, b"[" * 1000, b"\xff.\xff", TIME + b"\n", b" " + TIME]
)
def test_noise_is_refused(record):
    for kind in GOOD:
        with pytest.raises(RecordError):
            check(kind, record)


def test_what_has_not_its_form_is_not_signed():
    entry = ENTRIES[0]
    for entries in ([entry, entry], [IndexEntry(line="Main", task="t", version=1, sha256="a" * 64, size=1)]):
        with pytest.raises(RecordError):
            make_index(KEY, "skin", entries, NOW, NOW + 1)
    for nonce in ("", "short", "n" * 65, "n" * 21 + "\n"):
        with pytest.raises(RecordError):
            make_time(KEY, nonce, NOW)
    with pytest.raises(RecordError):
        make_key_record(KEY, "skin", BOX.public_key, 0, NOW, NOW + 1)
    many = [IndexEntry(line=f"l{i}", task="t", version=1, sha256="a" * 64, size=1) for i in range(1000)]
    with pytest.raises(RecordError) as caught:
        make_index(KEY, "skin", many, NOW, NOW + 1)
    assert caught.value.code == "too_large"


def test_a_key_record_with_a_low_order_key_is_refused():
    """docs/security.md check 9: also where the record itself is in order."""
    record = forge(KEYS, sealing=(BOX.public[:-32] + bytes(32)).hex())
    with pytest.raises(RecordError, match="unusable"):
        check("keys", record)
