"""GPU sites in a live federation: `edgefl-train join` over TLS on the loopback interface, no process but this one.

The oracle of every digest is the local engine, which never sees a network (docs/design.md 4: same seed, same digest,
whichever engine).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import select
from tests.integration.live.coordinator import Live

from edgefl_coordinator.founding.task import task_of_method, task_of_run
from edgefl_coordinator.rounds import stored_rounds
from edgefl_coordinator.store.tables import replies
from edgefl_coordinator.web.tls import make_development_certificate
from edgefl_exchange.errors import SignedRefusal, Unavailable
from edgefl_exchange.member import Member
from edgefl_exchange.membership import load_membership, save_membership
from edgefl_exchange.outbox import Outbox
from edgefl_export.bundles.assemble import site_model
from edgefl_export.errors import ExportError
from edgefl_protocol.errors import InviteError
from edgefl_trainer.commands.results_text import summary_text
from edgefl_trainer.engine import run as engine
from edgefl_trainer.engine.checkpoint import Checkpoints
from edgefl_trainer.engine.judging.evaluation import evaluate
from edgefl_trainer.engine.local_engine import InProcessSite
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.engine.settings import resolve
from edgefl_trainer.errors import FederationRefused, RunError
from edgefl_trainer.evaluate.no_round import part_lines
from edgefl_trainer.live import Join, SiteOptions, join
from edgefl_trainer.live.exchanges import Exchanges
from edgefl_trainer.live.site_membership import SiteMembership

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # of the server in a thread, when it is stopped
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SITES = ("site-1", "site-2")
DATA = "lesions:sites=2,images=40,px=36"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # digests repeat


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Make and serve coordinators."""
    with ExitStack() as stack:

        def make(task: dict[str, Any], rounds: int, **changes: Any) -> Live:
            made = Live(tmp_path / "coordinator", task, rounds, **changes)
            stack.callback(made.coordinator.store.close)
            return stack.enter_context(made.serving())

        yield make


def call(folder: Path, site: str, invite: str | None = None, ca: Path | None = None, **changes: Any) -> Join:
    """What `edgefl-train join … --once` asks for."""
    options = {"data": (DATA,), "site": site, "device": "cpu", **changes}
    return Join(
        folder=folder, invite=invite, ca=ca, once=True, say=lambda line: None, options=SiteOptions(**options)
    )  # fmt: skip


def enrol(live: Live, folder: Path, name: str, **changes: Any) -> None:
    """Invite, join, compare the fingerprint, approve."""
    invite = live.operate("invite", name=name, role="site", hours=1)["invite"]
    found = join(call(folder / name, name, invite, live.ca, **changes))
    assert (found["state"], found["summary"]) == ("pending", None)
    live.operate("approve", name=name, fingerprint=found["fingerprint"])


def to_the_end(live: Live, folder: Path, names: tuple[str, ...] = SITES, **changes: Any) -> dict[str, Any]:
    """Every site joins, again and again, as from a timer, until all have their results."""
    found: dict[str, Any] = {}
    for _ in range(12):
        live.move_on()
        for name in names:
            found[name] = join(call(folder / name, name, **changes))
        if all(one["summary"] for one in found.values()):
            return found
    raise AssertionError(f"the federation did not end: {found}, {live.operate('status')}")


@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "fedevprompt"])
def test_a_live_federation_ends_with_the_digest_of_the_local_engine(method: str, live, tmp_path: Path) -> None:
    """docs/design.md 4 and 5: same seed, same digest, on this machine or over the network; the folder is a run's."""
    settings = resolve(
        method, {"data": (DATA,), "preset": "tiny", "backbone": "tiny", "image_px": 36, "device": "cpu"}, None, []
    )
    local = engine.run(settings, tmp_path / "local", resume=False)
    there = live(*task_of_run(tmp_path / "local", []))
    for name in SITES:
        enrol(there, tmp_path, name)
    found = to_the_end(there, tmp_path)
    assert there.operate("status")["state_sha256"] == local["state_sha256"]
    for name in SITES:
        summary = found[name]["summary"]
        assert summary["state_sha256"] == local["state_sha256"]
        for figure in ("balanced_accuracy", "auroc", "n_train", "n_test"):
            assert summary["sites"][name][figure] == local["sites"][name][figure], figure
        run = open_run(tmp_path / name)
        assert run.sites == (name,) and run.classes == tuple(local["classes"])
        reference = open_run(tmp_path / "local").predictor(name)
        for tensor, value in run.predictor(name).tensors.items():
            np.testing.assert_array_equal(value, reference.tensors[tensor], err_msg=tensor)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["phase_index"] for line in lines] == list(range(len(lines)))
    judged = evaluate(open_run(tmp_path / "site-1"), [f"{DATA}@site=site-1"], "cpu")
    assert judged["sites"]["site-1"]["balanced_accuracy"] == local["sites"]["site-1"]["balanced_accuracy"]


