"""Encoders that sites learned apart and kept: written beside a run's backbone, and what each site then starts from.

DIR/networks/NAME.safetensors   the encoder of a site that took part in a round
DIR/backbone.safetensors        their mean by numbers of images: what a federation starts from, or a site that has none

Source: arXiv 2208.11278 section V-A, the baseline Local CL: pre-trained "independently on each device", then fine-tuned
on each device or together.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from edgefl_protocol import Payload
from edgefl_protocol.durable import write_atomic
from edgefl_trainer.contract import Arrays, Method, Site, State, declared
from edgefl_trainer.engine.first_run import first_run
from edgefl_trainer.engine.folder import make_folder
from edgefl_trainer.learning.averaging import weighted_mean
from edgefl_trainer.models.backbones import backbone_bytes, load_backbone, weights_of
from edgefl_trainer.models.spec import BackboneSpec

NETWORKS = "networks"


def learned_network(method: Method, server: State, states: Mapping[str, State], sites: Mapping[str, Site]) -> Arrays:
    """Return the encoder that a method has learned: the server's, or the mean of the sites'; empty before any."""
    learns = declared(method)
    if learns.encoder is None:
        return {}
    return mean_network(method, states, sites) if learns.apart else learns.encoder(server)


def mean_network(method: Method, states: Mapping[str, State], sites: Mapping[str, Site]) -> Arrays:
    """Average the encoders of the sites that have learned one, weighted by the images that each learned from."""
    networks = {name: Payload(network, {}) for name, network in learned_networks(method, states).items()}
    return weighted_mean(networks, {name: float(len(sites[name].unlabelled)) for name in networks})


def learned_networks(method: Method, states: Mapping[str, State]) -> dict[str, Arrays]:
    """Return the encoder of each site that took part in a round, by name."""
    encoder = declared(method).encoder
    networks = {name: encoder(states[name]) for name in sorted(states)} if encoder else {}
    return {name: network for name, network in networks.items() if network}


def write_networks(folder: Path, spec: BackboneSpec, method: Method, states: Mapping[str, State]) -> None:
    """Keep every encoder that a site has learned as a backbone file."""
    make_folder(folder / NETWORKS)
    for name, network in learned_networks(method, states).items():
        data = backbone_bytes(spec, network, self_supervised=True, learned=True)
        write_atomic(folder / NETWORKS / f"{name}.safetensors", data)


def start_apart(backbone: str, image_px: int, sites: Mapping[str, Site]) -> Mapping[str, Site]:
    """Give each site its own encoder to learn on, where the run that the backbone names has one for it."""
    folder = first_run(backbone)
    if folder is None:
        return sites
    paths = {name: folder / NETWORKS / f"{name}.safetensors" for name in sites}
    if not any(path.exists() for path in paths.values()):
        return sites
    found = {}
    for name, site in sites.items():
        task = site.task
        if paths[name].exists():
            network = load_backbone(f"file:{paths[name]}", image_px=image_px, seed=task.seed).network
            task = replace(task, initial=weights_of(network))
        found[name] = replace(site, task=task)
    return found
