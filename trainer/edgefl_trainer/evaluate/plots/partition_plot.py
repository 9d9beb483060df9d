"""A partition as a PNG: images of each class at each site, and below them the size and use of each site.

Counts are train and tune rows. A field of a class that a site does not have stays white. Values in,
bytes out: no file, no display, no global state of the plotting library. As PEP-FedPT shows its splits (arXiv
2510.25372, Fig. 4), with areas instead of discs so that 200 sites and 200 classes still fit.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from edgefl_protocol.sentences import counted
from edgefl_trainer.data.partitions.partition import ROW_KINDS, Partition
from edgefl_trainer.evaluate.plots.style import PALETTE, png

MAX_NAMED = 40  # sites or classes along an axis whose names can still be read
MAX_NUMBERED = 400  # fields whose counts can still be read
HELD_OUT_COLOUR = PALETTE[3]


def plot_partition(partition: Partition) -> bytes:
    """Return the picture as PNG bytes; its scheme, numbers and seed stand above it."""
    sites, classes = list(partition.sites), list(partition.classes)
    learning = partition.counts(("train", "tune"))
    counts = np.array([[learning[site][label] for site in sites] for label in classes], dtype=np.int64)  # (K, C)
    width = min(16.0, max(6.5, 2.5 + 0.42 * len(sites)))  # inches
    heights = [min(10.0, max(1.8, 0.6 + 0.3 * len(classes))), 1.8]
    figure = Figure(figsize=(width, sum(heights) + 1.2), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    _draw_counts(upper, counts, classes)
    _draw_sizes(lower, partition)
    _name_sites(lower, partition)
    for axes in (upper, lower):
        _shade_held_out(axes, partition)
    figure.suptitle(headline(partition), fontsize=11)
    return png(figure, metadata={"Software": None})


def headline(partition: Partition) -> str:
    """Write scheme, numbers and seed in one line."""
    plan = {name: value for name, value in partition.plan.to_json().items() if name not in ("scheme", "sites")}
    words = [f"{name.replace('_', ' ')} {value}" for name, value in plan.items() if value]
    return " · ".join([partition.plan.scheme, counted(len(partition.sites), "site"), *words, f"seed {partition.seed}"])


def _draw_counts(axes: Axes, counts: NDArray[np.int64], classes: list[str]) -> None:
    most = max(1, int(counts.max()))
    image = axes.imshow(
        np.ma.masked_equal(counts, 0),
        aspect="auto",
        zorder=1,
        cmap="viridis_r",
        norm=PowerNorm(0.5, 0, most),
        interpolation="none",
    )
    axes.figure.colorbar(image, ax=axes, label="train and tune pictures", pad=0.01)
    axes.set_ylabel("class")
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    if len(classes) <= MAX_NAMED:
        axes.set_yticks(range(len(classes)), classes, fontsize=8)
    if counts.size <= MAX_NUMBERED:
        for (k, j), count in np.ndenumerate(counts):
            if count:
                dark = count > 0.3 * most
                axes.text(j, k, f"{count}", ha="center", va="center", fontsize=7, color="white" if dark else "black")


def _draw_sizes(axes: Axes, partition: Partition) -> None:
    bottom = np.zeros(len(partition.sites))
    for place, kind in enumerate(ROW_KINDS):
        sizes = np.array([len(rows[kind]) for rows in partition.sites.values()])
        if sizes.any():
            axes.bar(range(len(sizes)), sizes, bottom=bottom, color=PALETTE[(0, 5, 1, 2)[place]], width=0.8, label=kind)
            bottom += sizes
    axes.set_ylabel("pictures")
    axes.grid(alpha=0.25, axis="y")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(ROW_KINDS), fontsize=8)


def _name_sites(axes: Axes, partition: Partition) -> None:
    """Site names where they can be read."""
    names = list(partition.sites)
    held_out = set(partition.held_out)
    if len(names) <= MAX_NAMED:
        axes.set_xticks(
            range(len(names)), names, rotation=90 if len(names) > 8 or len("".join(names)) > 50 else 0, fontsize=8
        )
        for label, name in zip(axes.get_xticklabels(), names, strict=True):
            if name in held_out:
                label.set_color(HELD_OUT_COLOUR)
                label.set_fontweight("bold")
    held = f" ({len(held_out)} held out, shaded)" if held_out else ""
    axes.set_xlabel(f"site{held}")


def _shade_held_out(axes: Axes, partition: Partition) -> None:
    for j, name in enumerate(partition.sites):
        if name in partition.held_out:
            axes.axvspan(j - 0.5, j + 0.5, color=HELD_OUT_COLOUR, alpha=0.25, linewidth=0, zorder=0)
