"""`edgefl-train evaluate`, `predict` and `table` on finished runs: figures of the summaries, faults in a sentence."""

import csv
import io
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image
from tests.trainer.conftest import edgefl_train, make_ward, records, run, write_index, write_picture
from tests.trainer.engine.conftest import files_of

from edgefl_trainer.engine.folder import working_in
from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.settings import read_settings
from edgefl_trainer.evaluate.plots import confusion_plot, metric_plot, progress

# ---------------------------------------------------------------------------------------------- evaluate


@pytest.mark.parametrize("method", ["local", "fedavg", "fedevprompt"])
def test_evaluate_on_the_same_data_gives_the_summarys_figures(method, ward, finished):
    """docs/design.md 5: the keys of summary.json less bytes, seconds and what was measured before the first round."""
    summary = json.loads((finished[method] / "summary.json").read_text())
    found = edgefl_train("evaluate", finished[method], "--data", ward, "--device", "cpu", "--json").json()
    assert found["reported_rows"] == "test"
    of_run = {"seconds", "map_reach", *(name for name in summary if name.startswith("bytes_"))}
    wanted = {name: value for name, value in summary.items() if name not in of_run}
    assert {name: found[name] for name in wanted} == wanted


def test_evaluate_takes_val_rows_where_there_is_no_test_row(finished, tmp_path):
    counts = [{**row, "label": ("nevus", "other")[i % 2]} for i, row in enumerate(records())]
    rows = [{**row, "split": "val" if row["split"] == "test" else "train"} for row in counts]
    outcome = edgefl_train("evaluate", finished["local"], "--data", f"manifest:{write_index(tmp_path, rows)}", "--json")
    assert outcome.json()["reported_rows"] == "val"
    assert {name: site["n_test"] for name, site in outcome.json()["sites"].items()} == {"east": 2, "west": 2}
    assert "warning" not in outcome.err
    assert "val rows" in outcome.err


def test_evaluate_measures_the_maps_of_every_site(ward, finished):
    """docs/reference/scores.md: the same table as JSON and as text; too few pictures are said, and no map is shown."""
    given = ("evaluate", finished["fedevprompt"], "--data", ward, "--device", "cpu", "--maps")
    outcome, plain = edgefl_train(*given, "--json"), edgefl_train(*given[:-1], "--json")
    found = outcome.json()["maps"]
    assert set(found) == set(outcome.json()["sites"])
    assert {**outcome.json(), "maps": None} == {**plain.json(), "maps": None} and "maps" not in plain.json()
    for name, site in found.items():
        assert {"rollout", "attention", "values", "occlusion"} <= set(site["maps"])
        assert site["shown"]["why"] == "few_pictures" and 0 < site["pictures"] < 20
        assert f"{name}: measuring how true its maps are: {site['pictures']} pictures" in outcome.err
    text = edgefl_train(*given).out
    for name, site in found.items():
        assert f"{name:<16}a device shows no map: {site['pictures']} pictures were too few to find out" in text
        assert all(f"{name:<16}{kind:<12}" in text for kind in site["maps"])
    assert "few_pictures" not in text and "`marked`, the quarter that the map marks" in text


def test_evaluate_names_the_class_a_site_is_not_judged_on(finished, tmp_path, cached):
    """docs/guides/first-run.md: figures over fewer classes than the run has are said to be so."""
    counts = {"east": {"nevus": 4, "other": 4}, "west": {"nevus": 4}}
    data = f"folder:{make_ward(tmp_path / 'ward', counts)}"
    outcome = edgefl_train("evaluate", finished["local"], "--data", data, "--json")
    assert outcome.json()["sites"]["west"]["classes_tested"] == 1
    assert "warning: site west has no test row of class other: its figures cover the 1 of 2 classes" in outcome.err
    east = outcome.json()["sites"]["east"]["balanced_accuracy"]
    apart = {"one_class": ["west"], "sites": 1, "mean_balanced_accuracy": east}
    assert outcome.json()["several_classes"] == apart
    text = edgefl_train("evaluate", finished["local"], "--data", data).out
    assert re.search(r"^west .* 100\.0 %\*|^west .* 0\.0 %\*", text, re.M)
    assert f"says nothing; left out of the mean of the 1 site with more than one class {100 * east:.1f} %" in text


