"""Bundles that answer questions: graph, gates, members, and what the command makes of a run. docs/design.md 7."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from tests.conftest import true_map
from tests.export.conftest import CLASSES, write_run
from tests.trainer.conftest import make_asked

from edgefl_export.bundles.assemble import _tried_anew, build_members, site_model
from edgefl_export.bundles.bundle_text import bundle_text, model_facts
from edgefl_export.bundles.licence import answers_licence
from edgefl_export.bundles.taught import TaughtWords, taught_words
from edgefl_export.errors import ExportError, GateError
from edgefl_export.graphs.score import export_answer_graph
from edgefl_export.int8.calibration import AskedSets, Calibration, federation_of
from edgefl_export.parity.score_parity import (
    check_parity,
    graph_scores,
    open_session,
    parity_images,
    parity_questions,
    trainer_scores,
)
from edgefl_protocol.bundle import BundleFields, Labels, build_bundle, load_bundle
from edgefl_protocol.bundle.question_table import OtherPicture, QuestionTable, TriedQuestions
from edgefl_protocol.envelopes.keys import SigningKey
from edgefl_protocol.rules.questions import FIRST, Questions
from edgefl_trainer.contract import Predictor
from edgefl_trainer.data import load_federation
from edgefl_trainer.data.questions import Vocabulary
from edgefl_trainer.engine.models import open_run, save_questions
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.flower.vocabulary import together
from edgefl_trainer.models.answers import AnswerModule, AnswerOptions, fresh_tensors
from edgefl_trainer.models.backbones import load_backbone

WORDS = Questions(("is", "it", "red", "what", "colour"), 6)
KEY = SigningKey(bytes(range(3, 35)))
FIELDS = BundleFields(federation=None, line="vqa", task="all", version=1, created_ms=1_790_000_000_000)


def make_answering(**options) -> Predictor:
    """A model with random weights in every tensor, so that no output is flat."""
    vit = load_backbone("vit:64x2/12", image_px=36, seed=1)
    chosen, draw = AnswerOptions(heads=2, question_blocks=1, **options), torch.Generator().manual_seed(2)
    fresh = fresh_tensors(chosen, WORDS, len(CLASSES), (vit.spec.width, 16, 3), draw, 1.0)
    tensors = {
        name: (value + 0.3 * torch.randn(value.shape, generator=draw)).numpy().astype(np.float32)
        for name, value in fresh.items()
    }
    tensors["temperature"] = np.float32(1.3)
    tensors["head.weight"] *= 3  # answers apart from one another: near ties are no matter of precision
    return Predictor(
        AnswerModule(vit, chosen), {name: np.asarray(tensors[name]) for name in chosen.tensors}, (True,) * 3
    )


@pytest.fixture(scope="module")
def answering():
    return make_answering()


@pytest.fixture(scope="module")
def answer_graph(answering, shared):
    with shared.traces():
        return export_answer_graph(answering.module.eval(), answering.tensors, WORDS.length).onnx


def test_the_graph_takes_the_question_and_gives_the_trainers_answers(answering, answer_graph):
    """Random pictures and questions, in batches that were not traced."""
    found = onnx.load_from_string(answer_graph)
    names = [value.name for value in found.graph.input]
    assert names[0] == "image" and set(names) == {"image", "question", *answering.module.options.tensors}
    assert [value.name for value in found.graph.output] == ["probabilities", "map"]
    images, questions = parity_images(36, 5), parity_questions(5, WORDS.length, 5)
    wanted = trainer_scores(answering.module, answering.tensors, images, questions=questions)
    for batch in (1, 3, 5):
        got = graph_scores(open_session(answer_graph), answering.tensors, images, batch, questions)
        np.testing.assert_allclose(got["probabilities"], wanted["probabilities"], atol=1e-5)
        np.testing.assert_allclose(got["map"], wanted["map"], atol=1e-4)
    assert np.ptp(wanted["probabilities"], axis=0).max() > 0.01  # picture and question count


def test_every_tensor_that_learns_stays_an_argument(answering, answer_graph):
    """What a device is given changes the answer: none became a constant of the graph."""
    images, questions = parity_images(36, 4), parity_questions(5, WORDS.length, 4)
    session = open_session(answer_graph)
    before = graph_scores(session, answering.tensors, images, 4, questions)["probabilities"]
    for name in ("words.embedding", "fusion.0.gate", "prompts.image", "prompts.text", "head.weight", "temperature"):
        changed = {**answering.tensors, name: np.asarray(answering.tensors[name] * np.float32(1.7) + np.float32(0.05))}
        after = graph_scores(session, changed, images, 4, questions)["probabilities"]
        assert np.abs(after - before).max() > 1e-6, name


def test_the_gate_refuses_a_graph_that_reads_the_question_otherwise(answering, answer_graph):
    """The same pictures and values, and a trainer that reads from the last word to the first."""
    images, questions = parity_images(36), parity_questions(5, WORDS.length)
    given = (answering.tensors, images, None, questions)
    assert all(one.passed for one in check_parity(answer_graph, answering.module, *given))

    class Backwards(AnswerModule):
        def forward(self, image, question, tensors):
            return super().forward(image, question.flip(1), tensors)

    with pytest.raises(GateError, match="differs from the trainer"):
        check_parity(answer_graph, Backwards(answering.module.backbone, answering.module.options), *given)


def test_drawn_questions_have_every_length_and_unknown_words():
    drawn = parity_questions(5, 6, 64)
    assert drawn.shape == (64, 6) and drawn.dtype == np.int64 and set(np.unique(drawn)) == set(range(7))
    lengths = (drawn > 0).sum(axis=1)
    assert set(lengths) == set(range(1, 7))
    assert all((row[:length] > 0).all() and not row[length:].any() for row, length in zip(drawn, lengths, strict=True))


@pytest.fixture(scope="module")
def answer_run(answering, tmp_path_factory):
    """A finished run whose model answers questions; its data is gone."""
    folder = write_run(tmp_path_factory.mktemp("answers") / "run", answering)
    save_questions(folder, WORDS)
    summary = json.loads((folder / "summary.json").read_text())
    summary["sites"]["north"] |= {"accuracy": 0.6, "accuracy_interval": [0.5, 0.7], "usual_answer": {"accuracy": 0.4}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


TRIED = TriedQuestions(
    questions=30, right=20, answered=15, answered_right=12, other_picture=OtherPicture(right=9, low=0.1, high=0.5)
)


def test_the_bundle_loads_and_says_what_it_knows(answer_run, shared):
    with shared.traces():
        members = build_members(site_model(open_run(answer_run), "north"), tried=TRIED)
    data = build_bundle(members.files, FIELDS, [KEY])
    bundle = load_bundle(data, [KEY.public], FIELDS.created_ms)
    assert bundle.questions.vocabulary == WORDS and bundle.questions.tried == TRIED
    assert b"taught" not in members.files["questions.json"]  # nobody said which
    assert bundle.labels.classes == CLASSES and bundle.labels.info is None and bundle.card.suspicion is None
    assert "see those that the run names" in bundle.card.licence_note  # drawn lesions ask nothing: another's data
    assert "no finding" in bundle.card.intended_use and bundle.card.refer_above == 0.8
    assert {one.quantity for one in members.parity} == {"probabilities", "map"}


def test_the_bundle_says_which_words_were_taught(answer_run, shared):
    taught = TaughtWords((True, False, True, True, True), np.ones(30, np.bool_))
    with shared.traces():
        model = site_model(open_run(answer_run), "north")
        told = build_members(model, tried=TRIED, taught=taught)
    data = build_bundle(told.files, FIELDS, [KEY])
    assert load_bundle(data, [KEY.public], FIELDS.created_ms).questions.taught == taught.words
    facts = model_facts(model, told, true_map("attention"), [])["questions"]
    assert (facts["words"], facts["taught"]) == (5, 4)


@pytest.mark.slow
@pytest.mark.nightly  # smaller: test_the_8_bit_graph_is_counted_without_what_a_device_refuses, and tests of `quantise`
def test_eight_bits_answer_as_float_does_and_are_counted_themselves(answer_run, answering, answer_graph, shared):
    """docs/design.md 7, export gates (int8). Only the vision transformer has 8 bits: all else is an argument."""
    pictures, words = parity_images(36, 128), parity_questions(len(WORDS.words), WORDS.length, 128)
    cut = slice(0, 32), slice(32, 64), slice(64, 128)
    asked = AskedSets(*(words[one] for one in cut), words[:40])
    targets = np.arange(40) % len(CLASSES)
    sets = Calibration(*(pictures[one] for one in cut), pictures[:40], targets, asked)
    even = np.arange(40) % 2 == 0
    with shared.traces():
        members = build_members(site_model(open_run(answer_run), "north"), int8=sets, tried=TRIED, not_refused=even)
    bundle = load_bundle(build_bundle(members.files, FIELDS, [KEY]), [KEY.public], FIELDS.created_ms)
    assert members.agreement is not None and members.agreement.same_class >= 0.99
    graph = onnx.load_from_string(members.files["score.onnx"])
    assert {value.name for value in graph.graph.input} == {"image", "question", *answering.module.options.tensors}
    assert len(members.files["score.onnx"]) < 0.6 * len(answer_graph)
    session = open_session(members.files["score.onnx"])
    found = graph_scores(session, answering.tensors, pictures[:40], 8, words[:40])["probabilities"]
    wanted = trainer_scores(answering.module, answering.tensors, pictures[:40], questions=words[:40])["probabilities"]
    assert 0 < np.abs(found - wanted).max() < 0.05
    tried = bundle.questions.tried
    assert (tried.questions, tried.right) == (40, int((found.argmax(axis=1) == targets).sum()))
    assert tried.other_picture == TRIED.other_picture
    unsure = -(found * np.log(found)).sum(axis=1) > 0.8  # the run's threshold
    assert tried.answered == int((~unsure & even).sum()) > 0


def test_names_that_no_device_reads_are_refused_before_the_tracing(answering, tmp_path):
    """They ended the command with a traceback, after minutes: `Labels` takes 200 characters, the trainer more."""
    folder = write_run(tmp_path / "run", answering)
    save_questions(folder, WORDS)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "classes": ["no", "yes", "a" * 201]}))
    with pytest.raises(ExportError, match=r"printable name of 1 to 200 characters, and 'a{40}' is not, with 201"):
        site_model(open_run(folder), "north")
    (folder / "summary.json").write_text(json.dumps(summary))
    save_questions(folder, Questions(("a b",), 6))
    with pytest.raises(ExportError, match="no device could read this model: words must be 1 to 20000 printable"):
        site_model(open_run(folder), "north")


def test_as_many_words_as_are_allowed_can_be_written_and_read():
    """20,000 words of eight characters were 340,047 bytes of `questions.json`, where 262,144 were read."""
    words = tuple(f"word{number:04x}" for number in range(20_000))
    table = QuestionTable(Questions(words, 20), TRIED, (False,) * len(words))
    assert len(table.to_bytes()) > 1 << 18 and QuestionTable.from_bytes(table.to_bytes()) == table
    labels = Labels(tuple(f"an answer of some words, number {number}" for number in range(10_000)), (True,) * 10_000)
    assert len(labels.to_bytes()) > 1 << 18 and Labels.from_bytes(labels.to_bytes()) == labels


@pytest.mark.parametrize("known", [True, False])
def test_the_8_bit_graph_is_counted_without_what_a_device_refuses(answer_run, answering, answer_graph, known):
    """As the float one is (`own_questions`): for words, and for the picture's light. The float graph stands for it."""
    pictures, words = parity_images(36, 40), parity_questions(len(WORDS.words), WORDS.length, 40)
    targets, none = np.arange(40) % len(CLASSES), pictures[:0]
    sets = Calibration(none, none, none, pictures, targets, AskedSets(tune=words))
    not_refused = np.arange(40) % 3 == 0
    model, tensors = site_model(open_run(answer_run), "north"), answering.tensors
    tried = _tried_anew(model, answer_graph, tensors, sets, TRIED, not_refused if known else None)
    found = graph_scores(open_session(answer_graph), tensors, pictures, 8, words)["probabilities"]
    sure = -(found * np.log(found)).sum(axis=1) <= 0.8  # the run's threshold
    answered, right = sure & (not_refused if known else True), found.argmax(axis=1) == targets
    assert (tried.questions, tried.right) == (40, int(right.sum()))
    assert (tried.answered, tried.answered_right) == (int(answered.sum()), int((answered & right).sum()))
    assert 0 < (sure & not_refused).sum() < sure.sum()


