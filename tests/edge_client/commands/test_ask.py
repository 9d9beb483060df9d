"""`edgefl ask`: what is printed, what it ends with, what it draws and logs. Source: docs/reference/answers.md."""

import hashlib
import json
import os
import subprocess
import sys

import click
import numpy as np
import pytest
from tests.asking import ANSWERS, NOW_MS, SIGNER, TRIED, WORDS, ask_bundle, expected, rows
from tests.conftest import photo, true_map

from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.bundle.question_table import OtherPicture, TriedQuestions
from edgefl_protocol.pictures.imaging import decode
from edgefl_protocol.pictures.preprocess import prepare

KEYS = [
    "image", "question", "answer", "confidence", "measured", "learned_from", "learned_from_federation", "answers",
    "refused", "refuse_reasons", "rules_tried", "unknown_words", "untaught_words", "unread_words", "negating_words",
    "entropy_nats", "entropy_from", "heatmap", "heatmap_fall", "light", "transparent", "model", "milliseconds",
]  # fmt: skip


def test_json_has_the_documented_keys_and_the_formulas_figures(asked, ward):
    code, out, err = asked("Which organ is shown, please?", "--json", "--top", "3")
    assert code == 0 and "Research use only" in err
    told = json.loads(out)
    assert list(told) == KEYS
    bundle = load_bundle((ward / "ask.edgefl").read_bytes(), [SIGNER.public], NOW_MS)
    wanted = expected(prepare(decode((ward / "CANARY.png").read_bytes()), bundle.preprocess), told["question"])
    assert told["answer"] == ANSWERS[int(wanted.argmax())] and told["confidence"] == pytest.approx(wanted.max())
    assert [one["confidence"] for one in told["answers"]] == pytest.approx(sorted(wanted, reverse=True)[:3], abs=1e-6)
    assert told["unknown_words"] == ["please"] and told["unread_words"] == [] and told["refused"] is False
    assert told["entropy_from"] == 1.3 and told["model"]["sha256"] == bundle.sha256
    assert told["model"]["better_than_chance"] is True and told["heatmap"] is None
    assert told["measured"] == {"answered": 75, "right": 60, "share": 0.8} and told["learned_from"] == ["CHEST"]


def test_a_person_reads_answer_confidence_what_was_not_asked_and_what_an_answer_is_not(asked):
    code, out, _ = asked("Which organ is shown, please?")
    assert code == 0
    for words in (
        "CANARY.png: lung; right when tried: 60 of 75 answers (80.0%); confidence ", ", asked without: please\n",
        "Next: liver ",
        "Not known to the model, so not asked: please.",
        "Of 150 questions kept from learning it refused 75 and answered 75, 60 of these rightly (80.0%).",
        "It learned from pictures of the site CHEST; whether this is such a picture is not checked.",
        "The most probable of the 5 answers that this model met in its own questions, of 5 that it knows; it can "
        "give no other, and it may be wrong.",
    ):  # fmt: skip
        assert words in out


def test_a_refusal_is_a_result_and_names_no_answer(asked):
    """Status 0, as for a referral: docs/design.md 5."""
    code, out, _ = asked("pneumothorax?")
    assert code == 0 and "No answer: the model knows no word of this question" in out
    assert "lung" not in out and "may be wrong" not in out and "CHEST" not in out
    told = json.loads(asked("pneumothorax?", "--json")[1])
    assert (told["answer"], told["confidence"], told["answers"], told["entropy_nats"]) == (None, None, [], None)
    assert told["refuse_reasons"] == ["no_known_word"]


