"""How a live round is learned: the signed task's settings, in the bundle's step.

    followed   what a step takes as an input, or the device does itself: the federation's value holds, not the bundle's
    fixed      what stands in the bundle's graphs: another value is refused in a sentence, before any picture is read
    the rest   what no step knows of: how fresh prompts are drawn, how many maps leave, what becomes of evidence

Which setting is which, the bundle's record says (`LearningPlan`). A setting that the task does not name has the
method's default; one that this version does not know is refused. What a member may settle for itself, such as a readout
by its own rows, is not compared. The batch is the owner's where he named one, for it is his memory. Source:
docs/design.md 4; docs/decisions/0028.
"""

from dataclasses import replace

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.session import plan_of
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.learning_plan import Settings


def agreed(bundle: Bundle, settings: Settings, backbone: Settings, *, complete: bool) -> Bundle:
    """Return the bundle, learning as the federation does.

    Args:
        settings: hyper-parameters of the task; what is not named has the method's default.
        backbone: the task's description of the network; empty where it is not told.
        complete: whether the coordinator describes its task, so that what `settings` lacks has the method's default;
            else it is the bundle's.

    Raises:
        LearningError: the bundle's step cannot learn so (`other_settings`, `bad_settings`), or it brings none.
    """
    plan, pixels = plan_of(bundle), bundle.preprocess
    unknown = sorted(settings.keys() - plan.defaults.keys())
    if unknown:
        raise LearningError(
            f"the federation sets {unknown[0]}, which this version does not know: install a newer edgefl-derm",
            "other_settings",
        )
    wanted = {**plan.defaults, **settings} if complete else dict(settings)
    for name, here in {"image_px": pixels.size, "mean": tuple(pixels.mean), "std": tuple(pixels.std)}.items():
        if name in backbone and backbone[name] != here:
            raise _other(f"{name} of the network", backbone[name], here)
    if pixels.colour != "none":  # GPU sites of a federation learn from pictures as they are
        raise _other("colour of the light", "none", pixels.colour)
    if (reason := plan.unable(wanted)) is not None:
        raise LearningError(f"{reason}, so this device cannot take part", "other_settings")
    if plan.frozen_sha256 is not None and backbone.get("sha256", plan.frozen_sha256) != plan.frozen_sha256:
        raise _other("frozen network (SHA-256)", backbone["sha256"], plan.frozen_sha256)
    meanings = plan.stands_for(pixels.size, backbone)
    for name, here in plan.fixed.items():
        meant = meanings.get((name, wanted[name]), wanted[name]) if name in wanted else None
        if meant is not None and meant != here:
            raise _other(name, wanted[name], here)
    try:
        return replace(bundle, training=plan.following(wanted))
    except ValueError as error:
        raise LearningError(
            f"this device cannot learn with these settings: {error}; tell the operator", "bad_settings"
        ) from error


def _other(name: str, theirs: object, ours: object) -> LearningError:
    return LearningError(
        f"the federation's {name} is {str(theirs)[:60]}, but the training step of this bundle has {ours}: the "
        "operator has to publish a bundle that fits",
        "other_settings",
    )
