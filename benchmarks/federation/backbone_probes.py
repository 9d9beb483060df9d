"""What a frozen network's features hold, beside what colour alone and an untrained network of its shape hold.

Class-balanced linear probes (`learning.linear_probe`) from a site's ``train`` to its ``tune`` rows, of each site and of
all sites pooled: for networks, and for 24 colour statistics of the image. A backbone that is worth shipping stands
above the colours and above the same architecture with random weights. Reported rows (``val``, ``test``) play no part.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.federation.baselines import colour_statistics
from edgefl_trainer.contract import Examples
from edgefl_trainer.data import Federation
from edgefl_trainer.learning.features import frozen_features
from edgefl_trainer.learning.linear_probe import ProbeReport, ProbeRows, probe_sites
from edgefl_trainer.models.cnn import Backbone

Features = NDArray[np.floating[Any]]


def probed_rows(federation: Federation) -> NDArray[np.int64]:
    """The rows that probes read: all ``train`` and ``tune`` rows, in order."""
    sites = federation.sites.values()
    return np.unique(np.concatenate([part for site in sites for part in (site.train, site.tune)]))


def compare(
    networks: Mapping[str, Backbone], federations: Mapping[str, Federation], device: torch.device
) -> dict[str, dict[str, Any]]:
    """Probe networks and colours on every task.

    Args:
        networks: name to network, all for the same images.
        federations: task to the federation with that task's labels; all over the same images and rows.
        device: where features are computed.

    Returns:
        Task to row (``colours``, or ``NETWORK.READOUT``) to ``{"mean", "pooled", "sites"}``.
    """
    features = all_features(networks, next(iter(federations.values())), device)
    return {
        task: {row: as_json(probe_features(found, federation)) for row, found in features.items()}
        for task, federation in federations.items()
    }


def all_features(networks: Mapping[str, Backbone], federation: Federation, device: torch.device) -> dict[str, Features]:
    """Of every row of `probed_rows`: the 24 colour statistics, and each readout of each network."""
    examples = Examples(federation.images, federation.labels, probed_rows(federation))
    found: dict[str, Features] = {"colours": colour_statistics(federation.images[examples.rows])}
    for name, network in networks.items():
        readouts = frozen_features(network.to(device), examples, device)
        found |= {f"{name}.{readout}": value for readout, value in readouts.items()}
    return found


def probe_features(features: Features, federation: Federation) -> ProbeReport:
    """Probe one kind of features, `features[i]` of row `probed_rows(federation)[i]`."""
    return probe_sites(dict(_site_rows(features, federation)))


def as_json(report: ProbeReport) -> dict[str, Any]:
    """Balanced accuracies to four places: ``mean`` of the sites, ``pooled``, and each of the ``sites``."""
    sites = {name: _rounded(figure) for name, figure in report.sites.items()}
    return {"mean": _rounded(report.mean), "pooled": _rounded(report.pooled), "sites": sites}


def probe_table(title: str, shown: Mapping[str, str], probes: Mapping[str, Any]) -> str:
    """Write the probes of one task as Markdown: a row for each of `shown` that is there, by its words."""
    sites = list(probes["colours"]["sites"])
    lines = [f"{title}:", "", f"| features | {' | '.join(sites)} | mean of sites | pooled |"]
    lines += [f"| --- |{' ---: |' * (len(sites) + 2)}"]
    for row, words in shown.items():
        if (found := probes.get(row)) is not None:
            figures = [*(found["sites"][site] for site in sites), found["mean"], found["pooled"]]
            lines.append(f"| {words} | {' | '.join('–' if one is None else f'{one:.3f}' for one in figures)} |")
    return "\n".join(lines)


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 4)


def _site_rows(features: Features, federation: Federation) -> Iterator[tuple[str, ProbeRows]]:
    known, labels = probed_rows(federation), federation.labels
    for name, site in federation.sites.items():
        train, tune = (part[labels[part] >= 0] for part in (site.train, site.tune))
        if not len(train) or not len(tune):
            continue
        rows = ProbeRows(
            features_train=features[np.searchsorted(known, train)],
            target_train=labels[train],
            features_tune=features[np.searchsorted(known, tune)],
            target_tune=labels[tune],
        )
        yield name, rows
