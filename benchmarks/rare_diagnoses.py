"""Write what a federation gives each of eight diagnoses into a page, between two marks.

ALONE, AVERAGED and FITTED are finished runs over the same rows with `--task all`: each centre for itself; a federation
before, and after, its centres have fitted head and batch norm at home. Each centre's model answers its own reported
rows. For each diagnosis stands the share of its rows, of all centres, that ALONE and FITTED name rightly, and the
difference over the same draws of lesions. Below: how many rows whose diagnosis asks for a look are named as such a one,
and how many of the others as none of them. Between two other marks stands what all three refer
(`referred_diagnoses.py`).

    python benchmarks/rare_diagnoses.py runs/rare-alone2000 runs/rare-statistics2000 runs/rare-together2000 \\
        docs/results/what_federation_gives.md
"""

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from answers_page import replaced
from federation_scores import Centres, Figure, difference, mean_over_centres, reported, scores_of, share_draws
from over_head import same_rows
from referred_diagnoses import REFERRALS, referrals

from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.pictures.class_info import KNOWN
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.evaluate.intervals import Scored, interval, pooled
from edgefl_trainer.evaluate.tables.text import markdown

BEGIN, END = "<!-- diagnoses: written by benchmarks/rare_diagnoses.py -->", "<!-- end of diagnoses -->"


def line(label: str, apart: Scored, joined: Scored, group: Sequence[int]) -> list[str]:
    """A row of the table: how many rows of a group of classes are named as one of the group, alone and together."""
    asked = np.isin(apart.target, group)
    right = [np.isin(arm.predicted, group) for arm in (apart, joined)]
    shares = [float(hits[asked].mean()) for hits in right]
    before, after = (share_draws(apart.lesions, asked, hits) for hits in right)
    draws = (after - before)[np.isfinite(after)]
    low, high = interval(draws) or (float("nan"), float("nan"))
    gap = Figure(100 * (shares[1] - shares[0]), 100 * low, 100 * high)
    return [label, str(int(asked.sum())), *(f"{100 * share:.1f}" for share in shares), gap.signed]


def figures(classes: Sequence[str], together: Centres, alone: Centres) -> str:
    """The table of diagnoses, the rarest first, then what asks for a look, and the mean of the centres."""
    joined, apart = (pooled([arm[name] for name in sorted(arm)]) for arm in (together, alone))
    counts = np.bincount(joined.target, minlength=len(classes))
    body = [line(classes[k], apart, joined, [int(k)]) for k in np.argsort(counts, kind="stable") if counts[k]]
    suspicious = [k for k, name in enumerate(classes) if name not in KNOWN or KNOWN[name].suspicious]
    groups = {
        "asks for a look, named so": suspicious,
        "benign, named so": sorted(set(range(len(classes))) - {*suspicious}),
    }
    body += [
        line(label, apart, joined, group) for label, group in groups.items() if np.isin(joined.target, group).any()
    ]
    whole = [f"{mean_over_centres(arm).value:.1f}" for arm in (alone, together)]
    rows = str(len(joined.target))
    body.append(["balanced accuracy, mean of centres", rows, *whole, difference([together], [alone]).signed])
    return markdown(["diagnosis", "rows", "alone", "federation", "difference"], body, "").strip()


@click.command()
@click.argument("folders", nargs=3, metavar="ALONE AVERAGED FITTED", type=click.Path(path_type=Path, exists=True))
@click.argument("page", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(folders: tuple[Path, ...], page: Path) -> None:
    """Write into PAGE what is named of each diagnosis, and what is referred."""
    try:
        runs = [open_run(folder) for folder in folders]
        same_rows(runs)
        federation = reported(runs[0])
        scores = [scores_of(run, federation, run.folder.parent / "scores") for run in runs]
        alone, _, fitted = scores
        text = replaced(page.read_text(encoding="utf-8"), figures(federation.classes, fitted, alone), (BEGIN, END))
        text = replaced(text, referrals(federation.classes, runs, scores), REFERRALS)
    except (EdgeflError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    page.write_text(text, encoding="utf-8")
    click.echo(f"wrote the diagnoses and the referrals into {page}")


if __name__ == "__main__":
    main()
