"""The row to beat without any network: class-balanced logistic regression on 24 colour statistics, fitted per site.

Fits on the `train` and `tune` rows of a site (nothing is selected), reports on its `test` rows, else `val`; also fits
one model on the rows of all sites. Statistics and definitions: docs/methods.md, "baseline rows".

    python -m benchmarks.federation.colour_baseline --data manifest:fed_isic2019_84.zip --task nevus --json
"""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from edgefl_trainer.evaluate.metrics import SiteMetrics


def measure(
    specs: tuple[str, ...], task: str, image_px: int, seed: int, limit: int | None, cache: Path | None
) -> dict[str, Any]:
    """Return the figures under the names of `summary.json`, and those of the pooled model under `pooled`."""
    import numpy as np

    from benchmarks.federation.baselines import colour_statistics, pooled_baseline, site_baselines
    from edgefl_trainer.data import load_federation
    from edgefl_trainer.evaluate.metrics import federation_summary

    start = time.monotonic()
    federation = load_federation(specs, image_px=image_px, task=task, seed=seed, limit=limit, cache_dir=cache)
    split = federation.report_split
    fit = {name: np.concatenate([site.train, site.tune]) for name, site in federation.sites.items()}
    report = {name: site.rows(split) for name, site in federation.sites.items()}
    features = colour_statistics(federation.images)
    classes = len(federation.classes)
    sites = site_baselines(features, federation.labels, fit, report, classes)
    pooled = pooled_baseline(features, federation.labels, fit, report, classes)
    return {
        "method": "colour",
        "task": task,
        "seed": seed,
        "reported_rows": split,
        "partition_sha256": federation.partition_sha256,
        "sites": {name: {"n_train": fit[name].size} | figures for name, figures in sites.items()},
        **federation_summary(sites),
        "pooled": {"sites": pooled, **federation_summary(pooled)},
        "seconds": round(time.monotonic() - start, 1),
    }


def table(result: dict[str, object], sites: "dict[str, SiteMetrics]", pooled: "dict[str, SiteMetrics]") -> str:
    """Return one line per site for people to read."""
    from edgefl_trainer.evaluate.metrics import federation_summary

    lines = [f"{'site':<20}{'fit':>8}{'reported':>10}{'per site':>10}{'pooled':>10}"]
    for name, figures in sites.items():
        alone, shared = figures["balanced_accuracy"], pooled[name]["balanced_accuracy"]
        shown = "".join(f"{'–' if value is None else f'{value:.3f}':>10}" for value in (alone, shared))
        lines.append(f"{name:<20}{figures['n_train']:>8}{figures['n_test']:>10}{shown}")
    means = [federation_summary(figures)["mean_balanced_accuracy"] for figures in (sites, pooled)]
    lines.append(f"{'mean of sites':<38}" + "".join(f"{'–' if mean is None else f'{mean:.3f}':>10}" for mean in means))
    return "\n".join([*lines, f"balanced accuracy on {result['reported_rows']} rows, task {result['task']}"])


@click.command()
@click.option("--data", "specs", multiple=True, required=True, metavar="SPEC", help="Data SPEC; may be repeated.")
@click.option("--task", default="all", show_default=True, type=click.Choice(["all", "nevus"]), help="What is learned.")
@click.option("--image-px", default=84, show_default=True, metavar="PX", help="Side of the square images.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of the train/tune split.")
@click.option("--limit", type=int, default=None, show_default=True, metavar="N", help="Most training images of a site.")
@click.option("--cache-dir", type=click.Path(path_type=Path), default=None, help="Folder of decoded images.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, keys of summary.json.")
def main(
    specs: tuple[str, ...],
    task: str,
    image_px: int,
    seed: int,
    limit: int | None,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Measure the colour baseline on real or drawn data."""
    from edgefl_trainer.data import DataError

    try:
        result = measure(specs, task, image_px, seed, limit, cache_dir)
    except DataError as error:
        raise click.ClickException(str(error)) from error
    click.echo(
        json.dumps(result, allow_nan=False) if as_json else table(result, result["sites"], result["pooled"]["sites"])
    )


if __name__ == "__main__":
    main()
