"""What was acknowledged is there when the power comes back: docs/security.md check 58."""

import pytest
from sqlalchemy import select
from tests.power_cut import BEGIN, FlushedDisk, cut_after_each

from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.store.tables import replies

UPLOADS = f"""{BEGIN}
from edgefl_coordinator.commands.setup import make_home
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_protocol import Payload
from tests.coordinator.conftest import Clock, quick_member, settings_table, start_rounds

root, count = Path(sys.argv[1]), int(sys.argv[2])
home = CoordinatorHome(root / "home")
make_home(home, settings_table(rounds={{"quorum_target": count + 1}}))
coordinator = open_coordinator(home, clock=Clock())
members = [quick_member(coordinator, f"clinic-{{number}}") for number in range(count)]
start_rounds(coordinator)
flush_all(root)
for member in members:
    assert isinstance(member.reply(1), Payload)
    acknowledged(member.name)
"""


@pytest.mark.parametrize("cuts", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_no_acknowledged_upload_is_lost(folder, cuts) -> None:
    """Check 58: 100 power cuts on a disk that drops what was not flushed; 0 acknowledged uploads are lost."""
    for told, left in cut_after_each(FlushedDisk(folder), UPLOADS, cuts, folder):
        opened = open_coordinator(CoordinatorHome(left / "home"))
        try:
            with opened.store.transaction() as connection:
                blobs = connection.scalars(select(replies.c.blob)).all()
            assert len(blobs) == len(told)
            assert all(opened.store.get_blob(name) for name in blobs)
        finally:
            opened.store.close()
