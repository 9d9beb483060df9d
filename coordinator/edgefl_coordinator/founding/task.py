"""The task of a new federation, of a method or a finished run, and what its first job says of it.

With `rounds.worker` the only code of the coordinator that imports the trainer: inside functions, since that takes
seconds.
Source: docs/design.md 2 and 5.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgefl_coordinator.errors import USAGE, OperatorError
from edgefl_coordinator.rounds.jobs import make_job
from edgefl_coordinator.settings import CoordinatorSettings, LimitSettings
from edgefl_protocol.envelopes.blob import MAX_BLOB_BYTES
from edgefl_protocol.rules.maps import sent_maps_in, travel_alone
from edgefl_protocol.sentences import UNTRAINED

DEFAULT_ROUNDS = 5  # training rounds, where neither a run nor a preset says


def check_names(run: Path | None, method: str, backbone: str | None, assignments: Sequence[str]) -> None:
    """Refuse a run, method, backbone or key of a setting that there is not: before PyTorch is imported.

    Raises:
        OperatorError: there is no such method or key.
        EdgeflError: there is no such backbone, or no finished run.
    """
    from edgefl_trainer.engine.folder import check_finished
    from edgefl_trainer.engine.settings import given_settings
    from edgefl_trainer.errors import SettingError
    from edgefl_trainer.models.backbone_names import check_name

    if run is not None:
        check_finished(run)
        return
    try:
        given_settings(method, {}, None, assignments)
    except SettingError as error:
        raise OperatorError(str(error), USAGE) from error
    if backbone is not None:
        check_name(backbone)


def task_of_method(
    method: str,
    backbone: str | None,
    *,
    preset: str | None,
    assignments: Sequence[str],
    image_px: int | None,
    seed: int,
) -> tuple[dict[str, Any], int]:
    """Return what the [task] table says of a method and a backbone, and the training rounds. Imports the trainer.

    Without a preset settings, rounds and epochs are the method's own defaults; but of maps a new federation's members
    send the mean, unless the preset is the paper's. Without a backbone it is the one that
    `edgefl-train run` takes.

    Raises:
        OperatorError: there is no such method, setting or value, or it goes on from weights that do not travel.
        EdgeflError: there is no such backbone, or it is untrained and the method would freeze it, but for a trial.
    """
    from edgefl_trainer.contract import declared
    from edgefl_trainer.engine.first_run import has_learned
    from edgefl_trainer.engine.hyper_parameters import hyper_types, method_class, preset_of
    from edgefl_trainer.engine.settings import check_start
    from edgefl_trainer.errors import SettingError

    try:
        kind = method_class(method)
    except SettingError as error:
        raise OperatorError(str(error), USAGE) from error
    if declared(kind).questions_only:
        raise OperatorError(
            f"{method} answers questions about pictures, and a live federation learns from pictures alone: name "
            "another method",
            USAGE,
        )
    backbone = backbone or _usual_backbone(method, preset, image_px)
    check_start(method, kind, backbone, preset, learned=has_learned(backbone))
    usual: Mapping[str, Any] = {} if preset is None else preset_of(method, preset, backbone)  # type: ignore[arg-type]
    begun = {"sent_maps": "mean"} if preset != "paper" and "sent_maps" in hyper_types(kind) else {}
    table = _method_table(method, {**begun, **usual.get("hyper", {})}, assignments)
    table |= {"epochs": usual.get("epochs", 1), "backbone": _backbone_table(method, backbone, image_px, seed)}
    return table, usual.get("rounds", DEFAULT_ROUNDS)


def task_of_run(run: Path, assignments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Return a finished run's [task] table, with KEY=VALUE instead of its own, and the rounds. Imports the trainer.

    Raises:
        OperatorError: a setting or value that the run's method does not have, or weights that do not travel.
        EdgeflError: it is not the directory of a finished run.
    """
    from edgefl_trainer.data.tasks import task_word
    from edgefl_trainer.engine.models import open_run

    finished = open_run(run)
    settings = finished.settings
    head = {"name": task_word(settings.task), "classes": list(finished.classes)}
    length = {"seed": settings.seed, "epochs": settings.epochs}
    table = {**head, **length, **_method_table(settings.method, settings.hyper, assignments)}
    spec = finished.backbone.spec
    if _learns_network(settings.method):  # it begins as the run did, with a fresh one
        backbone = _backbone_table(settings.method, settings.backbone, spec.image_px, settings.seed)
    else:
        backbone = _plain_spec(spec) | {"name": settings.backbone}
    return {**table, "backbone": backbone}, settings.rounds


