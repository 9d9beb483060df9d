"""Bundles that answer questions: what loads, what is refused, and what an older edgefl says to one.

Source: docs/design.md 7 (bundle), docs/decisions/0044.
"""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.asking import ANSWERS, LENGTH, NOW_MS, SIGNER, TRIED, VOCABULARY, ask_graph, ask_members, signed
from tests.conftest import a_plan, step_graph, true_map
from tests.protocol.bundle.conftest import code_of

from edgefl_protocol.bundle import load_bundle, loading
from edgefl_protocol.bundle.card_words import weaknesses
from edgefl_protocol.bundle.question_table import (
    MAX_LENGTH,
    MAX_WORDS,
    OtherPicture,
    QuestionTable,
    TriedQuestions,
)
from edgefl_protocol.bundle.question_words import question_lines, why_no_map
from edgefl_protocol.errors import BundleError
from edgefl_protocol.rules.questions import Questions, words_of


def load(data):
    return load_bundle(data, [SIGNER.public], NOW_MS)


def changed(**values):
    """The members with other values in `questions.json`; None takes a key out."""
    members = ask_members()
    record = json.loads(members["questions.json"]) | values
    record = {key: value for key, value in record.items() if value != "gone"}
    return members | {"questions.json": json.dumps(record).encode()}


def test_a_bundle_says_which_words_it_knows_and_how_it_did():
    bundle = load(signed(ask_members()))
    assert bundle.questions == QuestionTable(VOCABULARY, TRIED)
    assert bundle.questions.vocabulary.table["is"] == 2
    assert bundle.labels.classes == ANSWERS and bundle.outputs == ("probabilities", "map")
    assert bundle.questions.looks is True


def test_a_bundle_says_which_words_were_taught():
    taught = tuple(word != "fracture" for word in VOCABULARY.words)
    bundle = load(signed(ask_members(taught=taught)))
    assert bundle.questions.taught == taught
    assert bundle.questions.taught_words == {*VOCABULARY.words} - {"fracture"}
    assert ", 6 of them taught; " in question_lines(bundle.card, bundle.labels, bundle.questions)[1]


def told_of(**options):
    bundle = load(signed(ask_members(**options)))
    return question_lines(bundle.card, bundle.labels, bundle.questions), weaknesses(
        bundle.card, bundle.labels, bundle.questions
    )


def test_a_bundle_says_how_many_answers_it_can_give():
    assert "it knows 5 answers, 2 of them met in its own questions, " in told_of(seen=(True, True, *[False] * 3))[0][1]
    one = told_of(seen=(False, True, *[False] * 3))[1]
    assert one == ("This model met one answer in its own questions, yes: it can give no other, whatever is asked.",)
    assert told_of()[1] == ()


@pytest.mark.parametrize("low", [0.48, 0.51, 0.52])
def test_a_model_that_is_not_above_the_usual_answer_on_closed_questions_says_so(low):
    """By the rule of the house: better only where the interval's lower end lies above."""
    figures = {
        "accuracy": 0.6,
        "n_test": 300,
        "n_closed_questions": 210,
        "accuracy_closed_questions": 0.586,
        "accuracy_closed_questions_interval": [low, 0.7],
        "usual_answer": {"accuracy_closed_questions": 0.51},
    }
    said = (
        "On 210 closed questions of the site CHEST, such as those of yes or no, this model was not found better than "
        f"the usual answer to each kind of question: accuracy 0.586 (95% interval {low:.3f} to 0.700) against 0.510."
    )
    assert told_of(metrics={"site": figures})[1] == ((said,) if low <= 0.51 else ())
    del figures["usual_answer"]
    assert told_of(metrics={"site": figures})[1] == ()


def test_a_bundle_from_before_says_nothing_of_what_was_taught():
    """Its table is read, and written again without the key."""
    data = ask_members()["questions.json"]
    assert b"taught" not in data
    table = QuestionTable.from_bytes(data)
    assert table.taught is None and table.taught_words is None and table.to_bytes() == data


def test_a_bundle_for_pictures_has_no_table(plain_pictures):
    assert plain_pictures.questions is None


@pytest.fixture
def plain_pictures(lab):
    return load_bundle(lab.bundle_bytes(), [lab.SIGNER.public], lab.NOW_MS)


