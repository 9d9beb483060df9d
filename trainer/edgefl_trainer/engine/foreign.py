"""What the sites' models say about pictures that are not of the task (docs/methods.md 8.4, foreign pictures)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from edgefl_trainer.data.sources.foreign import read_foreign
from edgefl_trainer.engine.models import FinishedRun, predict
from edgefl_trainer.evaluate.intervals import Scored
from edgefl_trainer.evaluate.metrics import entropy_nats, out_of_distribution_auroc


def foreign_figures(
    run: FinishedRun, sources: Sequence[str], scored: Mapping[str, Scored], device: torch.device
) -> dict[str, dict[str, Any]]:
    """How well each site's uncertainty tells its reported rows from foreign pictures.

    Args:
        sources: see `data.foreign.read_foreign`.

    Returns:
        For each source `images`, `auroc` by site (null where a site has no reported row), `mean_auroc`, `worst_auroc`.

    Raises:
        DataError: a source cannot be used.
    """
    found = {}
    for source in sources:
        images = read_foreign(source, run.backbone.spec.image_px)
        areas = {}
        for name in sorted(scored):
            scores = predict(run.predictor(name), images, device)
            outside = entropy_nats(scores.probabilities) if scores.vacuity is None else scores.vacuity
            areas[name] = out_of_distribution_auroc(scored[name].uncertainty, outside)
        known = [area for area in areas.values() if area is not None]
        found[source] = {
            "images": len(images),
            "auroc": areas,
            "mean_auroc": float(np.mean(known)) if known else None,
            "worst_auroc": min(known) if known else None,
        }
    return found
