"""Removing what was learned on this device, so that `edgefl score` goes back to the bundle's values for good.

What left the device before cannot be called back, and what others learned from it stays learned
(docs/reference/sharing.md). The files are unlinked; what a disk keeps of them is the disk's matter.
"""

from edgefl_client.home import Home
from edgefl_client.learning.checkpoint import only_one
from edgefl_client.scoring.personal import PERSONAL
from edgefl_protocol.durable import sync_folder
from edgefl_protocol.errors import StorageError

_LOCK = "lock"


def forget(home: Home, *, everything: bool) -> list[str]:
    """Remove the personal values, or everything that learning left here.

    Args:
        home: the device's home.
        everything: also where learning stands, in federations too, which table was named and who was held back: the
            next round begins with the bundle's values.

    Returns:
        Names of the files removed, in order; damaged ones too.

    Raises:
        LearningError: another process learns here (`busy`).
        StorageError: a file cannot be removed.
    """
    if not home.learning.exists():
        return []
    with only_one(home):
        names = sorted(path.name for path in home.learning.iterdir() if path.is_file() and path.name != _LOCK)
        removed = [name for name in names if everything or name == PERSONAL]
        try:
            for name in removed:
                (home.learning / name).unlink()
            sync_folder(home.learning)
        except OSError as error:
            raise StorageError(f"cannot remove {error.filename}: {error.strerror}; try again", "storage") from error
    return removed
