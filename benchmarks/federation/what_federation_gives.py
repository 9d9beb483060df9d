"""Write what a federation gives a centre into a page, between two marks, and draw it; run again as runs finish.

Arms and where they lie: `federation_arms`. What is not there, or not finished, is named and counts nowhere.

    python -m benchmarks.federation.what_federation_gives runs/federation docs/results/what_federation_gives.md \\
        --picture docs/images/what_federation_gives.png
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from benchmarks.federation.answers_page import replaced
from benchmarks.federation.federation_arms import (
    ARMS,
    FEW,
    JOINING,
    MANY,
    Arm,
    Found,
    Seeds,
    best_alone,
    best_alone_joining,
    every,
    find,
)
from benchmarks.federation.federation_scores import SEEDS, Figure, average, by_seed, difference, over_all_rows
from benchmarks.federation.two_models import Tune, rows_of_two, tune_figures
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.evaluate.plots.style import png
from edgefl_trainer.evaluate.tables.text import bytes_text, markdown

BEGIN, END = "<!-- figures: written by benchmarks/federation/what_federation_gives.py -->", "<!-- end of figures -->"
ROOM = 8.0  # points, right of the last dot, for what is written there
GREY, BLUE, ORANGE = "#767676", "#0072B2", "#D55E00"


@dataclass(frozen=True)
class Claim:
    """A difference that the page tells, over some seeds: the first arm minus the second."""

    label: str
    one: Seeds
    other: Seeds
    seeds: Sequence[int]  # that both have
    names: tuple[str, str]  # of the two arms

    @property
    def gap(self) -> Figure:
        """The difference, with what other patients would change."""
        return difference(every(self.one, self.seeds), every(self.other, self.seeds))

    @property
    def each(self) -> list[float]:
        """The difference of each seed."""
        return [difference(self.one[seed], self.other[seed]).value for seed in self.seeds]


def arm_table(found: Found, labels: str) -> str:
    """Every arm with so many labels: each centre, their mean, all rows, other centres' patients, and what it costs."""
    there = [arm for arm in ARMS if arm.labels == labels and arm.name in found.own]
    if not there:
        return ""
    centres = sorted(every(found.own[there[0].name])[0])
    head = [labels, *centres, "mean", "all rows", "elsewhere", "up / round, six centres", "minutes"]
    return _table(head, [_arm_row(found, arm, centres) for arm in there])


def _arm_row(found: Found, arm: Arm, centres: Sequence[str]) -> list[str]:
    draws = every(found.own[arm.name])
    label = arm.label + _seeds_told(found.own[arm.name])
    each = [f"{average([{name: draw[name]} for draw in draws]).value:.1f}" for name in centres]
    rows = f"{np.mean([over_all_rows(draw).value for draw in draws]):.1f}"
    away = f"{average(every(found.elsewhere[arm.name])).value:.1f}" if arm.name in found.elsewhere else "–"
    runs = [run.summary for run in found.runs.get(arm.name, {}).values()]
    sent = bytes_text(runs[0]["bytes_up_per_round"]) if runs and runs[0]["travels"] else "nothing"
    sent = "pictures" if arm.moves_pictures else sent
    return [label, *each, str(average(draws)), rows, away, sent, _minutes([run["seconds"] for run in runs])]


def _minutes(seconds: Sequence[float]) -> str:
    """How long whole runs took, from the fastest seed to the slowest."""
    ends = [f"{end / 60:.0f}" for end in (min(seconds), max(seconds))] if seconds else ["–"]
    return " to ".join(dict.fromkeys(ends))


def _seeds_told(seeds: Collection[int]) -> str:
    """Which seeds a figure has, where it lacks one."""
    return "" if len(seeds) == len(SEEDS) else f" (seed {' and '.join(map(str, sorted(seeds)))})"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; nothing where it would have no row."""
    return markdown(head, body, "").strip() if body else ""


def home_table(found: Found) -> str:
    """What the phase at home changes, on `tune` rows: after the last round, and after that phase."""
    body = []
    for arm in ARMS:
        runs = {seed: _around_the_fit(run) for seed, run in found.runs.get(arm.name, {}).items()}
        pairs = {seed: pair for seed, pair in runs.items() if pair}
        if pairs:
            told = [f"{100 * np.mean([pair[k] for pair in pairs.values()]):.1f}" for k in (0, 1)]
            body.append([f"{arm.label}, {arm.labels}{_seeds_told(pairs)}", *told])
    return _table(["on tune rows, mean of six centres", "averaged", "fitted at home"], body)


def _around_the_fit(run: FinishedRun) -> tuple[float, float] | None:
    """Balanced accuracy, mean of the centres, after the last round and after the phase at home; None without one."""
    before, final = tune_figures(run)
    return None if final is None else (float(np.mean([*before.values()])), float(np.mean([*final.values()])))


def two_models_table(found: Found) -> str:
    """What a centre with up to 2,000 labels has that keeps its own model beside the federation's."""
    arms = {"alone": "alone2000", "together": "together2000"}
    if not all(name in found.runs and name in found.own for name in arms.values()):
        return ""

    def tune(arm: str, seed: int) -> Tune:
        before, final = tune_figures(found.runs[arms[arm]][seed])
        return final or before

    alone, together = ({seed: draws[0] for seed, draws in found.own[name].items()} for name in arms.values())
    head = ["a centre with up to 2,000 labels takes", "mean", "minus its own", "by seed"]
    return _table(head, rows_of_two(alone, together, tune))


