"""`edgefl-coordinator audit`, `check-log` and `log`: whether the log of decisions is unbroken, and what it tells."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from edgefl_coordinator.commands.options import FILE, JSON, Operator, for_operator, guarded_offline
from edgefl_coordinator.store.moments import moment
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.sentences import counted


class _KeyId(click.ParamType[str]):
    """The id of a signing key, or the file of its public half."""

    name = "KEY"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from edgefl_protocol.envelopes.key_files import read_public_key

        if re.fullmatch("[0-9a-f]{64}", value):
            return value
        if not Path(value).is_file():
            self.fail(f"{value} is neither a key id, 64 hexadecimal digits, nor the file of a public key.", param, ctx)
        try:
            return read_public_key(value).key_id
        except EdgeflError as error:
            self.fail(f"{error}", param, ctx)


_RESTORED = click.option("--restored", multiple=True, type=click.IntRange(min=1), metavar="ROW",
                         help="You restored the log from a backup, as this row says: pass over heads of what was "
                         "lost with that; may be repeated.")  # fmt: skip


@click.command()
@click.option("--key", "key_ids", multiple=True, type=_KeyId(), metavar="KEY_ID",
              help="A further signing key that the coordinator had; may be repeated.  "
              "[default: its own and those of the root sets]")  # fmt: skip
@click.option("--write", "copy", type=click.Path(path_type=Path, dir_okay=False),
              help="Write the log with its signed heads to this new file, too, to be checked elsewhere.")  # fmt: skip
@_RESTORED
@for_operator
def audit(operator: Operator, key_ids: tuple[str, ...], restored: tuple[int, ...], copy: Path | None) -> None:
    """Check the audit log and its signed heads.

    Finds a row that was changed, removed or added in between, and a log that was cut or written anew.
    """
    facts = operator.run("audit", key_ids=list(key_ids), restored=list(restored))
    if copy:
        from edgefl_coordinator.store.audit_copy import ROWS_AT_ONCE, write_copy

        write_copy(copy, lambda after: operator.run("copy_log", after=after, most=ROWS_AT_ONCE))
        click.echo(f"wrote {copy}; check it anywhere with: edgefl-coordinator check-log {copy} --key KEY_ID", err=True)
    signed = f"; signed up to row {facts['signed_rows']}, {moment(facts['signed_ms'])}" if facts["signed_ms"] else ""
    if facts["signed_rows"] < facts["rows"]:
        signed += "; what came after is signed within the hour, and when `serve` stops"
    operator.show(facts, f"{_count(facts)}{signed}")


@click.command("check-log")
@click.argument("copy", type=FILE)
@click.option("--key", "key_ids", multiple=True, type=_KeyId(), required=True, metavar="KEY_ID",
              help="Signing key of the coordinator (`keys.signing` of `status --json`), or the file `signing.pub`; may "
              "be repeated.")  # fmt: skip
@click.option("--heads", type=FILE, help="Signed heads that were kept elsewhere: a copy of `audit-heads`.")
@_RESTORED
@JSON
@guarded_offline
def check_log(
    copy: Path, key_ids: tuple[str, ...], heads: Path | None, restored: tuple[int, ...], as_json: bool
) -> None:
    """Check a copy of an audit log, without its coordinator."""
    from edgefl_coordinator.store.audit_copy import check_copy

    facts = check_copy(copy, key_ids, heads, restored)
    signed = f"{_count(facts)}; signed up to row {facts['signed_rows']}, {moment(facts['signed_ms'])}"
    click.echo(json.dumps(facts) if as_json else f"{facts['federation']}: {signed}")


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
