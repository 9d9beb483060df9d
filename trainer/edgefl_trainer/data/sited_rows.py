"""Rows of a data source with the sites and test rows of its SPEC. Source: docs/design.md 5 (Data SPECs)."""

from collections.abc import Sequence
from dataclasses import replace

from edgefl_trainer.data.dealing import USUAL, deal_iid, deal_test
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.rows import SIDES, UNDEALT, Row, SourceRows
from edgefl_trainer.data.specs import Spec

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
    """Put rows of one site that show one lesion on one side, where several tables hold them.

    Each table was dealt by itself. What was dealt follows a split that a table names itself; else such a lesion is
    `test` where one deal made it so. Sites that `@site=NAME` does not ask for move nothing.

    Args:
        dealt: the rows of each table, as `sited_rows` gives them.
    """
    if len(tables) < 2:
        return [list(rows) for rows in dealt]
    sides: dict[tuple[str, str], tuple[bool, int]] = {}  # (site, lesion) → whether a table names it, place in `SIDES`
    for spec, table, rows in zip(specs, tables, dealt, strict=True):
        for read, row in zip(table.rows, rows, strict=True):
            if row.site is not None and spec.site in (None, row.site) and row.split in SIDES:
                side = (read.split != UNDEALT, SIDES.index(row.split))
                sides[row.site, row.lesion] = max(side, sides.get((row.site, row.lesion), side))

    def agreed(read: Row, row: Row) -> Row:
        side = sides.get((row.site or "", row.lesion)) if read.split == UNDEALT and row.split in SIDES else None
        return row if side is None else replace(row, split=SIDES[side[1]])

    return [
        [agreed(read, row) for read, row in zip(table.rows, rows, strict=True)]
        for table, rows in zip(tables, dealt, strict=True)
    ]


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
