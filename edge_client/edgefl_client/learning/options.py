"""What the owner of a device may change about learning on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.limits import LearningLimits
from edgefl_client.learning.session import plan_of
from edgefl_client.scoring.pictures import DEFAULT_FORMATS
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.learning_plan import LearningPlan

Report = Callable[[Mapping[str, float | int | str]], None]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What the caller may change; None keeps what the bundle says."""

    epochs: int | None = None  # E of this round
    batch: int | None = None  # pictures in a step
    balance: Literal["none", "class"] | None = None  # whether classes are drawn equally often
    threads: int | None = None  # of a step; None for the processors this process may use
    seed: int | None = None  # of the draws; a federation names its own
    restart: bool = False  # forget what was learned here and begin with the bundle's values
    formats: Sequence[str] = DEFAULT_FORMATS  # kinds of files that are read (`pictures.FORMATS`)
    checkpoint_seconds: float = 60.0  # at most between two checkpoints
    limits: LearningLimits = field(default_factory=LearningLimits)  # minutes, memory, battery
    report: Report = lambda facts: None  # told what happens: pictures read, steps, warnings

    def plan(self, bundle: Bundle) -> LearningPlan:
        """Return the bundle's plan with the caller's changes.

        Raises:
            LearningError: the bundle brings no training step (`no_training`), or cannot learn so (`bad_settings`).
        """
        plan = plan_of(bundle)
        try:
            return replace(
                plan,
                epochs=self.epochs or plan.epochs,
                batch=self.batch or plan.batch,
                balance=self.balance or plan.balance,
                seed=plan.seed if self.seed is None else self.seed,
            )
        except ValueError as error:
            if self.batch is not None and str(error).startswith("batch "):
                raise LearningError(
                    f"this model cannot learn with --batch {self.batch}: {error}", "bad_settings"
                ) from error
            raise LearningError(
                f"this device cannot learn with these settings: {error}; tell the operator", "bad_settings"
            ) from error
