"""From a run's data to the sites that a method sees."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from edgefl_trainer.contract import Examples, Method, Site, Task, declared
from edgefl_trainer.data import Federation, SiteRows, load_federation
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.labels import keep_labels
from edgefl_trainer.data.learnable import LEAST_CLASSES, too_few_classes, without_images
from edgefl_trainer.data.partitions.partition import Partition
from edgefl_trainer.data.questions import Vocabulary
from edgefl_trainer.engine.own_networks import start_apart
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.errors import SettingError, TrainingError
from edgefl_trainer.evaluate.confusion import MAX_CLASSES
from edgefl_trainer.models.backbone_names import has_own_weights
from edgefl_trainer.models.backbones import weights_of
from edgefl_trainer.models.cnn import Backbone

SELF_SUPERVISED_TASK = "pixels"
_PRODUCTS = 3  # of matrices; the quickest tells how fast a processor is
_SLOWER = 1.5  # times, from which a person is told


def read_sites(
    settings: RunSettings, method: Method, backbone: Backbone, partition: Partition | None
) -> tuple[Federation, Task, Mapping[str, Site]]:
    """Read the data of a run, and make what its sites learn from."""
    federation = load_data(settings, backbone.spec.image_px, partition)
    if method.needs_labels and federation.questions is None:
        _check_classes(settings, federation.classes)
    task = build_task(settings, method, federation, backbone)
    sites = build_sites(federation, task, backbone, settings, method)
    if declared(method).trains_network:
        sites = start_apart(settings.backbone, backbone.spec.image_px, sites)
    return federation, task, sites


def _check_classes(settings: RunSettings, classes: Sequence[str]) -> None:
    """Refuse fewer than two classes: by a `SettingError` where the settings chose them, else by a `DataError`."""
    if settings.classes and len(classes) < LEAST_CLASSES:
        raise SettingError(
            f"--classes names one class, {classes[0]}, and learning from labels needs at least two: name more of the "
            "data's."
        )
    if told := too_few_classes(classes):
        raise DataError(told)


def load_data(
    settings: RunSettings,
    image_px: int,
    partition: Partition | None = None,
    *,
    whole_task: bool = True,
    vocabulary: Vocabulary | None = None,
) -> Federation:
    """Read the federation that the settings describe, with the share of labels they give it.

    `whole_task`: every class that the task names has to be there. `vocabulary`: of several sites, where this is one.
    """
    federation = load_federation(
        settings.data,
        image_px=image_px,
        colour=settings.colour,
        task=settings.task,
        whole_task=whole_task,
        classes=settings.classes or None,
        seed=settings.seed,
        unlabelled=settings.unlabelled,
        limit=settings.images_per_site or None,
        partition=partition,
        vocabulary=vocabulary,
    )
    if settings.labels == 1:
        return federation
    seed = settings.seed if partition is None else partition.seed  # as for every other choice of rows
    return keep_labels(federation, settings.labels, seed, keep_images=settings.unlabelled != "none")


def build_task(settings: RunSettings, method: Method, federation: Federation, backbone: Backbone) -> Task:
    """Make the task: what server and sites agree on."""
    learns = declared(method).encoder is not None
    starts = declared(method).trains_network or (learns and has_own_weights(settings.backbone))
    return Task(
        name=SELF_SUPERVISED_TASK if learns else settings.task,
        classes=federation.classes,
        backbone=backbone.spec,
        rounds=settings.rounds,
        epochs=settings.epochs,
        seed=settings.seed,
        initial=weights_of(backbone.network) if starts else {},
        questions=federation.questions.vocabulary if federation.questions and method.needs_labels else None,
    )


def choose_device(name: str) -> torch.device:
    """Choose the device: `auto` takes CUDA where there is one; a `SettingError` where `cuda` is not to be had."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingError("this machine has no CUDA device: use --device cpu or auto.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Use deterministic algorithms on the CPU, for a while; on CUDA runs agree to a tolerance (docs/design.md)."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or device.type == "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def autocast_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """Choose the type of the backbone's matrix products; head, evidence, loss and rollout stay float32."""
    wanted = device.type == "cuda" if name == "auto" else name == "bf16"
    return torch.bfloat16 if wanted else None


def slow_bf16_line(dtype: torch.dtype | None, device: torch.device, clock: Callable[[], float] = perf_counter) -> str:
    """Write that a processor is slower with bfloat16 than without, measured here; empty where it is not, or on CUDA."""
    if dtype is None or device.type != "cpu":
        return ""
    took = {}
    for kind in (torch.float32, dtype):
        rows, weights = torch.ones(512, 512, dtype=kind), torch.ones(512, 512, dtype=kind)
        rows @ weights  # the first call also sets things up
        took[kind] = min(_seconds_of(partial(torch.matmul, rows, weights), clock) for _ in range(_PRODUCTS))
    times = took[dtype] / took[torch.float32]
    if times < _SLOWER:
        return ""
    return f"a product of matrices takes this processor {times:.1f} times as long in bfloat16: give --autocast none."


def _seconds_of(work: Callable[[], object], clock: Callable[[], float]) -> float:
    started = clock()
    work()
    return clock() - started


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
        raise TrainingError(without_images(few, kind, needed))
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


def learned_rows(federation: Federation, site: Site) -> dict[str, Any]:
    """Count the rows that a site learned from, and their lesions, by class; None beyond `MAX_CLASSES`, or of questions.

    Gives `n_tune`, `learned_images` and `learned_lesions`.
    """
    told: dict[str, Any] = {"n_tune": len(site.tune), "learned_images": None, "learned_lesions": None}
    classes = len(federation.classes)
    if classes > MAX_CLASSES or federation.questions is not None:
        return told
    lesions: list[set[str]] = [set() for _ in range(classes)]
    for row, label in zip(site.train.rows, site.train.targets, strict=True):
        lesions[label].add(federation.lesions[row])
    return told | {"learned_images": site.train.counts(classes).tolist(), "learned_lesions": [*map(len, lesions)]}
