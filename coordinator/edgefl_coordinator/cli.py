"""`edgefl-coordinator`: make, run and administer a federation's coordinator.

Results on stdout, text for people on stderr. Exit 0 done, 1 failed, 2 usage or missing extra, 3 refused by trust or
policy. Heavy modules load inside the commands, so that `--help` works in the base install.
"""

import sys
from typing import Any

import click

from edgefl_coordinator.commands.backup import backup, restore, upgrade
from edgefl_coordinator.commands.init import init
from edgefl_coordinator.commands.keys import revoke, root, rotate
from edgefl_coordinator.commands.log import audit, check_log, log
from edgefl_coordinator.commands.operate import approve, invite, publish, serve, start
from edgefl_coordinator.commands.settings import set_
from edgefl_coordinator.commands.status import status
from edgefl_protocol.distribution import VERSION, VERSION_LINE
from edgefl_protocol.sentences import out_of_use


class _Commands(click.Group):
    """Ends with one sentence where the disk fails, that of the help text included."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as error:
            click.echo(f"edgefl-coordinator: {out_of_use(error)}", err=True)
            sys.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="edgefl-coordinator", message=VERSION_LINE)
def main() -> None:
    """Run a federation's coordinator: the meeting point of sites and devices.

    \b
    A federation from nothing:
      edgefl-coordinator init DIR --federation NAME --classes A,B --backbone run:RUN
      edgefl-coordinator serve --home DIR
      edgefl-coordinator invite --home DIR --role device NAME
      edgefl-coordinator approve --home DIR NAME --fingerprint XXXX
    """


for command in (
    approve,
    audit,
    backup,
    check_log,
    init,
    invite,
    log,
    publish,
    restore,
    revoke,
    root,
    rotate,
    serve,
    set_,
    start,
    status,
    upgrade,
):
    main.add_command(command)


if __name__ == "__main__":
    main()
