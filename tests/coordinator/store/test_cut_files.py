"""The coordinator's state files, cut. Source: docs/security.md, reliability table (partial write), check 60."""

from typing import Any

import pytest
from sqlalchemy import text

from edgefl_coordinator.store import audit
from edgefl_coordinator.store.audit_chain import check_log
from edgefl_coordinator.store.coordinator import load_keys, open_coordinator
from edgefl_coordinator.store.tables import metadata
from edgefl_protocol.errors import EdgeflError


def everything(coordinator: Any) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table, and the audit chain recomputed."""
    with coordinator.store.transaction() as connection:
        check_log(audit.kept_rows(connection))
        names = sorted(table.name for table in metadata.tables.values())
        return {name: [tuple(row) for row in connection.execute(text(f"SELECT * FROM {name}"))] for name in names}


# 832 = 13 * 64: within a page too.
@pytest.mark.parametrize(
    "every", [pytest.param(832, marks=pytest.mark.smaller), pytest.param(64, marks=pytest.mark.slow)]
)
def test_the_store_cut_at_many_bytes(coordinator, tools, clock, every) -> None:
    """docs/security.md check 60, at every 64th byte and at some of them: every row as it was, or one typed sentence."""
    members = [tools.approved_member(coordinator, name) for name in ("clinic-a", "clinic-b")]
    tools.start_rounds(coordinator)
    for member in members:
        member.reply(1)
    expected = everything(coordinator)
    home = coordinator.store.home
    coordinator.store.close()
    data = home.database.read_bytes()
    blobs = sorted(path.name for path in home.blobs.iterdir())
    cuts = range(0, len(data), every)
    refused = 0
    for cut in cuts:
        for left_over in home.root.glob("store.sqlite*"):
            left_over.unlink()
        home.database.write_bytes(data[:cut])
        try:
            again = open_coordinator(home, clock=clock)
        except EdgeflError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1
            continue
        try:
            assert everything(again) == expected, cut
        except EdgeflError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1
        finally:
            again.store.close()
    assert refused > 0.9 * len(cuts)  # a last page that holds nothing may be missed by nobody
    assert sorted(path.name for path in home.blobs.iterdir()) == blobs  # and nothing was swept away meanwhile


def test_every_key_file_cut_at_every_64th_byte(coordinator) -> None:
    """docs/security.md check 60: signing key and secret: a typed sentence, never another key."""
    home = coordinator.store.home
    for path in (home.signing, home.keys / "secret.bin"):
        data = path.read_bytes()
        for cut in range(0, len(data), 64):
            path.write_bytes(data[:cut])
            try:
                load_keys(home)
            except EdgeflError as error:
                assert len(str(error).splitlines()) == 1
            else:
                raise AssertionError(f"{path} loads when it is cut at {cut}")
        path.write_bytes(data)
    assert load_keys(home).secret == coordinator.keys.secret
