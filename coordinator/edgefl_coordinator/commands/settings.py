"""`edgefl-coordinator set`: change a setting of a coordinator, whether it serves or not."""

from typing import Any

import click

from edgefl_coordinator.commands.options import Operator, for_operator

_LATER = {
    "rounds.deadline_s": "; it counts from the next deadline, and the open round keeps its own",
    "public_url": "; it counts for new invites",
    "ca": "; it counts for new invites",
    "proxy_ends_tls": "; connections are bounded by address as before until `serve` is restarted",
}


@click.command("set", context_settings={"ignore_unknown_options": True})
@click.argument("assignments", metavar="KEY VALUE [KEY VALUE]…", nargs=-1, required=True)
@for_operator
def set_(operator: Operator, assignments: tuple[str, ...]) -> None:
    """Change settings, such as rounds.quorum_min 3. Several pairs are one change: all take effect, or none.

    Most take effect at once; where one counts later, or `serve` must be restarted first, the answer says so.
    docs/reference/coordinator.md lists them all.
    """
    if joined := [one for one in assignments[::2] if "=" in one]:
        key, _, value = joined[0].partition("=")
        raise click.UsageError(f"leave a space between KEY and VALUE: set {key} {value or 'VALUE'}")
    if len(assignments) % 2:
        raise click.UsageError("give a VALUE for each KEY, such as: set rounds.quorum_min 3")
    changes = dict(zip(assignments[::2], assignments[1::2], strict=True))
    facts = operator.run("set", changes=changes)
    operator.show(facts, *_lines(facts))
    if facts["warning"]:
        click.echo(f"warning: {facts['warning']}", err=True)


def _lines(facts: dict[str, Any]) -> list[str]:
    late = dict.fromkeys(facts["restart"], "; it takes effect when `serve` is restarted") | _LATER
    return [f"{key} is now {_as_typed(value)}{late.get(key, '')}" for key, value in facts["changed"].items()]


def _as_typed(value: Any) -> str:
    """Say a value as the file has it."""
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'
