"""The command `edgefl`: score pictures, say whose models are trusted, take part in a federation.

Results go to standard output, everything meant for a person in passing to standard error. Exit codes: 0 done,
1 failed, 2 usage, 3 refused. A known failure is one sentence. Only `click` is imported before a command runs.
"""

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from edgefl_client.federate import Device
    from edgefl_client.home import Home
    from edgefl_client.scorer import Scorer
    from edgefl_protocol.bundle import Bundle

_HOME_HELP = "Folder of this device's keys, models and outbox.  [env var: EDGEFL_HOME; default: ~/.edgefl]"
_home = click.option("--home", "home_dir", metavar="DIR", help=_HOME_HELP)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
_passphrase = click.option(
    "--passphrase-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File, readable by you alone, with the passphrase of this device's keys.  "
    "[env var: EDGEFL_KEY_PASSPHRASE; default: not encrypted]",
)
_model = click.option(
    "--model",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.edgefl",
    help="Bundle to score with.  [default: the one fetched by edgefl pull]",
)
_trust = click.option(
    "--trust", "trusted", multiple=True, metavar="PUB", help="Public key of a signer, or its file; for this call only."
)
_threads = click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N", help="Processor threads.  [default: all that are allowed]"
)


def _finite(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no finite number.")
    return value


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="edgefl", prog_name="edgefl")
@_home
@click.pass_context
def cli(context: click.Context, home_dir: str | None) -> None:
    """Score skin pictures on this device and take part in a federation. For research use only."""
    context.obj = home_dir


@cli.command()
@click.argument("images", nargs=-1, required=True, metavar="IMAGES...")
@_model
@_trust
@_json
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV on standard output.")
@click.option(
    "--heatmap",
    "heatmaps",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Draw a heat map of each picture into this folder.",
)
@click.option(
    "--refer-above",
    type=click.FloatRange(0.0),
    callback=_finite,
    metavar="U",
    help="Refer above this vacuity, 0 to 1 (softmax models: entropy in nats, 0 to ln of the number of classes).  "
    "[default: the bundle's]",
)
@click.option(
    "--weights",
    type=click.Choice(["bundle"]),
    default="bundle",
    show_default=True,
    help="Values to score with: those that the bundle was signed with.",
)
@click.option(
    "--batch", type=click.IntRange(1, 64), default=8, show_default=True, metavar="N", help="Pictures in one run."
)
@_threads
@_home
@click.pass_context
def score(
    context: click.Context,
    images: tuple[str, ...],
    model: Path | None,
    trusted: tuple[str, ...],
    as_json: bool,
    as_csv: bool,
    heatmaps: Path | None,
    refer_above: float | None,
    weights: str,
    batch: int,
    threads: int | None,
    home_dir: str | None,
) -> None:
    """Score JPEG or PNG files, or the pictures of a folder; `--json` prints one object a picture."""
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other")
    scorer, bundle = _scorer(_home_of(context, home_dir), model, trusted, threads, refer_above)
    from edgefl_client import scoring

    files = scoring.expand(images)
    if not files:
        raise click.UsageError("the folders given hold no .jpg, .jpeg or .png file")
    if heatmaps is not None:
        heatmaps.mkdir(parents=True, exist_ok=True)
    table = scoring.CsvLines(bundle.labels.classes)
    if as_csv:
        click.echo(table.head())
    if bundle.card.research_use_only:
        click.echo("Research use only: an aid for study, not a diagnosis.", err=True)
    if heatmaps is not None and "map" not in bundle.outputs:
        click.echo("This model has no attention map, so no heat maps are drawn.", err=True)
    failed, troubles = 0, list[str]()
    for result in scoring.score_files(scorer, files, heatmaps, batch, troubles.append):
        failed += isinstance(result, scoring.Failure)
        line = scoring.json_line(result) if as_json else table.row(result) if as_csv else scoring.human_line(result)
        click.echo(line)
    if failed:
        troubles.append(f"{failed} of {len(files)} picture{'s' if len(files) > 1 else ''} could not be scored.")
    if troubles:
        click.echo("\n".join(troubles), err=True)
        context.exit(1)


@cli.group()
def trust() -> None:
    """Whose bundles this device runs."""


