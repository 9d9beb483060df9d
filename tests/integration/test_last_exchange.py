"""FedCLF's last exchange with `bn=local`, of devices and GPU sites together: docs/methods.md 2.5 (`bn=local`), FedBN.

The encoder is one matrix on mean colours (`contrast_lab`); the judge is the coordinator's own.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.edge_client.learning.contrast_lab import contrast_bundle, contrast_plan

from edgefl_client.learning.fedclf import FedCLFLearner
from edgefl_client.learning.learner_table import learner_for
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.own_pictures import Dealt
from edgefl_client.learning.picture_rows import PreparedRows
from edgefl_client.learning.round_learner import Circumstances, PointFile
from edgefl_coordinator.rounds.judging import beside_the_average, judge
from edgefl_protocol import Payload
from edgefl_trainer.contract import Examples, Phase, Site, State, Task
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import load_backbone

FINAL, ROUNDS, PICTURES = Phase("final", 3), 2, 6


def learned(seed: int) -> dict[str, np.ndarray]:
    """What a member of either kind remembers after its last train round: Q_l, and its batch norm."""
    rng = np.random.default_rng(seed)
    bank = rng.normal(size=(10, 128))
    unit = (bank / np.linalg.norm(bank, axis=1, keepdims=True)).astype(np.float32)
    mean = rng.normal(size=3).astype(np.float32)
    return {"bank": unit, "backbone.mean": mean, "backbone.seen": np.asarray(seed, np.int64)}


@pytest.fixture
def reply_of(lab: SimpleNamespace, tmp_path: Path):
    """Makes the reply of a device, or of a GPU site, by its own half."""
    plan = contrast_plan(bn="local", momentum_encoder="averaged")
    images = np.zeros((PICTURES, 24, 24, 3), np.uint8)
    rows = PreparedRows(images, np.zeros(PICTURES, np.int64), tuple(f"{index:064x}" for index in range(PICTURES)))
    around = Circumstances(points=PointFile(tmp_path / "point"), options=TrainOptions(threads=1))
    device = learner_for(contrast_bundle(lab, plan), Dealt(rows, rows.take(np.zeros(PICTURES, np.bool_))), around)
    assert isinstance(device, FedCLFLearner)
    spec = load_backbone("cnn:test_resnet", image_px=36, seed=0).spec
    task = Task(name="pixels", classes=("none",), backbone=spec, rounds=ROUNDS, epochs=1, seed=0)
    seen = Examples(images, np.full(PICTURES, -1), np.arange(PICTURES))
    site = Site(name="gpu", task=task, backbone=None, train=seen, tune=seen, unlabelled=seen)
    collect = stamped(Payload({}, {}), FINAL, ROUNDS)

    def make(name: str, state: dict[str, np.ndarray]) -> Payload:
        if name.startswith("device"):
            return device.local_round(state, collect, lambda facts: None)[1]
        new, reply = build(METHODS["fedclf"], {"bn": "local"}).local_round(site, State(state), collect)
        return Payload(reply.arrays, {**reply.scalars, "site_sha256": new.digest()})  # as the engine adds it

    return make


@pytest.mark.parametrize(
    "names",
    [("device-1", "gpu-1"), ("device-1", "device-2", "gpu-1"), ("device-1", "gpu-1", "gpu-2")],
    ids=["one of each", "more devices", "more GPU sites"],
)
def test_batch_norm_of_devices_and_gpu_sites_is_averaged_together(reply_of, names) -> None:
    """Both halves send the same arrays, whichever are more: nobody is refused, and no round waits for a majority."""
    method, states = build(METHODS["fedclf"], {"bn": "local"}), {name: learned(i) for i, name in enumerate(names)}
    replies = {name: reply_of(name, state) for name, state in states.items()}
    server = State({"backbone.mean": np.zeros(3, np.float32), "backbone.seen": np.asarray(0, np.int64)})
    verdict = judge(
        replies,
        dict.fromkeys(names, stamped(Payload({}, {}), FINAL, ROUNDS)),
        lambda chosen: method.aggregate(server, FINAL, chosen),
        quorum=len(names),
        beside=beside_the_average(method.travels, "final"),
    )
    assert not verdict.refused and not verdict.problem
    mean = np.mean([state["backbone.mean"] for state in states.values()], axis=0)
    np.testing.assert_allclose(verdict.result.arrays["backbone.mean"], mean, rtol=1e-6)
