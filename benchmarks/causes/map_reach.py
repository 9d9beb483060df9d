"""How far prompts reach the maps of a network: what a run that shares maps measures first, under other settings.

Each row is `edgefl_trainer.learning.maps.reach` with fresh prompts at the first site by name and maps of the next, on
16 training images of each: which rates and blocks, the share of the distance that steps of distillation alone take
away (`moved`), and the share of the maps' variance that prompts from U(−1, 1) make. Definitions: docs/methods.md 1.5.

    python -m benchmarks.causes.map_reach --data manifest:fed_isic2019_84.zip --backbone derm-vit-tiny-84
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from edgefl_protocol.errors import EdgeflError

if TYPE_CHECKING:
    from edgefl_trainer.contract import Site
    from edgefl_trainer.methods.fedevprompt import FedEvPrompt

RATES = {"the paper's": (2.5e-4, 5e-4), "`bench84`": (2.5e-3, 5e-3), "0.1": (0.1, 0.1)}  # of b- and t-prompts


def rows(method: "FedEvPrompt", sites: "Mapping[str, Site]", depth: int) -> list[str]:
    """Measure every row; a line of the table each."""
    blocks = {"all": 0, "all but the first three": 3, "last three": depth - 3, "last": depth - 1}
    chosen = [("the paper's", name, steps) for name in blocks for steps in (12,)]
    chosen += [(rate, name, steps) for rate in ("`bench84`", "0.1") for name in ("all", "last") for steps in (12, 48)]
    return [_row(method, sites, rate, name, blocks[name], steps) for rate, name, steps in chosen]


def _row(method: "FedEvPrompt", sites: "Mapping[str, Site]", rate: str, name: str, start: int, steps: int) -> str:
    from edgefl_trainer.learning.maps.reach import measured_reach

    recipe = replace(method.recipe, lr_b=RATES[rate][0], lr_t=RATES[rate][1])
    found = measured_reach(recipe, replace(method.maps, rollout_from=start), sites, steps)
    if found is None or "moved" not in found.figures:
        raise EdgeflError("it takes two sites with a class in common", "data")
    moved, variance = 100 * found.figures["moved"], 100 * found.figures["variance"]
    return f"| {rate} | {name} | {steps} | {moved:.2g} % | {variance:.2g} % |"


@click.command()
@click.option("--data", "specs", multiple=True, required=True, metavar="SPEC", help="Data SPEC; repeatable.")
@click.option("--backbone", default="derm-vit-tiny-84", show_default=True, metavar="NAME", help="A vision transformer.")
@click.option("--task", default="nevus", show_default=True, help="What is learned.")
@click.option("--sites", "names", metavar="A,B", help="The two sites.  [default: the first two by name]")
def main(specs: tuple[str, ...], backbone: str, task: str, names: str | None) -> None:
    """Measure how far prompts reach a network's maps, under other rates and rollouts."""
    from edgefl_trainer.engine.settings import RunSettings
    from edgefl_trainer.engine.sites import read_sites
    from edgefl_trainer.methods.fedevprompt import FedEvPrompt
    from edgefl_trainer.models.backbones import load_backbone
    from edgefl_trainer.models.spec import require_vit

    try:
        settings = RunSettings(method="fedevprompt", data=specs, backbone=backbone, task=task, device="cpu")
        network, method = load_backbone(backbone, image_px=None, seed=0), settings.build_method()
        assert isinstance(method, FedEvPrompt)
        sites = read_sites(settings, method, network, None)[2]
        wanted = names.split(",") if names else sorted(sites)[:2]
        if unknown := [name for name in wanted if name not in sites]:
            raise EdgeflError(f"the data has no site {unknown[0]}; it has {', '.join(sites)}", "data")
        click.echo(f"{', '.join(wanted)}\n")
        click.echo("| prompt rates | blocks | steps | moved | variance |\n|---|---|---:|---:|---:|")
        depth = require_vit(network.spec, "a map").depth
        for line in rows(method, {name: sites[name] for name in wanted}, depth):
            click.echo(line)
    except EdgeflError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
