"""The command `edgefl`: score pictures, answer questions about them, trust signers, take part in a federation.

Results go to standard output, everything meant for a person in passing to standard error. Exit codes: 0 done,
1 failed, 2 usage or a missing extra, 3 refused. A known failure is one sentence. Each command is a file of
`commands/`; it is added to the group below. Only `click` is imported before a command runs.
"""

import os
import sys
from typing import NoReturn

import click

from edgefl_client.commands.ask import ask
from edgefl_client.commands.contribute import contribute
from edgefl_client.commands.doctor import doctor
from edgefl_client.commands.federation import enrol, pull, status
from edgefl_client.commands.options import home_option
from edgefl_client.commands.outbox import outbox
from edgefl_client.commands.personal import personal
from edgefl_client.commands.policy import policy
from edgefl_client.commands.rotate import rotate
from edgefl_client.commands.score import score
from edgefl_client.commands.sync import sync
from edgefl_client.commands.train import train
from edgefl_client.commands.trust import trust
from edgefl_client.commands.use import use
from edgefl_client.commands.watch import watch
from edgefl_protocol.distribution import VERSION, VERSION_LINE
from edgefl_protocol.sentences import out_of_use


class _Group(click.Group):
    """Keeps the names that rare commands had before they stood under `advanced`; the list does not show them."""

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        found = super().get_command(context, name)
        return advanced.commands.get(name) if found is None else found


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(VERSION, prog_name="edgefl", message=VERSION_LINE)
@home_option
@click.pass_context
def cli(context: click.Context, home_dir: str | None) -> None:
    """Score pictures or ask about them on this device, and take part in a federation. For research use only."""
    context.obj = home_dir


@cli.group()
def advanced() -> None:
    """See what waits, undo learning, or do by hand what sync does. These commands are rarely needed."""


for command in (score, ask, use, watch, trust, enrol, sync, contribute, policy, train, status, doctor):
    cli.add_command(command)
for command in (outbox, personal, pull, rotate):
    advanced.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    try:
        code = cli.main(arguments, prog_name="edgefl", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read our output has left; nothing more to say
        sys.exit(1)
    except click.Abort:
        _stopped()
    except ImportError as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):
            _too_old()
            raise
        _stopped()  # by Ctrl-C while a library was loading, which calls that a failure of its own
    except OSError as error:
        click.echo(f"edgefl: {out_of_use(error)}", err=True)
        sys.exit(1)
    except Exception as error:
        from edgefl_client.commands.failures import exit_code
        from edgefl_protocol.errors import EdgeflError

        if not isinstance(error, EdgeflError):
            raise
        click.echo(f"edgefl: {error}", err=True)
        sys.exit(exit_code(error))
    sys.exit(code if isinstance(code, int) else 0)


def _too_old() -> None:
    """End where a library that is too old is why another could not be loaded."""
    from edgefl_protocol.distribution import require_all
    from edgefl_protocol.errors import EdgeflError

    try:
        require_all()
    except EdgeflError as error:
        click.echo(f"edgefl: {error}", err=True)
        sys.exit(1)


def _stopped() -> NoReturn:
    click.echo("stopped", err=True)
    sys.exit(1)
