"""The slow encoder over rounds: docs/methods.md 2.5; MoCo (arXiv 1911.05722); FedBN (arXiv 2102.07623)."""

import numpy as np
import pytest

from edgefl_protocol.rules.slow_encoder import key_momentum, leaving, local_steps, round_begins, staying

NETWORK = ("conv.weight", "bn.weight", "bn.running_mean")
NORM = ("bn.weight", "bn.running_mean")


@pytest.mark.parametrize(
    ("asked", "steps", "momentum"), [(0, 1, 0.99), (0, 19_999, 0.99), (0, 20_000, 0.999), (0.5, 10**9, 0.5)]
)
def test_m_follows_the_length_of_the_run(asked: float, steps: int, momentum: float) -> None:
    """docs/methods.md 2.5: 0.99 below 20,000 local steps, 0.999 from there on; what is asked for holds."""
    assert key_momentum(asked, steps) == momentum


def test_a_runs_steps_are_those_of_all_rounds() -> None:
    """100 rounds of 2 epochs of 100 batches are a long run, those of 99 a short one."""
    assert (local_steps(100, 2, 100), local_steps(100, 2, 99)) == (20_000, 19_800)


def slow(*names: str) -> set[str]:
    return {f"momentum.{name}" for name in names}


LEAVES_AND_STAYS = {  # setting, batch norm that stays → what leaves, what stays
    ("averaged", ()): ({*NETWORK, *slow(*NETWORK)}, set()),
    ("averaged", NORM): ({"conv.weight", *slow("conv.weight")}, {*NORM, *slow(*NORM)}),
    ("local", ()): (set(NETWORK), slow(*NETWORK)),
    ("local", NORM): ({"conv.weight"}, {*NORM, *slow(*NETWORK)}),
    ("reset", ()): (set(NETWORK), set()),
    ("reset", NORM): ({"conv.weight"}, set(NORM)),
}


@pytest.mark.parametrize("case", LEAVES_AND_STAYS)
def test_what_leaves_and_what_stays(case) -> None:
    """The table of the settings, by hand."""
    setting, kept = case
    leaves, stays = LEAVES_AND_STAYS[case]
    assert set(leaving(NETWORK, kept, setting)) == leaves
    assert set(staying(NETWORK, kept, setting)) == stays


@pytest.mark.parametrize("case", LEAVES_AND_STAYS)
def test_the_next_round_begins_with_what_left_averaged_and_what_stayed(case) -> None:
    """A site's own value is -1, the average 1, the server's start of what never left 0: all that outlives a round is
    there again, each from where it lay."""
    setting, _ = case
    leaves, stays = LEAVES_AND_STAYS[case]
    came = {name: np.float32(0) for name in NETWORK} | {name: np.float32(1) for name in leaves}
    own = {name: np.float32(-1) for name in stays}
    found = round_begins(came, own, setting)
    assert found == {name: -1 if name in stays else 1 for name in leaves | stays}
    if setting == "reset":  # also where a server that changed its mind still hands the slow encoder on
        assert round_begins({**came, "momentum.conv.weight": np.float32(1)}, own, setting) == found