def test_a_question_of_which_a_word_is_unknown_gets_no_answer(asked, ward):
    """Without the word it would be another question: docs/decisions/0048."""
    code, out, _ = asked("Which organ is shown, tuberculosis?")
    assert code == 0 and out.splitlines()[0].endswith("No answer: the model does not know tuberculosis")
    assert out.splitlines()[1] == "Ask in other words: without 'tuberculosis' this would be another question."
    assert "lung" not in out and "confidence" not in out and "may be wrong" not in out
    told = json.loads(asked("Which organ is shown, tuberculosis?", "--json", "--log", ward / "log.sqlite")[1])
    assert (told["answer"], told["confidence"], told["refused"]) == (None, None, True)
    assert told["refuse_reasons"] == ["unknown_word"] and told["answers"][0]["answer"] == "lung"
    (row,) = rows(ward / "log.sqlite")
    assert (row["answer"], row["refused"], row["refuse_reasons"]) == (None, 1, "unknown_word")


def test_a_word_that_was_never_taught_gets_no_answer(asked, ward):
    """The network has a row for it that no step moved: docs/decisions/0051."""
    taught = tuple(word not in ("fracture", "a") for word in WORDS)
    (ward / "taught.edgefl").write_bytes(ask_bundle(taught=taught, unsure_above=1.3))
    code, out, _ = asked("Is there a fracture?", model="taught.edgefl")
    assert code == 0 and out.splitlines()[0].endswith("No answer: the model was never taught fracture")
    assert out.splitlines()[1] == "Ask in other words: without 'fracture' this would be another question."
    told = json.loads(asked("Is there a fracture?", "--json", model="taught.edgefl")[1])
    assert (told["answer"], told["refuse_reasons"]) == (None, ["untaught_word"])
    assert (told["unknown_words"], told["untaught_words"]) == ([], ["a", "fracture"])
    assert json.loads(asked("Which organ is shown?", "--json", model="taught.edgefl")[1])["answer"] == "lung"
    before = json.loads(asked("Is there a fracture?", "--json")[1])
    assert before["untaught_words"] is None and "untaught_word" not in before["rules_tried"]


@pytest.mark.parametrize("question", ["pneumothorax?", "Which organ is shown, tuberculosis?"])
def test_a_refusal_comes_without_what_speaks_against_the_answers(question, run, ward, monkeypatch):
    """In the order in which a terminal shows both streams: where there is no answer, nothing is held against it."""
    lines = echoed(monkeypatch)
    (ward / "weak.edgefl").write_bytes(ask_bundle(unsure_above=None))
    words = ("--model", ward / "weak.edgefl", "--trust", ward / "signing.pub")
    assert run("ask", ward / "CANARY.png", question, *words)[0] == 0
    assert "No answer: " in lines[0] and any("Research use only" in line for line in lines[1:])
    assert not any(line.startswith("No threshold says") for line in lines)
    lines.clear()
    assert run("ask", ward / "CANARY.png", "Which organ is shown?", *words)[0] == 0
    assert any(line.startswith("No threshold says") for line in lines)
    assert "Research use only" in lines[0] and "lung; right when tried: " in lines[-1]
    lines.clear()
    assert run("ask", ward / "CANARY.png", "?!", *words)[0] == 1
    assert len(lines) == 1 and "no word" in lines[0]


def echoed(monkeypatch) -> list[str]:
    """What the command says, on both streams, in its order."""
    lines, plain = [], click.echo
    monkeypatch.setattr(
        click, "echo", lambda message=None, **more: (lines.append(str(message)), plain(message, **more))
    )
    return lines


def test_a_negation_is_refused(asked, ward):
    told = json.loads(asked("Which organ is not shown?", "--json")[1])
    assert told["refuse_reasons"] == ["unknown_word", "negation"] and told["negating_words"] == ["not"]
    assert "the question negates (not), and the model weighs words" in asked("Which organ is not shown?")[1]


def test_a_model_of_one_answer_is_not_sure_of_it_without_a_threshold(asked, ward):
    """As of a site with one question: it can say that answer alone, and nothing chose a threshold."""
    one = tuple(name == "no" for name in ANSWERS)
    (ward / "one.edgefl").write_bytes(ask_bundle(seen=one, tried=None, unsure_above=float(np.log(5))))
    code, out, err = asked("is there a fracture?", "--json", model="one.edgefl")
    told, said = json.loads(out), "This model met one answer in its own questions, no: it can give no other"
    assert code == 0 and told["answer"] is None and "unsure" in told["refuse_reasons"] and told["entropy_from"] is None
    assert any(line.startswith(said) for line in told["model"]["warnings"])
    assert err.splitlines() == ["Research use only: an aid for study, not a diagnosis."]  # of no answer it says no more


