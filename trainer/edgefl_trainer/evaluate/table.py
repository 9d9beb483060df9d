"""The comparison table: methods down, sites across, then mean ± spread, worst site, bytes per round and time.

Guarantees: the same summaries give the same text; nothing is rounded in ``csv`` and ``json``; the caption says over
what the spread runs. Runs that differ in nothing but their seed share a row. Spread is the sample standard deviation
(ddof=1): over seeds where a row has several, else over sites (docs/methods.md, "evaluation"). Mean, spread and worst
run over the sites that trained; those that never did have a column too. `all rows` is the figure over the rows of all
trained sites together, a mean over classes and not over sites.
"""

import csv
import io
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from edgefl_protocol.sentences import capital, counted
from edgefl_trainer.evaluate.answer_figures import USUAL, usual_runs
from edgefl_trainer.evaluate.metrics import metric_words
from edgefl_trainer.evaluate.one_class import FEWER, FEWER_SAYS, MARK, SAYS, is_one_class, mark_of
from edgefl_trainer.evaluate.undefined import HEAD_STAYS, without_head

Summary = Mapping[str, Any]
"""The content of a run's ``summary.json``; may carry ``label`` (name of the row) and ``reported_rows`` (val, test)."""

FORMATS = ("md", "csv", "json", "latex")
MAX_SITE_COLUMNS = 12  # columns of sites that a page still holds; beyond, `csv` and `json` have them
UNDEFINED = "–"
WITHOUT = f"mean without {MARK}"  # column
LOWER_IS_BETTER = ("ece", "brier", "aurc")  # the worst site has the largest
SPREADS = {1: "sample standard deviation (ddof=1)", 0: "population standard deviation (ddof=0)"}
LATEX = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "–": "--",
    "†": r"\dag{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
} | {letter: "\\" + letter for letter in "_%&#${}"}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A mean and its sample standard deviation; ``None`` where undefined."""

    mean: float | None
    std: float | None = None


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One method under one setting."""

    method: str
    preset: str | None
    rounds: int | None
    seeds: tuple[int, ...]
    sites: dict[str, Figure]  # the spread of a site is over seeds
    mean: Figure  # over sites
    spread_over: str  # "seeds" or "sites": what the spread of ``mean`` runs over
    worst: float | None
    one_class: tuple[str, ...]  # sites whose figure says nothing, see `evaluate.one_class`
    held_out: tuple[str, ...]  # sites that never trained and are in no mean
    several: Figure  # `mean` without those; spread over the same
    pooled: Figure  # over all rows of all trained sites together; spread over seeds
    bytes_up_per_round: float | None
    bytes_down_per_round: float | None
    seconds: float | None  # of all sites' work, one after the other, judging included


def table_rows(summaries: Sequence[Summary], metric: str = "balanced_accuracy", ddof: int = 1) -> list[TableRow]:
    """Gather summaries into rows, in the order in which a setting first appears.

    Two runs of one setting with the same seed are not averaged: the second opens a row ``NAME #2``. A run whose method
    answers in more than one way has a row for each, the further ones as ``NAME, WAY``. A ``ValueError`` where there is
    no run, or the runs are of different tasks.
    """
    if not summaries:
        raise ValueError("no run was given; name at least one run directory")
    tasks = sorted({str(summary.get("task")) for summary in summaries})
    if len(tasks) > 1:
        raise ValueError(
            f"the runs belong to {len(tasks)} tasks ({', '.join(tasks)}), and a table compares runs of one task"
        )
    return _numbered([_row(runs, metric, ddof) for runs in runs_of_rows(summaries)])


def usual_metric(summaries: Sequence[Summary]) -> str:
    """Return the figure that these runs are compared by where none is named."""
    return "accuracy" if any(USUAL in summary for summary in summaries) else "balanced_accuracy"


def row_names(summaries: Sequence[Summary]) -> list[str]:
    """Return the name of the row in which each summary stands, as `render_table` writes it."""
    groups = zip(runs_of_rows(summaries), named(table_rows(summaries)), strict=True)
    names = {id(run): name for runs, name in groups for run in runs}
    return [names[id(run)] for run in summaries]


