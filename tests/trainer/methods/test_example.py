"""`examples/fedavg.py`, the first thing to read: it is the algorithm it says it is, and it runs as printed.

Source: McMahan et al., arXiv 1602.05629, algorithm 1; docs/design.md 4.
"""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, State
from edgefl_trainer.method_halves import stamped

FILE = Path(__file__).parents[3] / "examples/fedavg.py"
TRAIN = Phase("train", 1)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fedavg_example", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_fits_on_a_screen_or_two() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 80


def test_a_site_takes_the_gradient_step_of_the_paper(example, make_task, make_site, backbone) -> None:
    """Line 9 of ClientUpdate, w − η∇ℓ: from a head of zeros the softmax is 1/K, so the step is η·mean((y − 1/K) x)."""
    task = make_task()
    site, method = make_site(task, count=12), example.FedAvg()
    sent = stamped(method.broadcast(method.start(task, ["a"]), TRAIN, ["a"])["a"], TRAIN, 1)
    _, reply = method.local_round(site, State(), sent)
    images = torch.from_numpy(site.train.images[site.train.rows])
    with torch.no_grad():
        features = backbone(backbone.normalise(images)).readout("mean", 0).double().numpy()
    missed = np.eye(2)[site.train.targets] - 1 / 2
    np.testing.assert_allclose(reply.arrays["head.weight"], 0.1 * missed.T @ features / 12, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(reply.arrays["head.bias"], 0.1 * missed.mean(axis=0), rtol=1e-4, atol=1e-7)
    assert reply.scalars["n_train"] == 12


def test_the_server_weighs_by_images(example) -> None:
    """Sum_k n_k/n w_k, of numbers that a reader checks in the head."""
    replies = {
        "a": Payload({"head.bias": np.array([1.0, 0.0], np.float32)}, {"n_train": 30}),
        "b": Payload({"head.bias": np.array([5.0, 8.0], np.float32)}, {"n_train": 10}),
    }
    averaged = example.FedAvg().aggregate(State(), TRAIN, replies)
    assert averaged.arrays["head.bias"].tolist() == [2.0, 2.0]


def test_it_runs_and_learns(example, tmp_path, monkeypatch, capsys) -> None:
    """A line a round; after three rounds more pictures are right than the 1 in 4 of a guess among four classes."""
    monkeypatch.setenv("EDGEFL_CACHE", str(tmp_path))
    example.main(rounds=3, images=40)
    found = re.findall(r"^round (\d): accuracy (\d\.\d{3}) of \d+ test pictures$", capsys.readouterr().out, re.M)
    assert [number for number, _ in found] == ["1", "2", "3"]
    assert float(found[-1][1]) > 0.5
