"""`edgefl-train join`: this machine takes part in a live federation with its own data.

Progress and the fingerprint go to stderr, the result to stdout. Method, settings, classes, rounds and seed come from
the coordinator.
"""

import json
import sys
from pathlib import Path
from typing import Any

import click

from edgefl_trainer.commands import options as shared
from edgefl_trainer.commands.extra import needs_trainer
from edgefl_trainer.commands.options import names
from edgefl_trainer.commands.stopping import tells_how_to_go_on


@click.command()
@click.argument("invite", required=False)
@click.option("--data", multiple=True, required=True, metavar="SPEC", help="This site's data: docs/reference/data.md.")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Run directory; it also holds this site's keys.",
)
@click.option("--site", metavar="NAME", help="Which site of the data this is; needed if the data has several.")
@click.option(
    "--ca",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help=(
        "PEM certificate of the coordinator or of its certificate authority.  [default: the invite's, else the "
        "public authorities]"
    ),
)
@click.option(
    "--proxy", metavar="URL", help='Proxy to use from now on, "" for none; the environment\'s settings are not used.'
)
@click.option(
    "--backbone",
    metavar="NAME",
    help="Your copy of the federation's network, as in `run`.  [default: the name that the task gives]",
)
@click.option(
    "--task",
    metavar=shared.TASK_FORM,
    help="How this site's classes become the federation's: such as mal=MEL,BCC:rest where those are mal and rest.  "
    "[default: they have the federation's names, or its task is nevus]",
)
@click.option("--classes", metavar="A,B,…", help="Use only images of these classes.")
@click.option(
    "--images-per-site",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    show_default=True,
    help="Use at most this many training images; 0 uses all.",
)
@click.option(
    "--unlabelled",
    type=click.Choice(["none", "site", "spread"]),
    help=f"{shared.UNLABELLED_HELP}  [default: none; for methods without labels spread]",
)
@click.option(
    "--balance",
    type=click.Choice(["none", "class"]),
    default="none",
    show_default=True,
    help="Draw all classes equally often.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to compute.",
)
@click.option(
    "--autocast",
    type=click.Choice(["auto", "none", "bf16"]),
    default="auto",
    show_default=True,
    help="Backbone precision; auto is bf16 on CUDA.",
)
@shared.privacy_budget
@click.option(
    "--once",
    is_flag=True,
    help="Do what is due and stop, for use from a timer.  [default: stay until the federation is over]",
)
@click.option(
    "--passphrase-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="File with the passphrase of the keys, readable by you alone; or give the passphrase itself in "
    "EDGEFL_KEY_PASSPHRASE.  [default: the keys are not encrypted]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@needs_trainer
def join(
    invite: str | None, out: Path, as_json: bool, passphrase_file: Path | None, classes: str | None, **options: Any
) -> None:
    """Take part in a live federation as one site, with its data. INVITE is what the operator gave you. The command
    runs until the federation is over.

    After a failure or a kill, the same command continues; INVITE may then be left out. It is a file with the invite,
    or "-" for standard input, so that no list of processes shows it. The text itself works, too.
    """
    from edgefl_protocol.durable import read_given, read_passphrase
    from edgefl_protocol.records.invite import MAX_INVITE_CHARS, PREFIX
    from edgefl_trainer.data.specs import parse_spec

    given = None if invite is None else read_given(invite, 2 * MAX_INVITE_CHARS, PREFIX)
    for spec in options["data"]:
        parse_spec(spec)  # this and what is before it needs no PyTorch, whose import takes seconds
    from edgefl_trainer.live import Join, SiteOptions
    from edgefl_trainer.live import join as take_part

    call = Join(
        folder=out,
        invite=given,
        ca=options.pop("ca"),
        proxy=options.pop("proxy"),
        once=options.pop("once"),
        passphrase=read_passphrase(passphrase_file),
        say=lambda line: click.echo(line, err=True),
        options=SiteOptions(
            site=options.pop("site") or "",
            task=options.pop("task") or "",
            backbone=options.pop("backbone") or "",
            classes=names(classes) if classes else (),
            privacy_budget=options.pop("privacy_budget") or 0.0,
            **options,
        ),
    )
    with tells_how_to_go_on(lambda: _same_command(out, invite)):
        found = take_part(call)
    click.echo(json.dumps(found) if as_json else text_of(found))


def _same_command(out: Path, invite: str | None) -> list[str]:
    """The words that go on; without the invite once the site is a member, so that no list of processes shows it."""
    from edgefl_trainer.live import SiteMembership

    used = {invite, "-"} if SiteMembership(out).joined else set()
    return ["edgefl-train", *(word for word in sys.argv[1:] if word not in used)]


def text_of(found: dict[str, Any]) -> str:
    """Say where the site stands, for a person."""
    if found["summary"] is not None:
        from edgefl_trainer.commands.results_text import summary_text

        return summary_text(found["summary"])
    told = found["round"]
    if told is None:
        return f"{found['name']} is {found['state']}; tell the operator this fingerprint: {found['fingerprint']}"
    sent = "".join(f"; reply of round {one['round']} {one['outcome']}" for one in found["sent"])
    return f"round {told['number']} of {told['rounds']} is {told['state']}{sent}"
