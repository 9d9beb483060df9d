"""`edgefl-coordinator status`: how the federation stands, once or again and again."""

import sys
from time import sleep
from typing import Any

import click

from edgefl_coordinator.commands.options import Operator, for_operator, moment
from edgefl_protocol.sentences import counted

_PROGRAM = "edgefl-coordinator"
_CLEAR = "\x1b[2J\x1b[H"  # of a terminal


@click.command()
@click.option("--watch", is_flag=True, help="Show it again whenever it changes, until Ctrl-C.")
@click.option("--interval", "interval_s", metavar="SECONDS", type=click.FloatRange(0.1, 3600), default=2.0,
              show_default=True, help="With --watch: time between two checks.")  # fmt: skip
@for_operator
def status(operator: Operator, watch: bool, interval_s: float) -> None:
    """Show the federation, its round, members and bundles.

    For a round that is stuck it says since when, why, and which command resolves it. With --watch and --json it
    prints one JSON object a line, one for each change.
    """
    before: dict[str, Any] | None = None
    try:
        while True:
            facts = look(operator)
            if facts != before:
                if watch and not operator.as_json and sys.stdout.isatty():
                    click.echo(_CLEAR, nl=False)
                operator.show(facts, *status_lines(facts))
                sys.stdout.flush()
            if not watch:
                return
            before = facts
            sleep(interval_s)
    except KeyboardInterrupt:  # of a person who has seen enough
        if not watch:
            raise


def look(operator: Operator) -> dict[str, Any]:
    """Ask for the status; commands that mend are as they have to be typed here."""
    facts = operator.run("status")
    standing = facts["standing"]
    for command in standing["commands"]:
        if command.startswith(_PROGRAM):
            typed = f"{command} --home {operator.home}"
            for place in ("mend", "sentence"):
                standing[place] = standing[place].replace(command, typed)
    standing["commands"] = [
        f"{command} --home {operator.home}" if command.startswith(_PROGRAM) else command
        for command in standing["commands"]
    ]
    return facts


def _standing_lines(standing: dict[str, Any]) -> list[str]:
    """Say in a line what the federation waits for, or that it is stuck."""
    if standing["sentence"]:
        return [standing["sentence"]]
    if standing["kind"] != "over" and standing["why"]:
        return [f"waits: {'; '.join(filter(None, (standing['why'], standing['mend'])))}"]
    return [standing["why"]] if standing["why"] else []


def status_lines(facts: dict[str, Any]) -> list[str]:
    """Return the lines of a status."""
    deadline = f", closes {moment(facts['deadline_ms'])}" if facts["deadline_ms"] else ""
    beside = f"and {counted(facts['contributions'], 'contribution')}" if facts["contributions"] else ""
    lines = [
        f"{facts['federation']}: {facts['method']} on {facts['task']} ({', '.join(facts['classes'])})",
        f"round {facts['round']} of {facts['rounds']}: {facts['state']}, "
        f"{counted(facts['replies'], 'reply', 'replies')}{beside} "
        f"(at least {facts['quorum_min']} to aggregate, closes early at {facts['quorum_target']}){deadline}",
    ]
    if facts["state_sha256"]:
        lines.append(f"  server and sites after the last round: {facts['state_sha256']}")
    for member in facts["members"]:
        replied = ", replied" if member["replied"] else ""
        lines.append(f"  {member['role']:6} {member['name']}  {member['state']}{replied}  {member['fingerprint']}")
    lines[2:2] = [f"  {line}" for line in _standing_lines(facts["standing"])]
    lines += [f"  {line}" for line in (*_key_lines(facts["keys"]), *_troubles(facts))]
    return lines + [f"  bundle {one['line']}/{one['task']} version {one['version']}" for one in facts["bundles"]]


def _key_lines(keys: dict[str, Any]) -> list[str]:
    """Say since when the sealing key counts, until when the root set does, and how many keys are revoked."""
    lines = [f"sealing key {keys['sealing_number']} since {moment(keys['sealing_made_ms'])}"]
    if keys["root_version"]:
        lines.append(f"root set {keys['root_version']} until {moment(keys['root_expires_ms'])}")
    return [*lines, *([f"{counted(keys['revoked'], 'key')} revoked"] if keys["revoked"] else [])]


def _troubles(facts: dict[str, Any]) -> list[str]:
    """Return what an operator has to look at, a line each."""
    lines = [f"refused: reply of {one['name']} in round {one['round']}: {one['reason']}" for one in facts["refused"]]
    if facts["problem"]:
        lines.append(f"opened again: {facts['problem']}; the round closes once another reply has come")
    if facts["failing"]:
        failing = facts["failing"]
        lines.append(f"failing since {moment(failing['at_ms'])} and tried again and again: {failing['error']}")
    return lines
