"""Runs over pictures that are asked questions, from end to end on coloured pictures in VQA-RAD's layout."""

import json
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from tests.trainer.conftest import edgefl_train, make_asked

from edgefl_protocol.pictures.light import measure_light
from edgefl_trainer.engine.models import open_run, predict_rows
from edgefl_trainer.engine.settings import resolve
from edgefl_trainer.engine.sites import load_data, read_sites, report_rows
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import load_backbone

TINY = ("--preset", "tiny", "--image-px", "36", "--backbone", "tiny", "--device", "cpu")
SMALL = ("--set", "width=32", "--set", "heads=2", "--set", "batch=8")
ASKING = ("fedavg", "fedavgpers", "fedprox", "local", "pfl-vqa")
SITES = {"rad-abdomen", "rad-chest", "rad-head"}


def run(method: str, data: str, out: Path, *more: object):
    return edgefl_train("run", method, "--data", data, "--out", out, *TINY, *SMALL, *more)


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def learned(cached, tmp_path_factory) -> dict[str, Path]:
    """Runs of `local` that look, and that do not, over enough pictures to learn what is asked."""
    root = tmp_path_factory.mktemp("asked-runs")
    data = f"vqa-rad:{make_asked(root / 'data', {'HEAD': 40, 'CHEST': 36}, test=18)}"
    long_enough = ("--rounds", 1, "--epochs", 8, "--set", "lr=0.003")
    with mock.patch("edgefl_protocol.pictures.light.LEAST_ASKED", 20):
        for picture in ("seen", "hidden"):
            done = run("local", data, root / picture, *long_enough, "--set", f"picture={picture}")
            assert done.code == 0, done.err
    return {picture: root / picture for picture in ("seen", "hidden")}


def test_a_model_that_looks_beats_the_question_alone(learned):
    """Which colour it is no word says: a third of the open questions is all that reading can give."""
    looked, read = (summary(learned[picture]) for picture in ("seen", "hidden"))
    assert looked["mean_accuracy_open_questions"] > 0.8
    assert read["mean_accuracy_open_questions"] < 0.6
    assert looked["mean_accuracy"] > read["mean_accuracy"] + 0.2


def test_open_and_closed_questions_are_told_apart(learned):
    """From the model's own answers, counted here row by row."""
    finished = open_run(learned["seen"])
    federation = load_data(finished.settings, 36)
    for name, figures in summary(learned["seen"])["sites"].items():
        rows = report_rows(federation, name)
        right = predict_rows(finished.predictor(name), rows).predicted == rows.targets
        closed = federation.questions.closed[rows.rows]
        assert figures["accuracy"] == pytest.approx(right.mean())
        assert figures["accuracy_open_questions"] == pytest.approx(right[~closed].mean())
        assert figures["accuracy_closed_questions"] == pytest.approx(right[closed].mean())
        assert (figures["n_open_questions"], figures["n_closed_questions"]) == (18, 18)
        for part in ("", "_open_questions", "_closed_questions"):
            low, high = figures[f"accuracy{part}_interval"]
            assert low <= figures[f"accuracy{part}"] <= high
    sites = [figures["accuracy"] for figures in summary(learned["seen"])["sites"].values()]
    assert summary(learned["seen"])["worst_accuracy"] == min(sites)


def test_a_run_tells_in_what_light_its_training_pictures_are(learned):
    """The nearest and furthest of them, counted here, but for 0.5 % and wider by 2 %: docs/reference/answers.md."""
    finished = open_run(learned["seen"])
    federation = load_data(finished.settings, 36)
    for name, site in federation.sites.items():
        told = finished.calibration["sites"][name]
        seen = [measure_light(federation.images[place]) for place in np.unique(federation.places(site.train))]
        assert "unlit_above" not in told and len(seen) >= 20
        for ratio, (low, high) in told["light"].items():
            values = [getattr(one, ratio) for one in seen]
            assert low == pytest.approx(np.quantile(values, 0.005) / 1.02)
            assert high == pytest.approx(min(np.quantile(values, 0.995) * 1.02, 255))


def test_a_run_keeps_its_words(learned):
    finished = open_run(learned["seen"])
    assert finished.questions.words == ("blue", "colour", "green", "is", "it", "red", "what")
    assert finished.questions == load_data(finished.settings, 36).questions.vocabulary
    assert set(finished.classes) == {"red", "green", "blue", "yes", "no"}


