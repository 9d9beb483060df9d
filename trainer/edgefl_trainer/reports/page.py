"""The report as one HTML file that needs nothing else: no network, no script, no style or picture from elsewhere.

Guarantees: every word is escaped (jinja2's autoescape); pictures are data URIs; a policy in the page forbids a browser
to load anything, so not even a damaged page asks for a file.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from edgefl_protocol.distribution import DISTRIBUTION, VERSION
from edgefl_protocol.sentences import counted
from edgefl_trainer.reports.attacks import audit_section
from edgefl_trainer.reports.blocks import ReportCell, Section
from edgefl_trainer.reports.certainty import certainty_section
from edgefl_trainer.reports.closing import limits_section, never_trained, rounds_section
from edgefl_trainer.reports.comparison import comparison_section
from edgefl_trainer.reports.findings import figures_section, in_short, recall_section
from edgefl_trainer.reports.leaving import travels_section
from edgefl_trainer.reports.origins import environment_section, learned_from, method_section
from edgefl_trainer.reports.run_facts import RunFacts

TEMPLATE = "page.html"


def report_page(runs: Sequence[RunFacts], now: datetime) -> str:
    """Write the report of at least one run, with a comparison where there are several.

    `now` is when it is written.
    """
    stamp = now.astimezone(UTC).isoformat(timespec="seconds")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["path"] = _path
    names = _titles(runs)
    parts = [
        {
            "title": title,
            "warnings": never_trained(facts),
            "short": in_short(facts),
            "sections": _sections(facts, stamp),
        }
        for title, facts in zip(names, runs, strict=True)
    ]
    return environment.get_template(TEMPLATE).render(
        title=names[0] if len(runs) == 1 else counted(len(runs), "run"),
        parts=parts,
        compared=[comparison_section(runs)] if len(runs) > 1 else [],
        written=f"Written {stamp} by {DISTRIBUTION} {VERSION}.",
    )


def _sections(facts: RunFacts, stamp: str) -> list[Section]:
    found = [
        learned_from(facts),
        travels_section(facts),
        audit_section(facts),
        figures_section(facts),
        recall_section(facts),
        certainty_section(facts),
        rounds_section(facts),
        limits_section(facts),
        method_section(facts),
        environment_section(facts, stamp),
    ]
    return [section for section in found if section is not None]


def _titles(runs: Sequence[RunFacts]) -> list[str]:
    """Name each run by its folder, method, task and seed."""
    return [
        f"{facts.run.folder.name}: {facts.run.settings.method}, {counted(len(facts.sites), 'site')}, task "
        f"{facts.run.settings.task}, seed {facts.run.settings.seed}"
        for facts in runs
    ]


def _path(cell: ReportCell) -> str:
    """Where a cell's figure stands in `summary.json`, as JSON."""
    return json.dumps(cell.path)
