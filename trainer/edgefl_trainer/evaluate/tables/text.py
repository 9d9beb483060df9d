"""The comparison table as text: Markdown, LaTeX, CSV or JSON, with a caption that says what its figures are.

Guarantees: the same summaries give the same text; nothing is rounded in ``csv`` and ``json``; the caption says over
what the spread runs, and which sites learned nothing or are in no mean.
"""

import csv
import io
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from edgefl_protocol.sentences import UNTRAINED, capital, listed
from edgefl_trainer.environment import all_environments
from edgefl_trainer.evaluate import no_round
from edgefl_trainer.evaluate.metrics import metric_words
from edgefl_trainer.evaluate.one_class import FEWER, FEWER_SAYS, MARK, SAYS
from edgefl_trainer.evaluate.tables.rows import (
    LOWER_IS_BETTER,
    Figure,
    Summary,
    TableRow,
    named,
    of_fewer,
    row_names,
    runs_of_rows,
    table_rows,
)
from edgefl_trainer.evaluate.tables.seeds import seeds_column, seeds_words, spread_over, unlike_seeds
from edgefl_trainer.evaluate.tables.shares import share_columns, share_words
from edgefl_trainer.evaluate.undefined import HEAD_STAYS, without_head

FORMATS = ("md", "csv", "json", "latex")
MAX_SITE_COLUMNS = 12  # columns of sites that a page still holds; beyond, `csv` and `json` have them
UNDEFINED = "–"
WITHOUT, TRAINED = f"mean without {MARK}", f"mean without {no_round.MARK}"  # columns
SPREADS = {1: "sample standard deviation (ddof=1)", 0: "population standard deviation (ddof=0)"}
LATEX = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "–": "--",
    "†": r"\dag{}",
    "‡": r"\ddag{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
} | {letter: "\\" + letter for letter in "_%&#${}"}


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
    text = caption(summaries, machine, metric, ddof)
    if style == "json":
        return json.dumps({"caption": text, "rows": [asdict(row) for row in rows]}, indent=2, allow_nan=False) + "\n"
    if style == "csv":
        return _csv(rows, runs_of_rows(summaries), metric)
    head, body = table_page(summaries, metric, ddof)
    return markdown(head, body, text) if style == "md" else latex(head, body, text)