def test_a_question_without_quotes_is_told_of_them(run, ward):
    code, out, err = run("ask", ward / "CANARY.png", "is", "there", "a", "fracture", "--model", ward / "ask.edgefl")
    assert (code, out) == (2, "")
    assert 'the question must stand in quotes: edgefl ask IMAGE "is there a fracture"' in err
    code, out, err = run("ask", ward / "CANARY.png", "--model", ward / "ask.edgefl")
    assert (code, out) == (2, "") and "Missing argument 'QUESTION'" in err


def test_too_unsure(asked, ward):
    (ward / "unsure.edgefl").write_bytes(ask_bundle(unsure_above=0.01))
    code, out, _ = asked("which organ?", model="unsure.edgefl")
    assert code == 0 and "No answer: the model is too unsure (uncertainty " in out and "lung" not in out


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
    asked_digest = hashlib.sha256(b"which organ is shown?").hexdigest()
    name = f"CANARY-{digest[:16]}-{asked_digest[:8]}-{told['model']['sha256'][:8]}.heatmap.png"
    file = ward / "maps" / name
    assert told["heatmap"] == str(file) and file.stat().st_size
    words = " ".join(said)
    for part in ("Question: which organ is shown?", "Answer: lung; right when tried: 60 of 75",
                 "of the site CHEST", "Where the model looked",
                 "Measured on 96 questions", "answered by vqa/all version 1", "kept from learning", digest[:16],
                 "may be wrong"):  # fmt: skip
        assert part in words
    said.clear()
    first = file.read_bytes()
    asked("pneumothorax?", "--heatmap", ward / "maps")
    assert len(list((ward / "maps").iterdir())) == 2 and file.read_bytes() == first  # a file for each question
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
        asked_digest = hashlib.sha256(b"which organ?").hexdigest()[:8]
        model = json.loads(asked("which organ?", "--json")[1])["model"]["sha256"][:8]
        (
            ward / "maps" / f"CANARY-{digest}-{asked_digest}-{model}.heatmap.png"
        ).mkdir()  # a folder where the file should go
    code, out, err = asked("which organ?", "--json", "--heatmap", ward / "maps")
    assert code == 1 and json.loads(out)["answer"] == "lung" and json.loads(out)["heatmap"] is None
    assert "no heat map" in err


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
        "This model was not found to look at the picture: of 150 questions kept from learning its most "
        "probable answer was right for 90 with their own picture, and for 89 with the picture of another one, refused "
        "ones counted too."
    )
    assert err.count("not found to look at the picture") == 1 and looked in err
    assert "not found to look" not in out
    assert (
        "More than half of this model's answers were wrong: accuracy 0.420 on 174 questions of the site CHEST." in err
    )
    assert "No threshold says when it is too unsure" in err
    assert json.loads(asked("which organ?", "--json", model="blind.edgefl")[1])["model"]["better_than_chance"] is False


def test_no_map_is_drawn_of_a_model_that_was_not_found_to_look(asked, ward, said):
    """However true the map was found: beside the answer it would say that the model looked."""
    blind = TriedQuestions(
        questions=150, right=90, answered=75, answered_right=60,
        other_picture=OtherPicture(right=89, low=0.0, high=0.1),
    )  # fmt: skip
    (ward / "blind.edgefl").write_bytes(ask_bundle(tried=blind, unsure_above=None, shown=true_map("attention")))
    _, out, err = asked("which organ?", "--json", "--heatmap", ward / "maps", model="blind.edgefl")
    told, words = json.loads(out), " ".join(said)
    assert told["answer"] and told["heatmap_fall"] is None and told["model"]["better_than_chance"] is False
    assert "No map is drawn: this model was not found to look at the picture." in words
    assert "The pictures are drawn without a map." in err
    assert "Where the model looked" not in words and "outlined" not in words and "Measured on" not in words


