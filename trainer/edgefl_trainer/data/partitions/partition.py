"""A partition: which site learns from, tunes on and reports on which image; made once and shared as a file.

Guarantees: no image is listed twice; a changed file, or one of another format, is refused. Source: docs/methods.md 8,
docs/design.md 5 (Rows, partition).
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl_protocol.durable import read_bounded
from edgefl_trainer.data.errors import DataError, PartitionError
from edgefl_trainer.data.partitions.plan import PartitionPlan
from edgefl_trainer.data.rows import Row
from edgefl_trainer.data.specs import check_site_name

FORMAT = 1
PARTITION_FILE = "partition.json"  # its name in a run directory
MAX_PARTITION_BYTES = 256 << 20
ROW_KINDS = ("train", "tune", "val", "test")

DealtImage = tuple[str, str | None]  # image, class
Content = Mapping[str, Mapping[str, Sequence[DealtImage]]]  # site → kind → its images


@dataclass(frozen=True)
class Partition:
    """Who has which image."""

    plan: PartitionPlan  # how it was made
    seed: int  # of every choice of rows; a run that uses the partition makes its own choices of rows by it too
    classes: tuple[str, ...]  # classes of the data that were dealt, sorted
    held_out: tuple[str, ...]  # sites that never train, in name order
    sites: Content  # site → kind of `ROW_KINDS` → (image, class)

    @property
    def sha256(self) -> str:
        """The `partition_sha256` of a run over these sites with all their images and the data's own classes."""
        sites = {name: {**kinds, "unlabelled": ()} for name, kinds in self.sites.items()}
        return content_digest(sites, self.held_out)

    def counts(self, kinds: Sequence[str]) -> dict[str, Counter[str]]:
        """Count images by site and class among these kinds of rows."""
        return {
            name: Counter(str(label) for kind in kinds for _, label in rows[kind]) for name, rows in self.sites.items()
        }

    def tune_lesions(self, site: str, learning: Sequence[Row]) -> set[str]:
        """Return the lesions among a site's training rows whose images are its tune rows."""
        images = {image for image, _ in self.sites[site]["tune"]}
        return {row.lesion for row in learning if row.image in images}

    def to_bytes(self) -> bytes:
        """Write the file: JSON with a digest over sites, kinds, images and classes."""
        sites = {
            name: {kind: _by_label(rows[kind]) for kind in ROW_KINDS if rows[kind]} for name, rows in self.sites.items()
        }
        content = {
            "format": FORMAT,
            "plan": self.plan.to_json(),
            "seed": self.seed,
            "classes": self.classes,
            "held_out": self.held_out,
            "partition_sha256": self.sha256,
            "sites": sites,
        }
        return json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"

    def facts(self) -> dict[str, Any]:
        """Return what a run's summary says about it."""
        return {**self.plan.to_json(), "seed": self.seed, "held_out": list(self.held_out), "sha256": self.sha256}


def content_digest(sites: Content, held_out: Sequence[str] = ()) -> str:
    """Compute SHA-256 over site → kind → sorted (image, class), and over the held-out sites where there are any."""
    content: object = {name: {kind: sorted(rows[kind]) for kind in rows} for name, rows in sites.items()}
    if held_out:
        content = {"held_out": sorted(held_out), "sites": content}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_partition(path: Path) -> Partition:
    """Read and check a partition file.

    A `DataError` where it is none, or was changed since it was made; a `StorageError` where it cannot be read.
    """
    try:
        found = json.loads(read_bounded(path, MAX_PARTITION_BYTES))
        partition = _from_json(found)
        digest = found["partition_sha256"]
    except PartitionError as error:
        raise DataError(f"the partition {path} cannot be used: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a partition file ({type(error).__name__}: {error}): make one with `edgefl-train partition`."
        ) from error
    if partition.sha256 != digest:
        raise DataError(f"{path} was changed after it was made (its digest differs): make it again.")
    for name in partition.sites:
        check_site_name(name, str(path))
    return partition


def _from_json(found: Mapping[str, Any]) -> Partition:
    if found["format"] != FORMAT:
        raise ValueError(f"format {found['format']!r}, but only format {FORMAT} is known")
    plan = PartitionPlan(**{str(name): value for name, value in found["plan"].items()})
    sites = {
        str(name): {kind: _entries(kinds.get(kind, {})) for kind in ROW_KINDS}
        for name, kinds in sorted(found["sites"].items())
    }
    held_out = tuple(sorted(map(str, found["held_out"])))
    images = Counter(image for kinds in sites.values() for entries in kinds.values() for image, _ in entries)
    if not set(held_out) < set(sites) or any(count > 1 for count in images.values()):
        raise ValueError("a held-out site is unknown, no site is left to train, or an image is listed twice")
    return Partition(plan, int(found["seed"]), tuple(map(str, found["classes"])), held_out, sites)


def _entries(by_label: Mapping[str, Sequence[str]]) -> tuple[DealtImage, ...]:
    return tuple(sorted((str(image), str(label)) for label, images in by_label.items() for image in images))


def _by_label(entries: Sequence[DealtImage]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for image, label in sorted(entries):
        groups[str(label)].append(image)
    return dict(sorted(groups.items()))
