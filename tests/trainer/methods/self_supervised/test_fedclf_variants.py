"""What each variant of FedCLF contrasts with and sends: arXiv 2208.11278 section III; docs/methods.md 2.2."""

import dataclasses
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.rdp import RdpAccountant
from tests.trainer.methods.conftest import Exchange, members, play
from torch.nn.functional import normalize

from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.gaussian_noise import told_epsilon
from edgefl_trainer.learning.unlabelled import contrast
from edgefl_trainer.methods import METHODS

K, BATCH = 20, 4


@dataclass(frozen=True)
class Step:
    """One step as the loss sees it, and what was drawn of the others' features after it."""

    keys: list[bytes]
    negatives: list[bytes]
    drawn: list[bytes]


def lines(features) -> list[bytes]:
    """Rows as they travel, in float16, so that they can be compared."""
    return [row.tobytes() for row in np.asarray(features).astype(np.float16)]


@pytest.fixture
def steps(monkeypatch) -> list[Step]:
    """Every step of all sites, in order."""
    found: list[Step] = []
    plain_loss, plain_draw = contrast.contrastive_loss, contrast.Remote.draw

    def loss(queries, keys, negatives, temperature):
        found.append(Step(lines(keys), lines(negatives), []))
        return plain_loss(queries, keys, negatives, temperature)

    def draw(self, count):
        rows = plain_draw(self, count)
        found[-1].drawn.extend(lines(rows))
        return rows

    monkeypatch.setattr(contrast, "contrastive_loss", loss)
    monkeypatch.setattr(contrast.Remote, "draw", draw)
    return found


@pytest.mark.parametrize("negatives", ["remote", "both"])
def test_queues_are_the_papers_at_every_step_of_two_rounds(negatives, make_task, make_site, steps):
    """Eq. 2 to 6 with collections.deque: Q_l and Q_CL of two sites, none of whose banks is full at first.

    FE+Neg (`remote`): Q_CL := Q_r, and B of Q_r enter each step. FE (`both`): Q_CL := Q_l of the most K, and B local
    features, then B of Q_r enter. Q_l takes the local ones and lives on: what came first leaves first in the next
    round. Sent are the rows of the round alone, oldest first (III-A): K is more than a site's images.
    """
    task, counts = make_task(rounds=2), {"a": 16, "b": 12}
    method = build(METHODS["fedclf"], {"batch": BATCH, "queue": K, "negatives": negatives})
    exchanges: list[Exchange] = []
    play(method, task, members(task, make_site, **counts), watch=exchanges.append)
    warm, *rounds = exchanges
    banks = {name: deque(lines(reply.arrays["features"]), maxlen=K) for name, reply in warm.replies.items()}
    assert {name: len(bank) for name, bank in banks.items()} == counts
    rest = iter(steps)
    for exchange in rounds:
        for name, count in counts.items():
            received = torch.from_numpy(exchange.broadcasts[name].arrays["remote"].astype(np.float32))
            remote, bank = lines(normalize(received, dim=1)), banks[name]
            queue = deque(bank, maxlen=K) if negatives == "both" else deque(remote, maxlen=len(remote))
            made = deque(maxlen=K)
            for _ in range(count // BATCH):
                step = next(rest)
                assert Counter(step.negatives) == Counter(queue)
                assert len(step.keys) == len(step.drawn) == BATCH and set(step.drawn) <= set(remote)
                bank.extend(step.keys)
                made.extend(step.keys)
                queue.extend([*step.keys, *step.drawn] if negatives == "both" else step.drawn)
            assert lines(exchange.replies[name].arrays["features"]) == list(made) != list(bank)
    assert next(rest, None) is None


def test_several_epochs_are_all_of_the_round(make_task, make_site, steps):
    """Two epochs of six images make twelve rows of the round; of a bank of ten the newest ten."""
    for queue, sent in ((20, 12), (10, 10)):
        steps.clear()
        method = build(METHODS["fedclf"], {"batch": BATCH, "queue": queue})
        task, exchanges = make_task(rounds=2, epochs=2), list[Exchange]()
        play(method, task, members(task, make_site, a=6, b=6), watch=exchanges.append)
        keys = [key for step in steps for key in step.keys][-12:]  # those of b in the last round
        assert lines(exchanges[-1].replies["b"].arrays["features"]) == keys[-sent:]


@pytest.mark.parametrize("name", ["fedmoco", "fedrotation", "fedclf"])
def test_sgds_momentum_begins_a_round_at_zero_or_goes_on(name, make_task, make_site):
    """PyTorch's SGD, v = 0.9 v + d and theta = theta - rate * v, one step a round: two runs that differ in nothing else
    end 0.9 * v_1 times the second rate apart. `reset` and `keep` of `optimizer_state`; docs/methods.md 2.5."""
    task, lr, ends, watched = make_task(rounds=2), 0.03, {}, "head.weight" if name == "fedrotation" else "head.0.weight"
    for state in ("reset", "keep"):
        given = {"batch": 8, "lr": lr, "momentum": 0.9, "optimizer_state": state}
        given |= {} if name == "fedrotation" else {"queue": 8}
        method, points = build(METHODS[name], given), []

        begun = method.start(task, ["a"]).arrays[watched]
        _, states = play(method, task, members(task, make_site, a=8), watch=points.append)
        sent = [exchange.replies["a"].arrays[watched] for exchange in points if exchange.phase.kind == "train"]
        ends[state] = [value.astype(np.float64) for value in (begun, *sent)]
        kept = [n for n in states["a"].arrays if n.startswith("optimizer.momentum_buffer.")]
        assert bool(kept) == (state == "keep")
    np.testing.assert_array_equal(ends["reset"][1], ends["keep"][1])
    first, second = lr, lr * 0.5 * (1 + np.cos(np.pi * 1 / 2))
    velocity = (ends["keep"][0] - ends["keep"][1]) / first
    np.testing.assert_allclose(ends["reset"][2] - ends["keep"][2], second * 0.9 * velocity, rtol=1e-3, atol=1e-7)
    assert abs(velocity).max() > 1e-3


def test_what_all_releases_cost_is_told_before_the_first(make_task, make_site):
    """docs/methods.md 2.2, by dp-accounting: noise multiplier sigma/2, R + 1 releases, for the warm phase is one."""
    task, told, exchanges = make_task(rounds=2), list[dict](), list[Exchange]()
    site = dataclasses.replace(make_site(task, count=6), report=told.append)
    method = build(METHODS["fedclf"], {"batch": BATCH, "queue": K, "dp_noise": 4.0})
    _, states = play(method, task, {"a": site}, watch=exchanges.append)
    assert sum("features" in exchange.replies["a"].arrays for exchange in exchanges) == 3
    one, three = (RdpAccountant().compose(GaussianDpEvent(4.0 / 2), count).get_epsilon(1e-5) for count in (1, 3))
    warning = next(facts["warning"] for facts in told if "epsilon" in facts.get("warning", ""))
    assert f"cost epsilon {told_epsilon(one)} a round and {told_epsilon(three)} in all, at delta 1e-05" in warning
    assert states["a"].values["epsilon_spent"] == pytest.approx(three)
