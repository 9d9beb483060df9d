"""pFedPG. Yang et al., "Efficient model personalization in federated learning via client-specific prompt generation",
ICCV 2023, arXiv 2308.15367, sections 3 and 4.

    server: P_n = G(d_n; P_base), prompts made for site n from its descriptor      broadcast → prompt_generator.generate
    site n: E epochs of P_n and of its own head H_n, giving P~_n;                  local_round
            sends P~_n - P_n, keeps P~_n and H_n
    server: phi, P_base, d_n one AdamW step along (dP_n/dphi)' (P_n - P~_n),       aggregate → pull_back, adamw_step
            the mean over the sites that replied

The local change points downhill, so the gradient that is pulled back is its negative: the generator's output moves
towards P~_n.

Differs from the paper: one descriptor asks for ten tokens, q_j = (P_base_j + d_n) W_Q, and attention is added to P_base
(`residual=off`: not added); AdamW where the paper names a rate only; descriptors of sites that did not reply stay as
they are; each site chooses readout and feature scale for its own head; images are turned and mirrored
(docs/methods.md 5.6).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_protocol import Payload
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Declaration, Phase, Predictor, Site, State, Task
from edgefl_trainer.learning import method_parts, softmax
from edgefl_trainer.learning.adamw import adamw_step
from edgefl_trainer.learning.features import own_features, readout_named
from edgefl_trainer.learning.named_arrays import as_arrays
from edgefl_trainer.learning.softmax import HEAD_WEIGHT, PROMPTS, SoftmaxRecipe, check_count, check_fits, head_init
from edgefl_trainer.models.inserts import Tokens
from edgefl_trainer.models.prompt_generator import BASIS, generate, initial_weights, pull_back, uniform_tokens
from edgefl_trainer.models.spec import require_vit

CHANGE = "prompts.change"  # P~_n - P_n
DESCRIPTOR = "descriptor."  # and the site's name


def _site_of(name: str) -> str | None:
    """Whose descriptor an array of the server's state is, or the optimizer's moments of it."""
    return name.partition(DESCRIPTOR)[2] or None


@dataclass(frozen=True, kw_only=True)
class PFedPG:
    """A generator at the server makes prompts for each site; heads stay at home.

    For sites that want prompts of their own, and send nothing but these.
    """

    family: ClassVar[str] = "prompt tokens"
    paper: ClassVar[str] = "arXiv 2308.15367"
    travels: ClassVar[tuple[str, ...]] = ("prompts",)
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = replace(softmax.DECLARES, site_of=_site_of)

    recipe: SoftmaxRecipe = field(default_factory=lambda: SoftmaxRecipe(lr=0.25, weight_decay=1e-3, batch=64))
    n: int = 10  # number of prompt tokens, K_p
    width: int = 64  # l_k = l_v, width of the attention (default ours)
    residual: bool = True  # whether P_n is P_base + attention, or attention alone (ours)
    server_lr: float = 1e-3  # learning rate of the generator
    server_weight_decay: float = 1e-2  # weight decay of the generator (ours)

    def __post_init__(self) -> None:
        check_count("n", self.n)
        check_count("width", self.width)
        check_bounds(
            self,
            server_lr=(0 <= self.server_lr <= 1, "0 to 1"),
            server_weight_decay=(0 <= self.server_weight_decay <= 1, "0 to 1"),
        )

    phases = method_parts.train_rounds  # the paper has all sites take part in each

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with a fresh generator, and a descriptor for each site."""
        check_fits(task, Tokens())
        spec = require_vit(task.backbone, "pfedpg")
        values = {"seed": task.seed, "patch": spec.patch}
        weights = initial_weights(spec.patch, spec.width, self.n, self.width, np.random.default_rng(task.seed))
        state = State(weights, values)
        return State({**weights, **{f"{DESCRIPTOR}{name}": _descriptor(state, name) for name in sites}}, values)

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """Send each site its own P_n; after the last round nothing to a site that the generator was never taught."""
        known = [name for name in sites if phase.kind == "train" or f"{DESCRIPTOR}{name}" in state.arrays]
        made = {name: generate(state.arrays, _descriptor(state, name), self.residual) for name in known}
        return {n: Payload({PROMPTS: made[n][None].astype(np.float32)} if n in made else {}, {}) for n in sites}

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Learn E epochs of P_n and H_n; the change of the prompts is sent."""
        own = self._begun(site, state)
        received = broadcast.arrays[PROMPTS]
        names = (PROMPTS, HEAD_WEIGHT)
        tensors = softmax.trainable({**own.arrays, PROMPTS: received}, names, site.device)
        module = self.recipe.module(site, readout_named(own.values["readout"]), Tokens())
        softmax.learn(self.recipe, site, module, tensors, names, int(broadcast.scalars["round"]))
        learned = as_arrays({name: tensors[name] for name in names})
        change = learned[PROMPTS] - received
        return State({**own.arrays, **learned}, own.values), Payload({CHANGE: change}, {"n_train": len(site.train)})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Take one step of generator, basis and the descriptors of the sites that replied."""
        if phase.kind == "final":
            return state
        gradients: dict[str, NDArray[np.float64]] = {}
        own = {f"{DESCRIPTOR}{name}": _descriptor(state, name) for name in sorted(replies)}
        for name in sorted(replies):
            uphill = -replies[name].arrays[CHANGE][0].astype(np.float64)  # P_n - P~_n
            of_weights, of_descriptor = pull_back(
                state.arrays, own[f"{DESCRIPTOR}{name}"], uphill / len(replies), self.residual
            )
            gradients[f"{DESCRIPTOR}{name}"] = of_descriptor
            for key, value in of_weights.items():
                gradients[key] = gradients.get(key, 0.0) + value
        arrays = adamw_step({**state.arrays, **own}, gradients, self.server_lr, self.server_weight_decay)
        return State(arrays, state.values)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """Return the site's adapted prompts and head; generated prompts and the initial head before its first round.

        None for a site that the server does not know: it has neither descriptor nor head.
        """
        if not state.arrays and PROMPTS not in broadcast.arrays:
            return None
        own = self._begun(site, state)
        module = self.recipe.module(site, readout_named(own.values["readout"]), Tokens())
        return softmax.make_predictor(site, module, {**broadcast.arrays, **own.arrays})

    def _begun(self, site: Site, state: State) -> State:
        """The state, or the one a site begins with: the initial head, its own readout and feature statistics."""
        if state.arrays:
            return state
        spec = site.task.backbone
        generator = torch.Generator().manual_seed(site.task.seed)
        head = {HEAD_WEIGHT: head_init(spec, len(site.task.classes), generator)}
        own = own_features(site, self.recipe.readout, standardise=self.recipe.standardises(spec))
        return State({**as_arrays(head), **own.arrays}, own.values)


def _descriptor(state: State, site: str) -> NDArray[np.float64]:
    """d_n (D,): the state's, or a fresh one that depends on seed and name only."""
    if (found := state.arrays.get(f"{DESCRIPTOR}{site}")) is not None:
        return found.astype(np.float64)
    digest = hashlib.sha256(f"{state.values['seed']}\x1f{site}".encode()).digest()
    width = state.arrays[BASIS].shape[1]
    return uniform_tokens(int(state.values["patch"]), (width,), np.random.default_rng(list(digest)))
