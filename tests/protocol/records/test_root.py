"""The federation's root set, judged by TUF's tables. Sources: TUF 5.3 (root update); python-tuf's client tests."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_protocol import SigningKey
from edgefl_protocol.envelopes.keys import PublicSigningKey
from edgefl_protocol.errors import RecordError
from edgefl_protocol.records.root import (
    MAX_CHAIN_BYTES,
    MAX_VERSIONS,
    Root,
    check_current,
    join_chain,
    make_root,
    newest_root,
    sign_root,
    signed_by,
    split_chain,
    unverified_root,
)

NOW = 1_790_000_000_000
DAY = 86_400_000
KEYS = [SigningKey(bytes([number]) * 32) for number in range(10)]
COORDINATOR = SigningKey(b"c" * 32)
SIGNERS = [SigningKey(bytes([number]) * 32) for number in range(20, 24)]


def root_of(version: int, keys=(1,), threshold: int = 1, **changes) -> Root:
    """A set with root keys by number."""
    base = Root(
        federation="skin", version=version, issued_ms=NOW, expires_ms=NOW + 365 * DAY,
        root_keys=tuple(KEYS[number].public_key for number in keys), threshold=threshold,
        coordinators=(COORDINATOR.public_key,), signers=(SIGNERS[0].public_key,),
    )  # fmt: skip
    return replace(base, **changes)


def signed(root: Root, *sigs: int) -> bytes:
    return make_root(root, [KEYS[number] for number in sigs])


@dataclass(frozen=True)
class MdVersion:
    """One published version, as in python-tuf's table: its root keys, threshold, signatures, and whether it counts."""

    keys: list[int]
    threshold: int
    sigs: list[int]
    refused: bool = field(default=False)


# The names and cases of python-tuf's tests/test_updater_key_rotations.py, root_rotation_cases.
# fmt: off
ROOT_ROTATION_CASES = {
    "1-of-1 key rotation": [
        MdVersion([1], 1, [1]), MdVersion([2], 1, [2, 1]), MdVersion([2], 1, [2])],
    "1-of-1 key rotation, unused signatures": [
        MdVersion([1], 1, [3, 1, 4]), MdVersion([2], 1, [3, 2, 1, 4]), MdVersion([2], 1, [3, 2, 4])],
    "1-of-1 key rotation fail: not signed with old key": [
        MdVersion([1], 1, [1]), MdVersion([2], 1, [2, 3, 4], refused=True)],
    "1-of-1 key rotation fail: not signed with new key": [
        MdVersion([1], 1, [1]), MdVersion([2], 1, [1, 3, 4], refused=True)],
    "3-of-5, sign with different keycombos": [
        MdVersion([0, 1, 2, 3, 4], 3, [0, 2, 4]), MdVersion([0, 1, 2, 3, 4], 3, [0, 4, 1]),
        MdVersion([0, 1, 2, 3, 4], 3, [0, 1, 3]), MdVersion([0, 1, 2, 3, 4], 3, [0, 1, 3])],
    "3-of-5, one key rotated": [
        MdVersion([0, 1, 2, 3, 4], 3, [0, 2, 4]), MdVersion([0, 1, 3, 4, 5], 3, [0, 4, 1])],
    "3-of-5, one key rotate fails: not signed with 3 new keys": [
        MdVersion([0, 1, 2, 3, 4], 3, [0, 2, 4]), MdVersion([0, 1, 3, 4, 5], 3, [0, 2, 4], refused=True)],
    "3-of-5, one key rotate fails: not signed with 3 old keys": [
        MdVersion([0, 1, 2, 3, 4], 3, [0, 2, 4]), MdVersion([0, 1, 3, 4, 5], 3, [0, 4, 5], refused=True)],
    "3-of-5, one key rotated, with intermediate step": [
        MdVersion([0, 1, 2, 3, 4], 3, [0, 2, 4]), MdVersion([0, 1, 3, 4, 5], 3, [0, 2, 4, 5]),
        MdVersion([0, 1, 3, 4, 5], 3, [0, 4, 5])],
    "3-of-5, all keys rotated, with intermediate step": [
        MdVersion([0, 1, 2, 3, 4], 3, [0, 2, 4]), MdVersion([5, 6, 7, 8, 9], 3, [0, 2, 4, 5, 6, 7]),
        MdVersion([5, 6, 7, 8, 9], 3, [5, 6, 7])],
    "1-of-3 threshold increase to 2-of-3": [
        MdVersion([1, 2, 3], 1, [1]), MdVersion([1, 2, 3], 2, [1, 2])],
    "1-of-3 threshold bump to 2-of-3 fails: new threshold not reached": [
        MdVersion([1, 2, 3], 1, [1]), MdVersion([1, 2, 3], 2, [2], refused=True)],
    "2-of-3 threshold decrease to 1-of-3": [
        MdVersion([1, 2, 3], 2, [1, 2]), MdVersion([1, 2, 3], 1, [1, 2]), MdVersion([1, 2, 3], 1, [1])],
    "2-of-3 threshold decr. to 1-of-3 fails: old threshold not reached": [
        MdVersion([1, 2, 3], 2, [1, 2]), MdVersion([1, 2, 3], 1, [1], refused=True)],
    "1-of-2 threshold increase to 2-of-2": [
        MdVersion([1], 1, [1]), MdVersion([1, 2], 2, [1, 2])],
}
# fmt: on


