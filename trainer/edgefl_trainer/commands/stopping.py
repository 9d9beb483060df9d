"""What a command says when a person stops it: the exact command that goes on."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

FAILED = 1  # exit status


@contextmanager
def tells_how_to_go_on(command: Callable[[], Sequence[str]]) -> Iterator[None]:
    """End with one line and exit status 1 where a person stops what is done inside.

    `command` gives the words that go on, asked for when it is needed; none where nothing was begun.
    """
    try:
        yield
    except KeyboardInterrupt:
        words = command()
        goes_on = f"continue with: {shlex.join(words)}" if words else ("nothing had begun; run the same command again")
        click.echo(f"stopped; {goes_on}", err=True)
        sys.exit(FAILED)


def resuming(folder: Path) -> Callable[[], Sequence[str]]:
    """Return what gives the command that goes on with the run in a folder."""
    words = ("edgefl-train", "run", "--resume", "--out", str(folder))
    return lambda: words if (folder / "config.toml").exists() else ()
