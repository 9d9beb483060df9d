"""What a run starts from: another run (`run:DIR`, which `edgefl-train finetune DIR` names, too), or random weights.

Two runs are repetitions of one another where they, and the runs without labels that they start from, differ in nothing
but their seeds. A table names a fine-tuning by what it starts from. A network that nobody trained stays one, whoever
hands it on.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.sentences import UNTRAINED
from edgefl_trainer.contract import declared
from edgefl_trainer.data.partitions.plan import PartitionPlan
from edgefl_trainer.engine.folder import CONFIG, finished_summary
from edgefl_trainer.engine.settings import RunSettings, read_settings
from edgefl_trainer.errors import SettingError
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbone_names import (
    BACKBONE_FILE,
    backbone_file,
    learned_in_file,
    names_fresh_network,
)
from edgefl_trainer.models.shipped import shipped_backbones


def first_run(backbone: str) -> Path | None:
    """Return the folder that a backbone's name gives; None where it names no run."""
    kind, _, where = backbone.partition(":")
    return Path(where) if kind == "run" else None


def learned_by(backbone: str) -> dict[str, Any] | None:
    """Return the results of the run without labels that learned a backbone, while they are there."""
    found = _learning_run(backbone)
    return None if found is None else found[1]


def other_colour_line(settings: RunSettings) -> str:
    """Write that a run's network learned from pictures whose colour was treated otherwise; empty where it did not."""
    found = _learning_run(settings.backbone)
    if found is None:
        return ""
    try:
        before = read_settings(found[0] / CONFIG).colour
    except EdgeflError:
        return ""
    if before == settings.colour:
        return ""
    return (
        f"the network of {settings.backbone} was learned with --colour {before}, and this run gives it pictures with "
        f"--colour {settings.colour}: give --colour {before} unless you compare the two"
    )


def _learning_run(backbone: str) -> tuple[Path, dict[str, Any]] | None:
    """Find the folder and the results of the run without labels that learned a backbone.

    A run with labels keeps a copy of the network it started from: that network's run is looked for behind it.
    """
    passed: set[Path] = set()
    while (folder := first_run(backbone)) is not None and folder not in passed:
        passed.add(folder)
        summary = finished_summary(folder)
        method = METHODS.get(summary.get("method", "")) if summary is not None else None
        if method is None or not method.needs_labels:
            return (folder, summary) if summary is not None and method is not None else None
        try:
            backbone = read_settings(folder / CONFIG).backbone
        except EdgeflError:
            return None
    return None


def repetition_digest(settings: RunSettings, first: Mapping[str, Any] | None, plan: PartitionPlan | None = None) -> str:
    """Digest of what was asked of a run and of the run that learned its network, but for seeds and devices.

    Runs that share it are repetitions of one another. Of a first run, which `learned_by` found, its folder does not
    count. `plan` says how the run's partition was made, where it has one.
    """
    asked = None if first is None else first.get("settings_sha256")
    start = settings if asked is None else replace(settings, backbone=f"run:{asked}")
    return start.digest_but_seed(plan)


def has_learned(backbone: str) -> bool | None:
    """Tell whether anything was learned in the weights that a backbone's name stands for; None where nobody says.

    A file says it itself. One from before that is as the run that left it: a run without labels has learned its
    network, and one with labels keeps a copy of the network that it started from.
    """
    passed: set[Path] = set()
    while not names_fresh_network(backbone):
        file = backbone_file(backbone)
        if file is None or backbone in shipped_backbones():
            return True  # of timm's hub, of a package, or one that comes with EdgeFL
        if (told := learned_in_file(file)) is not None:
            return told
        if file.name != BACKBONE_FILE or file in passed:
            return None
        passed.add(file)
        try:
            left = read_settings(file.parent / CONFIG)
            method = left.build_method()
        except EdgeflError:
            return None
        if declared(method).encoder:
            return bool(method.phases(left.rounds))
        backbone = left.backbone
    return False


def stays_untrained(settings: RunSettings, folder: Path | None = None) -> bool:
    """Tell whether a run stands on weights in which nothing was learned, and which no round changes.

    False where its method is not known here. The network in `folder`, of a finished run, knows it without its source.
    """
    try:
        if not declared(settings.build_method()).freezes:
            return False
    except SettingError:
        return False
    if folder is None or names_fresh_network(settings.backbone):
        return has_learned(settings.backbone) is False
    return has_learned(f"run:{folder}") is False


def untrained_line(settings: RunSettings, folder: Path | None = None) -> str:
    """Write what a run on such a network is worth; empty where it stands on another."""
    return f"backbone {settings.backbone} is untrained: {UNTRAINED}" if stays_untrained(settings, folder) else ""
