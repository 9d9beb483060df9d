"""Write what a federation gives a centre into a page, between two marks, and draw it; run again as runs finish.

Reads the runs by the names of their folders (`ARMS`) and what `benchmarks/joining_centre.py` left in RUNS/joining. Each
run is scored anew on `val` rows, once (RUNS/scores). A run that is not there, or not finished, is named and counts
nowhere.

    python benchmarks/what_federation_gives.py runs/federation docs/results/what_federation_gives.md \\
        --picture docs/images/what_federation_gives.png
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from answers_page import replaced
from federation_scores import Centres, Figure, difference, mean_over_centres, over_all_rows, reported, scores_of

from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.engine.folder import read_metrics
from edgefl_trainer.engine.models import FinishedRun, open_run
from edgefl_trainer.evaluate.intervals import Scored
from edgefl_trainer.evaluate.plot import png
from edgefl_trainer.evaluate.tables.text import bytes_text, markdown, time_text

BEGIN, END = "<!-- figures: written by benchmarks/what_federation_gives.py -->", "<!-- end of figures -->"
CENTRE = "vidir_modern"  # that joins later
DRAWS = (0, 1, 2)
ALONE, TOGETHER, OTHER = "#767676", "#0072B2", "#D55E00"


@dataclass(frozen=True)
class Arm:
    """A run: its folder, and what the page calls it."""

    folder: str
    label: str
    part: str


ARMS = (
    Arm("alone2000", "each centre alone", "up to 2,000 labels"),
    Arm("together2000", "federation, fitted at home", "up to 2,000 labels"),
    Arm("fedbn2000", "federation, head and batch norm private", "up to 2,000 labels"),
    Arm("pooled2000", "all pictures in one place", "up to 2,000 labels"),
    Arm("few60-alone", "each centre alone", "60 labels"),
    Arm("few60", "federation, fitted at home", "60 labels"),
)


@dataclass(frozen=True)
class Claim:
    """A difference that the page tells: the first arm minus the second."""

    label: str
    one: Sequence[Centres]
    other: Sequence[Centres]
    names: tuple[str, str]  # of the two arms, in the picture


@dataclass(frozen=True)
class Found:
    """Everything that is there."""

    runs: Mapping[str, FinishedRun]
    scores: Mapping[str, Centres]
    joining: Mapping[str, Sequence[Centres]]  # of `alone-home` and the like, the draws

    @property
    def missing(self) -> list[str]:
        """What the page lacks, by folder or file."""
        gone = [arm.folder for arm in ARMS if arm.folder not in self.scores]
        wanted = ["federation-none", *(f"{s}-{w}" for s in ("alone", "federation") for w in ("probe", "home", "whole"))]
        few = [f"{n} ({len(self.joining.get(n, ()))} of {_draws_of(n)} draws)" for n in wanted if _lacks(self, n)]
        return [*gone, *few]


def _draws_of(name: str) -> int:
    return 1 if name.endswith("none") else len(DRAWS)


def _lacks(found: Found, name: str) -> bool:
    return len(found.joining.get(name, ())) < _draws_of(name)


def find(runs: Path) -> Found:
    """Score the runs that are finished, and read what the joining centre left."""
    opened = {arm.folder: open_run(runs / arm.folder) for arm in ARMS if (runs / arm.folder / "summary.json").exists()}
    scores = {}
    for name, run in opened.items():
        scores[name] = scores_of(run, reported(run), runs / "scores")
    joining: dict[str, list[Centres]] = {}
    for file in sorted((runs / "joining" / CENTRE).glob("*.npz")):
        start, way, _, _ = file.stem.split("-")
        joining.setdefault(f"{start}-{way}", []).append({CENTRE: _of_file(file)})
    return Found(opened, scores, joining)


def _of_file(file: Path) -> Scored:
    held = np.load(file)
    probabilities = held["probabilities"]
    return Scored(probabilities, held["target"], probabilities.argmax(axis=1), None, tuple(map(str, held["lesions"])))


def run_table(found: Found) -> str:
    """Every run: the mean of the centres, all rows, the worst centre, what a round sends, and what it took."""
    head = [
        "labels a centre",
        "who learns",
        "mean of six centres",
        "all rows",
        "worst",
        "up / round",
        "time on a busy machine",
    ]
    body = []
    for arm in ARMS:
        if arm.folder not in found.scores:
            continue
        summary, centres = found.runs[arm.folder].summary, found.scores[arm.folder]
        worst = min(centres, key=lambda name: mean_over_centres({name: centres[name]}).value)
        shown = [mean_over_centres(centres), over_all_rows(centres), mean_over_centres({worst: centres[worst]})]
        cells = [str(shown[0]), str(shown[1]), f"{shown[2].value:.1f} ({worst})"]
        sent = bytes_text(summary["bytes_up_per_round"]) if summary["travels"] else "nothing"
        body.append([arm.part, arm.label, *cells, sent, time_text(summary["seconds"])])
    return _table(head, body)


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; nothing where it would have no row."""
    return markdown(head, body, "").strip() if body else ""


def home_table(found: Found) -> str:
    """What the fit at home changes, on `tune` rows: each centre after the last round, and after the fit."""
    body = []
    for arm in ARMS:
        lines = read_metrics(found.runs[arm.folder].folder) if arm.folder in found.runs else []
        final = {one["site"]: one["tune_balanced_accuracy"] for one in lines if one["phase"] == "final"}
        if not final:
            continue
        last = max(one["round"] for one in lines if one["phase"] == "train")
        before = {one["site"]: one["tune_balanced_accuracy"] for one in lines if one["round"] == last}
        cells = [f"{100 * np.mean([each[name] for name in final]):.1f}" for each in (before, final)]
        body.append([f"{arm.label}, {arm.part}", *cells])
    return _table(["on tune rows, mean of six centres", "averaged", "fitted at home"], body)


