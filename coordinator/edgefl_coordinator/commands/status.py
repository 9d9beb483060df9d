"""`edgefl-coordinator status`: how the federation stands, once or again and again."""

import contextlib
import sys
from time import sleep, time_ns
from typing import Any

import click

from edgefl_coordinator.commands.options import Operator, for_operator
from edgefl_coordinator.store.moments import moment
from edgefl_protocol.errors import KeyMaterialError
from edgefl_protocol.sentences import counted

_PROGRAM = "edgefl-coordinator"
_OF_MEMBERS = {"no_reply", "too_few_members", "replies_refused"}  # causes that no member mends without a model
_LOW = "disk_low"
_CLEAR = "\x1b[2J\x1b[H"  # of a terminal


@click.command()
@click.option("--watch", is_flag=True, help="Show it again whenever it changes, until Ctrl-C.")
@click.option("--interval", "interval_s", metavar="SECONDS", type=click.FloatRange(0.1, 3600), default=2.0,
              show_default=True, help="With --watch: time between two checks.")  # fmt: skip
@click.option("--check", is_flag=True,
              help="Exit with status 1 if the federation is stuck, `serve` does not run, members refuse its "
                   "certificate, or the disk has no room for a reply; for alarms.")  # fmt: skip
@for_operator
def status(operator: Operator, watch: bool, interval_s: float, check: bool) -> None:
    """Show the federation, its round, members and bundles.

    For a round that is stuck it says since when, why, and which command resolves it. With --watch and --json it
    prints one JSON object a line, one for each change.
    """
    if watch and check:
        raise click.UsageError("--watch shows changes until Ctrl-C, and --check looks once; give one of the two")
    if watch:
        with contextlib.suppress(KeyboardInterrupt):  # of a person who has seen enough
            _watch(operator, interval_s)
        return
    facts = look(operator)
    operator.show(facts, *status_lines(facts))
    unreachable = facts["standing"]["cause"] == "not_served" or facts["certificate_problem"]
    low = any(one["cause"] == _LOW for one in facts["warnings"])
    if check and (unreachable or low or facts["standing"]["kind"] == "stuck"):
        sys.exit(1)