def fedevprompt() -> dict[str, Any]:
    """A small task of FedEvPrompt."""
    given = {"preset": "tiny", "assignments": ["maps_per_class=2"], "image_px": 36, "seed": 0}
    return {
        "name": "nevus",
        "classes": ["nevus", "other"],
        "seed": 0,
        **task_of_method("fedevprompt", "tiny", **given)[0],
    }


def lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Killed(BaseException):
    """What no handler catches: as far as the disk can tell, kill -9."""


KILLS = {  # after which call the process dies
    "learned": (Checkpoints, "save_site"),
    "kept": (Outbox, "put_learned"),
    "sent": (Member, "reply"),
    "settled": (Exchanges, "settled"),
}


def kill_after(owner: type, name: str, patch: pytest.MonkeyPatch) -> None:
    """Let a method do all it does, and the process nothing more."""
    whole = getattr(owner, name)

    def last(self: Any, *arguments: Any, **named: Any) -> None:
        whole(self, *arguments, **named)
        raise Killed

    patch.setattr(owner, name, last)


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILLS)
def test_a_kill_at_any_moment_learns_and_sends_a_round_once(moment: str, live, tmp_path: Path, monkeypatch) -> None:
    """docs/security.md checks 56 and 57: killed after any durable step of a round, the same command goes on; the round
    is learned once, the coordinator counts one reply, and the state is the one of an undisturbed site."""
    there = live(fedevprompt(), 1, quorum_min=1, quorum_target=1)
    enrol(there, tmp_path, "site-1")
    there.move_on()
    learned: list[int] = []
    wholly = InProcessSite.local_round

    def counted(self: Any, *arguments: Any) -> Any:
        learned.append(1)
        return wholly(self, *arguments)

    monkeypatch.setattr(InProcessSite, "local_round", counted)
    with monkeypatch.context() as once:
        kill_after(*KILLS[moment], once)
        with pytest.raises(Killed):
            join(call(tmp_path / "site-1", "site-1"))
    found = join(call(tmp_path / "site-1", "site-1"))
    assert len(learned) == 1
    there.move_on()
    found = join(call(tmp_path / "site-1", "site-1"))
    assert [line["phase_index"] for line in lines_of(tmp_path / "site-1")] == [0]
    assert found["summary"]["sites"]["site-1"]["took_part"] == {"rounds": 1, "of": 1}
    with there.coordinator.store.transaction() as connection:
        stored = connection.execute(select(replies.c.number, replies.c.site_sha256)).all()
    assert [tuple(row) for row in stored] == [(1, found["summary"]["site_sha256"])]


@pytest.mark.slow
def test_old_keys_are_changed_by_a_timer_too(live, tmp_path: Path, monkeypatch) -> None:
    """docs/security.md 2.6.4, check 23: `--once` changes keys of 30 days as well; a signed refusal ends nothing."""
    there = live(fedevprompt(), 1)
    enrol(there, tmp_path, "site-1")
    before = join(call(tmp_path / "site-1", "site-1"))
    home = SiteMembership(tmp_path / "site-1").home
    save_membership(home, replace(load_membership(home), keys_made_ms=0))

    def refused(self: Member) -> bool:
        raise SignedRefusal("this key is in use already", "known_key")

    with monkeypatch.context() as patch:
        patch.setattr(Member, "rotate_if_due", refused)
        assert join(call(tmp_path / "site-1", "site-1"))["fingerprint"] == before["fingerprint"]
    join(call(tmp_path / "site-1", "site-1"))
    after = join(call(tmp_path / "site-1", "site-1"))
    assert after["fingerprint"] != before["fingerprint"]
    assert there.operate("status")["members"][0]["fingerprint"] == after["fingerprint"]


def enrolled(live: Any, folder: Path) -> tuple[Live, str]:
    """A federation of one site, waiting for its operator; and the invite."""
    there = live(fedevprompt(), 1, quorum_min=1, quorum_target=1)
    invite = there.operate("invite", name="site-1", role="site", hours=1)["invite"]
    assert join(call(folder / "site-1", "site-1", invite, there.ca))["state"] == "pending"
    return there, invite


