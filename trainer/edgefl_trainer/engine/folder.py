"""The run directory: whose it is, who works in it, and whether its run is finished.

Guarantees: a directory is taken only after everything that can be checked before the first step was checked, so a
mistyped option leaves nothing behind; a run goes on only with the settings it began with, also where another version
has other defaults; two processes never work in one directory at once; a finished run is not computed again.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from edgefl_protocol.durable import foreign_content, read_bounded, write_atomic
from edgefl_protocol.errors import StorageError
from edgefl_protocol.lock_file import hold, is_held
from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.settings import RunSettings, read_settings
from edgefl_trainer.errors import BusyRunError, RunError

CONFIG = "config.toml"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
LOCK = ".lock"
INPUTS = "inputs.json"
MEMBER = "member"  # folder: a site's keys and membership in a live federation
FEDERATION = "federation.json"  # of the server of a federation of SuperNodes: no model and no figure is there
STOPPED = "privacy/stopped.txt"  # why nothing more leaves a site of this run: it cannot go on
MAX_INPUTS_BYTES = 1 << 16
SET = "--set "  # before a hyper-parameter that is called as a setting is
NOT_COMPARED = {"device", "workers", "hyper"}  # a run may go on elsewhere; hyper-parameters are compared one by one


def make_folder(path: Path) -> None:
    """Make a folder and its parents, or raise a `StorageError`; one that is there is fine."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make the folder {path}: {error.strerror}; name another or free space") from error


def begun_settings(folder: Path) -> RunSettings | None:
    """Read the settings of the run in a folder; None where none was begun, a `RunError` where they are damaged."""
    return read_settings(folder / CONFIG) if (folder / CONFIG).exists() else None


def check_free(folder: Path, own: Collection[str] = (CONFIG,), what: str = "no run") -> None:
    """Refuse, by a `RunError`, a folder that holds something but nothing of `own`, patterns; hidden files aside.

    `what` is what it lacks, in words.
    """
    if folder.is_file():
        raise RunError(f"{folder} is a file: name a new or empty folder with --out.")
    if found := foreign_content(folder, own):
        raise RunError(f"{folder} holds {what}, but it holds {found}: name a new or empty folder with --out.")


def check_begun(folder: Path, *, resume: bool) -> None:
    """Refuse, by a `RunError`, a folder that holds a run which was not asked to be resumed."""
    if (folder / CONFIG).exists() and not resume:
        check_not_stopped(folder)
        raise RunError(f"{folder} already holds a run: add --resume to continue it, or name another --out.")


def check_claim(folder: Path, settings: RunSettings, *, resume: bool) -> None:
    """Refuse, by a `RunError`, a folder that holds another run, or one that was not asked to be resumed."""
    check_begun(folder, resume=resume)
    path = folder / CONFIG
    if not path.exists():
        return
    before = read_settings(path)
    then, usual, now = _compared(before, begun_hyper(folder)), _compared(before), _compared(settings)
    for name in [*then, *(name for name in now if name not in then)]:
        if then.get(name) != now.get(name):
            check_not_stopped(folder)
            if usual.get(name) == now.get(name):  # given neither then nor now
                called = name.removeprefix(SET)
                raise RunError(
                    f"the run in {folder} began with {called} = {then.get(name)!r}, and this version of EdgeFL has "
                    f"{now.get(name)!r} where it is not given: give its first value with --set {called}=…, or name "
                    "another --out."
                )
            raise RunError(
                f"the run in {folder} has {name} = {then.get(name)!r}, but this command has {now.get(name)!r}: "
                "resume with the same settings, or name another --out."
            )


def check_alone(folder: Path) -> None:
    """Refuse, by a `BusyRunError`, a run that another process works on: before its data are read for minutes."""
    if is_worked_on(folder):
        raise _worked_on(folder)


def _worked_on(folder: Path) -> BusyRunError:
    return BusyRunError(f"another process works on the run in {folder}: wait for it or name another --out.")


def check_inputs(folder: Path, partition_sha256: str, backbone_sha256: str, hyper: Mapping[str, Any]) -> None:
    """Keep what the run began with, or check that a resumed run still has the same rows and the same network.

    `hyper` has every hyper-parameter of the method, also those that no one named: `check_claim` compares them.

    Raises:
        RunError: the data or the backbone changed since the run began, or what it began with cannot be read.
    """
    now = {"partition_sha256": partition_sha256, "backbone_sha256": backbone_sha256}
    if not (folder / INPUTS).exists():
        write_atomic(folder / INPUTS, json.dumps({**now, "hyper": hyper}, indent=2).encode())
    then = begun_inputs(folder)
    for name, what in (("partition_sha256", "rows of the data"), ("backbone_sha256", "weights of the backbone")):
        if then.get(name) != now[name]:
            raise RunError(
                f"the {what} have changed since the run in {folder} began: start it again with another --out."
            )


def begun_inputs(folder: Path) -> dict[str, Any]:
    """Read digests of rows and network, and hyper-parameters, of the run's begin; a `RunError` where damaged."""
    path = folder / INPUTS
    try:
        return dict(json.loads(read_bounded(path, MAX_INPUTS_BYTES)))
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}): put it back from a copy, or start anew.", "damaged") from error


def begun_hyper(folder: Path) -> dict[str, Any]:
    """Read the hyper-parameters that the run began with, those that were not given too; empty where none were kept."""
    if not (folder / INPUTS).exists():
        return {}
    kept = begun_inputs(folder).get("hyper", {})
    return {name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()}


