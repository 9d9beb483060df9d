"""`edgefl ask`: what is printed, what it ends with, what it draws and logs. Source: docs/reference/answers.md."""

import contextlib
import hashlib
import json
import os
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
from tests.asking import ANSWERS, NOW_MS, SIGNER, TRIED, ask_bundle, expected
from tests.conftest import encoded, photo, true_map

from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.bundle.question_table import OtherPicture, TriedQuestions
from edgefl_protocol.pictures.imaging import decode, prepare

KEYS = [
    "image", "question", "answer", "confidence", "answers", "refused", "refuse_reasons", "rules_tried",
    "unknown_words", "unread_words", "entropy_nats", "entropy_from", "heatmap", "heatmap_fall", "model", "milliseconds",
]  # fmt: skip


@pytest.fixture
def ward(tmp_path):
    """A radiograph, a bundle that answers questions, and one for pictures."""
    grey = np.random.default_rng(5).integers(0, 160, (60, 50, 1), np.uint8).repeat(3, axis=2)
    (tmp_path / "CANARY.png").write_bytes(encoded(grey))
    (tmp_path / "ask.edgefl").write_bytes(ask_bundle(unsure_above=1.3, shown=true_map("attention")))
    (tmp_path / "signing.pub").write_text(SIGNER.public.hex())
    return tmp_path


@pytest.fixture
def asked(run, ward):
    def call(question, *more, image=ward / "CANARY.png", model="ask.edgefl"):
        return run("ask", image, question, "--model", ward / model, "--trust", ward / "signing.pub", *more)

    return call


def test_json_has_the_documented_keys_and_the_formulas_figures(asked, ward):
    code, out, err = asked("Which organ is shown, doctor?", "--json", "--top", "3")
    assert code == 0 and "Research use only" in err
    told = json.loads(out)
    assert list(told) == KEYS
    bundle = load_bundle((ward / "ask.edgefl").read_bytes(), [SIGNER.public], NOW_MS)
    wanted = expected(prepare(decode((ward / "CANARY.png").read_bytes()), bundle.preprocess), told["question"])
    assert told["answer"] == ANSWERS[int(wanted.argmax())] and told["confidence"] == pytest.approx(wanted.max())
    assert [one["confidence"] for one in told["answers"]] == pytest.approx(sorted(wanted, reverse=True)[:3], abs=1e-6)
    assert told["unknown_words"] == ["doctor"] and told["unread_words"] == [] and told["refused"] is False
    assert told["entropy_from"] == 1.3 and told["model"]["sha256"] == bundle.sha256
    assert told["model"]["better_than_chance"] is True and told["heatmap"] is None


def test_a_person_reads_answer_confidence_what_was_not_asked_and_what_an_answer_is_not(asked):
    code, out, _ = asked("Which organ is shown, doctor?")
    assert code == 0
    for words in (
        "CANARY.png: lung, confidence ", ", asked without: doctor\n", "Next: liver ",
        "Not known to the model, so not asked: doctor.",
        "Of 150 questions kept from learning it answered 75, 60 of these rightly (80.0%).",
        "The most probable of the 5 answers that this model knows; it can give no other, and it may be wrong.",
    ):  # fmt: skip
        assert words in out


def test_a_refusal_is_a_result_and_names_no_answer(asked):
    """Status 0, as for a referral: docs/design.md 5."""
    code, out, _ = asked("pneumothorax?")
    assert code == 0 and "No answer: the model knows no word of this question" in out
    assert "lung" not in out and "may be wrong" not in out
    told = json.loads(asked("pneumothorax?", "--json")[1])
    assert (told["answer"], told["confidence"], told["answers"], told["entropy_nats"]) == (None, None, [], None)
    assert told["refuse_reasons"] == ["no_known_word"]


def test_too_unsure(asked, ward):
    (ward / "unsure.edgefl").write_bytes(ask_bundle(unsure_above=0.01))
    code, out, _ = asked("which organ?", model="unsure.edgefl")
    assert code == 0 and "No answer: the model is too unsure (entropy " in out and "lung" not in out


@pytest.mark.parametrize(("question", "words"), [("word " * 10_000, "50,000 characters"), ("", "no word")])
def test_a_question_that_is_none_fails_in_one_sentence(asked, question, words):
    code, out, err = asked(question)
    assert (code, out) == (1, "") and words in err.splitlines()[-1]
    code, out, _ = asked(question, "--json")
    told = json.loads(out)
    assert code == 1 and told["error"]["code"] == "bad_question" and list(told) == ["image", "question", "error"]


