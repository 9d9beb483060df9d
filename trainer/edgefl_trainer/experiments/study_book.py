"""Who works on which run of a study, as files in `OUT/.study`: written by the command that leads, read by all others.

    OUT/.study/lock          held while a command leads: it falls with its process, even by kill −9
    OUT/.study/RUN.json      worker, process, when it began, phases and sites then done; why it failed
    OUT/.study/RUN.log       what the run's process said, with `--workers`

Guarantees: a watcher only reads, and never keeps a run from beginning.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgefl_protocol.durable import write_atomic
from edgefl_protocol.lock_file import is_held, share
from edgefl_trainer.engine.checkpoint import Checkpoints, RunProgress
from edgefl_trainer.engine.folder import make_folder

BOOK = ".study"
LOCK = "lock"
LATEST = "checkpoints/latest.json"


class StudyBook:
    """The notes of one study."""

    def __init__(self, out: Path) -> None:
        """Write nothing yet; `out` is where the study's runs lie."""
        self.folder = out / BOOK

    @contextmanager
    def led(self) -> Iterator[None]:
        """Be one who leads, for a while; several may, each with runs of its own."""
        make_folder(self.folder)
        lock = self.folder / LOCK
        if not lock.exists():  # a study that is finished keeps the times of its files
            lock.touch(0o644)
        with share(lock):
            yield

    def is_led(self) -> bool:
        """Tell whether a command leads now."""
        return is_held(self.folder / LOCK, shared=True)

    def began(self, name: str, run: Path, worker: int, process: int) -> None:
        """Note that a worker's process makes a run."""
        phases = phases_done(run)
        kept = Checkpoints.sites_done(run / "checkpoints", phases)  # of the phase that an earlier process was in
        note = {"worker": worker, "process": process, "began": time.time(), "phases": phases, "sites_done": kept}
        write_atomic(self._path(name), json.dumps(note).encode())

    def failed(self, name: str, cause: str) -> None:
        """Note why a run failed."""
        write_atomic(self._path(name), json.dumps({"failed": cause}).encode())

    def note_of(self, name: str) -> Mapping[str, Any]:
        """Read what is noted of a run; nothing where it was not begun."""
        return read_object(self._path(name))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '.')}.json"


def phases_done(run: Path) -> int:
    """Read how many phases of a run are finished."""
    return int(read_object(run / LATEST).get("phases", RunProgress().phases))


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
