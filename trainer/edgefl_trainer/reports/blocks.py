"""What a report is made of: sections of texts, facts, tables and pictures, as plain values.

Guarantees: a cell that shows a figure of `summary.json` says which, by its path there; where a run kept no such figure
the cell says so, and nothing is made up. `page` writes the blocks as HTML and escapes every word.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgefl_trainer.evaluate.undefined import mean_without_interval

NOT_RECORDED = "not recorded"
UNDEFINED = "–"
Path = tuple[str | int, ...]  # into `summary.json`
Form = Literal["share", "number", "count"]


@dataclass(frozen=True)
class ReportCell:
    """One place of a table."""

    text: str
    path: Path | None = None  # of the figure that it shows
    shade: float | None = None  # 0 to 1: how dark it is behind
    strong: bool = False
    below: str = ""  # smaller, on a line of its own: an interval, a number of lesions


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A table; `text_columns` are read as words, the others as numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[ReportCell]]
    caption: str = ""
    text_columns: tuple[int, ...] = (0,)
    kind: Literal["table"] = "table"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Small tables beside one another, as many as fit."""

    tables: Sequence[ReportTable]
    kind: Literal["beside"] = "beside"


@dataclass(frozen=True, kw_only=True)
class FactList:
    """Terms, each with what it is."""

    rows: Sequence[tuple[str, ReportCell]]
    kind: Literal["facts"] = "facts"


@dataclass(frozen=True, kw_only=True)
class Words:
    """A paragraph; a `warning` stands out."""

    text: str
    warning: bool = False
    kind: Literal["words"] = "words"


@dataclass(frozen=True, kw_only=True)
class ShownPicture:
    """A PNG, with what it shows in words."""

    png: bytes
    caption: str
    dots_per_inch: int = 110
    kind: Literal["picture"] = "picture"

    @property
    def uri(self) -> str:
        """The picture itself, as a data URI."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"

    @property
    def width(self) -> int:
        """How wide it is shown, in pixels of a page, of which an inch has 96."""
        return int.from_bytes(self.png[16:20], "big") * 96 // self.dots_per_inch  # the first field of a PNG's header


ReportBlock = ReportTable | Beside | FactList | Words | ShownPicture


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: Sequence[ReportBlock]


def found_at(summary: Mapping[str, Any], path: Path) -> Any:
    """Return what stands at a path, None where it is null; `NOT_RECORDED` where there is nothing."""
    found: Any = summary
    for step in path:
        try:
            found = found[step]
        except (KeyError, IndexError, TypeError):
            return NOT_RECORDED
    return found


def figure(summary: Mapping[str, Any], path: Path, form: Form = "share", *, strong: bool = False) -> ReportCell:
    """Show a figure, with its 95 % interval where one is kept beside it as `NAME_interval`.

    One without width says only that these rows do not vary when they are drawn: it is no interval, as in `run`.
    """
    value = found_at(summary, path)
    if value == NOT_RECORDED or value is None:
        return ReportCell(NOT_RECORDED if value == NOT_RECORDED else UNDEFINED, path)
    bounds = found_at(summary, (*path[:-1], f"{path[-1]}_interval"))
    below = ""
    if isinstance(bounds, list) and len(bounds) == 2:
        same = bounds[0] == bounds[1] or (path == ("mean_balanced_accuracy",) and bool(mean_without_interval(summary)))
        below = "no interval" if same else " to ".join(written(bound, form).removesuffix(" %") for bound in bounds)
    return ReportCell(written(value, form), path, strong=strong, below=below)


def written(value: float, form: Form) -> str:
    """Write a number: a share in per cent, a figure with three decimals, or a count."""
    if form == "share":
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if form == "count" else f"{value:.3f}"


def plain(*texts: object) -> list[ReportCell]:
    """Make cells of words alone."""
    return [ReportCell(str(text)) for text in texts]
