"""What `audit.json` of a run holds: read, written, and joined with what an earlier audit found of other sites.

Guarantees: an audit of some sites takes no line of other sites away; one of another state of the run, or made with
other settings, is never joined with it. A file that `edgefl-train audit` did not write, or whose verdict is not that of
its figures, is refused. Each audit.json that was ever written has `state_sha256`: without it, it could be of any run.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.audit.bounds import LEAST_UNITS, Between
from edgefl_trainer.audit.line import DRAWN_OF, MEMBERSHIP, TRUE_POSITIVES, AuditLine, NotAttacked
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.errors import RunError

AUDIT: Final = "audit.json"  # in the run's folder
MAX_AUDIT_BYTES: Final = 1 << 24
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """All that audits of one state of a run found."""

    method: str
    travels: tuple[str, ...]
    state_sha256: str
    pictures: int | None  # most that were looked for at a site; None in a file from before it was kept
    lines: tuple[AuditLine, ...]
    not_attacked: tuple[NotAttacked, ...]

    def never_attacked(self, sites: Collection[str]) -> list[str]:
        """Give those of some sites that no line has a figure of."""
        return [site for site in sites if not any(site in line.sites for line in self.lines)]

    def sites_of(self, kind: str) -> frozenset[str]:
        """Sites of which an attack on a kind of payload has a figure."""
        return frozenset(site for line in self.lines if kind in line.kind.split(" and ") for site in line.sites)

    def to_json(self, sites: Collection[str]) -> dict[str, Any]:
        """Make what `audit.json` holds.

        Args:
            sites: all that trained.
        """
        return {
            "method": self.method,
            "travels": list(self.travels),
            "state_sha256": self.state_sha256,
            "pictures": self.pictures,
            "lines": [line.to_json() for line in self.lines],
            "not_attacked": [{**asdict(one), "sites": list(one.sites)} for one in self.not_attacked],
            "never_attacked": self.never_attacked(sites),
        }


def trained_sites(summary: Mapping[str, Any]) -> list[str]:
    """Name the sites of a run that trained: the others sent nothing."""
    return [name for name, site in summary["sites"].items() if not site.get("held_out")]


def kept_of_others(
    run: FinishedRun, names: Collection[str], pictures: int
) -> tuple[list[AuditLine], list[NotAttacked]]:
    """Give what an earlier audit of the same state found of other sites; no names are all sites, and keep nothing.

    Raises:
        RunError: it was made with other settings, so that it cannot stand beside this one; or its file is damaged.
    """
    if not names or set(names) >= set(trained_sites(run.summary)):
        return [], []
    before, path = read_audit(run.folder), run.folder / AUDIT
    if before is None or before.state_sha256 != run.summary["state_sha256"]:
        return [], []
    lines = [line for line in before.lines if not set(line.sites) <= set(names)]
    left_out = [one for one in before.not_attacked if not set(one.sites) <= set(names)]
    if not lines and not left_out:
        return [], []
    if before.pictures is None:
        raise RunError(
            f"{path} is of an earlier edgefl, which did not keep how many pictures it looked for: attack all sites "
            "without --site, or move the file away."
        )
    if before.pictures != pictures:
        raise RunError(
            f"{path} tells of other sites, and was made with --pictures {before.pictures}: add that, attack all sites "
            "without --site, or move the file away."
        )
    return lines, left_out


def read_audit(folder: Path) -> AuditResult | None:
    """Read what audits of a run found, None where there was none; a `RunError` where the file is damaged."""
    path = folder / AUDIT
    if not path.exists():
        return None
    try:
        return _result(json.loads(read_bounded(path, MAX_AUDIT_BYTES)))
    except (EdgeflError, ValueError, TypeError, RecursionError) as error:
        raise RunError(
            f"{path} is damaged, or of another program ({error}): make it anew with `edgefl-train audit {folder}`.",
            "damaged",
        ) from error


def _result(found: object) -> AuditResult:
    return AuditResult(
        method=_at(found, "method", str),
        travels=_words(found, "travels"),
        state_sha256=_at(found, "state_sha256", str),
        pictures=_at(found, "pictures", int) if isinstance(found, dict) and "pictures" in found else None,
        lines=tuple(map(_line, _at(found, "lines", list))),
        not_attacked=tuple(map(_left_out, _at(found, "not_attacked", list))),
    )


def _line(found: object) -> AuditLine:
    drawn = _drawn(found)
    more = _at(found, "more", dict)
    line = AuditLine(
        kind=_at(found, "kind", str),
        attack=_at(found, "attack", str),
        against=_at(found, "against", str),
        measure=_at(found, "measure", str),
        figure=_number(found, "figure"),
        interval=_between(found, "interval", drawn),
        floor=_number(found, "floor"),
        floor_of=_at(found, "floor_of", str),
        control=_number(found, "control"),
        control_of=_at(found, "control_of", str),
        needs=_number(found, "needs"),
        target=_number(found, "target"),
        pictures=_at(found, "pictures", int),
        sites=_words(found, "sites"),
        more=dict(zip(map(str, more), _numbers(list(more.values()), len(more)), strict=True)),
        drawn=drawn,
        drawn_of=None if drawn is None else _at(found, "drawn_of", str),
        minus_floor=None if drawn is None else _number(found, "minus_floor"),
        minus_floor_interval=None if drawn is None else _between(found, "minus_floor_interval", drawn),
    )
    if line.drawn_of not in (None, *DRAWN_OF):
        raise ValueError(f"{line.drawn_of!r} is nothing that an interval draws")
    if line.attack == MEMBERSHIP and not set(TRUE_POSITIVES) <= set(line.more):
        raise ValueError("a line of membership lacks its true positives")
    if _at(found, "verdict", str) != line.verdict:
        raise ValueError(f"the verdict of {line.kind}, {line.attack}, is not that of its figures")
    if drawn is not None and _at(found, "floor_verdict", str) != line.floor_verdict:
        raise ValueError(f"the verdict beside the floor of {line.kind}, {line.attack}, is not that of its figures")
    return line


def _drawn(found: object) -> int | None:
    """Give how many the intervals draw; None in a file from before it was kept, or in what was kept of one."""
    absent = isinstance(found, dict) and found.get("drawn") is None
    return None if absent else _at(found, "drawn", int)


def _between(found: object, key: str, drawn: int | None) -> Between | None:
    """Give an interval; none is allowed where it would have drawn too few."""
    if isinstance(found, dict) and found.get(key) is None and drawn is not None and drawn < LEAST_UNITS:
        return None
    low, high = _numbers(_at(found, key, list), 2)
    return low, high


def _left_out(found: object) -> NotAttacked:
    sites = _words(found, "sites") if isinstance(found, dict) and "sites" in found else ()
    return NotAttacked(_at(found, "kind", str), _at(found, "attack", str), _at(found, "why", str), sites)


def _at(found: object, key: str, kind: type[T]) -> T:
    value = found.get(key) if isinstance(found, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"it has no {key}")
    return value


def _words(found: object, key: str) -> tuple[str, ...]:
    values = _at(found, key, list)
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"{key} holds something else than words")
    return tuple(values)


def _number(found: object, key: str) -> float:
    return _numbers([found.get(key) if isinstance(found, dict) else None], 1)[0]


def _numbers(values: Sequence[object], count: int) -> list[float]:
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) != len(values) or len(values) != count or not all(map(math.isfinite, numbers)):
        raise ValueError("a figure is no number")
    return numbers