def named(rows: Sequence[TableRow]) -> list[str]:
    """Return the names of rows: with preset and rounds where those of the table are not all alike."""
    if len({(row.preset, row.rounds) for row in rows}) == 1:
        return [row.method for row in rows]
    return [f"{row.method} ({row.preset or 'no preset'}, {counted(row.rounds or 0, 'round')})" for row in rows]


def runs_of_rows(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """Return the runs of each row of `table_rows`."""
    groups: list[tuple[tuple[object, ...], list[Summary]]] = []
    for summary in chain(chain.from_iterable(map(_answers, summaries)), usual_runs(summaries)):
        key = tuple(
            summary.get(name) for name in ("label", "method", "preset", "rounds", "reported_rows", "settings_sha256")
        )
        for known, runs in groups:
            if known == key and all(run.get("seed") != summary.get("seed") for run in runs):
                runs.append(summary)
                break
        else:
            groups.append((key, [summary]))
    return [runs for _, runs in groups]


def _answers(summary: Summary) -> list[Summary]:
    """A run as one summary for each way in which its method answers: the first, then `NAME, WAY`."""
    name, further = run_name(summary), summary.get("further", {})
    return [summary, *({**summary, **found, "label": f"{name}, {way}"} for way, found in further.items())]


def _numbered(rows: list[TableRow]) -> list[TableRow]:
    seen: dict[tuple[object, ...], int] = {}
    numbered = []
    for row in rows:
        key = (row.method, row.preset, row.rounds)
        seen[key] = seen.get(key, 0) + 1
        numbered.append(row if seen[key] == 1 else replace(row, method=f"{row.method} #{seen[key]}"))
    return numbered


def _row(runs: Sequence[Summary], metric: str, ddof: int) -> TableRow:
    first = runs[0]
    several = len(runs) > 1
    names = sorted({name for run in runs for name in run["sites"]})
    per_site = {name: _figure([run["sites"].get(name, {}).get(metric) for run in runs], ddof) for name in names}
    over_sites = [_over_sites(run, metric, ddof) for run in runs]
    several_of = [_over_sites(run, metric, ddof, every=False)[0] for run in runs]
    return TableRow(
        method=run_name(first),
        preset=first.get("preset"),
        rounds=first.get("rounds"),
        seeds=tuple(sorted(int(run["seed"]) for run in runs if run.get("seed") is not None)),
        sites=per_site,
        mean=_figure([found.mean for found, _ in over_sites], ddof) if several else over_sites[0][0],
        spread_over="seeds" if several else "sites",
        worst=_figure([worst for _, worst in over_sites]).mean,
        one_class=tuple(name for name in names if any(_says_nothing(run, name, metric) for run in runs)),
        held_out=tuple(name for name in names if any(run["sites"].get(name, {}).get("held_out") for run in runs)),
        several=_figure([found.mean for found in several_of], ddof) if several else several_of[0],
        pooled=_figure([run.get("pooled", {}).get(metric) for run in runs], ddof),
        bytes_up_per_round=_figure([run.get("bytes_up_per_round") for run in runs]).mean,
        bytes_down_per_round=_figure([run.get("bytes_down_per_round") for run in runs]).mean,
        seconds=_figure([run.get("seconds") for run in runs]).mean,
    )


def run_name(run: Summary) -> str:
    """Name the method, what learned the network that it starts from, its mode, and its share of the labels."""
    if run.get("label"):
        return str(run["label"])
    share = float(run.get("labels") or 1.0)
    mode = [str(run["mode"])] if run.get("mode") else []
    start = f" of {run['pretraining']}" if mode and run.get("pretraining") else ""
    return ", ".join([f"{run['method']}{start}", *mode, *([f"{share:.3g} of labels"] if share < 1 else [])])


def _says_nothing(run: Summary, name: str, metric: str) -> bool:
    site = run["sites"].get(name, {})
    return site.get(metric) is not None and is_one_class(site)


def of_fewer(runs: Sequence[Summary], metric: str) -> list[str]:
    """Name the sites judged on fewer classes than the run has, and on several; none of answers to questions."""
    return sorted(
        {
            name
            for run in runs
            for name, site in run["sites"].items()
            if USUAL not in run and site.get(metric) is not None
            if mark_of(site, len(run.get("classes") or ())) == FEWER
        }
    )


def _over_sites(run: Summary, metric: str, ddof: int, *, every: bool = True) -> tuple[Figure, float | None]:
    """Mean and spread over the sites that trained, and the worst of them; all, or those with more than one class."""
    sites = [site for site in run["sites"].values() if not site.get("held_out")]
    found = [site.get(metric) for site in sites if every or not is_one_class(site)]
    worst = max if metric in LOWER_IS_BETTER else min
    return _figure(found, ddof), worst((float(value) for value in found if value is not None), default=None)


def _figure(values: Sequence[int | float | None], ddof: int = 1) -> Figure:
    known = [float(value) for value in values if value is not None]
    if not known:
        return Figure(mean=None)
    return Figure(mean=float(np.mean(known)), std=float(np.std(known, ddof=ddof)) if len(known) > 1 else None)


def caption(
    summaries: Sequence[Summary], machine: str | None = None, metric: str = "balanced_accuracy", ddof: int = 1
) -> str:
    """Return what a reader must know to judge the figures: rows, presets, seeds, spread, machine (if known)."""
    rows = table_rows(summaries, metric)
    reported = sorted({str(summary["reported_rows"]) for summary in summaries if summary.get("reported_rows")})
    seeds = sorted({seed for row in rows for seed in row.seeds})
    kinds = sorted({row.spread_over for row in rows})
    over = kinds[0] if len(kinds) == 1 else "seeds where a row has several, else over sites"
    held_out = sorted({name for run in summaries for name, site in run["sites"].items() if site.get("held_out")})
    bare = sorted({name for run in summaries for name, site in run["sites"].items() if without_head(site)})
    parts = [
        f"{capital(metric_words(metric))} per site" + (f" on `{'`, `'.join(reported)}` rows" if reported else ""),
        f"task {summaries[0].get('task')}",
        f"preset {', '.join(sorted({str(row.preset) for row in rows if row.preset})) or 'none'}",
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds)) or 'not recorded'}",
        f"± is the {SPREADS[ddof]} over {over}",
        *([f"{_named(held_out)} never trained: in no mean, and never the worst"] if held_out else []),
        *([f"{UNDEFINED} under {_named(bare)}: no model, {HEAD_STAYS}"] if bare else []),
        *unlike(summaries),
    ]
    marked = f" {MARK} {SAYS}; left out of `{WITHOUT}`." if any(row.one_class for row in rows) else ""
    marked += told_of_fewer(name for runs in runs_of_rows(summaries) for name in of_fewer(runs, metric))
    return "; ".join(parts + ([machine] if machine else [])) + "." + marked


