"""Probes of an encoder that is being learned, and the round that is kept. Source: docs/decisions/0020."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tests.trainer.conftest import MAE, TINY, edgefl_train
from tests.trainer.engine.test_local_engine import NAMES, TASK, Adding, Killed, engine
from tests.trainer.engine.test_run import metrics, summary
from tests.trainer.engine.test_sites import rows_of, site
from tests.trainer.methods.conftest import examples

from edgefl_protocol import Payload
from edgefl_trainer.contract import Examples, Phase, Site, State, Task, declared
from edgefl_trainer.engine import local_engine, probing
from edgefl_trainer.engine.checkpoint import Checkpoints
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.judging.learned_encoder import probe_backbone
from edgefl_trainer.engine.local_engine import Probed
from edgefl_trainer.engine.probing import as_if_finished, even_draw, make_prober
from edgefl_trainer.learning.linear_probe import ProbeReport
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import load_backbone

HYPER = {"batch": 4, "decoder_width": 32, "decoder_depth": 1, "lr": 1e-2}
TOKEN = "backbone.cls_token"


def report(mean: float | None, pooled: float | None = 0.5) -> ProbeReport:
    return ProbeReport(sites=dict.fromkeys(NAMES, mean), mean=mean, pooled=pooled)


@settings(max_examples=60)
@given(labels=st.lists(st.integers(-1, 3), max_size=60), most=st.integers(0, 40), seed=st.integers(0, 9))
def test_a_draw_is_of_labelled_rows_and_as_even_as_classes_allow(labels, most, seed):
    """A class has fewer rows than another only when all of its rows were taken, or by one."""
    found = even_draw(rows_of(labels), most, np.random.default_rng(seed))
    taken = np.array(labels, dtype=int)[found.rows] if len(found) else np.zeros(0, int)
    assert len(found) == min(most, sum(label >= 0 for label in labels))
    assert (np.diff(found.rows) > 0).all() and (taken >= 0).all()
    counts = {k: int((taken == k).sum()) for k in range(4)}
    for k, count in counts.items():
        assert count == labels.count(k) or count >= max(counts.values()) - 1


@pytest.fixture(scope="module")
def small() -> tuple[Task, dict[str, Site]]:
    backbone = load_backbone("tiny", image_px=36, seed=3)
    task = Task(name="pixels", classes=("a", "b"), backbone=backbone.spec, rounds=7, epochs=1, seed=0)
    sites = {}
    for name, count in (("east", 8), ("west", 12)):
        rows = examples(count, 2, count)
        sites[name] = Site(name=name, task=task, backbone=backbone, train=rows, tune=rows, unlabelled=rows)
    return task, sites


def after_one_round(method, task, sites):
    """Server and sites after round 1, by the contract alone."""
    phase = Phase("train", 1)
    server, states, replies = method.start(task, sorted(sites)), dict.fromkeys(sites, State()), {}
    for name, payload in method.broadcast(server, phase, sorted(sites)).items():
        states[name], replies[name] = method.local_round(sites[name], State(), stamped(payload, phase, task.rounds))
    return method.aggregate(server, phase, replies), states


@pytest.mark.parametrize("kept", ["class_token", "patch_embed", "none"])
def test_an_encoder_in_mid_run_has_the_mean_of_what_stays_local(kept, small):
    """docs/methods.md 3.3: the running weighted mean, which no site is sent."""
    task, sites = small
    method = build(METHODS["fedmae"], {**HYPER, "keep_local": kept})
    server, states = after_one_round(method, task, sites)
    before = {name: state.digest() for name, state in states.items()}
    told = []
    loud = {name: replace(one, report=told.append) for name, one in sites.items()}
    encoder = declared(method).encoder(as_if_finished(method, task, server, states, loud))
    assert {name: state.digest() for name, state in states.items()} == before and not told
    assert {name for name in encoder if np.isfinite(encoder[name]).all()} == set(load_backbone_names(task))
    for name in {"class_token": [TOKEN], "patch_embed": ["backbone.patch_embed.proj.bias"], "none": []}[kept]:
        own = [states[one].arrays[name] for one in ("east", "west")]
        expected = np.average(own, axis=0, weights=[8, 12])
        assert not np.array_equal(*own)
        np.testing.assert_allclose(encoder[name.removeprefix("backbone.")], expected, rtol=1e-5, atol=1e-7)


def load_backbone_names(task: Task) -> list[str]:
    from edgefl_trainer.models.backbones import build_network, weights_of

    return list(weights_of(build_network(task.backbone, 0)))


def test_probes_come_every_few_rounds_and_after_the_last(small, monkeypatch):
    task, sites = small
    method = build(METHODS["fedmae"], HYPER)
    server, states = after_one_round(method, task, sites)
    monkeypatch.setattr(probing, "probe_readouts", lambda *_: {"mean": report(0.5)})
    probe = make_prober(method, task, sites, 3)
    due = [r for r in range(1, 8) if probe(Phase("train", r), server, states)]
    assert due == [3, 6, 7]
    assert probe(Phase("final", 8), server, states) is None
    assert make_prober(method, task, sites, 0) is None
    assert make_prober(build(METHODS["local"], {}), task, sites, 3) is None
    bare = {name: replace(one, tune=replace(one.tune, rows=one.tune.rows[:0])) for name, one in sites.items()}
    assert make_prober(method, task, bare, 3) is None


def test_a_probe_tells_features_that_hold_the_answer(small, monkeypatch):
    """Features that are the class give 1.0 at each site and pooled; the better readout is the figure."""
    task, sites = small
    method = build(METHODS["fedmae"], HYPER)
    server, states = after_one_round(method, task, sites)

    def features(backbone, rows, device):
        target = rows.targets.astype(np.float32)
        return {"cls": np.zeros((len(rows), 2), np.float32), "mean": np.stack([target, 1 - target], axis=1)}

    monkeypatch.setattr(probing, "frozen_features", features)
    found = make_prober(method, task, sites, 1)(Phase("train", 1), server, states)
    assert (found.readout, found.figure) == ("mean", 1.0)
    assert found.line_of("east") == {
        "probe": {"cls": 0.5, "mean": 1.0},
        "probe_pooled": {"cls": 0.5, "mean": 1.0},
    }


def turned(rows: Examples) -> Examples:
    """The same pictures with the other of two labels."""
    return replace(rows, labels=1 - rows.labels)


@pytest.fixture
def contrary(small) -> dict[str, Site]:
    """All train rows teach that bright is 1. East's eight tune rows say the reverse, west's twelve the same."""
    _, sites = small
    east, west = (examples(count, 2, 100 + count) for count in (8, 12))
    return {"east": replace(sites["east"], tune=turned(east)), "west": replace(sites["west"], tune=west)}


def test_a_probe_is_judged_on_tune_rows(contrary, small):
    """docs/methods.md 1.6: fitted on `train`, judged on `tune`. By hand: east 0, west 1, and pooled 12 of 20."""
    task, _ = small
    method = build(METHODS["fedmae"], HYPER)
    found = make_prober(method, task, contrary, 1)(Phase("train", 1), *after_one_round(method, task, contrary))
    assert set(found.reports) == {"cls", "mean"}
    for one in found.reports.values():
        assert one.sites == {"east": 0.0, "west": 1.0}
        assert (one.mean, one.pooled) == (0.5, pytest.approx(0.6))


def test_the_probe_at_the_end_of_a_run_is_judged_on_tune_rows(contrary):
    """The same figures, in `summary.json` as docs/guides/learn-without-labels.md has them."""
    figures = {"mean": 0.5, "pooled": pytest.approx(0.6), "sites": {"east": 0.0, "west": 1.0}}
    backbone = load_backbone("tiny", image_px=36, seed=3)
    assert probe_backbone(backbone, contrary) == {"cls": figures, "mean": figures}


def test_a_probe_of_a_run_reads_rows_of_both_kinds(contrary):
    """Each row stays what it is: train rows to fit on, tune rows to judge on."""
    site = contrary["west"]
    fitted, judged = probing.rows_of(site)
    np.testing.assert_array_equal(fitted.images[fitted.rows], site.train.images)
    np.testing.assert_array_equal(judged.images[judged.rows], site.tune.images)


class Learning(Adding):
    """Three rounds."""

    def phases(self, rounds):
        return [Phase("train", r) for r in (1, 2, 3)]


def scripted(figures):
    """A probe with these figures; the encoder is the number of the round."""

    def probe(phase, server, states):
        return Probed(phase.round, {"w": np.array([float(phase.round)])}, {"mean": report(figures[phase.round - 1])})

    return probe


@pytest.mark.parametrize(
    ("figures", "kept"),
    [((0.5, 0.7, 0.6), 2), ((0.7, 0.5, 0.6), 1), ((0.5, 0.6, 0.6), 3), ((0.5, None, None), 1), ((None,) * 3, None)],
)
def test_the_encoder_of_the_best_probe_is_kept(figures, kept, tmp_path):
    """Ties go to the later round; a probe without a figure chooses nothing."""
    task = replace(TASK, rounds=3)
    made = engine(tmp_path, method=Learning(), task=task, probe=scripted(figures), selecting_encoder=True).run()
    assert (made.encoder and made.encoder.round) == kept
    if kept:
        np.testing.assert_array_equal(made.encoder.weights["w"], [kept])
    assert len(list((tmp_path / "checkpoints").rglob("encoder.safetensors"))) == (kept is not None)
    last = engine(tmp_path / "last", method=Learning(), task=task, probe=scripted(figures)).run()
    assert last.encoder is None and last.digest() == made.digest()


def test_the_kept_encoder_survives_a_kill(tmp_path, monkeypatch):
    """Killed while round 3 is made final, the run still knows that round 2 was the best."""
    task = replace(TASK, rounds=3)
    arguments = {"method": Learning(), "task": task, "probe": scripted((0.5, 0.7, 0.6)), "selecting_encoder": True}
    plain = Checkpoints.finish_phase

    def die(self, phase, *rest):
        if phase == 2:
            raise Killed
        plain(self, phase, *rest)

    monkeypatch.setattr(local_engine.Checkpoints, "finish_phase", die)
    with pytest.raises(Killed):
        engine(tmp_path, **arguments).run()
    monkeypatch.undo()
    again = engine(tmp_path, **arguments).run()
    np.testing.assert_array_equal(again.encoder.weights["w"], [2.0])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["probe"]["mean"] for line in lines if line["site"] == NAMES[0]] == [0.5, 0.7, 0.6]


def test_work_of_a_site_is_summed_up(tmp_path):
    """Images per second and waiting of docs/reference/runs.md, over all steps of a phase."""

    class Telling(Adding):
        def local_round(self, site, state, broadcast):
            for step in (1, 2):
                site.report({"step": step, "images": 30, "wait_seconds": 0.25})
            site.report({"summary": 1, "loss": 1.0, "images": 7, "wait_seconds": 9.0})  # of an epoch: not added again
            return State(), Payload({}, {})

    runner = local_engine.InProcessSite(Telling(), site([0]))
    line = runner.local_round(State(), Payload({}, {"round": 1}), lambda _: None).metrics
    assert (line["images"], line["wait_seconds"]) == (60, 0.5)
    assert line["images_per_second"] > 0


def test_a_run_keeps_the_round_with_the_best_probe(tmp_path, ward, monkeypatch):
    """--select tune: `backbone.safetensors` holds the encoder of that round, and probing changes no state."""
    seen: list[Probed] = []

    def figure(self):
        seen.append(self)
        return {1: 0.9}.get(self.round, 0.5)

    arguments = ("run", "fedmae", "--data", ward, "--backbone", "tiny", *TINY, *MAE, "--json")
    monkeypatch.setattr(Probed, "figure", property(figure))
    found = edgefl_train(*arguments, "--out", tmp_path / "a", "--select", "tune", "--probe-every", 1).json()
    assert (found["select"], found["selected_round"], found["rounds"]) == ("tune", 1, 2)
    saved = load_file(tmp_path / "a" / "backbone.safetensors")
    assert [one.round for one in seen] == [1, 2]
    for name, value in seen[0].weights.items():
        np.testing.assert_array_equal(saved[name], value)
    lines = [line for line in metrics(tmp_path / "a") if line["phase"] == "train"]
    assert all(set(line["probe"]) == set(line["probe_pooled"]) == {"cls", "mean"} for line in lines)
    never = edgefl_train(*arguments, "--out", tmp_path / "b", "--probe-every", 0).json()
    assert never["state_sha256"] == found["state_sha256"]
    assert never["selected_round"] == 2 and never["backbone_sha256"] != found["backbone_sha256"]
    assert not any("probe" in line for line in metrics(tmp_path / "b"))
    assert 0 <= found["wait_share"] <= 1 and found["images_per_second"] > 0


def test_the_last_round_is_probed_by_default(mae):
    """Every five rounds and after the last: here the second of two."""
    lines = [line for line in metrics(mae) if line["phase"] == "train"]
    assert ["probe" in line for line in lines] == [False, False, True, True]
    assert summary(mae)["selected_round"] == 2


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("fedmae", ("--select", "tune", "--probe-every", 0), "--probe-every 1 or more"),
        ("fedavg", ("--probe-every", 3), "learns no backbone"),
        ("local-cl", ("--select", "tune"), "keeps each site's last network"),
    ],
)
def test_what_has_no_meaning_is_refused(method, options, words, tmp_path, ward):
    outcome = edgefl_train(
        "run", method, "--data", ward, "--backbone", "tiny", *TINY, "--out", tmp_path / "x", *options
    )
    assert outcome.code == 2 and words in outcome.sentence()
    assert not (tmp_path / "x").exists()
