"""Pictures without evidence: docs/methods.md 1.3."""

import pytest

from edgefl_protocol.rules.dead_evidence import dead_warning


@pytest.mark.parametrize(
    ("share", "round_", "epoch", "told"),
    [(0.51, 1, 1, True), (0.51, 2, 0, True), (1.0, 1, 0, False), (0.5, 3, 1, False), (0.0, 3, 1, False)],
)
def test_it_is_told_above_one_half_and_not_in_the_first_epoch_of_a_run(
    share: float, round_: int, epoch: int, told: bool
) -> None:
    """In that epoch a head may still raise none."""
    warning = dead_warning(share, round_, epoch)
    assert (warning is not None) == told
    assert warning is None or warning.startswith(f"{share:.0%} of the pictures raise no evidence")
