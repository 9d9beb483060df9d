"""Whose bundle is taken, which version, and until when. Source: docs/security.md checks 9 and 26."""

from dataclasses import replace
from typing import Any

import pytest
from tests.protocol.bundle.conftest import OTHER, THIRD, code_of

from edgefl_protocol.bundle import build_bundle, check_update, load_bundle, verified_again
from edgefl_protocol.errors import BundleError, KeyMaterialError


def test_expiry_is_exact(good: Any) -> None:
    """docs/security.md check 26, freeze: accepted in the last millisecond, refused in the next."""
    expires = good.manifest.expires_ms
    assert load_bundle(good.data, [good.key.public], expires - 1)
    assert code_of(lambda: load_bundle(good.data, [good.key.public], expires)) == "expired"


def test_rollback(good: Any) -> None:
    """docs/security.md check 26, rollback: not below the last seen of the same line; other lines count apart."""
    line = ("demo", "skin", "all")

    def load(seen: dict[tuple[str | None, str, str], int]) -> object:
        return load_bundle(good.data, [good.key.public], good.now_ms, seen)

    assert load({line: 3})
    assert load({(None, "skin", "all"): 9, ("demo", "skin", "nevus"): 9})
    assert code_of(lambda: load({line: 4})) == "rolled_back"


def test_update_rules(good: Any) -> None:
    """The bundle format: an update stays in its (federation, line, task), version strictly above."""
    current = good.manifest
    check_update(current, replace(current, version=4))
    for change, code in (
        ({}, "rolled_back"),
        ({"version": 2}, "rolled_back"),
        ({"version": 4, "federation": None}, "other_line"),
        ({"version": 4, "line": "nail"}, "other_line"),
        ({"version": 4, "task": "nevus"}, "other_line"),
    ):
        changed = replace(current, **change)
        assert code_of(lambda changed=changed: check_update(current, changed)) == code


def test_threshold(good: Any) -> None:
    """docs/security.md check 26, threshold k-1: two of three must have signed, and one key counts once."""
    three = [good.key.public, OTHER.public, THIRD.public]
    two = build_bundle(good.members, good.fields, [good.key, OTHER])
    assert load_bundle(two, three, good.now_ms, threshold=2).signers == tuple(sorted((good.key.key_id, OTHER.key_id)))
    assert code_of(lambda: load_bundle(two, three, good.now_ms, threshold=3)) == "untrusted_key"
    assert code_of(lambda: load_bundle(good.data, three, good.now_ms, threshold=2)) == "untrusted_key"
    assert code_of(lambda: load_bundle(good.data, three[:1] * 2, good.now_ms, threshold=2)) == "untrusted_key"
    with pytest.raises(ValueError, match="threshold"):
        load_bundle(good.data, three, good.now_ms, threshold=0)


def test_a_key_id_that_was_trusted_as_a_key_is_named(good: Any) -> None:
    """Both are 64 hex digits, and pages name the id: "0 trusted keys signed the bundle" left people where they were."""
    with pytest.raises(BundleError, match=f"{good.key.key_id} was trusted as a key, but it is the id of one") as left:
        load_bundle(good.data, [bytes.fromhex(good.key.key_id)], good.now_ms)
    assert left.value.code == "untrusted_key"
    with pytest.raises(BundleError) as other:
        load_bundle(good.data, [OTHER.public], good.now_ms)
    assert "id of one" not in str(other.value)


def test_signature_of_a_stranger_is_ignored(good: Any) -> None:
    """k of n: an additional signer whom this device does not know changes nothing."""
    two = build_bundle(good.members, good.fields, [good.key, OTHER])
    assert good.load(two).signers == (good.key.key_id,)


@pytest.mark.parametrize("keys", [(), (THIRD,)])
def test_verified_again_it_says_what_loading_says(good: Any, keys: tuple[Any, ...]) -> None:
    """The keys of now count, not those of the loading: the signers are these, or the words are those of a refusal."""
    two = build_bundle(good.members, good.fields, [good.key, OTHER])
    loaded = load_bundle(two, [good.key.public], good.now_ms)
    assert verified_again(loaded, [OTHER.public, THIRD.public]).signers == (OTHER.key_id,)
    refused = []
    for ask in (verified_again, lambda _, trust: load_bundle(two, trust, good.now_ms)):
        with pytest.raises(BundleError) as caught:
            ask(loaded, [key.public for key in keys])
        refused.append((caught.value.code, str(caught.value)))
    assert refused[0] == refused[1]


def test_no_trusted_key(good: Any) -> None:
    """Never trust on first use: the refusal names the key that signed, and the command that would trust it."""
    with pytest.raises(BundleError, match="edgefl trust add") as caught:
        load_bundle(good.data, [], good.now_ms)
    assert caught.value.code == "no_trusted_key"
    assert good.key.key_id in str(caught.value)
    with pytest.raises(BundleError, match=good.key.key_id):
        load_bundle(good.data, [OTHER.public], good.now_ms)


def test_low_order_signer_is_refused(good: Any) -> None:
    """docs/security.md check 9: a trusted key under which anybody can sign does not get in."""
    with pytest.raises(KeyMaterialError):
        load_bundle(good.data, [bytes(32)], good.now_ms)