@pytest.mark.parametrize("method", ASKING)
def test_the_five_methods_answer_questions(method, asked, tmp_path):
    done = run(method, asked, tmp_path / "run", "--rounds", 2)
    assert done.code == 0, done.err
    found = summary(tmp_path / "run")
    assert set(found["sites"]) == SITES
    assert found["mean_accuracy"] is not None and found["usual_answer"]["mean_accuracy_closed_questions"] is not None
    assert found["travels"] == {"local": [], "pfl-vqa": ["prompts"]}.get(method, ["prompts", "weights"])
    prompt = 2 * 8 * 32 * 4 * 3  # two kinds of eight prompts of width 32, float32, of three sites
    if method == "pfl-vqa":
        assert prompt < found["bytes_up_per_round"] < prompt + 3 * 400


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_digest(asked, tmp_path, kill_after):
    whole = ("run", "pfl-vqa", "--data", asked, *TINY, *SMALL, "--rounds", "2")
    assert edgefl_train(*whole, "--out", tmp_path / "one").code == 0
    kill_after("phase-0001/rad-chest.metrics.json", *whole, "--out", tmp_path / "two")
    assert edgefl_train("run", "--resume", "--out", tmp_path / "two").code == 0
    assert summary(tmp_path / "one")["state_sha256"] == summary(tmp_path / "two")["state_sha256"]


@pytest.mark.parametrize("method", sorted(n for n, kind in METHODS.items() if kind.needs_labels and n not in ASKING))
def test_any_other_method_refuses_questions(method, asked, tmp_path):
    done = run(method, asked, tmp_path / "run")
    assert done.code == 2
    assert done.sentence() == (
        f"{asked} asks questions about its pictures, and {method} answers none: use {', '.join(ASKING)}."
    )
    assert not (tmp_path / "run").exists()


def test_a_network_is_learned_from_the_pictures_whatever_is_asked(asked, tmp_path):
    """`fedmae` needs no labels: its network can then be the one whose tokens are asked about."""
    mae = ("run", "fedmae", "--data", asked, *TINY, "--rounds", "1", "--set", "batch=8", "--set", "decoder_width=32")
    done = edgefl_train(*mae, "--out", tmp_path / "mae")
    assert done.code == 0, done.err
    assert not (tmp_path / "mae" / "questions.json").exists()
    given = ("--data", asked, "--out", tmp_path / "vqa", "--preset", "tiny", "--device", "cpu", "--rounds", "1", *SMALL)
    done = edgefl_train("run", "pfl-vqa", *given, "--backbone", f"run:{tmp_path / 'mae'}")
    assert done.code == 0, done.err


def test_a_method_of_questions_refuses_pictures_alone(ward, tmp_path):
    done = run("pfl-vqa", ward, tmp_path / "run")
    assert done.code == 2 and "the pictures of this task are asked none" in done.sentence()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "sentence"), [("lr_b=0.1", "there is no key 'lr_b'"), ("width=30.5", "a whole number")]
)
def test_settings_are_those_of_the_answer_model(text, sentence, asked, tmp_path):
    done = edgefl_train("run", "local", "--data", asked, "--out", tmp_path / "run", *TINY, "--set", text)
    assert done.code == 2 and sentence in done.sentence()


def test_presets_and_settings_of_an_answer_model(asked):
    """The same schedule for the five, so that a comparison needs no more than the method's name."""
    made = {name: resolve(name, {"data": (asked,), "preset": "bench84"}, None, []) for name in ASKING}
    assert len({(found.rounds, found.epochs, found.backbone) for found in made.values()}) == 1
    pictures = resolve("local", {"data": ("lesions:sites=2,images=40",), "preset": "bench84"}, None, [])
    assert "lr_b" in pictures.hyper and "lr_b" not in made["local"].hyper