def check_finished(folder: Path) -> None:
    """Refuse, by a `RunError`, a folder that is no run directory or a server's, or whose run is not finished."""
    if not (folder / CONFIG).exists():
        raise RunError(f"{folder} is not a run directory: name one that `edgefl-train run … --out` made.")
    if (folder / FEDERATION).exists():
        raise RunError(f"{folder} holds the server's half of a federation, without a model: name the folder of a site.")
    if (folder / SUMMARY).exists():
        return
    if is_worked_on(folder):
        raise RunError(
            f"the run in {folder} is still running in another process: wait until that ends, then type this again."
        )
    check_not_stopped(folder)
    again = "join …" if (folder / MEMBER).exists() else "run --resume"
    raise RunError(f"the run in {folder} is not finished: finish it with `edgefl-train {again} --out {folder}`.")


def check_not_stopped(folder: Path) -> None:
    """Refuse, by a `RunError`, a run that a privacy budget stopped: resumed, it would stop again."""
    if (folder / STOPPED).exists() and not (folder / SUMMARY).exists():
        raise RunError(
            f"the run in {folder} was stopped by its privacy budget and cannot go on: begin another with fewer rounds, "
            "a larger dp_noise or a larger --privacy-budget, and another --out."
        )


def model_sites(folder: Path) -> tuple[str, ...]:
    """Name the sites that have a model in a finished run."""
    return tuple(sorted(path.stem for path in (folder / "models").glob("*.safetensors")))


def check_model(folder: Path, site: str) -> None:
    """Refuse, by a `RunError`, a site that has no model in a finished run."""
    sites = model_sites(folder)
    if not sites:
        raise RunError(
            f"the run in {folder} learned a backbone and has no model to score with: name a run that uses it."
        )
    if site not in sites:
        raise RunError(f"the run in {folder} has no model of site {site!r}; it has {', '.join(sites)}.")


def run_folders(folder: Path) -> list[Path]:
    """Find the run itself, or the finished runs below a folder, in name order; a `RunError` where there is none.

    The server's folder of a federation is left out: its sites' folders have the results.
    """
    if (folder / CONFIG).exists():
        return [folder]
    below = sorted(path.parent for path in folder.rglob(CONFIG))
    finished = [path for path in below if not _why_left_out(path)]
    if not finished:
        what = "holds no finished run" if below else "is not a run directory, and holds none"
        raise RunError(f"{folder} {what}: name one that `edgefl-train run … --out` made.")
    return finished


def left_out_of(folder: Path) -> list[str]:
    """Name each run below a folder that `run_folders` leaves out, with why."""
    if (folder / CONFIG).exists():
        return []
    below = (path.parent for path in sorted(folder.rglob(CONFIG)))
    return [f"{path.relative_to(folder)} ({why})" for path in below if (why := _why_left_out(path))]


def _why_left_out(folder: Path) -> str:
    if (folder / FEDERATION).exists():
        return "the server's half of a federation"
    if finished_summary(folder) is not None:
        return ""
    return "its results are damaged" if (folder / SUMMARY).exists() else "not finished"


def finished_summary(folder: Path) -> dict[str, Any] | None:
    """Read the results of a finished run; None where they are missing or damaged and have to be made (again)."""
    try:
        summary = json.loads((folder / SUMMARY).read_text())
        if (folder / "models").exists():
            json.loads((folder / "calibration.json").read_text())
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and "state_sha256" in summary else None


@contextmanager
def working_in(folder: Path, settings: RunSettings, *, resume: bool) -> Iterator[None]:
    """Take the directory for this process and write `config.toml`; the lock falls with the process, even by kill −9.

    A `BusyRunError` where another process works in it; a `RunError` where one began another run in it meanwhile; a
    `StorageError` where it cannot be written.
    """
    make_folder(folder)
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StorageError(f"cannot write in {folder}: {error.strerror}; name another --out") from error
    try:
        with suppress(OSError):  # a file system without locks: nothing to hold
            hold(handle, _worked_on(folder))
        check_claim(folder, settings, resume=resume)
        if not (folder / CONFIG).exists():
            write_atomic(folder / CONFIG, settings.to_toml().encode())
        yield
    finally:
        os.close(handle)


def is_worked_on(folder: Path) -> bool:
    """Tell whether another process works on the run of this folder now; False where the disk has no locks."""
    return is_held(folder / LOCK)


def _compared(settings: RunSettings, kept: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Settings and effective hyper-parameters, flat: one given as its default value equals one not given.

    `kept`, of the run's begin, counts in place of today's defaults. A privacy budget that nothing spends counts as
    none.
    """
    from edgefl_trainer.engine.privacy.releases import releases_of

    plain = {name: value for name, value in vars(settings).items() if name not in NOT_COMPARED}
    method = settings.build_method()
    if not releases_of(method, settings.rounds):  # older versions let a site join with one; now it has to be left out
        plain["privacy_budget"] = 0.0
    hyper = hyper_values(method)
    hyper |= {name: value for name, value in (kept or {}).items() if name in hyper}
    both = plain.keys() & hyper.keys()  # `select` is a setting of every run and a hyper-parameter of one method
    return {**plain, **{f"{SET}{name}" if name in both else name: value for name, value in hyper.items()}}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of `metrics.jsonl`: one for each phase and site, with a list of its epochs.

    A `RunError` where a line is not an object.
    """
    path = folder / METRICS
    if not path.exists():
        return []
    try:
        return [dict(json.loads(line)) for line in path.read_text().splitlines()]
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}): put it back from a copy.", "damaged") from error


def write_metrics(folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace the lines of `metrics.jsonl`."""
    text = "".join(f"{json.dumps(dict(line), sort_keys=True)}\n" for line in lines)
    write_atomic(folder / METRICS, text.encode())
