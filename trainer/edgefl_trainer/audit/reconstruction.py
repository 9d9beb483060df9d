"""Reconstruction: pictures from payloads, by a decoder that was fitted to other people's pictures.

    decoder    kernel ridge regression, linear or Gaussian, of pictures on what they give; kernel and strength are those
               with the smallest error on a fifth of these pictures that was held back                     fit_decoder
    figure     structural similarity (Wang et al. 2004, window 11) of what is decoded with the picture     similarities

The regression is the learned inversion of Dosovitskiy and Brox, "Inverting visual representations with convolutional
networks" (CVPR 2016), with a closed form in place of the network: it needs a second and cannot fail to converge.
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from jaxtyping import Float, UInt8

STRENGTHS: Final = tuple(10.0**power for power in range(-4, 4))  # times the mean of the kernel's diagonal
HELD_BACK: Final = 5  # every fifth picture
WINDOW: Final = 11  # px, of Wang et al.
SMALL: Final = 21  # px a side at most of the pictures on which a decoder is chosen
Kernel = Literal["linear", "gaussian"]
KERNELS: Final[tuple[Kernel, ...]] = ("linear", "gaussian")


@dataclass(frozen=True)
class Decoder:
    """A fitted regression from payloads to pictures."""

    kernel: Kernel
    mean: Float[np.ndarray, " P"]
    scale: Float[np.ndarray, " P"]
    width: float  # of the Gaussian, squared
    known: Float[np.ndarray, "n P"]  # standardised
    weights: Float[np.ndarray, "n S"]
    usual: Float[np.ndarray, " S"]  # mean picture

    def decode(self, payloads: Float[np.ndarray, "m P"], px: int) -> Float[np.ndarray, "m px px 3"]:
        """Make pictures in [0, 1]."""
        rows = (payloads - self.mean) / self.scale
        found = _kernel(self.kernel, rows, self.known, self.width) @ self.weights + self.usual
        return np.asarray(np.clip(found, 0, 1).reshape(-1, px, px, 3), dtype=np.float32)


def fit_decoder(payloads: Float[np.ndarray, "n P"], pictures: UInt8[np.ndarray, "n px px 3"]) -> Decoder:
    """Fit a decoder to at least ten pairs of a payload and its picture."""
    mean, spread = payloads.mean(axis=0), payloads.std(axis=0)
    scale = np.where(spread > 1e-8, spread, 1.0)
    rows = ((payloads - mean) / scale).astype(np.float64)
    width = float(np.median(_distances(rows[:200], rows[:200]))) or 1.0
    held = np.arange(len(rows)) % HELD_BACK == 0
    small = _small(pictures)
    kernel, strength = min(
        ((kernel, strength) for kernel in KERNELS for strength in STRENGTHS),
        key=lambda one: _error(one[0], one[1], rows, small, held, width),
    )
    target = pictures.reshape(len(pictures), -1).astype(np.float32) / 255
    usual = target.mean(axis=0)
    weights = _solve(_kernel(kernel, rows, rows, width), strength, target - usual)
    return Decoder(kernel, mean, scale, width, rows, weights, usual)


def similarities(
    found: Float[np.ndarray, "n px px 3"], pictures: UInt8[np.ndarray, "n px px 3"]
) -> Float[np.ndarray, " n"]:
    """Compute the structural similarity of each picture with what was decoded, mean over its pixels and colours."""
    from kornia.metrics import ssim

    ours, true = (torch.from_numpy(np.ascontiguousarray(one)).permute(0, 3, 1, 2) for one in (found, pictures))
    return np.asarray(ssim(ours.float(), true.float() / 255, WINDOW).mean(dim=(1, 2, 3)).numpy(), dtype=np.float64)


def class_pictures(
    pictures: UInt8[np.ndarray, "n px px 3"], labels: np.ndarray, classes: int
) -> Float[np.ndarray, "K1 px px 3"]:
    """Average the pictures of each class, in [0, 1]; of a class without any, and in a last row, all of them."""
    whole = pictures.mean(axis=0) / 255
    means = [pictures[labels == k].mean(axis=0) / 255 if (labels == k).any() else whole for k in range(classes)]
    return np.stack([*means, whole]).astype(np.float32)


def thumbnails(pictures: UInt8[np.ndarray, "n px px 3"], side: int) -> Float[np.ndarray, "n P"]:
    """Shrink pictures to `side` pixels by averaging, and flatten them; values in [0, 1]."""
    values = torch.from_numpy(np.array(pictures)).permute(0, 3, 1, 2).float() / 255
    small = torch.nn.functional.adaptive_avg_pool2d(values, side)
    return np.asarray(small.flatten(1).numpy())


def _small(pictures: UInt8[np.ndarray, "n px px 3"]) -> Float[np.ndarray, "n S"]:
    return thumbnails(pictures, min(SMALL, pictures.shape[1])).astype(np.float64)


def _error(
    kernel: Kernel, strength: float, rows: np.ndarray, target: np.ndarray, held: np.ndarray, width: float
) -> float:
    """Mean squared error on what was held back, of a decoder fitted to the rest."""
    usual = target[~held].mean(axis=0)
    weights = _solve(_kernel(kernel, rows[~held], rows[~held], width), strength, target[~held] - usual)
    found = _kernel(kernel, rows[held], rows[~held], width) @ weights + usual
    return float(np.square(found - target[held]).mean())


def _solve(kernel: np.ndarray, strength: float, target: np.ndarray) -> np.ndarray:
    ridge = strength * float(np.trace(kernel)) / len(kernel) + 1e-9
    return np.asarray(np.linalg.solve(kernel + ridge * np.eye(len(kernel)), target), dtype=np.float64)


def _kernel(kernel: Kernel, left: np.ndarray, right: np.ndarray, width: float) -> np.ndarray:
    if kernel == "linear":
        return np.asarray(left @ right.T)
    return np.asarray(np.exp(-_distances(left, right) / width))


def _distances(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Squared Euclidean distances, (n, m)."""
    squares = np.square(left).sum(axis=1)[:, None] + np.square(right).sum(axis=1)[None, :]
    return np.asarray(np.maximum(squares - 2 * left @ right.T, 0))
