"""From a federation's rows to the sites that a method sees."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from edgefl_trainer.contract import Examples, Method, Site, Task, declared
from edgefl_trainer.data import Federation, SiteRows
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.errors import SettingError, TrainingError
from edgefl_trainer.models.cnn import Backbone


def choose_device(name: str) -> torch.device:
    """Choose the device: `auto` takes CUDA where there is one; a `SettingError` where `cuda` is not to be had."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingError("this machine has no CUDA device: use --device cpu or auto.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def autocast_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """Choose the type of the backbone's matrix products; head, evidence, loss and rollout stay float32."""
    wanted = device.type == "cuda" if name == "auto" else name == "bf16"
    return torch.bfloat16 if wanted else None


def build_sites(
    federation: Federation, task: Task, backbone: Backbone, settings: RunSettings, method: Method
) -> Mapping[str, Site]:
    """Make one `Site` for each member of the federation that trains.

    A `TrainingError` names each that has fewer rows than the method learns from.
    """
    trained = [name for name in federation.sites if name not in federation.held_out]
    sites = _sites(federation, trained, task, backbone, settings)
    least = declared(method).least_images
    counts = {name: len(site.train if method.needs_labels else site.unlabelled) for name, site in sites.items()}
    few = {name: count for name, count in counts.items() if count < least}
    if few:
        kind = "labelled " * method.needs_labels
        needed = f", but {settings.method} needs {least}" if least > 1 else ""
        held = [f"site {name} has {count or 'no'} {kind}image to train on" for name, count in few.items()]
        raise TrainingError(
            f"{', '.join(held)}{needed}: add images, or leave the site out (--data SPEC@site=NAME uses one site of "
            "a source)."
        )
    return sites


def build_held_out_sites(
    federation: Federation, task: Task, backbone: Backbone, settings: RunSettings
) -> Mapping[str, Site]:
    """Make one `Site` for each that never trains; its training rows tell a predictor its class counts."""
    return _sites(federation, federation.held_out, task, backbone, settings)


def one_class_sites(sites: Mapping[str, Site]) -> list[str]:
    """Name the sites whose train or tune rows hold one class: their figures on tune rows say nothing."""
    return [
        name for name, site in sites.items() if 1 in (len(np.unique(part.targets)) for part in (site.train, site.tune))
    ]


def _sites(
    federation: Federation, names: Sequence[str], task: Task, backbone: Backbone, settings: RunSettings
) -> dict[str, Site]:
    device = choose_device(settings.device)
    network = backbone.to(device)
    return {
        name: Site(
            name=name,
            task=task,
            backbone=network,
            train=examples_of(federation, federation.sites[name].train),
            tune=examples_of(federation, federation.sites[name].tune),
            unlabelled=examples_of(federation, _all_images(federation, federation.sites[name])),
            balance=settings.balance,
            device=device,
            autocast=autocast_dtype(settings.autocast, device),
        )
        for name in names
    }


def report_rows(federation: Federation, name: str) -> Examples:
    """Return the rows that results are reported on: `test` where the data has any, else `val`."""
    return examples_of(federation, federation.sites[name].rows(federation.report_split))


def _all_images(federation: Federation, rows: SiteRows) -> np.ndarray:
    """Return the images to learn from without labels, each once: training and unlabelled rows, never tune rows."""
    found = np.sort(np.concatenate([rows.train, rows.unlabelled]))
    return np.sort(found[np.unique(federation.places(found), return_index=True)[1]])


def examples_of(federation: Federation, rows: np.ndarray) -> Examples:
    """Return some rows of a federation as a method reads them."""
    return Examples(
        federation.images,
        federation.labels,
        rows.astype(np.int64),
        pictures=federation.pictures,
        tokens=None if federation.questions is None else federation.questions.tokens,
    )
