"""Rows of a data source with the sites and test rows of its SPEC. Source: docs/design.md 5 (Data SPECs)."""

from dataclasses import replace

from edgefl_trainer.data.dealing import USUAL, deal_iid, deal_test
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.rows import UNDEALT, Row, SourceRows
from edgefl_trainer.data.specs import Spec

LEFT_OUT = "left out"  # split of a row that no site has and that is not to be spread as an unlabelled one


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


def own_rows(spec: Spec, table: SourceRows, seed: int) -> list[Row]:
    """Return the rows of `sited_rows`; those of sites that `@site=NAME` does not ask for are marked as left out."""
    rows = sited_rows(spec, table, seed)
    return [row if spec.site in (None, row.site) else replace(row, site=None, split=LEFT_OUT) for row in rows]
