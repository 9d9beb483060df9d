"""The two rows that a federated method has to beat on real sites, both logistic regressions fitted per site.

``colour``: class-balanced, on 24 colour statistics of the whole image and nothing else; what it reaches is explained
by a site's class balance, camera and skin tones. ``head-alone``: on the frozen backbone's features; what it reaches
needs no prompts. Both learn from ``train`` and ``tune`` rows together, since nothing is selected, and report on ``val``
or ``test``. Definitions: docs/methods.md, "baseline rows".
"""

from collections.abc import Iterator, Mapping

import numpy as np
from jaxtyping import Float, Int, UInt8
from scipy.stats import skew

from edgefl_trainer.evaluate.metrics import SiteMetrics, site_metrics
from edgefl_trainer.learning.linear_probe import fit_predict

PERCENTILES = (5, 25, 50, 75, 95)
COLOUR_STATISTICS = tuple(
    f"{channel}.{name}"
    for name in ("mean", "std", *(f"p{level:02d}" for level in PERCENTILES), "skewness")
    for channel in ("red", "green", "blue")
)
"""Names of the 24 columns: mean, deviation, five percentiles and skewness of each RGB channel."""

CHUNK = 256  # images; bounds the float64 copy of a slice of a memory-mapped array


def colour_statistics(images: UInt8[np.ndarray, "B H W 3"]) -> Float[np.ndarray, "B 24"]:
    """Return the 24 colour statistics of each image, in [0, 1] but for the skewness.

    A channel of one single value has skewness 0.

    Args:
        images: Decoded RGB images; may be memory-mapped.
    """
    parts = [_statistics(images[start : start + CHUNK]) for start in range(0, images.shape[0], CHUNK)]
    return np.concatenate(parts) if parts else np.zeros((0, len(COLOUR_STATISTICS)))


def _statistics(images: UInt8[np.ndarray, "B H W 3"]) -> Float[np.ndarray, "B 24"]:
    pixels = images.reshape(images.shape[0], -1, 3).astype(np.float64) / 255.0  # (B, H·W, 3)
    deviation = pixels.std(axis=1)
    flat = deviation < 1e-9  # scipy warns and answers NaN there
    noise = np.linspace(-1.0, 1.0, pixels.shape[1])[:, None]  # symmetric: skewness 0
    skewness = skew(np.where(flat[:, None, :], noise, pixels), axis=1) * ~flat
    percentiles = np.percentile(pixels, PERCENTILES, axis=1)  # (5, B, 3)
    return np.concatenate([pixels.mean(axis=1), deviation, *percentiles, skewness], axis=1)


def site_baselines(
    features: Float[np.ndarray, "rows D"],
    labels: Int[np.ndarray, " rows"],
    fit: Mapping[str, Int[np.ndarray, " _"]],
    report: Mapping[str, Int[np.ndarray, " _"]],
    classes: int,
    *,
    balanced: bool = True,
) -> dict[str, SiteMetrics]:
    """Fit one logistic regression per site on its own rows and return each site's figures.

    Args:
        features: Of all rows of the federation.
        labels: Class of all rows, -1 for none; rows without a class are left out.
        fit: Site name to the row indices to learn from.
        report: Site name to the row indices to judge on.
        classes: K of the task.
        balanced: Weight a site's classes equally.

    Returns:
        Site name to its figures, in name order; a site without labelled rows to learn from is left out.
    """
    return {
        name: _figures(features, labels, learn, judge, classes, balanced)
        for name, learn, judge in _labelled(labels, fit, report)
    }


def pooled_baseline(
    features: Float[np.ndarray, "rows D"],
    labels: Int[np.ndarray, " rows"],
    fit: Mapping[str, Int[np.ndarray, " _"]],
    report: Mapping[str, Int[np.ndarray, " _"]],
    classes: int,
    *,
    balanced: bool = True,
) -> dict[str, SiteMetrics]:
    """Fit one logistic regression on the rows of all sites and return each site's figures; see ``site_baselines``.

    Args:
        features: Of all rows of the federation.
        labels: Class of all rows, -1 for none.
        fit: Site name to the row indices to learn from.
        report: Site name to the row indices to judge on.
        classes: K of the task.
        balanced: Weight the classes of the pooled rows equally.
    """
    parts = list(_labelled(labels, fit, report))
    if not parts:
        return {}
    learn = np.concatenate([part for _, part, _ in parts])
    probabilities = fit_predict(
        features[learn], labels[learn], features[np.concatenate([p for _, _, p in parts])], classes, balanced=balanced
    )
    cuts = np.cumsum([part.size for _, _, part in parts])[:-1]
    return {
        name: site_metrics(part, labels[judge], predicted=part.argmax(axis=1))
        for (name, _, judge), part in zip(parts, np.split(probabilities, cuts), strict=True)
    }


def _labelled(
    labels: Int[np.ndarray, " rows"],
    fit: Mapping[str, Int[np.ndarray, " _"]],
    report: Mapping[str, Int[np.ndarray, " _"]],
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for name in sorted(fit):
        learn = fit[name][labels[fit[name]] >= 0]
        judge = report[name][labels[report[name]] >= 0]
        if learn.size > 0:
            yield name, learn, judge


def _figures(
    features: Float[np.ndarray, "rows D"],
    labels: Int[np.ndarray, " rows"],
    learn: Int[np.ndarray, " _"],
    judge: Int[np.ndarray, " _"],
    classes: int,
    balanced: bool,
) -> SiteMetrics:
    probabilities = fit_predict(features[learn], labels[learn], features[judge], classes, balanced=balanced)
    return site_metrics(probabilities, labels[judge], predicted=probabilities.argmax(axis=1))
