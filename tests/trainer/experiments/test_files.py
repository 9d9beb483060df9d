"""`experiments/*.toml`: every file is read, and what it runs exists.

Source: docs/reference/experiment-files.md, docs/methods.md 5.
"""

import re
import shlex
from pathlib import Path

import pytest
from tests.trainer.conftest import edgefl_train

from edgefl_trainer.cli import cli
from edgefl_trainer.data.specs import parse_spec
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.errors import SettingError
from edgefl_trainer.experiments.files import Experiment, plan_of, read_experiment
from edgefl_trainer.experiments.planning import Choice, commands, expanded, place_of, plan_runs, pretraining_of
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbone_names import has_own_weights

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
    wanted |= {f"fedclf-fedmae-{name}" for name in (*(f"table-{n}" for n in range(1, 6)), "figure-6")}
    wanted |= {f"fedclf-fedmae-centres-{mode}" for mode in ("local", "federated")} | {"medvqa-vqa-rad"}
    wanted |= {"fedclf-fedmae-ten-sites"}
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
        first = run.pretraining
        shipped = has_own_weights(str(run.row.settings.get("backbone", "")))
        assert (run.settings.method == "finetune") == (first is not None or shipped)
        if first is not None:
            assert not METHODS[first.settings.method].needs_labels and first.settings.data == run.settings.data
        assert place_of(run.folder) == (run.part.name, run.row.folder, 0)
        if tiny:
            drawn = "vqa-rad:" if name.startswith("medvqa") else "lesions:"  # of questions the data itself, cut short
            assert run.settings.preset == "tiny" and all(text.startswith(drawn) for text in run.settings.data)
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


@pytest.mark.parametrize("first", ["pep-fedpt", "fedevprompt", "fedclf-fedmae"])
def test_experiments_that_share_an_out_agree_on_the_runs_they_share(first, read, tmp_path):
    """The same folder never means two settings, so tables can share runs."""
    seen: dict[Path, RunSettings] = {}
    shared = 0
    for name, experiment in read.items():
        if name.startswith(first):
            planned = plan_runs(experiment, Choice(out=tmp_path), EVERYTHING)
            for run in (*planned, *pretraining_of(planned)):
                shared += run.folder in seen
                before, now = seen.setdefault(run.folder, run.settings), run.settings
                assert before.build_method() == now.build_method(), run.folder
                for key in set(vars(now)) - {"hyper"}:
                    assert getattr(before, key) == getattr(now, key), (run.folder, key)
    assert shared > 0


def test_pep_fedpts_tables_let_a_model_name_any_class(read):
    """Its accuracy is the argmax over all classes (text of section 5.2.1: without class priors 84.01, with them 95.46):
    a site that may name its own ten of 100 only would be told what the priors tell."""
    for name, experiment in read.items():
        if name.startswith("pep-fedpt"):
            assert experiment.metric == "open_accuracy"
            named = {c.metric for part in experiment.parts for c in part.columns if c.metric and "own" not in c.name}
            assert named <= {"open_accuracy", "open_balanced_accuracy"}, name


FORCED = {"open_balanced_accuracy", "open_macro_precision", "open_macro_f1", "open_specificity", "open_accuracy"}


def test_all_tables_of_pictures_are_of_forced_answers(read):
    """The papers know no abstention and restrict no answer to a site's classes (docs/methods.md 8.4); `auroc` has
    neither. What a device would show stands in columns that say so."""
    for name, experiment in read.items():
        if name.startswith("medvqa"):
            continue
        shown = {"own classes", "may abstain"}
        columns = [c for part in experiment.parts for c in part.columns if not any(w in c.name for w in shown)]
        assert {c.metric or experiment.metric for c in columns} <= FORCED | {"auroc"}, name
        beside = {c.name for part in experiment.parts for c in part.columns} - {c.name for c in columns}
        if name.startswith("fedevprompt") or "centres" in name or "isic" in name:
            assert beside, name