def test_evaluate_counts_the_pictures_that_the_run_learned_from(ward, finished, tmp_path, monkeypatch):
    """All 40 pictures of the run, judged again: it learned from, or was tuned on, all but its own test rows."""
    shutil.copytree(ward.removeprefix("folder:"), tmp_path / "again")
    files = sorted(path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.*"))
    lines = [f"p{i},{file},{file.parts[1]},{file.parts[0]},test" for i, file in enumerate(files)]
    (tmp_path / "again" / "index.csv").write_text("\n".join(["image,file,label,center,split", *lines]))
    again = f"manifest:{tmp_path / 'again'}"
    sites = json.loads((finished["local"] / "summary.json").read_text())["sites"].values()
    learned = 40 - sum(site["n_test"] for site in sites)
    titles: list[str] = []
    monkeypatch.setattr(confusion_plot, "plot_confusion", lambda matrix, classes, title: titles.append(title) or b"")
    picture = ("--json", "--plot", tmp_path / "a.png")
    outcome = edgefl_train("evaluate", finished["local"], "--data", again, *picture)
    assert outcome.json()["rows_learned_from"] == learned
    assert titles[0].startswith("local, all 40 pictures of 2 sites\n")
    assert f"TOO HIGH: the run learned from {learned} of these pictures" in titles[0]
    assert f"warning: {learned} of these 40 pictures, by their pixels, are among those that the run" in outcome.err
    fresh = edgefl_train("evaluate", finished["local"], "--data", ward, *picture)
    assert "TOO HIGH" not in titles[1]
    assert fresh.json()["rows_learned_from"] == 0 and "learned from" not in fresh.err


def test_evaluate_says_where_it_cannot_tell_what_the_run_learned_from(ward, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished["local"], folder, ignore=shutil.ignore_patterns("checkpoints"))
    config = folder / "config.toml"
    config.write_text(config.read_text().replace(ward, f"folder:{tmp_path / 'gone'}"))
    outcome = edgefl_train("evaluate", folder, "--data", ward, "--json")
    assert outcome.code == 0 and outcome.json()["rows_learned_from"] is None
    assert "warning: the run's own data cannot be compared (" in outcome.err and "is open" in outcome.err


def test_evaluate_judges_only_sites_that_have_a_model(finished, tmp_path, cached):
    counts = {"east": {"nevus": 4, "other": 4}, "north": {"nevus": 4, "other": 4}}
    data = f"folder:{make_ward(tmp_path / 'ward', counts)}"
    outcome = edgefl_train("evaluate", finished["local"], "--data", data, "--json")
    assert set(outcome.json()["sites"]) == {"east"}
    assert outcome.json()["sites_without_model"] == ["north"]
    assert "warning: the run has no model of north: not judged" in outcome.err
    outcome = edgefl_train("evaluate", finished["local"], "--data", f"{data}@site=north")
    assert outcome.code == 2 and "which has east and west" in outcome.sentence()


@pytest.mark.parametrize("spec", ["lesions:foo=3", "lesion:", "lesions:sites=0", "folder:x@site=../up"])
def test_evaluate_ends_with_2_where_a_spec_cannot_be_had(spec, finished):
    """docs/design.md 5: the same mistake has the same exit status as in `run`."""
    outcome = edgefl_train("evaluate", finished["local"], "--data", spec)
    assert outcome.code == 2 and outcome.sentence()


def test_evaluate_refuses_classes_the_run_has_not_learned(finished, tmp_path, cached):
    data = f"folder:{make_ward(tmp_path / 'ward', {'east': {'nevus': 4, 'mole': 4}})}"
    outcome = edgefl_train("evaluate", finished["local"], "--data", data)
    assert outcome.code == 1
    assert "'mole'" in outcome.sentence() and "nevus and other" in outcome.sentence()


def test_evaluate_says_what_is_no_run_with_models(mae, ward, tmp_path, finished):
    for folder, words in ((tmp_path, "is not a run directory"), (mae, "learned a backbone and has no model")):
        outcome = edgefl_train("evaluate", folder, "--data", ward)
        assert outcome.code == 2 and words in outcome.sentence()
    (tmp_path / "config.toml").write_bytes((finished["local"] / "config.toml").read_bytes())
    outcome = edgefl_train("evaluate", tmp_path, "--data", ward)
    assert outcome.code == 2 and "is not finished: finish it with" in outcome.sentence()
    settings = read_settings(tmp_path / "config.toml")
    with working_in(tmp_path, settings, resume=True):  # as a process that computes the last figures holds it
        outcome = edgefl_train("evaluate", tmp_path, "--data", ward)
    assert outcome.code == 2 and "is still running in another process: wait" in outcome.sentence()
    assert "--resume" not in outcome.sentence()
    outcome = edgefl_train("evaluate", tmp_path, "--data", ward)
    assert "is not finished" in outcome.sentence()  # it ended without the figures


@pytest.mark.parametrize(
    "name", ["config.toml", "summary.json", "calibration.json", "models/east.safetensors", "backbone.safetensors"]
)
def test_evaluate_names_the_damaged_file(name, ward, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished["local"], folder, ignore=shutil.ignore_patterns("checkpoints"))
    (folder / name).write_bytes(b"{")
    outcome = edgefl_train("evaluate", folder, "--data", ward)
    assert outcome.code == 1
    assert str(folder) in outcome.sentence()


# ---------------------------------------------------------------------------------------------- predict


def test_predict_scores_what_it_can_and_counts_the_rest(finished, tmp_path):
    write_picture(tmp_path / "a.png", 80, 1, px=50)
    (tmp_path / "b.png").write_text("no picture")
    outcome = edgefl_train(
        "predict", finished["local"], tmp_path / "a.png", tmp_path / "b.png", "--site", "east", "--json"
    )
    assert outcome.code == 1
    scored, failed = (json.loads(line) for line in outcome.out.splitlines())
    assert scored["probabilities"].keys() == {"nevus", "other"}
    np.testing.assert_allclose(sum(scored["probabilities"].values()), 1, atol=1e-6)
    assert failed["image"].endswith("b.png") and failed["error"].keys() == {"code", "message"}
    assert "1 of 2 images" in outcome.err


def test_predict_says_once_what_speaks_against_the_model(finished, tmp_path, monkeypatch):
    """It is not about a picture, so a run says it once, as `edgefl score` does; and whose pictures taught it."""
    monkeypatch.setattr("edgefl_trainer.engine.judging.prediction.figures_against", lambda *_: ("Weak.", "Wrong."))
    write_picture(tmp_path / "a.png", 80, 1, px=50)
    outcome = edgefl_train("predict", finished["local"], tmp_path / "a.png", tmp_path / "a.png", "--site", "east")
    whose = "expect more wrong answers on pictures of another centre or camera."
    assert outcome.err == f"Weak.\nWrong.\nIt learned from pictures of the site east; {whose}\n"
    assert len(outcome.out.splitlines()) == 2 and "Weak." not in outcome.out


def test_predict_knows_its_sites(finished, tmp_path):
    write_picture(tmp_path / "a.png", 80, 1)
    outcome = edgefl_train("predict", finished["local"], tmp_path / "a.png", "--site", "north")
    assert outcome.code == 2 and "it has east, west" in outcome.sentence()


def test_a_run_without_models_lists_none(mae, tmp_path):
    """A run that learned a backbone has no model of any site: the sentence does not end in an empty list."""
    outcome = edgefl_train("predict", mae, tmp_path / "a.png", "--site", "east")
    assert outcome.code in (1, 2) and "has no model to score with: name a run that uses it" in outcome.sentence()


# ---------------------------------------------------------------------------------------------- table


@pytest.fixture
def summaries(finished):
    return {name: json.loads((folder / "summary.json").read_text()) for name, folder in finished.items()}


def test_table_as_csv_and_json_holds_the_summaries_figures(finished, summaries):
    rows = list(csv.DictReader(io.StringIO(edgefl_train("table", *finished.values(), "--format", "csv").out)))
    objects = json.loads(edgefl_train("table", *finished.values(), "--format", "json").out)["rows"]
    assert [row["method"] for row in rows] == list(finished) == [row["method"] for row in objects]
    for row, entry, found in zip(rows, objects, summaries.values(), strict=True):
        assert float(row["east"]) == found["sites"]["east"]["balanced_accuracy"] == entry["sites"]["east"]["mean"]
        assert float(row["mean"]) == found["mean_balanced_accuracy"]
        assert float(row["std"]) == found["std_balanced_accuracy"]
        assert float(row["bytes_up_per_round"]) == found["bytes_up_per_round"]


def test_table_as_markdown_and_latex_has_a_line_for_each_run(finished, summaries):
    text = edgefl_train("table", *finished.values()).out
    text, _, recall, told = text.split("\n\n")[:4]
    assert [line.split("|")[1].strip() for line in recall.splitlines()[2:]] == [*finished]
    assert told.startswith("Recall of each class")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in lines if "---" not in line] == ["method", *finished]
    latex = edgefl_train("table", *finished.values(), "--format", "latex").out
    assert latex.startswith("\\begin{table}") and "\\end{table}" in latex
    for name, found in summaries.items():
        mean = f"{found['mean_balanced_accuracy']:.3f}"
        assert any(line.startswith(f"{name} &") and mean in line for line in latex.splitlines())
        assert any(f" {name} " in line and mean in line for line in lines)


