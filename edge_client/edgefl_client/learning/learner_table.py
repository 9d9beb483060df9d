"""Which learner a bundle's training step asks for."""

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.own_pictures import Dealt
from edgefl_client.learning.round_learner import Circumstances, RoundLearner
from edgefl_client.learning.session import plan_of
from edgefl_protocol.bundle import Bundle


def learner_for(bundle: Bundle, rows: Dealt, circumstances: Circumstances) -> RoundLearner:
    """The learner of a bundle's method.

    Args:
        bundle: the verified bundle with its training step.
        rows: the owner's pictures: those that teach, and those held back where the method judges.
        circumstances: the rest.

    Raises:
        LearningError: the bundle brings no training step, or one of a kind that this version does not know.
        BundleError: the runtime cannot load its graph.
    """
    kind = plan_of(bundle).kind
    if kind == "fedevprompt":
        from edgefl_client.learning.fedevprompt import FedEvPromptLearner

        return FedEvPromptLearner(bundle, rows, circumstances)
    if kind == "fedclf":
        from edgefl_client.learning.fedclf import FedCLFLearner

        return FedCLFLearner(bundle, rows, circumstances)
    raise LearningError(f"this version does not know how to learn {kind}; install a newer edgefl", "unknown_kind")
