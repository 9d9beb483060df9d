"""Prompts and head of a frozen network, learned with the evidential loss, as a `SiteLearner`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from edgefl_protocol import Payload
from edgefl_trainer.contract import Predictor, Scalar, Site, State, Task
from edgefl_trainer.learning import evidential, private_prompts
from edgefl_trainer.learning.evidential import STATISTICS, EvidentialRecipe
from edgefl_trainer.learning.features import common_features, feature_reply, features_sent
from edgefl_trainer.learning.loss_terms import Term
from edgefl_trainer.models.spec import settled_readout
from edgefl_trainer.rollout import WHOLE, Rollout


@dataclass(frozen=True)
class PromptLearner:
    """See `SiteLearner`; readout and feature statistics are what sites settle."""

    recipe: EvidentialRecipe
    rollout: Rollout = WHOLE
    learns_network: ClassVar[bool] = False
    settled: ClassVar[tuple[str, ...]] = STATISTICS

    @property
    def tells_first(self) -> tuple[str, ...]:
        """Moments of features, unless the head reads them as they are."""
        return features_sent(self.recipe.head_norm)

    def trained(self, task: Task) -> tuple[str, ...]:
        """Name the prompts in block order, then the head."""
        return self.recipe.trained

    def initial(self, task: Task) -> dict[str, Tensor]:
        """Make fresh prompts and a fresh head."""
        return evidential.initial_tensors(self.recipe, task.backbone, len(task.classes), task.seed)

    def first_values(self, task: Task) -> Mapping[str, Scalar]:
        """Remember the readout that is wanted, and whether features are standardised."""
        wanted = settled_readout(self.recipe.readout, task.backbone)
        return {"wanted": wanted, "standardise": int(self.recipe.standardises(task.backbone))}

    def first_reply(self, site: Site) -> Payload:
        """Tell moments of the features and how well each readout probes."""
        return feature_reply(site, self.recipe.readout, standardise=self.recipe.standardises(site.task.backbone))

    def settle(self, values: Mapping[str, Scalar], replies: Mapping[str, Payload]) -> State:
        """Pool the moments, and take the readout that probes better."""
        return common_features(replies, str(values["wanted"]), standardise=bool(values["standardise"]))

    def begun(self, site: Site, state: State, broadcast: Payload) -> State:
        """See `private_prompts.begun`."""
        return private_prompts.begun(self.recipe, site, state, broadcast)

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
        """See `private_prompts.private_round`."""
        return private_prompts.private_round(
            self.recipe,
            site,
            before,
            broadcast,
            keep_optimizer=keep_optimizer,
            terms=terms,
            rollout=self.rollout,
            epochs=epochs,
        )

    def predictor(self, site: Site, model: State) -> Predictor:
        """See `private_prompts.scoring`."""
        return private_prompts.scoring(self.recipe, site, model, self.rollout)