@trust.command("add")
@click.argument("pub")
@click.option("--name", metavar="N", help="What to call the signer.  [default: first digits of its key id]")
@_json
@_home
@click.pass_context
def trust_add(context: click.Context, pub: str, name: str | None, as_json: bool, home_dir: str | None) -> None:
    """Trust the signer PUB from now on: a file (signing.pub) or the key itself as 64 hexadecimal digits."""
    from edgefl_client import federate
    from edgefl_client import trust as signers

    key = signers.read_public_key(pub)
    added = signers.add_trusted(_home_of(context, home_dir), key, name, federate.today())
    _report(added.to_json(), as_json, f"trusted: {added.name}, key id {added.key.key_id}")


@trust.command("list")
@_json
@_home
@click.pass_context
def trust_list(context: click.Context, as_json: bool, home_dir: str | None) -> None:
    """List the signers this device trusts."""
    from edgefl_client import trust as signers

    entries = signers.list_trusted(_home_of(context, home_dir))
    lines = [f"{entry.name}  {entry.key.key_id}  added {entry.added}" for entry in entries]
    text = "\n".join(lines) or "no signer is trusted; add one with edgefl trust add PUB"
    _report({"keys": [entry.to_json() for entry in entries]}, as_json, text)


@trust.command("remove")
@click.argument("which")
@_json
@_home
@click.pass_context
def trust_remove(context: click.Context, which: str, as_json: bool, home_dir: str | None) -> None:
    """Stop trusting a signer, named by its name, its key, or 8 or more first digits of its key id."""
    from edgefl_client import trust as signers

    removed = signers.remove_trusted(_home_of(context, home_dir), which)
    _report(removed.to_json(), as_json, f"no longer trusted: {removed.name}, key id {removed.key.key_id}")


@cli.command()
@click.argument("invite")
@click.option(
    "--ca",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="PEM certificate of the coordinator or its authority.  [default: the public authorities]",
)
@click.option("--proxy", metavar="URL", help="Proxy to go through from now on; the environment is not read.")
@click.option(
    "--suite", type=click.IntRange(1, 2), default=2, show_default=True, help="Sealing: 2 resists quantum computers."
)
@_passphrase
@_json
@_home
@click.pass_context
def enrol(
    context: click.Context,
    invite: str,
    ca: Path | None,
    proxy: str | None,
    suite: int,
    passphrase_file: Path | None,
    as_json: bool,
    home_dir: str | None,
) -> None:
    """Join a federation with the INVITE its operator gave you; run it again after any failure.

    An INVITE of "-" is read from standard input, so that it stands in no list of processes.
    """
    from edgefl_client import federate

    if invite == "-":
        invite = sys.stdin.read(4096)
    report = federate.run_enrol(_device(context, home_dir, passphrase_file), invite, ca, proxy, suite)
    text = (
        f"{report['name']} is {report['state']} in {report['federation']}; "
        f"tell the operator this fingerprint: {report['fingerprint']}"
    )
    _report(report, as_json, text)


@cli.command()
@_passphrase
@_json
@_home
@click.pass_context
def pull(context: click.Context, passphrase_file: Path | None, as_json: bool, home_dir: str | None) -> None:
    """Fetch the federation's current bundle, verify it and use it from now on."""
    from edgefl_client import federate

    report = federate.run_pull(_device(context, home_dir, passphrase_file))
    verb = "now in use" if report["changed"] else "in use already"
    _report(
        report, as_json, f"{report['line']}/{report['task']} version {report['version']} is {verb}: {report['file']}"
    )


@cli.command()
@click.option(
    "--labels",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="CSV",
    help="Table with the columns image (a file, relative to the table) and label (a class of the model).",
)
@click.option("--dry-run", is_flag=True, help="Only say what would leave this device.")
@_model
@_trust
@_threads
@_passphrase
@_json
@_home
@click.pass_context
def contribute(
    context: click.Context,
    labels: Path,
    dry_run: bool,
    model: Path | None,
    trusted: tuple[str, ...],
    threads: int | None,
    passphrase_file: Path | None,
    as_json: bool,
    home_dir: str | None,
) -> None:
    """Score labelled pictures here and put a few attention maps per class into the outbox; pictures never leave."""
    from edgefl_client import federate

    device = _device(context, home_dir, passphrase_file)
    scorer, bundle = _scorer(device.home, model, trusted, threads, None)
    report = federate.run_contribute(device, labels, scorer, bundle, dry_run=dry_run)
    maps = ", ".join(f"{number} of {name}" for name, number in report["maps"].items())
    what = f"{report['bytes']} bytes: attention maps ({maps}) and the digest of the model's values; no picture, no name"
    _report(report, as_json, f"would leave: {what}" if dry_run else f"in the outbox: {what}; edgefl sync sends it")


