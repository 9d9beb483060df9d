"""Check 42: what looks like SQL, a path or a log line, in every text of an operator's command and in a home's path."""

import logging
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import select

from edgefl_coordinator.cli import main
from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.audit_chain import check_log
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.store.tables import members, metadata
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol.errors import EdgeflError

STRINGS = [
    "x'; DROP TABLE members; --",
    "' OR '1'='1",
    "clinic-a' UNION SELECT signing_public FROM members --",
    '"; DELETE FROM audit; --',
    "%",
    "clinic_a",
    "../../etc/passwd",
    "a\nINFO forged line",
    "a\r\n\x1b[2Jforged",
    "a\x00b",
    "{0.__class__}",
    "%s%n",
    "$(touch forged)",
    "\u202eclinic",
]
FIELDS = {  # operation → its arguments, of which each text is replaced in turn
    "invite": {"name": "new", "role": "site", "hours": 1.0},
    "approve": {"name": "clinic-a", "fingerprint": "2D9RQ4XK7M0T8JHB5V1C"},
    "revoke": {"name": "nobody"},
    "revoke_signer": {"key_id": "0" * 64, "force": False},
    "set": {"changes": {"rounds.deadline_s": "60"}},
}


@pytest.mark.parametrize("text", STRINGS)
def test_an_operators_words_are_words(coordinator: Any, tools: Any, caplog: Any, text: str) -> None:
    """Check 42: no SQL error, no row of another member, no file, and each line of the log stays one line."""
    tools.approved_member(coordinator, "clinic-a")
    before = rows(coordinator)
    caplog.set_level(logging.DEBUG)
    for name, arguments in FIELDS.items():
        texts = [key for key, value in arguments.items() if isinstance(value, str)]
        for given in ({**arguments, key: text} for key in texts):
            attempt(coordinator, name, given)
    for changes in ({text: "1"}, {"public_url": text}, {"protection.rule": text}, {"certificate": text}):
        attempt(coordinator, "set", {"changes": changes})
    assert rows(coordinator) == before
    with coordinator.store.transaction() as connection:
        check_log(audit.kept_rows(connection))
        subjects = [row.subject for row in audit.rows(connection, after=0, most=1000)]
    assert not any(set(subject) & set("\n\r\x00\x1b") for subject in subjects)
    assert not any("\n" in record.getMessage().strip() for record in caplog.records)


def attempt(coordinator: Any, name: str, arguments: dict[str, Any]) -> None:
    """Do it, or be refused in one line; nothing else is raised."""
    try:
        OPERATIONS[name](coordinator, arguments)
    except EdgeflError as error:
        assert "\n" not in str(error) and "sql" not in str(error).lower(), (name, arguments)


def rows(coordinator: Any) -> list[Any]:
    """The members, and which tables there are."""
    with coordinator.store.transaction() as connection:
        names = connection.exec_driver_sql("SELECT name FROM sqlite_schema WHERE type = 'table'").scalars()
        tables = {name for name in names if not name.startswith("sqlite_")}
        assert set(metadata.tables) <= tables
        return [tuple(row) for row in connection.execute(select(members))]


@pytest.mark.parametrize("name", ["a'b; --", "a b%20?mode=memory#x", "$(touch forged)", "-o ProxyCommand=x", "é\u202e"])
def test_a_home_whose_path_looks_like_something_else(folder: Any, tools: Any, clock: Any, name: str) -> None:
    """Check 42: SQLite opens that very file, the command names it, and nothing is made beside it."""
    home = CoordinatorHome(folder / name)
    make_home(home, tools.settings_table())
    coordinator = open_coordinator(home, clock=clock)
    tools.approved_member(coordinator, "clinic-a")
    coordinator.store.close()
    assert home.database.stat().st_size > 0 and [one.name for one in folder.iterdir()] == [name]
    shown = CliRunner().invoke(main, ["status", "--home", str(home.root)])
    assert shown.exit_code == 0 and "clinic-a" in shown.stdout
