"""The audit log is a chain: an edit, deletion or reordering is found. Source: docs/security.md, check 69."""

import hashlib

import pytest
from sqlalchemy import text

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.store import audit
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol.pae import pae


def test_audit_chain(coordinator, tools) -> None:
    """Check 69: an edited, removed or moved row is found."""
    tools.approved_member(coordinator, "clinic-a")
    assert OPERATIONS["audit"](coordinator, {})["rows"] >= 4
    tampering = [
        "UPDATE audit SET subject = 'clinic-z' WHERE number = 2",
        "UPDATE audit SET at_ms = at_ms + 1 WHERE number = 1",
        "DELETE FROM audit WHERE number = 2",
        "UPDATE audit SET number = 1000 WHERE number = 2",
    ]
    for statement in tampering:
        with pytest.raises(OperatorError, match="broken at row"), coordinator.store.transaction() as connection:
            connection.execute(text(statement))
            audit.verify(connection)  # raising undoes the tampering
    assert OPERATIONS["audit"](coordinator, {})["rows"] >= 4


def test_a_forged_row_breaks_the_next(coordinator, tools) -> None:
    """Check 69: whoever edits a row and computes its digest anew is found at the row after it."""
    tools.approved_member(coordinator, "clinic-a")
    with pytest.raises(OperatorError, match="broken at row 3"), coordinator.store.transaction() as connection:
        first, second = connection.execute(text("SELECT * FROM audit ORDER BY number LIMIT 2")).all()
        parts = (first.sha256, "2", str(second.at_ms), second.event, "clinic-z", second.detail)
        digest = hashlib.sha256(pae(b"efla1/audit", *(part.encode() for part in parts))).hexdigest()
        forged = text("UPDATE audit SET subject = 'clinic-z', sha256 = :digest WHERE number = 2")
        connection.execute(forged, {"digest": digest})
        audit.verify(connection)
