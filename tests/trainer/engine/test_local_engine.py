"""The local engine around a method of a few additions: every moment at which a process can die, and who takes part.

docs/design.md 4: a run killed at any moment resumes to the same final digest; broadcasts and sums go in name order.
"""

import dataclasses
import itertools
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.engine.runners import Runner
from tests.trainer.engine.test_sites import SPEC, site

from edgefl_protocol import Payload
from edgefl_protocol.errors import PayloadError
from edgefl_trainer.contract import Phase, State, Task
from edgefl_trainer.engine.folder import read_metrics
from edgefl_trainer.engine.local_engine import InProcessSite, LocalEngine, participants
from edgefl_trainer.errors import RunError, TrainingError

NAMES = ("east", "north", "west")
TASK = Task(name="all", classes=("a", "b"), backbone=SPEC, rounds=2, epochs=1, seed=4)


class Killed(BaseException):
    """The process is gone."""


class Adding:
    """Every site remembers half of what it had, adds what it is sent and a number of its own; the server adds up."""

    travels = ("weights",)

    def phases(self, rounds):
        return [Phase("warm", 0), *(Phase("train", r) for r in range(1, rounds + 1)), Phase("final", rounds + 1)]

    def start(self, task, sites):
        return State({"sum": np.full(2, float(task.seed))}, {"phases": 0})

    def broadcast(self, state, phase, sites):
        return {name: Payload(state.arrays, {"to": name}) for name in sites}

    def local_round(self, site, state, broadcast):
        raise NotImplementedError

    def aggregate(self, state, phase, replies):
        total = sum((replies[name].arrays["own"] for name in sorted(replies)), start=np.zeros(2))
        return State({"sum": 0.1 * state.arrays["sum"] + total}, {"phases": int(state.values["phases"]) + 1})

    def predictor(self, site, state, broadcast):
        return None


class Silent:
    """Watches nothing."""

    def __getattr__(self, name):
        return lambda *_: None


def engine(folder: Path, **changes) -> LocalEngine:
    values = {"method": Adding(), "task": TASK, "sites": {name: Runner(name) for name in NAMES}, "folder": folder}
    return LocalEngine(**{**values, "observer": Silent(), **changes})


def plain_loop() -> tuple[State, dict[str, State]]:
    method, sites = Adding(), {name: Runner(name) for name in NAMES}
    server, states = method.start(TASK, NAMES), dict.fromkeys(NAMES, State())
    for phase in method.phases(TASK.rounds):
        replies = {}
        for name, payload in method.broadcast(server, phase, NAMES).items():
            scalars = {**payload.scalars, "phase": phase.kind, "round": phase.round, "rounds": 2}
            result = sites[name].local_round(states[name], Payload(payload.arrays, scalars), None)
            states[name], replies[name] = result.state, result.reply
        server = method.aggregate(server, phase, replies)
    return server, states


@pytest.fixture
def steps(monkeypatch):
    """Counts renames and removals; at step `die_at` the process dies before or after it. No fsync: no power cut."""

    class Steps:
        die_at, before, count, dead = -1, False, 0, False

        def around(self, plain):
            def step(path, *rest, **options):
                if self.dead:
                    return None  # a dead process cleans nothing up
                self.count += 1
                self.dead = self.count == self.die_at
                if self.dead and self.before:
                    raise Killed
                found = plain(path, *rest, **options)
                if self.dead:
                    raise Killed
                return found

            return step

        def arm(self, die_at, before):
            self.die_at, self.before, self.count, self.dead = die_at, before, 0, False

    found = Steps()
    monkeypatch.setattr(Path, "replace", found.around(Path.replace))
    monkeypatch.setattr(Path, "unlink", found.around(Path.unlink))
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return found


def test_the_engine_is_the_plain_loop(tmp_path):
    server, states = plain_loop()
    final = engine(tmp_path).run()
    assert final.server.digest() == server.digest()
    assert {name: state.digest() for name, state in final.sites.items()} == {n: s.digest() for n, s in states.items()}


