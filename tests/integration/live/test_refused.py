"""A reply that is refused, by aggregation or at the door, at a site that `edgefl-train join` runs: over TLS on the
loopback interface. Source: docs/reference/coordinator.md, a reply that was refused; docs/decisions/0077.
"""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.live.coordinator import Live
from tests.integration.live.test_sites import SITES, Killed, call, enrol, fedevprompt, to_the_end

from edgefl_coordinator.founding.task import task_of_method
from edgefl_coordinator.rounds import worker
from edgefl_coordinator.rounds.judging import RoundVerdict
from edgefl_coordinator.store.tables import rounds
from edgefl_trainer.engine.local_engine import InProcessSite
from edgefl_trainer.errors import TrainingError
from edgefl_trainer.live import join

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # of the server in a thread, when it is stopped
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
WHY = "it lies 20 times as far from the broadcast as the median reply"


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sites that learned a round, in order."""
    names, wholly = list[str](), InProcessSite.local_round

    def counted(self: Any, *arguments: Any) -> Any:
        names.append(self.site.name)
        return wholly(self, *arguments)

    monkeypatch.setattr(InProcessSite, "local_round", counted)
    return names


@contextmanager
def strict(folder: Path, rounds: int, **changes: Any) -> Iterator[Live]:
    """Serve a federation of FedAvg, in its first round, that refuses at the door whoever has more than one image."""
    torch.set_num_threads(1)
    task = task_of_method("fedavg", "tiny", preset="tiny", assignments=[], image_px=36, seed=0)[0]
    table = {"name": "nevus", "classes": ["nevus", "other"], "seed": 0, **task, "max_samples": 1}
    made = Live(folder / "coordinator", table, rounds, **changes)
    with contextlib.closing(made.coordinator.store), made.serving() as there:
        for name in SITES:
            enrol(there, folder, name)
        there.move_on()
        yield there


def test_a_refused_site_hears_why_and_does_not_learn_the_round_again(tmp_path: Path, learned, monkeypatch) -> None:
    """It learned the same round again and again, and was told that its reply is there. After a grant the reply that the
    coordinator has is judged again, and the federation goes on."""
    torch.set_num_threads(1)
    judge = worker.judge

    def without_a_grant(replies: Any, *arguments: Any, **rules: Any) -> Any:
        if "site-2" in replies and "site-2" not in rules["protection"].granted:
            return RoundVerdict(None, {"site-2": WHY}, "too few sound replies: 1, at least 2 are needed")
        return judge(replies, *arguments, **rules)

    monkeypatch.setattr(worker, "judge", without_a_grant)
    made = Live(tmp_path / "coordinator", fedevprompt(), 2)
    with made.serving() as there:
        for name in SITES:
            enrol(there, tmp_path, name)
        there.move_on()
        for name in SITES:
            join(call(tmp_path / name, name))
        there.move_on()
        said: list[str] = []
        for _ in range(2):
            found = join(replace(call(tmp_path / "site-2", "site-2"), say=said.append))
        told = f"the reply of round 1 was refused: {WHY}; it is judged again if the operator grants more images"
        assert [line.startswith(told) for line in said].count(True) == 2  # once a call
        assert found["round"]["stuck"].startswith(told) and found["sent"] == [] and learned == list(SITES)
        granted = {one["name"]: one["fingerprint"] for one in there.operate("status")["members"]}
        there.operate("approve", name="site-2", fingerprint=granted["site-2"], images=100)
        ended = to_the_end(there, tmp_path)
    made.coordinator.store.close()
    assert learned == [*SITES, *SITES]
    for name in SITES:
        assert ended[name]["summary"]["sites"][name]["took_part"] == {"rounds": 2, "of": 2}


def test_a_reply_refused_at_the_door_is_taken_once_the_operator_mended_the_reason(tmp_path: Path, learned) -> None:
    """Neither the site nor its next `join` ever offered it again: the round stayed open. It is learned once, for noise
    that is drawn anew would be another release."""
    said = list[str]()
    with strict(tmp_path, rounds=1) as there:
        for _ in range(2):
            with pytest.raises(TrainingError, match=r"n_train is \d+; .* the same command sends it again"):
                join(call(tmp_path / "site-1", "site-1"))
        there.operate("set", changes={"task.max_samples": "1000"})
        assert [one["outcome"] for one in join(call(tmp_path / "site-1", "site-1"))["sent"]] == ["accepted"]
        there.operate("set", changes={"task.max_samples": "1"})

        def sleep(_: float) -> None:
            if len(said) > 5:
                raise Killed
            there.operate("set", changes={"task.max_samples": "1000"})
            with there.coordinator.store.transaction() as connection:
                connection.execute(rounds.update().values(deadline_ms=rounds.c.deadline_ms + 60_000))  # extended

        stays = replace(call(tmp_path / "site-2", "site-2"), once=False, say=said.append, sleep=sleep)
        with pytest.raises(Killed):
            join(stays)
        assert there.operate("status")["state"] == "closed"  # with both replies
    assert learned == list(SITES)
    refused, *_, taken = [line for line in said if "reply of round 1" in line]
    assert "n_train is 22; " in refused and "once the round's deadline is extended" in refused
    assert taken.endswith("is there") and len(said) < 8


def test_a_site_whose_reply_was_refused_goes_on_with_the_next_round(tmp_path: Path, learned) -> None:
    """docs/decisions/0077: the round ends without it, what it learned is dropped, and it is as before the round. A site
    that stays does so by itself."""
    said = list[str]()
    with strict(tmp_path, rounds=2, quorum_min=1) as there:
        there.operate("set", changes={"task.max_samples": "1000"})
        join(call(tmp_path / "site-1", "site-1"))
        there.operate("set", changes={"task.max_samples": "1"})

        def sleep(_: float) -> None:
            if learned.count("site-2") > 1:
                raise Killed  # it waits with the reply of round 2 taken
            there.operate("set", changes={"task.max_samples": "1000"})
            there.pass_deadline()  # round 1 is aggregated with the reply of site-1, and round 2 opens

        stays = replace(call(tmp_path / "site-2", "site-2"), once=False, say=said.append, sleep=sleep)
        with pytest.raises(Killed):
            join(stays)
        told = there.operate("status")
        assert (told["round"], [one["replied"] for one in told["members"]]) == (2, [False, True])
    assert learned == ["site-1", "site-2", "site-2"]
    refused, dropped, taken = [line for line in said if line.startswith(("the reply of", "the coordinator refused"))]
    assert "refused the reply of round 1: " in refused and "n_train is 22; " in refused
    assert dropped.endswith("round 1 was over before its reply was taken; what was learned in it is dropped")
    assert taken.startswith("the reply of round 2, ") and taken.endswith("is there")
