"""Take the network out of a federated fine-tuning and judge it beside the one that it began with.

Writes it as a backbone file, float16, that `--backbone file:FILE` takes, and prints class-balanced linear probes from
`train` to `tune` rows (`backbone_probes`) of both networks and of colours, for the tasks named. The run's own labels of
`train` rows taught the network: a probe on them says what the features hold for these centres, not for others.

    python benchmarks/tuned_network.py runs/vit-supervised --beside derm-vit-tiny-84 --out vit-supervised.safetensors
"""

import json
from pathlib import Path

import click
import torch
from backbone_probes import compare

from edgefl_protocol import digest
from edgefl_protocol.durable import write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.data import load_federation
from edgefl_trainer.engine.models import FinishedRun, open_run
from edgefl_trainer.models.backbones import backbone_bytes, load_backbone


def shared_network(run: FinishedRun) -> bytes:
    """The file of the one network that all centres of a run score with; a `ValueError` where they have several."""
    networks = {digest(found.network): found.network for found in map(run.predictor, run.sites)}
    if len(networks) != 1 or not next(iter(networks.values())):
        raise ValueError(f"the centres of {run.folder} score with {len(networks)} networks of their own, not with one")
    return backbone_bytes(run.backbone.spec, next(iter(networks.values())), self_supervised=False, half=True)


@click.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--beside", default="derm-vit-tiny-84", show_default=True, metavar="NAME", help="Network to compare with."
)
@click.option("--task", "tasks", multiple=True, default=("nevus", "all"), show_default=True, help="What is probed.")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The backbone file.")
def main(folder: Path, beside: str, tasks: tuple[str, ...], out: Path) -> None:
    """Write the network of RUN and print what probes find in it, as JSON."""
    try:
        run = open_run(folder)
        write_atomic(out, shared_network(run))
        px, settings = run.backbone.spec.image_px, run.settings
        networks = {name: load_backbone(name, image_px=px) for name in (f"file:{out}", beside)}
        federations = {
            task: load_federation(settings.data, image_px=px, colour=settings.colour, task=task, seed=settings.seed)
            for task in tasks
        }
        click.echo(json.dumps(compare(networks, federations, torch.device("cpu")), indent=1))
    except (EdgeflError, ValueError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