def test_a_run_killed_at_any_step_resumes_to_the_same_digest(tmp_path, steps):
    """Every rename and every removal of the run, killed right before and right after it."""
    undisturbed = engine(tmp_path / "whole").run().digest()
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text()
    total = steps.count
    assert total > 4 * (3 * 3 + 3)  # three files a site, three a phase, and what is removed
    for die_at, before in itertools.product(range(1, total + 1), (True, False)):
        folder = tmp_path / f"{die_at}{before}"
        folder.mkdir()
        steps.arm(die_at, before)
        with pytest.raises(Killed):
            engine(folder).run()
        steps.arm(-1, before)
        assert engine(folder).run().digest() == undisturbed, (die_at, before)
        assert (folder / "metrics.jsonl").read_text() == lines, (die_at, before)


def test_a_run_that_is_killed_again_and_again_still_ends(tmp_path, steps):
    """Every life is seven steps long; a site needs three."""
    undisturbed = engine(tmp_path / "whole").run().digest()
    (tmp_path / "run").mkdir()
    for _ in range(200):
        steps.arm(7, True)
        try:
            found = engine(tmp_path / "run").run().digest()
        except Killed:
            continue
        assert found == undisturbed
        return
    pytest.fail("the run never came to its end")


def test_a_finished_run_does_no_work(tmp_path):
    first = engine(tmp_path).run()
    again = engine(tmp_path)
    assert again.run().digest() == first.digest()
    assert all(runner.worked == [] for runner in again.sites.values())


def test_names_decide_the_order_not_the_mapping(tmp_path):
    backwards = {name: Runner(name) for name in reversed(NAMES)}
    assert engine(tmp_path / "a", sites=backwards).run().digest() == engine(tmp_path / "b").run().digest()


def test_each_line_counts_the_bytes_of_its_payloads(tmp_path):
    engine(tmp_path).run()
    lines = read_metrics(tmp_path)
    assert len(lines) == 4 * 3
    for line in lines:
        reply = Payload({"own": np.zeros(2)}, {})
        broadcast = Payload(
            {"sum": np.zeros(2)}, {"to": line["site"], "phase": line["phase"], "round": line["round"], "rounds": 2}
        )
        assert line["bytes_up"] == len(reply.to_bytes())
        assert line["bytes_down"] == len(broadcast.to_bytes())


def test_figures_of_the_judge_stand_in_the_lines_of_every_phase_that_learns(tmp_path):
    def judge(name, state, broadcast):
        assert broadcast.scalars["phase"] == "final"
        return {"tune_balanced_accuracy": float(state.arrays["own"][0])}

    final = engine(tmp_path, judge=judge).run()
    lines = read_metrics(tmp_path)
    assert {line["phase"] for line in lines if "tune_balanced_accuracy" in line} == {"train", "final"}
    assert sum("tune_balanced_accuracy" in line for line in lines) == 3 * 3
    assert final.digest() == engine(tmp_path / "plain").run().digest()  # looking changes nothing


FIGURES = {"east": (0.9, 0.5, 0.4), "north": (0.5, 0.9, 0.8), "west": (0.7, 0.7, 0.6)}  # round 1, round 2, final phase


def scripted(name, state, broadcast):
    """A judge that knows its answers; the broadcast it is given is that of the round to come."""
    return {"tune_balanced_accuracy": FIGURES[name][int(broadcast.scalars["round"]) - 2]}


def selecting(folder: Path, *names: str) -> LocalEngine:
    return engine(folder, judge=scripted, selecting=frozenset(names))


def test_a_site_keeps_the_round_its_tune_rows_prefer(tmp_path):
    """docs/design.md 5, rows: `tune` selects. The better round; of equal ones the later; state_sha256 is the last's."""
    judged = {}

    def judge(name, state, broadcast):
        judged[name, int(broadcast.scalars["round"]) - 1] = state, broadcast
        return scripted(name, state, broadcast)

    final = engine(tmp_path, judge=judge, selecting=frozenset(NAMES)).run()
    assert {name: kept.round for name, kept in final.selected.items()} == {"east": 1, "north": 2, "west": 2}
    for name, kept in final.selected.items():
        state, broadcast = judged[name, kept.round]  # what was judged is what is kept
        assert kept.state.digest() == state.digest() and kept.broadcast == broadcast
    assert final.selected["east"].state.digest() != final.sites["east"].digest()
    assert final.digest() == engine(tmp_path / "plain").run().digest()


