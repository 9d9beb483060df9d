"""`edgefl contribute --features`: from unlabelled pictures to features in the outbox, or to a view of what leaves.

A reply of features alone: they join the bank that the others receive, and weigh nothing in the average (`n_train`
is 0). What makes them is the encoder of the round, so the round's broadcast must be here. Nothing enters the outbox
that the owner's policy does not allow, and a dry run makes the very bytes that a real one would keep. Source:
docs/methods.md, FedCLF; docs/decisions/0033.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgefl_client.home import Home
from edgefl_client.learning.contrast_session import FeatureEncoder
from edgefl_client.learning.learner_table import learner_of
from edgefl_client.learning.live_round import counted_state
from edgefl_client.learning.own_pictures import remembered_table
from edgefl_client.learning.picture_rows import read_images
from edgefl_client.learning.round_plan import agreed
from edgefl_client.learning.session import plan_of
from edgefl_client.runtime import processors
from edgefl_client.scoring.folder_files import expand, pictures_below
from edgefl_client.scoring.pictures import PictureReader
from edgefl_client.sharing.broadcasts import broadcast_file, read_broadcast
from edgefl_client.sharing.enrolled_device import Device
from edgefl_client.sharing.feature_encoding import (
    Encoded,
    FeaturesError,
    RandomSource,
    encode_pictures,
    picture_of,
)
from edgefl_client.sharing.release import Release, describe
from edgefl_client.trust.vouched_bundle import VouchedBundle
from edgefl_exchange.errors import ExchangeError
from edgefl_exchange.membership import Membership, load_membership, load_task
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.model_card import referral_rules
from edgefl_protocol.errors import BundleError, PayloadError, StorageError
from edgefl_protocol.messages.requests import TaskReply
from edgefl_protocol.payload import Payload, digest
from edgefl_protocol.rules.feature_rows import SENT, sent


@dataclass(frozen=True, kw_only=True)
class FeatureRequest:
    """What the owner asks for."""

    images: Sequence[str] = ()  # files, folders and patterns; empty for those that learning was given last
    threads: int | None = None  # of the encoder; None for the processors this process may use
    dry_run: bool = False  # keep nothing; only say what would leave
    sheets: Path | None = None  # folder for the two sheets that show it (`sheets`); None for none


def contribute_features(
    device: Device, asked: FeatureRequest, reader: PictureReader, vouched: VouchedBundle
) -> dict[str, Any]:
    """Encode pictures here and put their features into the outbox.

    Raises:
        FeaturesError: bundle, federation, round or pictures give no features; nothing is kept.
        PolicyError: the owner has not allowed that features leave, or not so much; nothing is kept.
        BundleError: the bundle gives none, or too few signers vouch for it any more; nothing is kept.
    """
    home, bundle = device.home, vouched.bundle
    membership, task = load_membership(home.member), load_task(home.member)
    if task is None:
        raise ExchangeError("the federation's task is not known here yet; fetch it with edgefl sync", "no_task")
    encoder = _encoder(bundle, membership, task, asked.threads or processors())
    release = Release.begin(device, "features", dry_run=asked.dry_run)
    own = counted_state(home, bundle.sha256, membership.federation)
    network = encoder.slow(_broadcast(home, membership, task).arrays, own)
    draws = RandomSource(seed=task.seed, site=membership.name, round=task.round)
    files = _files(home, asked.images, reader)
    unlit = referral_rules(bundle.labels, bundle.card).unlit_above
    found = encode_pictures(encoder, network, bundle.preprocess, files, reader, draws, unlit)
    payload = Payload(sent(found.rows), {"n_train": 0, "site_sha256": digest(dict(own))})
    content = payload.to_bytes()
    if len(content) > task.max_reply_bytes:
        raise FeaturesError(
            f"the features take {len(content)} bytes, and {task.max_reply_bytes} are allowed: name fewer pictures",
            "too_large",
        )
    vouched.check()
    described = describe(content)
    return {
        "dry_run": asked.dry_run,
        "policy": release.judge(described),
        "round": task.round,
        "images": len(files),
        "left_out": {"images": found.looked_at - len(found.paths), "reasons": dict(found.left_out)},
        "features": len(found.paths),
        "length": _lengths(found),
        **described,
        "made_of": [{"array": SENT, "row": row, "image": str(path)} for row, path in enumerate(found.paths)],
        "sheets": None if asked.sheets is None else _draw(found, bundle, reader, described, asked.sheets),
        "sent_before": release.sent_before(content),
        "idem": release.keep(content),
    }


def _encoder(bundle: Bundle, membership: Membership, task: TaskReply, threads: int) -> FeatureEncoder:
    """Check that the round takes features of the bundle's encoder, and load it as the federation learns."""
    if task.travels and not task.takes_features:  # where the coordinator does not tell, the bundle decides
        raise FeaturesError(f"the federation learns {task.method}, which uses no features: take part with edgefl sync")
    if task.state == "done" or task.phase == "final":
        raise FeaturesError("the federation's rounds are over, and its last exchange uses no features", "rounds_over")
    wanted = (membership.federation, task.line, task.task)
    if bundle.manifest.line_key != wanted:
        raise BundleError(
            f"the model is {bundle.manifest.name}, but the round is for {'/'.join(wanted)}: fetch the federation's "
            "model with edgefl sync",
            "other_line",
        )
    own = bundle.training
    if own is None:
        raise FeaturesError(
            "this bundle has no encoder (encode.onnx), so it gives no features; ask the operator to publish a "
            "bundle made with edgefl-export bundle --with-training, and fetch it with edgefl sync"
        )
    encoder_of = learner_of(bundle).encoder
    if encoder_of is None or own.kind != task.method:
        raise FeaturesError(
            f"this bundle learns {own.kind}, but the federation learns {task.method}, so the bundle's features do "
            "not fit: fetch another with edgefl sync"
        )
    following = agreed(bundle, task.settings, task.backbone, complete=task.train_rounds > 0)
    return encoder_of(following, plan_of(following), threads)


