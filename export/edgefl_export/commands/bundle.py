"""`edgefl-export bundle`: one site of a finished run becomes a signed bundle, once its gates hold."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_export.commands.options import JSON, PASSPHRASE
from edgefl_protocol.distribution import needs_extra
from edgefl_protocol.errors import BundleError

if TYPE_CHECKING:
    from edgefl_export.int8.calibration import Calibration
    from edgefl_export.parity.step_parity import StepParity
    from edgefl_protocol.bundle import BundleFields
    from edgefl_protocol.pictures.class_info import ClassInfo
    from edgefl_trainer.engine.models import FinishedRun

EXPORT_PACKAGES = ("torch", "timm", "onnx", "onnxscript", "onnxruntime")
WORD = r"[a-z0-9-]{1,32}"
DAY_MS = 86_400_000
MOST_DAYS = 36_500  # a hundred years
LAST_S = 253_402_300_799  # the end of the year 9999


def _word(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    import re

    if value is not None and not re.fullmatch(WORD, value):
        raise click.BadParameter(f"{value!r} is not 1 to 32 of a-z, 0-9 and -")
    return value


@click.command()
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
    type=click.IntRange(1, 2**31),
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
@click.option(
    "--expires-days", type=click.IntRange(1, MOST_DAYS), metavar="DAYS", help="Time it is valid.  [default: no end]"
)
@click.option(
    "--created",
    type=click.IntRange(0, LAST_S),
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
@PASSPHRASE
@JSON
def bundle(run: Path, site: str, signers: tuple[Path, ...], output: Path, as_json: bool, **options: Any) -> None:
    """Make a signed model for devices from one site of RUN. Its graph is checked against the trainer first."""
    _needs_export()
    _check_run(run, site)
    from edgefl_export import key_store
    from edgefl_export.bundles.assemble import build_members, site_model
    from edgefl_export.bundles.bundle_text import bundle_text, compared_on, model_facts
    from edgefl_export.bundles.destination import check_alone, check_folder, check_new
    from edgefl_export.bundles.questions import OwnQuestions, own_questions
    from edgefl_export.bundles.shown_map import measured_map
    from edgefl_export.errors import ExportError
    from edgefl_protocol.bundle import build_bundle
    from edgefl_protocol.durable import read_passphrase, write_atomic
    from edgefl_trainer.engine.models import open_run

    if options["float_layers"] is not None and options["precision"] != "int8":
        raise click.UsageError("--float-layers needs --precision int8")
    check_folder(output)
    if not options["force"]:
        check_new(output)
    passphrase = read_passphrase(options["passphrase_file"])
    keys = list({key.key_id: key for key in (key_store.open_key(one, passphrase) for one in signers)}.values())
    finished = open_run(run)
    _tell_older(finished)
    info = _class_info(options["class_info"], finished)
    model = site_model(finished, site, info, took_no_part=options["took_no_part"])
    if not options["force"]:
        check_alone(output, options["federation"], options["line"], model.task, options["version"])
    fields = _fields(options, model.task)
    _tell_out_of_time(fields)
    int8 = _int8_pictures(finished, site, options["float_layers"]) if options["precision"] == "int8" else None
    asked = OwnQuestions() if model.questions is None else own_questions(finished, site, model.predictor, _say)
    shown = measured_map(finished, site, model.predictor, _say)
    _say(f"tracing {model.card.method} of {site} and comparing it with the trainer on 64 {compared_on(model)} …")
    members = build_members(
        model, asked.images, asked.questions, form=options["form"], int8=int8, shown=shown, tried=asked.tried,
        not_refused=asked.not_refused, taught=asked.taught, report=_say,
    )  # fmt: skip
    files, steps = _with_training(finished, site, members.files) if options["with_training"] else (members.files, ())
    try:
        data = build_bundle(files, replace(fields, min_runtime=members.min_runtime), keys)
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


def _tell_older(run: "FinishedRun") -> None:
    """Warn of a run that does not say what its pictures were like: its models may see sharper ones on a device."""
    if "taught_pictures" not in run.summary:
        _say(
            "warning: this run is from before runs noted what their pictures are like. If these had no more pixels "
            "than the network reads, a device shows the model sharper photographs than it learned from: run it again"
        )


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


def _fields(options: dict[str, Any], task: str) -> "BundleFields":
    """What the manifest says besides its members, with the oldest runtime of any bundle."""
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
    )


def _tell_out_of_time(fields: "BundleFields") -> None:
    """Warn where no device takes a bundle today: made anew for the same bytes, it may well be out of time."""
    from edgefl_protocol.records.record_form import MAX_AHEAD_MS
    from edgefl_protocol.sentences import expiry, span

    now_ms = int(time.time() * 1000)
    if fields.expires_ms is not None and fields.expires_ms <= now_ms:
        told = expiry(fields.expires_ms - now_ms)
    elif fields.created_ms > now_ms + MAX_AHEAD_MS:
        told = f"is dated {span(fields.created_ms - now_ms)} ahead of this clock"
    else:
        return
    _say(f"warning: the bundle {told}, so a device refuses it: look at --created and SOURCE_DATE_EPOCH")


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