@pytest.mark.slow
def test_a_coordinator_that_is_gone_is_waited_for(live, tmp_path: Path, monkeypatch) -> None:
    """docs/security.md, order of checks: no answer means "try again later"; one line says so, and waits double."""
    there, _ = enrolled(live, tmp_path)
    there.stop()
    monkeypatch.setitem(Member.__init__.__kwdefaults__, "sleep", lambda _: None)  # between attempts of one question
    waits: list[float] = []
    said: list[str] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise Killed

    with pytest.raises(Killed):
        join(replace(call(tmp_path / "site-1", "site-1"), once=False, say=said.append, sleep=sleep))
    assert 0.75 <= waits[0] <= 1 and 1.5 <= waits[1] <= 2 and 3 <= waits[2] <= 4
    assert [line for line in said if "trying again" in line] == said[1:] and len(said) == 2
    with pytest.raises(Unavailable, match="cannot reach"):
        join(call(tmp_path / "site-1", "site-1"))


def test_bad_invites_end_with_a_sentence(live, tmp_path: Path) -> None:
    """Damaged, another certificate, used, a second one, or none at all: nothing is enrolled (docs/security.md 2.6)."""
    there, invite = enrolled(live, tmp_path)
    assert join(call(tmp_path / "site-1", "site-1", invite))["state"] == "pending"  # the same one again
    device = there.operate("invite", name="clinic", role="device", hours=1)["invite"]
    with pytest.raises(
        FederationRefused, match="for a device, and this command joins as a site: join with edgefl enrol"
    ):
        join(call(tmp_path / "clinic", "site-1", device, there.ca))
    assert not (tmp_path / "clinic").exists()
    second = there.operate("invite", name="site-2", role="site", hours=1)["invite"]
    with pytest.raises(RunError, match="joined with another invite: name another --out"):
        join(call(tmp_path / "site-1", "site-1", second, there.ca))
    with pytest.raises(InviteError, match=r"damaged|characters|cut"):
        join(call(tmp_path / "new", "site-1", second[:-3] + "AAA", there.ca))
    strange = tmp_path / "strange.pem"
    strange.write_bytes(make_development_certificate(["127.0.0.1"], datetime.now(UTC)).ca)
    with pytest.raises(FederationRefused, match="does not hold the certificate"):
        join(call(tmp_path / "new", "site-1", second, strange))
    with pytest.raises(FederationRefused, match="used"):
        join(call(tmp_path / "new", "site-1", invite, there.ca))
    assert join(call(tmp_path / "new", "site-1", second))["state"] == "pending"  # the invite carries the certificate
    with pytest.raises(RunError, match="no finished enrolment: give the INVITE"):
        join(call(tmp_path / "nothing", "site-1"))


@pytest.mark.slow
def test_a_task_that_changes_on_the_way_is_refused(live, tmp_path: Path) -> None:
    """What a site agreed to at its first round holds to the end: a coordinator cannot ask for something else later."""
    there, _ = enrolled(live, tmp_path)
    pending = join(call(tmp_path / "site-1", "site-1"))
    there.operate("approve", name="site-1", fingerprint=pending["fingerprint"])
    there.move_on()
    meant = SiteMembership.meet

    def changed(self: Any, *arguments: Any) -> Any:
        told, sent = meant(self, *arguments)
        return replace(told, epochs=9), sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SiteMembership, "meet", changed)
        with pytest.raises(FederationRefused, match="changed epochs of its task"):
            join(call(tmp_path / "site-1", "site-1"))


@pytest.mark.slow
def test_a_site_that_stays_hears_why_a_round_is_stuck_and_goes_on_once_it_is_mended(live, tmp_path: Path) -> None:
    """docs/decisions/0041: two sites of three that a broadcast needs; what the operator types frees the one that waits.
    A round that is stuck is said once, and its broadcast is not asked for again and again."""
    there = live(fedevprompt(), 2, quorum_min=2, quorum_target=2, min_cohort=2)
    for name in SITES:
        enrol(there, tmp_path, name)
    there.coordinator.serving = True
    there.move_on()
    for name in SITES:
        join(call(tmp_path / name, name))
    there.move_on()
    said: list[str] = []
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            *_, command = there.operate("status")["standing"]["commands"]
            words = command.removeprefix("edgefl-coordinator set ").split()
            there.operate("set", changes=dict(zip(words[::2], words[1::2], strict=True)))
        if len(waits) == 5:
            raise Killed

    with pytest.raises(Killed):
        join(replace(call(tmp_path / "site-1", "site-1"), once=False, say=said.append, sleep=sleep))
    stuck = [line for line in said if line.startswith("round 2 is stuck since ")]
    assert len(stuck) == 1 and "is withheld from" in stuck[0] and "; members cannot mend this: tell the" in stuck[0]
    assert sum("goes on without this site" in line for line in said) == 1
    assert any(line.startswith("the reply of round 2, ") and line.endswith("is there") for line in said)
    rows = there.operate("log", from_ms=0, most=1000)["shown"]
    assert sum(row["detail"].get("code") == "small_cohort" for row in rows) == 1
    found = to_the_end(there, tmp_path)
    assert found["site-1"]["round"] == {"number": 2, "rounds": 2, "state": "done", "stuck": None}


