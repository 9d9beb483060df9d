"""`edgefl contribute`: maps of labelled pictures, or features of any, into the outbox; or a view of what would leave.

The work is done by `sharing.share_maps` and `sharing.share_features`; here their results become lines.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_client.commands.options import (
    bundle_of,
    device_of,
    home_option,
    json_option,
    model_option,
    passphrase_option,
    report,
    threads_option,
    trust_option,
)
from edgefl_client.commands.score import formats_option
from edgefl_client.commands.sync import end_synced, sync_text
from edgefl_client.scoring.open_scorer import open_scorer
from edgefl_protocol.sentences import counted

if TYPE_CHECKING:
    from edgefl_client.sharing.sync import Synced
    from edgefl_protocol.errors import EdgeflError


@click.command()
@click.argument("images", nargs=-1, metavar="[IMAGES]...")
@click.option(
    "--labels",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="CSV",
    help="Share attention maps of the pictures in this table. Its columns: image (a file, relative to the table) "
    "and label (a class of the model).",
)
@click.option(
    "--features",
    is_flag=True,
    help="Share features of IMAGES (files, folders, patterns), which need no labels.  [default IMAGES: those last "
    "named to edgefl train or edgefl sync]",
)
@click.option("--dry-run", is_flag=True, help="Send nothing; show exactly what would leave this device.")
@click.option("--send", is_flag=True, help="Send it now, as edgefl sync would.  [default: it waits in the outbox]")
@click.option(
    "--sheets",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Draw into this folder what leaves and, at the same places in a second image, the pictures that stay.",
)
@model_option
@trust_option
@formats_option
@threads_option
@passphrase_option
@json_option
@home_option
@click.pass_context
def contribute(context: click.Context, /, images: tuple[str, ...], features: bool, as_json: bool, **given: Any) -> None:
    """Offer maps or features of your pictures to the federation. They wait in the outbox for edgefl sync, or leave at
    once with --send; pictures never leave.

    With --labels: per class a few attention maps or their mean, in a federation that learns from them. With --features:
    128 numbers a picture, made by the encoder of the round that edgefl sync fetched. A picture that is blurred, badly
    lit, too small or not of skin contributes nothing.
    """
    if features == (given["labels"] is not None):
        raise click.UsageError("give either --labels CSV (attention maps) or --features (features of IMAGES)")
    if given["send"] and given["dry_run"]:
        raise click.UsageError("--dry-run sends nothing: leave out --send, or --dry-run")
    if images and not features:
        raise click.UsageError("with --labels the table names the pictures; leave IMAGES out, or give --features")
    found = _features(context, images, given) if features else _maps(context, given)
    what = _what(found)
    if found["sent_before"] is not None:
        again = f"round {found['sent_before']}; sent again it counts for another round, and tells nobody anything new"
        click.echo(f"This very contribution was sent for {again}.", err=True)
    waiting = f"in the outbox: {what}; edgefl sync sends it"
    sent, problem = _send(context, given) if given["send"] else (None, None)
    if problem is not None:
        waiting = f"not sent, it waits in the outbox: {what}; edgefl advanced outbox lists it and can drop it"
    if sent is not None:
        found |= {"sync": sent.report}
        waiting = f"offered: {what}\n{sync_text(sent.report)}"
    report(found, as_json, _would_leave(what, found) if given["dry_run"] else waiting)
    if found["sheets"] is not None:
        click.echo(f"Drawn: {found['sheets']['leaves']} and, of what stays, {found['sheets']['stays']}.", err=True)
    if found["policy"]["message"] is not None:
        click.echo(f"The policy of this device does not allow this to leave: {found['policy']['message']}.", err=True)
    if problem is not None:
        raise problem
    if sent is not None:
        end_synced(context, sent)


def _send(context: click.Context, given: Mapping[str, Any]) -> "tuple[Synced | None, EdgeflError | None]":
    """Meet the coordinator, once what is offered lies in the outbox; or say why not, and it goes on waiting there."""
    from edgefl_client.sharing.sync import run_sync
    from edgefl_protocol.errors import EdgeflError

    try:
        return run_sync(device_of(context, given["home_dir"], given["passphrase_file"])), None
    except EdgeflError as error:
        return None, error


def _maps(context: click.Context, given: Mapping[str, Any]) -> dict[str, Any]:
    from edgefl_client.scoring.pictures import PictureReader
    from edgefl_client.sharing.share_maps import contribute_maps

    device = device_of(context, given["home_dir"], given["passphrase_file"])
    scorer, vouched = open_scorer(device.home, given["model"], given["trusted"], given["threads"], None)
    with PictureReader(given["formats"]) as reader:
        found = contribute_maps(
            device, given["labels"], reader, scorer, vouched, dry_run=given["dry_run"], sheets=given["sheets"]
        )
    _tell_left_out(found["left_out"], "map")
    return found


def _features(context: click.Context, images: tuple[str, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    from edgefl_client.scoring.pictures import PictureReader
    from edgefl_client.sharing.share_features import FeatureRequest, contribute_features

    device = device_of(context, given["home_dir"], given["passphrase_file"])
    vouched = bundle_of(device.home, given["model"], given["trusted"])
    asked = FeatureRequest(images=images, threads=given["threads"], dry_run=given["dry_run"], sheets=given["sheets"])
    with PictureReader(given["formats"]) as reader:
        found = contribute_features(device, asked, reader, vouched)
    _tell_left_out(found["left_out"], "feature")
    return found


def _tell_left_out(left_out: Mapping[str, Any], what: str) -> None:
    from edgefl_protocol.pictures.referral import REASON_WORDS

    if left_out["images"]:
        words: Mapping[str, str] = REASON_WORDS
        why = "; ".join(f"{words.get(reason, reason)}: {number}" for reason, number in left_out["reasons"].items())
        noun = "picture gives" if left_out["images"] == 1 else "pictures give"
        click.echo(f"{left_out['images']} {noun} no {what} ({why}).", err=True)


def _what(found: Mapping[str, Any]) -> str:
    if "maps" in found:
        pictures = Counter(one["label"] for one in found["made_of"])
        mean = found["sent_maps"] == "mean"
        maps = ", ".join(
            f"{number} of {name}" + (": the picture's own map" if mean and number == 1 else "")
            for name, number in pictures.items()
        )
        kind = "of every class the mean of attention maps" if mean else "attention maps"
        return (
            f"{found['bytes']} bytes: {kind} ({maps}) and a digest of the model's values; no picture and no file name"
        )
    return (
        f"{found['bytes']} bytes: features of {counted(found['features'], 'picture')}, 128 numbers each, in an "
        "order that says nothing about the pictures, and a digest of what this device remembers; no picture and no "
        "file name"
    )


def _would_leave(what: str, found: dict[str, Any]) -> str:
    from edgefl_client.sharing.release import described_text

    length = (
        f"length of a feature: {found['length']['min']:g} to {found['length']['max']:g}\n" if "length" in found else ""
    )
    return f"would leave: {what}\n{length}{described_text(found)}"