def joining_table(found: Found) -> str:
    """The centre that joins: from each start in each way, the mean, and that of each seed's draws."""
    ways = {
        "none": "nothing (as it came)",
        "statistics": "statistics, of all its training pictures without a label",
        "probe": "a probe",
        "home": "head and norms",
        "whole": "whole network",
        "longer": "whole network, twice the epochs",
    }
    body = []
    for way, label in ways.items():
        cells = []
        for start in ("alone", "federation"):
            seeds = found.joining.get(f"{start}-{way}", {})
            each = [average(seeds[seed]).value for seed in sorted(seeds)]
            told = f" ({', '.join(f'{value:.1f}' for value in each)})" if len(each) > 1 else ""
            cells.append(f"{np.mean(each):.1f}{told}{_seeds_told(seeds)}" if each else "–")
        if cells != ["–", "–"]:
            body.append([label, *cells])
    return _table([f"{JOINING} with 60 labels learns", "from ImageNet", "from the federation"], body)


def claims(found: Found) -> list[Claim]:
    """The differences that can be told, in the order of the page; *alone* is the best way of going alone."""
    alone = ""  # the best of the arms that learn alone from as many labels
    own = [
        ("60 labels a centre", "few60", alone),
        ("up to 2,000 labels a centre", "together2000", alone),
        ("up to 2,000 labels, whole network fitted at home", "network2000", alone),
        ("up to 2,000 labels, FedEvPrompt and a head on its network", "fedevprompt2000", "fedmae-2000"),
        ("federation or one place", "together2000", "pooled2000"),
        ("federation or one place, both fitted at home", "together2000", "pooled2000-home"),
    ]
    away = [
        ("other centres' patients, 60 labels", "few60", alone),
        ("other centres' patients, up to 2,000 labels", "together2000", alone),
    ]
    told = [
        _claim(label, arms, one, other)
        for arms, pairs in ((found.own, own), (found.elsewhere, away))
        for label, one, other in pairs
    ]
    joins = [
        ("a centre joins, without a label", "federation-statistics"),
        ("a centre joins, with 60 labels", "federation-home"),
    ]
    for label, one in joins:
        joined = found.joining.get(one, {})
        best, seeds = best_alone_joining(found.joining, joined)
        told.append(Claim(label, joined, found.joining.get(best, {}), seeds, ("federation", "alone, 60 labels")))
    return [claim for claim in told if claim.seeds]


def _claim(label: str, arms: Mapping[str, Seeds], one: str, other: str) -> Claim:
    """A difference of two arms; without the other's name it is to the best way of going alone."""
    labels = {arm.name: arm.labels for arm in ARMS}
    held = arms.get(one, {})
    if other:
        seeds = sorted({*held} & {*arms.get(other, {})})
    else:
        other, seeds = best_alone(arms, labels[one], held)
    return Claim(label, held, arms.get(other, {}), seeds, (_name(one), _name(other) if other else ""))


def asides(found: Found) -> list[Claim]:
    """Differences that the page tells beside its situations, of two arms that answer the same question."""
    own, away = found.own, found.elsewhere
    starts = "up to 2,000 labels, alone: from ImageNet's weights minus from random ones"
    prompts = "up to 2,000 labels: FedEvPrompt minus alone, colours only"
    norms = "up to 2,000 labels, federation: fitted at home minus statistics of home"
    at_home = "60 labels: federation, statistics of home, minus ImageNet's network fine-tuned alone"
    fitted = "60 labels: federation, fitted at home, minus ImageNet's network fine-tuned alone"
    abroad = "other centres' patients, 60 labels: statistics of home minus fitted at home"
    pairs = [
        (starts, own, "alone2000", "nothing2000"),
        (prompts, own, "fedevprompt2000", "colours-2000"),
        (norms, own, "together2000", "together2000s"),
        (at_home, own, "few60", "few60-alone"),
        (fitted, own, "few60-fit", "few60-alone"),
        (abroad, away, "few60", "few60-fit"),
    ]
    told = [_claim(label, arms, one, other) for label, arms, one, other in pairs]
    return [claim for claim in [*told, _joined_beside_alone(found)] if claim.seeds]


