"""The run that another one starts from: `run:DIR` as its backbone, which `edgefl-train finetune DIR` names, too.

What the first run was counts for the second: two fine-tunings are repetitions of one another where they differ in
nothing but their seeds and neither do the runs that they start from, and a table names them by these.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgefl_trainer.data.plan import Plan
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


def repetition_digest(settings: RunSettings, plan: Plan | None = None) -> str:
    """Digest of what was asked of a run and of the run that it starts from, but for seeds and devices.

    Runs that share it are repetitions of one another. While the first results are there, their folder does not count.

    Args:
        settings: of the run.
        plan: how its partition was made, where it has one.
    """
    first = first_summary(settings.backbone)
    asked = None if first is None else first.get("settings_sha256")
    start = settings if asked is None else replace(settings, backbone=f"run:{asked}")
    return start.digest_but_seed(plan)