def try_first_job(settings: CoordinatorSettings) -> int:
    """Do what the worker will do first, so that settings the method refuses show at `init`. Imports the trainer.

    Returns the bytes of the server's first state.

    Raises:
        OperatorError: the method does not exist or does not take these settings.
        EdgeflError: the method refuses the task or backbone.
    """
    from edgefl_coordinator.rounds.worker import run_job

    return len(run_job(make_job(settings, "start", 0)).state)


def reply_cap(state_bytes: int) -> int:
    """Return `limits.reply_bytes` for a federation: what the server begins with twice over (a network and its momentum
    encoder), and beside it the default, which holds the largest bank of features (65,536 of 128 float16), fits.
    """
    mebibytes = -(-2 * state_bytes // 2**20)
    return min(LimitSettings().reply_bytes + mebibytes * 2**20, MAX_BLOB_BYTES)


def untrained_line(settings: CoordinatorSettings) -> str:
    """Say what a federation on a random network that no round changes is worth; "" on another. Imports the trainer."""
    from edgefl_trainer.contract import declared
    from edgefl_trainer.engine.first_run import has_learned
    from edgefl_trainer.engine.hyper_parameters import method_class

    name = str(settings.task.backbone.get("name", ""))
    frozen = has_learned(name) is False and declared(method_class(settings.task.method)).freezes
    return f"backbone {name} is untrained: {UNTRAINED}" if frozen else ""


def each_map_line(settings: CoordinatorSettings) -> str:
    """Say what single maps tell, where members send them; "" where they send none, or their mean."""
    if "maps" not in settings.task.travels or sent_maps_in(settings.task.settings) == "mean":
        return ""
    return (
        "members send each attention map, from which a picture can be told; of every class the mean tells less and "
        "teaches the same: make the federation with --set sent_maps=mean"
    )


def _method_table(method: str, hyper: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return method, settings and what travels with them.

    Every hyper-parameter is named: a later version may have other defaults, and a federation that has begun must not
    change with it.
    """
    from edgefl_trainer.engine.hyper_parameters import assignment, build, hyper_values, method_class
    from edgefl_trainer.errors import SettingError

    try:
        kind = method_class(method)
        made = build(kind, {**hyper, **dict(assignment(kind, text) for text in assignments)})
    except SettingError as error:
        raise OperatorError(str(error), USAGE) from error
    told = {"travels": list(made.travels), "shares_maps": travel_alone(made.travels)}
    return {"method": method, "settings": hyper_values(made), **told}


def _backbone_table(method: str, name: str, image_px: int | None, seed: int) -> dict[str, Any]:
    from edgefl_trainer.models.backbone_names import has_own_weights
    from edgefl_trainer.models.backbones import load_backbone

    if _learns_network(method) and has_own_weights(name):
        raise OperatorError(
            f"{method} learns a whole network, and a live federation starts it with random weights: name an "
            "architecture, such as --backbone cnn:resnet18 or vit:192x12/12",
            USAGE,
        )
    return _plain_spec(load_backbone(name, image_px=image_px, seed=seed).spec)


def _usual_backbone(method: str, preset: str | None, image_px: int | None) -> str:
    """The network that comes with EdgeFL; an untrained one for a trial, and for a method that learns it."""
    from edgefl_trainer.models.shipped import usual_backbone

    found = "tiny" if preset == "tiny" or _learns_network(method) else usual_backbone(image_px or 0)
    if found is None:
        told = f"no network that comes with EdgeFL takes images of {image_px} px: name one with --backbone"
        raise OperatorError(told, USAGE)
    return found


def _learns_network(method: str) -> bool:
    from edgefl_trainer.contract import declared
    from edgefl_trainer.methods import METHODS

    return declared(METHODS[method]).encoder is not None


def _plain_spec(spec: Any) -> dict[str, Any]:
    facts = dataclasses.asdict(spec)
    return {**facts, "mean": list(spec.mean), "std": list(spec.std)}
