"""What a method that moves named tensors needs of the model behind them: how it begins, learns and scores.

`local`, `fedavg`, `fedprox` and `fedavgpers` know tensors by name and no network. A recipe's type says which learner
stands behind it: prompts and head of a frozen network for pictures, an answer model for questions about them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from edgefl_protocol import Payload
from edgefl_trainer.contract import Asked, Declaration, MeasuredBefore, Method, Predictor, Scalar, Site, State, Task
from edgefl_trainer.learning import evidential
from edgefl_trainer.learning.evidential import EvidentialRecipe
from edgefl_trainer.learning.learners.answers import PRESETS, AnswerLearner, AnswerRecipe
from edgefl_trainer.learning.learners.prompts import PromptLearner
from edgefl_trainer.learning.loss_terms import Term
from edgefl_trainer.rollout import WHOLE, Rollout

Recipe = EvidentialRecipe | AnswerRecipe


class SiteLearner(Protocol):
    """A model that one site learns, as named tensors."""

    @property
    def learns_network(self) -> bool:
        """Whether the network of the run learns, too."""

    @property
    def settled(self) -> tuple[str, ...]:
        """Tensors of the model that no step moves: the sites settle them before round 1."""

    @property
    def tells_first(self) -> tuple[str, ...] | None:
        """Kinds of what sites tell before round 1 (`rules.travels`); None where nothing has to be settled."""

    def trained(self, task: Task) -> tuple[str, ...]:
        """Return the names of the tensors that learn, always in the same order."""

    def initial(self, task: Task) -> dict[str, Tensor]:
        """Make the tensors that learn, the same at every site; a `SettingError` where they do not fit the task."""

    def first_values(self, task: Task) -> Mapping[str, Scalar]:
        """Return what the server has to remember until it settles what sites told."""

    def first_reply(self, site: Site) -> Payload:
        """Tell what a site finds before round 1."""

    def settle(self, values: Mapping[str, Scalar], replies: Mapping[str, Payload]) -> State:
        """Settle for all sites what they told: tensors and plain values; `values` are those of `first_values`."""

    def begun(self, site: Site, state: State, broadcast: Payload) -> State:
        """Return the state of a site, or the one it begins with where that is still empty."""

    def learned(
        self,
        site: Site,
        before: State,
        broadcast: Payload,
        *,
        keep_optimizer: bool,
        terms: Sequence[Term] = (),
        epochs: int | None = None,
    ) -> State:
        """Learn E epochs, or as many as named, from a state that has begun; `terms` join the loss.

        With `keep_optimizer` its moments come from the state and stand in the one that is returned.
        """

    def predictor(self, site: Site, model: State) -> Predictor:
        """Make what a site scores with."""


def learner_of(recipe: Recipe, rollout: Rollout = WHOLE) -> SiteLearner:
    """Return the learner behind a recipe; `rollout` is how it makes maps."""
    return PromptLearner(recipe, rollout) if isinstance(recipe, EvidentialRecipe) else AnswerLearner(recipe)


def declares_both(asked: Callable[[], Method]) -> Declaration:
    """Declare what a method with a `learner` does for pictures, and for pictures that are asked questions.

    `asked` makes it with an `AnswerRecipe`.
    """
    return replace(
        evidential.DECLARES,
        asked=Asked(make=asked, presets=PRESETS),
        learns_network=lambda method: bool(method.learner.learns_network),
    )


def declares_over(base: Declaration, asked: Callable[[], Method]) -> Declaration:
    """Declare of a method that holds another one as `base` all that this one declares (`declares_both`).

    `asked` makes it with an `AnswerRecipe`.
    """

    def measured(method: Any, sites: Mapping[str, Site]) -> MeasuredBefore | None:
        return None if base.measured_before is None else base.measured_before(method.base, sites)

    return replace(base, asked=Asked(make=asked, presets=PRESETS), measured_before=measured)
