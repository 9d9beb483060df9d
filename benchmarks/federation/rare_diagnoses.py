"""Write what a federation gives each of eight diagnoses into a page, between two marks.

RUNS holds finished runs with `--task all`, one of each seed (`rare-alone2000-s0` and so on): each centre for itself; a
federation whose centres took batch norm's statistics from home; and one whose centres fitted head and batch norm at
home. Each centre's model answers its own reported rows. For each diagnosis stands the share of its rows, of all
centres, that the first and the last name rightly, and the difference over the same draws of lesions. Below: how many
rows whose diagnosis is suspicious are named as such a one, and how many of the others as none of them. Of several
seeds each figure is the mean, and the last column has the difference of each. Between two other marks stands what all
three refer (`referred_diagnoses.py`).

    python -m benchmarks.federation.rare_diagnoses runs docs/results/what_federation_gives.md
"""

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from benchmarks.federation.answers_page import replaced
from benchmarks.federation.federation_scores import (
    Centres,
    Figure,
    by_seed,
    difference,
    mean_over_centres,
    of_the_same_seeds,
    reported,
    scores_of,
    share_draws,
)
from benchmarks.federation.over_head import same_rows
from benchmarks.federation.referred_diagnoses import REFERRALS, referrals
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.pictures.class_info import KNOWN
from edgefl_trainer.evaluate.intervals import Scored, interval, pooled
from edgefl_trainer.evaluate.tables.text import markdown

ARMS = ("rare-alone2000", "rare-statistics2000", "rare-together2000")
BEGIN, END = "<!-- diagnoses: written by benchmarks/federation/rare_diagnoses.py -->", "<!-- end of diagnoses -->"


def line(label: str, apart: Sequence[Scored], joined: Sequence[Scored], group: Sequence[int]) -> list[str]:
    """A row of the table: how many rows of a group of classes are named as one of the group, alone and together.

    `apart` and `joined` have an entry for each seed.
    """
    asked = np.isin(apart[0].target, group)
    right = [np.array([np.isin(seed.predicted, group) for seed in arm]) for arm in (apart, joined)]
    before, after = ([float(seed[asked].mean()) for seed in arm] for arm in right)
    drawn = [share_draws(apart[0].lesions, asked, arm.mean(axis=0)) for arm in right]
    draws = (drawn[1] - drawn[0])[np.isfinite(drawn[1])]
    low, high = interval(draws) or (float("nan"), float("nan"))
    gap = Figure(100 * float(np.mean(after) - np.mean(before)), 100 * low, 100 * high)
    told = [f"{100 * np.mean(shares):.1f}" for shares in (before, after)]
    lesions = len({lesion for lesion, one in zip(apart[0].lesions, asked, strict=True) if one})
    return [
        label,
        str(int(asked.sum())),
        str(lesions),
        *told,
        gap.signed,
        by_seed(100 * (np.array(after) - np.array(before))),
    ]


def figures(classes: Sequence[str], together: Sequence[Centres], alone: Sequence[Centres]) -> str:
    """The table of diagnoses, the rarest first, then what is suspicious, and the mean of the centres."""
    joined, apart = ([pooled([seed[name] for name in sorted(seed)]) for seed in arm] for arm in (together, alone))
    counts = np.bincount(joined[0].target, minlength=len(classes))
    body = [line(classes[k], apart, joined, [int(k)]) for k in np.argsort(counts, kind="stable") if counts[k]]
    suspicious = [k for k, name in enumerate(classes) if name not in KNOWN or KNOWN[name].suspicious]
    groups = {
        "suspicious, named so": suspicious,
        "benign, named so": sorted(set(range(len(classes))) - {*suspicious}),
    }
    body += [
        line(label, apart, joined, group) for label, group in groups.items() if np.isin(joined[0].target, group).any()
    ]
    whole = [np.array([mean_over_centres(seed).value for seed in arm]) for arm in (alone, together)]
    told = [f"{arm.mean():.1f}" for arm in whole]
    gap = difference(together, alone).signed
    rows = str(len(joined[0].target))
    lesions = str(len(set(joined[0].lesions)))
    body.append(["balanced accuracy, mean of centres", rows, lesions, *told, gap, by_seed(whole[1] - whole[0])])
    return markdown(["diagnosis", "rows", "lesions", "alone", "federation", "difference", "by seed"], body, "").strip()


@click.command()
@click.argument("runs", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("page", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(runs: Path, page: Path) -> None:
    """Write into PAGE what is named of each diagnosis, and what is referred."""
    try:
        arms = of_the_same_seeds(runs, ARMS)
        for seed in zip(*arms, strict=True):
            same_rows(seed)
        federation = reported(arms[0][0])
        scores = [[scores_of(run, federation, runs / "scores") for run in arm] for arm in arms]
        table = figures(federation.classes, scores[2], scores[0])
        text = replaced(page.read_text(encoding="utf-8"), table, (BEGIN, END))
        text = replaced(text, referrals(federation.classes, arms, scores), REFERRALS)
    except (EdgeflError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    page.write_text(text, encoding="utf-8")
    click.echo(f"wrote the diagnoses and the referrals into {page}")


if __name__ == "__main__":
    main()
