"""Every method in a live federation: the coordinator's worker and the sites of `edgefl-train join`, without a network.

One suite over METHODS (docs/design.md 4: engines run a method through a `SiteRunner`, same seed, same digest); what a
new method has to do for it is nothing. The network between the two halves is `test_sites`.
"""

from pathlib import Path

import pytest
import torch

from edgefl_coordinator.founding.task import task_of_run
from edgefl_coordinator.rounds.jobs import make_job
from edgefl_coordinator.rounds.worker import run_job
from edgefl_coordinator.settings import CoordinatorSettings, settings_from_table
from edgefl_exchange.delivery import Delivery
from edgefl_protocol import Payload, digest, state_digest
from edgefl_protocol.messages.requests import TaskReply
from edgefl_trainer.engine import run as engine
from edgefl_trainer.engine.display import RunPace
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.engine.settings import resolve
from edgefl_trainer.errors import FederationRefused
from edgefl_trainer.live.exchanges import Exchanges
from edgefl_trainer.live.final_results import write_results
from edgefl_trainer.live.site_work import SiteOptions, prepare
from edgefl_trainer.methods import METHODS

pytestmark = pytest.mark.slow

SITES = ("site-1", "site-2")
DATA = "lesions:sites=2,images=40,px=36"
NOTHING_TO_JOIN = {"random-init", "pfl-vqa"}  # no phase; a live federation carries no questions
EXTRA: dict[str, list[str]] = {"fedclf": ["batch=8"], "fedmae": ["batch=8"]}


def settings_of(run: Path) -> CoordinatorSettings:
    """The coordinator's, made from a finished run."""
    task, rounds = task_of_run(run, [])
    return settings_from_table(
        {
            "federation": "skin", "public_url": "https://127.0.0.1:1", "task": task,
            "rounds": {"count": rounds, "min_cohort": 1, "allow_small_cohort": True},
        }
    )  # fmt: skip


def told_by(settings: CoordinatorSettings, exchanges: int, state_sha256: str = "") -> TaskReply:
    """The signed task, as it comes out of its message."""
    task = settings.task
    reply = TaskReply(
        method=task.method, task=task.name, line=task.line, classes=task.classes, rounds=exchanges, round=1,
        phase="train", state="open", deadline_ms=0, tokens=0, maps_per_class=0, quorum_min=2, quorum_target=2,
        max_reply_bytes=2**30, replied=False, settings=task.settings, train_rounds=settings.rounds.count,
        epochs=task.epochs, seed=task.seed, travels=task.travels, backbone=task.backbone, state_sha256=state_sha256,
    )  # fmt: skip
    return TaskReply.from_payload(Payload.from_bytes(reply.to_payload().to_bytes()))


class Federation:
    """A coordinator's worker and two sites, whose messages are files."""

    def __init__(self, folder: Path, settings: CoordinatorSettings) -> None:
        self.folder, self.settings = folder, settings
        begun = run_job(make_job(settings, "start", 0, sites=SITES, order_key="ab" * 32))
        self.phases, self.state, self.broadcasts = begun.phases, begun.state, begun.broadcasts
        self.told = told_by(settings, len(self.phases))
        self.sites = {}
        for name in SITES:
            work = prepare(self.told, SiteOptions(data=(DATA,), site=name, device="cpu"))
            (folder / name).mkdir()
            self.sites[name] = Exchanges(work, folder / name, RunPace(work.method.phases(work.task.rounds), {name: 1}))

    def exchange(self, number: int) -> None:
        """One exchange of both, and its aggregation."""
        replies = {}
        for name, site in self.sites.items():
            broadcast = Payload.from_bytes(self.broadcasts[name], 2**30)
            site.judged(broadcast)
            reply = site.learned(number, broadcast).reply
            site.settled(Delivery(idem="0" * 32, round=number, outcome="accepted", bytes=0))
            replies[name] = self._file(f"reply-{name}", reply.to_bytes())
        job = make_job(
            self.settings, "aggregate", number, sites=SITES, state=self._file("state", self.state), replies=replies,
            order_key="ab" * 32,
        )  # fmt: skip
        made = run_job(job)
        assert not made.problem and not made.refused
        self.state, self.broadcasts = made.state, made.broadcasts

    def _file(self, name: str, data: bytes) -> str:
        (self.folder / name).write_bytes(data)
        return str(self.folder / name)


@pytest.mark.parametrize("method", sorted(METHODS.keys() - NOTHING_TO_JOIN))
def test_a_method_is_the_same_live_and_local(method: str, tmp_path: Path) -> None:
    """Digest of server and sites, and every figure of a site's results, are those of the local engine."""
    torch.set_num_threads(1)
    given = {"data": (DATA,), "preset": "tiny", "rounds": 1, "epochs": 1, "backbone": "tiny", "image_px": 36}
    settings = resolve(method, {**given, "device": "cpu"}, None, EXTRA.get(method, []))
    local = engine.run(settings, tmp_path / "local", resume=False)
    live = Federation(tmp_path, settings_of(tmp_path / "local"))
    for number in range(1, len(live.phases) + 1):
        live.exchange(number)
    digests = {name: site.state.digest() for name, site in live.sites.items()}
    server = Payload.from_bytes(live.state, 2**30)
    assert state_digest(digest(server.arrays), digests) == local["state_sha256"]
    name, site = "site-1", live.sites["site-1"]
    last = Payload.from_bytes(live.broadcasts[name], 2**30)
    assert last.scalars["phase"] == "final"
    summary = write_results(site.work, tmp_path / name, live.told, "skin", site.state, last)
    assert summary["sites"][name] == local["sites"][name]
    assert {"bytes_up_per_round", "seconds", "partition_sha256", "site_sha256"} <= summary.keys()
    (tmp_path / name / "config.toml").write_text(site.work.settings.to_toml())
    assert open_run(tmp_path / name).sites == ((name,) if open_run(tmp_path / "local").sites else ())
    if method != "local-cl":  # the mean of networks that sites learned apart: a live site knows its own
        assert summary["backbone_sha256"] == local["backbone_sha256"]


def test_what_exchanges_nothing_is_refused(tmp_path: Path) -> None:
    """docs/design.md 5: one sentence, exit status 3."""
    given = {"data": (DATA,), "preset": "tiny", "backbone": "tiny", "image_px": 36, "device": "cpu"}
    engine.run(resolve("random-init", given, None, []), tmp_path / "local", resume=False)
    with pytest.raises(FederationRefused, match="exchanges nothing"):
        prepare(told_by(settings_of(tmp_path / "local"), 1), SiteOptions(data=(DATA,), site="site-1"))