def test_a_picture_that_cannot_be_read_fails_in_one_sentence(asked, ward):
    (ward / "text.png").write_text("no picture")
    for image, code in ((ward / "missing.png", "missing"), (ward / "text.png", "unsupported_format"), ("", "missing")):
        left, out, err = asked("which organ?", "--json", image=image)
        assert left == 1 and json.loads(out)["error"]["code"] == code
        left, out, err = asked("which organ?", image=image)
        assert (left, out) == (1, "") and err.splitlines()[-1].startswith("edgefl: ")


def test_wrong_kinds_of_bundles_name_the_other_command(run, asked, ward, files):
    """Nobody refused them, so the status is that of usage."""
    code, out, err = asked("which organ?", model="model.edgefl")
    assert (code, out) == (2, "") and "edgefl score IMAGE" in err.splitlines()[-1]
    options = ("--model", ward / "ask.edgefl", "--trust", ward / "signing.pub")
    for command in (("score", files / "good.png"), ("watch", ward, "--once"), ("score", files / "good.png",
                    "--refer-above", "7"), ("score", files / "good.png", "--weights", "personal")):  # fmt: skip
        code, out, err = run(*command, *options)
        assert (code, out) == (2, ""), command
        assert 'edgefl ask IMAGE "QUESTION"' in err.splitlines()[-1]
    code, out, err = run("train", "--pictures", ward, *options)
    assert code == 1 and len(err.splitlines()) == 1


def test_trust_is_as_for_a_score(run, ward):
    code, out, err = run("ask", ward / "CANARY.png", "which organ?", "--model", ward / "ask.edgefl")
    assert (code, out) == (3, "") and "trust" in err
    assert run("use", ward / "ask.edgefl", "--trust", SIGNER.public.hex())[0] == 0
    code, out, _ = run("ask", ward / "CANARY.png", "which organ?")
    assert code == 0 and "lung" in out


def test_standard_input(ward):
    environment = {**os.environ, "EDGEFL_HOME": str(ward / "home")}
    words = [sys.executable, "-c", "import sys; from edgefl_client.cli import main; main(sys.argv[1:])", "ask", "-",
             "which organ?", "--model", "ask.edgefl", "--trust", "signing.pub", "--json"]  # fmt: skip
    data = (ward / "CANARY.png").read_bytes()
    done = subprocess.run(words, input=data, capture_output=True, cwd=ward, env=environment, check=True)
    assert json.loads(done.stdout)["answer"] == "lung"


def test_the_picture_has_question_answer_and_map(asked, ward, said):
    code, out, _ = asked("which organ is shown?", "--json", "--heatmap", ward / "maps")
    assert code == 0
    digest = hashlib.sha256((ward / "CANARY.png").read_bytes()).hexdigest()
    told = json.loads(out)
    assert told["heatmap"] == str(ward / "maps" / f"CANARY-{digest[:16]}.heatmap.png")
    assert (ward / "maps" / f"CANARY-{digest[:16]}.heatmap.png").stat().st_size
    words = " ".join(said)
    for part in ("Question: which organ is shown?", "Answer: lung, confidence", "Where the model looked",
                 "Measured on 96 questions", "answered by vqa/all version 1", "kept from learning", digest[:16],
                 "may be wrong"):  # fmt: skip
        assert part in words
    said.clear()
    asked("pneumothorax?", "--heatmap", ward / "maps")
    refused = " ".join(said)
    assert "No answer: the model knows no word" in refused and "lung" not in refused


@pytest.fixture
def said(monkeypatch):
    """What is written into the picture."""
    from PIL import ImageDraw

    texts: list[str] = []
    original = ImageDraw.ImageDraw.text

    def spy(self, at, text, *args, **kwargs):
        texts.append(text)
        return original(self, at, text, *args, **kwargs)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", spy)
    return texts


def test_a_picture_that_cannot_be_drawn_costs_no_answer(asked, ward):
    if os.geteuid() == 0:
        (ward / "maps").mkdir()
        digest = hashlib.sha256((ward / "CANARY.png").read_bytes()).hexdigest()[:16]
        (ward / "maps" / f"CANARY-{digest}.heatmap.png").mkdir()  # a folder where the file should go
    code, out, err = asked("which organ?", "--json", "--heatmap", ward / "maps")
    assert code == 1 and json.loads(out)["answer"] == "lung" and json.loads(out)["heatmap"] is None
    assert "no heat map" in err


def rows(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute("SELECT * FROM answer ORDER BY number")]


