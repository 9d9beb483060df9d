"""An audit as text: of each line the figure with what it is compared with, then why the verdict is what it is."""

from collections.abc import Sequence
from typing import Final

from edgefl_protocol.sentences import capital, listed
from edgefl_trainer.audit.line import FIGURES, AuditLine
from edgefl_trainer.audit.result import AuditResult

HEAD: Final = ("kind", "attack", "figure", "95 %", "floor", "control", "needed", "target", "pictures", "verdict")
NO_PROOF: Final = "A verdict is about these attacks. A stronger one may reach more: no line proves that nothing leaks."


def audit_text(found: AuditResult, sites: Sequence[str]) -> list[str]:
    """Write an audit as lines of text: a row for each line, its reason, then what was not attacked.

    Args:
        sites: all that trained.
    """
    rows = [HEAD, *(_row(line) for line in found.lines)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEAD))]
    told = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for line in found.lines:
        told += [
            f"{line.kind}, {line.attack}: {line.verdict}. {capital(line.reason)}.",
            f"  figure: {FIGURES.get(line.family, line.attack)}, by {line.measure}"
            f"{'; ' * bool(line.further)}{line.further}",
            f"  figure minus floor, of the same pictures: {line.beside_floor}",
            f"  attacked: {line.against}; floor: {line.floor_of}; control: {line.control_of}; sites: "
            f"{', '.join(line.sites)}",
        ]
    told += [one.told for one in found.not_attacked]
    if never := found.never_attacked(sites):
        told.append(f"never attacked: {listed(never)}: no line here is of {'it' if len(never) == 1 else 'them'}")
    return [*told, NO_PROOF]


def _row(line: AuditLine) -> tuple[str, ...]:
    written = (line.written(value) for value in (line.floor, line.control, line.needs, line.target))
    figure, bounds = line.written(line.figure), line.between(line.interval)
    return (line.kind, line.attack, figure, bounds, *written, f"{line.pictures:,}", line.verdict)
