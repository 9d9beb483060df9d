"""A process that makes one run of a study: `python -m edgefl_trainer.experiments.one_run`, begun by `crews.Processes`.

Guarantees: the run has exactly the settings that stand in the one line of its standard input; it stops as by Ctrl-C,
resumable, when that input ends: so it never outlives the command that began it, not even one ended by kill −9.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.errors import BusyRunError

BUSY_STATUS = 75  # EX_TEMPFAIL: another process works on the run

if TYPE_CHECKING:
    from edgefl_trainer.engine.run import Drive
    from edgefl_trainer.engine.settings import RunSettings


def on_this_machine(settings: "RunSettings") -> "Drive":
    """Return what drives a run whose sites work in EdgeFL's own processes."""
    from edgefl_trainer.engine.local_engine import LocalEngine

    return LocalEngine.run


def main(driven: "Callable[[RunSettings], Drive]" = on_this_machine) -> None:
    """Make the run, driven as `driven` says, and end with its one sentence on standard error where it fails."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its jobs in the background ignore it
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_when_alone, daemon=True).start()
    try:
        from edgefl_trainer.engine.settings import RunSettings, from_toml

        settings = RunSettings(**from_toml(asked["settings"].encode(), "the study"))
        make_run(settings, Path(asked["folder"]), asked["name"], asked["track"], driven)
    except EdgeflError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the log's last line is the cause
        sys.exit(BUSY_STATUS if isinstance(error, BusyRunError) else 1)
    except KeyboardInterrupt:
        sys.exit("stopped")


def make_run(
    settings: "RunSettings",
    folder: Path,
    name: str,
    track: Sequence[str],
    driven: "Callable[[RunSettings], Drive]" = on_this_machine,
) -> None:
    """Make a run of a study, or what is left of it, followed by trackers under its name."""
    from edgefl_trainer.engine.run import run
    from edgefl_trainer.tracking.following import followed
    from edgefl_trainer.tracking.tracks import read_tracks

    following = followed(read_tracks(track, folder, name), folder, settings, name=name)
    run(settings, folder, resume=True, during=following, drive=driven(settings))


def _stop_when_alone() -> None:
    os.read(sys.stdin.fileno(), 1)  # not by the buffer, which a thread that waits would keep locked at the end
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    # A true signal: it wakes a main thread that waits for others, as it does with the sites on Flower.
    signal.pthread_kill(main_thread, signal.SIGINT)


if __name__ == "__main__":
    main()
