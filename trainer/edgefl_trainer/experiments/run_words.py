"""What a caption says of how runs were made: schedule, data, and whether their network was ever trained."""

from collections.abc import Mapping
from typing import Any

from edgefl_protocol.sentences import counted
from edgefl_trainer.engine.first_run import stays_untrained
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.engine.settings import RunSettings, without_folders

NO_PRESET = "none"


def made_of(run: FinishedRun) -> dict[str, Any]:
    """Return what the caption of a table says of how a run was made, as keys beside those of its summary."""
    settings = run.settings
    return {
        "schedule": schedule(settings, run.summary),
        "data": [without_folders(spec) for spec in settings.data],
        "untrained": stays_untrained(settings, run.folder),
    }


def schedule(settings: RunSettings, summary: Mapping[str, Any] | None = None) -> str:
    """Write preset, rounds and epochs as they were, and what else bounds what a run learned from.

    A `summary` of a live site names no preset: a coordinator gives it every setting.
    """
    preset = (summary or {}).get("preset", settings.preset) or NO_PRESET
    most = settings.images_per_site
    bound = f", at most {most:,} training images a site" if most else ""
    labels = "" if settings.labels == 1 else f", {settings.labels:.0%} of the labels"
    share = "" if settings.participation == 1 else f", {settings.participation:.1%} of the sites in each"
    rounds = counted(settings.rounds, "round")
    return f"{preset}, {rounds} of {counted(settings.epochs, 'epoch')}{bound}{labels}{share}"
