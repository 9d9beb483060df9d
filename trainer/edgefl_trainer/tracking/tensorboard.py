"""TensorBoard: a run's figures as event files in a folder, written by PyTorch's own writer.

Guarantees: a run that goes on writes all its figures anew and says so to TensorBoard (`purge_step`), which then forgets
those it has from before: no point is shown twice, and none that a kill kept from the disk is missing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl_protocol.durable import write_atomic
from edgefl_trainer.engine.folder import make_folder
from edgefl_trainer.tracking.tracker import Ending, FollowedRun
from edgefl_trainer.tracking.tracks import OWNER

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class EventFiles:
    """A run in TensorBoard."""

    def __init__(self, folder: Path) -> None:
        """Nothing is written yet."""
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def begin(self, run: FollowedRun) -> None:
        """Open a new file, and write the settings as a table."""
        from torch.utils.tensorboard import SummaryWriter

        make_folder(self._folder)
        write_atomic(self._folder / OWNER, run.identity.encode())
        if self._writer is not None:
            self._writer.close()
        self._writer = SummaryWriter(str(self._folder), purge_step=0)
        self._settings = run.settings
        self._writer.add_text("settings", _table(run.settings))
        self._writer.flush()

    def figures(self, step: int, seconds: float, figures: Mapping[str, float]) -> None:
        """Write scalars; `FIGURE/SITE` puts the sites of one figure beside one another."""
        assert self._writer is not None
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, ending: Ending, texts: Mapping[str, str]) -> None:
        """Write digests and words of the summary, and close the file."""
        assert self._writer is not None
        if texts:
            self._writer.add_text("summary", _table(texts))
        self._writer.close()


def _table(values: Mapping[str, str]) -> str:
    """A table in Markdown, as TensorBoard shows texts."""
    lines = [f"| {name} | {value.replace('|', '&#124;')} |" for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *lines])