@pytest.mark.parametrize("case", ROOT_ROTATION_CASES)
def test_root_rotation(case) -> None:
    """docs/security.md check 26: root rotation, wrong root, threshold k-1 (TUF's table, 15 of 15)."""
    versions = ROOT_ROTATION_CASES[case]
    chain = [
        signed(root_of(number, tuple(one.keys), one.threshold), *one.sigs) for number, one in enumerate(versions, 1)
    ]
    pin = KEYS[versions[0].keys[0] if versions[0].keys[0] in versions[0].sigs else versions[0].sigs[0]].key_id
    good = len(versions) - versions[-1].refused
    found = newest_root(chain[:good], "skin", pin)
    assert found is not None
    root, record = found
    assert (root.version, record) == (good, chain[good - 1])
    assert newest_root(chain[:good], "skin", pin, root) is None  # nothing newer
    if versions[-1].refused:
        for trusted in (None, root):
            with pytest.raises(RecordError) as caught:
                newest_root(chain, "skin", pin, trusted)
            assert caught.value.code == "too_few_signatures"


CHAIN = [signed(root_of(version), 1) for version in (1, 2, 3, 4)]
PIN = KEYS[1].key_id


def code_of(chain, trusted: Root | None = None, pin: str = PIN, federation: str = "skin") -> str:
    with pytest.raises(RecordError) as caught:
        newest_root(chain, federation, pin, trusted)
    return caught.value.code


# The names of python-tuf's tests/test_updater_top_level_update.py that concern the root role.
def test_first_time_refresh() -> None:
    """docs/security.md check 26: the first set is taken under the pin; what came before it in the chain is no harm."""
    found = newest_root(CHAIN, "skin", PIN)
    assert found is not None and found[0].version == 4
    later = [signed(root_of(1, (2,)), 2), signed(root_of(2, (1,)), 1, 2), signed(root_of(3), 1)]
    found = newest_root(later, "skin", PIN)
    assert found is not None and found[0].version == 3


def test_trusted_root_missing() -> None:
    """docs/security.md check 26: wrong root: nothing is signed by the pinned key; it alone is not enough either."""
    assert code_of(CHAIN, pin=KEYS[2].key_id) == "wrong_key"
    assert code_of([]) == "wrong_key"
    assert code_of([signed(root_of(1, (1, 2, 3), 2), 1)]) == "too_few_signatures"
    listed_only = signed(root_of(1, (1, 2)), 2)  # names the pinned key, which did not sign
    assert code_of([listed_only]) == "wrong_key"


def test_trusted_root_expired() -> None:
    """docs/security.md check 26, freeze: the newest set must be in time; the edge counts."""
    root = root_of(1)
    check_current(root, root.expires_ms)
    with pytest.raises(RecordError) as caught:
        check_current(root, root.expires_ms + 1)
    assert caught.value.code == "root_expired"


def test_intermediate_root_expired() -> None:
    """docs/security.md check 26: a device that slept through an expired set walks on to the newest."""
    chain = [signed(root_of(1), 1), signed(root_of(2, expires_ms=NOW - DAY), 1), signed(root_of(3), 1)]
    found = newest_root(chain, "skin", PIN)
    assert found is not None
    check_current(found[0], NOW)


