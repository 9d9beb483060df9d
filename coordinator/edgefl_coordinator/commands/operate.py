"""`edgefl-coordinator serve`, and what an operator asks of a coordinator whether it serves or not."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import click

from edgefl_coordinator.commands.options import FILE, HOME, PASSPHRASE, Operator, for_operator, guarded
from edgefl_coordinator.commands.status import not_taken_text, warning_lines, with_home
from edgefl_coordinator.store.moments import moment
from edgefl_protocol.durable import read_passphrase
from edgefl_protocol.sentences import counted

_OTHERS_S = 10.0  # for a command of the operator that has the store as `serve` starts


@click.command()
@HOME
@PASSPHRASE
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
              help="Form of the log on standard error: lines of text, or one JSON object a line.")  # fmt: skip
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
              show_default=True, help="Lowest level to log; debug also tells what each member fetches.")  # fmt: skip
@guarded
def serve(home: Path, passphrase_file: Path | None, log_format: Literal["text", "json"], log_level: str) -> None:
    """Serve until interrupted.

    Enrolments, approvals, rounds, refusals and failures are logged as they happen. On a PostgreSQL database several
    serve at once, and one of them leads.
    """
    from edgefl_coordinator.settings import CoordinatorHome, load_settings
    from edgefl_coordinator.store.coordinator import open_coordinator
    from edgefl_coordinator.web import admin, log_lines, service, tls

    log_lines.configure_logging(sys.stderr, log_format, log_level)
    log = log_lines.log
    folder, passphrase = CoordinatorHome(home.resolve()), read_passphrase(passphrase_file)
    if not load_settings(folder).database and admin.is_served(folder):
        log.warning("a server runs for this folder; waiting %g s for it to stop", _OTHERS_S)
    coordinator = open_coordinator(folder, passphrase, wait_s=_OTHERS_S, joins=True)
    settings, store = coordinator.settings, coordinator.store
    log.info("federation %s, %s, %s", settings.federation, store.database.described, store.payloads.described)
    if settings.rounds.small_cohort:
        log.warning("broadcasts need only %s", counted(settings.rounds.min_cohort, "other contributor"))
    try:
        if refused := tls.refused_by_members(folder, settings):
            log.warning("%s", refused)
        service.serve(coordinator, lambda port: log.info("listening on https://%s:%d", settings.host, port))
    finally:
        store.close()


@click.command()
@click.argument("name")
@click.option("--role", type=click.Choice(["site", "device"]), required=True, help="Role of the new member.")
@click.option("--hours", metavar="HOURS", type=click.FloatRange(0.01, 72), default=72.0, show_default=True,
              help="Time the invite is valid.")  # fmt: skip
@click.option("-o", "--out", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="Write the invite to FILE, readable by you alone.  [default: print it]")  # fmt: skip
@for_operator
def invite(operator: Operator, name: str, role: str, hours: float, out: Path | None) -> None:
    """Make an invite for NAME, which is shown only this once.

    It is a secret: hand it over on a channel you trust. An earlier invite for NAME counts no more.
    """
    from edgefl_protocol.durable import write_atomic

    if out is not None and out.exists():
        raise click.UsageError(
            f"{out} exists already; delete it first, or name another file (a new invite for {name} withdraws the "
            "earlier one)"
        )
    if out is not None and not out.parent.is_dir():
        raise click.UsageError(f"the folder {out.parent} does not exist; make it, or name another file")
    facts = operator.run("invite", name=name, role=role, hours=hours)
    if out is None:
        operator.show(facts, facts["invite"])
    else:
        write_atomic(out, f"{facts['invite']}\n".encode(), mode=0o600)
        operator.show({**facts, "invite": None, "file": str(out)}, str(out))
    if facts["replaced"] == "invite":
        click.echo(f"the earlier invite for {name} counts no more", err=True)
    elif facts["replaced"] == "enrolment":
        click.echo(f"{name} had enrolled and was not approved; it has to enrol again, with this invite", err=True)
    _tell_over(facts)
    click.echo(f"valid until {moment(facts['expires_ms'])}, for one enrolment", err=True)
    if facts["ca"]:
        click.echo(
            "the coordinator's certificate is too large for an invite, so hand over its file as well: edgefl enrol "
            f"INVITE --ca {Path(facts['ca']).name}  ({facts['ca']})",
            err=True,
        )


@click.command()
@click.argument("name")
@click.option(
    "--fingerprint", metavar="XXXX…", required=True, help="Fingerprint that NAME's screen shows: 20 characters."
)
@click.option(
    "--images",
    metavar="N",
    type=click.IntRange(min=1),
    help="Let NAME's replies weigh up to N training images. Without it they weigh at most "
    "protection.claim_most times the median. Approve again to change it.",
)
@for_operator
def approve(operator: Operator, name: str, fingerprint: str, images: int | None) -> None:
    """Let NAME in after comparing the fingerprint."""
    facts = operator.run("approve", name=name, fingerprint=fingerprint, images=images)
    operator.show(facts, f"{name} is approved")
    _tell_over(facts)


def _tell_over(facts: Mapping[str, Any]) -> None:
    """Tell, on standard error, where a newcomer has no round left to take part in."""
    if facts["over"]:
        click.echo(
            f"all rounds of this federation are over: {facts['name']} can fetch its model, and learns in no round",
            err=True,
        )


@click.command()
@for_operator
def start(operator: Operator) -> None:
    """Open the first round now, with the members that are approved."""
    facts = operator.run("start")
    with_home(operator, facts["warnings"])
    operator.show(facts, f"the first round opens with {counted(facts['approved'], 'member')}")
    for line in warning_lines(facts["warnings"]):
        click.echo(line, err=True)


@click.command()
@click.argument("file", metavar="FILE.edgefl", type=FILE)
@click.option("--trust", metavar="PUB", multiple=True, type=FILE,
              help="Verify the bundle with this signer's signing.pub before publishing; repeatable.")  # fmt: skip
@for_operator
def publish(operator: Operator, file: Path, trust: tuple[Path, ...]) -> None:
    """Make FILE the current bundle of its line and task."""
    from edgefl_protocol.envelopes.key_files import read_public_key

    keys = [read_public_key(path).public.hex() for path in trust]
    facts = operator.run("publish", path=str(file.resolve()), trust=keys)
    if not facts["verified"]:
        click.echo(
            "the bundle's signature was not checked here (no --trust was given); every device checks it. The same "
            "command with --trust PUB checks it now",
            err=True,
        )
    named = f"{facts['line']}/{facts['task']} version {facts['version']}"
    told = f"{named} is published already; a key given with --trust signed it" if facts["already"] else ""
    operator.show(facts, told or f"published {named}")
    if facts["not_taken"]:
        click.echo(f"warning: {not_taken_text(facts['not_taken'])}", err=True)
