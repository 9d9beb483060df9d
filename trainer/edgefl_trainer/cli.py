"""`edgefl-train`: run, evaluate, predict with and compare federated methods. Results on stdout, the rest on stderr.

Exit status: 0 done; 1 failed (data, disk, training, a damaged file); 2 what was asked for cannot be had (an option, a
name, a setting, a missing extra), and nothing was begun; 3 refused (signature, trust, policy). A known failure is one
sentence; only Python's development mode (PYTHONDEVMODE=1) shows a traceback before it.
"""

import sys
import traceback

import click

from edgefl_protocol.distribution import VERSION, VERSION_LINE
from edgefl_protocol.errors import USAGE_CODES, BundleError, EdgeflError, EnvelopeError, RecordError
from edgefl_protocol.sentences import out_of_use
from edgefl_trainer.commands.audit import audit
from edgefl_trainer.commands.data import data
from edgefl_trainer.commands.evaluate import evaluate
from edgefl_trainer.commands.experiment import experiment
from edgefl_trainer.commands.finetune import finetune
from edgefl_trainer.commands.join import join
from edgefl_trainer.commands.methods import methods
from edgefl_trainer.commands.partition import partition
from edgefl_trainer.commands.predict import predict
from edgefl_trainer.commands.report import report
from edgefl_trainer.commands.run import run
from edgefl_trainer.commands.table import table
from edgefl_trainer.errors import BudgetError, FederationRefused, MethodError

FAILED, USAGE, REFUSED = 1, 2, 3
SEE_WHERE = " With PYTHONDEVMODE=1 before the command, Python shows each call that led there."


def main() -> None:
    """Run the command line and leave with its exit status."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("stopped", err=True)  # what can go on says so itself: `commands.stopping`
        sys.exit(FAILED)
    except EdgeflError as error:
        if sys.flags.dev_mode:
            traceback.print_exc()
        click.echo(f"edgefl-train: {error}{SEE_WHERE if error.code == MethodError.code else ''}", err=True)
        sys.exit(exit_code(error))
    except OSError as error:
        click.echo(f"edgefl-train: {out_of_use(error)}.", err=True)
        sys.exit(FAILED)


def exit_code(error: EdgeflError) -> int:
    """Return the exit status of a command that ends with this error."""
    if isinstance(error, BundleError | EnvelopeError | RecordError | FederationRefused | BudgetError):
        return REFUSED
    return USAGE if error.code in USAGE_CODES else FAILED


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="edgefl-train", message=VERSION_LINE)
def cli() -> None:
    """Train models over sites whose pictures never leave the site."""


for command in (audit, data, evaluate, experiment, finetune, join, methods, partition, predict, report, run, table):
    cli.add_command(command)