def test_what_cannot_be_exported_is_one_sentence(answer_run):
    from edgefl_export.bundles.shown_map import measured_map
    from edgefl_export.bundles.training import learned_method
    from edgefl_export.int8.calibration import calibration_of
    from edgefl_protocol.pictures.class_info import known_among

    run = open_run(answer_run)
    model = site_model(run, "north")
    with pytest.raises(ExportError, match="--precision fp32"):
        calibration_of(run, "north")
    with pytest.raises(ExportError, match="leave --with-training out"):
        learned_method(run, model.predictor)
    with pytest.raises(ExportError, match="leave it out"):
        site_model(run, "north", known_among(("MEL",)))
    with pytest.raises(ExportError, match="list of words"):
        build_members(replace(model, questions=Questions(("is",), 6)))
    blind = make_answering(sees_picture=False)
    with pytest.raises(ExportError, match="sees no picture"):
        build_members(replace(model, predictor=blind))
    with pytest.raises(ExportError, match="picture=hidden"):
        measured_map(run, "north", blind, print)


def test_a_site_of_flower_asks_in_the_words_of_all_sites(tmp_path, monkeypatch):
    """docs/guides/flower.md: it learned with all words and answers; its own data numbers them otherwise."""
    monkeypatch.setenv("EDGEFL_CACHE", str(tmp_path / "cache"))
    source = f"vqa-rad:{make_asked(tmp_path / 'rad', {'CHEST': 40})}"
    own = load_federation([source], image_px=12)
    another = Vocabulary(("acute",), Questions(("acute", "brain")))
    known = together([Vocabulary(own.classes, own.questions.vocabulary), another])
    settings = RunSettings(method="pfl-vqa", data=(source,), backbone="tiny", image_px=12, preset="tiny")
    run = SimpleNamespace(
        folder=tmp_path, settings=settings, summary={"partition_sha256": own.partition_sha256},
        backbone=load_backbone("tiny", image_px=12), classes=known.answers, questions=known.questions,
    )  # fmt: skip
    found, (site,) = federation_of(run), own.sites.values()
    for row in site.tune:
        told = [known.questions.words[token - FIRST] for token in found.questions.tokens[row] if token >= FIRST]
        assert told == own.questions.texts[row].lower().split()
        assert known.answers[found.labels[row]] == own.classes[own.labels[row]]
    taught = taught_words({"travels": ["prompts"], "sites": {}}, found, site.name)
    table = QuestionTable(known.questions, None, taught.words)
    assert {"red", "it"} <= table.taught_words and "brain" not in table.taught_words


