"""The privacy ledger: docs/security.md check 52."""

import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.conftest import TINY, edgefl_train, run

from edgefl_trainer.contract import Phase, State, declared
from edgefl_trainer.engine.folder import check_begun, check_finished
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.privacy.ledger import LEDGERS, Ledgers, PrivacyLedger
from edgefl_trainer.engine.privacy.spent import privacy_cost, privacy_lines
from edgefl_trainer.errors import BudgetError, RunError
from edgefl_trainer.gaussian_noise import NoisyRelease, epsilon_of, told_epsilon
from edgefl_trainer.methods import METHODS

DELTA = 1e-5
NOISED = ("--set", "dp_noise=4", "--set", "batch=8", "--probe-every", 0)


def closed_form(multipliers: list[float], delta: float = DELTA) -> float:
    """Mironov 2017, corollary 3: a Gaussian has RDP a/(2z²) at order a, and orders add up; Canonne et al. 2020,
    proposition 12: epsilon = RDP + log((a - 1)/a) - (log delta + log a)/(a - 1), at the best order."""
    from dp_accounting.rdp import RdpAccountant

    orders = np.array(RdpAccountant()._orders)  # which are tried is the library's choice, not its sums
    rdp = sum(orders / (2 * z * z) for z in multipliers)
    found = rdp + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(found[orders > 1].min()))


@pytest.mark.parametrize("multiplier", [0.7, 2.0, 30.0, 200.0])
def test_a_thousand_compositions_equal_the_closed_form(multiplier: float, tmp_path: Path) -> None:
    """To 1e-6; and read back from the file, in which each release stands."""
    ledger = PrivacyLedger(tmp_path, "bcn")
    told = {"delta": DELTA, "releases": [{"name": f"phase-{n:04d}", "multiplier": multiplier} for n in range(999)]}
    ledger.path.parent.mkdir()
    ledger.path.write_text(json.dumps(told))
    ledger.charge("phase-0999", NoisyRelease(multiplier, DELTA), fresh=False)
    assert len(ledger.entries()) == 1000
    assert ledger.epsilon(DELTA) == pytest.approx(closed_form([multiplier] * 1000), rel=1e-6)


@given(st.lists(st.sampled_from([0.8, 1.5, 4.0, 50.0]), max_size=40))
def test_releases_of_several_strengths_add_up(multipliers: list[float]) -> None:
    """Whatever their order; nothing costs nothing, and each release costs something."""
    counts = {z: multipliers.count(z) for z in multipliers}
    cost = epsilon_of(counts, DELTA)
    assert cost == pytest.approx(closed_form(multipliers) if multipliers else 0.0, rel=1e-6, abs=1e-9)
    assert epsilon_of({**counts, 0.8: counts.get(0.8, 0) + 1}, DELTA) > cost


def test_the_release_past_the_budget_is_refused_and_not_written(tmp_path: Path) -> None:
    """One sentence: what was spent, what is allowed, what another would make it."""
    release, allowed = NoisyRelease(2.0, DELTA), 3
    budget = (closed_form([2.0] * allowed) + closed_form([2.0] * (allowed + 1))) / 2
    ledger = PrivacyLedger(tmp_path, "bcn", budget)
    for number in range(allowed):
        ledger.charge(str(number), release, fresh=False)
    before = ledger.path.read_bytes()
    with pytest.raises(BudgetError, match=r"^site bcn has spent epsilon .* of its privacy budget of .* in 3 releases"):
        ledger.charge("3", release, fresh=False)
    ledger.charge("2", release, fresh=False)  # that one left already
    assert ledger.path.read_bytes() == before
    with pytest.raises(BudgetError):
        ledger.charge("2", release, fresh=True)


def test_a_release_drawn_again_counts_once_and_under_fresh_noise_twice(tmp_path: Path) -> None:
    """A resumed simulation draws the same bits; two draws of secret noise tell more than one."""
    ledger = PrivacyLedger(tmp_path, "a")
    for fresh in (False, False, True):
        ledger.charge("phase-0001", NoisyRelease(2.0, DELTA), fresh=fresh)
    assert len(ledger.entries()) == 2


