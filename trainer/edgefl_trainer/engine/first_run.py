"""The run that another one starts from: `run:DIR` as its backbone, which `edgefl-train finetune DIR` names, too.

What the first run was counts for the second: two fine-tunings are repetitions of one another where they differ in
nothing but their seeds and neither do the runs that they start from, and a table names them by these.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgefl_trainer.engine.folder import finished_summary
from edgefl_trainer.engine.settings import RunSettings


def first_run(backbone: str) -> Path | None:
    """The folder of the run that a backbone comes from; None where no run of this machine made it.

    Args:
        backbone: its name.
    """
    kind, _, where = backbone.partition(":")
    return Path(where).expanduser() if kind == "run" else None


def first_summary(backbone: str) -> dict[str, Any] | None:
    """The results of the run that a backbone comes from, while they are there.

    Args:
        backbone: its name.
    """
    folder = first_run(backbone)
    return None if folder is None else finished_summary(folder)


def told_by_seedless(settings: RunSettings) -> RunSettings:
    """The settings with a backbone that is told by what its run was asked for, all but the seed, not by its folder.

    Args:
        settings: of a run that may start from another one.
    """
    first = first_summary(settings.backbone)
    asked = None if first is None else first.get("settings_sha256")
    return settings if asked is None else replace(settings, backbone=f"run:{asked}")
