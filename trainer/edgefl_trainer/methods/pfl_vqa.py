"""pFL-VQA. Zhu et al., "Prompt-based personalized federated learning for medical visual question answering".

arXiv 2402.09677 (ICASSP 2024).

    all start from the same model and the same prompt p                                       start
    server sends site t its shared prompt p_t^s = sum_{i != t} eta_i p_i                      broadcast
        eta_i = acc_i cs(p_i, p_t) / sum_{j != t} acc_j cs(p_j, p_t)                          exchange_weights
    site t: E epochs on L_CE + alpha L_d + beta R, L_d = 1 - cos(p_t, p_t^s), p_t^s constant  local_round
            its prompt and its accuracy on tune rows go, the model stays
    server: the prompt and the accuracy of a site replace those before                        aggregate

Differs from the paper, of which the abstract alone was to be had: the form of prompt-based residual attention, R,
alpha, beta, lengths and schedule are ours; a similarity below 0 counts 0; where nothing speaks for any site all count
alike; before the first reply, and at a site without others, there is no L_d (docs/methods.md 11).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from edgefl_protocol import Payload
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Arrays, Asked, Declaration, Phase, Predictor, Site, State, Task
from edgefl_trainer.errors import TrainingError
from edgefl_trainer.learning import method_parts
from edgefl_trainer.learning.learners.answers import PRESETS, AnswerLearner, AnswerRecipe
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.learning.named_arrays import as_arrays, as_tensors
from edgefl_trainer.models.answers import SHARED

Rule = Literal["reliability", "accuracy", "similarity", "uniform"]
PROMPTS = "prompts."  # begins the names of prompts
ACCURACY = "accuracy"
LEAST_SUM = 1e-8  # of what speaks for the others, below which nothing does


def exchange_weights(
    accuracies: Mapping[str, float],
    prompts: Mapping[str, NDArray[np.generic]],
    receiver: str,
    rule: Rule = "reliability",
) -> dict[str, float]:
    """Compute eta: how much each other site's prompt counts in the shared prompt of `receiver`.

    The weights are not negative and sum to 1; there are none for the receiver, and none at all where it is alone. A
    similarity below 0 counts 0; below a sum of 1e-8 all others count alike.

    Args:
        accuracies: of each site on its own tune rows, 0 to 1.
        prompts: of each site, the receiver's among them.
        rule: accuracy times similarity, or an ablation of it: one of the two, or neither.
    """
    others = sorted(name for name in prompts if name != receiver)
    known = {
        name: max(0.0, float(accuracies.get(name, 0.0))) if rule in ("reliability", "accuracy") else 1.0
        for name in others
    }
    if rule in ("reliability", "similarity"):
        own = _direction(prompts[receiver])
        known = {name: known[name] * max(0.0, float(_direction(prompts[name]) @ own)) for name in others}
    total = sum(known.values())
    if rule == "uniform" or not total >= LEAST_SUM:
        return {name: 1 / len(others) for name in others}
    return {name: value / total for name, value in known.items()}


def _direction(prompt: NDArray[np.generic]) -> NDArray[np.float64]:
    """The prompt as a vector of length 1; zeros where it has no direction."""
    flat = np.asarray(prompt, np.float64).ravel()
    largest = np.abs(flat).max(initial=0.0)
    if largest == 0:
        return flat
    scaled = flat / largest  # whatever the size, its square is a number
    return np.asarray(scaled / np.linalg.norm(scaled))


@dataclass(frozen=True)
class PromptDistance:
    """alpha L_d, how far the site's prompts point from the shared ones; a `Term`."""

    alpha: float
    shared: Mapping[str, Tensor]  # p_t^s by the names of the site's prompts, constant
    name: str = field(default="prompt_distance", init=False)
    needs_maps: bool = field(default=False, init=False)

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """See `Term`."""
        names = sorted(self.shared)
        own, other = (torch.cat([of[name].flatten() for name in names]) for of in (step.tensors, self.shared))
        return self.alpha * (1 - cosine_similarity(own, other.detach(), dim=0))


def _site_of(name: str) -> str | None:
    """Whose an entry of the server's state is: `prompts.<kind>.<site>`, `accuracy.<site>`; None: all's."""
    kind, _, rest = name.partition(".")
    return rest if kind == ACCURACY else rest.partition(".")[2] or None