def test_ten_sites_are_the_papers_layout_and_batch(read):
    """arXiv 2208.11278 V-A: ten devices, of which three have a collection each and seven random parts of another; five
    diagnoses; batch 128. Figure 6: 44.72 without exchange, 47.45 with local negatives, 48.03."""
    experiment = read["fedclf-fedmae-ten-sites"]
    assert experiment.settings["classes"] == ("BCC", "DF", "MEL", "NV", "SCC")
    for run in plan_runs(experiment, Choice(out=Path("out")), EVERYTHING):
        plan, _ = plan_of(run.part.partition)
        assert (plan.scheme, plan.sites, plan.dealt, len(plan.whole)) == ("iid", 10, 7, 3)
        assert run.settings.select == "pooled"
        method = run.pretraining.settings.build_method()
        sgd = getattr(method, "sgd", None) or getattr(getattr(method, "contrast", None), "sgd", None)
        assert sgd is None or sgd.batch == 128, run.row.label
    first = {row.folder: row.paper.get("ten-sites-labels-10", ("",))[0] for row in experiment.rows}
    assert [first[f"{n}-federated"] for n in ("fedmoco", "fedclf-fe", "fedclf")] == ["44.72", "47.45", "48.03"]


def test_rows_without_the_prior_and_with_a_sharp_tau_say_what_carries_pep_fedpt(read):
    """Section 5.1: weights are exp(cos/tau) times class shares. Each factor is taken away, and both; the rest stays."""
    for name in ("pep-fedpt-isic-dirichlet", "pep-fedpt-isic-pathological"):
        own = {row.folder: dict(row.hyper) for row in read[name].rows if row.method == "pep-fedpt"}
        paper = own.pop("pep-fedpt")
        changed = [{key: value for key, value in hyper.items() if paper.get(key) != value} for hyper in own.values()]
        assert changed == [{"prior": False}, {"tau": 1e6}, {"tau": 0.005}, {"prior": False, "tau": 0.005}]


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


def printed(experiment: Experiment, label: str, part: str) -> list[float]:
    return [float(cell) for row in experiment.rows if row.label == label for cell in row.paper[part] if cell]


def test_what_the_fedclf_papers_text_says_of_its_tables_follows_from_them(read):
    """arXiv 2208.11278, V-A and V-B: gains over the best baseline in Tables I and II; +5.67 F1 and +3.64 AUC over
    FedSimCLR in III, +13.19 F1 in IV; Table V ends with the row of Table IV, Figure 6 with that of Table II."""
    gains = {
        1: {"10": (0.30, 2.29), "20": (1.64, 1.29), "40": (1.53, 1.86), "80": (1.67, 1.17)},
        2: {"10": (2.14, 1.43), "20": (2.58, 2.32), "40": (0.96, 2.02), "80": (0.59, 1.94)},
    }
    for number, shares in gains.items():
        table = read[f"fedclf-fedmae-table-{number}"]
        others = [row.label for row in table.rows if "ours" not in row.label]
        assert len(others) == 4
        for share, wanted in shares.items():
            lines = [printed(table, label, f"labels-{share}") for label in others]
            best = [max(column) for column in zip(*lines, strict=True)]
            ours = printed(table, "FedCLF (ours)", f"labels-{share}")
            assert [a - b for a, b in zip(ours, best, strict=True)] == pytest.approx(wanted), (number, share)
    local, together, split = (read[f"fedclf-fedmae-table-{number}"] for number in (3, 4, 5))
    mae, simclr = (printed(local, label, "isic-labels-80") for label in ("FedMAE (ours)", "FedSimCLR"))
    assert (mae[2] - simclr[2], mae[4] - simclr[4]) == pytest.approx((5.67, 3.64))
    mae, simclr = (printed(together, label, "isic-labels-80") for label in ("FedMAE (ours)", "FedSimCLR"))
    assert mae[2] - simclr[2] == pytest.approx(13.19)
    assert printed(split, "W/o Class Token (ours)", "isic-labels-80") == mae
    bars, table = read["fedclf-fedmae-figure-6"], read["fedclf-fedmae-table-2"]
    assert printed(bars, "FE+Neg", "labels-10") == printed(table, "FedCLF (ours)", "labels-10")


