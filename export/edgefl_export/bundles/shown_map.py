"""Which map a bundle's device shows: measured on the run's own `tune` pictures of the site, before the graph is traced.

Guarantees: no picture was trained on, none of the reported rows is looked at; the same run gives the same choice; where
the pictures cannot be read there is a bundle all the same, which shows no map and says why. docs/decisions/0040.
"""

from collections.abc import Callable

import numpy as np

from edgefl_export.errors import ExportError
from edgefl_export.int8.calibration import federation_of
from edgefl_protocol.bundle.shown_map import ShownMap
from edgefl_trainer.contract import Predictor
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.evaluate.map_truth import LEAST_PICTURES, not_measured
from edgefl_trainer.evaluate.measured_maps import measure_maps
from edgefl_trainer.models.answers import AnswerModule
from edgefl_trainer.models.scoring import ScoreModule
from edgefl_trainer.models.shown_maps import graph_maps


def measured_map(run: FinishedRun, site: str, predictor: Predictor, report: Callable[[str], None]) -> ShownMap:
    """Measure the maps of a site's model and choose the one that is shown, or none."""
    if isinstance(predictor.module, AnswerModule) and not predictor.module.options.sees_picture:
        raise ExportError("this run learned with picture=hidden, so its models see no picture: export another run")
    try:
        federation = federation_of(run)
    except ExportError as error:
        report(f"no map will be shown: {error}")
        return not_measured("no_pictures")
    tune = federation.sites[site].tune if site in federation.sites else np.zeros(0, dtype=np.int64)
    if len(tune) < LEAST_PICTURES:
        return not_measured("few_pictures", len(tune))
    rows = np.random.default_rng(run.settings.seed).permutation(tune)
    lesions = [federation.lesions[row] for row in rows]
    asked = None if federation.questions is None else federation.questions.tokens[rows]
    images = federation.images[federation.places(rows)]
    return measure_maps(predictor, images, lesions, questions=asked, report=report).shown


def with_map(module: ScoreModule, shown: ShownMap | None) -> ScoreModule:
    """Make the module give the map that is shown, where that takes an output of its own."""
    if shown is None or not shown.shown:
        return module
    kinds = graph_maps(module.backbone, module.options.readout)
    wanted = next((kind for kind in kinds if kind == shown.kind), None)
    return module if wanted is None else ScoreModule(module.backbone, module.options, wanted)
