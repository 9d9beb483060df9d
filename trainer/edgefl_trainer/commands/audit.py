"""`edgefl-train audit`: what an attacker learns from what a finished run sent."""

import json
from pathlib import Path

import click

from edgefl_trainer.commands import options as shared
from edgefl_trainer.commands.extra import needs_trainer

USUAL_PICTURES = 200
LEAST_PICTURES = 20


@click.command()
@shared.run_dir
@click.option(
    "--site", "sites", multiple=True, metavar="NAME", help="Attack this site alone; repeatable.  [default: all]"
)
@click.option(
    "--pictures",
    type=click.IntRange(LEAST_PICTURES, 10_000),
    default=USUAL_PICTURES,
    show_default=True,
    metavar="N",
    help="Look for at most this many training pictures of a site.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@needs_trainer
def audit(run_dir: Path, sites: tuple[str, ...], pictures: int, as_json: bool) -> None:
    """Attack what a finished RUN sent.

    Who made this map or feature, what did the picture look like, was it learned from? Asked of what the sites sent, and
    of their models. Each figure stands beside what an attacker reaches without the payload, and beside a control that
    has to succeed. Needs the data that RUN learned from. The result is added to RUN/audit.json;
    entries of other sites stay.
    """
    from edgefl_trainer.data.specs import check_there
    from edgefl_trainer.engine.folder import CONFIG, check_finished
    from edgefl_trainer.engine.settings import read_settings

    check_finished(run_dir)  # this and what follows needs no PyTorch, whose import takes seconds
    check_there(read_settings(run_dir / CONFIG).data)
    from edgefl_protocol.durable import write_atomic
    from edgefl_trainer.audit.result import AUDIT, trained_sites
    from edgefl_trainer.audit.running import audit as attack
    from edgefl_trainer.audit.text import audit_text
    from edgefl_trainer.engine.models import open_run

    run = open_run(run_dir)
    found, trained = attack(run, sites, pictures, lambda line: click.echo(line, err=True)), trained_sites(run.summary)
    kept = found.to_json(trained)
    write_atomic(run_dir / AUDIT, json.dumps(kept, indent=2, allow_nan=False).encode() + b"\n")
    click.echo(json.dumps(kept, allow_nan=False) if as_json else "\n".join(audit_text(found, trained)))