@pytest.mark.parametrize(
    ("question", "shown"),
    [
        ("肺是否正常?", "The question is written in characters that this picture cannot show."),
        ("Is there 肺炎?", "Question: Is there ??? A ? may stand for a character that this picture cannot show."),
        ("which organ? " + "x" * 187, "Question: which organ? xxx"),
    ],
)
def test_any_question_fits_the_picture(asked, ward, lines, question, shown):
    """Nothing is drawn beyond the edge, and no box stands for a character."""
    asked(question, "--heatmap", ward / "maps")
    for text, font, right, width in lines:
        assert right <= width, text
        assert all(bytes(font.getmask(one)) != bytes(font.getmask("\uffff")) for one in text), text
    words = " ".join(text for text, *_ in lines)
    first, _, last = shown.partition("??? ")
    assert first in words and last in words


@pytest.fixture
def lines(monkeypatch):
    """What is written into the picture: text, font, where it ends and how wide the picture is, in px."""
    from PIL import ImageDraw

    found = []
    original = ImageDraw.ImageDraw.text

    def spy(self, at, text, *args, **kwargs):
        end = at[0] if kwargs.get("anchor") == "ra" else at[0] + kwargs["font"].getlength(text)
        found.append((text, kwargs["font"], end, self.im.size[0]))
        return original(self, at, text, *args, **kwargs)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", spy)
    return found


def test_use_and_status_say_what_it_knows(run, ward):
    code, out, _ = run("use", ward / "ask.edgefl", "--trust", SIGNER.public.hex())
    assert code == 0
    assert (
        "it knows 5 answers, 5 of them met in its own questions, and 7 words" in out
        and "kept from learning it refused 75 and answered 75" in out
    )
    assert "suspicious" not in out and "balanced accuracy" not in out
    assert "answers: no, yes, lung, liver and 2" in run("status")[1]
    told = json.loads(run("status", "--json")[1])["model"]
    assert told["questions"] == {"answers": 5, "words": 7, "met": list(ANSWERS)} and told["quality"]


def test_status_names_the_answers_that_the_model_can_give(run, ward):
    """Those that its own questions had: `ask` can give no other."""
    some = tuple(name in ("yes", "liver") for name in ANSWERS)
    (ward / "some.edgefl").write_bytes(ask_bundle(seen=some))
    assert run("use", ward / "some.edgefl", "--trust", SIGNER.public.hex())[0] == 0
    assert "answers: yes and liver\n" in run("status")[1]
    told = json.loads(run("status", "--json")[1])["model"]
    assert told["questions"]["met"] == ["yes", "liver"] and told["classes"] == list(ANSWERS)


def test_doctor_tries_a_question(ward, monkeypatch):
    """What the second process finds, asked in this one."""
    from edgefl_client.doctor.checks import _model, _quality, _speed
    from edgefl_client.doctor.measure import measure
    from edgefl_client.doctor.second_process import _model as tried

    work, facts = tried(ward / "home", str(ward / "ask.edgefl"), [SIGNER.public.hex()], 1)
    assert facts["answers"] and not facts["asks_always"] and set(facts["probabilities"]) == set(ANSWERS)
    found = _model(facts, NOW_MS, named=True).found
    assert "answers a question about a drawn picture" in found and "  " not in found
    assert [one.state for one in _quality(facts, named=True)] == ["ok"]
    measured = measure(work(), work).to_json()
    assert len(measured["rows"]) == 4 and _speed(measured, "answer").found.startswith("an answer took up to ")
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


def test_a_question_before_the_picture_is_told_the_order(run, ward):
    code, _, err = run("ask", "Is there a fracture?", ward / "CANARY.png", "--model", ward / "ask.edgefl")
    assert code == 2 and "the picture comes first" in err and '"Is there a fracture?"' in err
