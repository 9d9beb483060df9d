"""From pictures that are asked questions to `edgefl ask`: what a device answers is what the trainer answers.

docs/security.md check 32, for a model that answers questions: confidence to 1e-4, the answer exactly.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tests.shared import Shared
from tests.trainer.conftest import edgefl_train, make_asked

from edgefl_client import Asker
from edgefl_client.cli import cli as device_cli
from edgefl_export.cli import main as export_cli
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.envelopes.key_files import read_public_key
from edgefl_trainer.engine.models import open_run, predict_rows
from edgefl_trainer.engine.sites import examples_of, load_data, report_rows

pytestmark = [pytest.mark.slow, pytest.mark.long]

SITE = "rad-head"


@pytest.fixture(scope="module")
def made(tmp_path_factory, shared: Shared) -> dict[str, Path]:
    """A run of `local` over coloured pictures, and the bundle of one site."""
    root = tmp_path_factory.mktemp("asked")
    data = make_asked(root / "data", {"HEAD": 150, "CHEST": 24, "ABD": 24}, test=36)
    asked = json.loads((data / "trainset.json").read_text())
    for one in asked:
        one["question"] += " (Hydrocephalus?)" if one["image_organ"] == "CHEST" else ""
    (data / "trainset.json").write_text(json.dumps(asked))
    done = edgefl_train(
        "run", "local", "--data", f"vqa-rad:{data}", "--preset", "tiny", "--image-px", "36", "--backbone", "tiny",
        "--device", "cpu", "--set", "width=32", "--set", "heads=2", "--set", "batch=8", "--rounds", 1, "--epochs", 6,
        "--set", "lr=0.003", "--out", root / "run",
    )  # fmt: skip
    assert done.code == 0, done.err
    runner = CliRunner()
    assert runner.invoke(export_cli, ["keygen", str(root / "keys")]).exit_code == 0
    words = ["bundle", str(root / "run"), "--site", SITE, "--sign", str(root / "keys"), "-o", str(root / "a.edgefl")]
    with shared.traces():
        told = runner.invoke(export_cli, [*words, "--created", "1790000000", "--json"])
    assert told.exit_code == 0, told.stderr
    (root / "told.json").write_text(told.stdout)
    return {"run": root / "run", "bundle": root / "a.edgefl", "pub": root / "keys" / "signing.pub", "root": root}


def test_a_device_answers_every_question_as_the_trainer_does(made):
    run = open_run(made["run"])
    federation = load_data(run.settings, 36)
    rows = report_rows(federation, SITE)
    wanted = predict_rows(run.predictor(SITE), rows)
    bundle = load_bundle(made["bundle"].read_bytes(), [read_public_key(made["pub"]).public], 1_790_000_000_000)
    asker = Asker(bundle, threads=1)
    assert len(rows) >= 64
    for index, row in enumerate(rows.rows):
        found = asker.ask(federation.images[federation.places([row])[0]], federation.questions.texts[row])
        given = [found.probabilities[name] for name in run.classes]
        np.testing.assert_allclose(given, wanted.probabilities[index], atol=1e-4)
        best = run.classes[int(wanted.probabilities[index].argmax())]
        assert found.answer == best or set(found.refuse_reasons) & {"unsure", "unseen_answer"}


def test_a_word_that_another_site_taught_gets_no_answer(made):
    """Known to every site's table, and of this model's no step moved it: docs/decisions/0051."""
    bundle = load_bundle(made["bundle"].read_bytes(), [read_public_key(made["pub"]).public], 1_790_000_000_000)
    assert bundle.questions.taught_words == {*bundle.questions.vocabulary.words} - {"hydrocephalus"}
    found = Asker(bundle, threads=1).ask(np.zeros((60, 60, 3), np.uint8), "What colour is it, hydrocephalus?")
    assert found.answer is None and found.refuse_reasons[0] == "untaught_word" and found.question.unknown == ()


def test_the_bundle_says_how_it_did_on_questions_kept_from_learning(made):
    """Counted here from the trainer's own answers to the `tune` rows."""
    run = open_run(made["run"])
    federation = load_data(run.settings, 36)
    tune = examples_of(federation, federation.sites[SITE].tune)
    scores = predict_rows(run.predictor(SITE), tune)
    told = json.loads((made["root"] / "told.json").read_text())
    tried = told["questions"]["tried"]
    assert tried["questions"] == len(tune) >= 20
    assert tried["right"] == int((scores.probabilities.argmax(axis=1) == tune.targets).sum())
    assert tried["other_picture"]["low"] > 0  # the open questions cannot be answered without looking
    assert told["map"]["pictures"] >= 20 and set(told["parity"]) >= {"probabilities", "map"}


def test_a_person_asks(made):
    root = made["root"]
    picture = next((root / "data" / "images").glob("head-000*"))
    words = ["ask", str(picture), "What colour is it?", "--model", str(made["bundle"]), "--trust", str(made["pub"])]
    home = ["--home", str(root / "home")]
    done = CliRunner().invoke(device_cli, [*words, *home, "--json", "--heatmap", str(root / "maps")])
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["answer"] or told["refused"]
    assert Path(told["heatmap"]).exists()
