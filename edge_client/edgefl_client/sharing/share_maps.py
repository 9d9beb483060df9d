"""`edgefl contribute --labels`: from a table of labelled pictures to rollout maps in the outbox.

Nothing enters the outbox that the owner's policy does not allow. A dry run keeps nothing and makes the very bytes that
a real one would keep: same pictures, same values, same SHA-256.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgefl_client.learning.picture_rows import LabelsError, read_labels
from edgefl_client.learning.round_plan import agreed
from edgefl_client.scoring.pictures import PictureReader
from edgefl_client.scoring.scorer import Scorer
from edgefl_client.sharing.enrolled_device import Device
from edgefl_client.sharing.release import Release, describe
from edgefl_client.trust.vouched_bundle import VouchedBundle
from edgefl_exchange.errors import ExchangeError
from edgefl_exchange.membership import load_membership, load_task
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.messages.requests import TaskReply
from edgefl_protocol.payload import Payload
from edgefl_protocol.pictures.imaging import MAX_FILE_BYTES, REDUCE
from edgefl_protocol.pictures.referral import REASON_WORDS
from edgefl_protocol.pictures.score import RolloutMap, Score
from edgefl_protocol.rules.maps import MAX_MAPS, SentMaps, most_certain, reply_maps, reply_name, sent_maps_in
from edgefl_protocol.sentences import counted, of_file


@dataclass(frozen=True)
class _Work:
    """Hold what scores the pictures of a table."""

    scorer: Scorer
    reader: PictureReader
    classes: Sequence[str]
    labels: Path


@dataclass(frozen=True)
class _Found:
    """Hold the scored pictures whose maps may travel."""

    paths: Sequence[Path]  # their files
    vacuity: Sequence[float]  # of each
    maps: Sequence[RolloutMap]  # rollout map of each
    chosen: Mapping[int, Sequence[int]]  # positions of those whose maps do travel, by class index
    left_out: Mapping[str, Any]  # how many pictures the gate left out, and its reasons


def contribute_maps(
    device: Device,
    labels: Path,
    reader: PictureReader,
    scorer: Scorer,
    vouched: VouchedBundle,
    *,
    dry_run: bool,
    sheets: Path | None = None,
) -> dict[str, Any]:
    """Score labelled pictures here and put the chosen rollout maps into the outbox.

    A picture that the gate would refer gives no map: what is blurred, badly lit, too small or no skin teaches nobody.

    Args:
        labels: CSV with the columns image and label.
        dry_run: keep nothing; only say what would leave.
        sheets: folder for the two sheets that show it (`sheets`); None for none.

    Raises:
        LabelsError: the table or the model cannot give maps, or no picture passes the gate.
        LearningError: the model is of another form than the federation's, so its maps mean something else.
        PolicyError: the owner has not allowed that maps leave, or not so much; nothing is kept.
        BundleError: too few signers vouch for the model any more; nothing is kept.
        ImageError: a picture cannot be used; nothing is kept.
    """
    task, bundle = _task(device, required=not dry_run), vouched.bundle
    release = Release.begin(device, "maps", dry_run=dry_run)
    if task is not None and bundle.training is not None and bundle.training.kind == task.method:
        agreed(bundle, task.settings, task.backbone, complete=task.train_rounds > 0)  # a bundle that tells its form
    work = _Work(scorer, reader, _classes(bundle, task), labels)
    found = _choose(work, MAX_MAPS if task is None else min(MAX_MAPS, task.maps_per_class))
    sent = sent_maps_in({} if task is None else task.settings)
    maps = reply_maps(found.maps, found.chosen, sent)
    payload = Payload(maps, {"site_sha256": scorer.model.state_sha256})
    _check_fits(payload, task)
    vouched.check()
    content = payload.to_bytes()
    described = describe(content)
    return {
        "dry_run": dry_run,
        "policy": release.judge(described),
        "images": len(found.paths),
        "left_out": found.left_out,
        "sent_maps": sent,
        "maps": {work.classes[label]: len(maps[reply_name(label)]) for label in found.chosen},
        **described,
        "made_of": _made_of(found, work.classes, sent),
        "sheets": None if sheets is None else _draw(work, found, payload, described, sheets),
        "sent_before": release.sent_before(content),
        "idem": release.keep(content),
    }


def _classes(bundle: Bundle, task: TaskReply | None) -> tuple[str, ...]:
    """Name the classes in the order in which the reply numbers them."""
    classes = bundle.labels.classes if task is None else task.classes
    if set(classes) != set(bundle.labels.classes):
        raise LabelsError(
            f"the model has the classes {', '.join(bundle.labels.classes)}, but the federation has "
            f"{', '.join(classes)}: fetch the federation's bundle with edgefl sync",
            code="other_classes",
        )
    return classes


def _task(device: Device, *, required: bool) -> TaskReply | None:
    """Read the task as last fetched, of a method that takes maps; None where it is neither here nor required."""
    if required:
        load_membership(device.home.member)
    task = load_task(device.home.member)
    if task is None and required:
        raise ExchangeError("the federation's task is not known here yet; fetch it with edgefl sync", "no_task")
    if task is not None and not task.takes_maps:
        raise LabelsError(
            f"the federation learns {task.method}, which uses no maps: take part with edgefl sync"
            + (", or give features with edgefl contribute --features" if task.takes_features else ""),
            "no_maps",
        )
    return task


def _choose(work: _Work, most: int) -> _Found:
    """Score the pictures and choose of each class those whose maps travel, at most so many."""
    scored, labels, paths = list[tuple[float, RolloutMap]](), list[int](), list[Path]()
    reasons: Counter[str] = Counter()
    rows = read_labels(work.labels, work.classes)
    for row in rows:
        try:
            photo = work.reader.decode(read_bounded(row.path, MAX_FILE_BYTES, REDUCE))
            prepared = work.scorer.prepare(photo, as_it_is=True)
            reasons.update(prepared.judged.faults)
            if not prepared.judged.faults:
                scored.append(_vacuity_and_map(work.scorer.score_batch([prepared], as_it_is=True)[0]))
                labels.append(row.label)
                paths.append(row.path)
        except LabelsError:
            raise
        except EdgeflError as error:
            raise type(error)(of_file(row.path, error), error.code) from error
    told = {name: reasons[name] for name in sorted(reasons)}
    if not scored:
        said = "; ".join(f"{REASON_WORDS[name]}: {number}" for name, number in told.items())
        raise LabelsError(
            f"none of {counted(len(rows), 'picture')} passes the gate ({said}), so no map can travel", "gate"
        )
    left_out = {"images": len(rows) - len(scored), "reasons": told}
    vacuity, maps = zip(*scored, strict=True)
    return _Found(paths, vacuity, maps, most_certain(np.array(vacuity), np.array(labels), most), left_out)


def _vacuity_and_map(score: Score) -> tuple[float, RolloutMap]:
    if score.map is None or score.vacuity is None:
        raise LabelsError(
            "this model does not give both a rollout map and a vacuity, so there is nothing to contribute", "no_maps"
        )
    return score.vacuity, score.map


def _check_fits(payload: Payload, task: TaskReply | None) -> None:
    if task is None:
        return
    for name, array in payload.arrays.items():
        if array.shape[1] != task.tokens:
            raise LabelsError(
                f"{name} has {array.shape[1]} patches a map, but the federation's task has {task.tokens}: fetch the "
                "federation's bundle with edgefl sync",
                code="other_tokens",
            )
    size = payload.encoded_bytes()
    if size > task.max_reply_bytes:
        raise LabelsError(f"the maps take {size} bytes, but the federation allows {task.max_reply_bytes}", "too_large")


def _made_of(found: _Found, classes: Sequence[str], sent: SentMaps) -> list[dict[str, Any]]:
    """Tell the owner which pictures each map comes from: several where their mean is sent. None of it leaves."""
    return [
        {
            "array": reply_name(label),
            "row": row if sent == "each" else 0,
            "label": classes[label],
            "image": str(found.paths[position]),
            "vacuity": found.vacuity[position],
        }
        for label, positions in found.chosen.items()
        for row, position in enumerate(positions)
    ]


def _draw(work: _Work, found: _Found, payload: Payload, described: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Draw both sheets; the chosen pictures are read once more, so that never all of them lie in memory."""
    from edgefl_client.sharing.sheets import SharedMap, draw_maps

    shared = []
    for label, positions in found.chosen.items():
        for row, position in enumerate(positions):
            path = found.paths[position]
            prepared = work.scorer.prepare(work.reader.decode(read_bounded(path, MAX_FILE_BYTES, REDUCE)))
            name = reply_name(label)
            sent = min(row, len(payload.arrays[name]) - 1)  # of a mean the only one
            shared.append(
                SharedMap(
                    array=name,
                    row=sent,
                    label=work.classes[label],
                    values=payload.arrays[name][sent],
                    name=path.name,
                    vacuity=found.vacuity[position],
                    pixels=prepared.pixels,
                )
            )
    return draw_maps(folder, shared, described["sha256"], described["bytes"])
