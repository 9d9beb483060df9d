"""`edgefl sync`: do what is due in the federation, learning included, and leave.

The work is done by `sharing.sync`; here its results become lines.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_client.commands.learning_text import (
    clear_line,
    learned_text,
    limits_of,
    limits_options,
    one_of,
    pictures_option,
    progress,
    verdict_lines,
)
from edgefl_client.commands.options import (
    bundle_text,
    device_of,
    home_option,
    json_option,
    passphrase_option,
    report,
    threads_option,
    trust_option,
)
from edgefl_client.commands.stopping import pausing, stop_on_signal
from edgefl_protocol.sentences import counted

if TYPE_CHECKING:
    from edgefl_client.sharing.sync import Synced


@click.command()
@click.option(
    "--learn/--no-learn",
    default=True,
    show_default=True,
    help="Learn the open round from the pictures last named with --labels or --pictures; with --no-learn only "
    "exchange.",
)
@click.option(
    "--labels",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="CSV",
    help="Learn from this table of labelled pictures, now and at every later sync; its columns are those of edgefl "
    "train.",
)
@pictures_option
@click.option(
    "--hold", is_flag=True, help="Learn, but send nothing yet; edgefl advanced outbox show tells what would leave."
)
@limits_options
@threads_option
@trust_option
@passphrase_option
@json_option
@home_option
@click.pass_context
def sync(
    context: click.Context,
    /,
    learn: bool,
    labels: Path | None,
    pictures: Path | None,
    hold: bool,
    passphrase_file: Path | None,
    as_json: bool,
    home_dir: str | None,
    **given: Any,
) -> None:
    """Take part in the federation once: fetch, learn and send. It does what is due and ends: it fetches the task, the
    other members' contributions and the newest model, learns the open round, and sends the reply.

    If a limit stops a round, the next sync continues it. Made for cron and systemd: it may be killed at any moment.
    """
    from edgefl_client.learning.options import TrainOptions
    from edgefl_client.learning.own_pictures import name_table
    from edgefl_client.sharing.sync import run_sync
    from edgefl_client.trust import trusted_keys as signers

    extra = [signers.read_public_key(pub).public for pub in given["trusted"]]
    named = one_of(labels, pictures)
    device = device_of(context, home_dir, passphrase_file)
    if named is not None:
        name_table(device.home, named.absolute())
    with stop_on_signal("step") as stop:
        options = TrainOptions(
            threads=given["threads"],
            checkpoint_seconds=given["checkpoint_every"],
            limits=limits_of(given, stop),
            report=pausing(progress(), stop),
        )
        done = run_sync(device, options if learn else None, extra, hold=hold)
    clear_line()
    report(done.report, as_json, sync_text(done.report))
    end_synced(context, done)


def end_synced(context: click.Context, done: "Synced") -> None:
    """End a command that met the coordinator: a sentence and an exit code for what was held back or went wrong."""
    from edgefl_client.commands.failures import REFUSED, exit_code
    from edgefl_client.sharing.policy import PASSES
    from edgefl_client.sharing.sync import HELD_BACK

    held = [one for one in done.report["sent"] if one["outcome"] == "held"]
    problem = [] if done.problem is None else [str(done.problem)]
    for said in dict.fromkeys([*(one["message"] for one in held), *problem]):  # a broken policy holds every item
        click.echo(f"edgefl: {said}", err=True)
    if done.problem is not None:
        context.exit(exit_code(done.problem))
    if any(one["code"] not in PASSES | {HELD_BACK} for one in held):
        context.exit(REFUSED)


def sync_text(found: dict[str, Any]) -> str:
    """Say for a person what `sharing.sync` tells: a line per fact, what was sent first, warnings last."""
    from edgefl_client.sharing.sync import NOT_PUBLISHED

    over = found["round"]["state"] == "done"
    last = f"the federation is over: its last round, {found['round']['number']}, is done"
    taken = any(one["outcome"] == "accepted" for one in found["sent"])
    beside = ", with this reply" if taken and found["round"]["state"] == "closed" else ""
    lines = [
        f"reply {one['outcome']} ({one['bytes']} bytes)"
        + (f": {one['message']}" if one["outcome"] in ("late", "refused") else "")
        for one in found["sent"]
    ]
    lines.append(last if over else f"round {found['round']['number']} is {found['round']['state']}{beside}")
    if found["bundle"] is not None and found["bundle"].get("changed"):
        lines.append(f"model {bundle_text(found['bundle'])}")
    if found["bundle"] is None:
        lines.append(NOT_PUBLISHED)
    got = found["broadcast"]
    if got is not None:
        kind = "feature" if got["features"] else "map"
        here = counted(got[f"{kind}s"], kind)
        lines.append(f"broadcast: {got['error']['message']}" if got["error"] else f"{here} of other members received")
    waits = counted(found["waiting"], "item waits", "items wait")
    answered = found["waiting"] and found["round"]["replied"]  # a round takes one reply of each member
    lines.append(f"{waits} for the next round" if answered else waits)
    learned = found["learning"]
    if learned is not None and learned["state"] == "skipped":
        said = learned["message"] == NOT_PUBLISHED or (over and learned["code"] == "not_open")
        lines += [] if said else [f"nothing to learn: {learned['message']}"]
    elif learned is not None and learned["state"] != "failed":
        lines.append(learned_text(learned, "the next sync goes on from there") + verdict_lines(learned))
    lines += [told for told in (found["round"]["stuck"], found["silent"]) if told]
    return "\n".join(lines)
