"""A large reply that is half sent when the backup is made goes on from the piece that the backup has.

Source: docs/guides/backup.md, what members notice; docs/security.md check 67.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.coordinator.backups import backup_of

from edgefl_coordinator.members import restoration
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.store.tables import uploads
from edgefl_protocol import Payload


@pytest.mark.both_databases
def test_a_half_sent_reply_goes_on(
    federation: Any, pair: Any, lab: Any, folder: Path, clock: Any, database: Any
) -> None:
    """Two pieces lie there; a third is being written while the backup is made, and is then acknowledged."""
    member, sent = pair[0], lab.Blob(lab.reply_of(1).to_bytes())
    third = 3 * 2**18
    assert sent.put(member, 0, 2**18) == 2**18 and sent.put(member, 2**18, 2**19) == 2**19
    (row,) = lab.rows(federation, uploads)
    federation.store.payloads.put_piece(row.blob, 2**19, b"half of a piece")
    path = backup_of(federation, folder / "backup")
    assert sent.put(member, 2**19, third) == third
    restoration.restore(path, home := CoordinatorHome(folder / "elsewhere"), None, clock(), database=database())
    member.coordinator = again = open_coordinator(home, clock=clock)
    try:
        assert (home.blobs / row.blob).stat().st_size == 2**19
        assert sent.put(member, third, 2**20) == 2**19  # not what it asks for: it is told how much is there
        sent.put_all(member)
        assert isinstance(sent.reply(member), Payload) and lab.rows(again, uploads) == []
    finally:
        again.store.close()
