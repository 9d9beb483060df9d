"""`edgefl-export`: keys, bundles, verification. Results on stdout, everything else on stderr.

Exit status: 0 done, 1 failed, 2 usage or missing extra, 3 refused (signature, trust, policy). A known failure is one
sentence, never a traceback, and nothing that reads like success is printed before everything succeeded.
"""

import sys
from typing import Any

import click

from edgefl_export.commands.bundle import bundle
from edgefl_export.commands.inspect import inspect
from edgefl_export.commands.keygen import keygen
from edgefl_export.commands.verify import verify
from edgefl_protocol.distribution import VERSION, VERSION_LINE
from edgefl_protocol.errors import USAGE_CODES, BundleError, EdgeflError, KeyMaterialError
from edgefl_protocol.sentences import out_of_use


class _Commands(click.Group):
    """Turns known errors into one sentence and the exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EdgeflError as error:
            click.echo(f"edgefl-export: {error}", err=True)
            ctx.exit(3 if isinstance(error, BundleError | KeyMaterialError) else 2 if error.code in USAGE_CODES else 1)

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as error:
            click.echo(f"edgefl-export: {out_of_use(error)}", err=True)
            sys.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="edgefl-export", message=VERSION_LINE)
def main() -> None:
    """Turn finished runs into signed bundles for devices."""


for command in (bundle, inspect, keygen, verify):
    main.add_command(command)
