"""`experiments/*.toml`: every file is read, and what it runs exists. Source: docs/experiments.md, docs/methods.md 5."""

import re
import shlex
from pathlib import Path

import pytest

from edgefl_trainer.cli import cli
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.errors import SettingError
from edgefl_trainer.experiments.files import Experiment, plan_of, read_experiment
from edgefl_trainer.experiments.planning import Choice, commands, expanded, place_of, plan_runs
from edgefl_trainer.methods import METHODS

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "experiments").glob("*.toml"))
PEP_TABLES = (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)
EVERYTHING = {"EDGEFL_DATA": "/data"}


@pytest.fixture(scope="module")
def read() -> dict[str, Experiment]:
    return {path.stem: read_experiment(path) for path in FILES}


def test_there_is_a_file_for_each_table_and_figure(read):
    wanted = {f"fedevprompt-table-{n}" for n in (1, 2)} | {f"pep-fedpt-table-{n}" for n in PEP_TABLES}
    wanted |= {f"pep-fedpt-figure-{n}" for n in (3, 6, 10)} | {
        "pep-fedpt-isic-pathological",
        "pep-fedpt-isic-dirichlet",
    }
    assert set(read) == wanted


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_every_row_resolves_and_its_commands_parse(name, tiny, read, tmp_path):
    """Methods, hyper-parameters, settings, data kinds and partitions exist; so do the options of the commands."""
    experiment = read[name]
    planned = plan_runs(experiment, Choice(out=tmp_path, tiny=tiny), EVERYTHING)
    assert len(planned) == len(list(experiment.pairs()))
    assert len({run.folder for run in planned}) == len(planned)
    for run in planned:
        assert isinstance(run.settings, RunSettings) and run.settings.method in METHODS
        assert place_of(run.folder) == (run.part.name, run.row.folder, 0)
        if tiny:
            assert run.settings.preset == "tiny" and all(text.startswith("lesions:") for text in run.settings.data)
    (tmp_path / "partitions").mkdir(exist_ok=True)
    for line in commands(planned):
        words = shlex.split(line)
        if words[0] == "mkdir":
            continue
        if "--partition" in words:
            Path(words[words.index("--partition") + 1]).touch()  # the option asks for a file that is there
        cli.commands[words[1]].make_context(words[1], words[2:])


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_commands_of_a_file_are_commands(name, read):
    for command in read[name].commands:
        words = shlex.split(command.run)
        assert words[:3] == ["edgefl-train", "experiment", f"experiments/{name}.toml"]
        parsed = cli.commands["experiment"].make_context("experiment", [str(ROOT / words[2]), *words[3:]])
        assert parsed.params["out"].parts[0] == "runs"
        assert command.minutes > 0


@pytest.mark.parametrize("first", ["pep-fedpt", "fedevprompt"])
def test_experiments_that_share_an_out_agree_on_the_runs_they_share(first, read, tmp_path):
    """The same folder never means two settings, so tables can share runs."""
    seen: dict[Path, RunSettings] = {}
    shared = 0
    for name, experiment in read.items():
        if name.startswith(first):
            for run in plan_runs(experiment, Choice(out=tmp_path), EVERYTHING):
                shared += run.folder in seen
                before, now = seen.setdefault(run.folder, run.settings), run.settings
                assert before.build_method() == now.build_method(), run.folder
                for key in set(vars(now)) - {"hyper"}:
                    assert getattr(before, key) == getattr(now, key), (run.folder, key)
    assert shared > 0


def test_the_papers_schedule_is_that_of_its_table_7(read):
    """PEP-FedPT table 7 (docs/methods.md 5): sites, classes a site, rounds, participation, local epochs."""
    wanted = {
        "cifar100-pathological": ({"sites": 100, "classes_per_site": 10}, 100, 0.05, 5),
        "cifar100-dirichlet-0.3": ({"sites": 100, "alpha": 0.3}, 100, 0.05, 5),
        "tiny-imagenet-pathological": ({"sites": 200, "classes_per_site": 10}, 100, 0.025, 5),
        "tiny-imagenet-dirichlet-0.3": ({"sites": 200, "alpha": 0.3}, 100, 0.025, 5),
        "domainnet": ({"sites": 60, "classes_per_site": 5}, 50, 0.1, 5),
        "inaturalist": ({}, 500, 0.01, 2),
    }
    seen = set()
    for name, experiment in read.items():
        if not name.startswith("pep-fedpt-table"):
            continue
        for run in plan_runs(experiment, Choice(out=Path("out")), EVERYTHING):
            part = run.part.name.removesuffix("-held-out")
            if part not in wanted:
                continue
            seen.add(part)
            numbers, *schedule = wanted[part]
            plan, seed = plan_of(run.part.partition)
            assert {key: getattr(plan, key) for key in numbers} == numbers and seed == 0
            assert [run.settings.rounds, run.settings.participation, run.settings.epochs] == schedule
            assert plan.holdout_sites == (0.1 if run.part.name.endswith("-held-out") else 0.0)
            if run.row.method == "pep-fedpt":
                assert run.settings.build_method().period == 10
    assert seen == set(wanted)