@pytest.mark.parametrize("command", ["table", "report"])
def test_a_run_that_is_left_out_of_a_folder_is_named(command, finished, tmp_path):
    """A study would lose a seed unseen: a folder's damaged and unfinished runs were passed over without a word."""
    study = tmp_path / "study"
    for name in ("whole", "cut", "stopped"):
        shutil.copytree(finished["local"], study / name)
    (study / "cut/summary.json").write_text("{")
    (study / "stopped/summary.json").unlink()
    asked = ["--out", tmp_path / "page.html"] if command == "report" else []
    outcome = edgefl_train(command, study, *asked)
    told = f"warning: left out of {study}: cut (its results are damaged) and stopped (not finished)\n"
    assert outcome.code == 0 and outcome.err.startswith(told)
    assert "left out of" not in edgefl_train("table", finished["local"]).err


def test_table_draws_accuracy_over_rounds(finished, tmp_path):
    outcome = edgefl_train("table", *finished.values(), "--plot", tmp_path / "a.png")
    assert outcome.code == 0, outcome.err
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 300
        assert (
            len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 20
        )  # lines in several colours


def variant(run, folder, **changes):
    """A copy of a finished run, as if it had been made with other settings or another seed."""
    shutil.copytree(run, folder)
    settings = read_settings(run / "config.toml")
    settings = replace(settings, **{**changes, "hyper": {**settings.hyper, **changes.get("hyper", {})}})
    (folder / "config.toml").write_text(settings.to_toml())
    inputs = json.loads((run / "inputs.json").read_text())
    (folder / "inputs.json").write_text(json.dumps(inputs | {"hyper": hyper_values(settings.build_method())}))
    summary = json.loads((run / "summary.json").read_text())
    told = {"seed": settings.seed, "settings_sha256": settings.digest_but_seed()}
    (folder / "summary.json").write_text(json.dumps(summary | told))
    return folder


