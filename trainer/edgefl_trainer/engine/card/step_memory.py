"""Memory of a training step, told before the run begins, and the batch that fits a card.

Two rounds of two sites are played with a few images and forgotten; the second, in which maps and features of the other
site are there, is watched operation by operation. What a step holds grows in a straight line with its images, so
two small batches tell every other. Guarantees: what is played changes no state and draws nothing from the run; the told
figure is of tensors, without the card's own workspace.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from edgefl_protocol import Payload
from edgefl_protocol.sentences import counted
from edgefl_trainer.contract import Examples, Method, Site, State
from edgefl_trainer.engine.hyper_parameters import hyper_types, hyper_values
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.errors import SettingError
from edgefl_trainer.method_halves import stamped

BATCHES = (4, 8)  # that are played
EPOCHS = 2  # of one step each: from the second on there are moments
MOST_BATCH = 4096  # more images make no step quicker
FILLED = 0.9  # share of what is free that a fitted batch may take: the rest is workspace and gaps


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a training step: of any batch, and of each image."""

    fixed: float  # weights, moments, maps and features of others
    image: float  # activations and gradients

    def of(self, batch: int) -> float:
        """Return the peak of a step of so many images."""
        return self.fixed + batch * self.image

    def largest_batch(self, free: float, images: int) -> int:
        """Return the largest power of two of images that fits beside what is free, at most `images`; 0: none does."""
        most = min((FILLED * free - self.fixed) / self.image, images, MOST_BATCH)
        return 0 if most < 1 else 1 << (int(most).bit_length() - 1)


def has_batch(method: Method) -> bool:
    """Tell whether a method learns in batches whose size can be set."""
    return "batch" in hyper_types(method)


def step_memory(settings: RunSettings, site: Site) -> StepMemory:
    """Play small steps of a run's method at a site and read their memory."""
    peaks = [peak_of(with_batch(settings, batch).build_method(), site, batch) for batch in BATCHES]
    image = max(1.0, (peaks[1] - peaks[0]) / (BATCHES[1] - BATCHES[0]))
    return StepMemory(max(0.0, peaks[0] - BATCHES[0] * image), image)


def with_batch(settings: RunSettings, batch: int) -> RunSettings:
    """Return the settings with another batch."""
    return replace(settings, hyper={**settings.hyper, "batch": batch})


def fitted(settings: RunSettings, sites: Mapping[str, Site]) -> RunSettings:
    """Return the settings with the largest batch that fits the sites' card, at most the images of the smallest site.

    Raises:
        SettingError: the method has no batch, the sites compute on the processor, or not one image fits.
    """
    method, site = settings.build_method(), next(iter(sites.values()))
    if not has_batch(method):
        raise SettingError(f"{settings.method} learns in no batches: leave --batch out.")
    if site.device.type != "cuda":
        raise SettingError(
            "--batch auto fits the batch to the memory of a card, and this run computes on the processor: give a "
            "number, or leave --batch out."
        )
    free, memory = free_bytes(site.device), step_memory(settings, site)
    smallest = min(len(one.train if method.needs_labels else one.unlabelled) for one in sites.values())
    batch = memory.largest_batch(free, smallest)
    if batch == 0:
        raise SettingError(
            f"a step of one image takes about {in_words(memory.of(1))}, and the card has {in_words(free)} free: end "
            "what else runs on it, or use a smaller --backbone or --image-px."
        )
    return with_batch(settings, batch)


def free_bytes(device: torch.device) -> int:
    """Ask a card how much of its memory is free."""
    return int(torch.cuda.mem_get_info(device)[0])


def memory_line(settings: RunSettings, site: Site) -> str:
    """Say in one line what a step of this run takes; where that cannot be played, why: it ends no run."""
    batch = int(hyper_values(settings.build_method())["batch"])
    try:
        memory = step_memory(settings, site)
    except RuntimeError as error:
        return f"memory: what a step takes could not be told ({error})"
    return (
        f"memory: a step of {counted(batch, 'image')} takes about {in_words(memory.of(batch))} of the card, "
        f"{in_words(memory.image)} for each image and {in_words(memory.fixed)} for weights, moments and maps"
    )


def in_words(count: float) -> str:
    """Write bytes as a person reads them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of all tensors of one kind of device that operations read or make, as long as they live.

    PyTorch's MemTracker does the same with a hook on each weight, which a frozen one refuses.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._kind = kind
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, then count what it read and made."""
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, found)):
            if isinstance(one, torch.Tensor) and one.device.type == self._kind:
                self._count(one.untyped_storage())
        self.peak = max(self.peak, self.live)
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            size = storage.nbytes()
            self._known[storage] = size
            self.live += size
            weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size


def peak_of(method: Method, site: Site, batch: int) -> int:
    """Play two rounds of two small sites; return the most bytes that the second held at the first of them."""
    task = replace(site.task, rounds=2, epochs=EPOCHS)
    sites = {name: _small(replace(site, name=name, task=task), batch) for name in ("a", "b")}
    server, states = method.start(task, sorted(sites)), {name: State() for name in sites}
    for phase in method.phases(task.rounds):
        sent = method.broadcast(server, phase, sorted(sites))
        replies: dict[str, Payload] = {}
        for name, one in sites.items():
            broadcast = stamped(sent[name], phase, task.rounds)
            if phase.round == task.rounds:
                watched = LiveBytes(site.device.type)
                with watched:
                    method.local_round(one, states[name], broadcast)
                return watched.peak
            states[name], replies[name] = method.local_round(one, states[name], broadcast)
        server = method.aggregate(server, phase, replies)
    return 0


def _small(site: Site, images: int) -> Site:
    """The first images of a site, or all of them again and again where it has fewer."""

    def first(rows: Examples) -> Examples:
        return replace(rows, rows=rows.rows.repeat(-(-images // max(1, len(rows))))[:images])

    return replace(
        site,
        train=first(site.train),
        tune=first(site.tune),
        unlabelled=first(site.unlabelled),
        report=lambda facts: None,
    )
