"""A run of `--task NAME=A,B:REST` on its way to a bundle and to a coordinator, which name a task by a word."""

import os
from unittest import mock

import pytest
from tests.trainer.conftest import TINY, edgefl_train, make_ward

from edgefl_coordinator.founding.task import task_of_run
from edgefl_export.bundles.assemble import site_model
from edgefl_protocol.bundle import Manifest
from edgefl_trainer.engine.models import FinishedRun, open_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> FinishedRun:
    counts = {site: {"BCC": 5, "BKL": 5, "MEL": 5, "NV": 5} for site in ("east", "west")}
    data = f"folder:{make_ward(tmp_path_factory.mktemp('clinic'), counts)}"
    out = tmp_path_factory.mktemp("run") / "run"
    options = ("--data", data, "--task", "mal=BCC,MEL:rest", "--out", out, *TINY, "--rounds", "1")
    with mock.patch.dict(os.environ, {"EDGEFL_CACHE": str(tmp_path_factory.mktemp("cache"))}):
        outcome = edgefl_train("run", "fedevprompt", *options)
    assert outcome.code == 0, outcome.err
    return open_run(out)


def test_a_bundle_names_the_groups_and_nobody_knows_what_they_mean(finished):
    """docs/design.md 7: a task is 1 to 32 of a-z, 0-9 and -; docs/decisions/0039: what nobody describes asks."""
    model = site_model(finished, "east")
    assert (model.task, model.classes, model.info) == ("mal-rest", ("mal", "rest"), {})
    fields = {"federation": None, "line": "main", "version": 1, "created_ms": 0, "expires_ms": None}
    Manifest(task=model.task, members=(), min_client="0.1", min_runtime="1.23", **fields)


def test_a_coordinator_takes_the_run(finished):
    table, rounds = task_of_run(finished.folder, [])
    assert (table["name"], table["classes"], rounds) == ("mal-rest", ["mal", "rest"], 1)