def tried(**changes):
    record = json.loads(ask_members()["questions.json"])["tried"]
    return {**record, **changes}


BAD_RECORDS = {
    "no words": {"words": []}, "words as one text": {"words": "is there"}, "a word twice": {"words": ["is", "is"]},
    "a word with a space": {"words": ["x ray"]}, "an empty word": {"words": [""]}, "a number": {"words": [1]},
    "a control character": {"words": ["a\x1b[2J"]}, "a line break": {"words": ["a\nb"]},
    "a word of 1,001 characters": {"words": ["a" * 1001]}, "a list of lists": {"words": [["is"]]},
    "too many words": {"words": [str(number) for number in range(MAX_WORDS + 1)]},
    "length 0": {"length": 0}, "length true": {"length": True}, "length 6.0": {"length": 6.0},
    "length too large": {"length": MAX_LENGTH + 1}, "no length": {"length": "gone"}, "a new key": {"language": "en"},
    "tried a list": {"tried": []}, "no question was tried": {"tried": tried(questions=0, right=0, answered=0,
    answered_right=0, other_picture=None)}, "more right than tried": {"tried": tried(right=151)},
    "more answered than tried": {"tried": tried(answered=151)}, "more right than answered": {"tried": tried(
    answered_right=76)}, "answered rightly more than right": {"tried": tried(right=59)},
    "a share for a count": {"tried": tried(right=0.5)}, "a negative count": {"tried": tried(answered=-1)},
    "more right with other pictures than tried": {"tried": tried(other_picture={"right": 151, "low": 0, "high": 0})},
    "an interval upside down": {"tried": tried(other_picture={"right": 1, "low": 0.2, "high": 0.1})},
    "an interval beyond 1": {"tried": tried(other_picture={"right": 1, "low": 0.2, "high": 1.1})},
    "taught a text": {"taught": "yes"}, "taught null": {"taught": None}, "taught of too few": {"taught": [True] * 6},
    "taught of too many": {"taught": [True] * 8}, "taught in numbers": {"taught": [1] * 7},
    "taught by name": {"taught": ["is"] * 7},
    "an interval of text": {"tried": tried(other_picture={"right": 1, "low": "0", "high": "1"})},
}  # fmt: skip


@pytest.mark.parametrize("way", sorted(BAD_RECORDS))
def test_a_wrong_record_is_refused(way):
    assert code_of(lambda: load(signed_anyway(changed(**BAD_RECORDS[way])))) == "bad_questions"


def signed_anyway(members):
    """What a careless or hostile signer could publish: `build_bundle` would refuse it."""
    from tests.protocol.bundle.conftest import VECTOR, GoodBundle

    good = GoodBundle(VECTOR.read_bytes(), SIGNER)
    gone = dict.fromkeys(good.members, b"")
    return good.resign({**gone, **members})


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        ["words", "length", "tried", "taught", "questions",
         "right", "answered", "answered_right", "other_picture", "low", "high"]
    ), inner, max_size=6), max_leaves=25,
))  # fmt: skip
def test_any_json_is_read_or_refused_by_a_value_error(value):
    data = json.dumps(value).encode()
    try:
        table = QuestionTable.from_bytes(data)
    except ValueError:
        return
    assert QuestionTable.from_bytes(table.to_bytes()) == table


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_by_a_value_error(data):
    with pytest.raises(ValueError):
        QuestionTable.from_bytes(data)


counts = st.integers(1, 10**6).flatmap(
    lambda questions: st.integers(0, questions).flatmap(
        lambda answered: st.integers(0, answered).flatmap(
            lambda both: st.integers(both, questions).map(lambda right: (questions, right, answered, both))
        )
    )
)
ends = st.tuples(st.floats(-1, 1), st.floats(-1, 1)).map(sorted)


