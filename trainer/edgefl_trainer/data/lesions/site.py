"""What makes the photographs of one site look alike: skin tones, light, lens, hair, gel and scale."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_trainer.data.lesions.canvas import Rng, stream

# Skin from light to dark under white light, RGB 0..1 (roughly Fitzpatrick I to VI).
_SKIN = np.array(
    [
        (0.93, 0.76, 0.70),
        (0.90, 0.70, 0.60),
        (0.84, 0.63, 0.51),
        (0.73, 0.52, 0.40),
        (0.58, 0.39, 0.29),
        (0.42, 0.28, 0.21),
    ]
)


@dataclass(frozen=True, kw_only=True)
class SiteStyle:
    """How one site photographs."""

    tone: float  # centre of the site's skin tones on the scale 0 (lightest) to 5
    cast: NDArray[np.float32]  # gain of each channel, (3,)
    gradient: float  # difference of light across the picture, share
    gradient_turn: float  # direction of that difference, radians
    vignette: float  # darkening towards the corners, share; a lens tube above 0.5
    hairs: float  # mean number of hairs in a picture
    hair_tone: float  # 0 = fair, 1 = black
    bubbles: float  # mean number of gel bubbles
    ruler: float  # probability of scale marks along an edge
    area: float  # middle of the share of the picture that a lesion covers
    blur_px: float  # defocus at 128 px, pixels
    noise: float  # sensor noise, standard deviation on 0..255
    contrast: float  # exponent of the tone curve

    def skin(self, rng: Rng) -> NDArray[np.float32]:
        """Draw the skin of one patient, RGB 0..1, (3,)."""
        tone = np.clip(self.tone + rng.normal(0, 0.45), 0, 5)
        base = np.array([np.interp(tone, np.arange(6), _SKIN[:, c]) for c in range(3)])
        return (base * rng.normal(1, 0.02, 3)).astype(np.float32)


def site_styles(sites: int, seed: int) -> list[SiteStyle]:
    """Draw the styles of all sites; every quantity is spread evenly over its range, in its own random order."""
    rng = stream(seed, 1)

    def spread(low: float, high: float) -> NDArray[np.float64]:
        steps = (np.arange(sites) + rng.uniform(0.2, 0.8, sites)) / sites
        return low + (high - low) * rng.permutation(steps)

    tone = spread(0.0, 4.2) ** 1.0
    warm, green = spread(-0.11, 0.11), spread(-0.05, 0.05)
    gradient, turn, vignette = spread(0.02, 0.30), spread(0, 2 * np.pi), spread(0.0, 0.75)
    hairs, hair_tone, bubbles, ruler = spread(0, 9), spread(0.2, 1), spread(0, 2.2), spread(-0.2, 0.7)
    area, blur, grain, contrast = spread(0.14, 0.29), spread(0.2, 0.9), spread(1.0, 4.0), spread(0.88, 1.15)
    return [
        SiteStyle(
            tone=float(tone[i]),
            cast=np.array([1 + warm[i], 1 + green[i], 1 - warm[i]], np.float32),
            gradient=float(gradient[i]),
            gradient_turn=float(turn[i]),
            vignette=float(vignette[i]),
            hairs=float(hairs[i]),
            hair_tone=float(hair_tone[i]),
            bubbles=float(bubbles[i]),
            ruler=float(ruler[i]),
            area=float(area[i]),
            blur_px=float(blur[i]),
            noise=float(grain[i]),
            contrast=float(contrast[i]),
        )
        for i in range(sites)
    ]
