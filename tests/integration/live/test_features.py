"""`edgefl contribute --features` against a real coordinator: commands, TLS, the store, and FedCLF's own server half.

The encoder is one matrix on mean colours (`contrast_lab`), so a round takes milliseconds. Source: docs/decisions/0033.
"""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from sqlalchemy import select
from tests.edge_client.learning.contrast_lab import contrast_bytes, contrast_plan
from tests.integration.live.coordinator import Live
from tests.integration.live.device_federation import edgefl

from edgefl_client.cli import cli
from edgefl_coordinator.store.tables import members, replies
from edgefl_protocol import Payload
from edgefl_trainer.contract import State
from edgefl_trainer.methods.fedclf import FedCLF
from edgefl_trainer.models.backbones import load_backbone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # of the server in a thread, when it is stopped
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NETWORK = {
    "head.weight": np.random.default_rng(4).normal(size=(128, 3)).astype(np.float32),
    "backbone.mean": np.full(3, 0.5, np.float32),
    "backbone.seen": np.asarray(3, np.int64),
}
PICTURES = {"learner-1": 6, "learner-2": 5, "camera": 4}


class fedclf(FedCLF):
    """FedCLF whose network is the one of `contrast_lab`; members are told the name of the class."""

    def start(self, *_: Any) -> State:
        """The given values."""
        return State(dict(NETWORK))


@pytest.fixture
def there(tmp_path: Path, lab: SimpleNamespace):
    """A coordinator with a published bundle, and three approved devices in the warm exchange."""
    spec = asdict(load_backbone("cnn:test_resnet", image_px=36, seed=0).spec)
    facts = {**spec, "image_px": 24, "mean": [0.5] * 3, "std": [0.5] * 3}
    task = {
        "method": f"{__name__}:fedclf", "name": "all", "classes": list(lab.CLASSES), "epochs": 1, "seed": 7,
        "shares_maps": False, "travels": ["features", "weights"], "backbone": facts,
        "settings": {"view_px": 16, "projection": "linear", "momentum_encoder": "reset", "batch": 4, "queue": 10},
    }  # fmt: skip
    coordinator = Live(tmp_path / "coordinator", task, 2)
    with coordinator.serving() as live:
        (tmp_path / "model.edgefl").write_bytes(contrast_bytes(lab, contrast_plan()))
        live.operate("publish", path=str(tmp_path / "model.edgefl"), trust=[lab.SIGNER.public.hex()])
        for number, (name, count) in enumerate(PICTURES.items()):
            home = tmp_path / name
            invite = live.operate("invite", name=name, role="device", hours=1)["invite"]
            shown = edgefl(home, "enrol", invite, "--ca", live.ca, "--suite", 1)["fingerprint"]
            live.operate("approve", name=name, fingerprint=shown)
            kinds = ["features"] if name == "camera" else ["features", "weights"]
            for words in (["trust", "add", lab.SIGNER.public.hex()], ["policy", "allow", *kinds]):
                assert CliRunner().invoke(cli, [*words, "--home", str(home)]).exit_code == 0
            edgefl(home, "pull")
            (tmp_path / f"{name}-pictures").mkdir()
            for index in range(count):
                photo = lab.photo(50, 40, (150 + 10 * index + number, 120, 90))
                (tmp_path / f"{name}-pictures" / f"{index}.png").write_bytes(lab.encoded(photo))
        live.move_on()
        yield live
    coordinator.coordinator.store.close()


def test_features_of_a_camera_reach_the_learners(there: Live, tmp_path: Path) -> None:
    """What the dry run shows is what arrives, to the byte; it closes no round, and each learner receives it next."""
    learners, camera = [tmp_path / name for name in PICTURES if name != "camera"], tmp_path / "camera"
    for home in learners:
        sent = edgefl(home, "sync", "--pictures", f"{home}-pictures", "--threads", 1)["sent"]
        assert [one["outcome"] for one in sent] == ["accepted"]
    there.move_on()
    assert edgefl(camera, "sync", "--no-learn")["round"]["phase"] == "train"
    words = ("contribute", "--features", f"{camera}-pictures", "--threads", 1)
    shown = edgefl(camera, *words, "--dry-run")
    assert edgefl(camera, *words)["sha256"] == shown["sha256"] and shown["features"] == PICTURES["camera"]
    [sent] = edgefl(camera, "sync", "--no-learn")["sent"]
    assert (sent["outcome"], sent["round"]) == ("accepted", 2)
    status = there.operate("status")
    assert (status["round"], status["replies"], status["contributions"]) == (2, 0, 1)
    with there.coordinator.store.transaction() as connection:
        stored = select(replies.c.sha256, replies.c.blob).join(members, members.c.skid == replies.c.skid)
        sha256, blob = connection.execute(stored.where(members.c.name == "camera")).one()
    arrived = Payload.from_bytes(there.coordinator.store.get_blob(blob))
    assert sha256 == shown["sha256"] and list(arrived.arrays) == ["features"]
    for home in learners:
        assert edgefl(home, "sync", "--threads", 1)["learning"]["state"] == "done"
    there.move_on()
    for home in learners:
        got = edgefl(home, "sync", "--no-learn")
        assert (got["round"]["number"], got["round"]["state"]) == (3, "open"), json.dumps(there.operate("status"))
        received = Payload.from_bytes(Path(got["broadcast"]["file"]).read_bytes()).arrays["remote"]
        rows = {row.tobytes() for row in received}
        assert {row.tobytes() for row in arrived.arrays["features"]} < rows
