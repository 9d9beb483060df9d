"""What the commands of `edgefl-coordinator` share: options, the exit status of a failure, the way to an operation.

Heavy modules load inside the functions, so that `--help` works in the base install.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import click

from edgefl_protocol.distribution import needs_extra
from edgefl_protocol.durable import read_passphrase
from edgefl_protocol.errors import USAGE_CODES, BundleError, EdgeflError, RecordError

COORDINATOR_EXTRA = ("msgspec", "sqlalchemy", "uvicorn", "tomli_w", "torch", "timm")

Parameters = ParamSpec("Parameters")

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
HOME = click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="EDGEFL_COORDINATOR_HOME",
    default=Path("coordinator-home"),
    show_default=True,
    show_envvar=True,
    help="Folder that `init` made.",
)
PASSPHRASE = click.option(
    "--passphrase-file",
    type=FILE,
    help="File with the passphrase of the private keys, readable by you alone; or give the passphrase itself in "
    "EDGEFL_KEY_PASSPHRASE.  [default: the keys are not encrypted]",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def guarded(
    command: Callable[Parameters, None], needs: tuple[str, ...] = COORDINATOR_EXTRA
) -> Callable[Parameters, None]:
    """Turn a missing extra and known failures of a command into one sentence and the exit status."""

    @wraps(command)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        if any(importlib.util.find_spec(name) is None for name in needs):
            click.echo(f"edgefl-coordinator: this command needs {needs_extra('coordinator')}", err=True)
            sys.exit(2)
        try:
            command(*args, **kwargs)
        except EdgeflError as error:
            from edgefl_coordinator.errors import NotAllowedError

            click.echo(f"edgefl-coordinator: {error}", err=True)
            refused = isinstance(error, NotAllowedError | BundleError | RecordError)
            sys.exit(3 if refused else 2 if error.code in USAGE_CODES else 1)

    return run


def guarded_offline(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Do as `guarded` for a command that works in the base install, such as on an offline machine."""
    return guarded(command, needs=())


@dataclass(frozen=True)
class Operator:
    """Who runs an operation: on which coordinator, and whether they read JSON or text."""

    home: Path
    passphrase_file: Path | None
    as_json: bool = False

    def run(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Run an operation, by the running server if there is one."""
        from edgefl_coordinator.settings import CoordinatorHome
        from edgefl_coordinator.web.admin import run_operation

        return run_operation(
            CoordinatorHome(self.home.resolve()), operation, arguments, read_passphrase(self.passphrase_file)
        )

    def typed(self, command: str) -> str:
        """Complete a command, as it has to be typed here."""
        phrase = f" --passphrase-file {self.passphrase_file}" if self.passphrase_file else ""
        return f"{command} --home {self.home}{phrase}"

    def show(self, facts: dict[str, Any], *lines: str) -> None:
        """Print the facts as JSON, or the lines."""
        click.echo(json.dumps(facts) if self.as_json else "\n".join(lines))


def for_operator(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --home, --passphrase-file and --json, which it gets as an `Operator`."""

    @HOME
    @PASSPHRASE
    @JSON
    @guarded
    @wraps(command)
    def run(home: Path, passphrase_file: Path | None, as_json: bool, **more: Any) -> None:
        command(Operator(home, passphrase_file, as_json), **more)

    return run
