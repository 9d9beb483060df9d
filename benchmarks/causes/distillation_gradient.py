"""Does the distillation term reach the prompts? Norms of its gradient and of the evidential loss's, on one batch.

Reads a finished `fedevprompt` run: each site's prompts and head, and the server's maps, as the last checkpoint holds
them. On the first training images that the next round would visit, unaugmented, it measures the L2 norms of the
gradients of lambda·L_KD and of L_eps (with the KL weight of the last epoch) for the b-prompts and the t-prompts. Beside
them: lambda·L_KD with the constant that training leaves out, and the share of the class token's attention that goes to
the prefixes. Definitions: docs/methods.md 1.2, 1.3 and 1.5. Nothing is written.

    python -m benchmarks.causes.distillation_gradient --run runs/fedevprompt --site rosendahl --json \\
        --data manifest:fed.zip
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_protocol.errors import EdgeflError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgefl_trainer.contract import Site
    from edgefl_trainer.engine.models import FinishedRun
    from edgefl_trainer.methods.fedevprompt import FedEvPrompt

PROMPTS = ("prompts.b", "prompts.t")


def measure(folder: Path, site_name: str, specs: tuple[str, ...], batch: int) -> dict[str, Any]:
    """The norms and their ratios, ready for JSON.

    Args:
        folder: run directory.
        site_name: whose prompts and images.
        specs: data SPECs; empty: those of the run.
        batch: training images.

    Raises:
        EdgeflError: not a finished run of `fedevprompt`, no such site, or the data cannot be read.
    """
    from edgefl_trainer.engine.models import open_run
    from edgefl_trainer.engine.sites import build_sites, build_task, load_data
    from edgefl_trainer.methods.fedevprompt import FedEvPrompt

    run = open_run(folder)
    settings = replace(run.settings, data=specs or run.settings.data, device="cpu", autocast="none")
    method = settings.build_method()
    if not isinstance(method, FedEvPrompt):
        raise EdgeflError(f"the run in {folder} is of {settings.method}; name one of fedevprompt.", "run")
    federation = load_data(settings, run.backbone.spec.image_px)
    task = build_task(settings, method, federation, run.backbone)
    sites = build_sites(federation, task, run.backbone, settings, method)
    if site_name not in sites:
        raise EdgeflError(f"the data has no site {site_name}; it has {', '.join(sites)}.", "run")
    norms = gradient_norms(run, method, sites[site_name], batch)
    return {
        "run": folder.name,
        "site": site_name,
        "round": settings.rounds,
        "images": min(batch, len(sites[site_name].train)),
        "kd_weight": method.maps.kd_weight,
        **norms,
        "ratio": {
            name: norms["distillation"][name] / norms["evidential"][name] if norms["evidential"][name] else None
            for name in PROMPTS
        },
    }


def gradient_norms(run: "FinishedRun", method: "FedEvPrompt", site: "Site", batch: int) -> dict[str, Any]:
    """Values of both terms and the norms of their gradients by prompt."""
    import torch

    from edgefl_protocol import Payload
    from edgefl_protocol.rules.maps import others_maps
    from edgefl_trainer.engine.checkpoint import Checkpoints
    from edgefl_trainer.learning.evidential import site_prior
    from edgefl_trainer.learning.loss_terms import Step
    from edgefl_trainer.learning.maps.sharing import distillation
    from edgefl_trainer.losses import evidential_loss
    from edgefl_trainer.models.head import evidence_of
    from edgefl_trainer.models.scoring import ScoreModule
    from edgefl_trainer.models.vit import ViTOutput
    from edgefl_trainer.rollout import travelling_map

    checkpoints = Checkpoints(run.folder / "checkpoints")
    progress = checkpoints.progress()
    maps = others_maps(checkpoints.load_state(progress.server).arrays, [site.name])[site.name]
    terms = distillation(method.maps, site, maps)
    if not terms:
        raise EdgeflError(f"no site but {site.name} sent a map, or lambda is 0: there is nothing to measure.", "run")
    predictor = method.predictor(site, checkpoints.load_state(progress.sites[site.name]), Payload(maps, {}))
    assert predictor is not None
    tensors = {name: torch.from_numpy(value.copy()) for name, value in predictor.tensors.items()}
    leaves = [tensors[name].requires_grad_(True) for name in PROMPTS]
    rounds, epochs, recipe = site.task.rounds, site.task.epochs, method.recipe
    images, target = site.train.read(site.epoch_order(site.train, rounds + 1, 0)[:batch])
    output = predictor.score_module.output(images, tensors, need_attention=True)
    assert isinstance(output, ViTOutput)
    sink = replace(predictor.score_module.options, prefix_mode="sink")
    kept = ScoreModule(predictor.score_module.backbone, sink).output(images, tensors, need_attention=True)
    assert isinstance(kept, ViTOutput)
    features = predictor.score_module.features(output, tensors)
    evidence = evidence_of(predictor.score_module.logits(features, tensors), recipe.evidence)
    prior = site_prior(recipe, site)
    alpha = evidence + prior
    rollout = travelling_map(output.factors, method.maps.rollout_from)
    step = Step(features, alpha / alpha.sum(dim=1, keepdim=True), rollout, target, tensors)
    values = {
        "evidential": evidential_loss(evidence, target, prior, recipe.kl_weight(rounds, epochs - 1, epochs)),
        "distillation": terms[0](step),
    }
    found = {}
    for label, value in values.items():
        gradients = torch.autograd.grad(value, leaves, retain_graph=True)
        norms = {name: float(gradient.norm()) for name, gradient in zip(PROMPTS, gradients, strict=True)}
        found[label] = {"value": float(value.detach()), **norms}
    constant = method.maps.kd_weight * spread_of_maps(maps, target.tolist(), terms[0].gram.numpy())
    whole = found["distillation"]["value"] + constant
    left = [float(factor[:, 0].detach().sum(dim=-1).mean()) for factor in kept.factors]  # of class token and patches
    return {**found, "whole_distillation": whole, "prefix_attention": 1 - sum(left) / len(left)}


def spread_of_maps(maps: "Mapping[str, NDArray[Any]]", target: list[int], gram: "NDArray[Any]") -> float:
    """The constant of eq. 7: how far the peers' maps of an image's class lie around their mean, mean over images."""
    import numpy as np

    from edgefl_protocol.rules.maps import maps_in_broadcast

    by_class: dict[int, list[NDArray[Any]]] = {}
    for (_, label), rows in maps_in_broadcast(maps).items():
        by_class.setdefault(label, []).append(np.asarray(rows, dtype=np.float64))
    spread = {}
    for label, peers in by_class.items():
        middle = np.mean([rows.mean(axis=0) for rows in peers], axis=0)
        apart = [((rows - middle) @ gram * (rows - middle)).sum(axis=1).mean() for rows in peers]
        spread[label] = float(sum(apart))
    return float(np.mean([spread.get(label, 0.0) for label in target]))


def text(found: Mapping[str, Any]) -> str:
    """A table for people to read."""
    lines = [f"{'gradient of':<14}{'value':>12}" + "".join(f"{name:>14}" for name in PROMPTS)]
    for label in ("evidential", "distillation"):
        part = found[label]
        lines.append(f"{label:<14}{part['value']:>12.4g}" + "".join(f"{part[name]:>14.4g}" for name in PROMPTS))
    ratios = ["–" if found["ratio"][name] is None else f"{found['ratio'][name]:.3%}" for name in PROMPTS]
    lines.append(f"{'ratio':<26}" + "".join(f"{ratio:>14}" for ratio in ratios))
    where = f"{found['site']}, after round {found['round']}, {found['images']} training images"
    whole = f"lambda·L_KD with its constant {found['whole_distillation']:.4g}"
    taken = f"prefixes take {found['prefix_attention']:.1%} of the class token's attention"
    return "\n".join([*lines, f"{where}, lambda {found['kd_weight']:g}; L2 norms", f"{whole}; {taken}"])


@click.command()
@click.option("--run", "folder", required=True, type=click.Path(path_type=Path), metavar="DIR", help="fedevprompt run.")
@click.option("--site", required=True, metavar="NAME", help="Whose prompts and training images.")
@click.option("--data", "specs", multiple=True, metavar="SPEC", help="Data SPEC; repeatable.  [default: the run's]")
@click.option("--batch", default=64, show_default=True, metavar="N", help="Training images.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(folder: Path, site: str, specs: tuple[str, ...], batch: int, as_json: bool) -> None:
    """Measure how strongly the distillation term pulls at the prompts, beside the evidential loss."""
    try:
        found = measure(folder, site, specs, batch)
    except EdgeflError as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(found, allow_nan=False) if as_json else text(found))


if __name__ == "__main__":
    main()
