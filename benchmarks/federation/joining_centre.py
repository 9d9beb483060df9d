"""What a centre gets that joins a finished federation, with a few labels of its own or none, beside going it alone.

A federation was fine-tuned without the centre (`edgefl-train run finetune --partition …`, of a partition with
`--hold-out SITE`). The centre receives its averaged network and head. For each draw of N labelled pictures it is
judged on its own `val` rows, from two starts, `federation` and `alone` (the network that the federation began with), in
four ways:

    probe   class-balanced logistic regression on the features of the network as it came
    home    head and batch norm fitted at home (docs/methods.md 3.4), the rest as it came
    whole   the whole network fine-tuned
    longer  the same for twice the epochs; from `alone`, whose network has not yet seen a lesion

Without a label `federation` has two ways: `none`, as it came, and `statistics`, batch norm's statistics taken from all
the centre's training pictures (AdaBN). Scores lie in OUT/CENTRE, one file for each; what is there is not done again.
With `--only alone` RUN may still be under way: its settings and its beginning are read, not its models.

A RUN of one site, as of all pictures in one place, hands its network to any centre of its data.

    python -m benchmarks.federation.joining_centre runs/join600 --site vidir_modern --labels 60 --draws 3 \\
        --out runs/joining
    python -m benchmarks.federation.joining_centre runs/pooled2000-s0 --site bcn --labels 2000 --draws 1 \\
        --first-draw 0 --epochs 1 --only federation --way home --out runs/pooled2000-home-s0
"""

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from edgefl_protocol import Payload
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.contract import Arrays, Examples, Phase, Site, State
from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.data.dealing import choose_limit
from edgefl_trainer.engine.folder import CONFIG
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.models import open_run, predict_rows
from edgefl_trainer.engine.settings import RunSettings, read_settings
from edgefl_trainer.engine.sites import build_task, examples_of, report_rows
from edgefl_trainer.learning.features import frozen_features
from edgefl_trainer.learning.linear_probe import fit_predict
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods.finetune import NETWORK, FineTune
from edgefl_trainer.models.backbones import frozen_network, load_backbone

UNLABELLED = ("none", "statistics")
WAYS = ("probe", "home", "whole", "longer")


@dataclass(frozen=True)
class Joining:
    """A centre with all its rows, and the network and head that it starts from, by its name."""

    settings: RunSettings
    federation: Federation
    site: Site
    starts: Mapping[str, Arrays]


def read_joining(folder: Path, name: str, epochs: int, only: str | None) -> Joining:
    """Read the centre's data and what it starts from."""
    settings = replace(read_settings(folder / CONFIG), images_per_site=0, rounds=1, epochs=epochs)
    backbone = load_backbone(settings.backbone, image_px=settings.image_px or None, seed=settings.seed)
    federation = load_federation(
        settings.data, image_px=backbone.spec.image_px, colour=settings.colour, task=settings.task, seed=settings.seed
    )
    method = method_of(settings)
    task = build_task(settings, method, federation, backbone)
    rows = federation.sites[name]
    train, tune, unlabelled = (examples_of(federation, rows.rows(kind)) for kind in ("train", "tune", "unlabelled"))
    site = Site(
        name=name, task=task, backbone=backbone, train=train, tune=tune, unlabelled=unlabelled, balance=settings.balance
    )
    starts: dict[str, Arrays] = {"alone": method.beginning(task)}
    if only != "alone":
        run = open_run(folder)
        predictor = run.predictor(run.sites[0] if len(run.sites) == 1 else name)
        network = {NETWORK + key: value for key, value in predictor.network.items()}
        starts["federation"] = {**network, **{key: predictor.tensors[key] for key in ("head.weight", "head.bias")}}
    return Joining(settings, federation, site, {key: starts[key] for key in starts if only in (None, key)})


def method_of(settings: RunSettings, **more: object) -> FineTune:
    """The run's fine-tuning, with some settings changed."""
    made: FineTune = build(FineTune, {**settings.hyper, "home": "none", "home_epochs": 0, **more})
    return made


def drawn(joining: Joining, labels: int, draw: int) -> Examples:
    """The rows that `--images-per-site LABELS --seed DRAW` would leave the centre."""
    train = joining.site.train
    lesions = [joining.federation.lesions[i] for i in train.rows]
    classes = [str(label) for label in train.targets]
    kept = choose_limit(lesions, classes, labels, f"limit:{joining.site.name}", draw)
    return replace(train, rows=train.rows[[lesion in kept for lesion in lesions]])


