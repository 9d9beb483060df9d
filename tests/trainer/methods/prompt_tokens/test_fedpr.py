"""FedPR: what a site learns lies in the null space of the prompts it was sent (docs/methods.md 5.4, tests 8)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import null_space as scipy_null_space
from tests.trainer.methods.conftest import play

from edgefl_protocol import Payload
from edgefl_trainer.contract import State
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.errors import SettingError
from edgefl_trainer.methods import METHODS
from edgefl_trainer.methods.fedpr import null_space

PAPER = {"readout": "cls", "head_norm": "none", "augment": "none", "batch": 4}


def random_prompts(seed: int, tokens: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(tokens, width))


def one_round(method, site, round_, state=None):
    sent = method.start(site.task, ["a"])
    scalars = {"phase": "train", "round": round_, "rounds": 9, "readout": "cls"}
    new, reply = method.local_round(site, state or State(), Payload(sent.arrays, scalars))
    before = sent.arrays["prompts.s"][0]
    return before, reply.arrays["prompts.s"][0] - before, new


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 6), width=st.integers(7, 30))
def test_the_projector_is_that_of_the_null_space(seed, tokens, width):
    prompts = random_prompts(seed, tokens, width)
    kernel = scipy_null_space(prompts)
    found = null_space(prompts)
    np.testing.assert_allclose(found, kernel @ kernel.T, atol=1e-9)
    np.testing.assert_allclose(found @ prompts.T, 0, atol=1e-9)
    normed = null_space(prompts, fro_norm=True)
    np.testing.assert_allclose(normed, found / np.sqrt(width - tokens), atol=1e-9)


@pytest.mark.parametrize("ratio", [0.8, 0.5])
def test_the_ratio_keeps_that_share_of_directions(ratio):
    """The published code: SVD of P'P, drop the first int(d(1 − ratio)) right vectors; with n below that, T·P' = 0."""
    prompts = random_prompts(1, 4, 40)
    found = null_space(prompts, ratio)
    np.testing.assert_allclose(found @ found, found, atol=1e-9)  # a projector
    assert round(np.trace(found)) == 40 - int(40 * (1 - ratio))
    np.testing.assert_allclose(found @ prompts.T, 0, atol=1e-7)
    few = null_space(prompts, 0.95)  # drops 2 of 4 directions of P: those along which it is largest
    _, _, directions = np.linalg.svd(prompts)
    np.testing.assert_allclose(few @ directions[:2].T, 0, atol=1e-6)
    np.testing.assert_allclose(few @ directions[2:4].T, directions[2:4].T, atol=1e-6)


@pytest.mark.parametrize("hyper", [{}, {"weight_decay": 0.1}, {"ratio": 0.5}, {"fro_norm": True}])
def test_a_round_moves_prompts_orthogonally_to_what_was_sent(hyper, make_task, make_site):
    """(P~ − P) P' = 0 after all steps of a round, momentum and weight decay included."""
    method = build(METHODS["fedpr"], {**PAPER, "n": 3, **hyper})
    sent, change, _ = one_round(method, make_site(make_task()), round_=2)
    lengths = np.linalg.norm(sent, axis=1)[None] * np.linalg.norm(change, axis=1)[:, None]
    assert np.abs(change).max() > 1e-4
    assert np.abs(change @ sent.T / lengths).max() < 1e-4


def test_the_first_round_is_free_and_the_head_always(make_task, make_site):
    """There is nothing to protect in random prompts; T touches no head."""
    site = make_site(make_task())
    method = build(METHODS["fedpr"], {**PAPER, "n": 3})
    sent, change, first = one_round(method, site, round_=1)
    assert np.abs(change @ sent.T).max() > 1e-3 * np.linalg.norm(change) * np.linalg.norm(sent)
    _, _, second = one_round(method, site, round_=2)
    assert not np.array_equal(first.arrays["prompts.s"], second.arrays["prompts.s"])
    assert np.abs(second.arrays["head.weight"] - method.start(site.task, ["a"]).arrays["head.weight"]).max() > 1e-4


def test_the_first_round_is_fedvpts(make_task, make_site):
    task = make_task(rounds=1)
    ours, _ = play(build(METHODS["fedpr"], {**PAPER, "n": 3}), task, {"a": make_site(task)})
    plain, _ = play(build(METHODS["fedvpt"], {**PAPER, "n": 3}), task, {"a": make_site(task)})
    assert ours.digest() == plain.digest()


def test_velocity_stays_at_the_site_across_rounds(make_task, make_site):
    """Kept: a round goes on with what the round before left, and nothing of it is sent. Reset: it starts at rest."""
    site = make_site(make_task())
    kept, reset = (build(METHODS["fedpr"], {**PAPER, "n": 3, "optimizer_state": key}) for key in ("keep", "reset"))
    _, _, state = one_round(kept, site, round_=1)
    assert {"velocity.prompts.s", "velocity.head.weight"} < set(state.arrays)
    _, at_rest, _ = one_round(kept, site, round_=2)
    _, going_on, _ = one_round(kept, site, round_=2, state=state)
    assert not np.array_equal(at_rest, going_on)
    _, forgot, new = one_round(reset, site, round_=2, state=state)
    np.testing.assert_array_equal(forgot, at_rest)
    assert set(new.arrays) == {"prompts.s", "head.weight"}


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_a_share_is_between_0_and_1(ratio):
    with pytest.raises(SettingError, match="allowed: 0"):
        build(METHODS["fedpr"], {"ratio": ratio})
