"""Which words a model was taught: retrained with a word in the questions of one site alone. docs/decisions/0051."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.trainer.conftest import edgefl_train, pictures_of, rad_entries, write_rad

from edgefl_export.bundles.questions import own_questions
from edgefl_export.bundles.taught import taught_words
from edgefl_export.int8.calibration import federation_of
from edgefl_protocol.bundle.question_table import QuestionTable
from edgefl_protocol.pictures.answer import read_question
from edgefl_trainer.engine.models import FinishedRun, open_run

ENTRIES = rad_entries(pictures=10)
SITES = ("rad-abdomen", "rad-chest", "rad-head")
WORD = "hydrocephalus"
ASKED = f"Is {WORD} bright?"
STAYS = ("local", "pfl-vqa")  # the paper's: a site keeps its model; the others average it (docs/methods.md 4 and 11)
AS_FEDAVG = ("fedavgpers", "fedprox")
LEARNED = ("--preset", "tiny", "--image-px", "36", "--backbone", "tiny", "--device", "cpu", "--rounds", 1)
SMALL = ("--set", "width=32", "--set", "heads=2", "--set", "batch=8")


def learned(folder: Path, method: str, entries: list[dict[str, Any]], *more: object) -> FinishedRun:
    """A run over these questions."""
    data = write_rad(folder / "rad.zip", pictures_of(entries), trainset=entries)
    out = folder / method
    done = edgefl_train("run", method, "--data", f"vqa-rad:{data}", "--out", out, *LEARNED, *SMALL, *more)
    assert done.code == 0, done.err
    return open_run(out)


def with_word(place: int) -> list[dict[str, Any]]:
    """The questions, the one at this place with the word; a picture has four, and all of them stay where they are."""
    return [{**one, "question": ASKED} if at == place else one for at, one in enumerate(ENTRIES)]


@pytest.fixture(scope="module", autouse=True)
def cached(tmp_path_factory) -> Iterator[None]:
    """Decoded pictures go to a folder of these tests."""
    with mock.patch.dict(os.environ, {"EDGEFL_CACHE": str(tmp_path_factory.mktemp("cache"))}):
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory, cached) -> dict[str, int]:
    """Of a question that the chest learns from, and of one that it tunes on."""
    run = learned(tmp_path_factory.mktemp("first"), "local", ENTRIES)
    site = federation_of(run).sites["rad-chest"]
    return {"train": int(site.train[0]), "tune": int(site.tune[0])}


def reads_whole(run: FinishedRun, site: str) -> bool:
    """Whether a device with this site's model reads the question whole, and not for a word that it does not know."""
    found = taught_words(run.summary, federation_of(run), site)
    assert found is not None and run.questions is not None
    table = QuestionTable(run.questions, None, found.words)
    read = read_question(ASKED, table.vocabulary, table.taught_words)
    assert not read.missed and read.whole is not bool(read.never_taught) and set(read.never_taught) <= {WORD}
    return read.whole


@pytest.mark.parametrize(
    "method", ["fedavg", *STAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in AS_FEDAVG)]
)
def test_a_word_that_one_site_taught_is_refused_where_that_does_not_travel(method, place, tmp_path):
    run = learned(tmp_path, method, with_word(place["train"]))
    everywhere = method not in STAYS
    assert {site: reads_whole(run, site) for site in SITES} == {
        site: everywhere or site == "rad-chest" for site in SITES
    }


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_tune_questions_teach_nothing(method, place, tmp_path):
    """The word is known, for the lists hold those of `tune` rows, and no step ever moved it: docs/decisions/0044."""
    run = learned(tmp_path, method, with_word(place["tune"]))
    assert not any(reads_whole(run, site) for site in SITES)
    told = own_questions(run, "rad-chest", run.predictor("rad-chest"), print)
    assert told.taught is not None and told.tried is not None
    assert told.taught.read_whole.tolist().count(False) == 1 and told.tried.answered <= told.tried.questions - 1


def test_a_site_without_a_round_taught_nothing(place, tmp_path):
    """One of three took part: what travelled is of that one alone."""
    run = learned(tmp_path, "fedavg", with_word(place["train"]), "--participation", "0.34")
    part = {site: facts["took_part"]["rounds"] for site, facts in run.summary["sites"].items()}
    assert sorted(part.values()) == [0, 0, 1]
    assert {reads_whole(run, site) for site in SITES} == {part["rad-chest"] == 1}


def test_what_travels_decides_and_no_name(place, tmp_path):
    """The same run, said to be of a method of which nobody heard."""
    run = learned(tmp_path, "local", with_word(place["train"]))
    federation = federation_of(run)
    for travels, known in ((["prompts"], False), (["prompts", "weights"], True)):
        found = taught_words({**run.summary, "method": "new", "travels": travels}, federation, "rad-head")
        assert found is not None and run.questions is not None
        assert found.words[run.questions.words.index(WORD)] is known


def test_rows_that_are_asked_nothing_teach_no_words(place, tmp_path):
    run = learned(tmp_path, "local", ENTRIES)
    pictures = replace(federation_of(run), questions=None)
    assert taught_words(run.summary, pictures, "rad-head") is None


def test_an_answer_that_a_device_refuses_for_the_pictures_light_is_not_counted(place, tmp_path):
    run = learned(tmp_path, "local", ENTRIES)
    site = {**run.calibration["sites"]["rad-chest"], "refer_above": math.log(len(run.classes)) - 1e-3}
    counts = []
    for brightness in ([1.0, 255.0], [1.0, 1.5]):
        one = {**run.calibration, "sites": {"rad-chest": {**site, "light": {"brightness": brightness}}}}
        told = own_questions(replace(run, calibration=one), "rad-chest", run.predictor("rad-chest"), print)
        assert told.tried is not None and told.not_refused is not None and told.taught is not None
        counts.append(told.tried.answered)
        inside = told.taught.read_whole if len(counts) == 1 else np.zeros(told.tried.questions, np.bool_)
        assert told.not_refused.tolist() == inside.tolist()  # with which the 8-bit graph is counted
    assert counts[0] > 0 and counts[1] == 0
