"""What passes every rule is what `edgefl-train predict` would not refer, picture by picture."""

import numpy as np
import pytest
from benchmarks.uncertainty.distance_rule import Passed, kinds_of, main, passes, table
from benchmarks.uncertainty.uncertainty import seed_of_run
from benchmarks.uncertainty.uncertainty_measures import said_by
from click.testing import CliRunner
from PIL import Image

from edgefl_protocol.pictures.class_info import known_among
from edgefl_trainer.engine.judging.prediction import predict_files, referral_rules_of
from edgefl_trainer.engine.models import open_run

DATA = "lesions:sites=1,images=240,px=48"


@pytest.fixture(scope="module")
def run(train, cached, tmp_path_factory):
    """A model of two benign classes of drawn lesions: of the others nothing was learned."""
    out = tmp_path_factory.mktemp("distance") / "run"
    words = f"run local --data {DATA} --classes BKL,NV --preset tiny --rounds 1 --epochs 4 --set discount=unusual"
    made = train(*words.split(), "--out", out)
    assert made.code == 0, made.err
    return open_run(out)


def test_each_picture_is_judged_as_predict_does(run, tmp_path):
    """Through a PNG file and the device's path, the answer to the picture as it is is the same; both answers occur."""
    study = seed_of_run(run, {}).study
    (site,) = run.sites
    rows = np.concatenate([study.own.sites[site].train, study.own.sites[site].rows(study.own.report_split)])
    places = study.own.places(rows)
    pictures = study.features.pictures["own"][places]
    files = [tmp_path / f"{number}.png" for number in range(len(pictures))]
    for file, pixels in zip(files, pictures, strict=True):
        Image.fromarray(pixels).save(file)
    model, rules = run.predictor(site), referral_rules_of(run, site, known_among(run.classes))
    said = said_by(model, study.features.of(model, "own", places))
    found = passes(said, pictures, model.seen, rules, run.preprocess.least_px)
    scores = list(predict_files(run, site, files))
    assert found.tolist() == [not {*score.refer_reasons} - {"unsteady"} for score in scores]
    assert 0 < found.sum() < len(found)


def test_every_kind_is_counted_with_its_number(run):
    outcome = CliRunner().invoke(main, [str(run.folder), "--foreign", "skin"])
    assert outcome.exit_code == 0, outcome.output
    lines = [line.split(" | ") for line in outcome.stdout.splitlines()[2:]]
    counted = {line[0].strip("| "): int(line[1].replace(",", "")) for line in lines}
    assert counted["skin"] == 240
    (site,) = run.sites
    assert counted["benign"] == run.summary["sites"][site]["n_test"] and counted["asks for a look, not learned"] > 0


def test_kinds_and_counts_by_hand():
    assert kinds_of(["MEL", "NV", "BCC"], ", x") == ["asks for a look, x", "benign, x", "asks for a look, x"]
    one = Passed()
    one.add(np.array([True, True, False]), np.array([0.9, 1.1, 5.0]))
    one.add(np.array([True]), np.array([1.0]))
    assert list(table({"skin": one}))[2:] == ["| skin | 4 | 3 (75.0%) | 1 |"]
