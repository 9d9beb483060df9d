"""The course of a run's rounds, the audit of what left the sites, and what its figures cannot say."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgefl_protocol.sentences import UNTRAINED, capital
from edgefl_trainer.engine.first_run import stays_untrained
from edgefl_trainer.evaluate.no_round import MARK as ABSENT
from edgefl_trainer.evaluate.no_round import part_lines
from edgefl_trainer.evaluate.one_class import FEWER, FEWER_SAYS, MARK, SAYS
from edgefl_trainer.experiments.pictures import of_runs
from edgefl_trainer.experiments.variants import told_apart
from edgefl_trainer.reports.blocks import (
    UNDEFINED,
    FactList,
    ReportBlock,
    ReportCell,
    ReportTable,
    Section,
    ShownPicture,
    Words,
    plain,
)
from edgefl_trainer.reports.findings import mark_at, words_of
from edgefl_trainer.reports.run_facts import RunFacts

AUDIT_FIRST = ("kind", "payload", "attack", "figure", "value", "interval", "low", "high", "floor", "control", "target")


def rounds_section(facts: RunFacts) -> Section:
    """Show the course of the rounds, as a picture and as a table."""
    lines = [line for line in facts.lines if line.get("phase") == "train"]
    if not lines:
        return Section(title="The course of the rounds", blocks=[Words(text="Not recorded in this run.")])
    blocks: list[ReportBlock] = []
    try:
        png = of_runs([facts.run.folder], told_apart([facts.run]))
        blocks.append(
            ShownPicture(png=png, caption="Figures on tune rows after each round, which select and calibrate.")
        )
    except ValueError:
        blocks.append(Words(text="The run was not judged between its rounds."))
    rows = []
    for number in sorted({int(line["round"]) for line in lines}):
        here = [line for line in lines if line["round"] == number]
        rows.append(
            [
                *plain(number, len({line["site"] for line in here})),
                *(_mean(here, key) for key in ("loss", "tune_balanced_accuracy", "tune_accuracy")),
                *(
                    ReportCell(f"{sum(line.get(key, 0) for line in here):,.0f}")
                    for key in ("bytes_up", "bytes_down", "seconds")
                ),
            ]
        )
    head = ["round", "sites", "loss", "balanced accuracy, tune", "accuracy, tune", "bytes up", "bytes down", "seconds"]
    kept = [i for i in range(len(head)) if any(row[i].text != UNDEFINED for row in rows)]
    blocks.append(
        ReportTable(
            head=[head[i] for i in kept],
            rows=[[row[i] for i in kept] for row in rows],
            caption="Means over the sites of a round; bytes and seconds are sums (metrics.jsonl).",
        )
    )
    return Section(title="The course of the rounds", blocks=blocks)


def _mean(lines: Sequence[Mapping[str, Any]], key: str) -> ReportCell:
    known = [float(line[key]) for line in lines if line.get(key) is not None]
    return ReportCell(UNDEFINED if not known else f"{np.mean(known):.3f}")


def audit_section(facts: RunFacts) -> Section | None:
    """Show what `edgefl-train audit` found; None where it was not asked."""
    if facts.audit is None:
        return None
    title = "Audit of what leaves a site"
    if facts.audit_is_of_another_state:
        told = (
            "audit.json was made of another state than this run has now, so its figures are not shown: audit it again."
        )
        return Section(title=title, blocks=[Words(text=told)])
    blocks: list[ReportBlock] = [
        Words(
            text="Attacks on what leaves a site, as `edgefl-train audit` made them. A figure stands beside its floor "
            "(what the attack reaches without the payload) and its control (what it reaches on an unprotected input)."
        )
    ]
    scalars = [(name, ReportCell(_told(value))) for name, value in facts.audit.items() if not isinstance(value, list)]
    blocks += [FactList(rows=scalars)] if scalars else []
    for name, value in facts.audit.items():
        if isinstance(value, list) and value and all(isinstance(line, dict) for line in value):
            blocks.append(_lines(name, value))
        elif isinstance(value, list) and value:
            blocks.append(Words(text=f"{words_of(name)}: {'; '.join(map(_told, value))}"))
    return Section(title=title, blocks=blocks)


def _lines(name: str, lines: Sequence[Mapping[str, Any]]) -> ReportTable:
    keys = list(dict.fromkeys(str(key) for line in lines for key in line))
    ordered = [key for key in AUDIT_FIRST if key in keys] + [key for key in keys if key not in AUDIT_FIRST]
    rows = [[ReportCell(_told(line.get(key))) for key in ordered] for line in lines]
    words = tuple(i for i, key in enumerate(ordered) if any(isinstance(line.get(key), str) for line in lines))
    return ReportTable(head=[words_of(key) for key in ordered], rows=rows, text_columns=words, caption=words_of(name))


def _told(value: Any) -> str:
    """A value of a file whose keys may change, in words."""
    if value is None:
        return UNDEFINED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return " to ".join(map(_told, value)) if len(value) == 2 else ", ".join(map(_told, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_told(one)}" for key, one in value.items())
    return str(value)


def never_trained(facts: RunFacts) -> list[str]:
    """Say that the frozen network of a run learned nothing; nothing of another."""
    bare = stays_untrained(facts.run.settings, facts.run.folder)
    return [f"The network was never trained: {UNTRAINED}."] if bare else []


def limits_section(facts: RunFacts) -> Section:
    """Tell what the figures cannot say."""
    told = ["For research only. An aid for study, not a diagnosis, and not a medical device."]
    told += [*never_trained(facts), *(capital(line) + "." for line in part_lines(facts.summary))]
    marks = {mark_at(facts, name).replace(ABSENT, "") for name in facts.sites}
    told += [f"Some sites: {SAYS}." for _ in marks & {MARK}] + [f"Some sites: {FEWER_SAYS}." for _ in marks & {FEWER}]
    told += [
        "Figures are of pictures like those that the sites brought. Another camera, another clinic or other patients "
        "may give other figures.",
        "An interval tells how much a figure would differ with other lesions from the same sites. It tells nothing of "
        "other sites, other seeds or other years.",
        "One run has one seed. Whether one method is better than another takes several.",
    ]
    return Section(title="Limits", blocks=[Words(text=text, warning=i == 0) for i, text in enumerate(told)])