def test_only_sites_that_select_keep_a_round_and_no_more_than_two_phases_stay(tmp_path):
    final = selecting(tmp_path, "east").run()
    assert final.selected.keys() == {"east"}
    files = {str(f.relative_to(tmp_path / "checkpoints")) for f in (tmp_path / "checkpoints").rglob("*") if f.is_file()}
    assert files == {
        "latest.json", "phase-0001/east.state.safetensors", "phase-0001/east.broadcast.safetensors",
        "phase-0003/server.safetensors", *(f"phase-0003/{name}.state.safetensors" for name in NAMES),
    }  # fmt: skip


@pytest.mark.slow
def test_selection_survives_a_kill_at_any_step(tmp_path, steps):
    """Every rename and every removal, killed before and after: the same rounds, bit for bit, and the same files."""

    def left(folder):
        root = folder / "checkpoints"
        latest = json.loads((root / "latest.json").read_text())
        best = [entry[kind] for entry in latest["best"].values() for kind in ("state", "broadcast")]
        return latest, [(root / file).read_bytes() for file in (*latest["sites"].values(), *best)]

    undisturbed = selecting(tmp_path / "whole", *NAMES).run()
    assert {kept.round for kept in undisturbed.selected.values()} == {1, 2}
    for die_at, before in itertools.product(range(1, steps.count + 1), (True, False)):
        folder = tmp_path / f"{die_at}{before}"
        folder.mkdir()
        steps.arm(die_at, before)
        with pytest.raises(Killed):
            selecting(folder, *NAMES).run()
        steps.arm(-1, before)
        resumed = selecting(folder, *NAMES).run()
        assert {n: (k.round, k.state.digest(), k.broadcast) for n, k in resumed.selected.items()} == {
            n: (k.round, k.state.digest(), k.broadcast) for n, k in undisturbed.selected.items()
        }, (die_at, before)
        assert left(folder) == left(tmp_path / "whole"), (die_at, before)


def test_a_share_of_the_sites_takes_part_in_train_rounds_only(tmp_path):
    """Half of three sites are two (1.5 rounded to even), drawn by seed and round; warm and final are for everybody."""
    run = engine(tmp_path, participation=0.5)
    final = run.run()
    phases = Counter(phase for runner in run.sites.values() for phase in runner.worked)
    assert phases[("warm", 0)] == phases[("final", 3)] == 3
    assert [phases[("train", r)] for r in (1, 2)] == [2, 2]
    assert engine(tmp_path / "again", participation=0.5).run().digest() == final.digest()


@given(count=st.integers(1, 12), share=st.floats(0.01, 0.99), seed=st.integers(0, 99), round_=st.integers(1, 50))
def test_participants_are_a_seeded_share(count, share, seed, round_):
    names = [f"s{i:02d}" for i in range(count)]
    chosen = participants(names[::-1], share, seed, Phase("train", round_))
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(names)
    assert len(chosen) == max(1, int(share * count + 0.5))
    assert chosen == participants(names, share, seed, Phase("train", round_))
    assert participants(names, share, seed, Phase("warm", 0)) == names
    assert participants(names, share, seed, Phase("final", round_)) == names
    assert len(participants(names, share, seed, Phase("warm", 0, sampled=True))) == len(chosen)


@pytest.mark.parametrize(("share", "sites", "expected"), [(0.05, 100, 5), (0.025, 200, 5), (0.1, 60, 6), (0.05, 90, 5)])
def test_shares_of_the_papers_are_their_numbers_of_sites(share, sites, expected):
    """PEP-FedPT (arXiv 2510.25372) section 5: five or six sites a round; 5 % of 90 trained sites with ten held out."""
    names = [f"s{i:03d}" for i in range(sites)]
    assert len(participants(names, share, 0, Phase("train", 1))) == expected


def test_over_rounds_every_site_has_its_turn():
    """600 rounds, 2 of 6 sites: each 200 times; five standard deviations allowed."""
    names = list("abcdef")
    seen = Counter(name for r in range(600) for name in participants(names, 1 / 3, 0, Phase("train", r)))
    assert max(abs(seen[name] - 200) for name in names) < 5 * np.sqrt(600 * 1 / 3 * 2 / 3)
    orders = {tuple(tuple(participants(names, 0.5, seed, Phase("train", r))) for r in range(8)) for seed in range(5)}
    assert len(orders) == 5