def table_page(
    summaries: Sequence[Summary], metric: str = "balanced_accuracy", ddof: int = 1
) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the lines of the table as a page shows it: it has every column of which `caption` speaks."""
    rows = table_rows(summaries, metric, ddof)
    fewer = [of_fewer(runs, metric) for runs in runs_of_rows(summaries)]
    names = _site_names(rows)
    names = names if len(names) <= MAX_SITE_COLUMNS else []
    pooled = any(row.pooled.mean is not None for row in rows)
    marked, absent = any(row.one_class for row in rows), any(row.no_round for row in rows)
    shares, seeds = share_columns(rows), seeds_column(rows)
    head = [
        "method",
        *seeds,
        *names,
        "mean ± std",
        *([WITHOUT] if marked else []),
        *([TRAINED] if absent else []),
        "worst",
        *(["all rows"] if pooled else []),
        "up / round",
        *shares,
        "down / round",
        "time",
    ]
    body = [
        _cells(row, [name, *_at(seeds, i)], names, (marked, absent, pooled), few, _at(shares, i))
        for i, (row, name, few) in enumerate(zip(rows, named(rows), fewer, strict=True))
    ]
    return head, body


def _at(columns: Mapping[str, Sequence[str]], place: int) -> list[str]:
    """The cells of one line of some columns."""
    return [cells[place] for cells in columns.values()]


def _site_names(rows: Sequence[TableRow]) -> list[str]:
    return sorted({name for row in rows for name in row.sites})


def _cells(
    row: TableRow,
    start: Sequence[str],
    names: Sequence[str],
    shown: tuple[bool, bool, bool],
    fewer: Collection[str],
    shares: Sequence[str],
) -> list[str]:
    """A line; `shown`: whether there are the columns of means without one-class sites, and without absent ones, and of
    all rows together.
    """
    marks = {**dict.fromkeys(fewer, FEWER), **dict.fromkeys(row.one_class, MARK)}
    marks |= {site: marks.get(site, "") + no_round.MARK for site in row.no_round}
    sites = [figure_text(row.sites.get(site, Figure(mean=None))) + marks.get(site, "") for site in names]
    means = [figure_text(figure) for figure, there in zip((row.several, row.trained), shown[:2], strict=True) if there]
    up, down = bytes_text(row.bytes_up_per_round), bytes_text(row.bytes_down_per_round)
    traffic = [up, *shares, down, time_text(row.seconds)]
    together = [figure_text(row.pooled)] if shown[2] else []
    return [*start, *sites, figure_text(row.mean), *means, figure_text(Figure(mean=row.worst)), *together, *traffic]


def caption(
    summaries: Sequence[Summary], machine: str | None = None, metric: str = "balanced_accuracy", ddof: int = 1
) -> str:
    """Return what a reader must know to judge the figures, in short sentences: what speaks against them first.

    Then what they are, sites that learned nothing, equal rows, spread, and how the runs were made.
    """
    rows = table_rows(summaries, metric)
    reported = sorted({str(summary["reported_rows"]) for summary in summaries if summary.get("reported_rows")})
    kinds, names = [row.spread_over for row in rows], named(rows)
    held_out = sorted({name for run in summaries for name, site in run["sites"].items() if site.get("held_out")})
    bare = sorted({name for run in summaries for name, site in run["sites"].items() if without_head(site)})
    parts = [
        *unlike(summaries),
        *unlike_seeds(rows, names),
        *untrained(summaries),
        f"{capital(metric_words(metric))} per site" + (f" on `{'`, `'.join(reported)}` rows" if reported else ""),
        *(["Lower is better"] if metric in LOWER_IS_BETTER else []),
        *no_round.caption_of(summaries, row_names(summaries)),
        *([f"{_named(held_out)} held out, never trained: in no mean, and never the worst"] if held_out else []),
        *([f"{UNDEFINED} under {_named(bare)}: no model, {HEAD_STAYS}"] if bare else []),
        *_equal(rows),
        f"± is the {SPREADS[ddof]} over {spread_over(kinds, names)}",
        *(["`worst` is the mean over seeds of each seed's worst site"] if "seeds" in kinds else []),
        f"Task {summaries[0].get('task')}",
        *map(capital, _made(summaries)),
        *seeds_words(rows),
        *share_words(rows),
    ]
    marked = f" {MARK} {SAYS}; left out of `{WITHOUT}`." if any(row.one_class for row in rows) else ""
    if any(row.no_round for row in rows):
        marked += f" {no_round.MARK} {no_round.SAYS}; left out of `{TRAINED}`."
    marked += told_of_fewer(name for runs in runs_of_rows(summaries) for name in of_fewer(runs, metric))
    return ". ".join(parts + ([f"Made on {machine}"] if machine else [])) + "." + marked


def _equal(rows: Sequence[TableRow]) -> list[str]:
    """Return a clause for each set of rows with the same figure at every site; spreads follow from these."""
    found: dict[tuple[object, ...], list[str]] = {}
    for row, name in zip(rows, named(rows), strict=True):
        figures = tuple((site, figure) for site, figure in sorted(row.sites.items()) if figure.mean is not None)
        if figures:
            found.setdefault(figures, []).append(name)
    return [f"{listed(names)} have the same figures" for names in found.values() if len(names) > 1]


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


def against(summaries: Sequence[Summary]) -> str:
    """Return, for the title of a picture, a line for each thing that speaks against comparing these runs."""
    rows = table_rows(summaries)
    seeds = [clause.partition(":")[0] for clause in unlike_seeds(rows, named(rows))]
    return "\n".join([*unlike(summaries), *seeds, *untrained(summaries)])


def untrained(summaries: Sequence[Summary]) -> list[str]:
    """Return a clause where runs stand on a network that nobody trained; of which runs, where others do not."""
    names = row_names(summaries)
    bare = list(dict.fromkeys(name for run, name in zip(summaries, names, strict=True) if run.get("untrained")))
    of = f" of {listed(bare)}" if len(bare) < len(set(names)) else ""
    return [f"UNTRAINED NETWORK{of}: {UNTRAINED}"] if bare else []


def _made(summaries: Sequence[Summary]) -> list[str]:
    """Return clauses on preset, schedule and data, as far as the summaries tell them."""
    presets = sorted({str(run.get("schedule") or run.get("preset") or "none") for run in summaries})
    data = dict.fromkeys(spec for run in summaries for spec in run.get("data", ()))
    return [f"preset {listed(presets)}", *([f"data {', '.join(data)}"] if data else [])]


def _named(sites: Sequence[str]) -> str:
    return ", ".join(sites) if len(sites) <= MAX_SITE_COLUMNS else f"{len(sites)} sites"


def origin(environments: Sequence[Mapping[str, Any]]) -> str:
    """Return, in words, on which machines and at which commits runs with these ``environment.json`` were made.

    A run that went on elsewhere names both.
    """
    machines, commits = set(), set()
    for found in chain.from_iterable(map(all_environments, environments)):
        machine = found.get("machine", {})
        machines.add(machine.get("cuda") or machine.get("processor") or "machine not recorded")
        commit, *modified = str(found.get("commit") or "not recorded").split(" ", 1)
        commits.add(" ".join([commit[:12], *modified]))
    return f"{', '.join(sorted(machines))}; commit {', '.join(sorted(commits))}"


def figure_text(figure: Figure) -> str:
    """Return a mean over seeds, and beside it their standard deviation."""
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


def _csv(rows: Sequence[TableRow], runs_of: Sequence[Sequence[Summary]], metric: str) -> str:
    """Write every figure unrounded; what a page marks stands in columns of its own."""
    out, names = io.StringIO(), _site_names(rows)
    writer = csv.writer(out, lineterminator="\n")
    site_columns = [f"{name}{suffix}" for name in names for suffix in ("", "_std")]
    end = ["mean", "std", "std_over", "worst", "pooled", "pooled_std"]
    end += ["bytes_up_per_round", "bytes_down_per_round", "seconds", "one_class", "several", "several_std", "no_round"]
    end += ["trained", "trained_std", "share_of_models", "share_of_full_models", "fewer_classes", "untrained"]
    writer.writerow(["method", "preset", "rounds", "seeds", *site_columns, *end])
    for row, runs in zip(rows, runs_of, strict=True):
        figures = [row.sites.get(name, Figure(mean=None)) for name in names]
        sites = [value for figure in figures for value in (figure.mean, figure.std)]
        start = [row.method, row.preset, row.rounds, " ".join(map(str, row.seeds))]
        finish = [row.mean.mean, row.mean.std, row.spread_over, row.worst, row.pooled.mean, row.pooled.std]
        finish += [row.bytes_up_per_round, row.bytes_down_per_round, row.seconds]
        finish += [" ".join(row.one_class), row.several.mean, row.several.std, " ".join(row.no_round)]
        finish += [row.trained.mean, row.trained.std, row.share_of_models, row.share_of_full_models]
        bare = any(run.get("untrained") for run in runs)
        finish += [" ".join(of_fewer(runs, metric)), "true" if bare else "false"]
        writer.writerow([*start, *sites, *finish])
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
