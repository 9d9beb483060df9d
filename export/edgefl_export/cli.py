"""`edgefl-export`: keys, bundles, verification. Results on stdout, everything else on stderr.

Exit status: 0 done, 1 failed, 2 usage or missing extra, 3 refused (signature, trust, policy). A known failure is one
sentence, never a traceback, and nothing that reads like success is printed before everything succeeded.
"""

import hashlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_protocol.distribution import VERSION, VERSION_LINE, needs_extra
from edgefl_protocol.errors import USAGE_CODES, BundleError, EdgeflError, KeyMaterialError
from edgefl_protocol.sentences import out_of_use

if TYPE_CHECKING:
    from edgefl_export.int8.calibration import Calibration
    from edgefl_export.parity.step_parity import StepParity
    from edgefl_protocol.bundle import BundleFields
    from edgefl_protocol.pictures.class_info import ClassInfo
    from edgefl_trainer.engine.models import FinishedRun

EXPORT_PACKAGES = ("torch", "timm", "onnx", "onnxscript", "onnxruntime")
WORD = r"[a-z0-9-]{1,32}"
DAY_MS = 86_400_000


class _Commands(click.Group):
    """Turns known errors into one sentence and the exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EdgeflError as error:
            click.echo(f"edgefl-export: {error}", err=True)
            ctx.exit(3 if isinstance(error, BundleError | KeyMaterialError) else 2 if error.code in USAGE_CODES else 1)

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as error:
            click.echo(f"edgefl-export: {out_of_use(error)}", err=True)
            sys.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="edgefl-export", message=VERSION_LINE)
def main() -> None:
    """Turn finished runs into signed bundles for devices."""


def _needs_export() -> None:
    missing = [name for name in EXPORT_PACKAGES if find_spec(name) is None]
    if missing:
        click.echo(f"edgefl-export: this command needs {needs_extra('export')}", err=True)
        click.get_current_context().exit(2)


def _check_run(run: Path, site: str) -> None:
    """Refuse, by a `RunError`, a run without a model of the site: at once, for PyTorch takes seconds to import."""
    from edgefl_trainer.engine.folder import check_finished, check_model

    check_finished(run)
    check_model(run, site)


def _word(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    import re

    if value is not None and not re.fullmatch(WORD, value):
        raise click.BadParameter(f"{value!r} is not 1 to 32 of a-z, 0-9 and -")
    return value


_PASSPHRASE = click.option(
    "--passphrase-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File with the passphrase of the key, readable by you alone; or give the passphrase itself in "
    "EDGEFL_KEY_PASSPHRASE.  [default: the key is not encrypted]",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


@main.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@_PASSPHRASE
def keygen(folder: Path, passphrase_file: Path | None) -> None:
    """Make the key pair that signs models for devices.

    It writes DIR/signing.key (PKCS#8, mode 0600), which stays with you, and DIR/signing.pub. Devices trust bundles by
    the public key: `edgefl trust add DIR/signing.pub`.
    """
    from edgefl_export import key_store
    from edgefl_protocol.durable import read_passphrase

    passphrase = read_passphrase(passphrase_file)
    key = key_store.create_key(folder, passphrase)
    if passphrase is None:
        click.echo(
            f"edgefl-export: {folder / key_store.PRIVATE_NAME} is not encrypted; protect it like a password, or "
            "make an encrypted key with --passphrase-file",
            err=True,
        )
    click.echo(key.key_id)


@main.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--site", required=True, metavar="NAME", help="Site whose model goes into the bundle.")
@click.option(
    "--sign",
    "signers",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="KEY|DIR",
    help="Signing key, or the folder that keygen made; repeatable for several signatures.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.edgefl",
    help="File for the bundle.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "int8"]),
    default="fp32",
    show_default=True,
    help="Precision of the graph. int8 is smaller and faster; it needs the run's images and is checked against fp32.",
)
@click.option(
    "--float-layers", type=click.IntRange(0), metavar="N", help="Layers of int8 left in float.  [default: the fewest]"
)
@click.option(
    "--graph",
    "form",
    type=click.Choice(["fused", "plain"]),
    default="fused",
    show_default=True,
    help="Form of the attention in the graph: fused uses the operator Attention; plain is for runtimes without it.",
)
@click.option(
    "--version",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Version of the bundle: higher than all that were published of its line.",
)
@click.option(
    "--with-training",
    is_flag=True,
    help="Also export the training step, so that a device can learn. Devices can learn some methods only; for any "
    "other the command fails and lists them.",
)
@click.option(
    "--class-info",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.toml",
    help="What the classes mean, and which are malignant: docs/reference/scores.md. A class that nobody describes asks "
    "for a look.  [default: what is known of ISIC's and HAM10000's labels]",
)
@click.option(
    "--line",
    default="main",
    show_default=True,
    callback=_word,
    metavar="NAME",
    help="Line of the bundle: devices replace a bundle by a later one of its line.",
)
@click.option("--federation", callback=_word, metavar="NAME", help="Federation of the bundle.  [default: none]")
@click.option("--expires-days", type=click.IntRange(1), metavar="DAYS", help="Time it is valid.  [default: no end]")
@click.option(
    "--created",
    type=click.IntRange(0),
    envvar="SOURCE_DATE_EPOCH",
    metavar="SECONDS",
    help="Time of publication since 1970, also read from SOURCE_DATE_EPOCH; fix it to get the same bytes again.  "
    "[default: now]",
)
@click.option(
    "--force", is_flag=True, help="Overwrite FILE, and allow another bundle of this line and version in its folder."
)
@click.option(
    "--took-no-part",
    is_flag=True,
    help="Allow a site that took part in no round, of a run or a live federation; the card says so.",
)
@_PASSPHRASE
@_JSON
def bundle(run: Path, site: str, signers: tuple[Path, ...], output: Path, as_json: bool, **options: Any) -> None:
    """Make a signed model for devices from one site of RUN. Its graph is checked against the trainer first."""
    _needs_export()
    _check_run(run, site)
    from edgefl_export import key_store
    from edgefl_export.bundles.assemble import build_members, site_model
    from edgefl_export.bundles.bundle_text import bundle_text, compared_on, model_facts
    from edgefl_export.bundles.destination import check_alone, check_new
    from edgefl_export.bundles.questions import OwnQuestions, own_questions
    from edgefl_export.bundles.shown_map import measured_map
    from edgefl_export.errors import ExportError
    from edgefl_protocol.bundle import build_bundle
    from edgefl_protocol.durable import read_passphrase, write_atomic
    from edgefl_trainer.engine.models import open_run

    if options["float_layers"] is not None and options["precision"] != "int8":
        raise click.UsageError("--float-layers needs --precision int8")
    if not options["force"]:
        check_new(output)
    passphrase = read_passphrase(options["passphrase_file"])
    keys = list({key.key_id: key for key in (key_store.open_key(one, passphrase) for one in signers)}.values())
    finished = open_run(run)
    info = _class_info(options["class_info"], finished)
    model = site_model(finished, site, info, took_no_part=options["took_no_part"])
    if not options["force"]:
        check_alone(output, options["federation"], options["line"], model.task, options["version"])
    int8 = _int8_pictures(finished, site, options["float_layers"]) if options["precision"] == "int8" else None
    asked = OwnQuestions() if model.questions is None else own_questions(finished, site, model.predictor, _say)
    shown = measured_map(finished, site, model.predictor, _say)
    _say(f"tracing {model.card.method} of {site} and comparing it with the trainer on 64 {compared_on(model)} …")
    members = build_members(
        model, asked.images, asked.questions, form=options["form"], int8=int8, shown=shown, tried=asked.tried,
        taught=asked.taught, report=_say,
    )  # fmt: skip
    files, steps = _with_training(finished, site, members.files) if options["with_training"] else (members.files, ())
    fields = _fields(options, model.task, members.min_runtime)
    try:
        data = build_bundle(files, fields, keys)
    except BundleError as error:  # our own members were refused: a failure here, not a matter of trust
        raise ExportError(f"the bundle would not load on a device: {error}") from error
    write_atomic(output, data)
    facts = {
        "file": str(output),
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "version": fields.version,
        "signers": [key.key_id for key in keys],
        **model_facts(model, members, shown, steps),
    }
    click.echo(json.dumps(facts) if as_json else bundle_text(facts))


def _fields(options: dict[str, Any], task: str, min_runtime: str) -> "BundleFields":
    """What the manifest says besides its members."""
    from edgefl_protocol.bundle import BundleFields

    created_ms = int(time.time() * 1000) if options["created"] is None else options["created"] * 1000
    days = options["expires_days"]
    return BundleFields(
        federation=options["federation"],
        line=options["line"],
        task=task,
        version=options["version"],
        created_ms=created_ms,
        expires_ms=None if days is None else created_ms + days * DAY_MS,
        min_runtime=min_runtime,
    )


def _class_info(file: Path | None, finished: "FinishedRun") -> "dict[str, ClassInfo]":
    """Return what the file says of classes, and tell where it calls harmless what the product's table does not."""
    from edgefl_trainer.data.class_info import called_harmless, read_class_info

    given = {} if file is None else read_class_info(file, finished.classes)
    for label in called_harmless(given):
        click.echo(f"edgefl-export: {file} calls {label} benign; the product's own table does not", err=True)
    return given


def _say(line: str) -> None:
    click.echo(line, err=True)


def _int8_pictures(finished: "FinishedRun", site: str, float_layers: int | None) -> "Calibration":
    """Return the run's pictures, read before minutes of tracing."""
    from edgefl_export.int8.calibration import calibration_of

    _say("reading the run's tune and validation images …")
    return replace(calibration_of(finished, site), float_layers=float_layers)


def _with_training(
    finished: "FinishedRun", site: str, files: Mapping[str, bytes]
) -> "tuple[Mapping[str, bytes], tuple[StepParity, ...]]":
    """Return the members and those of the training step, and the figures of its gate."""
    from edgefl_export.bundles.training import build_training
    from edgefl_protocol.tensors import read_tensors

    click.echo("tracing the training step and comparing ten steps with the trainer: this takes minutes …", err=True)
    data = files["weights.safetensors"]
    training = build_training(finished, site, read_tensors(data, max_bytes=len(data))[0])
    return {**files, **training.files}, training.parity


@main.command()
@click.argument("file", metavar="FILE.edgefl", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--trust",
    "trusted",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PUB",
    help="Public key of a signer, such as signing.pub; repeatable.",
)
@_JSON
def verify(file: Path, trusted: tuple[Path, ...], as_json: bool) -> None:
    """Check the bundle FILE as a device does. It checks signature, validity, members and graph; status 3: refused."""
    from edgefl_protocol.bundle import load_bundle
    from edgefl_protocol.bundle.archive import MAX_ARCHIVE_BYTES
    from edgefl_protocol.durable import read_bounded
    from edgefl_protocol.envelopes.key_files import read_public_key

    keys = [read_public_key(place).public for place in trusted]
    found = load_bundle(read_bounded(file, MAX_ARCHIVE_BYTES), keys, int(time.time() * 1000))
    facts = {
        "verified": True,
        "id": found.id,
        "version": found.manifest.version,
        "sha256": found.sha256,
        "signers": list(found.signers),
    }
    text = f"verified {found.manifest.name} version {found.manifest.version}, signed by {', '.join(found.signers)}"
    click.echo(json.dumps(facts) if as_json else text)


@main.command()
@click.argument("file", metavar="FILE.edgefl", type=click.Path(path_type=Path, dir_okay=False))
@_JSON
def inspect(file: Path, as_json: bool) -> None:
    """Show what the bundle FILE claims to be. Nothing shown is checked; see `verify`."""
    from edgefl_export.bundles.bundle_text import inspect_text
    from edgefl_protocol.bundle import unverified_manifest
    from edgefl_protocol.bundle.archive import MAX_ARCHIVE_BYTES
    from edgefl_protocol.durable import read_bounded

    data = read_bounded(file, MAX_ARCHIVE_BYTES)
    manifest, signers = unverified_manifest(data)
    facts = {
        "verified": False,
        "federation": manifest.federation,
        "line": manifest.line,
        "task": manifest.task,
        "version": manifest.version,
        "created": manifest.created_ms,
        "expires": manifest.expires_ms,
        "min_client": manifest.min_client,
        "min_runtime": manifest.min_runtime,
        "sha256": hashlib.sha256(data).hexdigest(),
        "signers": list(signers),
        "members": [{"name": m.name, "size": m.size, "sha256": m.sha256} for m in manifest.members],
        **_unverified_card(data),
    }
    click.echo(json.dumps(facts) if as_json else inspect_text(facts))


def _unverified_card(data: bytes) -> dict[str, Any]:
    """Return labels, card and words of questions as the file states them, None where they are not in their form."""
    from edgefl_protocol.bundle.archive import read_archive
    from edgefl_protocol.strict_json import parse_json

    members = read_archive(data)
    found: dict[str, Any] = {}
    for name in ("labels", "card", "questions"):
        try:
            found[name] = parse_json(members[f"{name}.json"])
        except (KeyError, ValueError):
            found[name] = None
    return found