def test_a_variant_has_one_name_in_tables_and_pictures(finished, tmp_path, monkeypatch):
    """Two settings of FedAvg were `fedavg` and `fedavg #2` in a table, and `fedavg (folder)` in a picture."""
    from edgefl_trainer.experiments import pictures

    drawn = []
    plain, dots = pictures.plot_progress, metric_plot.named
    monkeypatch.setattr(pictures, "plot_progress", lambda runs, **more: drawn.append([*runs]) or plain(runs, **more))
    monkeypatch.setattr(metric_plot, "named", lambda rows: drawn.append(dots(rows)) or drawn[-1])
    runs = [finished["local"], finished["fedavg"]]
    runs += [variant(finished["fedavg"], tmp_path / f"lr{seed}", hyper={"lr_head": 0.01}, seed=seed) for seed in (0, 1)]
    runs.append(variant(finished["fedavg"], tmp_path / "again"))
    usual = hyper_values(read_settings(finished["fedavg"] / "config.toml").build_method())["lr_head"]
    names = ["local", f"fedavg, lr_head={usual}", "fedavg, lr_head=0.01", f"fedavg, lr_head={usual} #2"]
    table = edgefl_train("table", *runs, "--plot", tmp_path / "a.png").out
    first, _, recall, _ = table.split("\n\n")[:4]
    assert [line.split("|")[1].strip() for line in first.splitlines()[2:]] == names
    assert {line.split("|")[1].strip() for line in recall.splitlines()[2:]} == set(names)
    assert edgefl_train("table", *runs, "--metric", "accuracy", "--plot", tmp_path / "a.png").code == 0
    assert drawn == [names, names]  # two seeds of lr_head=0.01 in one