def test_a_person_is_told_that_no_map_is_drawn_where_a_model_was_not_found_to_look(answer_run, shared):
    """The map may be true all the same: what `edgefl-export bundle` prints is what the device will do."""
    shown = true_map("attention")
    blind = replace(TRIED, other_picture=OtherPicture(right=20, low=-0.1, high=0.1))
    with shared.traces():
        model = site_model(open_run(answer_run), "north")
        facts = {
            tried: model_facts(model, build_members(model, shown=shown, tried=tried), shown, [])
            for tried in (TRIED, blind)
        }
    rest = {"file": "a", "bytes": 1, "sha256": "0", "signers": []}
    looking, not_looking = (bundle_text({**rest, **facts[tried]}) for tried in (TRIED, blind))
    assert "map shown: attention." in looking and "No map is drawn" not in looking
    assert "No map is drawn: this model was not found to look at the picture." in not_looking
    assert "map shown" not in not_looking
    assert "the graph and the trainer, on 64 questions in batches of 1 and of 8:" in looking and "images" not in looking


@pytest.mark.parametrize(
    ("data", "backbone", "said", "unsaid"),
    [
        (("vqa-rad:a.zip", "vqa-rad:b.zip@split=test"), "derm-vit-tiny-84",
         "VQA-RAD is CC0 1.0, ISIC 2019, of the network, is CC BY-NC 4.0.", "SLAKE"),
        (("vqa-rad:a.zip", "slake:b"), "vit:192x12/12", "VQA-RAD is CC0 1.0, SLAKE is CC BY 4.0.", "ISIC"),
        (("slake:b",), "run:before", "bind this model: SLAKE is CC BY 4.0.", "VQA-RAD"),
    ],
)  # fmt: skip
def test_the_card_names_the_licences_of_what_was_read(data, backbone, said, unsaid):
    """SLAKE is none of a model that read VQA-RAD alone."""
    settings = RunSettings(method="local", data=data, backbone=backbone, image_px=84, preset="tiny")
    note = answers_licence(settings)
    assert note.endswith(said) and unsaid not in note
