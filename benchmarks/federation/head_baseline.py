"""The row to beat without prompts: a logistic-regression head per site on the frozen backbone's features.

The readout (class token or mean of the patch tokens) is chosen by a class-balanced probe from `train` to `tune` rows,
as in a run; the head is then fitted on both and judged on the `test` rows, else `val`, once with classes weighted
equally and once as they come. Definitions: docs/methods.md, "baseline rows".

    python -m benchmarks.federation.head_baseline --backbone run:out/fedmae --task nevus --json \\
        --data manifest:fed_isic2019_84.zip
"""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import numpy as np

    from edgefl_trainer.data import Federation
    from edgefl_trainer.evaluate.metrics import SiteMetrics
    from edgefl_trainer.learning.linear_probe import ProbeReport


def probe(federation: "Federation", features: "np.ndarray") -> "ProbeReport":
    """Return the probe of one readout, from the `train` to the `tune` rows of every site."""
    from edgefl_trainer.learning.linear_probe import ProbeRows, probe_sites

    labels = federation.labels
    return probe_sites(
        {
            name: ProbeRows(
                features_train=features[rows.train],
                target_train=labels[rows.train],
                features_tune=features[rows.tune],
                target_tune=labels[rows.tune],
            )
            for name, rows in federation.sites.items()
        }
    )


def measure(federation: "Federation", backbone_name: str, seed: int, device: str) -> dict[str, Any]:
    """Return the figures of the balanced head under the names of `summary.json`, the others beside them."""
    import numpy as np

    from benchmarks.federation.baselines import site_baselines
    from edgefl_trainer.contract import Examples
    from edgefl_trainer.engine.sites import choose_device
    from edgefl_trainer.evaluate.metrics import federation_summary
    from edgefl_trainer.learning.features import frozen_features
    from edgefl_trainer.learning.linear_probe import choose_readout
    from edgefl_trainer.models.backbones import load_backbone

    start = time.monotonic()
    backbone = load_backbone(backbone_name, image_px=federation.images.shape[1], seed=seed).to(choose_device(device))
    everything = Examples(federation.images, federation.labels, np.arange(federation.images.shape[0]))
    features = dict[str, Any](frozen_features(backbone, everything, choose_device(device)).items())
    probes = {readout: probe(federation, features[readout]) for readout in features}
    readout = choose_readout(probes)
    split = federation.report_split
    fit = {name: np.concatenate([site.train, site.tune]) for name, site in federation.sites.items()}
    report = {name: site.rows(split) for name, site in federation.sites.items()}

    def head(balanced: bool) -> "dict[str, SiteMetrics]":
        classes = len(federation.classes)
        return site_baselines(features[readout], federation.labels, fit, report, classes, balanced=balanced)

    sites, plain = head(balanced=True), head(balanced=False)
    return {
        "method": "head-alone",
        "seed": seed,
        "backbone": backbone_name,
        "backbone_sha256": backbone.spec.sha256,
        "readout": readout,
        "reported_rows": split,
        "partition_sha256": federation.partition_sha256,
        "sites": {name: {"n_train": fit[name].size} | figures for name, figures in sites.items()},
        **federation_summary(sites),
        "unbalanced": {"sites": plain, **federation_summary(plain)},
        "probe": {name: {"mean": found.mean, "pooled": found.pooled} for name, found in probes.items()},
        "seconds": round(time.monotonic() - start, 1),
    }


def table(result: dict[str, object], sites: "dict[str, SiteMetrics]", plain: "dict[str, SiteMetrics]") -> str:
    """Return one line per site for people to read."""
    from edgefl_trainer.evaluate.metrics import federation_summary

    lines = [f"{'site':<20}{'fit':>8}{'reported':>10}{'balanced':>10}{'plain':>10}"]
    for name, figures in sites.items():
        pair = (figures["balanced_accuracy"], plain[name]["balanced_accuracy"])
        shown = "".join(f"{'–' if value is None else f'{value:.3f}':>10}" for value in pair)
        lines.append(f"{name:<20}{figures['n_train']:>8}{figures['n_test']:>10}{shown}")
    means = [federation_summary(figures)["mean_balanced_accuracy"] for figures in (sites, plain)]
    lines.append(f"{'mean of sites':<38}" + "".join(f"{'–' if mean is None else f'{mean:.3f}':>10}" for mean in means))
    return "\n".join([*lines, f"balanced accuracy on {result['reported_rows']} rows, readout {result['readout']}"])


@click.command()
@click.option("--data", "specs", multiple=True, required=True, metavar="SPEC", help="Data SPEC; may be repeated.")
@click.option(
    "--backbone", required=True, metavar="NAME", help="run:DIR, timm:NAME, file:PATH … as in edgefl-train run."
)
@click.option("--task", default="all", show_default=True, type=click.Choice(["all", "nevus"]), help="What is learned.")
@click.option("--image-px", default=84, show_default=True, metavar="PX", help="Side of the square images.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of the train/tune split.")
@click.option("--limit", type=int, default=None, show_default=True, metavar="N", help="Most training images of a site.")
@click.option("--cache-dir", type=click.Path(path_type=Path), default=None, help="Folder of decoded images.")
@click.option(
    "--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]), help="Where to compute."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, keys of summary.json.")
def main(
    specs: tuple[str, ...],
    backbone: str,
    task: str,
    image_px: int,
    seed: int,
    limit: int | None,
    cache_dir: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Measure heads alone on a frozen backbone."""
    from edgefl_protocol.errors import EdgeflError
    from edgefl_trainer.data import load_federation

    try:
        federation = load_federation(specs, image_px=image_px, task=task, seed=seed, limit=limit, cache_dir=cache_dir)
        result = measure(federation, backbone, seed, device) | {"task": task}
    except EdgeflError as error:
        raise click.ClickException(str(error)) from error
    text = (
        json.dumps(result, allow_nan=False)
        if as_json
        else table(result, result["sites"], result["unbalanced"]["sites"])
    )
    click.echo(text)


if __name__ == "__main__":
    main()
