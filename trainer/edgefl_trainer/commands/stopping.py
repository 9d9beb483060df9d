"""What a command says when a person stops it: the exact command that goes on."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

FAILED = 1  # exit status


@contextmanager
def tells_how_to_go_on(command: Callable[[], Sequence[str]], from_here: Callable[[], bool] = bool) -> Iterator[None]:
    """End with one line and exit status 1 where a person stops what is done inside.

    `command` gives the words that go on, asked for when it is needed; none where nothing was begun. `from_here` tells
    whether they go on from this folder alone: then the line enters it first, and works wherever it is typed.
    """
    try:
        yield
    except KeyboardInterrupt:
        words = command()
        enter = f"cd {shlex.quote(str(Path.cwd()))} && " if words and from_here() else ""
        goes_on = (
            f"continue with: {enter}{shlex.join(words)}" if words else ("nothing had begun; run the same command again")
        )
        click.echo(f"stopped; {goes_on}", err=True)
        sys.exit(FAILED)


def resuming(folder: Path) -> Callable[[], Sequence[str]]:
    """Return what gives the command that goes on with the run in a folder."""
    words = ("edgefl-train", "run", "--resume", "--out", str(folder))
    return lambda: words if (folder / "config.toml").exists() else ()


def named_from_here(folder: Path) -> Callable[[], bool]:
    """Return what tells whether a run's folder, or a path of its settings, is named from the folder of this process.

    `config.toml` keeps what was typed: `settings_sha256` is of it.
    """

    def told() -> bool:
        from edgefl_trainer.data.specs import parse_spec
        from edgefl_trainer.engine.settings import read_settings

        settings = read_settings(folder / "config.toml")
        kind, _, network = settings.backbone.partition(":")
        paths = [settings.partition, *(parse_spec(text).body for text in settings.data)]
        paths += [network] if kind in ("run", "file") else []
        return not all(Path(path).expanduser().is_absolute() for path in [*paths, str(folder)] if path)

    return told
