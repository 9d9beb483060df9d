"""A run that is killed loses nothing: docs/design.md 4 ("resumes to the same final digest") and 10 (faults)."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.trainer.conftest import MAE, TINY, edgefl_train, make_ward
from tests.trainer.engine.conftest import files_of
from tests.trainer.engine.test_run import metrics, summary

from edgefl_trainer.engine.checkpoint import Checkpoints
from edgefl_trainer.errors import RunError


def command(method: str, folder: Path, ward: str, mae: Path, *more: str) -> list[object]:
    backbone = ["--backbone", "tiny", *MAE] if method == "fedmae" else ["--backbone", f"run:{mae}"]
    return ["run", method, "--data", ward, "--out", folder, *backbone, *TINY, *more]


@pytest.fixture(scope="module")
def killed(tmp_path_factory, ward, mae, kill_after):
    """`killed(method, moment, folder)`: that run as kill −9 left it, once killed and then copied."""
    root = tmp_path_factory.mktemp("killed")

    def leave(method: str, moment: str, folder: Path) -> list[object]:
        first = root / f"{method}-{moment.replace('/', '-')}"
        if not first.exists():
            kill_after(moment, *command(method, first, ward, mae))
        shutil.copytree(first, folder)
        return command(method, folder, ward, mae)

    return leave


@pytest.fixture
def begun(tmp_path, killed):
    """A `fedevprompt` run that was killed after its first round, and the command that began it."""
    return killed("fedevprompt", "checkpoints/latest.json", tmp_path / "run")


@pytest.mark.parametrize("method", ["fedevprompt", "fedmae"])
@pytest.mark.parametrize(
    "moment",
    [
        # first phase: one site is done, the other is not
        pytest.param("phase-0000/east.metrics.json", marks=pytest.mark.slow),
        # in the middle of what the second site leaves behind
        pytest.param("phase-0000/west.state.safetensors", marks=pytest.mark.slow),
        pytest.param("checkpoints/latest.json", marks=pytest.mark.slow),  # a finished phase; nothing is swept yet
        # second phase, with the optimiser's moments of the first
        pytest.param("phase-0001/east.metrics.json", marks=pytest.mark.slow),
    ],
)
def test_kill_9_and_resume_is_the_undisturbed_run(method, moment, tmp_path, mae, finished, killed):
    folder = tmp_path / "run"
    arguments = killed(method, moment, folder)
    assert not (folder / "summary.json").exists()
    found = edgefl_train(*arguments, "--resume", "--json").json()
    undisturbed = mae if method == "fedmae" else finished[method]
    assert found["state_sha256"] == summary(undisturbed)["state_sha256"]
    assert found["bytes_up_per_round"] == summary(undisturbed)["bytes_up_per_round"]
    assert timeless(folder) == timeless(undisturbed)


def stop(*_: object) -> None:
    """What a person does with Ctrl-C."""
    raise KeyboardInterrupt


def contents(folder: Path) -> dict[str, bytes]:
    """What a folder holds, by file: one that stays the same can be resumed as before."""
    return {name: (folder / name).read_bytes() for name in files_of(folder)}


def timeless(folder):
    """The lines of metrics without what a clock says."""
    clock = {"seconds", "images_per_second", "wait_seconds"}
    return [{name: value for name, value in line.items() if name not in clock} for line in metrics(folder)]


def test_finished_work_is_not_done_again(tmp_path, killed, monkeypatch):
    from edgefl_trainer.engine import local_engine

    arguments = killed("fedevprompt", "phase-0001/east.metrics.json", tmp_path / "run")
    worked = []
    plain = local_engine.InProcessSite.local_round
    monkeypatch.setattr(
        local_engine.InProcessSite,
        "local_round",
        lambda self, state, broadcast, report: (
            worked.append((broadcast.scalars["round"], self.site.name)) or plain(self, state, broadcast, report)
        ),
    )
    edgefl_train(*arguments, "--resume", "--json").json()
    assert worked == [(2, "west")]


def test_half_written_leftovers_are_harmless(begun, finished, tmp_path):
    """What a kill leaves of a file: temporary names, and a phase whose files are cut short."""
    run = tmp_path / "run"
    phase = run / "checkpoints" / "phase-0001"
    phase.mkdir(exist_ok=True)
    kept = run / "checkpoints" / "phase-0000" / "east.state.safetensors"
    (phase / "east.state.safetensors").write_bytes(kept.read_bytes()[:100])
    (phase / "east.reply.safetensors").write_bytes(b"")
    (phase / "east.metrics.json").write_text('{"loss": 0.')
    for folder in (run, run / "checkpoints", phase):
        (folder / ".config.toml.0011223344556677.tmp").write_bytes(b"half")
    with (run / "metrics.jsonl").open("a") as file:  # the phase's lines are there, its end is not
        file.write((run / "metrics.jsonl").read_text().replace('"phase_index": 0', '"phase_index": 1'))
    found = edgefl_train(*begun, "--resume", "--json").json()
    assert found["state_sha256"] == summary(finished["fedevprompt"])["state_sha256"]
    assert [(line["phase_index"], line["site"]) for line in metrics(run)] == [
        (0, "east"), (0, "west"), (1, "east"), (1, "west")
    ]  # fmt: skip


def test_a_finished_run_leaves_no_work_in_progress(finished):
    """Beside the last states nothing is kept: no reply, no earlier phase."""
    for folder in finished.values():
        latest = json.loads((folder / "checkpoints" / "latest.json").read_text())
        assert files_of(folder / "checkpoints") == {"latest.json", latest["server"], *latest["sites"].values()}


def test_other_settings_cannot_resume_and_are_named(begun, tmp_path):
    changes = {
        "seed": ("--seed", "4"),
        "rounds": ("--rounds", "3"),
        "lr_head": ("--set", "lr_head=0.5"),
        "b_blocks": ("--set", "b_blocks=2"),
    }
    before = files_of(tmp_path / "run")
    for name, options in changes.items():
        outcome = edgefl_train(*begun, *options, "--resume")
        assert outcome.code == 2
        assert f"has {name} = " in outcome.sentence()
    other = edgefl_train("run", "local", *begun[2:], "--resume")
    assert other.code == 2 and "has method = 'fedevprompt', but this command has 'local'" in other.sentence()
    assert files_of(tmp_path / "run") == before


def test_a_default_that_is_spelled_out_is_no_difference(begun, tmp_path, finished):
    found = edgefl_train(*begun, "--set", "batch=32", "--set", "kd_weight=1e-6", "--resume", "--json").json()
    assert found["state_sha256"] == summary(finished["fedevprompt"])["state_sha256"]


def test_a_default_that_another_version_had_is_no_default_of_this_one(begun, tmp_path, monkeypatch):
    """docs/reference/runs.md, `inputs.json`: the file is as a version left it whose `kd_weight` was 0.25."""
    kept = tmp_path / "run" / "inputs.json"
    found = json.loads(kept.read_text())
    assert found["hyper"]["kd_weight"] == 1e-6 and found["hyper"]["batch"] == 32  # methods.md 5; neither was given
    kept.write_text(json.dumps({**found, "hyper": {**found["hyper"], "kd_weight": 0.25, "of_then": [1, 2]}}))
    told = edgefl_train(*begun, "--resume").sentence()
    assert "began with kd_weight = 0.25, and this version of EdgeFL has 1e-06 where it is not given" in told
    assert "give its first value with --set kd_weight=…" in told
    assert (
        "has kd_weight = 0.25, but this command has 0.75"
        in edgefl_train(*begun, "--resume", "--set", "kd_weight=0.75").sentence()
    )
    monkeypatch.setattr("edgefl_trainer.engine.run.run_phases", stop)
    assert "stopped; " in edgefl_train(*begun, "--resume", "--set", "kd_weight=0.25").err
    kept.write_text(json.dumps({name: value for name, value in found.items() if name != "hyper"}))  # an older run
    assert "stopped; " in edgefl_train(*begun, "--resume").err


def test_a_folder_with_a_run_is_not_taken_twice(begun, tmp_path, finished):
    for folder, arguments in ((tmp_path / "run", begun), (finished["local"], None)):
        given = arguments or ["run", "local", "--config", folder / "config.toml", "--out", folder]
        before = contents(folder)
        outcome = edgefl_train(*given)
        assert outcome.code == 2
        assert "already holds a run" in outcome.sentence() and "--resume" in outcome.sentence()
        assert contents(folder) == before


def test_a_finished_run_is_not_computed_again(finished, monkeypatch):
    """--resume of a finished run gives the same summary and reads no data."""
    monkeypatch.setattr("edgefl_trainer.engine.sites.load_data", lambda *_: pytest.fail("the data was read"))
    folder = finished["fedavg"]
    found = edgefl_train("run", "fedavg", "--config", folder / "config.toml", "--out", folder, "--resume", "--json")
    assert found.json() == summary(folder)


def test_lost_results_are_made_again_from_the_checkpoints(tmp_path, ward, mae, finished):
    """The results are missing or cut short, the states are whole: no round is run again."""
    folder = tmp_path / "run"
    shutil.copytree(finished["fedevprompt"], folder)
    wanted = summary(folder)
    (folder / "summary.json").write_text("{")
    again = edgefl_train(
        "run", "fedevprompt", "--config", folder / "config.toml", "--out", folder, "--resume", "--json"
    )
    assert {**again.json(), "seconds": 0} == {**wanted, "seconds": 0}
    assert "rounds 1 to 2 of 2 are taken from the run's checkpoints, not computed again" in again.err
    assert " · " not in again.err  # of a site that learns


def test_a_cut_checkpoint_is_named_and_nothing_is_lost(begun, tmp_path):
    latest = json.loads((tmp_path / "run" / "checkpoints" / "latest.json").read_text())
    file = tmp_path / "run" / "checkpoints" / latest["sites"]["west"]
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    before = contents(tmp_path / "run")
    outcome = edgefl_train(*begun, "--resume")
    assert outcome.code == 1
    assert str(file) in outcome.sentence()
    assert contents(tmp_path / "run") == before  # with the file put back it is the run of `begun`


def test_inputs_that_changed_cannot_be_resumed_and_are_named(tmp_path, cached, mae, kill_after, monkeypatch):
    """Rows that moved to another class, a backbone that was learned anew: the same command, another run."""
    root = make_ward(tmp_path / "ward", {"east": {"nevus": 8, "other": 8}, "west": {"nevus": 8, "other": 8}})
    shutil.copytree(mae, tmp_path / "mae")
    arguments = command("fedevprompt", tmp_path / "run", f"folder:{root}", tmp_path / "mae")
    kill_after("checkpoints/latest.json", *arguments)
    picture, moved = root / "east" / "nevus" / "00.jpg", root / "east" / "other" / "90.jpg"
    picture.rename(moved)
    outcome = edgefl_train(*arguments, "--resume")
    assert outcome.code == 2 and "the rows of the data have changed" in outcome.sentence()
    moved.rename(picture)
    weights = tmp_path / "mae" / "backbone.safetensors"
    learned = weights.read_bytes()
    weights.write_bytes(learned[:-1] + bytes([learned[-1] ^ 1]))
    outcome = edgefl_train(*arguments, "--resume")
    assert outcome.code == 2 and "the weights of the backbone have changed" in outcome.sentence()
    weights.write_bytes(learned)
    inputs = (tmp_path / "run" / "inputs.json").read_bytes()
    (tmp_path / "run" / "inputs.json").write_text("{")
    outcome = edgefl_train(*arguments, "--resume")
    assert outcome.code == 1 and "inputs.json is damaged" in outcome.sentence()
    (tmp_path / "run" / "inputs.json").write_bytes(inputs)
    with monkeypatch.context() as patched:  # nothing is refused any more; that it goes on, others show
        patched.setattr("edgefl_trainer.engine.run.run_phases", stop)
        assert "stopped; " in edgefl_train(*arguments, "--resume").err


def test_a_damaged_book_of_checkpoints_is_a_sentence(begun, tmp_path):
    (tmp_path / "run" / "checkpoints" / "latest.json").write_text("{")
    outcome = edgefl_train(*begun, "--resume")
    assert outcome.code == 1 and "latest.json is damaged" in outcome.sentence()


@pytest.mark.parametrize("text", ["", "[]", '{"phases": "x", "server": "", "sites": {}}', '{"phases": 1}'])
def test_a_book_of_checkpoints_may_be_damaged_in_many_ways(text, tmp_path):
    """The command tells each as the one above."""
    (tmp_path / "latest.json").write_text(text)
    with pytest.raises(RunError, match=r"latest\.json is damaged .*: start the run anew in another folder") as found:
        Checkpoints(tmp_path).progress()
    assert found.value.code == "damaged"


HOLD = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"


def test_two_processes_never_work_in_one_folder(begun, tmp_path):
    lock = str(tmp_path / "run" / ".lock")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        holder.stdout.readline()
        before = contents(tmp_path / "run")
        outcome = edgefl_train(*begun, "--resume")
        assert outcome.code == 2 and "another process works on the run" in outcome.sentence()
        assert "data:" not in outcome.err  # asked before minutes of reading
        assert contents(tmp_path / "run") == before
        holder.communicate("\n")


def test_a_disk_that_fills_up_loses_nothing(tmp_path, ward, mae, finished, monkeypatch):
    """docs/design.md 10: ENOSPC in the second round; the first is whole, and --resume goes on once there is room."""
    arguments = command("fedevprompt", tmp_path / "run", ward, mae)
    plain, full = os.fsync, False

    def fsync(handle: int) -> None:
        nonlocal full
        full = full or "phase-0001" in os.readlink(f"/proc/self/fd/{handle}")
        if full:
            raise OSError(28, os.strerror(28))
        plain(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        outcome = edgefl_train(*arguments)
    assert outcome.code == 1
    assert "the disk is full" in outcome.sentence()
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert json.loads((tmp_path / "run" / "checkpoints" / "latest.json").read_text())["phases"] == 1
    found = edgefl_train(*arguments, "--resume", "--json").json()
    assert found["state_sha256"] == summary(finished["fedevprompt"])["state_sha256"]


def test_a_full_disk_at_the_very_start_is_a_sentence(tmp_path, ward, mae, monkeypatch):
    def mkdir(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28), str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    outcome = edgefl_train(*command("local", tmp_path / "run", ward, mae))
    assert outcome.code == 1
    assert os.strerror(28) in outcome.sentence()


def test_a_run_goes_on_with_nothing_but_its_folder(begun, tmp_path, finished):
    """`run --resume --out DIR` reads the rest from config.toml, and says which rounds it did not compute again."""
    folder = tmp_path / "run"
    found = edgefl_train("run", "--resume", "--out", folder)
    assert found.code == 0, found.err
    assert summary(folder)["state_sha256"] == summary(finished["fedevprompt"])["state_sha256"]
    assert "round 1 of 2 is taken from the run's checkpoints, not computed again" in found.err
    again = edgefl_train("run", "--resume", "--out", folder)
    assert again.code == 0 and f"the run in {folder} is finished; nothing was computed again" in again.err
    other = edgefl_train("run", "--resume", "--out", folder, "--rounds", "7")
    assert other.code == 2 and "has rounds = 2, but this command has 7" in other.sentence()


def test_a_site_of_an_earlier_process_is_said_to_be_replayed(tmp_path, killed):
    killed("fedevprompt", "phase-0000/east.metrics.json", tmp_path / "run")
    found = edgefl_train("run", "--resume", "--out", tmp_path / "run")
    assert "round 1/2 · east: taken from the run's checkpoints, not computed again" in found.err
    assert "round 1/2 · east: loss" not in found.err and "round 1/2 · west: loss" in found.err


def test_without_a_run_there_is_nothing_to_go_on_with(tmp_path):
    outcome = edgefl_train("run", "--resume", "--out", tmp_path / "none")
    assert outcome.code == 2 and "there is no run in" in outcome.err and "Traceback" not in outcome.err
    assert not (tmp_path / "none").exists()


def test_a_folder_with_something_else_is_never_taken(tmp_path, ward, mae):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("x")
    for resume in ((), ("--resume",)):
        outcome = edgefl_train(*command("local", tmp_path / "thesis", ward, mae), *resume)
        assert outcome.code == 2
        assert "thesis holds no run, but it holds chapter.tex: name a new or empty folder" in outcome.sentence()
    assert files_of(tmp_path / "thesis") == {"chapter.tex"}


def test_stopped_says_the_exact_command_that_goes_on(tmp_path, ward, mae, monkeypatch):
    folder = tmp_path / "my run"
    with monkeypatch.context() as patched:
        patched.setattr("edgefl_trainer.engine.run.run_phases", stop)
        outcome = edgefl_train(*command("local", folder, ward, mae))
    told = outcome.err.splitlines()[-1].removeprefix("stopped; continue with: ")
    assert outcome.code == 1 and told == f"edgefl-train run --resume --out '{folder}'"
    assert edgefl_train(*shlex.split(told)[1:]).code == 0
    with monkeypatch.context() as patched:
        patched.setattr("edgefl_trainer.engine.sites.load_data", stop)
        early = edgefl_train(*command("local", tmp_path / "early", ward, mae))
    assert early.code == 1 and "nothing had begun" in early.err and not (tmp_path / "early").exists()