def _watch(operator: Operator, interval_s: float) -> None:
    """Print each change: on a terminal in place of the one before, elsewhere a block with its time and an empty line.

    When a member was heard changes with each of its requests, so this alone is no change.
    """
    before: object = None
    while True:
        facts = look(operator)
        quiet = facts | {"members": [{**one, "heard_ms": None} for one in facts["members"]]}
        shown: object = quiet | {"last_event": None} if operator.as_json else status_lines(quiet)
        if shown != before:
            if not operator.as_json and sys.stdout.isatty():
                click.echo(_CLEAR, nl=False)
            operator.show(facts, moment(time_ns() // 1_000_000), *status_lines(facts), "")
            sys.stdout.flush()
        before = shown
        sleep(interval_s)


def look(operator: Operator) -> dict[str, Any]:
    """Ask for the status; commands that mend are as they have to be typed here.

    Encrypted keys without their passphrase leave the store closed, and show that no server runs.
    """
    try:
        facts = operator.run("status")
    except KeyMaterialError as error:
        command = operator.typed(f"{_PROGRAM} serve")
        raise KeyMaterialError(
            f"the server is not running, so members cannot reach it; run: {command}. No more is known, because {error}",
            error.code,
        ) from error
    standing = facts["standing"]
    for command in standing["commands"]:
        if command.startswith(_PROGRAM):
            typed = operator.typed(command)
            for place in ("mend", "sentence"):
                standing[place] = standing[place].replace(command, typed)
    standing["commands"] = [
        operator.typed(command) if command.startswith(_PROGRAM) else command for command in standing["commands"]
    ]
    with_home(operator, facts["warnings"])
    return facts


def with_home(operator: Operator, warnings: list[dict[str, Any]]) -> None:
    """Complete the commands of warnings, as they have to be typed here."""
    for warning in warnings:
        warning["command"] = warning["command"] and operator.typed(warning["command"])


def _standing_lines(facts: dict[str, Any]) -> list[str]:
    """Say in a line what the federation waits for, or that it is stuck; and what will hold rounds up.

    What mends first comes first: without a published bundle no device replies.
    """
    standing = facts["standing"]
    sentence, cause = standing["sentence"], standing["cause"]
    lines = [sentence if standing["kind"] in ("stuck", "over") else f"waits: {sentence}"] if sentence else []
    awaited = standing["kind"] != "stuck" or cause in ("no_reply", "no_bundle")
    if facts["state"] == "open" and awaited:
        silent = [one["name"] for one in facts["members"] if one["state"] == "approved" and not one["replied"]]
        lines += [f"not replied: {', '.join(silent)}"] if silent else []
    others = [one for one in facts["warnings"] if one["cause"] != cause]  # the sentence has said its own
    first = [one for one in others if one["cause"] == "no_bundle" and cause in _OF_MEMBERS]
    return warning_lines(first) + lines + warning_lines([one for one in others if one not in first])


def warning_lines(warnings: list[dict[str, Any]]) -> list[str]:
    """Say what will hold rounds up, with what mends it."""
    return [f"warning: {one['why']}; {_mend(one)}" for one in warnings]


def _mend(warning: dict[str, Any]) -> str:
    if warning["cause"] == _LOW:
        return "make room there"
    more = "invite and approve members"
    if not warning["command"]:
        return more
    if warning["risky"]:
        return f"{more}; or, if a single contribution may be told apart, run: {warning['command']}"
    return f"run: {warning['command']}"


def status_lines(facts: dict[str, Any]) -> list[str]:
    """Return the lines of a status."""
    from edgefl_coordinator.rounds.quorum import when_it_closes

    stuck = facts["standing"]["kind"] == "stuck"  # then no deadline closes it
    deadline = f", closes {moment(facts['deadline_ms'])}" if facts["deadline_ms"] and not stuck else ""
    rule = f" ({when_it_closes(facts['quorum_min'], facts['quorum_target'])})"
    closes = "" if stuck or facts["state"] == "done" else rule
    beside = f" and {counted(facts['contributions'], 'contribution')}" if facts["contributions"] else ""
    lines = [
        f"{facts['federation']}: {facts['method']} on {facts['task']} ({', '.join(facts['classes'])})",
        f"{_round_text(facts)}, {counted(facts['replies'], 'reply', 'replies')}{beside}{closes}{deadline}",
    ]
    if facts["state_sha256"]:
        lines.append(f"  server and sites after the last round: {facts['state_sha256']}")
    known = [*facts["members"], *facts["invites"], *facts["shut_out"]]
    width = max((len(one["name"]) for one in known), default=0)
    lines += [f"  {_member_line(member, width)}" for member in facts["members"]]
    lines += [f"  {_named(one, width)}  invited, until {moment(one['expires_ms'])}" for one in facts["invites"]]
    lines += [f"  {_named(one, width)}  shut out {moment(one['revoked_ms'])}" for one in facts["shut_out"]]
    lines[2:2] = [f"  {line}" for line in _standing_lines(facts)]
    lines += [f"  {line}" for line in (*_key_lines(facts["keys"]), *_troubles(facts))]
    return lines + [f"  {_bundle_line(one)}" for one in facts["bundles"]]


def _round_text(facts: dict[str, Any]) -> str:
    """Say which round it is; `init` counts those of training alone, and a method may begin with a warm one."""
    trained = counted(facts["train_rounds"], "round") + " of training"
    if not facts["round"]:
        return f"before the first of {trained}: {facts['state']}"
    if facts["state"] == "done":
        return f"over: all {counted(facts['rounds'], 'round')} are done; in the last one"
    more = "" if facts["rounds"] == facts["train_rounds"] else f" ({trained}; this one is {facts['phase']})"
    return f"round {facts['round']} of {facts['rounds']}{more}: {facts['state']}"


def _bundle_line(bundle: dict[str, Any]) -> str:
    text = f"bundle {bundle['line']}/{bundle['task']} version {bundle['version']}"
    return text if bundle["not_taken"] is None else f"{text}: {not_taken_text(bundle['not_taken'])}"


def not_taken_text(why: str) -> str:
    """Say that members do not take a bundle, and what mends it."""
    return (
        f"{why}, so members take it only where their owner trusts its signer (edgefl trust add); publish a root set "
        "that lists that signer"
    )


def _member_line(member: dict[str, Any], width: int) -> str:
    """Say where a member stands; a fingerprint only once it was compared, so that nobody copies one into `approve`."""
    state = f"{member['state']}{', replied' if member['replied'] else ''}"
    if member["images"] is not None:
        state += f", up to {counted(member['images'], 'image')}"
    if member["heard_ms"] is not None:
        state += f", last heard {moment(member['heard_ms'])}"
    return f"{_named(member, width)}  {state}  {member['fingerprint'] or ''}".rstrip()


def _named(one: dict[str, Any], width: int) -> str:
    return f"{one['role']:6} {one['name']:{width}}"


def _key_lines(keys: dict[str, Any]) -> list[str]:
    """Say since when the sealing key counts, until when the root set does, and how many keys are revoked."""
    jumped = ", made at the restoration: its number counts the seconds since the backup, so that members take it"
    since = f"{moment(keys['sealing_made_ms'])}{jumped if keys['sealing_restored'] else ''}"
    lines = [f"sealing key {keys['sealing_number']} since {since}"]
    if keys["root_version"]:
        lines.append(f"root set {keys['root_version']} until {moment(keys['root_expires_ms'])}")
    return [*lines, *([f"{counted(keys['revoked'], 'key')} revoked"] if keys["revoked"] else [])]


def _troubles(facts: dict[str, Any]) -> list[str]:
    """Return what an operator has to look at, a line each."""
    lines = [f"refused: reply of {one['name']} in round {one['round']}: {one['reason']}" for one in facts["refused"]]
    lines += [f"bounded: reply of {one['name']} in round {one['round']}: {one['how']}" for one in facts["bounded"]]
    lines += [f"look at: reply of {one['name']} in round {one['round']}: {one['how']}" for one in facts["noticed"]]
    lines += [
        f"refused by the gate: round {one['round']}, so its replies count for nothing: {one['said'] or 'no reason'}"
        for one in facts["gate_refused"]
    ]
    if facts["certificate_problem"]:
        lines.append(f"warning: {facts['certificate_problem']}")
    if facts["problem"]:
        lines.append(f"opened again: {facts['problem']}; the round closes once another reply has come")
    if (failing := facts["failing"]) and facts["standing"]["cause"] != "job_failed":
        lines.append(f"the last job failed at {moment(failing['at_ms'])}: {failing['error']}")
    return lines
