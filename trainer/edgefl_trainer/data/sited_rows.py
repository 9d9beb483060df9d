"""Rows of a data source with the sites and test rows of its SPEC. Source: docs/design.md 5 (Data SPECs)."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from edgefl_trainer.data.dealing import USUAL, deal_iid, deal_test
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.learned_from import LesionKey, lesion_keys
from edgefl_trainer.data.rows import SIDES, UNDEALT, Row, SourceRows
from edgefl_trainer.data.specs import Spec

_Side = tuple[bool, int]  # whether a table names it, place in `SIDES`

LEFT_OUT = "left out"  # split of a row that no site uses, and that is not to be spread as an unlabelled one


def sited_rows(spec: Spec, table: SourceRows, seed: int) -> list[Row]:
    """Return the rows of a table with the sites and test rows that its SPEC gives them, in order.

    Raises:
        DataError: `@site=NAME` names a site that the data does not have, or `@rows` is given to data with splits.
    """
    rows = list(table.rows)
    if spec.shares is not None and not any(row.split == UNDEALT and row.label is not None for row in rows):
        raise DataError(f"{spec.text!r} has @rows, but the source deals all its rows itself; leave @rows out.")
    if spec.site is not None and all(row.site is None for row in rows):
        rows = [replace(row, site=spec.site) for row in rows]
    elif spec.site is not None and spec.site not in {row.site for row in rows}:
        found = ", ".join(sorted({row.site for row in rows if row.site})[:20]) or "none"
        given = spec.text.partition("@site=")[0]  # `join --site` wrote the rest
        raise DataError(f"{given!r} has no site {spec.site}; the sites of the data are {found}.")
    # before new sites are dealt by the run's seed, which must not move a lesion into `test`
    rows = deal_test(rows, (spec.shares or USUAL).test)
    return rows if spec.iid_sites is None else deal_iid(rows, spec.iid_sites, seed)


def agreeing(specs: Sequence[Spec], tables: Sequence[SourceRows], dealt: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """Put the rows of a lesion on one side, where several tables hold it.

    Each table was dealt by itself. Rows show one lesion where their table or their site gives it one name, and where
    other rows join them so. What was dealt follows a split that a table names itself; else such a lesion is `test`
    where one deal made it so. Sites that `@site=NAME` does not ask for move nothing.

    Args:
        dealt: the rows of each table, as `sited_rows` gives them.
    """
    if len(tables) < 2:
        return [list(rows) for rows in dealt]
    known: set[tuple[tuple[LesionKey, LesionKey], _Side]] = set()
    for spec, table, rows in zip(specs, tables, dealt, strict=True):
        for read, row in zip(table.rows, rows, strict=True):
            if row.site is not None and spec.site in (None, row.site) and row.split in SIDES:
                known.add((lesion_keys(table.name, row), (read.split != UNDEALT, SIDES.index(row.split))))
    sides = _joined_sides(known)

    def agreed(table: SourceRows, read: Row, row: Row) -> Row:
        if read.split != UNDEALT or row.split not in SIDES:
            return row
        side = next((sides[key] for key in lesion_keys(table.name, row) if key in sides), None)
        return row if side is None else replace(row, split=SIDES[side[1]])

    return [
        [agreed(table, read, row) for read, row in zip(table.rows, rows, strict=True)]
        for table, rows in zip(tables, dealt, strict=True)
    ]


def _joined_sides(known: Collection[tuple[tuple[LesionKey, LesionKey], _Side]]) -> dict[LesionKey, _Side]:
    """Give all keys that rows join, over however many tables and sites, the highest side of their rows."""
    sides: dict[LesionKey, _Side] = {}
    before: dict[LesionKey, _Side] | None = None
    while sides != before:  # each pass joins what is one row further away
        before = dict(sides)
        for keys, side in known:
            sides |= dict.fromkeys(keys, max(side, *(sides.get(key, side) for key in keys)))
    return sides


def own_rows(specs: Sequence[Spec], tables: Sequence[SourceRows], seed: int) -> list[Row]:
    """Return the rows of all tables; those of sites that `@site=NAME` does not ask for are marked as left out.

    A `DataError` as of `sited_rows`.
    """
    dealt = agreeing(specs, tables, [sited_rows(*each, seed) for each in zip(specs, tables, strict=True)])
    return [
        row if spec.site in (None, row.site) else replace(row, site=None, split=LEFT_OUT)
        for spec, rows in zip(specs, dealt, strict=True)
        for row in rows
    ]
