"""Lock files: who holds one is a process that still runs.

Guarantees:
    A lock falls with its process, however that ends, even by kill −9: nothing is left over for anybody to remove. The
    file stays; no byte of it is read or changed.
    One holds it alone, or several share it. Whoever opens it once more is another holder, also in the same process.
    A lock keeps out only those who ask for it. A file system that knows no locks is an `OSError`.
Source: flock(2).
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from typing import Final, Self

from edgefl_protocol.durable import FilePath
from edgefl_protocol.errors import EdgeflError

_PAUSE_S: Final = 0.05  # between two tries


class LockFile:
    """A lock file that is held alone until `close`; made where it is missing.

    Args:
        busy: what is raised where another one holds it.
        wait_s: how long to wait for that one to let go.
        mode: permission bits of a file that is made.

    Raises:
        EdgeflError: `busy`.
        OSError: the file cannot be opened for writing, or not be locked.
    """

    def __init__(self, path: FilePath, busy: EdgeflError, *, wait_s: float = 0.0, mode: int = 0o600) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, mode)
        try:
            hold(self._descriptor, busy, wait_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether it was not closed yet."""
        return self._descriptor >= 0

    def close(self) -> None:
        """Let go of it; doing it twice changes nothing."""
        if self.is_open:
            os.close(self._descriptor)
            self._descriptor = -1


def hold(descriptor: int, busy: EdgeflError, wait_s: float = 0.0) -> None:
    """Lock a file that is open, alone, until it is closed; arguments and errors as of `LockFile`."""
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise busy from None
            time.sleep(_PAUSE_S)
        else:
            return


@contextlib.contextmanager
def share(path: FilePath) -> Iterator[None]:
    """Hold a file or folder, which must exist, together with others; waits while one holds it alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def is_held(path: FilePath, *, shared: bool = False, unknown: bool = False) -> bool:
    """Tell whether another one holds a file or folder now.

    Args:
        shared: also where it is shared. Two who look so at once may each take the other for a holder.
        unknown: the answer where it is missing, or cannot be locked.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return unknown
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if shared else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return unknown
    finally:
        os.close(descriptor)
    return False
