"""One training loop for all recipes, against ten lines of PyTorch; bounds of settings. docs/design.md 4."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.errors import SettingError, TrainingError
from edgefl_trainer.learning.epochs import run_epochs

EPOCHS, ROUND, LR = 2, 3, 0.1
INPUTS = [torch.tensor([[1.0, 2.0], [0.5, -1.0]]), torch.tensor([[3.0, 1.0]])]  # batches of two images and of one


@pytest.fixture
def site():
    """What the loop asks of a site, and all that it is told."""
    told: list[dict[str, object]] = []
    return SimpleNamespace(name="a", task=SimpleNamespace(epochs=EPOCHS), report=told.append), told


def rate(done: float) -> float:
    return LR / (1 + done)


def loss_of(weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return ((inputs @ weights - 1) ** 2).mean()


def plain(weights: torch.Tensor, share: float) -> list[float]:
    """SGD by hand; the losses of its steps."""
    losses = []
    for epoch in range(EPOCHS):
        for step, inputs in enumerate(INPUTS):
            now = rate((ROUND - 1) * EPOCHS + epoch + step / 2) * share
            loss = loss_of(weights, inputs)
            (gradient,) = torch.autograd.grad(loss, weights)
            weights.data -= now * gradient
            losses.append(float(loss.detach()))
    return losses


def test_it_learns_and_tells_what_a_plain_loop_does(site):
    one, told = site
    ours, theirs = (torch.tensor([0.3, -0.2], requires_grad=True) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [ours], "rate_share": 0.5}], lr=1.0)
    found = list(
        run_epochs(
            one, ROUND, range(EPOCHS), lambda epoch: (2, ((inputs,) for inputs in INPUTS)),
            lambda batch: loss_of(ours, batch[0]), optimizer, rate=rate,
        )
    )  # fmt: skip
    losses = plain(theirs, 0.5)
    torch.testing.assert_close(ours, theirs)
    assert [facts["loss"] for facts in told] == pytest.approx(losses)
    assert [(facts["epoch"], facts["step"], facts["steps"], facts["images"]) for facts in told] == [
        (1, 1, 2, 2), (1, 2, 2, 1), (2, 1, 2, 2), (2, 2, 2, 1),
    ]  # fmt: skip
    assert not any("wait_seconds" in facts for facts in told)
    for sums, (first, second) in zip(found, (losses[:2], losses[2:]), strict=True):
        assert sums.mean_of_images == pytest.approx((2 * first + second) / 3)
        assert sums.mean_of_steps == pytest.approx((first + second) / 2)


def test_a_recipe_may_take_the_step_itself_and_tell_its_waits(site):
    one, told = site
    weights = torch.tensor([0.3, -0.2], requires_grad=True)
    taken = []
    sums = run_epochs(
        one, 1, [5], lambda epoch: (2, ((inputs,) for inputs in INPUTS)), lambda batch: loss_of(weights, batch[0]),
        torch.optim.SGD([weights], lr=1.0), take_step=lambda: taken.append(weights.grad.clone()), tells_wait=True,
    )  # fmt: skip
    assert len(list(sums)) == 1 and len(taken) == 2
    torch.testing.assert_close(weights.detach(), torch.tensor([0.3, -0.2]))
    assert [facts["epoch"] for facts in told] == [6, 6]
    assert all(facts["wait_seconds"] >= 0 for facts in told)


def test_a_loss_that_is_not_finite_ends_it_by_round_and_step(site):
    one, _ = site
    weights = torch.tensor([float("inf"), 0.0], requires_grad=True)
    run = run_epochs(
        one, 2, [0], lambda epoch: (2, ((inputs,) for inputs in INPUTS)), lambda batch: loss_of(weights, batch[0]),
        torch.optim.SGD([weights], lr=1.0),
    )  # fmt: skip
    with pytest.raises(TrainingError, match="in round 2, step 1"):
        next(run)


@dataclasses.dataclass(frozen=True)
class Settings:
    lr: float = 2.0
    batch: int = 0


def test_the_first_setting_out_of_range_is_named_with_what_is_allowed():
    given = Settings()
    check_bounds(given, lr=(given.lr <= 10, "at most 10"))
    with pytest.raises(SettingError, match=r"^batch is 0; allowed: 1 or more\.$"):
        check_bounds(given, lr=(given.lr <= 10, "at most 10"), batch=(given.batch >= 1, "1 or more"))
