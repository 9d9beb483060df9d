"""`edgefl-coordinator`: make, run and administer a federation's coordinator.

Results on stdout, text for people on stderr. Exit 0 done, 1 failed, 2 usage or missing extra, 3 refused by trust or
policy. Heavy modules load inside the commands, so that `--help` works in the base install.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import click

from edgefl_coordinator.commands.keys import revoke, root, rotate
from edgefl_coordinator.commands.options import (
    HOME,
    JSON,
    PASSPHRASE,
    counted,
    guarded,
    moment,
    operate,
    passphrase,
)

_OTHERS_S = 10.0  # for a command of the operator that has the store as `serve` starts


class _Commands(click.Group):
    """Ends with one sentence where the disk fails, that of the help text included."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as error:  # most often the disk behind standard output, which is full
            what = error.filename or "standard output or a file"
            click.echo(f"edgefl-coordinator: {what} cannot be used: {error.strerror or error}", err=True)
            sys.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="edgefl", message="%(version)s")
def main() -> None:
    """Run a federation's coordinator: the meeting point of sites and devices.

    \b
    A federation from nothing:
      edgefl-coordinator init DIR --federation NAME --classes A,B --backbone run:RUN
      edgefl-coordinator serve --home DIR
      edgefl-coordinator invite --home DIR --role device NAME
      edgefl-coordinator approve --home DIR NAME --fingerprint XXXX
    """


@main.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--federation", metavar="NAME", required=True, help="Name: lower-case letters, digits, '-'.")
@click.option(
    "--run",
    "run_",
    metavar="RUN",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Take method, settings, task, classes, backbone, rounds and epochs from a finished training run.",
)
@click.option("--method", metavar="NAME", default="fedevprompt", show_default=True, help="Federated method.")
@click.option(
    "--preset",
    type=click.Choice(["tiny", "bench84", "paper"]),
    help="Settings, rounds and epochs as `edgefl-train run` has them.  [default: the method's own settings]",
)
@click.option("--task", metavar="NAME", default="all", show_default=True, help="Name of the task.")
@click.option("--line", metavar="NAME", default="main", show_default=True, help="Line of bundles.")
@click.option("--classes", metavar="A,B,…", help="Class names in index order; needed without --run.")
@click.option("--backbone", metavar="NAME", default="tiny", show_default=True, help="As `edgefl-train --backbone`.")
@click.option(
    "--image-px", metavar="PX", type=click.IntRange(8, 4096), help="Side of the images; default: the backbone's."
)
@click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True, help="Hyper-parameter of the method; repeatable."
)
@click.option(
    "--maps-per-class",
    metavar="M",
    type=click.IntRange(1),
    help="Most rollout maps a site may send for one class.  [default: the method's, 5]",
)
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Seed of what the server draws.")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", metavar="PORT", type=click.IntRange(0, 65535), default=8443, show_default=True, help="TCP port."
)
@click.option("--url", metavar="URL", help="Public base address, https://…; default https://HOST:PORT.")
@click.option(
    "--rounds", metavar="N", type=click.IntRange(1), help="Training rounds.  [default: the run's or preset's, else 5]"
)
@click.option(
    "--epochs",
    metavar="N",
    type=click.IntRange(1),
    help="Local epochs of a round.  [default: the run's or preset's, else 1]",
)
@click.option(
    "--quorum-min",
    metavar="N",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Replies below which a round is not aggregated.",
)
@click.option(
    "--quorum-target",
    metavar="N",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Replies at which a round closes early, and approved members that start the first.",
)
@click.option(
    "--deadline",
    metavar="SECONDS",
    type=click.IntRange(1),
    default=3600,
    show_default=True,
    help="Time a round stays open.",
)
@click.option(
    "--start",
    type=click.Choice(["automatic", "manual"]),
    default="automatic",
    show_default=True,
    help="Open the first round when enough are approved, or on `start`.",
)
@click.option(
    "--min-cohort",
    metavar="N",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Other contributors that a broadcast needs.",
)
@click.option("--allow-small-cohort", is_flag=True, help="Permit --min-cohort below 3; shown in the audit log.")
@click.option(
    "--suite",
    type=click.Choice(["1", "2"]),
    default="2",
    show_default=True,
    help="Sealing: 1 X25519, 2 ML-KEM-768 with X25519.",
)
@PASSPHRASE
@guarded
def init(folder: Path, passphrase_file: Path | None, **options: Any) -> None:
    """Make the folder of a new coordinator: keys and settings. Also a development certificate."""
    from edgefl_coordinator.commands.init import settings_table
    from edgefl_coordinator.commands.setup import check_table, make_home, reply_cap, try_first_job
    from edgefl_coordinator.settings import Home

    home = Home(folder.resolve())
    secret = passphrase(passphrase_file)
    table = settings_table(options)
    settings = check_table(table)
    limits = {"reply_bytes": reply_cap(try_first_job(settings))}
    make_home(home, {**table, "limits": limits}, secret)
    if secret is None:
        click.echo("warning: the private keys are not encrypted; their files have mode 0600", err=True)
    click.echo(f"made the coordinator of {settings.federation} in {home.root}", err=True)
    click.echo(f"move {home.keys / 'root.key'} to an offline medium: it is the way back after a break-in", err=True)
    click.echo(f"next: edgefl-coordinator serve --home {home.root}", err=True)


