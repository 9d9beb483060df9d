"""Write what a federation gives each of eight diagnoses into a page, between two marks.

TOGETHER and ALONE are finished runs over the same data with `--task all`: one that a federation learned, one in which
each centre learned alone. Each centre's model answers its own reported rows. For each diagnosis stands the share of its
rows, of all centres, that is named rightly, and the difference over the same draws of lesions. A centre that has no
training picture of a diagnosis cannot name it alone: such rows are counted.

    python benchmarks/rare_diagnoses.py runs/rare-together2000 runs/rare-alone2000 docs/results/what_federation_gives.md
"""

from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np
from answers_page import replaced
from federation_scores import Centres, Figure, difference, mean_over_centres, reported, scores_of
from jaxtyping import Float
from over_head import same_rows

from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.evaluate.intervals import RESAMPLES, Scored, interval, lesion_weights, pooled
from edgefl_trainer.evaluate.tables.text import markdown

BEGIN, END = "<!-- diagnoses: written by benchmarks/rare_diagnoses.py -->", "<!-- end of diagnoses -->"


def recall_draws(scored: Scored, diagnosis: int) -> Float[np.ndarray, " R"]:
    """Share of a diagnosis' rows that is named rightly, over draws of lesions; NaN where a draw has none of them."""
    true = scored.target == diagnosis
    right = true & (scored.predicted == diagnosis)
    parts = []
    for weights in lesion_weights(scored.lesions, RESAMPLES):
        with np.errstate(invalid="ignore"):
            parts.append((weights @ right) / (weights @ true))
    return np.concatenate(parts)


def recall(scored: Scored, diagnosis: int) -> float:
    """Share of a diagnosis' rows that is named rightly."""
    true = scored.target == diagnosis
    return float((scored.predicted[true] == diagnosis).mean())


def gap_of(together: Scored, alone: Scored, diagnosis: int) -> Figure:
    """How much more of a diagnosis the federation names, in points."""
    draws = recall_draws(together, diagnosis) - recall_draws(alone, diagnosis)
    low, high = interval(draws[np.isfinite(draws)]) or (float("nan"), float("nan"))
    return Figure(100 * (recall(together, diagnosis) - recall(alone, diagnosis)), 100 * low, 100 * high)


def untaught(federation: Federation, centres: Centres) -> Mapping[int, int]:
    """Of each diagnosis, the reported rows at centres that have no training row of it."""
    counts = dict.fromkeys(range(len(federation.classes)), 0)
    for name, scored in centres.items():
        seen = set(federation.labels[federation.sites[name].train].tolist())
        for diagnosis in counts:
            counts[diagnosis] += 0 if diagnosis in seen else int((scored.target == diagnosis).sum())
    return counts


def figures(federation: Federation, together: Centres, alone: Centres) -> str:
    """The table of diagnoses, the rarest first, and the mean of the centres."""
    joined, apart = (pooled([arm[name] for name in sorted(arm)]) for arm in (together, alone))
    unseen = untaught(federation, together)
    body = []
    for diagnosis in np.argsort(np.bincount(joined.target, minlength=len(federation.classes))):
        rows = int((joined.target == diagnosis).sum())
        if rows:
            gap = gap_of(joined, apart, int(diagnosis))
            shares = [f"{100 * recall(arm, int(diagnosis)):.1f}" for arm in (apart, joined)]
            counts = [str(rows), str(unseen[int(diagnosis)])]
            body.append([federation.classes[diagnosis], *counts, *shares, _signed(gap)])
    whole = [f"{mean_over_centres(arm).value:.1f}" for arm in (alone, together)]
    body.append(["mean of centres", str(len(joined.target)), "", *whole, _signed(difference([together], [alone]))])
    head = [
        "diagnosis",
        "rows",
        "of them at a centre without a training picture of it",
        "alone",
        "federation",
        "difference",
    ]
    return markdown(head, body, "").strip()


def _signed(gap: Figure) -> str:
    return f"{gap.value:+.1f} [{gap.low:+.1f} to {gap.high:+.1f}]"


@click.command()
@click.argument("together", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("alone", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("page", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(together: Path, alone: Path, page: Path) -> None:
    """Write the recall of each diagnosis into PAGE."""
    try:
        runs = [open_run(folder) for folder in (together, alone)]
        same_rows(runs)
        federation, settings = reported(runs[0]), runs[0].settings
        arms = [scores_of(run, federation, run.folder.parent / "scores") for run in runs]
        px, limit = runs[0].backbone.spec.image_px, settings.images_per_site or None
        taught = load_federation(settings.data, image_px=px, task=settings.task, seed=settings.seed, limit=limit)
        text = replaced(page.read_text(encoding="utf-8"), figures(taught, *arms), (BEGIN, END))
    except (EdgeflError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    page.write_text(text, encoding="utf-8")
    click.echo(f"wrote the diagnoses into {page}")


if __name__ == "__main__":
    main()
