"""The numbers of the public recipes: MoCo v2 (arXiv 2003.04297) and its code; SimCLR (arXiv 2002.05709) appendix A."""

import pytest

from edgefl_protocol.rules import view_recipes as rules


@pytest.mark.parametrize(("side", "kernel"), [(64, 7), (32, 3), (224, 23), (16, 3)])
def test_the_blur_is_a_tenth_of_the_view_and_odd(side: int, kernel: int) -> None:
    """SimCLR, appendix A: 10 % of the side."""
    assert rules.blur_kernel(side) == kernel


def test_the_recipes_are_the_public_ones() -> None:
    """facebookresearch/moco main_moco.py, `--aug-plus`; SimCLR with strength 1 for its colours' 0.8 and 0.2."""
    assert rules.SMALLEST_CROP == {"moco-v2": 0.2, "simclr": 0.08, "rotation": 0.2}
    assert rules.COLOURS == {"moco-v2": (0.4, 0.4, 0.4, 0.1), "simclr": (0.8, 0.8, 0.8, 0.2)}
    assert (rules.JITTERED, rules.GREYED, rules.BLURRED, rules.MIRRORED) == (0.8, 0.2, 0.5, 0.5)
    assert rules.SIGMA == (0.1, 2.0)