def test_a_vision_transformer_may_learn_from_the_start(asked, tmp_path):
    """`encoder=learned`: an untrained one outside the trial preset is no mistake then; what travels grows with it."""
    folders = {encoder: tmp_path / encoder for encoder in ("frozen", "learned")}
    for encoder, folder in folders.items():
        done = run("fedavg", asked, folder, "--rounds", 1, "--set", f"encoder={encoder}")
        assert done.code == 0, done.err
    frozen, learned = (summary(folder)["bytes_up_per_round"] for folder in folders.values())
    assert learned > frozen + 4 * 64 * 64 * 4
    assert len(open_run(folders["learned"]).predictor("rad-head").network) > 40
    bench = ("--preset", "bench84", "--backbone", "vit:64x1/12", "--image-px", "36", "--rounds", "1", "--epochs", "1")
    more = (*bench, "--device", "cpu", *SMALL)
    given = ("run", "local", "--data", asked)
    assert "is untrained" in edgefl_train(*given, "--out", tmp_path / "a", *more).sentence()
    assert edgefl_train(*given, "--out", tmp_path / "b", *more, "--set", "encoder=learned").code == 0


def test_other_questions_are_judged_with_the_words_of_the_run(learned, tmp_path, cached):
    """Unknown words and answers count, as wrong; pictures of the first SPEC, questions of another file."""
    other = make_asked(tmp_path / "more", {"HEAD": 12}, seed=5)
    records = json.loads((other / "trainset.json").read_text())
    for record in records[:6]:
        record |= {"question": "which dye", "answer": "octarine", "answer_type": "OPEN"}
    (other / "testset.json").write_text(json.dumps(records))
    done = edgefl_train("evaluate", learned["seen"], "--data", f"vqa-rad:{other}", "--json")
    found = done.json()["sites"]["rad-head"]
    assert found["n_test"] == 24
    assert found["accuracy"] <= 18 / 24
    assert (
        "warning: a device refuses 6 of the 24 questions of test, for a word that no training question has" in done.err
    )


def test_sentences_about_questions_speak_of_no_lesion_and_no_class(learned, asked, tmp_path):
    """Pictures of the skin have those: what a person reads of questions is about pictures, questions and answers."""
    judged = ("evaluate", learned["seen"], "--data", asked)
    done = [
        edgefl_train("data", asked),
        edgefl_train("data", f"{asked}@split=iid:5000"),
        edgefl_train(*judged),
        edgefl_train(*judged, "--plot", tmp_path / "a.png"),
    ]
    for one in done:
        assert "lesion" not in one.out + one.err and "manifest" not in one.out + one.err, one.out + one.err
    assert "15 % of each site's pictures" in done[0].out and "but the data holds only" in done[1].out
    assert "named with @split=test is judged whole" in done[2].out
    assert done[3].sentence().endswith("this run answers questions, and the picture is of classes: leave --plot out.")


def test_a_run_of_one_kind_is_not_judged_on_the_other(learned, asked, ward, finished):
    done = edgefl_train("evaluate", learned["seen"], "--data", ward)
    assert "learned from questions about pictures, and the data holds pictures alone" in done.sentence()
    done = edgefl_train("evaluate", finished["local"], "--data", asked)
    assert "learned from pictures alone, and the data holds questions about pictures" in done.sentence()


def test_a_folder_and_its_zip_are_one_run(tmp_path, cached):
    """All that a method is given is the same: the task, and of each site its name, pictures, questions and answers."""
    root = make_asked(tmp_path / "folder", {"HEAD": 12, "ABD": 12}, test=6)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in sorted(root.rglob("*.*")):
            archive.write(path, path.relative_to(root))
    given = []
    for data in (root, tmp_path / "all.zip"):
        settings = resolve("local", {"data": (f"vqa-rad:{data}",), "preset": "tiny", "device": "cpu"}, None, [])
        network = load_backbone("tiny", image_px=36, seed=settings.seed)
        given.append(read_sites(settings, settings.build_method(), network, None)[1:])
    (task, sites), (same, others) = given
    assert task == same and list(sites) == list(others) == ["rad-abdomen", "rad-head"]
    for name in sites:
        assert len(sites[name].train) > 0
        for kind in ("train", "tune", "unlabelled"):
            one, two = (getattr(of[name], kind) for of in (sites, others))
            assert len(one) == len(two)
            every = np.arange(len(one))
            pairs = zip((*one.read(every), one.asked(every)), (*two.read(every), two.asked(every)), strict=True)
            assert all(torch.equal(mine, other) for mine, other in pairs)


def test_the_prediction_of_a_picture_alone_is_refused(learned, tmp_path):
    """`edgefl-train predict` has no question to ask."""
    from PIL import Image

    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(tmp_path / "a.png")
    done = edgefl_train("predict", learned["seen"], tmp_path / "a.png", "--site", "rad-head")
    assert done.code == 2 and "answers questions" in done.sentence()