def told_of_fewer(sites: Iterable[str]) -> str:
    """Write what the mark of these sites says, as the end of a caption; empty where there is none."""
    few = sorted(set(sites))
    return f" {FEWER} {FEWER_SAYS} ({_named(few)})." if few else ""


def unlike(summaries: Sequence[Summary]) -> list[str]:
    """Return a clause where runs of one seed did not see the same rows, so that they do not compare like with like.

    Runs of different seeds draw other tune rows, unless they name one partition.
    """
    digests: dict[object, set[str]] = {}
    for summary in summaries:
        if summary.get("partition_sha256"):
            digests.setdefault(summary.get("seed"), set()).add(str(summary["partition_sha256"]))
    most = max(map(len, digests.values()), default=0)
    return [f"NOT ALL ON THE SAME ROWS: {most} different partition_sha256 among runs of one seed"] if most > 1 else []


def _named(sites: Sequence[str]) -> str:
    return ", ".join(sites) if len(sites) <= MAX_SITE_COLUMNS else f"{len(sites)} sites"


def origin(environments: Sequence[Mapping[str, Any]]) -> str:
    """Return, in words, on which machines and at which commits runs with these ``environment.json`` were made."""
    machines, commits = set(), set()
    for found in environments:
        machine = found.get("machine", {})
        machines.add(machine.get("cuda") or machine.get("processor") or "machine not recorded")
        commit, *modified = str(found.get("commit") or "not recorded").split(" ", 1)
        commits.add(" ".join([commit[:12], *modified]))
    return f"{', '.join(sorted(machines))}; commit {', '.join(sorted(commits))}"


