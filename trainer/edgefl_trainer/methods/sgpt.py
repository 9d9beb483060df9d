"""SGPT. Deng et al., "Unlocking the potential of prompt-tuning in bridging generalized and personalized federated
learning", CVPR 2024, arXiv 2310.18285, and its code, github.com/ubc-tea/SGPT.

    server sends shared prompts, group prompts, keys, head and all selections so far           broadcast
    site c, stage 1: E epochs of head and shared prompts, no group in the sequence             _stage_1
            stage 2: E epochs of head, group prompts and keys; shared prompts stay             _stage_2
                     an image takes g = argmin (1 − cos(q, key_g))·(f_g + 5e-4), f_g the       least_used_nearest
                     share of g in all selections; loss CE − mean cos(q, key_g)                grouped
    server: head and prompts weighted by images, a key by the sites' shares of its             aggregate
            selections; group prompts and keys: half the old one, half the mean                with_momentum

The query q is the class token of the bare network, rectified, unit norm; scoring takes argmin (1 − cos). The head reads
the class token in stage 1, afterwards the mean of it and the group's tokens (`models.inserts.Grouped`).

Differs from the paper: f_g is that of the round's start, not counted on while sites work one after another; queries are
those of the view that is learned, not cached; rate decay and gradient clip are PEP-FedPT's. docs/methods.md 5.5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_protocol import Payload
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Arrays, Declaration, Phase, Predictor, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import averaged_prompts, softmax
from edgefl_trainer.learning.averaged_prompts import Weighting
from edgefl_trainer.learning.named_arrays import as_arrays
from edgefl_trainer.learning.prompt_groups import (
    KEYS,
    grouped,
    mean_keys,
    orthogonal_keys,
    with_momentum,
    without_group,
)
from edgefl_trainer.learning.softmax import HEAD_WEIGHT, SoftmaxRecipe, check_fits, head_init, rising, token_init
from edgefl_trainer.models.inserts import Grouped
from edgefl_trainer.models.spec import BackboneSpec, require_vit

SHARED, GROUPS = "prompts.s", "prompts.g"
FIRST_STAGE, SECOND_STAGE = (SHARED, HEAD_WEIGHT), (GROUPS, KEYS, HEAD_WEIGHT)
SELECTIONS = "selections"  # of each group, (G,)
KEY_EPOCHS = 6  # epochs of stage 2 whose loss draws keys: the reference counts `epoch <= 5` from 0


@dataclass(frozen=True, kw_only=True)
class SGPT:
    """Shared prompts for all images, group prompts for those that look alike.

    For sites whose pictures fall into kinds that others have, too.
    """

    family: ClassVar[str] = "prompt tokens"
    paper: ClassVar[str] = "arXiv 2310.18285"
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = softmax.DECLARES

    recipe: SoftmaxRecipe = field(default_factory=lambda: SoftmaxRecipe(lr=0.01, weight_decay=1e-5, batch=40))
    groups: int = 20  # G, groups of images that share a prompt (public code)
    # blocks with shared prompts; empty: 0 to 3 of 12, in proportion of other depths (public code)
    shared_blocks: tuple[int, ...] = ()
    # blocks with prompts of groups; empty: 4 to 6 of 12, in proportion of other depths (public code)
    group_blocks: tuple[int, ...] = ()
    key_momentum: float = 0.5  # share of the old keys that an update keeps (public code)
    prompt_momentum: float = 0.5  # share of the old group prompts that an update keeps (public code)
    # what a site counts by in all means but that of the keys: its training images, or all sites alike (public code)
    weighting: Weighting = "samples"

    travels = averaged_prompts.travels("prompts", "weights")
    phases = averaged_prompts.phases
    broadcast = averaged_prompts.broadcast

    def __post_init__(self) -> None:
        if self.recipe.readout == "mean":
            raise SettingError(
                "readout is 'mean', but sgpt reads the class token, later together with the group's: leave readout out."
            )
        object.__setattr__(self, "recipe", replace(self.recipe, readout="cls"))
        check_bounds(
            self,
            groups=(1 <= self.groups <= 10_000, "1 to 10000"),
            key_momentum=(0 <= self.key_momentum <= 1, "0 to 1"),
            prompt_momentum=(0 <= self.prompt_momentum <= 1, "0 to 1"),
            shared_blocks=(rising(self.shared_blocks), "rising, from 0"),
            group_blocks=(rising(self.group_blocks), "rising, from 0"),
        )

    def insert(self, depth: int) -> Grouped:
        """Say where prompts enter that many blocks; a `SettingError` where a shared one enters behind a group's."""
        shared = self.shared_blocks or tuple(range(max(1, depth // 3)))
        behind = shared[-1] + 1
        group = self.group_blocks or tuple(range(behind, behind + max(1, depth // 4)))
        if group[0] < behind:
            raise SettingError(
                f"group_blocks begin at {group[0]}; allowed: after the last of shared_blocks, so {behind} or more."
            )
        return Grouped(shared_blocks=shared, group_blocks=group)

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with shared prompts of zero, drawn group prompts, orthogonal keys, a fresh head, nothing selected."""
        insert, spec = self._insert(task.backbone), task.backbone
        draw = torch.Generator().manual_seed(task.seed)
        check_fits(task, insert)
        if self.groups > spec.width:
            raise SettingError(
                f"groups is {self.groups}, but this network has room for only {spec.width} "
                "orthogonal keys: lower groups."
            )
        tensors = {
            SHARED: torch.zeros((len(insert.shared_blocks), 1, spec.width)),
            GROUPS: token_init(spec, (len(insert.group_blocks), self.groups, spec.width), draw),
            KEYS: orthogonal_keys(self.groups, spec.width, draw),
            HEAD_WEIGHT: head_init(spec, len(task.classes), draw),
        }
        model = averaged_prompts.begin(self.recipe, task, tensors)
        return State({**model.arrays, SELECTIONS: np.zeros(self.groups, dtype=np.int64)}, model.values)

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Do stage 1, then stage 2 from what it left."""
        if broadcast.scalars["phase"] == "warm":
            return State(), averaged_prompts.warm_reply(self.recipe, site)
        round_, theta = int(broadcast.scalars["round"]), dict(broadcast.arrays)
        used = theta.pop(SELECTIONS)
        first = self._stage_1(site, theta, round_)
        second, selected = self._stage_2(site, {**theta, **first}, used, round_)
        learned = {SHARED: first[SHARED], **second}
        return State(learned), averaged_prompts.reply(site, {**learned, SELECTIONS: selected})

    def _insert(self, backbone: BackboneSpec) -> Grouped:
        return self.insert(require_vit(backbone, "sgpt").depth)

    def _stage_1(self, site: Site, theta: Arrays, round_: int) -> Arrays:
        """E epochs of head and shared prompts."""
        insert = self._insert(site.task.backbone)
        module = self.recipe.module(site, "cls", insert)
        tensors = softmax.trainable(theta, FIRST_STAGE, site.device)
        forward = without_group(site, module, insert, tensors)
        softmax.learn(self.recipe, site, module, tensors, FIRST_STAGE, round_, forward=forward)
        return as_arrays({name: tensors[name] for name in FIRST_STAGE})

    def _stage_2(
        self, site: Site, theta: Arrays, used: NDArray[Any], round_: int
    ) -> tuple[Arrays, NDArray[np.generic]]:
        """E epochs of head, group prompts and keys; and how often each group was taken."""
        insert, epochs = self._insert(site.task.backbone), site.task.epochs
        module = self.recipe.module(site, "prompted", insert, len(insert.group_blocks))
        tensors = softmax.trainable(theta, SECOND_STAGE, site.device)
        so_far = torch.from_numpy(used.astype(np.float32)).to(site.device)
        selected, velocity = torch.zeros(self.groups, dtype=torch.int64, device=site.device), None
        last = epochs + min(epochs, KEY_EPOCHS)  # epochs are counted on, for other draws than in stage 1
        for span, pull in ((range(epochs, last), True), (range(last, 2 * epochs), False)):
            forward = grouped(site, module, insert, tensors, so_far, selected, pull=pull)
            velocity = softmax.learn(
                self.recipe,
                site,
                module,
                tensors,
                SECOND_STAGE,
                round_,
                epochs=span,
                forward=forward,
                velocity=velocity,
            )
        return as_arrays({name: tensors[name] for name in SECOND_STAGE}), selected.cpu().numpy()

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Average by images, keys by selections, with momentum for what belongs to groups."""
        if phase.kind == "final":
            return state
        model = State({name: value for name, value in state.arrays.items() if name != SELECTIONS}, state.values)
        new = averaged_prompts.aggregate(self, model, phase, replies)
        if phase.kind == "warm":
            return State({**state.arrays, **new.arrays}, new.values)
        counts = np.stack([replies[name].arrays[SELECTIONS] for name in sorted(replies)])  # (C, G)
        keys = np.stack([replies[name].arrays[KEYS].astype(np.float64) for name in sorted(replies)])
        own = {
            GROUPS: with_momentum(state.arrays[GROUPS], new.arrays[GROUPS], self.prompt_momentum),
            KEYS: with_momentum(state.arrays[KEYS], mean_keys(keys, counts), self.key_momentum),
            SELECTIONS: state.arrays[SELECTIONS] + counts.sum(axis=0),
        }
        return State({**new.arrays, **own}, new.values)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """Return the averaged model, in which each image takes its nearest group."""
        insert = self._insert(site.task.backbone)
        module = self.recipe.module(site, "prompted", insert, len(insert.group_blocks))
        return softmax.make_predictor(site, module, broadcast.arrays)