@pytest.mark.slow
def test_a_reply_that_comes_too_late_leaves_the_site_as_it_was(live, tmp_path: Path) -> None:
    """docs/design.md 4: a site whose reply did not count is after the round as before it; the next round goes on."""
    there = live(fedevprompt(), 2, quorum_min=1, quorum_target=2)
    for name in SITES:
        enrol(there, tmp_path, name)
    there.move_on()
    assert [one["outcome"] for one in join(call(tmp_path / "site-1", "site-1"))["sent"]] == ["accepted"]
    meant = SiteMembership.meet

    def closes(self: Any, reply: Any, *rest: Any) -> Any:
        if reply is not None and reply.round == 1:
            there.pass_deadline()  # while this site learns
        return meant(self, reply, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SiteMembership, "meet", closes)
        late = join(call(tmp_path / "site-2", "site-2"))
    assert [one["outcome"] for one in late["sent"]] == ["late", "accepted"]  # and on with the next round
    said: list[str] = []
    alone = join(replace(call(tmp_path / "site-1", "site-1"), say=said.append))
    assert not alone["sent"] and any("goes on without this site" in line for line in said)  # nobody else's maps in it
    there.pass_deadline()
    found = to_the_end(there, tmp_path)
    assert [line["phase_index"] for line in lines_of(tmp_path / "site-1")] == [0]
    assert [line["phase_index"] for line in lines_of(tmp_path / "site-2")] == [1]
    assert found["site-1"]["summary"]["sites"]["site-1"]["took_part"] == {"rounds": 1, "of": 2}
    status = there.operate("status")["state_sha256"]
    assert {found[name]["summary"]["state_sha256"] for name in SITES} == {status}


@pytest.mark.slow
def test_a_site_that_joins_after_the_end_is_no_result_of_the_federation(live, tmp_path: Path) -> None:
    """Its prompts are fresh where maps alone travel: table, card and sentences say that it took part in no round."""
    there = live(fedevprompt(), 1, quorum_min=1, quorum_target=1, min_cohort=0)
    enrol(there, tmp_path, "site-1")
    taught = to_the_end(there, tmp_path, ("site-1",))["site-1"]["summary"]
    assert taught["sites"]["site-1"]["took_part"] == {"rounds": 1, "of": 1} and not part_lines(taught)
    enrol(there, tmp_path, "site-2")
    said: list[str] = []
    assert join(replace(call(tmp_path / "site-2", "site-2"), say=said.append))["summary"] is None
    there.move_on()  # makes what is handed out to it
    late = join(replace(call(tmp_path / "site-2", "site-2"), say=said.append))["summary"]
    assert late["sites"]["site-2"]["took_part"] == {"rounds": 0, "of": 1}
    assert any(line.startswith("the federation skin is over") for line in said)
    told = "site-2 took part in 0 of 1 round: its model has learned nothing from its pictures"
    assert told in summary_text(late)
    run = open_run(tmp_path / "site-2")
    assert part_lines(evaluate(run, [f"{DATA}@site=site-2"], "cpu"))[0].startswith(told)
    with pytest.raises(ExportError, match=r"site-2 took part in 0 of 1 round .*--took-no-part"):
        site_model(run, "site-2")
    card = site_model(run, "site-2", took_no_part=True).card
    assert card.metrics["site"]["took_part"] == {"rounds": 0, "of": 1}


@pytest.mark.slow
def test_what_join_says_counts_the_reply_that_it_sent(live, tmp_path: Path) -> None:
    """The task of a meeting comes before the reply: its count of replies would be too low by this site's."""
    there = live(fedevprompt(), 2, quorum_min=2, quorum_target=2, min_cohort=1)
    for name in SITES:
        enrol(there, tmp_path, name)
    there.move_on()
    with there.coordinator.store.transaction() as connection:
        stored_rounds.set_fact(connection, "overdue_1", 1)  # the deadline passed while nobody had replied
    said: list[str] = []
    found = join(replace(call(tmp_path / "site-1", "site-1"), say=said.append))
    assert found["sent"][0]["outcome"] == "accepted" and found["round"]["stuck"] is None
    assert not any("0 replies" in line for line in said), said
    join(replace(call(tmp_path / "site-1", "site-1"), say=said.append))
    assert "it has 1 reply and needs 2" in said[-1]
