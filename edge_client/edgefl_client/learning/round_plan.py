"""How a live round is learned: the signed task's settings, in the bundle's step.

    followed   what a step takes as an input, or the device does itself: the federation's value holds, not the bundle's
    fixed      what stands in the bundle's graphs: another value is refused in a sentence, before any picture is read
    the rest   how fresh prompts are drawn, for the bundle brings learned ones; how many maps leave, which the task
               itself says; whether a finished model discounts evidence, which no step knows of

A setting that the task does not name has the method's default; one that this version does not know is refused. What a
member may settle for itself, such as a readout by its own rows, is not compared. The batch is the owner's where he
named one, for it is his memory. Source: docs/design.md, section 4; docs/decisions/0028.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.session import plan_of
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.contrast_plan import FedCLFPlan
from edgefl_protocol.bundle.training_plan import Plan, TrainingPlan
from edgefl_protocol.messages.task_reply import Plain

Settings = Mapping[str, Plain]

# The methods' own defaults; `tests/integration/test_agreed_defaults.py` holds them against the trainer's.
DEFAULTS: Final[Mapping[str, Settings]] = {
    "fedclf": {
        "lr": 0.03, "momentum": 0.9, "weight_decay": 1e-4, "batch": 128, "bn": "averaged", "view_px": 0, "queue": 1024,
        "temperature": 0.2, "key_momentum": 0.0, "momentum_encoder": "averaged", "projection": "mlp",
        "negatives": "remote", "dp_noise": 0.0, "dp_delta": 1e-5,
    },
    "fedevprompt": {
        "lr_b": 2.5e-4, "lr_t": 5e-4, "lr_head": 5e-4, "weight_decay": 1e-2, "batch": 32, "anneal_epochs": 10,
        "anneal_clock": "run", "prior_floor": 1e-2, "augment": "dihedral", "kd_weight": 1e-6, "kd_peers": "sum",
        "loss": "evidential", "select": "vacuity", "optimizer": "adamw",
        # the form of the model and its maps: `PromptForm`
        "prompts": "bt", "b_blocks": 3, "prompt_length": 0, "prompt_init": "normal", "evidence": "softplus",
        "prefix": "after", "discount": "none", "readout": "auto", "head_norm": "auto", "rollout": "renormalise",
        "kd_metric": "bilinear", "maps_per_class": 5,
    },
}  # fmt: skip
FOLLOWED: Final[Mapping[str, tuple[str, ...]]] = {
    "fedclf": (
        "lr", "momentum", "weight_decay", "batch", "bn", "queue", "key_momentum", "momentum_encoder", "negatives",
    ),
    "fedevprompt": (
        "weight_decay", "batch", "anneal_epochs", "anneal_clock", "prior_floor", "augment", "kd_weight", "kd_peers",
    ),
}  # fmt: skip
_FIXED_FEDEVPROMPT: Final[Settings] = {"loss": "evidential", "select": "vacuity", "optimizer": "adamw"}  # of devices
_PROMPT_RATES: Final = {"prompts.b": "lr_b", "prompts.g": "lr_b", "prompts.t": "lr_t"}  # of others: lr_head


def agreed(bundle: Bundle, settings: Settings, backbone: Settings, *, complete: bool) -> Bundle:
    """The bundle, learning as the federation does.

    Args:
        bundle: the verified bundle with its training step.
        settings: hyper-parameters of the task; what is not named has the method's default.
        backbone: the task's description of the network; empty where it is not told.
        complete: whether the coordinator describes its task, so that what `settings` lacks has the method's default;
            else it is the bundle's.

    Raises:
        LearningError: the bundle's step cannot learn so (`other_settings`, `bad_settings`), or it brings none.
    """
    plan = plan_of(bundle)
    defaults = DEFAULTS[plan.kind]
    unknown = sorted(settings.keys() - defaults.keys())
    if unknown:
        raise LearningError(
            f"the federation sets {unknown[0]}, which this version does not know: install a newer edgefl",
            "other_settings",
        )
    wanted = {**defaults, **settings} if complete else dict(settings)
    pixels = bundle.preprocess
    for name, here in {"image_px": pixels.size, "mean": tuple(pixels.mean), "std": tuple(pixels.std)}.items():
        if name in backbone and backbone[name] != here:
            raise _other(f"{name} of the network", backbone[name], here)
    fixed = _fixed_fedclf(plan, wanted) if isinstance(plan, FedCLFPlan) else _fixed_fedevprompt(plan, backbone)
    meant = _meant(bundle, wanted, backbone)
    for name, here in fixed.items():
        if name in meant and meant[name] != here:
            raise _other(name, wanted[name], here)
    changes: dict[str, Any] = {name: wanted[name] for name in FOLLOWED[plan.kind] if name in wanted}
    if isinstance(plan, TrainingPlan):
        told = {name: wanted.get(_PROMPT_RATES.get(name, "lr_head")) for name in plan.trained}
        changes["rates"] = {name: plan.rates[name] if rate is None else rate for name, rate in told.items()}
    return replace(bundle, training=_changed(plan, changes))


def _fixed_fedclf(plan: FedCLFPlan, wanted: Settings) -> Settings:
    """What stands in the graphs of a FedCLF bundle, under the names of the settings.

    Raises:
        LearningError: the federation adds noise.
    """
    noise = wanted.get("dp_noise", 0.0)
    if noise:
        raise LearningError(
            f"the federation adds noise to features (dp_noise {noise}); devices do not, so this one takes no part",
            "other_settings",
        )
    projection = "linear" if "head.weight" in plan.parameters else "mlp"
    return {"temperature": plan.temperature, "view_px": plan.view_px, "projection": projection}


def _fixed_fedevprompt(plan: TrainingPlan, backbone: Settings) -> Settings:
    """What stands in the graphs of a FedEvPrompt bundle, under the names of the settings.

    Raises:
        LearningError: the frozen network is another one: maps of two networks cannot be compared.
    """
    form = asdict(plan.form)
    ours, theirs = form.pop("network"), backbone.get("sha256")
    if theirs is not None and theirs != ours:
        raise _other("frozen network (SHA-256)", theirs, ours)
    if plan.form.prompts == "g":
        del form["b_blocks"]  # no block has prompts of its own
    return {**_FIXED_FEDEVPROMPT, **form}


def _meant(bundle: Bundle, wanted: Settings, backbone: Settings) -> Settings:
    """The settings, with what `auto` or 0 stands for with this network; without what each member settles for itself."""
    side, patch, learned_alone = bundle.preprocess.size, backbone.get("patch"), backbone.get("self_supervised")
    usual = usual_prefix((side // patch) ** 2) if type(patch) is int and patch > 0 else None
    norm = ("standardise" if learned_alone else "none") if type(learned_alone) is bool else None
    stands_for: Mapping[tuple[str, Plain], Plain | None] = {
        ("view_px", 0): max(1, side * 8 // 9),
        ("prompt_length", 0): usual,
        ("head_norm", "auto"): norm,
        ("readout", "auto"): None,
    }
    meant = {name: stands_for.get((name, value), value) for name, value in wanted.items()}
    return {name: value for name, value in meant.items() if value is not None}


def usual_prefix(tokens: int) -> int:
    """P where `prompt_length` is 0: 50 for 14 × 14 patches, in proportion otherwise (docs/methods.md, 1.2).

    Args:
        tokens: N.
    """
    return max(1, round(50 * tokens / 196))


def _changed(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    try:
        return replace(plan, **changes)
    except ValueError as error:
        raise LearningError(f"this device cannot learn so: {error}; tell the operator", "bad_settings") from error


def _other(name: str, theirs: object, ours: object) -> LearningError:
    return LearningError(
        f"the federation's {name} is {str(theirs)[:60]}, the training step of this bundle has {ours}: fetch the "
        "federation's bundle with edgefl pull; where it is this one, its operator has to publish another",
        "other_settings",
    )
