"""What a bundle that answers questions is compared and tried with: the run's own `tune` questions of the site.

Guarantees: no question was trained on, none of the reported rows is looked at; the same run gives the same figures;
where the pictures cannot be read there is a bundle all the same, which says neither whether it looks at pictures nor
which words it was taught.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_export.bundles.taught import TaughtWords, taught_words
from edgefl_export.errors import ExportError
from edgefl_export.int8.calibration import federation_of
from edgefl_export.parity.score_parity import MIN_IMAGES, AskedWords, Pictures
from edgefl_protocol.bundle.question_table import TriedQuestions
from edgefl_protocol.pictures.light import LightRange
from edgefl_protocol.pictures.quality import light_at_scale
from edgefl_trainer.contract import Predictor
from edgefl_trainer.data import Federation
from edgefl_trainer.engine.judging.suspicion import tune_scores
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.engine.sites import examples_of
from edgefl_trainer.evaluate.looking import other_picture, tried_questions


@dataclass(frozen=True)
class OwnQuestions:
    """Questions for the gates, each with its picture, None where drawn ones have to do; how it did, and was taught."""

    images: Pictures | None = None
    questions: AskedWords | None = None
    tried: TriedQuestions | None = None
    # (n,) of the site's `tune` questions, which a device refuses neither for their words nor for the picture's light;
    # None: all
    not_refused: NDArray[np.bool_] | None = None
    taught: TaughtWords | None = None


def own_questions(run: FinishedRun, site: str, predictor: Predictor, report: Callable[[str], None]) -> OwnQuestions:
    """Read a site's `tune` questions, and ask each with its own picture and with another one's."""
    kept = tune_scores(run, site)
    refer_above = float(run.calibration["sites"][site]["refer_above"])
    try:
        federation = federation_of(run)
    except ExportError as error:
        report(
            f"nobody tries whether it looks at pictures or says which words it was taught, and drawn ones are "
            f"compared: {error}"
        )
        federation = None
    taught = None if federation is None else taught_words(run.summary, federation, site)
    other = None
    if federation is not None and site in federation.sites:
        report("asking the tune questions with another picture, too …")
        other = other_picture(predictor, examples_of(federation, federation.sites[site].tune), federation.lesions)
    not_refused = None if taught is None else taught.read_whole
    usual = None if federation is None or site not in federation.sites else _usual_light(run, federation, site)
    if usual is not None:
        not_refused = usual if not_refused is None else not_refused & usual
    tried = None
    if kept is not None:
        tried = tried_questions(kept.probabilities, kept.targets, predictor.seen, refer_above, other, not_refused)
    images, questions = (None, None) if federation is None else _for_parity(federation, site, run.settings.seed)
    return OwnQuestions(images, questions, tried, not_refused, taught)


def _usual_light(run: FinishedRun, federation: Federation, site: str) -> NDArray[np.bool_] | None:
    """Which `tune` questions are about a picture whose light is usual, (n,); None where the run tells of no light."""
    told = run.calibration["sites"][site].get("light")
    if told is None:
        return None
    usual, tune = LightRange.from_json(told), examples_of(federation, federation.sites[site].tune)
    inside = {place: usual.unlike(light_at_scale(tune.images[place])) is None for place in np.unique(tune.places)}
    return np.array([inside[place] for place in tune.places], dtype=np.bool_)


def _for_parity(federation: Federation, site: str, seed: int) -> tuple[Pictures | None, AskedWords | None]:
    """Draw 64 `tune` questions, the site's own first; None where all sites together have fewer."""
    if federation.questions is None:
        return None, None
    draw = np.random.default_rng(seed)
    order = [site, *(name for name in federation.sites if name != site)]
    tune = [federation.sites[name].tune for name in order if name in federation.sites]
    rows = np.concatenate([draw.permutation(one.astype(np.int64)) for one in tune])[:MIN_IMAGES]
    if len(rows) < MIN_IMAGES:
        return None, None
    return federation.images[federation.places(rows)], federation.questions.tokens[rows]
