"""FedPR. Feng et al., "Learning federated visual prompt in null space for MRI reconstruction", CVPR 2023,
arXiv 2303.16181, with github.com/chunmeifeng/FedPR, on shallow prompt tokens as PEP-FedPT (arXiv 2510.25372) does.

    server sends theta = (P, H)                                            broadcast
    site c, from round 2: T = the projector onto the null space of P       null_space
            E epochs; every update of the prompts Δ becomes Δ·T            local_round → softmax.learn
    server: theta = sum_c n_c/n theta_c                                    aggregate

So what a site learns is orthogonal to every token of the prompts it was sent, and does not overwrite them.

Differs from the paper: T = I - QQ', Q an orthonormal basis of the rows of P: the whole null space, where the code keeps
an arbitrary share of it (`ratio=0.8`) and divides by its norm (`fro_norm=on`); SGD in place of Adam, its velocity kept
at the site as Adam's moments are there; ten shallow tokens and a head that is not projected, in place of a Swin's deep
prompts for MRI (docs/methods.md 5.4).
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_protocol import Payload
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Declaration, Site, State
from edgefl_trainer.learning import averaged_prompts, softmax
from edgefl_trainer.learning.averaged_prompts import Weighting
from edgefl_trainer.learning.features import readout_named
from edgefl_trainer.learning.named_arrays import as_arrays
from edgefl_trainer.learning.softmax import HEAD_WEIGHT, PROMPTS, SoftmaxRecipe, check_count
from edgefl_trainer.models.inserts import Tokens
from edgefl_trainer.models.spec import BackboneSpec

TRAINED = (PROMPTS, HEAD_WEIGHT)
VELOCITY = "velocity."


@dataclass(frozen=True, kw_only=True)
class FedPR:
    """FedVPT whose sites may only move the prompts where the sent prompts do not point.

    For sites that differ so much that averaged prompts forget.
    """

    family: ClassVar[str] = "prompt tokens"
    paper: ClassVar[str] = "arXiv 2303.16181"
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = softmax.DECLARES

    recipe: SoftmaxRecipe = field(default_factory=SoftmaxRecipe)
    n: int = 10  # number of prompt tokens (arXiv 2510.25372)
    # share of the singular directions that is kept, the last ones; 0: the exact null space (public code; default ours)
    ratio: float = 0.0
    fro_norm: bool = False  # whether the projector is divided by its Frobenius norm (public code; default ours)
    # what a site's optimiser does between rounds: keep its moments, or begin afresh (reset) (public code)
    optimizer_state: Literal["keep", "reset"] = "keep"
    # what a site counts by in the mean: its training images, or all sites alike (public code)
    weighting: Weighting = "samples"

    travels = averaged_prompts.travels("prompts", "weights")
    phases = averaged_prompts.phases
    start = averaged_prompts.start
    broadcast = averaged_prompts.broadcast  # a site makes its own projector
    aggregate = averaged_prompts.aggregate
    predictor = averaged_prompts.predictor

    def __post_init__(self) -> None:
        check_count("n", self.n)
        check_bounds(self, ratio=(0 <= self.ratio <= 1, "0 (the exact null space) to 1"))

    def insert_for(self, backbone: BackboneSpec) -> Tokens:
        """Insert behind the class token, before block 0."""
        return Tokens()

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Learn E epochs of P and H, the prompts only within the null space of what was sent."""
        if broadcast.scalars["phase"] == "warm":
            return State(), averaged_prompts.warm_reply(self.recipe, site)
        round_ = int(broadcast.scalars["round"])
        module = self.recipe.module(site, readout_named(broadcast.scalars["readout"]), Tokens())
        tensors = softmax.trainable(broadcast.arrays, TRAINED, site.device)
        keep = self.optimizer_state == "keep"
        before = {name.removeprefix(VELOCITY): v for name, v in state.arrays.items() if name.startswith(VELOCITY)}
        project = {}
        if round_ > 1:  # the first prompts are random: nothing to keep
            matrix = null_space(broadcast.arrays[PROMPTS][0].astype(np.float64), self.ratio, self.fro_norm)
            project = {PROMPTS: torch.from_numpy(matrix).float().to(site.device)}
        velocity = softmax.learn(
            self.recipe, site, module, tensors, TRAINED, round_, project=project, velocity=before if keep else None
        )
        learned = as_arrays({name: tensors[name] for name in TRAINED})
        kept = {f"{VELOCITY}{name}": value for name, value in velocity.items() if keep}
        return State({**learned, **kept}), averaged_prompts.reply(site, learned)


def null_space(prompts: NDArray[np.float64], ratio: float = 0.0, fro_norm: bool = False) -> NDArray[np.float64]:
    """Compute the symmetric matrix T (D, D) that an update Δ (n, D) is multiplied with from the right.

    Args:
        prompts: global prompts P, (n, D).
        ratio: 0 for the projector onto the exact null space of P; else the share of the right singular vectors of P'P
            that T keeps, those of the smallest values, as the published code does.
    """
    width = prompts.shape[1]
    if ratio == 0:
        basis, _ = np.linalg.qr(prompts.T)  # (D, min(n, D)), orthonormal columns that span the rows of P
        projector: NDArray[np.float64] = np.eye(width) - basis @ basis.T
    else:
        _, _, directions = np.linalg.svd(prompts.T @ prompts)
        kept = directions[int(width * (1 - ratio)) :]
        projector = kept.T @ kept
    norm = float(np.linalg.norm(projector))
    return projector / norm if fro_norm and norm > 0 else projector