def test_only_what_is_noised_is_written_down(tmp_path: Path) -> None:
    """Features in the warm phase and in each round; nothing without noise, and nothing of the last exchange."""
    phases = (Phase("warm", 0), Phase("train", 1), Phase("final", 2))
    for name, hyper in (("quiet", {}), ("noisy", {"dp_noise": 4.0})):
        ledgers = Ledgers(tmp_path / name, build(METHODS["fedclf"], hyper))
        for index, phase in enumerate(phases):
            ledgers.charge("a", State({}, {"epsilon_spent": epsilon_of({2.0: index}, DELTA)}), index, phase)
    assert not (tmp_path / "quiet" / LEDGERS).exists()
    entries = PrivacyLedger(tmp_path / "noisy", "a").entries()
    assert [(one.name, one.multiplier) for one in entries] == [("phase-0000", 2.0), ("phase-0001", 2.0)]


def _charges_for_ever(folder: Path) -> None:
    ledger, number = PrivacyLedger(folder, "a"), 0
    while True:
        ledger.charge(f"phase-{number:04d}", NoisyRelease(2.0, DELTA), fresh=False)
        number += 1
        with (folder / "done").open("a") as file:
            file.write(f"{number}\n")


def test_a_kill_loses_no_release(tmp_path: Path) -> None:
    """Check 52: after kill -9 at a random moment the ledger is whole and holds what was charged, thirty times."""
    fork, rng = multiprocessing.get_context("fork"), np.random.default_rng(0)
    for trial in range(30):
        folder = tmp_path / str(trial)
        folder.mkdir()
        process = fork.Process(target=_charges_for_ever, args=(folder,))
        process.start()
        process.join(0.02 + float(rng.uniform(0, 0.05)))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        done = folder / "done"
        acknowledged = len(done.read_text().splitlines()) if done.exists() else 0
        assert len(PrivacyLedger(folder, "a").entries()) in (acknowledged, acknowledged + 1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"releases": [{"name": "x"}]}', '{"releases": 3}'])
def test_a_damaged_ledger_is_a_sentence_and_never_empty(text: str, tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path, "a")
    ledger.path.parent.mkdir()
    ledger.path.write_text(text)
    with pytest.raises(RunError, match=r"privacy ledger .* is damaged"):
        ledger.charge("x", NoisyRelease(2.0, DELTA), fresh=False)


def test_a_run_keeps_a_ledger_and_says_the_same_cost(ward: str, tmp_path: Path) -> None:
    """Of each site; `epsilon_spent` of summary.json, which the method counts by itself, is that of the ledger."""
    outcome = run("fedclf", ward, tmp_path / "run", "cnn:test_resnet", *NOISED, "--rounds", 1)
    assert outcome.code == 0, outcome.err
    spent = json.loads((tmp_path / "run/summary.json").read_text())["epsilon_spent"]
    for site in ("east", "west"):
        assert PrivacyLedger(tmp_path / "run", site).epsilon(DELTA) == pytest.approx(spent[site], rel=1e-9)


