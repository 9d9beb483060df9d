"""The device's half of every method that devices learn, by the method's name. CONTRIBUTING.md says how one is added."""

from collections.abc import Mapping
from typing import Final

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.fedclf import FedCLFLearner
from edgefl_client.learning.fedevprompt import FedEvPromptLearner
from edgefl_client.learning.own_pictures import Dealt
from edgefl_client.learning.round_learner import Circumstances, Learner, RoundLearner
from edgefl_client.learning.session import plan_of
from edgefl_protocol.bundle import Bundle

LEARNERS: Final[Mapping[str, Learner]] = {"fedclf": FedCLFLearner, "fedevprompt": FedEvPromptLearner}


def learner_of(bundle: Bundle) -> Learner:
    """Return what learns a bundle's method.

    Raises:
        LearningError: the bundle brings no training step, or one of a method that this version does not know.
    """
    kind = plan_of(bundle).kind
    if kind not in LEARNERS:
        raise LearningError(
            f"this version does not know how to learn {kind}; install a newer edgefl-derm", "unknown_kind"
        )
    return LEARNERS[kind]


def learner_for(bundle: Bundle, rows: Dealt, circumstances: Circumstances) -> RoundLearner:
    """Return the learner of a bundle, with its pictures."""
    return learner_of(bundle)(bundle, rows, circumstances)
