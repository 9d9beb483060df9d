"""Random views of training images, on the device of the images, with every draw taken from a given generator.

Guarantees: each image of a batch has its own draws, but for the order of the four colour operations, which is drawn for
the batch; the same generator state gives the same views; the draws of others are not disturbed. Views of contrastive
methods come from kornia, in the order of the public recipes; a masked autoencoder's crops are two batched matrix
products. Sources: MoCo v2 (arXiv 2003.04297), SimCLR (arXiv 2002.05709, appendix A), MAE (arXiv 2111.06377), RotNet
(arXiv 1803.07728); docs/methods.md, FedCLF.
"""

from functools import cache

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor, nn

from edgefl_protocol.rules.crops import RATIO, crop_boxes
from edgefl_protocol.rules.draws import symmetries, turned_alike
from edgefl_protocol.rules.view_recipes import (
    BLURRED,
    COLOURS,
    GREYED,
    JITTERED,
    MIRRORED,
    SIGMA,
    SMALLEST_CROP,
    Recipe,
    blur_kernel,
)
from edgefl_trainer.torch_seed import seeded


def dihedral(images: UInt8[Tensor, "B H W 3"], rng: np.random.Generator) -> UInt8[Tensor, "B H W 3"]:
    """Turn and mirror each image by one of eight symmetries, drawn at random: a skin lesion has no upright position."""
    views = images.clone()
    for positions, turns, mirrored in turned_alike(symmetries(rng, len(images))):
        chosen = torch.from_numpy(positions)
        turned = torch.rot90(images[chosen], turns, dims=(1, 2))
        views[chosen] = turned.flip(2) if mirrored else turned
    return views


def random_crops(
    images: UInt8[Tensor, "B H W 3"], rng: np.random.Generator, smallest: float
) -> UInt8[Tensor, "B H W 3"]:
    """Draw MAE's only augmentation: a random part of the image, resized back (bicubic), then a dihedral turn.

    `smallest` is the smallest share of the area that is kept, in (0, 1].
    """
    boxes = crop_boxes(rng, len(images), images.shape[1], smallest)
    resample = resized_one_by_one if images.device.type == "cpu" else resized_together
    return dihedral(resample(images, boxes), rng)


def resized_one_by_one(images: UInt8[Tensor, "B H W 3"], boxes: NDArray[np.int64]) -> UInt8[Tensor, "B H W 3"]:
    """Cut each box out of its image and enlarge it to the image's size (bicubic): torchvision, quickest on a CPU."""
    from torchvision.transforms import InterpolationMode  # here: what only aggregates needs no seconds for it
    from torchvision.transforms.v2.functional import resized_crop

    size = list(images.shape[1:3])
    mode = InterpolationMode.BICUBIC
    pairs = zip(images.permute(0, 3, 1, 2), boxes.tolist(), strict=True)
    return torch.stack([resized_crop(image, *box, size, mode, antialias=True) for image, box in pairs]).permute(
        0, 2, 3, 1
    )


def resized_together(images: UInt8[Tensor, "B H W 3"], boxes: NDArray[np.int64]) -> UInt8[Tensor, "B H W 3"]:
    """Resize a whole batch in two matrix products: a kernel for each image would keep a GPU idle."""
    place = torch.from_numpy(boxes).to(images.device)
    count, side, _, channels = images.shape
    across = bicubic_weights(place[:, 1], place[:, 3], side)
    down = bicubic_weights(place[:, 0], place[:, 2], side)
    columns = images.transpose(1, 2).float().reshape(count, side, -1)
    wide = torch.bmm(across, columns).round_().clamp_(0, 255)  # (B, W, H·3), eight bits between the passes as Pillow
    rows = wide.reshape(count, side, side, channels).transpose(1, 2).reshape(count, side, -1)
    return torch.bmm(down, rows).round_().clamp_(0, 255).to(torch.uint8).reshape(images.shape)


def bicubic_weights(start: Int[Tensor, " B"], length: Int[Tensor, " B"], side: int) -> Float[Tensor, "B side side"]:
    """Return matrices (to, from) that enlarge the pixels `start` … `start + length − 1` of a row to `side` pixels.

    Keys' cubic with a = −1/2, cut at the crop's edge and renormalised, so rows sum to 1: Pillow's bicubic.
    """
    pixel = torch.arange(side, device=start.device)
    centre = start[:, None] + (pixel + 0.5) * (length[:, None].float() / side)  # (B, to)
    distance = (pixel + 0.5 - centre[..., None]).abs()  # (B, to, from)
    near = (1.5 * distance - 2.5) * distance.square() + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    weights = torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(distance)))
    inside = (pixel >= start[:, None]) & (pixel < (start + length)[:, None])  # (B, from), True within the crop
    weights = weights * inside[:, None]
    return weights / weights.sum(dim=-1, keepdim=True)


def contrastive_views(
    images: UInt8[Tensor, "B H W 3"], rng: np.random.Generator, recipe: Recipe, view_px: int
) -> Float[Tensor, "B 3 px px"]:
    """Draw one random view of each image, of `view_px` pixels a side; in [0, 1], not yet normalised."""
    pictures = images.permute(0, 3, 1, 2).float().div(255)
    with seeded(int(rng.integers(2**63))):  # kornia draws on the CPU, whatever the device of the images
        views: Tensor = _pipeline(recipe, view_px)(pictures)
    return views


def quarter_turns(images: Float[Tensor, "B 3 px px"]) -> tuple[Float[Tensor, "four_B 3 px px"], Int[Tensor, " four_B"]]:
    """Turn each image by all four quarter turns, and give which: label r is r turns counter-clockwise (RotNet).

    First come all images as they are, then all turned once, and so on.
    """
    turned = torch.cat([torch.rot90(images, turns, dims=(2, 3)) for turns in range(4)])
    return turned, torch.arange(4, device=images.device).repeat_interleave(len(images))


def to_float(
    images: UInt8[Tensor, "B H W 3"], mean: tuple[float, ...], std: tuple[float, ...]
) -> Float[Tensor, "B 3 H W"]:
    """Scale to [0, 1], then subtract the channel means and divide by the deviations."""
    return normalised(images.permute(0, 3, 1, 2).float().div(255), mean, std)


def normalised(
    images: Float[Tensor, "B 3 H W"], mean: tuple[float, ...], std: tuple[float, ...]
) -> Float[Tensor, "B 3 H W"]:
    """Subtract the channel means and divide by the deviations."""
    shape = (1, 3, 1, 1)
    return (images - images.new_tensor(mean).view(shape)) / images.new_tensor(std).view(shape)


@cache
def _pipeline(recipe: Recipe, view_px: int) -> nn.Module:
    """The augmentations of one recipe, in the order of its public code."""
    from kornia import augmentation as kornia  # takes a tenth of a second, and most methods need none of it

    crop = kornia.RandomResizedCrop((view_px, view_px), scale=(SMALLEST_CROP[recipe], 1.0), ratio=RATIO)
    mirror = kornia.RandomHorizontalFlip(p=MIRRORED)
    if recipe == "rotation":
        return nn.Sequential(crop, mirror)
    kernel = blur_kernel(view_px)
    return nn.Sequential(
        crop,
        kornia.ColorJitter(*COLOURS[recipe], p=JITTERED),
        kornia.RandomGrayscale(p=GREYED),
        kornia.RandomGaussianBlur((kernel, kernel), SIGMA, p=BLURRED),
        mirror,
    )