class Diverging(Adding):
    """Answers with a number that is not finite."""

    def __init__(self, state, reply):
        self.new = state, reply

    def local_round(self, site, state, broadcast):
        state, reply = self.new
        return State({"prompts.b": np.array([state])}), Payload({"w": np.array([reply])}, {})


@pytest.mark.parametrize(("state", "reply"), [(np.nan, 0.0), (np.inf, 0.0), (0.0, np.nan)])
def test_weights_that_are_not_finite_name_site_and_round(state, reply, tmp_path):
    """A last step can spoil the weights after the last loss was fine: nothing of it is sent or kept."""
    runner = InProcessSite(Diverging(state, reply), site([0, 1], name="north"))
    run = engine(tmp_path, method=Adding(), sites={"north": runner})
    with pytest.raises(TrainingError, match="site north diverged in round 0"):
        run.run()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_other_payload_errors_stay_what_they_are(tmp_path):
    class Wrong(Adding):
        def local_round(self, site, state, broadcast):
            return State(), Payload({"w": np.array(["text"])}, {})

    with pytest.raises(PayloadError, match="may not travel"):
        engine(tmp_path, sites={"east": InProcessSite(Wrong(), site([0]))}).run()


def test_a_reply_carries_the_digest_of_its_sites_state():
    """docs/design.md 5: so a live coordinator knows it too."""
    runner = InProcessSite(Diverging(1.5, 2.5), site([0]))
    result = runner.local_round(State(), Payload({}, {"phase": "train", "round": 1, "rounds": 1}), lambda _: None)
    assert result.reply.scalars["site_sha256"] == result.state.digest()
    assert result.metrics["seconds"] >= 0


@pytest.mark.parametrize("text", ["{", "7\n", '{"a": 1}\n{"b"\n'])
def test_damaged_lines_of_metrics_are_a_sentence(text, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged"):
        read_metrics(tmp_path)
    assert json.dumps(read_metrics(tmp_path / "nowhere")) == "[]"


class Buffer(Adding):
    """Sends each site the maps of four peers."""

    def broadcast(self, state, phase, sites):
        maps = {f"maps.{peer}.0": np.full((1, 4), peer, np.float16) for peer in range(4)}
        return {name: Payload({**state.arrays, **maps}, {"to": name}) for name in sites}


def first_peers(folder: Path, **changes) -> dict[str, list[int]]:
    """Which peer is number 0 in each of 14 exchanges, by receiver."""
    found: dict[str, list[int]] = {"east": [], "west": []}

    class Watching(Runner):
        def local_round(self, state, broadcast, report):
            found[self.name].append(int(broadcast.arrays["maps.0.0"][0, 0]))
            return super().local_round(state, broadcast, report)

    task = dataclasses.replace(TASK, rounds=12)
    engine(folder, method=Buffer(), task=task, sites={name: Watching(name) for name in found}, **changes).run()
    return found


def test_peers_are_dealt_anew_in_every_phase(tmp_path):
    """docs/methods.md 1: in a broadcast a peer is a number that names no site over rounds; the same run draws them
    alike."""
    first, second = first_peers(tmp_path / "one"), first_peers(tmp_path / "two")
    assert set(first["east"]) == {0, 1, 2, 3} and first == second


def test_a_server_of_others_deals_peers_by_its_secret(tmp_path):
    """docs/methods.md 1.1: members know the seed and the exchange, and what is drawn does not follow from these alone;
    nor does a receiver learn another one's numbers from its own."""
    keys = {"one": b"1" * 32, "again": b"1" * 32, "two": b"2" * 32}
    drawn = {name: first_peers(tmp_path / name, numbering_key=key) for name, key in keys.items()}
    assert drawn["one"] == drawn["again"] != drawn["two"]
    assert drawn["one"]["east"] != drawn["one"]["west"]
    assert all(set(numbers) == {0, 1, 2, 3} for one in drawn.values() for numbers in one.values())