@given(st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=20), st.integers(1, MAX_LENGTH), counts, ends)
def test_whatever_the_rule_makes_of_questions_can_be_written_and_read(texts, length, count, interval):
    """A table of the words of any questions loads: no vocabulary that the trainer makes is refused on a device."""
    words = tuple(dict.fromkeys(word for text in texts for word in words_of(text)))
    if not words:
        return
    questions, right, answered, both = count
    other = OtherPicture(right=questions, low=interval[0], high=interval[1])
    facts = TriedQuestions(
        questions=questions, right=right, answered=answered, answered_right=both, other_picture=other
    )
    table = QuestionTable(Questions(words, length), facts)
    assert QuestionTable.from_bytes(table.to_bytes()) == table
    assert table.looks is (interval[0] > 0)
    shown, why_not = true_map("attention"), why_no_map(true_map("attention"), table)
    assert (why_not is None) is table.looks  # however true the map is
    assert why_not in (None, "No map is drawn: this model was not found to look at the picture.")
    assert shown.shown and why_no_map(None, table) is not None


WRONG_GRAPHS = {
    "a question of another length": ("wrong_inputs", lambda: {"score.onnx": ask_graph(length=LENGTH + 1)}),
    "an answer that the graph does not give": ("wrong_outputs", lambda: {"score.onnx": ask_graph(answers=4)}),
    "a graph that is asked nothing": ("wrong_inputs", lambda: {"score.onnx": pictures_graph()}),
}


def pictures_graph():
    from tests.conftest import score_graph

    return score_graph(softmax=True)


@pytest.mark.parametrize("way", sorted(WRONG_GRAPHS))
def test_a_graph_that_does_not_fit_the_table_is_refused(way):
    code, change = WRONG_GRAPHS[way]
    assert code_of(lambda: load(signed_anyway(ask_members() | change()))) == code


def test_a_graph_that_is_asked_without_a_table_is_refused():
    members = ask_members()
    del members["questions.json"]
    assert code_of(lambda: load(signed_anyway(members))) == "wrong_inputs"


def test_evidence_is_no_output_of_a_model_that_answers_questions():
    """Its threshold is one of entropy: docs/methods.md 1.8."""
    from onnx import TensorProto, helper, load_from_string, numpy_helper

    members = ask_members(with_map=False)
    model = load_from_string(members["score.onnx"])
    last = numpy_helper.from_array(np.array([-1]), "last")
    model.graph.initializer.extend([] if any(one.name == "last" for one in model.graph.initializer) else [last])
    for name, row in (("evidence", [len(ANSWERS)]), ("vacuity", []), ("dissonance", [])):
        made = ("Identity", ["probabilities"]) if row else ("ReduceSum", ["probabilities", "last"])
        model.graph.node.append(helper.make_node(*made, [name], **({} if row else {"keepdims": 0})))
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", *row]))
    members["score.onnx"] = model.SerializeToString()
    assert code_of(lambda: load(signed_anyway(members))) == "wrong_outputs"


@pytest.mark.parametrize(
    ("kind", "with_map", "fits"),
    [("attention", True, True), ("attention", False, False), ("rollout", True, False), ("occlusion", False, True)],
)
def test_the_map_that_the_card_speaks_of_must_be_there(kind, with_map, fits):
    """`map` of such a graph is attention; nobody may call it a rollout."""
    shown = true_map(kind, **({"cells": 36} if kind == "occlusion" else {}))
    members = ask_members(shown=shown, with_map=with_map)
    if fits:
        assert load(signed(members)).card.map == shown
    else:
        assert code_of(lambda: load(signed_anyway(members))) == "wrong_outputs"


def test_no_device_learns_a_model_that_answers_questions(lab):
    weights = {name: np.asarray(value, np.float32) for name, value in lab.WEIGHTS.items()}
    learning = {"training.json": a_plan().to_bytes(), "train_step.onnx": step_graph(a_plan(), weights, 24, 6)}
    members = ask_members() | learning
    assert code_of(lambda: load(signed_anyway(members))) == "wrong_members"


def test_an_older_edgefl_asks_for_an_update(monkeypatch):
    """As the version before this one had it: no such member, and no such input."""
    before = frozenset({"train_step.onnx", "training.json", "encode.onnx", "tokenizer.json", "answers.json"})
    data = signed(ask_members())
    monkeypatch.setattr(loading, "OPTIONAL_MEMBERS", before)
    with pytest.raises(BundleError, match=r"unknown: questions\.json; update edgefl-derm") as caught:
        load(data)
    assert caught.value.code == "wrong_members"
