"""`edgefl-train partition`: deal the images of the data to sites; write file and picture, print the class table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_protocol.sentences import counted
from edgefl_trainer.commands import options as shared
from edgefl_trainer.commands.extra import needs_trainer
from edgefl_trainer.commands.options import names

if TYPE_CHECKING:
    from edgefl_trainer.data.partitions.partition import Partition

MAX_COLUMNS = 16  # classes that still fit side by side
TRAINED, SPLITS = "train and tune pictures by class", "pictures by split"  # over the columns


@click.command()
@click.option(
    "--data",
    multiple=True,
    required=True,
    metavar="SPEC",
    help="Data to deal; repeatable; see docs/reference/data.md.",
)
@click.option(
    "--scheme",
    required=True,
    type=click.Choice(["natural", "iid", "dirichlet", "pathological", "domain"]),
    help=(
        "How to deal: natural keeps the sites of the data, iid deals evenly, dirichlet makes classes uneven, "
        "pathological gives each site few classes, domain cuts each site of the data into equally many."
    ),
)
@click.option("--sites", type=int, metavar="N", help="Number of sites, including those held out.")
@click.option(
    "--alpha", type=float, metavar="A", help="dirichlet: concentration; the smaller, the more uneven.  [default: 0.3]"
)
@click.option(
    "--dirichlet-by",
    type=click.Choice(["class", "site"]),
    help=(
        "dirichlet: draw a share of each class for every site, or a mix of classes for each of equally large "
        "sites.  [default: class]"
    ),
)
@click.option(
    "--classes-per-site", type=int, metavar="N", help="pathological, domain: number of classes that a site holds."
)
@click.option(
    "--whole",
    metavar="SITE,…",
    help=(
        "iid, dirichlet, pathological: sites of the data that stay as they are, counted by --sites; the others are "
        "dealt."
    ),
)
@click.option("--classes", metavar="A,B,…", help="Deal only these classes.  [default: all]")
@click.option("--hold-out", metavar="SITE,…", help="Sites that are never trained, by name, in place of a share.")
@click.option(
    "--holdout-sites",
    type=float,
    metavar="SHARE",
    default=0.0,
    show_default=True,
    help="Share of the sites that are never trained.",
)
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of all random draws.")
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.json",
    help="File for the partition; a picture of it, FILE.png, is written beside it.",
)
@shared.force
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
@needs_trainer
def partition(
    data: tuple[str, ...],
    seed: int,
    classes: str | None,
    whole: str | None,
    hold_out: str | None,
    out: Path,
    force: bool,
    as_json: bool,
    dirichlet_by: Any,
    **numbers: Any,
) -> None:
    """Deal images to sites once, for runs that will be compared. Prints the class table."""
    from edgefl_protocol.durable import write_atomic
    from edgefl_trainer.data.errors import PartitionError
    from edgefl_trainer.data.partitions.make import make_partition
    from edgefl_trainer.data.partitions.plan import PartitionPlan

    picture = out.with_suffix(".png")
    if picture == out:
        raise PartitionError(
            f"{out} would be overwritten by its own picture: name the file {out.with_suffix('.json')}."
        )
    for path in (out, picture):
        if path.exists() and not force:
            raise PartitionError(f"{path} exists already: name another file, or overwrite it with --force.")
    wanted = None if classes is None else names(classes)
    kept, apart = (None if given is None else names(given) for given in (whole, hold_out))
    made = make_partition(data, PartitionPlan(by=dirichlet_by, whole=kept, hold_out=apart, **numbers), seed, wanted)
    from edgefl_trainer.evaluate.plots.partition_plot import plot_partition  # with matplotlib, which takes a second

    write_atomic(out, made.to_bytes())
    write_atomic(picture, plot_partition(made))
    click.echo(json.dumps(partition_json(made)) if as_json else partition_text(made))
    click.echo(f"{summary_line(made)}; wrote {out} and {picture}", err=True)


def partition_json(partition: "Partition") -> dict[str, Any]:
    """Return what `--json` prints: the plan and the table, without names of images."""
    from edgefl_trainer.data.partitions.partition import ROW_KINDS

    learning = partition.counts(("train", "tune"))
    sites = {
        name: {
            **{f"n_{kind}": len(rows[kind]) for kind in ROW_KINDS},
            "held_out": name in partition.held_out,
            "classes": {label: learning[name][label] for label in partition.classes},
        }
        for name, rows in partition.sites.items()
    }
    plan = {**partition.plan.to_json(), "seed": partition.seed}
    return {"plan": plan, "partition_sha256": partition.sha256, "classes": list(partition.classes), "sites": sites}


def partition_text(partition: "Partition") -> str:
    """Write a table, sites down and classes across: pictures to train and tune on by class, then those of each split.

    Beyond 16 classes a line says how many classes a site has, and its largest ones.
    """
    from edgefl_trainer.data.partitions.partition import ROW_KINDS

    learning = partition.counts(("train", "tune"))
    wide = len(partition.classes) <= MAX_COLUMNS
    head = ["site", *(partition.classes if wide else ("classes",)), *ROW_KINDS, "" if wide else "largest classes"]
    lines = [head]
    for name, rows in partition.sites.items():
        found = learning[name]
        largest = sorted(found, key=lambda label: (-found[label], label))[:4]
        counts = [found[label] for label in partition.classes] if wide else [sum(1 for n in found.values() if n)]
        label = f"{name} (held out)" if name in partition.held_out else name
        kinds = [len(rows[kind]) for kind in ROW_KINDS]
        rest = "" if wide else ", ".join(f"{label} {found[label]}" for label in largest)
        lines.append([label, *(str(count or "–") for count in [*counts, *kinds]), rest])
    if wide:
        totals = [sum(learning[name][label] for name in partition.sites) for label in partition.classes]
        kinds = [sum(len(rows[kind]) for rows in partition.sites.values()) for kind in ROW_KINDS]
        lines.append(["all", *(str(count or "–") for count in [*totals, *kinds]), ""])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    last = len(head) - len(ROW_KINDS) - 2  # column of the last class
    told = TRAINED if wide else ""
    least = -(-(len(told) - 2 * (last - 1)) // last)  # of a class, so that they fill what stands over them
    widths[1 : last + 1] = [max(width, least) for width in widths[1 : last + 1]]
    across = sum(widths[1 : last + 1]) + 2 * (last - 1)
    over = f"{'':<{widths[0]}}  {told:<{across}}  {SPLITS}"
    return "\n".join([over, *(_aligned(line, widths) for line in lines)])


def summary_line(partition: "Partition") -> str:
    """Write the line that tells a person what partition was made."""
    sizes = [len(rows["train"]) for rows in partition.sites.values()]
    held = f", {len(partition.held_out)} of them held out" if partition.held_out else ""
    return (
        f"{counted(len(sizes), 'site')}{held}, {min(sizes)} to {max(sizes)} train pictures; "
        f"partition_sha256 {partition.sha256[:16]}"
    )


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *numbers, last = (
        cell.ljust(width) if place in (0, len(widths) - 1) else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *numbers, last]).rstrip()
