"""`edgefl-coordinator audit` and `log`: whether the log of decisions is unbroken, and what it tells."""

from datetime import UTC, datetime
from typing import Any

import click

from edgefl_coordinator.commands.options import Operator, for_operator, moment
from edgefl_protocol.sentences import counted


@click.command()
@for_operator
def audit(operator: Operator) -> None:
    """Check that no row of the audit log was changed or removed."""
    facts = operator.run("audit")
    operator.show(facts, _count(facts))


@click.command()
@click.option("--since", metavar="TIME", type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"]),
              help="Only what happened from this date or time (UTC) on, such as 2026-03-01.")  # fmt: skip
@click.option("--limit", metavar="ROWS", type=click.IntRange(1, 10_000), default=100, show_default=True,
              help="How many of the newest rows to print.")  # fmt: skip
@for_operator
def log(operator: Operator, since: datetime | None, limit: int) -> None:
    """Print the audit log: when, what and who, the newest row last. Checks it as `audit` does."""
    from_ms = 0 if since is None else int(since.replace(tzinfo=UTC).timestamp() * 1000)
    facts = operator.run("log", from_ms=from_ms, most=limit)
    operator.show(facts, *[_line(row) for row in facts["shown"]])
    click.echo(f"{len(facts['shown'])} of {_count(facts)}", err=True)


def _line(row: dict[str, Any]) -> str:
    from edgefl_coordinator.store.audit_words import event_words, explanation

    event, detail = row["event"], row["detail"]
    why = explanation(event, detail)
    said = event_words(event, row["subject"], detail)
    return f"{row['number']:6}  {moment(row['at_ms'])}  {said}{f': {why}' if why else ''}"


def _count(facts: dict[str, Any]) -> str:
    return f"{counted(facts['rows'], 'row')}, unbroken"