def test_the_log_holds_figures_and_no_words(asked, ward):
    """docs/security.md, check 70: the same for answers; a question may name a patient."""
    log, question = ward / "log.sqlite", "which organ, Mrs CANARYNAME?"
    told = json.loads(asked(question, "--json", "--log", log)[1])
    assert asked("word " * 10_000, "--log", log)[0] == 1
    assert asked(question, "--log", log, image=ward / "missing.png")[0] == 1
    found = rows(log)
    assert len(found) == 3 and b"CANARY" not in log.read_bytes() and log.stat().st_mode & 0o777 == 0o600
    assert found[0]["question_sha256"] == hashlib.sha256(question.encode()).hexdigest()
    assert found[0]["image_sha256"] == hashlib.sha256((ward / "CANARY.png").read_bytes()).hexdigest()
    assert found[0]["answer"] == told["answer"] and found[0]["entropy_nats"] == told["entropy_nats"]
    best = list(json.loads(found[0]["probabilities"]).items())[:5]
    assert best == [(one["answer"], one["confidence"]) for one in told["answers"]]
    assert [row["error_code"] for row in found] == [None, "bad_question", "missing"]
    again = json.loads(asked(question, "--json", "--log", log)[1])
    assert again["answers"] == told["answers"]


def test_a_log_of_scores_takes_no_answers_and_the_reverse(run, asked, ward, files):
    scores, answers = ward / "scores.sqlite", ward / "answers.sqlite"
    options = ("--model", files / "model.edgefl", "--trust", files / "signing.pub", "--log")
    assert run("score", files / "good.png", *options, scores)[0] == 0
    assert asked("which organ?", "--log", answers)[0] == 0
    code, out, err = asked("which organ?", "--log", scores)
    assert (code, out) == (1, "") and "not a log of answers" in err
    code, out, err = run("score", files / "good.png", *options, answers)
    assert (code, out) == (1, "") and "not a log of scores" in err


def test_what_its_card_says_against_it_is_said_with_every_answer(asked, ward):
    blind = TriedQuestions(
        questions=150,
        right=90,
        answered=75,
        answered_right=60,
        other_picture=OtherPicture(right=89, low=-0.1, high=0.1),
    )
    site = {"site": {"accuracy": 0.42, "n_test": 174, "accuracy_interval": [0.35, 0.5]}}
    (ward / "blind.edgefl").write_bytes(ask_bundle(tried=blind, metrics=site, unsure_above=None))
    code, out, err = asked("which organ?", model="blind.edgefl")
    assert code == 0
    looked = (
        "This model was not found to look at the picture: of 150 questions kept from learning it answered 90 rightly "
        "with their own picture, and 89 with the picture of another one."
    )
    assert "This model was not found to look at the picture." in out and looked in err
    assert (
        "More than half of this model's answers were wrong: accuracy 0.420 on 174 questions of the site CHEST." in err
    )
    assert "No threshold says when it is too unsure" in err
    assert json.loads(asked("which organ?", "--json", model="blind.edgefl")[1])["model"]["better_than_chance"] is False


def test_use_and_status_say_what_it_knows(run, ward):
    code, out, _ = run("use", ward / "ask.edgefl", "--trust", SIGNER.public.hex())
    assert code == 0
    assert "it knows 5 answers and 7 words" in out and "kept from learning it answered 75" in out
    assert "suspicious" not in out and "balanced accuracy" not in out
    assert "answers: no, yes, lung, liver and 2" in run("status")[1]
    told = json.loads(run("status", "--json")[1])["model"]
    assert told["questions"] == {"answers": 5, "words": 7} and told["quality"]


def test_doctor_tries_a_question(ward, monkeypatch):
    """What the second process finds, asked in this one."""
    from edgefl_client.doctor.checks import _model, _quality
    from edgefl_client.doctor.measure import measure
    from edgefl_client.doctor.second_process import _model as tried

    work, facts = tried(ward / "home", str(ward / "ask.edgefl"), [SIGNER.public.hex()], 1)
    assert facts["answers"] and not facts["asks_always"] and set(facts["probabilities"]) == set(ANSWERS)
    assert "answers a question about a drawn picture" in _model(facts, NOW_MS).found
    assert [one.state for one in _quality(facts)] == ["ok"]
    assert len(measure(work(), work).to_json()["rows"]) == 4
    assert TRIED.questions == 150


def test_formats_are_those_of_score(asked, ward):
    from io import BytesIO

    from PIL import Image

    out = BytesIO()
    Image.fromarray(photo(40, 40)).save(out, "TIFF")
    (ward / "a.tif").write_bytes(out.getvalue())
    code, text, _ = asked("which organ?", "--json", image=ward / "a.tif")
    assert code == 1 and json.loads(text)["error"]["code"] == "unsupported_format"
    assert asked("which organ?", "--formats", "tiff", image=ward / "a.tif")[0] == 0