@cli.command()
@_passphrase
@_json
@_home
@click.pass_context
def sync(context: click.Context, passphrase_file: Path | None, as_json: bool, home_dir: str | None) -> None:
    """Do what is due and leave: fetch the task and the others' maps, send what the open round takes."""
    from edgefl_client import federate

    report = federate.run_sync(_device(context, home_dir, passphrase_file))
    parts = [f"round {report['round']['number']} is {report['round']['state']}"]
    parts += [f"reply {one['outcome']} ({one['bytes']} bytes)" for one in report["sent"]]
    got = report["broadcast"]
    if got is not None:
        maps = "1 map" if got["maps"] == 1 else f"{got['maps']} maps"
        parts.append(f"broadcast: {got['error']['message']}" if got["error"] else f"{maps} of others here")
    parts.append("1 item waits" if report["waiting"] == 1 else f"{report['waiting']} items wait")
    _report(report, as_json, "; ".join(parts))


@cli.command()
@click.option("--offline", is_flag=True, help="Do not ask the coordinator.")
@_passphrase
@_json
@_home
@click.pass_context
def status(
    context: click.Context, offline: bool, passphrase_file: Path | None, as_json: bool, home_dir: str | None
) -> None:
    """Show model, membership, round and outbox of this device."""
    from edgefl_client import federate

    report = federate.run_status(_device(context, home_dir, passphrase_file), online=not offline)
    _report(report, as_json, federate.status_text(report))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code.

    Args:
        arguments: what follows the command's name; None for this process's own.
    """
    try:
        code = cli.main(arguments, prog_name="edgefl", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read our output has left; nothing more to say
        sys.exit(1)
    except click.Abort:
        click.echo("stopped", err=True)
        sys.exit(1)
    except OSError as error:  # most often the disk behind standard output, which is full
        what = error.filename or "standard output or a file"
        click.echo(f"edgefl: {what} cannot be used: {error.strerror or error}", err=True)
        sys.exit(1)
    except Exception as error:
        from edgefl_client.failures import exit_code
        from edgefl_protocol.errors import EdgeflError

        if not isinstance(error, EdgeflError):
            raise
        click.echo(f"edgefl: {error}", err=True)
        sys.exit(exit_code(error))
    sys.exit(code if isinstance(code, int) else 0)


def _home_of(context: click.Context, home_dir: str | None) -> "Home":
    from edgefl_client.home import find_home

    return find_home(home_dir or context.find_root().obj)


def _device(context: click.Context, home_dir: str | None, passphrase_file: Path | None) -> "Device":
    from edgefl_client.federate import Device
    from edgefl_protocol.durable import read_passphrase

    return Device(home=_home_of(context, home_dir), passphrase=read_passphrase(passphrase_file))


def _scorer(
    home: "Home", model: Path | None, trusted: tuple[str, ...], threads: int | None, refer_above: float | None
) -> "tuple[Scorer, Bundle]":
    """The scorer and its bundle."""
    import time
    from concurrent.futures import ThreadPoolExecutor

    from edgefl_client import models

    # numpy's linear algebra is not used here, yet its threads would start with it and spin on the other processors.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Reading and hashing the bundle and loading the libraries take about as long, and the first needs the interpreter
    # little: on two processors the one hides the other.
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(models.read_file, home, model)
        from edgefl_client import trust as signers
        from edgefl_client.scorer import Scorer, largest_uncertainty

        extra = [signers.read_public_key(pub).public for pub in trusted]
        archive = reading.result()
    bundle = models.open_model(home, archive, extra, time.time_ns() // 1_000_000)
    most = largest_uncertainty(bundle)
    if refer_above is not None and refer_above > most:
        raise click.UsageError(f"--refer-above is {refer_above}; for this model, allowed are 0 to {most:g}")
    return Scorer(bundle, threads, refer_above), bundle


def _report(value: dict[str, Any], as_json: bool, text: str) -> None:
    """Print one result: JSON, or a sentence for a person."""
    if as_json:
        import json

        click.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))
    else:
        click.echo(text)
