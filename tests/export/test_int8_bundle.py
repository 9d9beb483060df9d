"""A bundle with an 8-bit score: which pictures choose and judge its layers, and what `bundle --int8` says."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tests.shared import Shared
from tests.told import told_task

from edgefl_export import cli
from edgefl_export.bundles.bundle_text import bundle_text
from edgefl_export.errors import ExportError
from edgefl_export.int8 import precision
from edgefl_export.int8.calibration import CHOICE, GATE, RANGES, calibration_of, federation_of, split_pictures
from edgefl_protocol.rules.questions import Questions
from edgefl_trainer.data import Federation, SiteRows, load_federation
from edgefl_trainer.data.partitions.make import make_partition
from edgefl_trainer.data.partitions.partition import PARTITION_FILE
from edgefl_trainer.data.partitions.plan import PartitionPlan
from edgefl_trainer.data.questions import QuestionRows
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.live.site_work import SiteOptions, prepare
from edgefl_trainer.models.backbones import load_backbone


@pytest.fixture(scope="module", autouse=True)
def _traced_once(shared: Shared) -> Iterator[None]:
    """What is quantised is traced elsewhere already."""
    with shared.traces():
        yield


def federation(tune: dict[str, int], val: dict[str, int]) -> Federation:
    """Sites with rows of these numbers; picture i is of colour i."""
    sites, start = {}, 0
    for name in tune:
        rows = np.arange(start, start + tune[name] + val[name])
        none = np.array([], np.int64)
        sites[name] = SiteRows(name, none, rows[: tune[name]], rows[tune[name] :], none, none)
        start += len(rows)
    images = np.zeros((start, 1, 1, 3), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = np.arange(start) % 256, np.arange(start) // 256
    return Federation((), images, np.zeros(start, np.int64), (), (), sites, "")


def rows_of(pictures: np.ndarray) -> list[int]:
    return [int(first) + 256 * int(second) for first, second, _ in pictures.reshape(-1, 3)]


@given(own=st.integers(0, 500), other=st.integers(0, 500), val=st.integers(0, 700), seed=st.integers(0, 9))
def test_pictures_are_dealt_once_and_the_sites_own_come_first(own, other, val, seed):
    """docs/design.md, rows: ranges and choice see tune rows alone, no picture is in two sets, draws repeat."""
    data = federation({"a": other, "b": own}, {"a": 40, "b": val})
    if own + other < 16:
        with pytest.raises(ExportError, match="at least 16 tune images"):
            split_pictures(data, "b", seed)
        return
    found = split_pictures(data, "b", seed)
    ranges, choice, gate = rows_of(found.ranges), rows_of(found.choice), rows_of(found.gate)
    together = ranges + choice + gate
    assert len(set(together)) == len(together)
    tune = {int(row) for site in data.sites.values() for row in site.tune}
    assert set(ranges) | set(choice) <= tune
    assert len(ranges) == min(RANGES, (own + other) // 2) and len(choice) <= CHOICE and len(gate) <= GATE
    mine = {int(row) for row in data.sites["b"].tune}
    firsts = [row in mine for row in ranges + choice]
    assert firsts == sorted(firsts, reverse=True)
    reported = {int(row) for row in data.sites["b"].val}
    assert len(reported & set(gate)) == min(val, GATE)
    assert rows_of(found.tune) == sorted(mine) and len(found.targets) == len(mine)
    again = split_pictures(data, "b", seed)
    assert rows_of(again.ranges) == ranges and rows_of(again.gate) == gate


@pytest.mark.parametrize("tune", [200, 600])
def test_a_picture_brings_its_questions_to_one_set(tune):
    """Tune rows that show one picture are in one set, whatever order they were drawn in; of 600 the gate has some."""
    data, rows = federation({"a": tune}, {"a": 80}), tune + 80
    shown = np.concatenate([np.arange(tune) // 9, 100 + np.arange(80) // 5])  # nine questions to a tune picture
    tokens = np.stack([np.arange(rows), shown], axis=1)
    asked = QuestionRows(tokens, ("",) * rows, np.zeros(rows, bool), ("",) * rows, Questions(("a",), 2))
    found = split_pictures(replace(data, pictures=shown, questions=asked), "a", 0)
    sets = {name: getattr(found.questions, name) for name in ("ranges", "choice", "gate", "tune")}
    for name, words in sets.items():
        assert rows_of(getattr(found, name)) == words[:, 1].tolist()  # each picture beside its own question
    assert len(set(sets["tune"][:, 0])) == len(found.targets) == tune
    pictures = [set(sets[name][:, 1]) for name in ("ranges", "choice", "gate")]
    assert not pictures[0] & pictures[1] and not (pictures[0] | pictures[1]) & pictures[2]
    ranges, choice = min(RANGES, tune // 2), min(CHOICE, tune - len(sets["ranges"]))
    assert 0 <= len(sets["ranges"]) - ranges < 9 and 0 <= len(sets["choice"]) - choice < 9
    assert len(sets["gate"]) == 80 + tune - len(sets["ranges"]) - len(sets["choice"])
    few = replace(data, pictures=shown // (tune // 10), questions=asked)
    with pytest.raises(ExportError, match="at least 16 tune images for its ranges, but the run's data has 2"):
        split_pictures(few, "a", 0)


def test_rows_are_those_that_the_run_had(tmp_path):
    """docs/design.md, rows: a run with a partition gave other rows to `val` than the data alone would, so its pictures
    are dealt by it again; where they come out otherwise, the data has changed, and no row is what it was."""
    specs = ("lesions:sites=2,images=60",)
    made = make_partition(specs, PartitionPlan(scheme="iid", sites=3), 5)
    (tmp_path / PARTITION_FILE).write_bytes(made.to_bytes())
    settings = RunSettings(method="head", data=specs, backbone="tiny", image_px=12, preset="tiny")
    spec = SimpleNamespace(image_px=12)
    run = SimpleNamespace(
        folder=tmp_path,
        settings=settings,
        backbone=SimpleNamespace(spec=spec),
        classes=("BCC", "BKL", "MEL", "NV"),
        questions=None,
        summary={"partition_sha256": made.sha256},
    )
    found = federation_of(run)
    assert len(found.sites) == 3 and found.partition_sha256 == made.sha256
    (tmp_path / PARTITION_FILE).unlink()
    with pytest.raises(ExportError, match="its rows have changed since the run began"):
        federation_of(run)


@pytest.mark.parametrize(("task", "classes"), [("", ("BKL", "MEL", "NV")), ("mal=MEL,SCC:rest", ("rest", "mal"))])
def test_a_live_site_counts_its_pictures_in_the_federations_classes(task, classes, tmp_path):
    """docs/design.md 7, suspicion: the threshold of an 8-bit bundle is counted on these rows, as they were learned. The
    site lacks a class of the federation, or one that its own task names."""
    drawn, network = "lesions:sites=1,images=400,classes=NV+MEL", load_backbone("tiny", image_px=12)
    told = told_task(
        method="head", task="all", classes=classes, rounds=2, train_rounds=2, epochs=1, seed=0,
        settings={}, travels=(), backbone=dict(vars(network.spec)),
    )  # fmt: skip
    work = prepare(told, SiteOptions(data=(drawn,), task=task, device="cpu"))
    run = SimpleNamespace(
        folder=tmp_path,
        settings=work.settings,
        backbone=network,
        classes=classes,
        questions=None,
        summary={"partition_sha256": work.federation.partition_sha256},
    )
    found = calibration_of(run, work.site.name)
    plain = load_federation([drawn], image_px=12)
    groups = {"MEL": "mal", "NV": "rest"} if task else {"MEL": "MEL", "NV": "NV"}

    def named(rows):
        return [groups[plain.classes[label]] for label in plain.labels[rows]]

    site = plain.sites[work.site.name]
    assert [classes[target] for target in found.targets] == named(site.tune) and len(set(found.targets)) == 2
    assert [classes[target] for target in found.reported.targets] == named(site.rows(plain.report_split))
    run.classes = ("c", "d")  # of another run: what is unknown is refused, never numbered
    with pytest.raises(ExportError, match=r"the data has the class '.*', but the run's classes are c and d"):
        calibration_of(run, work.site.name)


@pytest.fixture(scope="module")
def int8_run(run_folder, tmp_path_factory):
    """A copy of the run with a small drawn federation behind it, and a key."""
    place = tmp_path_factory.mktemp("int8")
    folder, keys = shutil.copytree(run_folder, place / "run"), place / "keys"
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("images=4,", "images=200,"))
    assert CliRunner().invoke(cli.main, ["keygen", str(keys)]).exit_code == 0
    return folder, keys


def bundle(int8_run, output, *more):
    folder, keys = int8_run
    arguments = [
        "bundle",
        str(folder),
        "--site",
        "north",
        "--precision",
        "int8",
        "--sign",
        str(keys),
        "-o",
        str(output),
    ]
    return CliRunner().invoke(cli.main, [*arguments, *more])


@pytest.mark.slow
def test_an_int8_bundle_says_what_was_measured(int8_run, tmp_path):
    """The command line: card and answer hold the figures, min_runtime is that of the 8-bit graph."""
    done = bundle(int8_run, tmp_path / "small.edgefl", "--json")
    assert done.exit_code == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["int8"]["same_class"] >= 0.99 and facts["int8"]["change"] <= 0.01
    assert 0 <= facts["int8"]["other_referral"] <= 1
    assert f"the other does not: {facts['int8']['other_referral']:.2%} of these images" in bundle_text(facts)
    words = "the graph, before its layers got 8 bits,"  # whose figures are no others
    assert words in bundle_text(facts) and words not in bundle_text({**facts, "int8": None})
    shown = json.loads(CliRunner().invoke(cli.main, ["inspect", str(tmp_path / "small.edgefl"), "--json"]).stdout)
    assert shown["min_runtime"] == "1.24"
    told = shown["card"]["metrics"]["int8"]
    assert told["other_referral"] == pytest.approx(facts["int8"]["other_referral"], abs=1e-5)
    assert told["images"]["gate"] == facts["int8"]["images"] >= 64
    assert told["layers"] > 0 and set(told["kept_in_float"]) <= set(told["most_sensitive"])


@pytest.mark.slow
def test_a_refused_int8_bundle_leaves_no_file(int8_run, tmp_path, monkeypatch):
    """Export gates, int8: exit 1, one sentence, no bundle."""
    monkeypatch.setattr(precision, "MAX_MEAN_CHANGE", 0.0)
    refused = bundle(int8_run, tmp_path / "no.edgefl")
    assert refused.exit_code == 1 and not (tmp_path / "no.edgefl").exists()
    last = refused.stderr.strip().splitlines()[-1]
    assert last.startswith("edgefl-export: with 8 bits") and last.endswith("use --precision fp32")


def test_a_run_with_too_few_pictures_for_the_gate_is_refused_before_the_tracing(int8_run, monkeypatch):
    """docs/design.md 7, export gates (int8): at least 64; it was said after minutes."""
    run = open_run(int8_run[0])
    assert len(calibration_of(run, "site-1").gate) >= 64
    few = federation({"north": 40}, {"north": 43})
    monkeypatch.setattr("edgefl_export.int8.calibration.federation_of", lambda _: few)
    with pytest.raises(ExportError, match="the int8 gate needs 64 images, but 43 were found"):
        calibration_of(run, "north")


def test_int8_without_the_runs_images_is_one_sentence(int8_run, tmp_path, monkeypatch):
    """A run whose data is gone is refused before anything is traced."""
    folder, _ = int8_run
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(
        config.replace("lesions:sites=2,images=200,classes=NV+MEL+BKL", f"manifest:{tmp_path / 'gone.zip'}")
    )
    try:
        gone = bundle(int8_run, tmp_path / "no.edgefl")
    finally:
        (folder / "config.toml").write_text(config)
    assert gone.exit_code == 1
    assert gone.stderr.strip().splitlines()[-1].startswith("edgefl-export: int8 needs the images of the run")
