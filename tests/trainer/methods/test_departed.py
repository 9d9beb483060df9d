"""A site that was shut out leaves the server's state, for every method of the table: docs/security.md 4."""

import pytest
from tests.trainer.methods.conftest import play
from tests.trainer.methods.test_conformance import backbone, small

from edgefl_protocol.rules.maps import maps_in_broadcast
from edgefl_trainer.contract import Phase, State
from edgefl_trainer.engine.handout import without_sites
from edgefl_trainer.engine.hyper_parameters import hyper_types
from edgefl_trainer.methods import METHODS

__all__ = ["backbone"]  # a fixture: two blocks
GONE, STAYS = "north-7", "ward.north-7"  # one name ends as the other does
KEEP_BY_SITE = {"fedclf", "feddistill", "fedevprompt", "pfedpg", "pfl-vqa"}  # their server, something of each site
MAY_SHARE_MAPS = sorted(name for name, kind in METHODS.items() if "kd" in hyper_types(kind))


def entries(state: State) -> set[str]:
    return {*state.arrays, *state.values}


@pytest.mark.parametrize(
    ("name", "hyper"), [*((name, {}) for name in sorted(METHODS)), *((name, {"kd": True}) for name in MAY_SHARE_MAPS)]
)
def test_what_came_from_a_site_goes_with_it(name, hyper, make_task, make_site) -> None:
    """Every entry that is named after the site is dropped; those of the other site and of all stay."""
    task, method = make_task(), small(name, **hyper)
    both, _ = play(method, task, {site: make_site(task, site, count=8) for site in (GONE, STAYS)})
    left = without_sites(method, both, [GONE])
    assert not {entry for entry in entries(left) if entry.endswith(GONE) and not entry.endswith(STAYS)}
    assert entries(left) >= {entry for entry in entries(both) if not entry.endswith(GONE) or entry.endswith(STAYS)}
    assert method.broadcast(left, Phase("final", task.rounds + 1), [STAYS, "new"]).keys() == {STAYS, "new"}
    kept = name in KEEP_BY_SITE or "kd" in hyper
    assert any(entry.endswith(STAYS) for entry in entries(left)) == kept
    assert (entries(left) < entries(both)) == kept


@pytest.mark.parametrize(("name", "hyper"), [("fedevprompt", {}), *((name, {"kd": True}) for name in MAY_SHARE_MAPS)])
def test_maps_of_a_site_that_left_are_handed_to_nobody(name, hyper, make_task, make_site) -> None:
    """A newcomer gets the maps of the site that is still there, and no others."""
    task, method = make_task(), small(name, **hyper)
    both, _ = play(method, task, {site: make_site(task, site, count=8) for site in (GONE, STAYS)})
    phase = Phase("final", task.rounds + 1)
    before = maps_in_broadcast(method.broadcast(both, phase, ["new"])["new"].arrays)
    after = maps_in_broadcast(method.broadcast(without_sites(method, both, [GONE]), phase, ["new"])["new"].arrays)
    assert 0 < len(after) < len(before)