def _broadcast(home: Home, membership: Membership, task: TaskReply) -> Payload:
    """Read the round's broadcast, which holds the encoder's values."""
    path = broadcast_file(home, membership, task.round)
    if task.round < 1 or not path.exists():
        raise FeaturesError(
            "the round's broadcast, which holds the encoder's values, has not been fetched: fetch it with edgefl "
            "sync --no-learn" + ("; no round has begun yet" if task.round < 1 else ""),
            "no_broadcast",
        )
    try:
        return read_broadcast(path)
    except PayloadError as error:
        raise StorageError(f"{path} is damaged; remove it and run edgefl sync --no-learn", "damaged") from error


def _files(home: Home, given: Sequence[str], reader: PictureReader) -> list[Path]:
    """List the pictures by name; where none are named, those of the table or folder that was named last."""
    if given:
        files = [Path(name) for name in expand(given, reader.suffixes)]
    else:
        table = remembered_table(home)
        if table is None:
            raise FeaturesError(
                "no pictures were named; name them: edgefl contribute --features IMAGES...", "no_pictures"
            )
        if table.file.is_dir():
            files = [Path(name) for name in pictures_below(table.file, reader.suffixes)]
        else:
            files = [row.path for row in read_images(table.file)]
    return sorted(set(files))


def _lengths(found: Encoded) -> dict[str, float]:
    length = np.linalg.norm(found.rows.astype(np.float64), axis=1)
    return {"min": round(float(length.min()), 6), "max": round(float(length.max()), 6)}


def _draw(
    found: Encoded, bundle: Bundle, reader: PictureReader, described: dict[str, Any], folder: Path
) -> dict[str, str]:
    """Draw both sheets; pictures are read once more, so that never all of them lie in memory."""
    from edgefl_client.sharing.sheets import MOST_ROWS, draw_features

    pictures = (picture_of(path, bundle.preprocess, reader) for path in found.paths[:MOST_ROWS])
    names = [path.name for path in found.paths[:MOST_ROWS]]
    return draw_features(folder, found.rows, names, pictures, described["sha256"], described["bytes"])