@main.command()
@HOME
@PASSPHRASE
@click.option("--verbose", is_flag=True, help="Log refused requests too.")
@guarded
def serve(home: Path, passphrase_file: Path | None, verbose: bool) -> None:
    """Serve the federation over HTTPS until interrupted."""
    from edgefl_coordinator.settings import Home
    from edgefl_coordinator.store.coordinator import open_coordinator
    from edgefl_coordinator.web import service

    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("edgefl_coordinator").setLevel(logging.INFO if verbose else logging.WARNING)
    coordinator = open_coordinator(Home(home.resolve()), passphrase(passphrase_file), wait_s=_OTHERS_S)
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


@main.command()
@click.argument("name")
@click.option("--role", type=click.Choice(["site", "device"]), required=True, help="What the newcomer will be.")
@click.option(
    "--hours",
    metavar="HOURS",
    type=click.FloatRange(0.01, 72),
    default=72.0,
    show_default=True,
    help="How long the invite is valid.",
)
@HOME
@PASSPHRASE
@JSON
@guarded
def invite(name: str, role: str, hours: float, home: Path, passphrase_file: Path | None, as_json: bool) -> None:
    """Print an invite for the new member NAME, once. Hand it over on a channel you trust."""
    facts = operate(home, passphrase_file, "invite", {"name": name, "role": role, "hours": hours})
    click.echo(json.dumps(facts) if as_json else facts["invite"])
    click.echo(f"valid until {moment(facts['expires_ms'])}, for one enrolment", err=True)
    if facts["ca"]:
        click.echo(
            f"hand over the certificate as well: edgefl enrol INVITE --ca {Path(facts['ca']).name}  ({facts['ca']})",
            err=True,
        )


@main.command()
@click.argument("name")
@click.option("--fingerprint", metavar="XXXX…", required=True, help="The 20 characters that NAME's screen shows.")
@HOME
@PASSPHRASE
@JSON
@guarded
def approve(name: str, fingerprint: str, home: Path, passphrase_file: Path | None, as_json: bool) -> None:
    """Let the member NAME in after comparing its fingerprint."""
    facts = operate(home, passphrase_file, "approve", {"name": name, "fingerprint": fingerprint})
    click.echo(json.dumps(facts) if as_json else f"{name} is approved")


@main.command()
@HOME
@PASSPHRASE
@JSON
@guarded
def start(home: Path, passphrase_file: Path | None, as_json: bool) -> None:
    """Open the first round now, with the members approved so far."""
    facts = operate(home, passphrase_file, "start", {})
    click.echo(json.dumps(facts) if as_json else f"the first round opens with {counted(facts['approved'], 'member')}")


@main.command()
@HOME
@PASSPHRASE
@JSON
@guarded
def status(home: Path, passphrase_file: Path | None, as_json: bool) -> None:
    """Show the federation, its round, members and bundles."""
    facts = operate(home, passphrase_file, "status", {})
    if as_json:
        click.echo(json.dumps(facts))
        return
    deadline = f", closes {moment(facts['deadline_ms'])}" if facts["deadline_ms"] else ""
    click.echo(f"{facts['federation']}: {facts['method']} on {facts['task']} ({', '.join(facts['classes'])})")
    beside = f", {counted(facts['contributions'], 'contribution')} beside" if facts["contributions"] else ""
    click.echo(
        f"round {facts['round']} of {facts['rounds']}: {facts['state']}, "
        f"{counted(facts['replies'], 'reply', 'replies')}{beside} "
        f"(needs {facts['quorum_min']}, closes at {facts['quorum_target']}){deadline}"
    )
    if facts["state_sha256"]:
        click.echo(f"  server and sites after the last round: {facts['state_sha256']}")
    for member in facts["members"]:
        replied = ", replied" if member["replied"] else ""
        click.echo(f"  {member['role']:6} {member['name']}  {member['state']}{replied}  {member['fingerprint']}")
    for line in _key_lines(facts["keys"]):
        click.echo(f"  {line}")
    for line in _troubles(facts):
        click.echo(f"  {line}")
    for bundle in facts["bundles"]:
        click.echo(f"  bundle {bundle['line']}/{bundle['task']} version {bundle['version']}")


@main.command()
@click.argument("file", metavar="FILE.edgefl", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--trust",
    metavar="PUB",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Signer's signing.pub: verify the bundle before publishing; repeatable.",
)
@HOME
@PASSPHRASE
@JSON
@guarded
def publish(file: Path, trust: tuple[Path, ...], home: Path, passphrase_file: Path | None, as_json: bool) -> None:
    """Give the bundle FILE to devices as their current model. It replaces the one of its line and task."""
    from edgefl_coordinator.public_keys import read_public_key

    keys = [read_public_key(path).public.hex() for path in trust]
    facts = operate(home, passphrase_file, "publish", {"path": str(file.resolve()), "trust": keys})
    if not facts["verified"]:
        click.echo("its signature was not checked here (no --trust); every device checks it", err=True)
    named = f"{facts['line']}/{facts['task']} version {facts['version']}"
    click.echo(json.dumps(facts) if as_json else f"published {named}")


@main.command("audit")
@HOME
@PASSPHRASE
@JSON
@guarded
def audit_(home: Path, passphrase_file: Path | None, as_json: bool) -> None:
    """Check that nobody has changed the log of decisions. The audit log's chain must be unbroken."""
    facts = operate(home, passphrase_file, "audit", {})
    click.echo(json.dumps(facts) if as_json else f"{counted(facts['rows'], 'row')}, unbroken")


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


for command in (revoke, rotate, root):
    main.add_command(command)


if __name__ == "__main__":
    main()