def test_trusted_root_unsigned() -> None:
    """docs/security.md check 26: a set without a good signature is none."""
    record = CHAIN[1]
    forged = record[:-6] + (b"AAAAAA" if record[-6:] != b"AAAAAA" else b"BBBBBB")
    assert code_of([CHAIN[0], forged], root_of(1)) in ("too_few_signatures", "bad_record")


def test_intermediate_root_incorrectly_signed() -> None:
    """docs/security.md check 26: one wrong link ends the walk, whatever follows."""
    chain = [CHAIN[0], signed(root_of(2), 3), CHAIN[2]]
    assert code_of(chain) == "too_few_signatures"


def test_new_root_same_version() -> None:
    """docs/security.md check 26, rollback: another set under a number that was seen does not count."""
    other = signed(root_of(2, expires_ms=NOW + 3650 * DAY), 1)
    assert code_of([*CHAIN[:2], other]) == "rolled_back"
    assert newest_root([other], "skin", PIN, root_of(2)) is None
    assert newest_root(CHAIN[:1], "skin", PIN, root_of(4)) is None


def test_new_root_nonconsecutive_version() -> None:
    """docs/security.md check 26: a skipped version is refused, with and without a set before."""
    assert code_of([CHAIN[0], CHAIN[2]]) == "skipped_version"
    assert code_of([CHAIN[3]], root_of(2)) == "skipped_version"


def test_max_root_rotations() -> None:
    """docs/security.md check 26, endless data: more sets, or more bytes, than a device walks through."""
    assert code_of([CHAIN[0]] * (MAX_VERSIONS + 1)) == "too_many_versions"
    with pytest.raises(RecordError):
        split_chain(b"x" * MAX_CHAIN_BYTES + b"\n")
    with pytest.raises(RecordError):
        join_chain([b"x" * 1000] * 600)


def test_another_federation() -> None:
    assert code_of(CHAIN, federation="eye") == "wrong_federation"


@pytest.mark.parametrize(
    "changes",
    [
        {"threshold": 0},
        {"threshold": 2},
        {"signer_threshold": 0},
        {"signer_threshold": 2},
        {"coordinators": ()},
        {"root_keys": ()},
        {"signers": (COORDINATOR.public_key,)},  # one key, one use
        {"signers": (KEYS[1].public_key,)},
        {"signers": (SIGNERS[0].public_key, SIGNERS[0].public_key)},
    ],
)
def test_a_set_that_cannot_be_meant_is_none(changes) -> None:
    with pytest.raises(RecordError):
        root_of(1, **changes)


def test_forms_of_a_set_are_checked_before_it_is_signed() -> None:
    for changes in ({"federation": "Skin"}, {"version": 0}, {"expires_ms": -1}):
        with pytest.raises(RecordError):
            signed(root_of(1, **changes) if "version" not in changes else root_of(0), 1)
    many = tuple(PublicSigningKey(SigningKey(number.to_bytes(32, "big")).public) for number in range(100, 117))
    with pytest.raises(RecordError, match="at most"):
        signed(root_of(1, root_keys=many), 1)


def test_two_people_sign_on_two_machines() -> None:
    """2.6.6: k of n; the order of signing does not show in the bytes, and signing twice changes nothing."""
    root = root_of(1, (1, 2, 3), 2)
    one_way = sign_root(signed(root, 1), KEYS[2])
    other_way = sign_root(signed(root, 2), KEYS[1])
    assert one_way == other_way == sign_root(one_way, KEYS[1])
    assert signed_by(one_way, root) == 2 and unverified_root(one_way).to_body() == root.to_body()
    found = newest_root([one_way], "skin", KEYS[1].key_id)
    assert found is not None and found[0].to_body() == root.to_body()


def test_a_chain_comes_back() -> None:
    assert split_chain(join_chain(CHAIN)) == CHAIN


@settings(max_examples=300)
@given(st.data())
def test_a_changed_character_is_refused(data) -> None:
    """Tamper property: any changed character of a set raises."""
    record = bytearray(CHAIN[1])
    place = data.draw(st.integers(0, len(record) - 1))
    record[place] = data.draw(st.integers(0, 255).filter(lambda value: value != CHAIN[1][place]))
    with pytest.raises(RecordError):
        newest_root([CHAIN[0], bytes(record)], "skin", PIN)
