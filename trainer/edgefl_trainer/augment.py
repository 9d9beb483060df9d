"""Random views of training images, from torchvision, with every draw taken from a given generator.

Guarantees: images stay uint8 (B, px, px, 3) on their device; the same generator state gives the same views.
"""

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import RandomResizedCrop


def dihedral(images: UInt8[Tensor, "B H W 3"], rng: np.random.Generator) -> UInt8[Tensor, "B H W 3"]:
    """Turn and mirror each image at random: a skin lesion has no upright position.

    Args:
        images: square images.
        rng: one of eight symmetries is drawn for each image.

    Returns:
        The turned images, one for each input, in order.
    """
    views = images.clone()
    draws = rng.integers(8, size=len(images))
    for symmetry in np.unique(draws):
        chosen = torch.from_numpy(np.flatnonzero(draws == symmetry))
        turned = torch.rot90(images[chosen], int(symmetry) % 4, dims=(1, 2))
        views[chosen] = turned.flip(2) if symmetry >= 4 else turned
    return views


def random_crops(
    images: UInt8[Tensor, "B H W 3"], rng: np.random.Generator, smallest: float
) -> UInt8[Tensor, "B H W 3"]:
    """MAE's only augmentation: a random part of the image, resized back (bicubic), then a dihedral turn.

    Args:
        images: square images.
        rng: source of every draw.
        smallest: smallest share of the area that is kept, in (0, 1].

    Returns:
        One view for each image.
    """
    side = images.shape[1]
    crop = RandomResizedCrop(side, scale=(smallest, 1.0), interpolation=InterpolationMode.BICUBIC, antialias=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**63)))
        views = [crop(image) for image in images.permute(0, 3, 1, 2)]
    return dihedral(torch.stack(views).permute(0, 2, 3, 1), rng)


def to_float(
    images: UInt8[Tensor, "B H W 3"], mean: tuple[float, ...], std: tuple[float, ...]
) -> Float[Tensor, "B 3 H W"]:
    """Scale to [0, 1], then subtract the channel means and divide by the deviations."""
    scaled = images.permute(0, 3, 1, 2).float().div(255)
    shape = (1, 3, 1, 1)
    return (scaled - scaled.new_tensor(mean).view(shape)) / scaled.new_tensor(std).view(shape)
