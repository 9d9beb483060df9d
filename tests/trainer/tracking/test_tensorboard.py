"""Event files, read back by TensorBoard's own reader."""

import json
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.trainer.conftest import TINY, edgefl_train

pytestmark = pytest.mark.skipif(
    find_spec("tensorboard") is None,
    reason="TensorBoard is not installed: needs edgefl-derm[tensorboard]",
)

WORDS = ("--data", "lesions:sites=2,images=40,px=36", *TINY, "--rounds", "2")


def read_back(folder: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        found.Reload()
    return found


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = read_back(folder)
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def check(run: Path, board: Path) -> None:
    """Every number of the lines of metrics stands there once, under its round."""
    points = scalars(board)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["round"] for line in lines if line["phase"] == "train"} == {1, 2}
    for name in ("loss", "bytes_up", "images_per_second", "tune_balanced_accuracy"):
        for site in ("site-1", "site-2"):
            wanted = [(line["round"], line[name]) for line in lines if line["site"] == site and name in line]
            assert points[f"{name}/{site}"] == [(step, pytest.approx(value)) for step, value in wanted]
    summary = json.loads((run / "summary.json").read_text())
    ((_, mean),) = points["mean_balanced_accuracy"]
    assert mean == pytest.approx(summary["mean_balanced_accuracy"])
    texts = read_back(board)
    assert summary["state_sha256"] in texts.Tensors("summary/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "| rounds | 2 |" in texts.Tensors("settings/text_summary")[-1].tensor_proto.string_val[0].decode()


def test_figures_and_digest_of_a_run_and_the_same_bits(tmp_path, cached):
    plain = edgefl_train("run", "fedavg", *WORDS, "--out", tmp_path / "plain", "--json").json()
    followed = edgefl_train(
        "run", "fedavg", *WORDS, "--out", tmp_path / "run", "--json", "--track", "tensorboard"
    ).json()
    assert followed["state_sha256"] == plain["state_sha256"]
    check(tmp_path / "run", tmp_path / "run/tensorboard")
    assert not (tmp_path / "plain/tensorboard").exists() and not (tmp_path / "plain/tracking.json").exists()


def test_a_killed_run_goes_on_in_its_folder_without_doubled_points(tmp_path, kill_after):
    run, board = tmp_path / "run", tmp_path / "board"
    words = ("run", "fedavg", *WORDS, "--out", run, "--track", f"tensorboard:{board}")
    kill_after("phase-0001/site-1.metrics.json", *words)
    assert edgefl_train(*words, "--resume").code == 0
    check(run, board)
    again = edgefl_train(*words, "--resume")  # of a finished run: nothing is computed, all is sent
    assert again.code == 0 and "nothing was computed again" in again.err
    check(run, board)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--workers", "2")])
def test_each_run_of_a_study_is_followed_in_a_place_of_its_own(more, tmp_path, cached, monkeypatch):
    """By its name, which is its folder below the study's; what cannot be followed shows before a run begins."""
    monkeypatch.setenv("EDGEFL_DATA", "/nowhere")
    table = Path(__file__).parents[3] / "experiments/fedevprompt-table-1.toml"
    words = (
        "experiment",
        table,
        "--tiny",
        "--rows",
        "local-bt",
        "--seeds",
        "0,1",
        "--rounds",
        "1",
        "--device",
        "cpu",
        *more,
    )
    board, out = tmp_path / "board", tmp_path / "out"
    (board / "centres/local-bt/seed-1").mkdir(parents=True)
    foreign = board / "centres/local-bt/seed-1/notes.txt"
    foreign.write_text("mine")
    refused = edgefl_train(*words, "--out", out, "--track", f"tensorboard:{board}")
    assert refused.code == 2 and "holds notes.txt" in refused.sentence() and not out.exists()
    foreign.unlink()
    found = edgefl_train(*words, "--out", out, "--track", f"tensorboard:{board}", "--track", "tensorboard")
    assert found.code == 0, found.err
    for seed in (0, 1):
        run = out / f"centres/local-bt/seed-{seed}"
        ((_, mean),) = scalars(board / f"centres/local-bt/seed-{seed}")["mean_balanced_accuracy"]
        assert mean == pytest.approx(json.loads((run / "summary.json").read_text())["mean_balanced_accuracy"])
        assert scalars(run / "tensorboard")["mean_balanced_accuracy"]
