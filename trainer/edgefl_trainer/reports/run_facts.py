"""Everything that a report reads of a finished run, read once.

A file that may be missing is empty here; a run that cannot be opened is an `EdgeflError` of one sentence.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl_protocol.durable import read_bounded
from edgefl_protocol.pictures.class_info import known_among
from edgefl_trainer.audit.result import AuditResult, read_audit, trained_sites
from edgefl_trainer.engine.folder import SUMMARY, read_metrics
from edgefl_trainer.engine.judging.suspicion import site_suspicion
from edgefl_trainer.engine.models import FinishedRun, open_run
from edgefl_trainer.environment import environment_of

MAX_SUMMARY_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """A finished run, as a report shows it."""

    run: FinishedRun
    lines: Sequence[Mapping[str, Any]]  # of `metrics.jsonl`
    environment: Mapping[str, Any]
    suspicion: Mapping[str, str]  # site → what its rule for suspicious classes reached, in words
    audit: AuditResult | None  # what `edgefl-train audit` found; None where it was not asked
    summary_sha256: str  # of the file

    @property
    def summary(self) -> Mapping[str, Any]:
        """The content of `summary.json`."""
        return self.run.summary

    @property
    def sites(self) -> Mapping[str, Mapping[str, Any]]:
        """The figures of each site, by name."""
        found: Mapping[str, Mapping[str, Any]] = self.summary.get("sites", {})
        return found

    @property
    def audit_is_of_another_state(self) -> bool:
        """Whether the audit was made before the run went on, or of another run: its figures are not of this one."""
        return self.audit is not None and self.audit.state_sha256 != self.summary.get("state_sha256")

    @property
    def trained(self) -> Sequence[str]:
        """The sites that trained: of these, payloads left."""
        return trained_sites(self.summary)

    def measured_at(self, kind: str) -> frozenset[str]:
        """Sites of which an audit of this run's state has a figure of a kind of payload."""
        if self.audit is None or self.audit_is_of_another_state:
            return frozenset()
        return self.audit.sites_of(kind)

    @property
    def judged(self) -> bool:
        """Whether the run has models that score pictures or answer questions, and not a backbone alone."""
        return "probe" not in self.summary

    @property
    def live(self) -> bool:
        """Whether this is one site of a live federation, and not all of them on one machine."""
        return "site_sha256" in self.summary


def read_run(folder: Path) -> RunFacts:
    """Read a finished run; a `RunError` where there is none, or a file of it is damaged."""
    run = open_run(folder)
    return RunFacts(
        run=run,
        lines=read_metrics(folder),
        environment=environment_of(folder),
        suspicion=_suspicion(run),
        audit=read_audit(folder),
        summary_sha256=hashlib.sha256(read_bounded(folder / SUMMARY, MAX_SUMMARY_BYTES)).hexdigest(),
    )


def _suspicion(run: FinishedRun) -> dict[str, str]:
    """What a bundle of each site would say of its suspicious classes; nothing of a run that answers questions."""
    if run.questions is not None:
        return {}
    info = known_among(run.classes, None)
    return {site: site_suspicion(run, site, info).statement for site in run.sites}
