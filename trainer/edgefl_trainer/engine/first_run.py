"""What a run starts from: another run (`run:DIR`, which `edgefl-train finetune DIR` names, too), or random weights.

Two runs are repetitions of one another where they, and the runs without labels that they start from, differ in nothing
but their seeds. A table names a fine-tuning by what it starts from.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.contract import declared
from edgefl_trainer.data.partition_plan import PartitionPlan
from edgefl_trainer.engine.folder import CONFIG, finished_summary
from edgefl_trainer.engine.settings import RunSettings, read_settings
from edgefl_trainer.errors import SettingError
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbone_names import UNTRAINED, names_fresh_network


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


def stays_untrained(settings: RunSettings) -> bool:
    """Tell whether a run stands on random weights which no round changes; False where its method is not known here."""
    if not names_fresh_network(settings.backbone):
        return False
    try:
        return declared(settings.build_method()).freezes
    except SettingError:
        return False


def untrained_line(settings: RunSettings) -> str:
    """Write what a run on such a network is worth; empty where it stands on another."""
    return f"backbone {settings.backbone} is untrained: {UNTRAINED}" if stays_untrained(settings) else ""