def test_table_draws_seeds_of_one_setting_as_one_method(finished, tmp_path, monkeypatch):
    """As its rows are: two seeds stood in two colours, under two names."""
    shutil.copytree(finished["local"], tmp_path / "second")
    summary = json.loads((tmp_path / "second/summary.json").read_text())
    (tmp_path / "second/summary.json").write_text(json.dumps(summary | {"seed": summary["seed"] + 1}))
    words: list[str] = []
    monkeypatch.setattr(progress, "png", lambda figure, **_: words.append(words_of(figure)) or b"")
    runs = (finished["local"], finished["fedavg"], tmp_path / "second")
    assert edgefl_train("table", *runs, "--plot", tmp_path / "a.png").code == 0
    told = words[0].splitlines()
    assert "local (2 seeds)" in told and "fedavg" in told and not any("second" in line for line in told)
    assert re.search(r"mean over 2 sites, n = \d+ tune rows together", words[0])


def test_a_picture_says_where_runs_saw_other_rows(finished, tmp_path, monkeypatch):
    """docs/guides/first-run.md: as the caption of the text does."""
    shutil.copytree(finished["local"], tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    (tmp_path / "run/summary.json").write_text(json.dumps(summary | {"partition_sha256": "0" * 64}))
    titles: list[str] = []
    for module in (progress, metric_plot):
        monkeypatch.setattr(module, "png", lambda figure, **_: titles.append(words_of(figure)) or b"")
    for runs, told in (((tmp_path / "run", finished["fedavg"]), True), (finished.values(), False)):
        for metric in ((), ("--metric", "balanced_accuracy")):
            assert edgefl_train("table", *runs, *metric, "--plot", tmp_path / "a.png").code == 0
            assert ("NOT ALL ON THE SAME ROWS: 2 different" in titles.pop()) == told


def test_a_caption_says_how_its_runs_were_made(finished, tmp_path):
    """docs/guides/first-run.md: rounds, epochs and images a site as they were, also beside a preset; and the data."""
    shorter = variant(
        finished["fedavg"], tmp_path / "a", rounds=3, epochs=4, images_per_site=5, data=("folder:/x/ward",)
    )
    told = edgefl_train("table", finished["local"], shorter).out
    assert "and tiny, 3 rounds of 4 epochs, at most 5 training images a site" in told
    assert "Data " in told and "folder:ward" in told and "/x/" not in told


def test_figures_of_an_untrained_network_say_so_wherever_they_are_shown(finished, ward, tmp_path, monkeypatch):
    """docs/guides/first-run.md: only `run` said so, and tables and pictures travel without its standard error."""
    words = "UNTRAINED NETWORK: this trial shows the steps, not what a model can do"
    titles: list[str] = []
    for module in (progress, metric_plot, confusion_plot):
        monkeypatch.setattr(module, "png", lambda figure, **_: titles.append(words_of(figure)) or b"")
    trained, bare = finished["fedavg"], variant(finished["local"], tmp_path / "bare", backbone="tiny")
    for metric in ((), ("--metric", "accuracy")):
        assert words in edgefl_train("table", bare, *metric, "--plot", tmp_path / "a.png").out
        assert words in titles.pop()
        mixed = edgefl_train("table", bare, trained, *metric, "--plot", tmp_path / "a.png").out
        assert "UNTRAINED NETWORK of local: this trial" in mixed and "UNTRAINED NETWORK of local" in titles.pop()
        alone = edgefl_train("table", trained, *metric, "--plot", tmp_path / "a.png").out
        assert "UNTRAINED" not in alone + titles.pop()
    told = edgefl_train("evaluate", bare, "--data", ward, "--plot", tmp_path / "a.png").err
    assert "warning: backbone tiny is untrained: this trial" in told and words in " ".join(titles.pop().split())


def words_of(figure):
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_table_refuses_what_cannot_be_compared(finished, mae, tmp_path, ward):
    nothing = edgefl_train("table", mae, "--plot", tmp_path / "a.png")
    assert nothing.code == 2 and "nothing to draw" in nothing.err and "Traceback" not in nothing.err
    outcome = run("local", ward, tmp_path / "nevus", f"run:{mae}", "--task", "nevus", "--rounds", "1")
    assert outcome.code == 0, outcome.err
    mixed = edgefl_train("table", finished["local"], tmp_path / "nevus")
    assert mixed.code == 2 and "task" in mixed.sentence()
    missing = edgefl_train("table", tmp_path / "nowhere")
    assert missing.code == 2 and "is not a run directory" in missing.sentence()


def test_what_table_reads_it_does_not_change(finished):
    before = files_of(finished["local"])
    edgefl_train("table", finished["local"])
    assert files_of(finished["local"]) == before


def test_evaluate_says_the_recall_of_each_class_with_intervals_and_draws_it(finished, ward, tmp_path):
    outcome = edgefl_train("evaluate", finished["local"], "--data", ward, "--plot", tmp_path / "a.png")
    assert outcome.code == 0, outcome.err
    assert "recall of each class, all sites together" in outcome.out
    assert re.search(r"east +\d+ +\d+   100\.0 % \(no interval: all are right\)", outcome.out)
    assert re.search(r"west +\d+ +\d+   \d+\.\d % \(", outcome.out)
    for name in ("nevus", "other"):  # of ten test pictures, and says so
        assert re.search(
            rf"  {name} +\d+\.\d% \(no interval: (too few lesions|all are (right|wrong))\) +of \d+", outcome.out
        )
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.format == "PNG"


def test_table_draws_the_figure_that_is_asked_for(finished, tmp_path):
    for name in ("a", "b"):
        metric = () if name == "a" else ("--metric", "ece")
        outcome = edgefl_train("table", *finished.values(), *metric, "--plot", tmp_path / f"{name}.png")
        assert outcome.code == 0, outcome.err
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()
