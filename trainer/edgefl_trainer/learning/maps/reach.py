"""How far prompts reach the maps that a federation shares, measured on its network before a run begins.

    variance   share of the maps' variance, over images and over prompts drawn from U(−1, 1), that the prompts make
    moved      share of the distance to another site's mean maps that steps of the distillation term alone take away

Where both are near 0 the maps are settled by the frozen network, and exchanged maps can teach hardly anything, whatever
their weight. Source: docs/methods.md, distillation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from edgefl_protocol.rules.maps import broadcast_name
from edgefl_trainer.contract import Arrays, MeasuredBefore, Site
from edgefl_trainer.learning import evidential
from edgefl_trainer.learning.evidential import EvidentialRecipe
from edgefl_trainer.learning.learners.learner import Recipe
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.learning.maps.sharing import MapSharing, distillation
from edgefl_trainer.models.scoring import ScoreModule
from edgefl_trainer.models.spec import require_vit
from edgefl_trainer.models.vit import ViTOutput, init_prompts
from edgefl_trainer.rollout import travelling_map

IMAGES = 16  # of each of the two sites
DRAWS = 4  # of prompts
STEPS = 12  # of distillation alone
LEAST_MOVED = 0.01
NAME = "map_reach"


def measured_reach(
    recipe: Recipe, sharing: MapSharing, sites: Mapping[str, Site], steps: int = STEPS
) -> MeasuredBefore | None:
    """Measure at the first site by name, with maps of the next; None where there are no two sites, or lambda is 0."""
    learning = [sites[name] for name in sorted(sites) if len(sites[name].train)]
    if len(learning) < 2 or sharing.kd_weight == 0 or not isinstance(recipe, EvidentialRecipe):
        return None
    site, peer = learning[:2]
    figures = {**_Reach(recipe, sharing, site, peer, steps).figures(), "steps": steps}
    if figures.get("moved", 1) >= LEAST_MOVED:
        return MeasuredBefore(NAME, figures)
    depth = require_vit(site.task.backbone, NAME).depth
    told = (
        f"on this network the maps that sites share hardly follow the prompts: when the prompts of one site learned "
        f"nothing but to match another site's maps, its maps came {100 * figures['moved']:.2g} % nearer in {steps} "
        f"steps. Expect little from sharing maps, or try --set rollout_from={depth - 1} (docs/methods.md 1.5)."
    )
    return MeasuredBefore(NAME, figures, told)


@dataclass(frozen=True)
class _Reach:
    """What is measured, at which site, with whose maps."""

    recipe: EvidentialRecipe
    sharing: MapSharing
    site: Site
    peer: Site
    steps: int

    def figures(self) -> dict[str, float]:
        """Measure both, with the prompts that sites begin with."""
        assert self.site.backbone is not None
        task, device = self.site.task, self.site.device
        module = ScoreModule(self.site.backbone, self.recipe.options(task.backbone, "cls", self.sharing.made))
        initial = evidential.initial_tensors(self.recipe, task.backbone, len(task.classes), task.seed)
        begun = {name: initial[name].to(device) for name in self.recipe.prompt_names}
        return {"variance": self._variance(module, begun), **self._moved(module, begun)}

    def _variance(self, module: ScoreModule, prompts: Mapping[str, Tensor]) -> float:
        spec, (images, _) = require_vit(self.site.task.backbone, "a rollout map"), self._first(self.site)
        generator = torch.Generator().manual_seed(self.site.task.seed)
        found = []
        for _ in range(DRAWS):
            drawn = {
                name: init_prompts(spec, len(value), value.shape[2], "uniform", generator).to(images.device)
                for name, value in prompts.items()
            }
            with torch.no_grad():
                found.append(_maps(module, images, drawn))
        maps = torch.stack(found).double()  # (draws, B, N)
        whole = maps.flatten(0, 1).var(dim=0, correction=0).sum()
        return float(maps.var(dim=0, correction=0).mean(dim=0).sum() / whole) if whole else 0.0

    def _moved(self, module: ScoreModule, prompts: Mapping[str, Tensor]) -> dict[str, float]:
        """Nothing where the two share no class."""
        leaves = {name: value.clone().requires_grad_(True) for name, value in prompts.items()}
        [term] = distillation(replace(self.sharing, kd_weight=1.0), self.site, self._shared(module, prompts))
        rates = self.recipe.rates
        groups = [{"params": [value], "lr": rates[name]} for name, value in leaves.items()]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        images, target = self._first(self.site)
        distances = []
        for _ in range(self.steps + 1):
            maps = _maps(module, images, leaves)
            distance = term(Step(maps, maps, maps, target, leaves))  # it reads maps and target alone
            distances.append(float(distance.detach()))
            optimizer.zero_grad(set_to_none=True)
            distance.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return {"moved": 1 - distances[-1] / distances[0]} if distances[0] else {}

    def _shared(self, module: ScoreModule, prompts: Mapping[str, Tensor]) -> Arrays:
        """What the peer would send of its first images, under the prompts that sites begin with."""
        images, target = self._first(self.peer)
        with torch.no_grad():
            maps = _maps(module, images, prompts).cpu().numpy().astype(np.float16)
        labels = target.cpu().numpy()
        return {broadcast_name(0, int(label)): maps[labels == label] for label in np.unique(labels)}

    @staticmethod
    def _first(site: Site) -> tuple[Tensor, Tensor]:
        images, target = site.train.read(np.arange(min(IMAGES, len(site.train))))
        return images.to(site.device), target.to(site.device)


def _maps(module: ScoreModule, images: Tensor, prompts: Mapping[str, Tensor]) -> Float[Tensor, "B N"]:
    output = module.output(images, prompts, need_attention=True)
    assert isinstance(output, ViTOutput)
    return travelling_map(output.factors, module.options.rollout_from)