def test_a_budget_that_does_not_last_is_refused_before_anything_begins(ward: str, tmp_path: Path) -> None:
    """And one that nothing spends: both leave no folder."""
    given = ("--rounds", 1, "--privacy-budget", math.floor(closed_form([2.0] * 2) * 10) / 10)
    near = run("fedclf", ward, tmp_path / "near", "cnn:test_resnet", *NOISED, *given)
    assert "2 releases of each site (1 before the first round, 1 in each round) cost epsilon" in near.sentence()
    assert "fewer rounds" not in near.sentence() and f"budget is {given[-1]:g}:" in near.sentence()
    assert f"cost epsilon {given[-1]:g} " not in near.sentence()  # the two differ
    short = run("fedclf", ward, tmp_path / "short", "cnn:test_resnet", *NOISED, "--rounds", 4, "--privacy-budget", 1)
    assert "5 releases of each site (1 before the first round, " in short.sentence() and short.code == 2
    idle = run("local", ward, tmp_path / "idle", "tiny", "--privacy-budget", 1)
    assert "a privacy budget bounds nothing" in idle.sentence()
    assert not (tmp_path / "short").exists() and not (tmp_path / "idle").exists()


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_counts_each_release_once(
    ward: str, tmp_path: Path, kill_after: Callable[..., None]
) -> None:
    """Killed once the ledger names a release that no site has finished: the same bits are drawn again."""
    data = ("run", "fedclf", "--data", ward, "--backbone", "cnn:test_resnet", *TINY, *NOISED, "--rounds", 1)
    kill_after("privacy/east.json", *data, "--out", tmp_path / "killed")
    assert [one.name for one in PrivacyLedger(tmp_path / "killed", "east").entries()] == ["phase-0000"]
    assert edgefl_train(*data, "--out", tmp_path / "killed", "--resume").code == 0
    assert edgefl_train(*data, "--out", tmp_path / "whole").code == 0
    for name in ("privacy/east.json", "privacy/west.json"):
        assert (tmp_path / "killed" / name).read_text() == (tmp_path / "whole" / name).read_text()
    digests = [json.loads((tmp_path / one / "summary.json").read_text())["state_sha256"] for one in ("killed", "whole")]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("epsilon", "told"), [(16.512876, "16.513"), (3 * 0.2, "0.6"), (0.0, "0"), (295.001, "295.01")]
)
def test_an_epsilon_is_told_rounded_up(epsilon: float, told: str) -> None:
    """Never below what it is, but for the last bits of a sum."""
    assert told_epsilon(epsilon) == told


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf"])
def test_a_budget_that_allows_nothing_is_not_read_as_no_bound(given: str, ward: str, tmp_path: Path) -> None:
    outcome = run("fedclf", ward, tmp_path / "run", "cnn:test_resnet", *NOISED, "--privacy-budget", given)
    assert outcome.code == 2 and f"{given} is no budget: give a number above 0, or leave it out" in outcome.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("multiplier", "fresh"), [(20.0, False), (20.0, True), (0.5, False)])
def test_a_ledger_that_was_changed_is_refused(multiplier: float, fresh: bool, tmp_path: Path) -> None:
    """Before the next release, by what the site itself has counted; under fresh noise a ledger may tell of more."""
    ledger, release = PrivacyLedger(tmp_path, "a"), NoisyRelease(2.0, DELTA)
    for name in ("phase-0000", "phase-0001"):
        ledger.charge(name, release, fresh=fresh)
    own, one = (epsilon_of({2.0: count}, DELTA) for count in (2, 1))
    assert ledger.check(own, DELTA, fresh=fresh) == pytest.approx(own)
    assert ledger.check(one, DELTA, fresh=fresh, but="phase-0001") >= one  # killed before the site had counted it
    ledger.path.write_text(ledger.path.read_text().replace("2.0", str(multiplier), 1))
    state, method = State({}, {"epsilon_spent": own}), build(METHODS["fedclf"], {"dp_noise": 4.0})
    with pytest.raises(
        RunError, match=r"site a has counted .* by itself: one of them was changed\. Put the ledger back"
    ):
        Ledgers(tmp_path, method).charge("a", state, 2, Phase("train", 2), fresh=fresh)
    assert len(ledger.entries()) == 2


def test_a_live_summary_tells_what_the_ledger_tells(tmp_path: Path) -> None:
    """A reply that did not count has left all the same: the site's state forgets it, the ledger does not."""
    method, ledger = build(METHODS["fedclf"], {"dp_noise": 4.0}), PrivacyLedger(tmp_path, "a")
    for _ in range(2):
        ledger.charge("phase-0000", NoisyRelease(2.0, DELTA), fresh=True)
    one, two = (epsilon_of({2.0: count}, DELTA) for count in (1, 2))
    states = {"a": State({}, {"epsilon_spent": one})}
    assert privacy_cost(tmp_path, method, states, seeded=False)["epsilon_spent"] == {"a": pytest.approx(two)}
    with pytest.raises(RunError, match="one of them was changed"):
        privacy_cost(tmp_path, method, states, seeded=True)
    assert privacy_cost(tmp_path, build(METHODS["fedclf"], {}), states, seeded=True) == {}


def test_a_summary_from_before_its_conditions_says_so() -> None:
    (line,) = privacy_lines({"epsilon_spent": {"a": 1.2}})
    assert (
        line == "privacy noise: epsilon 1.2 in all, of a run that does not tell what this covers or whether it is "
        "a bound: docs/methods.md 2.2 and 6"
    )
    assert privacy_lines({}) == []