def render_table(
    summaries: Sequence[Summary],
    style: str = "md",
    *,
    machine: str | None = None,
    metric: str = "balanced_accuracy",
    ddof: int = 1,
) -> str:
    """Return the table as text in a style of ``FORMATS``; for ``machine`` see ``caption``.

    A ``ValueError`` where the style is unknown, there is no run, or the runs are of different tasks.
    """
    if style not in FORMATS:
        raise ValueError(f"table format {style!r} is unknown; choose one of {', '.join(FORMATS)}")
    rows = table_rows(summaries, metric, ddof)
    fewer = [of_fewer(runs, metric) for runs in runs_of_rows(summaries)]
    text = caption(summaries, machine, metric, ddof)
    if style == "json":
        return json.dumps({"caption": text, "rows": [asdict(row) for row in rows]}, indent=2, allow_nan=False) + "\n"
    names = sorted({name for row in rows for name in row.sites})
    if style == "csv":
        return _csv(rows, names)
    names = names if len(names) <= MAX_SITE_COLUMNS else []
    pooled = any(row.pooled.mean is not None for row in rows)
    marked = any(row.one_class for row in rows)
    head = [
        "method",
        *names,
        "mean ± std",
        *([WITHOUT] if marked else []),
        "worst",
        *(["all rows"] if pooled else []),
        "up / round",
        "down / round",
        "time",
    ]
    body = [
        _cells(row, name, names, pooled, marked, few) for row, name, few in zip(rows, named(rows), fewer, strict=True)
    ]
    return markdown(head, body, text) if style == "md" else latex(head, body, text)


def _cells(
    row: TableRow, name: str, names: Sequence[str], pooled: bool, marked: bool, fewer: Collection[str]
) -> list[str]:
    marks = {**dict.fromkeys(fewer, FEWER), **dict.fromkeys(row.one_class, MARK)}
    sites = [_shown(row.sites.get(site, Figure(mean=None))) + marks.get(site, "") for site in names]
    without = [_shown(row.several)] if marked else []
    traffic = [bytes_text(row.bytes_up_per_round), bytes_text(row.bytes_down_per_round), time_text(row.seconds)]
    together = [_shown(row.pooled)] if pooled else []
    return [name, *sites, _shown(row.mean), *without, _shown(Figure(mean=row.worst)), *together, *traffic]


def _shown(figure: Figure) -> str:
    if figure.mean is None:
        return UNDEFINED
    return f"{figure.mean:.3f}" + ("" if figure.std is None else f" ± {figure.std:.3f}")


def bytes_text(count: float | None) -> str:
    """Return a number of bytes with a unit a person reads."""
    if count is None:
        return UNDEFINED
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def time_text(seconds: float | None) -> str:
    """Return a time with a unit a person reads."""
    if seconds is None:
        return UNDEFINED
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _csv(rows: Sequence[TableRow], names: Sequence[str]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    site_columns = [f"{name}{suffix}" for name in names for suffix in ("", "_std")]
    end = ["mean", "std", "std_over", "worst", "pooled", "pooled_std"]
    end += ["bytes_up_per_round", "bytes_down_per_round", "seconds", "one_class", "several", "several_std"]
    writer.writerow(["method", "preset", "rounds", "seeds", *site_columns, *end])
    for row in rows:
        figures = [row.sites.get(name, Figure(mean=None)) for name in names]
        sites = [value for figure in figures for value in (figure.mean, figure.std)]
        start = [row.method, row.preset, row.rounds, " ".join(map(str, row.seeds))]
        finish = [row.mean.mean, row.mean.std, row.spread_over, row.worst, row.pooled.mean, row.pooled.std]
        finish += [row.bytes_up_per_round, row.bytes_down_per_round, row.seconds]
        writer.writerow([*start, *sites, *finish, " ".join(row.one_class), row.several.mean, row.several.std])
    return out.getvalue()


def markdown(head: Sequence[str], body: Sequence[Sequence[str]], text: str) -> str:
    """Return a Markdown table with its caption below."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
        + f"\n\n{text}\n"
    )


def latex(head: Sequence[str], body: Sequence[Sequence[str]], text: str) -> str:
    """Return a LaTeX table (package booktabs) with its caption."""

    def escaped(cell: str) -> str:
        return "".join(LATEX.get(letter, letter) for letter in cell)

    lines = [" & ".join(escaped(cell) for cell in line) + r" \\" for line in (head, *body)]
    plain = escaped(text.replace("`", ""))
    columns = "l" + "r" * (len(head) - 1)
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{plain}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )
