"""Why a step of FedCLF takes four pictures at least: fewer carry the weights out of a round (docs/methods.md, 2.3)."""

from copy import deepcopy

import numpy as np

from edgefl_client.learning.views import draw, views
from edgefl_coordinator.rounds.judging import FARTHEST
from edgefl_export.methods.fedclf import FedCLFTrainerSteps, contrast_plan, network
from edgefl_protocol.rules.batches import LEAST_BATCH
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.methods.fedclf import FedCLF
from edgefl_trainer.models.backbones import load_backbone

SIDE, NAME = 36, "cnn:test_resnet"  # whose last maps are one position: batch norm sees a value a picture


def test_two_pictures_run_away_and_four_do_not() -> None:
    """How far one step goes from where it began, of pictures that look alike: a reply that is farther than eight times
    the median one is refused (docs/security.md, poisoning). Four go a few times as far as 32, two beyond all bounds."""
    method, backbone = FedCLF(), load_backbone(NAME, image_px=SIDE, seed=1)
    settings = RunSettings(method="fedclf", data=("lesions:",), backbone=NAME, image_px=SIDE)
    model = network(method.contrast, backbone.spec, 0, backbone)
    plan = contrast_plan(method, settings, backbone.spec, model)

    def step(count: int) -> float:
        rng = np.random.default_rng(3)
        colours = np.array((90, 60, 50)) + rng.normal(0, 5, (count, 1, 1, 3))
        pictures = np.clip(colours + rng.normal(0, 10, (count, SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
        first, second = (views(pictures, draw(rng, count, SIDE), plan.view_px) for _ in range(2))
        steps = FedCLFTrainerSteps(deepcopy(model), plan, backbone.spec, seed=3)
        steps.step(steps.inputs(first, second, plan.lr))
        moved = zip(steps.model.parameters(), model.parameters(), strict=True)
        return sum(float((new - old).detach().square().sum()) for new, old in moved) ** 0.5

    usual = step(32)
    assert step(LEAST_BATCH) < 5 * usual < FARTHEST * usual < step(2)
