"""docs/methods.md 8.4: held-out sites never train, are judged zero-shot, and are reported apart; saved partitions."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.trainer.conftest import TINY, Outcome, make_ward

from edgefl_trainer.data.partitions.partition import read_partition
from edgefl_trainer.engine.folder import read_metrics
from edgefl_trainer.engine.models import open_run, predict
from edgefl_trainer.engine.run import what_was_asked
from edgefl_trainer.engine.settings import read_settings, resolve
from edgefl_trainer.learning.unusual_features import everything_usual

METHODS = ("fedavg", "fedevprompt")  # one that has a model for a held-out site, one that has none

Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, cached: None) -> str:
    counts = {site: {"nevus": 10, "other": 6 + 4 * (i % 2)} for i, site in enumerate(("a", "b", "c", "d"))}
    return f"folder:{make_ward(tmp_path_factory.mktemp('four'), counts)}"


@pytest.fixture(scope="module")
def partition(tmp_path_factory: pytest.TempPathFactory, four: str, train: Train) -> Path:
    """The sites of the data, one of the four held out."""
    path = tmp_path_factory.mktemp("partition") / "natural.json"
    outcome = train("partition", "--data", four, "--scheme", "natural", "--holdout-sites", 0.25, "-o", path)
    assert outcome.code == 0, outcome.err
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, four: str, partition: Path, mae: Path, train: Train):
    """A function that runs a method over the partition once, and gives its folder."""
    root = tmp_path_factory.mktemp("runs")

    def folder(method: str) -> Path:
        out = root / method
        if not out.exists():
            outcome = train(
                "run", method, "--data", four, "--partition", partition, "--out", out, "--backbone", f"run:{mae}", *TINY
            )
            assert outcome.code == 0, outcome.err
        return out

    return folder


def read(folder: Path, name: str = "summary.json") -> Mapping:
    return json.loads((folder / name).read_text())


@pytest.fixture(scope="module")
def held_out(partition: Path) -> str:
    (name,) = read(partition.parent, partition.name)["held_out"]
    return name


@pytest.mark.parametrize("method", METHODS)
def test_a_held_out_site_is_judged_and_never_trained(method: str, run, held_out: str, partition: Path) -> None:
    folder = run(method)
    summary = read(folder)
    sites = summary["sites"]
    assert [name for name, found in sites.items() if found["held_out"]] == [held_out]
    assert held_out not in {line["site"] for line in read_metrics(folder)}
    assert not list((folder / "checkpoints").rglob(f"{held_out}.*"))
    assert sites[held_out]["n_train"] == 0 < sites[held_out]["n_test"]
    trained = [found["balanced_accuracy"] for name, found in sites.items() if name != held_out]
    assert summary["mean_balanced_accuracy"] == pytest.approx(np.mean(trained))
    assert summary["worst_balanced_accuracy"] == min(trained)
    assert summary["partition_sha256"] == read(partition.parent, partition.name)["partition_sha256"]
    apart = summary["held_out"]
    assert apart["sites"] == [held_out]
    assert apart["mean_balanced_accuracy"] == sites[held_out]["balanced_accuracy"]
    if method == "fedevprompt":  # 8.4: personalised state: not applicable
        assert sites[held_out]["balanced_accuracy"] is None and apart["sites_without_figures"] == 1
        assert held_out not in open_run(folder).sites
    else:
        assert 0 <= sites[held_out]["balanced_accuracy"] <= 1


def test_a_held_out_site_without_a_model_is_told_before_training(
    four, partition, held_out, mae, train, tmp_path, monkeypatch
):
    from edgefl_trainer.engine import run as engine
    from edgefl_trainer.errors import TrainingError

    def stop(*arguments):
        raise TrainingError("here training begins.")

    monkeypatch.setattr(engine, "run_phases", stop)
    said = {}
    for method in METHODS:
        words = ("--partition", partition, "--out", tmp_path / method, "--backbone", f"run:{mae}", *TINY)
        said[method] = train("run", method, "--data", four, *words).err
        assert "here training begins" in said[method]
    assert f"{held_out} will have no figures: the head stays at the sites that train" in said["fedevprompt"]
    assert "will have no figures" not in said["fedavg"]


def test_an_undefined_figure_says_why(run, four, held_out, train) -> None:
    folder, why = run("fedevprompt"), "the head stays at the sites that train"
    text = train("run", "--resume", "--out", folder).out
    (line,) = [line for line in text.splitlines() if line.startswith(held_out)]
    assert line.endswith(f"no model: {why}   held out") and "undefined" not in text
    assert f"no model of {held_out}, held out: {why}; not judged" in train("evaluate", folder, "--data", four).err
    assert f"– under {held_out}: no model, {why}" in train("table", folder).out
    assert why not in train("table", run("fedavg")).out


def test_its_model_is_that_of_the_others_with_its_own_prior(run, held_out: str) -> None:
    """FedAvg: the averaged tensors; temperature and threshold are means of the trained sites; W from its own counts."""
    finished = open_run(run("fedavg"))
    mine = finished.predictor(held_out)
    others = [finished.predictor(name) for name in finished.sites if name != held_out]
    for name, value in mine.tensors.items():
        if name not in ("prior", "temperature"):
            assert np.array_equal(value, others[0].tensors[name]), name
    assert mine.tensors["temperature"] == pytest.approx(np.mean([other.tensors["temperature"] for other in others]))
    calibration = finished.calibration
    own = calibration["sites"][held_out]
    assert own == {key: calibration[key] for key in ("temperature", "refer_above")}
    for key in ("temperature", "refer_above"):
        trained = [found[key] for name, found in calibration["sites"].items() if name != held_out]
        assert calibration[key] == pytest.approx(np.mean(trained))
    content = read(finished.folder, "partition.json")["sites"][held_out]["train"]
    n = np.array([len(content[name]) for name in finished.classes])
    assert mine.tensors["prior"] == pytest.approx(
        2 * (1 - n / n.sum()), rel=1e-5
    )  # methods.md 1.3: K/(K−1)·(1 − N_k/N)


def test_what_a_held_out_site_holds_changes_no_weight(four, partition, held_out, mae, run, train, tmp_path) -> None:
    """Other pictures at the held-out site: the same digest of the federation."""
    other = tmp_path / "other"
    shutil.copytree(four.removeprefix("folder:"), other)
    pictures = sorted((other / held_out).rglob("*.png"))
    for picture in pictures:
        picture.write_bytes(pictures[0].read_bytes())
    outcome = train(
        "run", "fedavg", "--data", f"folder:{other}", "--partition", partition, "--out", tmp_path / "run",
        "--backbone", f"run:{mae}", *TINY, "--json",
    )  # fmt: skip
    before, after = read(run("fedavg")), outcome.json()
    assert after["state_sha256"] == before["state_sha256"]
    assert after["mean_balanced_accuracy"] == before["mean_balanced_accuracy"]
    assert read(tmp_path / "run", "calibration.json") == read(run("fedavg"), "calibration.json")


@pytest.mark.slow
def test_what_is_foreign_is_unusual_at_a_held_out_site_too(train, tmp_path) -> None:
    """docs/methods.md, discounted evidence: every site of enough rows has its own distances, and uses no label."""
    data, path = "lesions:sites=3,images=80,px=36", tmp_path / "held.json"
    assert train("partition", "--data", data, "--scheme", "natural", "--holdout-sites", 0.3, "-o", path).code == 0
    words = ("--partition", path, "--preset", "tiny", "--backbone", "cnn:test_resnet", "--image-px", 36)
    outcome = train("run", "fedavg", "--data", data, *words, "--set", "prompts=none", "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    finished = open_run(tmp_path / "run")
    noise = np.random.default_rng(0).integers(0, 256, (8, 36, 36, 3), dtype=np.uint8)
    found = {}
    for name in finished.sites:
        model = finished.predictor(name)
        plain = everything_usual(model.module.backbone.spec.width)
        without = predict(replace(model, tensors={**model.tensors, **plain}), noise).vacuity
        assert (predict(model, noise).vacuity > without + 1e-3).all(), name
        found[name] = model.tensors["usual.mean"].tobytes()
    assert len(set(found.values())) == 3


def test_evaluate_keeps_held_out_sites_apart(run, four, held_out, train) -> None:
    folder = run("fedavg")
    found, summary = train("evaluate", folder, "--data", four, "--json").json(), read(folder)
    assert found["held_out"] == summary["held_out"]
    assert found["mean_balanced_accuracy"] == summary["mean_balanced_accuracy"]
    text = train("evaluate", folder, "--data", four).out
    assert "held-out sites: mean" in text
    assert [line.split()[0] for line in text.splitlines() if line.endswith("   held out")] == [held_out]


def test_runs_over_dealt_sites(four, mae, train, tmp_path) -> None:
    """`run` and `evaluate` over sites that the data itself does not have; the file may go, the run has its copy."""
    path = tmp_path / "dealt.json"
    made = train(
        "partition", "--data", four, "--scheme", "dirichlet", "--sites", 3, "--dirichlet-by", "site", "--seed", 5,
        "-o", path, "--json",
    ).json()  # fmt: skip
    assert (tmp_path / "dealt.png").read_bytes().startswith(b"\x89PNG")
    common = ("--backbone", f"run:{mae}", *TINY)
    summary = train("run", "fedavg", "--data", four, "--partition", path, "--out", tmp_path / "run", *common).code
    assert summary == 0
    found = read(tmp_path / "run")
    assert list(found["sites"]) == ["site-1", "site-2", "site-3"] == list(made["sites"])
    assert found["partition_sha256"] == made["partition_sha256"] == found["partition"]["sha256"]
    assert found["partition"]["scheme"] == "dirichlet" and found["partition"]["seed"] == 5
    assert {name: site["n_train"] for name, site in found["sites"].items()} == {
        name: site["n_train"] for name, site in made["sites"].items()
    }
    settings = read_settings(tmp_path / "run" / "config.toml")
    asked = what_was_asked(settings, settings.build_method(), read_partition(path))
    assert found["settings_sha256"] == asked["settings_sha256"]
    path.unlink()
    again = train("evaluate", tmp_path / "run", "--data", four, "--json").json()
    assert again["sites"].keys() == found["sites"].keys()
    assert again["mean_balanced_accuracy"] == found["mean_balanced_accuracy"]


def test_repetitions_share_their_settings_whatever_the_seed_of_the_partition(four, mae, train, tmp_path) -> None:
    """Runs compare like with like: one plan with two seeds is one setting, another plan another.

    As `run` begins its summary; `test_runs_over_dealt_sites` looks at a summary.
    """
    digests = []
    for name, plan in (("x", ("--seed", 1)), ("y", ("--seed", 2)), ("z", ("--seed", 1, "--holdout-sites", 0.4))):
        path = tmp_path / f"{name}.json"
        assert train("partition", "--data", four, "--scheme", "iid", "--sites", 3, *plan, "-o", path).code == 0
        given = {"data": (four,), "partition": str(path), "preset": "tiny", "backbone": f"run:{mae}"}
        settings, partition = resolve("local", given, None, []), read_partition(path)
        asked = what_was_asked(settings, settings.build_method(), partition)
        digests.append((asked["settings_sha256"], partition.sha256))
    assert digests[0][0] == digests[1][0] != digests[2][0]
    assert len({partition for _, partition in digests}) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--scheme", "dirichlet"), "needs --sites"),
        (("--scheme", "iid", "--sites", 5000), "lower --sites"),
        (("--scheme", "pathological", "--sites", 3, "--classes-per-site", 3), "lower --classes-per-site"),
        (("--scheme", "dirichlet", "--sites", 12, "--alpha", 1e-4), "larger --alpha, or lower --sites"),
        (("--scheme", "natural", "--holdout-sites", 0.05), "larger --holdout-sites"),
        (("--scheme", "iid", "--sites", 2, "--classes", "nevus,mole"), "'mole' is not in the data"),
    ],
)
def test_what_cannot_be_made_is_one_sentence_and_no_file(arguments, says, four, train, tmp_path) -> None:
    outcome = train("partition", "--data", four, *arguments, "-o", tmp_path / "p.json")
    assert outcome.code == 2
    assert says in outcome.sentence()
    assert list(tmp_path.iterdir()) == []


def test_a_partition_of_other_data_or_no_partition(four, ward, partition, mae, train, tmp_path) -> None:
    common = ("--out", tmp_path / "run", "--backbone", f"run:{mae}", *TINY)
    outcome = train("run", "fedavg", "--data", ward, "--partition", partition, *common)
    assert outcome.code == 1 and "name the data that it was made from" in outcome.sentence()
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    outcome = train("run", "fedavg", "--data", four, "--partition", broken, *common)
    assert outcome.code == 1 and "make one with `edgefl-train partition`" in outcome.sentence()
    assert train("run", "fedavg", "--data", four, "--partition", tmp_path / "none.json", *common).code == 2
    assert not (tmp_path / "run").exists()


def test_the_table_of_a_partition(four, train, tmp_path) -> None:
    """Sites down, classes across: numbers that add up to the images of the data."""
    outcome = train("partition", "--data", four, "--scheme", "iid", "--sites", 2, "-o", tmp_path / "p.json")
    over, *lines = outcome.out.splitlines()
    assert over.split() == ["train", "and", "tune", "pictures", "by", "class", "pictures", "by", "split"]
    assert over.index("pictures by split") <= lines[0].index(" train") + 1 > over.index("by class")
    head, *rows = [line.split() for line in lines]
    assert head == ["site", "nevus", "other", "train", "tune", "val", "test"]
    assert [row[0] for row in rows] == ["iid-1", "iid-2", "all"]
    numbers = np.array([[int(cell.replace("–", "0")) for cell in row[1:]] for row in rows])
    assert (numbers[:2].sum(axis=0) == numbers[2]).all()
    assert (numbers[:, 0] + numbers[:, 1] == numbers[:, 2] + numbers[:, 3]).all()
    assert numbers[2, 2:].sum() == 72


def test_a_partition_is_not_overwritten_unless_asked(train, four, tmp_path):
    """Runs that share the file would no longer share their rows."""
    path = tmp_path / "p.json"
    given = ("partition", "--data", four, "--scheme", "iid", "--sites", 2, "-o", path)
    assert train(*given).code == 0
    before = path.read_bytes()
    outcome = train(*given, "--seed", 1)
    assert outcome.code == 2 and "exists already" in outcome.sentence() and path.read_bytes() == before
    path.unlink()
    assert "p.png exists already" in train(*given).sentence()
    assert train(*given, "--seed", 1, "--force").code == 0 and path.read_bytes() != before
