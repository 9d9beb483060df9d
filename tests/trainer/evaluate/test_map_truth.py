"""Which map is true (docs/methods.md 1.8): chance is refused, an ideal map passes, both ways of hiding count."""

import numpy as np
import pytest

from edgefl_protocol.bundle.shown_map import WAYS
from edgefl_trainer.evaluate.map_truth import LEAST_PICTURES, Changes, chosen, in_lesion, judged

N = 96
LESIONS = [str(index) for index in range(N)]


def changes(marked, random, kept, kept_random, seed=0):
    """Answers that change with these probabilities; of random quarters two a picture."""
    rng = np.random.default_rng(seed)
    return Changes(
        marked=(rng.random(N) < marked).astype(float),
        random=(rng.random((2, N)) < random).mean(axis=0),
        kept=(rng.random(N) < kept).astype(float),
        kept_random=(rng.random((2, N)) < kept_random).mean(axis=0),
    )


def both(one, other=None):
    return {"mean": one, "blur": one if other is None else other}


def test_figures_are_means_and_the_advantage_is_half_of_deletion_and_insertion():
    """By hand: d − r = 1/2 − 1/4, r′ − d′ = 3/4 − 1/4, half their sum 3/8; the smaller way counts."""
    four = Changes(
        marked=np.array([1.0, 1, 0, 0]), random=np.array([0.5, 0.5, 0, 0]),
        kept=np.array([1.0, 0, 0, 0]), kept_random=np.array([1.0, 1, 0.5, 0.5]),
    )  # fmt: skip
    flat = Changes(marked=np.ones(4), random=np.ones(4), kept=np.ones(4), kept_random=np.ones(4))
    found = judged(both(four), list("abcd"))
    assert found.advantage.value == pytest.approx(3 / 8)
    assert vars(found.hidden["mean"]) == {"marked": 0.5, "random": 0.25, "kept": 0.25, "kept_random": 0.75}
    assert judged(both(four, flat), list("abcd")).advantage.value == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_map_of_noise_is_refused(seed):
    """Its quarter is a random quarter: of 20 such maps none may pass, though it answers half of the pictures anew."""
    noise = {way: changes(0.5, 0.5, 0.5, 0.5, seed=10 * seed + place) for place, way in enumerate(WAYS)}
    assert not judged(noise, LESIONS).better_than_chance


def test_an_ideal_map_passes_and_is_chosen():
    ideal, weak = judged(both(changes(0.9, 0.1, 0.0, 0.4)), LESIONS), judged(both(changes(0.5, 0.1, 0.1, 0.4)), LESIONS)
    assert ideal.better_than_chance and weak.better_than_chance
    said = chosen({"attention": weak, "occlusion": ideal}, 49)
    assert (said.shown, said.kind, said.cells, said.pictures) == (True, "occlusion", 49, N)
    assert said.advantage == ideal.advantage


def test_a_map_that_holds_only_by_the_way_it_was_made_with_is_refused():
    """Occlusion hides by the mean colour; where a blur finds nothing, it has found the colour."""
    assert not judged(both(changes(0.9, 0.1, 0.0, 0.4), changes(0.1, 0.1, 0.3, 0.3)), LESIONS).better_than_chance


def test_an_effect_that_nobody_would_notice_is_refused():
    """Certain by insertion, but hiding what it marks changes 4 answers in 96 more: below 1 in 20."""
    sure = np.zeros(N)
    sure[: int(0.045 * N)] = 1
    many = Changes(marked=sure, random=np.zeros(N), kept=np.zeros(N), kept_random=np.ones(N))
    found = judged(both(many), LESIONS)
    assert found.advantage.low > 0.4 and not found.better_than_chance


def test_pictures_of_one_lesion_are_one_finding():
    """The cluster bootstrap: 96 pictures of three lesions leave a wider interval than 96 lesions."""
    one = both(changes(0.5, 0.2, 0.1, 0.3))
    wide, narrow = judged(one, [str(index % 3) for index in range(N)]).advantage, judged(one, LESIONS).advantage
    repeated = {way: Changes(**{name: np.repeat(v[:3], 32) for name, v in vars(c).items()}) for way, c in one.items()}
    spread = judged(repeated, np.repeat(list("abc"), 32).tolist()).advantage
    assert narrow.low < narrow.value < narrow.high
    assert spread.high - spread.low > narrow.high - narrow.low
    assert wide.value == narrow.value


def test_nothing_to_choose_from_and_too_few_pictures_are_said():
    few = both(_ones(LEAST_PICTURES - 1))
    assert chosen({}, None).why == "no_map"
    said = chosen({"rollout": judged(few, LESIONS[: LEAST_PICTURES - 1])}, None)
    assert (said.why, said.pictures, said.kind) == ("few_pictures", LEAST_PICTURES - 1, None)
    at_chance = chosen({"rollout": judged(both(changes(0.3, 0.3, 0.3, 0.3)), LESIONS)}, None)
    assert (at_chance.why, at_chance.kind, at_chance.shown) == ("chance", "rollout", False)


def _ones(count):
    return Changes(marked=np.ones(count), random=np.zeros(count), kept=np.zeros(count), kept_random=np.ones(count))


def test_lesions_outlines_are_a_second_measure():
    """By hand: 4 of 6 marked pixels in a lesion of a quarter of the picture; a picture without one does not count."""
    masks = np.zeros((2, 8, 8), bool)
    masks[0, :4, :4] = True
    marked = np.zeros((2, 8, 8), bool)
    marked[:, 0, :] = True
    marked[0, 0, 6:] = False
    found = in_lesion(marked, [(1, 1), (7, 7)], masks)
    assert (found.marked, found.chance, found.strongest) == (pytest.approx(4 / 6), 0.25, 1.0)
    assert in_lesion(marked[1:], [(1, 1)], masks[1:]) is None
