"""What `edgefl-train partition` does: deal the rows, write the file and a picture beside it, print the table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgefl_protocol.durable import write_atomic
from edgefl_trainer.data.errors import PartitionError
from edgefl_trainer.data.partition import KINDS, Partition, make_partition
from edgefl_trainer.data.plan import Plan

MAX_COLUMNS = 16  # classes that still fit side by side


def write_partition(
    data: Sequence[str], plan: Plan, seed: int, classes: Sequence[str] | None, out: Path
) -> tuple[Partition, Path]:
    """Make a partition and leave it at `out`, its picture beside it.

    Returns:
        The partition, and where the picture lies.

    Raises:
        EdgeflError: One sentence about the data, the numbers or the disk.
    """
    from edgefl_trainer.evaluate.partition_plot import plot_partition

    picture = out.with_suffix(".png")
    if picture == out:
        raise PartitionError(
            f"{out} would be overwritten by its own picture: name the file {out.with_suffix('.json')}."
        )
    partition = make_partition(data, plan, seed, classes)
    write_atomic(out, partition.to_bytes())
    write_atomic(picture, plot_partition(partition))
    return partition, picture


def partition_json(partition: Partition) -> dict[str, Any]:
    """What `--json` prints: the plan and the table, without names of images."""
    learning = partition.counts(("train", "tune"))
    sites = {
        name: {
            **{f"n_{kind}": len(rows[kind]) for kind in KINDS},
            "held_out": name in partition.held_out,
            "classes": {label: learning[name][label] for label in partition.classes},
        }
        for name, rows in partition.sites.items()
    }
    plan = {**partition.plan.to_json(), "seed": partition.seed}
    return {"plan": plan, "partition_sha256": partition.sha256, "classes": list(partition.classes), "sites": sites}


def partition_text(partition: Partition) -> str:
    """Sites down, classes across: training images (train and tune rows); then the images of each kind.

    Beyond 16 classes a line says how many classes a site has, and its largest ones.
    """
    learning = partition.counts(("train", "tune"))
    wide = len(partition.classes) <= MAX_COLUMNS
    head = ["site", *(partition.classes if wide else ("classes",)), *KINDS, "" if wide else "largest"]
    lines = [head]
    for name, rows in partition.sites.items():
        found = learning[name]
        largest = sorted(found, key=lambda label: (-found[label], label))[:4]
        counts = [found[label] for label in partition.classes] if wide else [sum(1 for n in found.values() if n)]
        label = f"{name} (held out)" if name in partition.held_out else name
        kinds = [len(rows[kind]) for kind in KINDS]
        rest = "" if wide else ", ".join(f"{label} {found[label]}" for label in largest)
        lines.append([label, *(str(count or "–") for count in [*counts, *kinds]), rest])
    if wide:
        totals = [sum(learning[name][label] for name in partition.sites) for label in partition.classes]
        kinds = [sum(len(rows[kind]) for rows in partition.sites.values()) for kind in KINDS]
        lines.append(["all", *(str(count or "–") for count in [*totals, *kinds]), ""])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(_aligned(line, widths) for line in lines)


def summary_line(partition: Partition) -> str:
    """What a person wants to know of a partition that was just made."""
    sizes = [len(rows["train"]) + len(rows["tune"]) for rows in partition.sites.values()]
    held = f", {len(partition.held_out)} of them held out" if partition.held_out else ""
    return (
        f"{len(sizes)} sites{held}, {min(sizes)} to {max(sizes)} training images; "
        f"partition_sha256 {partition.sha256[:16]}"
    )


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *numbers, last = (
        cell.ljust(width) if place in (0, len(widths) - 1) else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *numbers, last]).rstrip()