def scored(joining: Joining, start: str, way: str, train: Examples, draw: int) -> np.ndarray:
    """Probabilities (B, K) of the centre's reported rows after it has learned in one way."""
    task = joining.site.task
    task = replace(task, seed=draw, epochs=(2 if way == "longer" else 1) * task.epochs)
    site, fine_tuned = replace(joining.site, train=train, task=task), way in ("whole", "longer")
    arrays = joining.starts[start]
    rows = report_rows(joining.federation, site.name)
    if way == "probe":
        return probed(site, arrays, rows)
    if way == "none":
        method, state = method_of(joining.settings), State()
    else:
        homes: dict[str, object] = {"home": "head_and_norms", "statistics": "statistics"}
        method = method_of(joining.settings, home=homes.get(way, "none"))
        phase = Phase("train", 1) if fine_tuned else Phase("final", 2)
        state, _ = method.local_round(site, State(), stamped(Payload(arrays, {}), phase, 1))
        if fine_tuned:
            arrays = {key: value for key, value in state.arrays.items() if not key.startswith("optimizer.")}
    predictor = method.predictor(site, state, stamped(Payload(arrays, {}), Phase("final", 2), 1))
    assert predictor is not None
    return predict_rows(predictor, rows).probabilities


def probed(site: Site, arrays: Arrays, rows: Examples) -> np.ndarray:
    """The same by a logistic regression on frozen features."""
    network = {key.removeprefix(NETWORK): value for key, value in arrays.items() if key.startswith(NETWORK)}
    frozen = frozen_network(site.task.backbone, network)
    fit, judged = (frozen_features(frozen, part, torch.device("cpu"))["pooled"] for part in (site.train, rows))
    return fit_predict(fit, site.train.targets, judged, len(site.task.classes))


def jobs(joining: Joining, draws: Collection[int], ways: Collection[str]) -> Iterator[tuple[str, str, int]]:
    """Every start, one of some ways, and draw, the quick ones first."""
    if "federation" in joining.starts:
        yield from (("federation", way, 0) for way in UNLABELLED if way in ways)
    for way in (way for way in WAYS if way in ways):
        for draw in draws:
            yield from ((start, way, draw) for start in joining.starts if (way, start) != ("longer", "federation"))


@click.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--site", required=True, metavar="NAME", help="The centre that joins.")
@click.option("--labels", type=int, default=60, show_default=True, help="Labelled pictures of its own.")
@click.option("--draws", type=int, default=3, show_default=True, help="Draws of them.")
@click.option("--first-draw", type=int, default=0, show_default=True, help="Seed of the first of them.")
@click.option("--epochs", type=int, default=10, show_default=True, help="Epochs over them, in `home` and `whole`.")
@click.option("--only", type=click.Choice(["alone", "federation"]), help="One start alone.")
@click.option("--way", "ways", multiple=True, type=click.Choice([*UNLABELLED, *WAYS]), help="Some ways alone.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the scores.")
def main(
    folder: Path, site: str, labels: int, draws: int, first_draw: int, epochs: int, only: str | None,
    ways: tuple[str, ...], out: Path,
) -> None:  # fmt: skip
    """Score what the centre gets from RUN, a federation that it took no part in, or all pictures in one place."""
    try:
        joining = read_joining(folder, site, epochs, only)
    except EdgeflError as error:
        raise click.ClickException(str(error)) from error
    rows = report_rows(joining.federation, site)
    (out / site).mkdir(parents=True, exist_ok=True)
    for start, way, draw in jobs(joining, range(first_draw, first_draw + draws), ways or (*UNLABELLED, *WAYS)):
        file = out / site / f"{start}-{way}-{0 if way in UNLABELLED else labels}-{draw}.npz"
        if file.exists():
            continue
        began = time.perf_counter()
        train = joining.site.train if way in UNLABELLED else drawn(joining, labels, draw)
        found = scored(joining, start, way, train, draw)
        facts: dict[str, Any] = {
            "probabilities": found,
            "target": rows.targets,
            "lesions": np.array([joining.federation.lesions[i] for i in rows.rows]),
            "counts": train.counts(len(joining.federation.classes)),
        }
        np.savez_compressed(file, **facts)
        right = [float((found.argmax(axis=1) == k)[rows.targets == k].mean()) for k in range(found.shape[1])]
        click.echo(f"{file.name}: {100 * np.mean(right):.1f} ({time.perf_counter() - began:.0f} s)")


if __name__ == "__main__":
    main()