def _joined_beside_alone(found: Found) -> Claim:
    """The centre that joins, beside the network that it fine-tuned alone in the table of 60 labels."""
    label = f"{JOINING} joins, without a label: federation minus ImageNet's network fine-tuned alone with 60 labels"
    draws = found.own.get("few60-alone", {})
    alone = {seed: [{JOINING: one[JOINING]} for one in each if JOINING in one] for seed, each in draws.items()}
    joined = found.joining.get("federation-statistics", {})
    seeds = sorted(seed for seed in joined if alone.get(seed))
    return Claim(label, joined, alone, seeds, (_name("few60"), _name("few60-alone")))


def _name(arm: str) -> str:
    if arm == "fedevprompt2000":
        return "FedEvPrompt"
    labels = {one.name: one.label for one in ARMS}
    return labels[arm] if labels[arm].startswith("alone") else "one place" if "pooled" in arm else "federation"


def claim_table(found: Found) -> str:
    """Each difference with its interval, and that of each seed."""
    told = [(f"{claim.label}: {claim.names[0]} minus {claim.names[1]}", claim) for claim in claims(found)]
    return _claim_rows([*told, *((claim.label, claim) for claim in asides(found))])


def _claim_rows(told: Sequence[tuple[str, Claim]]) -> str:
    body = []
    for label, claim in told:
        gap = claim.gap
        verdict = "yes" if gap.low > 0 else "no, the other way round" if gap.high < 0 else "not told apart"
        body.append([label, gap.signed, by_seed(claim.each) + _seeds_told(claim.seeds), verdict])
    return _table(["difference, points", "95 % over lesions, paired", "by seed", "better?"], body)


def picture(found: Found) -> bytes:
    """Each claim as two dots and the gap between them; small dots are the seeds."""
    from matplotlib.figure import Figure as Canvas

    told = claims(found)
    canvas = Canvas(figsize=(9.5, 1.2 + 0.62 * len(told)), layout="constrained")
    axes = canvas.subplots()
    for height, claim in enumerate(told):
        places = [average(every(side, claim.seeds)).value for side in (claim.other, claim.one)]
        axes.plot(places, [height, height], color="#BBBBBB", linewidth=3, zorder=1)
        first = ORANGE if claim.names[1] == "one place" else GREY
        axes.plot(places[:1], [height], "s", color=first, markersize=8, zorder=2)
        axes.plot(places[1:], [height], "o", color=BLUE, markersize=9, zorder=3)
        right = max(places)
        for side, shape, colour in ((claim.other, "s", first), (claim.one, "o", BLUE)) if len(claim.seeds) > 1 else ():
            seeds = [average(side[seed]).value for seed in claim.seeds]
            axes.plot(seeds, [height] * len(seeds), shape, color=colour, markersize=4, alpha=0.45, zorder=2)
            right = max(right, *seeds)
        axes.annotate(
            claim.gap.signed, (right, height), xytext=(9, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(range(len(told)), [claim.label + _seeds_told(claim.seeds) for claim in told], fontsize=9)
    axes.set_ylim(len(told) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.set_xlim(right=axes.get_xlim()[1] + ROOM)
    axes.set_xlabel(
        "of 100 patients, half of them with a nevus,\nso many answers are right (balanced accuracy)", fontsize=9
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    kinds = [("o", BLUE, "federation"), ("s", GREY, "alone"), ("s", ORANGE, "all pictures in one place")]
    for marker, colour, label in kinds if any(claim.names[1] == "one place" for claim in told) else kinds[:2]:
        axes.plot([], [], marker, color=colour, label=label)
    if any(len(claim.seeds) > 1 for claim in told):
        axes.plot([], [], "o", color=BLUE, markersize=4, alpha=0.45, label="small: one seed")
    canvas.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return png(canvas, dpi=150)


def figures(found: Found) -> str:
    """Everything between the marks."""
    gone = "".join(f"\n* {one}" for one in found.missing)
    lacking = f"Not there yet:\n{gone}" if gone else "Every run is there."
    tables = [
        claim_table(found),
        arm_table(found, MANY),
        arm_table(found, FEW),
        joining_table(found),
        home_table(found),
        two_models_table(found),
    ]
    parts = [*tables, lacking]
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
    click.echo(f"wrote {len(found.own)} arms into {page}; missing: {'; '.join(found.missing) or 'nothing'}")


if __name__ == "__main__":
    main()
