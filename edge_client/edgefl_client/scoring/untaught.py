"""Which classes the values learned on this device never predict, as `train`, `sync`, `status` and `doctor` tell it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edgefl_client.home import Home
from edgefl_client.trust import models
from edgefl_protocol.bundle import Labels
from edgefl_protocol.bundle.archive import read_archive
from edgefl_protocol.bundle.never_predicted import never_predicted
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import BundleError, StorageError

UNTAUGHT = ("never_named", "never_suspicious", "never_predicts")  # the keys


def untaught_facts(labels: Labels, seen: Sequence[bool] | None, site: str | None = None) -> dict[str, Any]:
    """Give the keys that tell of classes never predicted.

    Args:
        labels: those of the bundle.
        seen: per class, whether a picture of this device taught the personal values; None for the bundle's values.
        site: of the bundle's model, where other sites taught it, too (`figures.taught_elsewhere`).
    """
    taught = labels if seen is None else replace(labels, seen=tuple(seen))
    found = never_predicted(taught, learned_here=seen is not None, site=site)
    lost = [name for name, theirs, ours in zip(labels.classes, labels.seen, taught.seen, strict=True)
            if theirs and not ours]  # fmt: skip
    return dict(zip(UNTAUGHT, (lost, list(found.suspicious), found.sentence), strict=True))


def untaught_in_use(home: Home, seen: Sequence[bool]) -> dict[str, Any]:
    """Give the same keys of personal values of the bundle in use; each None where that bundle cannot be read."""
    try:
        data = read_bounded(models.current_file(home), models.MAX_BUNDLE_FILE_BYTES)
        return untaught_facts(Labels.from_bytes(read_archive(data)["labels.json"]), seen)
    except (StorageError, BundleError, KeyError, ValueError):  # `edgefl doctor` says what is wrong with it
        return dict.fromkeys(UNTAUGHT)
