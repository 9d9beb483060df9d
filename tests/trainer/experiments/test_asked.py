"""An experiment over questions: the usual answer is a row of its own, and runs are followed by their accuracy.

Source: docs/methods.md 11.4, docs/reference/experiment-files.md.
"""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from benchmarks.federation import answers_page
from click.testing import CliRunner
from tests.trainer.conftest import edgefl_train, make_asked

from edgefl_trainer.experiments import pictures
from edgefl_trainer.experiments.files import Column, read_experiment
from edgefl_trainer.experiments.measured import Measurement, figure_of

ROOT = Path(__file__).parents[3]
FILE = ROOT / "experiments/medvqa-vqa-rad.toml"
BEGIN, END = "<!-- figures: written by benchmarks/federation/answers_page.py -->", "<!-- end of figures -->"
ROWS = {"Local": "local", "question alone": "question-alone"}  # label → folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory, cached):
    """Two rows of the tiny table, on drawn questions."""
    folder = tmp_path_factory.mktemp("answers")
    make_asked(folder / "vqa_rad.zip", {"HEAD": 12, "CHEST": 12, "ABD": 12})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEFL_DATA", str(folder))
        rows = ",".join(ROWS.values())
        found = edgefl_train(
            "experiment", FILE, "--tiny", "--rows", rows, "--out", folder / "runs", "--device", "cpu", "--rounds", 1
        )
    assert found.code == 0, found.err
    assert "mean accuracy " in found.err and "balanced" not in found.err
    return folder / "runs", found


def test_shares_of_a_model_stand_in_the_csv(ran):
    folder, _ = ran
    text = edgefl_train("table", folder, "--experiment", FILE, "--format", "csv").out
    summary = json.loads((folder / "organs/local/seed-0/summary.json").read_text())
    for row in csv.DictReader(io.StringIO(text)):
        told = (row["share_of_models"], row["share_of_full_models"])
        of_one = row["row"] in ROWS or row["row"] == "usual answer"
        assert told == (("0.0", "0.0") if of_one else ("", ""))
    assert summary["full_model_bytes"] > summary["model_bytes"]


def cells(folder: Path) -> dict[tuple[str, str], str]:
    found = edgefl_train("table", folder, "--experiment", FILE, "--format", "csv")
    return {(row["row"], row["column"]): row["ours"] for row in csv.DictReader(io.StringIO(found.out))}


def test_every_figure_is_that_of_the_runs_summary(ran):
    folder, found = ran
    shown = cells(folder)
    names = {"mean": "accuracy", "open, mean": "accuracy_open_questions", "closed, mean": "accuracy_closed_questions"}
    for label, place in ROWS.items():
        summary = json.loads((folder / f"organs/{place}/seed-0/summary.json").read_text())
        for column, name in names.items():
            assert float(shown[label, column]) == pytest.approx(summary[f"mean_{name}"])
            assert float(shown["usual answer", column]) == pytest.approx(summary["usual_answer"][f"mean_{name}"])
        assert float(shown[label, "chest"]) == summary["sites"]["rad-chest"]["accuracy"]
    assert "| of what learns | of full model |" in found.out and "`of full model` is up / round" in found.out
    assert found.out.count("| usual answer |") == 1 and "nothing here can be compared with the paper" in found.out


def test_the_page_of_results_is_filled_by_one_command(ran, tmp_path):
    """Between its two marks; what a person wrote stays."""
    folder, _ = ran
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs/results/vqa_rad.md").read_text(encoding="utf-8"), encoding="utf-8")
    main = answers_page.main
    before = page.read_text(encoding="utf-8").splitlines()
    done = CliRunner().invoke(main, [str(folder), "--experiment", str(FILE), str(page)])
    assert done.exit_code == 0, done.output
    shown = cells(folder)
    seen, alone = (float(shown[label, "mean"]) for label in ROWS)
    lines = page.read_text(encoding="utf-8").splitlines()
    (local, _) = [line for line in lines if line.startswith("| Local |")]
    assert f"| {100 * seen:.1f} |" in local and f"| {100 * (seen - alone):+.1f} |" in local
    assert [line for line in before if not line.startswith("|")] == [line for line in lines if not line.startswith("|")]