@dataclass(frozen=True, kw_only=True)
class PflVQA:
    """Every site has its own answer model; a small prompt is shared, most with those that answer well and are alike.

    For sites that answer questions about pictures of different organs, and may send neither weights nor features.
    """

    family: ClassVar[str] = "answer models"
    paper: ClassVar[str] = "arXiv 2402.09677"
    travels: ClassVar[tuple[str, ...]] = ("prompts",)
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = Declaration(
        presets=lambda backbone, hyper: PRESETS,
        asked=Asked(make=lambda: PflVQA(), presets=PRESETS),
        questions_only=True,
        learns_network=lambda method: method.learner.learns_network,
        site_of=_site_of,
    )

    recipe: AnswerRecipe = field(default_factory=AnswerRecipe)
    alpha: float = 0.1  # weight of L_d, the distance from the shared prompt (default ours)
    # what speaks for another site: its accuracy times its similarity, or one of them, or nothing (uniform)
    exchange: Rule = "reliability"
    # what reads the shared prompt: L_d alone (loss), or also the attention, beside the own prompt (concat) (ours)
    use_shared: Literal["loss", "concat"] = "loss"

    phases = method_parts.train_rounds

    def __post_init__(self) -> None:
        check_bounds(self, alpha=(0 <= self.alpha <= 100, "0 to 100"))

    @property
    def learner(self) -> AnswerLearner:
        """What learns at a site."""
        return AnswerLearner(self.recipe)

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with the prompt that every site begins with."""
        initial = self.learner.initial(task)
        return State(as_arrays({name: initial[name] for name in self.recipe.prompt_names}))

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """Send each site its shared prompt; nothing where no other site has replied."""
        return {name: Payload(self._shared_prompts(state, name), {}) for name in sites}

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Learn E epochs with the own prompt drawn towards the shared one; send it and the accuracy on tune rows."""
        model = self._model(site, state, broadcast)
        shared = as_tensors({name: broadcast.arrays[name] for name in self._received(broadcast)}, site.device)
        terms = [PromptDistance(self.alpha, shared)] if shared and self.alpha > 0 else []
        new = self.learner.learned(site, model, broadcast, keep_optimizer=True, terms=terms)
        accuracy = self.learner.accuracy(site, self._model(site, new, broadcast))
        return new, Payload({name: new.arrays[name] for name in self.recipe.prompt_names}, {ACCURACY: accuracy})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Keep the newest prompt and accuracy of each site."""
        arrays, values = dict(state.arrays), dict(state.values)
        for site in sorted(replies):
            values[f"{ACCURACY}.{site}"] = _accuracy(replies[site])
            arrays |= {f"{name}.{site}": replies[site].arrays[name] for name in self.recipe.prompt_names}
        return State(arrays, values)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """Return the site's own model; the initial one where it took part in no round."""
        return self.learner.predictor(site, self._model(site, state, broadcast))

    def _model(self, site: Site, state: State, broadcast: Payload) -> State:
        """A site's model, with `concat` beside the shared prompt that it reads."""
        own = self.learner.begun(site, state, broadcast)
        if self.use_shared == "loss":
            return own
        read = {SHARED + name.removeprefix(PROMPTS): broadcast.arrays[name] for name in self._received(broadcast)}
        return State({**own.arrays, **read}, own.values)

    def _received(self, broadcast: Payload) -> list[str]:
        return [name for name in self.recipe.prompt_names if name in broadcast.arrays]

    def _shared_prompts(self, state: State, receiver: str) -> Arrays:
        """p_t^s by name: the mean of the others' prompts by their weights. Who has not replied has the first prompt."""
        names = self.recipe.prompt_names
        known = {name.removeprefix(f"{ACCURACY}.") for name in state.values}
        own = {
            site: {name: state.arrays[f"{name}.{site}" if site in known else name] for name in names}
            for site in sorted({*known, receiver})
        }
        vectors = {site: np.concatenate([prompts[name].ravel() for name in names]) for site, prompts in own.items()}
        accuracies = {site: float(state.values[f"{ACCURACY}.{site}"]) for site in known}
        weights = exchange_weights(accuracies, vectors, receiver, self.exchange)
        if not weights:
            return {}
        return {
            name: np.asarray(
                sum(weights[site] * own[site][name].astype(np.float64) for site in sorted(weights)),
                own[receiver][name].dtype,
            )
            for name in names
        }


def _accuracy(reply: Payload) -> float:
    """The accuracy that a reply tells; a `TrainingError` where it is none."""
    told = reply.scalars.get(ACCURACY)
    if not isinstance(told, int | float) or not 0 <= told <= 1:
        raise TrainingError(f"a reply says {ACCURACY} = {told!r}; it must be a number from 0 to 1.")
    return float(told)
