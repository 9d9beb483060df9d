"""The course of a run's rounds, and what its figures cannot say."""

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
    ReportBlock,
    ReportCell,
    ReportTable,
    Section,
    ShownPicture,
    Words,
    plain,
)
from edgefl_trainer.reports.findings import mark_at
from edgefl_trainer.reports.run_facts import RunFacts


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
        probed = "A network that is learned without labels is judged by a linear probe alone: see the figures above."
        blocks.append(Words(text="The run was not judged between its rounds." if facts.judged else probed))
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