def test_the_fedclf_papers_federation_and_schedule(read):
    """arXiv 2208.11278. V-A: ten sites, seven of them parts of ISIC; 60/20/20; 100 rounds of one epoch, batch 128, rate
    0.03; then 20 epochs at 1e-4 alone, or 100 rounds together. V-B: ten parts; ten epochs a round; 200 epochs or 50
    rounds."""
    for number, spent in ((1, 20), (2, 100)):
        runs = plan_runs(read[f"fedclf-fedmae-table-{number}"], Choice(out=Path("out")), EVERYTHING)
        assert {run.settings.labels for run in runs} == {0.1, 0.2, 0.4, 0.8}
        for run in runs:
            specs = [parse_spec(text) for text in run.settings.data]
            assert [spec.iid_sites or spec.site for spec in specs] == [7, "AtlasDerm", "Dermnet", "DarkDerm"]
            assert all((spec.shares.test, spec.shares.tune) == (0.2, 0.25) for spec in specs)
            assert run.settings.classes == ("BCC", "DF", "MEL", "NV", "SCC") and run.settings.image_px == 72
            assert run.settings.rounds * run.settings.epochs == spent and run.settings.hyper["lr"] == 1e-4
            first = run.pretraining.settings
            assert (first.backbone, first.rounds, first.epochs) == ("cnn:resnet18", 100, 1)
            assert first.method == "random-init" or (first.hyper["batch"], first.hyper["lr"]) == (128, 0.03)
    for number, spent, batch, rate in ((3, 200, 512, 1e-3), (4, 50, 256, 5e-4), (5, 50, 256, 5e-4)):
        for run in plan_runs(read[f"fedclf-fedmae-table-{number}"], Choice(out=Path("out")), EVERYTHING):
            (spec,) = map(parse_spec, run.settings.data)
            assert (spec.iid_sites, spec.shares.test, run.settings.classes) == (10, 0.2, ())
            assert run.settings.rounds * run.settings.epochs == spent
            assert (run.settings.hyper["batch"], run.settings.hyper["lr"]) == (batch, rate)
            first = run.pretraining.settings
            network = "vit:768x12/16" if first.method == "fedmae" or "ViT" in run.row.label else "cnn:resnet50"
            assert (first.backbone, first.rounds, first.epochs) == (network, 100, 10 if first.method == "fedmae" else 1)


@pytest.mark.parametrize("name", ["table-1", "table-2", "figure-6"])
def test_a_folder_takes_the_place_of_the_private_set_and_its_file_says_so(name, read):
    """V-A: DarkDerm is the authors' own. Who names other data with --data has it in every run and before it."""
    experiment = read[f"fedclf-fedmae-{name}"]
    assert any("not public" in note and "any folder:DIR" in note and "--data" in note for note in experiment.notes)
    own = ("manifest:large.zip@split=iid:7", "folder:mine@site=mine@rows=60/20/20")
    for run in plan_runs(experiment, Choice(out=Path("out"), flags={"data": own}), EVERYTHING):
        assert run.settings.data == run.pretraining.settings.data == own


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
        ('title = "T"', 'titel = "T"', "the unknown key 'titel'; did you mean title"),
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
        ({"assignments": ("pretrain.lr=1",)}, "no pre-training runs: leave --set pretrain.lr out"),
        ({"flags": {"preset": "papr"}}, "did you mean paper?"),
        ({"flags": {"rounds": 0}}, "rounds is 0"),
        ({"flags": {"data": ("lesion:",)}}, "not a data SPEC"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(choice, words, tmp_path):
    experiment = read_experiment(written(tmp_path))
    with pytest.raises(SettingError, match=re.escape(words)):
        plan_runs(experiment, Choice(out=tmp_path, **choice), {})


@pytest.mark.parametrize(
    ("hyper", "words"),
    [
        ("momentumm = 0.5", "head has no hyper-parameter 'momentumm'; did you mean momentum"),
        ("lr = -1", "lr is -1"),
        ("lr = 'x'", "lr is 'x'"),
    ],
)
def test_a_mistake_in_a_row_names_file_and_row(hyper, words, tmp_path):
    """The sentence named a class of Python, and neither the file nor the row."""
    file = written(tmp_path, 'method = "head"', f'method = "head"\nhyper = {{ {hyper} }}')
    found = edgefl_train("experiment", file, "--out", tmp_path / "o")
    assert found.code == 2 and f"{file}: row 'Head': {words}" in found.sentence()


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
