"""An epoch's batches as tensors on the site's torch device, and the precision that is used there."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from edgefl_protocol.rules.draws import augment_rng
from edgefl_trainer.augment import dihedral
from edgefl_trainer.contract import Examples, Site

Images = UInt8[Tensor, "B H W 3"]
LabelledBatch = tuple[Images, Int[Tensor, " B"], int]
"""Images, their classes, and the number of the epoch."""


def autocast(site: Site) -> torch.autocast:
    """Use the arithmetic that a site asks for inside a network; losses and heads stay in float32."""
    return torch.autocast(site.device.type, dtype=site.autocast, enabled=site.autocast is not None)


def labelled_batches(
    site: Site, batch: int, augment: Literal["none", "dihedral"], round_: int, epoch: int
) -> tuple[int, Iterator[LabelledBatch]]:
    """Count and read the batches of one epoch: shuffled training images, turned and mirrored where asked for."""
    rng = augment_rng(site.task.seed, site.name, round_, epoch)
    given = site.batches(site.train, batch, round_, epoch)
    views = ((dihedral(images, rng) if augment == "dihedral" else images, target) for images, target in given)
    return -(-len(site.train) // batch), ((images, target, epoch) for images, target in views)


def read_ahead(site: Site, examples: Examples, parts: Sequence[NDArray[np.int64]]) -> Iterator[Images]:
    """Read images at the positions of each part; the next part is read while one is learned."""

    def read(part: NDArray[np.int64]) -> Tensor:
        images = examples.read(part)[0]
        return images.pin_memory() if site.device.type == "cuda" else images

    with ThreadPoolExecutor(max_workers=1) as reader:
        coming = reader.submit(read, parts[0])
        for following in [*parts[1:], None]:
            images = coming.result()
            if following is not None:
                coming = reader.submit(read, following)
            yield images.to(site.device, non_blocking=True)
