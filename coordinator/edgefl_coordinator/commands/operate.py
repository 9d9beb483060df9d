"""`edgefl-coordinator serve`, and what an operator asks of a coordinator whether it serves or not."""

import logging
import sys
from pathlib import Path
from typing import Any

import click

from edgefl_coordinator.commands.options import (
    FILE,
    HOME,
    PASSPHRASE,
    Operator,
    counted,
    for_operator,
    guarded,
    moment,
)
from edgefl_protocol.durable import read_passphrase

_OTHERS_S = 10.0  # for a command of the operator that has the store as `serve` starts


@click.command()
@HOME
@PASSPHRASE
@click.option("--verbose", is_flag=True, help="Log refused requests too.")
@guarded
def serve(home: Path, passphrase_file: Path | None, verbose: bool) -> None:
    """Serve until interrupted."""
    from edgefl_coordinator.settings import CoordinatorHome
    from edgefl_coordinator.store.coordinator import open_coordinator
    from edgefl_coordinator.web import service

    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("edgefl_coordinator").setLevel(logging.INFO if verbose else logging.WARNING)
    coordinator = open_coordinator(CoordinatorHome(home.resolve()), read_passphrase(passphrase_file), wait_s=_OTHERS_S)
    settings, store = coordinator.settings, coordinator.store
    click.echo(
        f"federation {settings.federation}, store in {store.journal_mode} journal mode, synchronous FULL", err=True
    )
    if settings.rounds.small_cohort:
        others = counted(settings.rounds.min_cohort, "other contributor")
        click.echo(f"warning: broadcasts need only {others}", err=True)
    try:
        service.serve(coordinator, lambda port: click.echo(f"listening on https://{settings.host}:{port}", err=True))
    finally:
        store.close()


@click.command()
@click.argument("name")
@click.option("--role", type=click.Choice(["site", "device"]), required=True, help="What the newcomer will be.")
@click.option("--hours", metavar="HOURS", type=click.FloatRange(0.01, 72), default=72.0, show_default=True,
              help="How long the invite is valid.")  # fmt: skip
@for_operator
def invite(operator: Operator, name: str, role: str, hours: float) -> None:
    """Print an invite for NAME, once.

    Hand it over on a channel you trust.
    """
    facts = operator.run("invite", name=name, role=role, hours=hours)
    operator.show(facts, facts["invite"])
    click.echo(f"valid until {moment(facts['expires_ms'])}, for one enrolment", err=True)
    if facts["ca"]:
        click.echo(
            f"its certificate is too large for an invite, hand the file over as well: edgefl enrol INVITE --ca "
            f"{Path(facts['ca']).name}  ({facts['ca']})",
            err=True,
        )


@click.command()
@click.argument("name")
@click.option("--fingerprint", metavar="XXXX…", required=True, help="The 20 characters that NAME's screen shows.")
@for_operator
def approve(operator: Operator, name: str, fingerprint: str) -> None:
    """Let NAME in after comparing the fingerprint."""
    operator.show(operator.run("approve", name=name, fingerprint=fingerprint), f"{name} is approved")


@click.command()
@for_operator
def start(operator: Operator) -> None:
    """Open the first round now, with whoever is approved."""
    facts = operator.run("start")
    operator.show(facts, f"the first round opens with {counted(facts['approved'], 'member')}")


@click.command()
@for_operator
def status(operator: Operator) -> None:
    """Show the federation, its round, members and bundles."""
    facts = operator.run("status")
    operator.show(facts, *_status_lines(facts))


@click.command()
@click.argument("file", metavar="FILE.edgefl", type=FILE)
@click.option("--trust", metavar="PUB", multiple=True, type=FILE,
              help="Signer's signing.pub: verify the bundle before publishing; repeatable.")  # fmt: skip
@for_operator
def publish(operator: Operator, file: Path, trust: tuple[Path, ...]) -> None:
    """Make FILE the current bundle of its line and task."""
    from edgefl_protocol.envelopes.key_files import read_public_key

    keys = [read_public_key(path).public.hex() for path in trust]
    facts = operator.run("publish", path=str(file.resolve()), trust=keys)
    if not facts["verified"]:
        click.echo("its signature was not checked here (no --trust); every device checks it", err=True)
    operator.show(facts, f"published {facts['line']}/{facts['task']} version {facts['version']}")


@click.command()
@for_operator
def audit(operator: Operator) -> None:
    """Check that the audit log's chain is unbroken."""
    facts = operator.run("audit")
    operator.show(facts, f"{counted(facts['rows'], 'row')}, unbroken")


def _status_lines(facts: dict[str, Any]) -> list[str]:
    deadline = f", closes {moment(facts['deadline_ms'])}" if facts["deadline_ms"] else ""
    beside = f", {counted(facts['contributions'], 'contribution')} beside" if facts["contributions"] else ""
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
        lines.append(f"opened again: {facts['problem']}; it closes once a further reply has come")
    if facts["failing"]:
        failing = facts["failing"]
        lines.append(f"failing since {moment(failing['at_ms'])}, tried again: {failing['error']}")
    return lines