def test_repeated_numbers_are_the_same_wherever_they_stand(read):
    """The paper repeats the rows of its Table 1 in Tables 4, 5, 8 to 13 and 17; ours repeat them too."""
    main = "95.46 ± 0.16"
    for table in (1, 4, 5, 8, 13):
        cells = [row.paper.get("cifar100-pathological", ("",))[0] for row in read[f"pep-fedpt-table-{table}"].rows]
        assert main in cells, table
    for table in (1, 4, 5, 8, 11, 17):
        cells = [row.paper.get("cifar100-dirichlet-0.3", ("",))[0] for row in read[f"pep-fedpt-table-{table}"].rows]
        assert "88.75 ± 0.25" in cells, table


def test_the_papers_own_means_follow_from_its_sites(read):
    """FedEvPrompt Tables 1 and 2: Avg is the mean of C1 … C6, to rounding; the two exceptions stand in the notes."""
    for name in ("fedevprompt-table-1", "fedevprompt-table-2"):
        for row in read[name].rows:
            cells = row.paper["centres"]
            mean = sum(map(float, cells[:6])) / 6
            slack = 0.07 if row.label == "FedAvg b-prompts" else 0.011
            assert abs(mean - float(cells[12].partition("±")[0])) < slack, row.label


# ---------------------------------------------------------------------------------------------- what a file may not say

GOOD = """
title = "T"
metric = "accuracy"
spread = "seeds"
[source]
paper = "P"
place = "Table 1"
caption = "C"
[[commands]]
run = "edgefl-train experiment f.toml --out o"
minutes = 1
machine = "m"
basis = "estimated"
[[parts]]
name = "a"
data = ["lesions:sites=2"]
partition = { scheme = "iid", sites = 2 }
columns = [{ name = "Mean", figure = "mean" }]
[[rows]]
label = "Head"
method = "head"
paper = { a = ["1.0 ± 0.1"] }
[tiny]
data = ["lesions:sites=2"]
"""


def written(tmp_path: Path, old: str = "", new: str = "") -> Path:
    assert old in GOOD
    path = tmp_path / "f.toml"
    path.write_text(GOOD.replace(old, new, 1) if old else GOOD)
    return path


def test_the_example_is_read(tmp_path):
    assert read_experiment(written(tmp_path)).rows[0].folder == "head"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('title = "T"', "title = = 1", "is not valid TOML"),
        ('title = "T"', 'titel = "T"', "the key 'titel'; did you mean title"),
        ('title = "T"', "", "has no 'title': add it"),
        ('metric = "accuracy"', 'metric = "accurate"', "allowed: balanced_accuracy, macro_precision"),
        ("minutes = 1", 'minutes = "1"', "minutes"),
        ('method = "head"', 'method = "head"\nmetod = "head"', "metod"),
        ('name = "a"', 'name = "A b"', "name of a folder"),
        ('["1.0 ± 0.1"]', '["1.0", "2.0"]', "2 numbers in part 'a', which has 1 columns"),
        ('["1.0 ± 0.1"]', '["one"]', "'one' is not a number as a paper prints it"),
        ("paper = { a =", "paper = { b =", "names the part 'b'"),
        ("sites = 2 }", "sites = 2, alhpa = 1 }", "did you mean alpha"),
        ("sites = 2 }", "sites = 2, alpha = 1 }", "leave --alpha out"),
        ("[tiny]\n", "[tiny]\nsettings = { round = 1 }\n", "did you mean rounds"),
        ('figure = "mean" }', 'figure = "bytes" }', "need a target"),
        ("[[rows]]", '[[rows]]\nlabel = "head"\nmethod = "local"\n[[rows]]', "more than one row of part a"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_sentence(old, new, words, tmp_path):
    with pytest.raises(SettingError, match=re.escape(words)) as caught:
        read_experiment(written(tmp_path, old, new))
    assert str(caught.value).startswith(str(tmp_path / "f.toml"))


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"rows": ("heat",)}, "no row 'heat'; did you mean head"),
        ({"parts": ("b",)}, "no part 'b'"),
        ({"assignments": ("lrr=1",)}, "did you mean lr"),
        ({"flags": {"rounds": 0}}, "rounds is 0"),
        ({"flags": {"data": ("lesion:",)}}, "not a data SPEC"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(choice, words, tmp_path):
    experiment = read_experiment(written(tmp_path))
    with pytest.raises(SettingError, match=re.escape(words)):
        plan_runs(experiment, Choice(out=tmp_path, **choice), {})


def test_the_command_line_wins_over_the_file(tmp_path):
    experiment = read_experiment(written(tmp_path))
    flags = {"rounds": 7, "preset": None, "data": ("lesions:sites=3",)}
    choice = Choice(out=tmp_path, seeds=(0, 2), flags=flags, assignments=("lr=0.5", "lr_decay=0.9"))
    first, second = plan_runs(experiment, choice, {})
    assert (first.settings.rounds, first.settings.data, first.settings.hyper["lr"]) == (7, ("lesions:sites=3",), 0.5)
    assert (first.settings.seed, second.settings.seed, second.folder.name) == (0, 2, "seed-2")
    assert first.settings.partition == second.settings.partition == str(tmp_path / "partitions/a.json")


def test_variables_come_from_the_environment():
    assert expanded("manifest:$EDGEFL_DATA/x.zip", {"EDGEFL_DATA": "/d"}) == "manifest:/d/x.zip"
    with pytest.raises(SettingError, match="needs the environment variable EDGEFL_DATA"):
        expanded("manifest:$EDGEFL_DATA/x.zip", {})