def test_the_short_results_are_those_of_the_page():
    """docs/results/README.md says the span of the methods' means, that of the question alone, and the usual answer."""
    table = (ROOT / "docs/results/vqa_rad.md").read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.split("\n\n")[1].splitlines()[2:]]
    means = {label: float(mean.partition(" ± ")[0]) for label, mean in rows}
    alone, usual = means.pop("question alone"), means.pop("usual answer")
    assert len(means) == 5
    short = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    span = f"{min(means.values())} to {max(means.values())} %"
    assert f"| {span}, and {alone} % from the question alone; the usual answer {usual} %. " in short


def test_runs_of_a_methods_switches_are_left_out_of_the_page_and_named(ran, tmp_path):
    """They lie beside the rows, and would stand for one of them twice."""
    folder, _ = ran
    shutil.copytree(folder, tmp_path / "runs", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(folder / "organs/local", tmp_path / "runs/organs/uniform")
    marked = f"{BEGIN}\n{END}\n"
    main = answers_page.main
    pages = {}
    for name in ("runs", "first"):
        pages[name] = tmp_path / f"{name}.md"
        pages[name].write_text(marked)
        given = tmp_path / "runs" if name == "runs" else folder
        done = CliRunner().invoke(main, [str(given), "--experiment", str(FILE), str(pages[name])])
        assert done.exit_code == 0, done.output
        assert ("uniform/seed-0: its folder is that of no row" in done.output) is (name == "runs")
    assert pages["runs"].read_text() == pages["first"].read_text() != marked


def test_a_page_or_runs_that_do_not_fit_are_one_sentence(ran, tmp_path):
    folder, _ = ran
    main = answers_page.main
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    twice = [str(folder), str(folder / "organs/local"), "--experiment", str(FILE)]
    (tmp_path / "again").mkdir()
    shutil.copytree(folder / "organs/local/seed-0", tmp_path / "again/run")
    done = CliRunner().invoke(main, [*twice, str(tmp_path / "again/run"), str(page)])
    assert done.exit_code == 1 and "is there twice: leave one run out." in done.output
    page.write_text("no marks")
    done = CliRunner().invoke(main, [str(folder), "--experiment", str(FILE), str(page)])
    assert done.exit_code == 1 and "the page lacks" in done.output and page.read_text() == "no marks"
    assert "Traceback" not in done.output and isinstance(done.exception, SystemExit)


def test_a_file_without_runs_has_no_usual_answer(tmp_path):
    (tmp_path / "o").mkdir()
    found = edgefl_train("experiment", FILE, "--out", tmp_path / "o", "--dry-run", "--data", "vqa-rad:a.zip")
    assert found.code == 0 and found.out.count("edgefl-train run ") == len(read_experiment(FILE).rows)


def test_runs_with_other_folder_names_find_their_rows(ran, tmp_path):
    """A run without the picture is a `local` run, too: the row that names more of its settings has it."""
    folder, _ = ran
    (tmp_path / "first").symlink_to(folder / "organs/question-alone/seed-0")
    (tmp_path / "second").symlink_to(folder / "organs/local/seed-0")
    found = edgefl_train("table", tmp_path / "first", tmp_path / "second", "--experiment", FILE, "--format", "csv")
    assert found.out == edgefl_train("table", folder, "--experiment", FILE, "--format", "csv").out


def test_runs_over_questions_are_drawn_by_their_accuracy(ran, tmp_path, monkeypatch):
    """Most answers are given to one question, so balanced accuracy is not recorded round by round."""
    folder, _ = ran
    drawn = []
    plain = pictures.plot_progress
    monkeypatch.setattr(pictures, "plot_progress", lambda *a, **k: drawn.append(k["metric"]) or plain(*a, **k))
    run = folder / "organs/local/seed-0"
    for words in ((folder, "--experiment", FILE), (run,)):
        found = edgefl_train("table", *words, "--plot", tmp_path / "a.png")
        assert found.code == 0 and (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG"), found.err
    assert drawn == ["tune_accuracy"]  # the experiment draws dots


def test_what_it_took_is_counted_by_the_accuracy_of_answers():
    lines = [
        {"phase_index": i, "round": i + 1, "site": "a", "seconds": 2.0, "bytes_up": 10, "tune_accuracy": 0.2 * i}
        for i in range(4)
    ]
    run = Measurement(seed=0, summary={"sites": {}, "usual_answer": {}}, lines=lines)
    assert figure_of(Column(name="x", figure="rounds", target=0.3), "accuracy", run) == 3
