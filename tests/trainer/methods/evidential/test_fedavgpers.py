"""FedAvgPers (arXiv 2411.10071, Table 1): FedAvg to the end, then every site fine-tunes and sends nothing."""

import numpy as np
import pytest
from tests.trainer.methods.conftest import Exchange, play, told

from edgefl_trainer.contract import Phase, State
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import evidential
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS

HYPER = {"batch": 4, "lr_head": 2e-3}


def both(**hyper: object):
    return build(METHODS["fedavg"], {**HYPER, **hyper}), build(METHODS["fedavgpers"], {**HYPER, **hyper})


@pytest.fixture
def federation(make_task, make_site):
    task = make_task(rounds=2)
    return task, {s: make_site(task, s, seed=i, count=8 + 4 * i) for i, s in enumerate("ab")}


@pytest.mark.parametrize("hyper", [{}, {"share": "b"}, {"kd": True}], ids=str)
def test_the_averaged_model_is_fedavgs_and_fine_tuning_is_one_more_round(hyper, federation):
    """Bit for bit: the server ends where FedAvg's does, and each site where FedAvg's round R + 1 would take it."""
    task, sites = federation
    plain, method = both(**hyper)
    server, states = play(plain, task, sites)
    found, personal = play(method, task, sites)
    assert found.digest() == server.digest()
    further = Phase("train", task.rounds + 1)
    broadcasts = plain.broadcast(server, further, sorted(sites))
    for name, site in sites.items():
        longer, _ = plain.local_round(site, states[name], stamped(broadcasts[name], further, task.rounds))
        predictor = method.predictor(site, personal[name], told(method, found, task, name))
        trained = plain.recipe.trained
        assert set(trained) <= set(predictor.tensors)
        for tensor in trained:
            np.testing.assert_array_equal(predictor.tensors[tensor], longer.arrays[tensor])
            np.testing.assert_array_equal(personal[name].arrays[tensor], longer.arrays[tensor])
        averaged = plain.predictor(site, states[name], told(plain, server, task, name))
        assert predictor.module.options == averaged.module.options
        for tensor in set(averaged.tensors) - set(trained):  # prior, statistics, temperature
            np.testing.assert_array_equal(predictor.tensors[tensor], averaged.tensors[tensor])
        assert not np.array_equal(predictor.tensors["prompts.b"], averaged.tensors["prompts.b"])


@pytest.mark.parametrize(("final_epochs", "count"), [(0, 2), (3, 3)])
def test_the_length_of_the_fine_tuning_can_be_named(final_epochs, count, make_task, make_site, monkeypatch):
    """docs/methods.md 4.1: one round's worth unless named; the annealing clock goes on from R·E either way."""
    task = make_task(rounds=2, epochs=2)
    weights, loss = [], evidential.evidential_loss
    monkeypatch.setattr(evidential, "evidential_loss", lambda e, t, w, kl: weights.append(kl) or loss(e, t, w, kl))
    play(build(METHODS["fedavgpers"], {"batch": 12, "final_epochs": final_epochs}), task, {"a": make_site(task)})
    assert weights == pytest.approx([t / 10 for t in range(4 + count)])


def test_a_length_out_of_range_is_told():
    with pytest.raises(SettingError, match="final_epochs is -1; allowed: 0"):
        build(METHODS["fedavgpers"], {"final_epochs": -1})


@pytest.mark.parametrize("kd", [False, True])
def test_the_last_phase_sends_nothing(kd, federation):
    task, sites = federation
    _, method = both(kd=kd)
    seen: list[Exchange] = []
    play(method, task, sites, watch=seen.append)
    assert seen[-1].phase == Phase("final", task.rounds + 1)
    for reply in seen[-1].replies.values():
        assert not reply.arrays and not reply.scalars
    assert all(reply.arrays for exchange in seen[:-1] for reply in exchange.replies.values())


def test_before_it_is_fine_tuned_a_site_scores_with_the_averaged_model(federation):
    task, sites = federation
    plain, method = both()
    server, _ = play(plain, task, sites)
    for state in (State(), play(plain, task, sites)[1]["a"]):
        found = method.predictor(sites["a"], state, told(method, server, task, "a"))
        for name in plain.shared(task):
            np.testing.assert_array_equal(found.tensors[name], server.arrays[name])