def test_a_run_that_its_budget_stopped_is_not_told_to_go_on(tmp_path: Path) -> None:
    """Whichever command reads it, or would begin in its folder: resumed, it would stop again."""
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RunError, match="finish it with"):
        check_finished(tmp_path)
    with pytest.raises(BudgetError, match="nothing more leaves it in this run, which cannot go on"):
        PrivacyLedger(tmp_path, "a", 0.1).charge("phase-0000", NoisyRelease(2.0, DELTA), fresh=False)
    for check in (check_finished, lambda folder: check_begun(folder, resume=False)):
        with pytest.raises(
            RunError, match=r"was stopped by its privacy budget and cannot go on: begin another"
        ) as told:
            check(tmp_path)
        assert "--resume" not in str(told.value)


@pytest.mark.slow
def test_a_run_past_its_budget_stops_with_one_sentence(ward: str, tmp_path: Path) -> None:
    """Where not every site takes part each time, only the ledger can tell; what was learned is kept. Status 3."""
    budget = (closed_form([2.0] * 2) + closed_form([2.0] * 3)) / 2
    given = (*NOISED, "--rounds", 6, "--participation", 0.5, "--privacy-budget", budget)
    outcome = run("fedclf", ward, tmp_path / "run", "cnn:test_resnet", *given)
    assert outcome.code == 3 and "privacy budget" in outcome.sentence()
    counts = [len(PrivacyLedger(tmp_path / "run", site).entries()) for site in ("east", "west")]
    assert max(counts) == 2
    assert "was stopped by its privacy budget" in edgefl_train("table", tmp_path / "run").sentence()
    wider = edgefl_train("run", "--resume", "--out", tmp_path / "run", "--privacy-budget", 50)
    assert wider.code == 2 and "was stopped by its privacy budget" in wider.sentence()
    again = edgefl_train("run", "--resume", "--out", tmp_path / "run")
    assert again.code == 3 and "privacy budget" in again.sentence()
    ledgers = [PrivacyLedger(tmp_path / "run", site).path for site in ("east", "west")]
    for path in filter(Path.exists, ledgers):
        path.write_text(path.read_text().replace('"multiplier": 2.0', '"multiplier": 50.0'))
    assert "one of them was changed" in edgefl_train("run", "--resume", "--out", tmp_path / "run").sentence()


def test_a_live_epsilon_without_a_ledger_is_a_lower_bound() -> None:
    """A reply that came too late is taken back with what it counted, though its noise was drawn and it left."""
    terms = {"kind": "prototypes", "on": "class means", "given": "the prompts", "delta": 0.0, "no_guarantee": None}
    facts = terms | {"without_noise": [], "seeded": False, "ledger": False}
    first, _ = privacy_lines({"epsilon_spent": {"a": 1.2}, "privacy_noise": facts})
    assert first.startswith("privacy noise: at least epsilon 1.2, counted of the replies that came in time, at delta")
    first, _ = privacy_lines({"epsilon_spent": {"a": 1.2}, "privacy_noise": facts | {"ledger": True}})
    assert first.startswith("privacy noise: epsilon 1.2 at delta")


def test_each_epsilon_says_that_it_is_for_one_picture() -> None:
    """Two pictures of a patient move what is sent by sqrt(2) times as much (docs/methods.md 2.2), and cost more."""
    noise = build(METHODS["fedclf"], {"dp_noise": 4.0}).noise
    assert closed_form([4.0 / (2 * math.sqrt(2))]) > noise.epsilon(1) == pytest.approx(closed_form([4.0 / 2]))
    assert noise.terms is not None
    facts = {**asdict(noise.terms), "without_noise": [], "seeded": False, "ledger": True}
    whom = "for one picture (several of one patient cost more), given the encoders"
    assert whom in privacy_lines({"epsilon_spent": {"a": 1.2}, "privacy_noise": facts})[0]
    assert whom in noise.sentence("a", 2)


def test_a_method_with_a_ledger_says_what_its_noise_promises() -> None:
    """`Declaration.release`: a release without `noise` would be charged and never told."""
    assert [name for name, kind in METHODS.items() if declared(kind).release and not declared(kind).noise] == []
    assert any(declared(kind).release for kind in METHODS.values())
