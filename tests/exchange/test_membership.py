"""The record of a membership, where several processes and commands write it. Source: docs/security.md 2.5 and 2.6."""

import dataclasses
import shutil

import pytest

from edgefl_exchange import member as members
from edgefl_exchange.enrolment import enrol
from edgefl_exchange.identity import Identity
from edgefl_exchange.member import Member
from edgefl_exchange.membership import load_membership, save_membership

PROXY = "http://new.example:3128"


def test_what_another_process_kept_before_the_lock_stays(joined, folder, wire, net, monkeypatch):
    """docs/security.md 2.6: an index never goes back. It did, where a sync began while another one was ending."""

    def waited(*arguments):
        known = load_membership(folder)
        save_membership(folder, dataclasses.replace(known, index_issued_ms=net.NOW_MS, proxy=PROXY, keys_made_ms=7))
        return Identity(*arguments)

    monkeypatch.setattr(members, "Identity", waited)
    ways = []
    with Member(folder, lambda known: ways.append(known.proxy) or wire, clock_ms=lambda: net.NOW_MS) as one:
        one.task()  # notes the approval
    kept = load_membership(folder)
    assert ways == [PROXY]
    assert (kept.state, kept.index_issued_ms, kept.proxy, kept.keys_made_ms) == ("approved", net.NOW_MS, PROXY, 7)


@pytest.mark.parametrize(("given", "kept"), [(PROXY, PROXY), ("", ""), (None, "http://old:3128")])
def test_a_way_that_is_given_anew_is_kept(joined, folder, coordinator, net, given, kept):
    """`--proxy` says "from now on"; what else was learned of the federation stays, and nobody is asked."""
    save_membership(folder, dataclasses.replace(joined, proxy="http://old:3128", index_issued_ms=net.NOW_MS))
    asked = len(coordinator.requests)
    found = enrol(folder, coordinator.invite(), coordinator, proxy=given, own_ca=True, clock_ms=lambda: net.NOW_MS)
    assert found == load_membership(folder) and len(coordinator.requests) == asked
    assert (found.proxy, found.own_ca, found.index_issued_ms, found.fingerprint) == (
        kept, True, net.NOW_MS, joined.fingerprint,
    )  # fmt: skip


@pytest.mark.parametrize("calls", [1, 40])
def test_a_device_restored_from_a_recent_image_goes_on_at_once(joined, folder, coordinator, net, tmp_path, calls):
    """docs/security.md, replay window: numbers that it used inside the window. Up to eight syncs failed before."""

    def sync():
        with Member(folder, lambda _: coordinator, clock_ms=lambda: net.NOW_MS) as one:
            for _ in range(calls):
                assert one.task().round == 1

    sync()
    shutil.copytree(folder, tmp_path / "image")
    for _ in range(3):
        sync()
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "image", folder)
    for _ in range(3):
        sync()
