"""Does representation learning work? Linear probes of the encoder every few rounds, and which round's encoder is kept.

A probe (see `learning.linear_probe`) reads at most `TRAIN_ROWS` and `TUNE_ROWS` labelled images of a site, drawn once
for the whole run with the classes as equal as they come, so figures of different rounds are of the same images and a
probe costs one pass over at most 500 images a site. It never reads a reported row and never moves what the run learns.
docs/guides/learn-without-labels.md; docs/decisions/0020.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from edgefl_trainer.contract import Examples, Method, Phase, Site, State, Task, declared
from edgefl_trainer.engine.local_engine import Probed
from edgefl_trainer.engine.own_networks import learned_network
from edgefl_trainer.learning.features import frozen_features
from edgefl_trainer.learning.linear_probe import ProbeReport, ProbeRows, probe_sites
from edgefl_trainer.method_halves import call_aggregate, call_broadcast, call_local_round, stamped
from edgefl_trainer.models.backbones import frozen_network
from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.spec import readouts_of

TRAIN_ROWS = 300  # of a site, to fit a probe on
TUNE_ROWS = 200  # of a site, to judge it on

Prober = Callable[[Phase, State, Mapping[str, State]], Probed | None]
ProbedRows = Mapping[str, tuple[Examples, Examples]]  # site → rows to fit on, rows to judge on


def make_prober(method: Method, task: Task, sites: Mapping[str, Site], every: int) -> Prober | None:
    """Make a function that probes a run's encoder after a phase, if it is due.

    `every` counts the rounds from one probe to the next; the last round is always probed. 0: never. None instead of a
    function where the method learns no backbone or no site has labelled rows.
    """
    rows = {name: rows_of(site) for name, site in sites.items() if len(site.train) and len(site.tune)}
    if not every or not rows or declared(method).encoder is None:
        return None
    device = next(iter(sites.values())).device

    def probe(phase: Phase, server: State, states: Mapping[str, State]) -> Probed | None:
        if phase.kind != "train" or (phase.round % every and phase.round != task.rounds):
            return None
        weights = learned_network(method, as_if_finished(method, task, server, states, sites), states, sites)
        if not weights:
            return None
        network = frozen_network(task.backbone, weights).to(device)
        return Probed(phase.round, weights, probe_readouts(network, rows, device))

    return probe


def as_if_finished(
    method: Method, task: Task, server: State, states: Mapping[str, State], sites: Mapping[str, Site]
) -> State:
    """Make the server's state as if the run ended now: its `final` phases are played and nothing of them is kept.

    So FedMAE's encoder has the mean of the class tokens as they are, without any site learning it (docs/methods.md 3).
    """
    states = dict(states)
    for phase in (one for one in method.phases(task.rounds) if one.kind == "final"):
        broadcasts = call_broadcast(method, server, phase, sorted(sites))
        replies = {}
        for name in sorted(sites):
            quiet = replace(sites[name], report=lambda facts: None)
            broadcast = stamped(broadcasts[name], phase, task.rounds)
            states[name], replies[name] = call_local_round(method, quiet, states[name], broadcast)
        server = call_aggregate(method, server, phase, replies)
    return server


def probe_readouts(backbone: Backbone, rows: ProbedRows, device: torch.device) -> dict[str, ProbeReport]:
    """Probe every readout of a frozen network, which is on `device`, per site and pooled; of one site at least."""
    found = {name: [frozen_features(backbone, part, device) for part in parts] for name, parts in rows.items()}
    return {
        readout: probe_sites(
            {
                name: ProbeRows(
                    features_train=features[0][readout],
                    target_train=rows[name][0].targets,
                    features_tune=features[1][readout],
                    target_tune=rows[name][1].targets,
                )
                for name, features in found.items()
            }
        )
        for readout in readouts_of(backbone.spec)
    }


def rows_of(site: Site) -> tuple[Examples, Examples]:
    """Return the rows of this site that a run's probes read."""
    rng = site.rng("probe")
    return even_draw(site.train, TRAIN_ROWS, rng), even_draw(site.tune, TUNE_ROWS, rng)


def even_draw(examples: Examples, most: int, rng: np.random.Generator) -> Examples:
    """Draw at most `most` labelled rows, in order: one of each class, then a second of each, and so on."""
    order = rng.permutation(np.flatnonzero(examples.targets >= 0))
    targets = examples.targets[order]
    turn = np.zeros(len(order), dtype=np.int64)  # how many of its class come before
    for kind in np.unique(targets):
        turn[targets == kind] = np.arange(np.count_nonzero(targets == kind))
    chosen = order[np.argsort(turn, kind="stable")[:most]]
    return replace(examples, rows=examples.rows[np.sort(chosen)])