def joining_table(found: Found) -> str:
    """The centre that joins: from each start in each way, the mean of the draws and each of them."""
    ways = {"none": "as it came, no label", "probe": "a probe", "home": "head and norms", "whole": "whole network"}
    body = []
    for way, label in ways.items():
        cells = []
        for start in ("alone", "federation"):
            arms = found.joining.get(f"{start}-{way}", ())
            each = [mean_over_centres(arm).value for arm in arms]
            told = f" ({', '.join(f'{value:.1f}' for value in each)})" if len(each) > 1 else ""
            cells.append(f"{np.mean(each):.1f}{told}" if each else "–")
        if cells != ["–", "–"]:
            body.append([label, *cells])
    return _table([f"{CENTRE} with 60 labels learns", "from ImageNet", "from the federation"], body)


def claims(found: Found) -> list[Claim]:
    """The differences that can be told, in the order of the page."""
    runs = [
        ("60 labels a centre", "few60", "few60-alone"),
        ("up to 2,000 labels a centre", "together2000", "alone2000"),
        ("up to 2,000 labels, private norms", "fedbn2000", "alone2000"),
        ("federation or one place", "together2000", "pooled2000"),
        ("private norms or one place", "fedbn2000", "pooled2000"),
    ]
    told = [
        Claim(label, [found.scores[one]], [found.scores[other]], (_name(one), _name(other)))
        for label, one, other in runs
        if one in found.scores and other in found.scores
    ]
    best = _best_alone(found)
    if best:
        rest = [
            ("a centre joins, without a label", "federation-none"),
            ("a centre joins with 60 labels", "federation-home"),
        ]
        for label, one in rest:
            if not _lacks(found, one):
                told.append(Claim(label, found.joining[one], found.joining[best], ("federation", "alone, 60 labels")))
    return told


def _name(folder: str) -> str:
    return "alone" if "alone" in folder else "one place" if "pooled" in folder else "federation"


def _best_alone(found: Found) -> str:
    """The best way for the centre alone: what joining is compared with, so that it is not flattered."""
    there = [name for name in ("alone-probe", "alone-home", "alone-whole") if not _lacks(found, name)]
    figures = {name: np.mean([mean_over_centres(arm).value for arm in found.joining[name]]) for name in there}
    return max(figures, key=lambda name: figures[name]) if len(there) == 3 else ""


def claim_table(found: Found) -> str:
    """Each difference with its interval."""
    body = []
    for claim in claims(found):
        gap = difference(claim.one, claim.other)
        verdict = "yes" if gap.low > 0 else "no, the other way round" if gap.high < 0 else "not told apart"
        body.append([f"{claim.label}: {claim.names[0]} minus {claim.names[1]}", _signed(gap), verdict])
    return _table(["difference, points", "95 % over lesions, paired", "better?"], body)


def _signed(gap: Figure) -> str:
    return f"{gap.value:+.1f} [{gap.low:+.1f} to {gap.high:+.1f}]"


def picture(found: Found) -> bytes:
    """Each claim as two dots and the gap between them."""
    from matplotlib.figure import Figure as Canvas

    told = claims(found)
    canvas = Canvas(figsize=(8.0, 1.0 + 0.62 * len(told)), layout="constrained")
    axes = canvas.subplots()
    for height, claim in enumerate(told):
        places = [float(np.mean([mean_over_centres(arm).value for arm in side])) for side in (claim.other, claim.one)]
        axes.plot(places, [height, height], color="#BBBBBB", linewidth=3, zorder=1)
        first = OTHER if claim.names[1] == "one place" else ALONE
        axes.plot(places[:1], [height], "s", color=first, markersize=8, zorder=2)
        axes.plot(places[1:], [height], "o", color=TOGETHER, markersize=9, zorder=3)
        gap = difference(claim.one, claim.other)
        axes.annotate(
            _signed(gap), (max(places), height), xytext=(9, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(range(len(told)), [claim.label for claim in told], fontsize=9)
    axes.set_ylim(len(told) - 0.5, -0.5)
    axes.margins(x=0.35)
    axes.set_xlabel(
        "of 100 patients, half of them with a nevus, so many answers are right (balanced accuracy)", fontsize=9
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    kinds = [("o", TOGETHER, "federation"), ("s", ALONE, "alone"), ("s", OTHER, "all pictures in one place")]
    for marker, colour, label in kinds:
        axes.plot([], [], marker, color=colour, label=label)
    canvas.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return png(canvas, dpi=150)


def figures(found: Found) -> str:
    """Everything between the marks."""
    lacking = f"Not there yet: {', '.join(found.missing)}." if found.missing else "Every run is there."
    parts = [claim_table(found), run_table(found), home_table(found), joining_table(found), lacking]
    return "\n\n".join(filter(None, parts))


@click.command()
@click.argument("runs", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("page", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--picture", "drawn", type=click.Path(path_type=Path), help="Also draw the differences.")
def main(runs: Path, page: Path, drawn: Path | None) -> None:
    """Write the figures of RUNS into PAGE."""
    try:
        found = find(runs)
        text = replaced(page.read_text(encoding="utf-8"), figures(found), (BEGIN, END))
    except (EdgeflError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    page.write_text(text, encoding="utf-8")
    if drawn is not None and claims(found):
        drawn.write_bytes(picture(found))
    click.echo(f"wrote {len(found.scores)} runs into {page}; missing: {', '.join(found.missing) or 'nothing'}")


if __name__ == "__main__":
    main()
