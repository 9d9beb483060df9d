"""The results of a run that learned an encoder: the network of the chosen round, and what linear probes make of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgefl_protocol.durable import write_atomic
from edgefl_trainer.contract import Method, Site, declared
from edgefl_trainer.data import Federation
from edgefl_trainer.engine.display import tell
from edgefl_trainer.engine.local_engine import FederationState, SelectedEncoder
from edgefl_trainer.engine.own_networks import learned_network, write_networks
from edgefl_trainer.engine.probing import probe_readouts
from edgefl_trainer.evaluate.metrics import METRIC_NAMES, federation_summary
from edgefl_trainer.models.backbone_names import BACKBONE_FILE
from edgefl_trainer.models.backbones import backbone_bytes, load_backbone
from edgefl_trainer.models.cnn import Backbone


def learned_backbone_results(
    folder: Path, method: Method, final: FederationState, federation: Federation, sites: Mapping[str, Site]
) -> dict[str, Any]:
    """Write the backbone of the selected round, or of the last one, and probe its readouts on all tune rows.

    Where sites learned apart, it is the mean of their last networks, which are written beside it.
    """
    site = next(iter(sites.values()))
    if declared(method).apart:
        write_networks(folder, site.task.backbone, method, final.sites)
    last = site.task.rounds
    kept = final.encoder or SelectedEncoder(last, learned_network(method, final.server, final.sites, sites))
    learned = bool(method.phases(last))
    data = backbone_bytes(site.task.backbone, kept.weights, self_supervised=True, learned=learned)
    write_atomic(folder / BACKBONE_FILE, data)
    backbone = load_backbone(f"run:{folder}").to(site.device)
    probed = sum(len(site.train) + len(site.tune) for site in sites.values())
    tell(f"judging the encoder by linear probes on {probed:,} rows")
    figures = {
        name: {
            "n_train": len(site.unlabelled),
            "n_labelled": len(site.train),  # for the probe
            "n_test": 0,
            **dict.fromkeys(METRIC_NAMES),
        }
        for name, site in sites.items()
    }
    return {
        "classes": list(federation.classes),
        "backbone_sha256": backbone.spec.sha256,
        "selected_round": kept.round,
        "sites": figures,
        **federation_summary({}),
        "probe": probe_backbone(backbone, sites),
    }


def probe_backbone(backbone: Backbone, sites: Mapping[str, Site]) -> dict[str, Any] | None:
    """Fit a class-balanced linear probe to every readout, per site and pooled; None where no site has labelled rows."""
    rows = {name: (site.train, site.tune) for name, site in sites.items() if len(site.train) and len(site.tune)}
    if not rows:
        return None
    reports = probe_readouts(backbone, rows, next(iter(sites.values())).device)
    return {
        readout: {
            "mean": found.mean,
            "pooled": found.pooled,
            "sites": found.sites,
            **({"one_class": list(found.one_class)} if found.one_class else {}),
        }
        for readout, found in reports.items()
    }
