"""Keep of finished runs what pages are written from: settings, figures and scores, and neither models nor pictures.

A kept run is a run folder without models and checkpoints. Its scores of reported rows lie in `scores.npz`, beside the
digest of the state that made them; `federation_scores` takes them from there. So a page can be written anew, or a seed
be added to it, without the trainings of those before. Data and partition are named without their
folder: run benchmarks there.

    python -m benchmarks.federation.keep_run runs/rare-alone2000-s0 runs/rare-together2000-s0 --out docs/results/runs
"""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.federation.federation_scores import ELSEWHERE, SCORES, reported, scores_elsewhere, scores_of
from edgefl_protocol.durable import write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.data.specs import parse_spec
from edgefl_trainer.engine.models import FinishedRun, open_run
from edgefl_trainer.engine.settings import RunSettings

KEPT = ("environment.json", "inputs.json", "metrics.jsonl", "summary.json", "calibration.json", "tune")


def keep(run: FinishedRun, target: Path, *, elsewhere: bool) -> None:
    """Copy what is kept of a run into a new folder."""
    if not run.sites:
        raise ValueError(f"{run.folder} has no models: name the run itself")
    scored = run.folder.parent / "scores"
    federation = reported(run)
    scores_of(run, federation, scored)
    if elsewhere:
        scores_elsewhere(run, federation, scored)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name) / "kept"
        folder.mkdir()
        _copy(run, folder, scored, elsewhere=elsewhere)
        folder.rename(target)


def _copy(run: FinishedRun, target: Path, scored: Path, *, elsewhere: bool) -> None:
    for name in KEPT:
        source = run.folder / name
        if source.is_dir():
            shutil.copytree(source, target / name)
        else:
            shutil.copy(source, target / name)
    shutil.copy(scored / f"{run.folder.name}.npz", target / SCORES)
    if elsewhere:
        shutil.copy(scored / f"{run.folder.name}.elsewhere.npz", target / ELSEWHERE)
    settings = replace(named_anywhere(run.settings), image_px=run.backbone.spec.image_px)
    write_atomic(target / "config.toml", settings.to_toml().encode())


def named_anywhere(settings: RunSettings) -> RunSettings:
    """Name data and partition by their last parts."""
    data = tuple(map(without_folder, settings.data))
    return replace(settings, data=data, partition=Path(settings.partition).name)


def without_folder(data: str) -> str:
    """Name a file of data by its last part: where it lies is a matter of the machine."""
    body = parse_spec(data).body
    return data.replace(body, Path(body).name, 1)


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="RUN…", type=click.Path(path_type=Path, exists=True))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the kept runs.")
@click.option("--elsewhere", is_flag=True, help="Keep the scores of other centres' rows, too.")
def main(folders: tuple[Path, ...], out: Path, elsewhere: bool) -> None:
    """Keep each RUN in OUT, under its name."""
    try:
        for folder in folders:
            if (out / folder.name).exists():
                raise click.ClickException(f"{out / folder.name} is kept already; remove it first")
            keep(open_run(folder), out / folder.name, elsewhere=elsewhere)
            click.echo(f"kept {out / folder.name}")
    except (EdgeflError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
