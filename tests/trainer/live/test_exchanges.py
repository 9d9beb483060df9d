"""Exchanges kept in a run directory. Source: docs/decisions/0030; docs/guides/federation.md, "Keys over time"."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.trainer.live.test_site_work import OPTIONS, facts, told

from edgefl_exchange.delivery import Delivery
from edgefl_protocol import Payload
from edgefl_trainer.contract import State
from edgefl_trainer.engine.checkpoint import Checkpoints, SiteResult
from edgefl_trainer.engine.display import RunPace
from edgefl_trainer.engine.local_engine import InProcessSite
from edgefl_trainer.engine.privacy.ledger import PrivacyLedger
from edgefl_trainer.errors import BudgetError
from edgefl_trainer.live.exchanges import Exchanges
from edgefl_trainer.live.site_work import prepare


@pytest.fixture
def answered(tmp_path: Path):
    """Learns an exchange, has its reply accepted, and gives the exchanges: the value stands for all that is learned."""
    work = prepare(told(rounds=5, train_rounds=5), OPTIONS)
    exchanges = Exchanges(work, tmp_path, RunPace((), {}))

    def answer(number: int, value: float, times: int = 1) -> Exchanges:
        state = State({"head.bias": np.full(2, value, np.float32)})
        result = SiteResult(state, Payload({}, {}), {"phase_index": number - 1, "value": value})
        Checkpoints(tmp_path / "checkpoints").save_site(number - 1, exchanges.name, result)
        for _ in range(times):
            exchanges.settled(Delivery(idem="a" * 32, round=number, outcome="accepted", bytes=1))
        return exchanges

    return answer


def test_a_coordinator_restored_from_a_backup_takes_its_sites_back(answered, tmp_path: Path) -> None:
    """The state is always the one that the newest accepted reply names, also where it is of an earlier round."""
    for number in (1, 2, 3, 4):
        exchanges = answered(number, number, times=2)  # told again after a crash in between
    assert (exchanges.done, float(exchanges.state.arrays["head.bias"][0])) == (4, 4)
    exchanges = answered(3, 30)
    assert (exchanges.done, float(exchanges.state.arrays["head.bias"][0])) == (3, 30)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["phase_index"], line["value"]) for line in lines] == [(0, 1), (1, 2), (2, 30)]


def test_a_round_done_again_in_vain_leaves_the_accepted_state(answered, tmp_path: Path) -> None:
    """docs/decisions/0030 and 0056: a coordinator restored from a backup opens the last round again. What is learned
    then counts once its reply is accepted; until then, and where it is late, the site is as its last accepted reply."""
    answered(1, 1)
    exchanges, checkpoints = answered(2, 2), Checkpoints(tmp_path / "checkpoints")
    again = SiteResult(State({"head.bias": np.full(2, 99, np.float32)}), Payload({}, {}), {"phase_index": 1})
    late = Delivery(idem="a" * 32, round=2, outcome="late", bytes=1)
    for _ in range(2):  # done again twice
        for _ in range(2):  # killed before its reply was kept
            checkpoints.save_site(1, exchanges.name, again)
            assert exchanges.state.arrays["head.bias"][0] == 2
        for _ in range(2):  # told again after a crash in between
            exchanges.settled(late)
            assert (exchanges.done, exchanges.state.arrays["head.bias"][0]) == (2, 2)
    answered(2, 30, times=2)
    exchanges.settled(late)  # of an outbox that was restored: what counts is not dropped
    assert exchanges.state.arrays["head.bias"][0] == 30
    assert len(list((tmp_path / "checkpoints").rglob(f"{exchanges.name}.*"))) == 1


def test_earlier_results_stay_until_a_round_done_again_counts(answered, tmp_path: Path) -> None:
    """docs/reference/runs.md, a live federation: until then nothing takes their place, and the model is good."""
    exchanges, summary = answered(2, 2), tmp_path / "summary.json"
    summary.write_text("{}")
    Checkpoints(tmp_path / "checkpoints").save_site(0, exchanges.name, SiteResult(State(), Payload({}, {}), {}))
    exchanges.settled(Delivery(idem="a" * 32, round=1, outcome="late", bytes=1))
    assert summary.exists()
    answered(1, 10)
    assert not summary.exists()


def test_a_live_site_counts_each_draw_of_its_noise_and_stops_at_its_budget(tmp_path: Path, monkeypatch) -> None:
    """Check 52: noise is secret and new each time, so a reply that is learned again is another release; past the budget
    of `join --privacy-budget` nothing is learned."""
    noise = {"method": "fedclf", "settings": {"dp_noise": 4.0}, "travels": (), "backbone": facts("cnn:test_resnet")}
    work = prepare(told(rounds=5, train_rounds=5, **noise), replace(OPTIONS, privacy_budget=1e9))
    learned = SiteResult(State(), Payload({}, {}), {})
    monkeypatch.setattr(InProcessSite, "local_round", lambda *given: learned)
    broadcast = Payload({}, {"phase": "warm", "round": 0, "rounds": 5})

    def at(budget: float) -> Exchanges:
        settings = replace(work.settings, privacy_budget=budget)
        pace = RunPace(work.method.phases(5), {"site-2": 1})
        return Exchanges(replace(work, settings=settings), tmp_path, pace)

    assert work.settings.privacy_budget == 1e9
    ledger = PrivacyLedger(tmp_path, "site-2")
    at(1e9).learned(1, broadcast)
    at(1e9).learned(1, broadcast)  # read from the disk
    assert len(ledger.entries()) == 1
    at(1e9).drop(1)
    at(1e9).learned(1, broadcast)
    assert len(ledger.entries()) == 2
    at(1e9).drop(1)
    with pytest.raises(BudgetError, match="in 2 releases"):
        at(1.0).learned(1, broadcast)
    assert at(1.0).done == 0 and not list((tmp_path / "checkpoints").rglob("*.metrics.json"))
