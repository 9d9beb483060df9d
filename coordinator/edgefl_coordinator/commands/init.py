"""`edgefl-coordinator init`: from the options of the command line to a new coordinator's settings and folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_coordinator.commands.options import PASSPHRASE, Operator, guarded
from edgefl_protocol.durable import read_passphrase
from edgefl_protocol.sentences import counted

if TYPE_CHECKING:
    from edgefl_coordinator.settings import CoordinatorSettings


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--federation", metavar="NAME", required=True, help="Name of the federation: lower-case letters, digits, '-'."
)
@click.option("--run", "run_", metavar="RUN", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Take method, settings, task, classes, backbone, rounds and epochs from a finished training run."
              )  # fmt: skip
@click.option(
    "--method",
    metavar="NAME",
    default="fedevprompt",
    show_default=True,
    help="Federated method; `edgefl-train methods` lists them.",
)
@click.option("--preset", type=click.Choice(["tiny", "bench84", "paper"]),
              help="Take settings, rounds and epochs from this preset of `edgefl-train run`.  [default: the "
                   "method's own settings]"
              )  # fmt: skip
@click.option("--task", metavar="NAME", default="all", show_default=True, help="Name of the task.")
@click.option(
    "--line", metavar="NAME", default="main", show_default=True, help="Line of the bundles that members receive."
)
@click.option("--classes", metavar="A,B,…", help="Class names in index order; required unless --run is given.")
@click.option("--backbone", metavar="NAME",
              help="Network, as in `edgefl-train run --backbone`.  [default: derm-vit-tiny-84; "
                   "with --preset tiny, or for a method that learns its network, the untrained tiny]")  # fmt: skip
@click.option("--image-px", metavar="PX", type=click.IntRange(8, 4096),
              help="Side of the images.  [default: the backbone's]")  # fmt: skip
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True,
              help="Set a hyper-parameter of the method; repeatable.")  # fmt: skip
@click.option("--maps-per-class", metavar="M", type=click.IntRange(1),
              help="Most rollout maps a site may send for one class.  [default: the method's, 5]")  # fmt: skip
@click.option("--seed", metavar="N", type=int, default=0, show_default=True, help="Seed of the server's random draws.")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", metavar="PORT", type=click.IntRange(0, 65535), default=8443, show_default=True,
              help="TCP port to listen on.")  # fmt: skip
@click.option("--url", metavar="URL", help="Public base address, https://….  [default: https://HOST:PORT]")
@click.option("--rounds", metavar="N", type=click.IntRange(1),
              help="Rounds of training.  [default: the run's or preset's, else 5]")  # fmt: skip
@click.option("--epochs", metavar="N", type=click.IntRange(1),
              help="Local epochs in a round.  [default: the run's or preset's, else 1]")  # fmt: skip
@click.option("--members", metavar="N", type=click.IntRange(1),
              help="Number of sites and devices that will take part; the defaults of quorum and cohort follow from "
                   "it.  [default: --quorum-target, else 3]")  # fmt: skip
@click.option("--quorum-min", metavar="N", type=click.IntRange(1),
              help="Fewest replies with which a round is aggregated.  [default: one more than --min-cohort]"
              )  # fmt: skip
@click.option("--quorum-target", metavar="N", type=click.IntRange(1),
              help="Number of replies at which a round closes early, and of approved members at which the first "
                   "round opens.  [default: --members]")  # fmt: skip
@click.option("--deadline", metavar="SECONDS", type=click.IntRange(1), default=3600, show_default=True,
              help="Time a round stays open.")  # fmt: skip
@click.option("--start", type=click.Choice(["automatic", "manual"]), default="automatic", show_default=True,
              help="When the first round opens: as soon as enough members are approved, or on `start`.")  # fmt: skip
@click.option("--min-cohort", metavar="N", type=click.IntRange(0),
              help="Fewest other members that must have contributed to a broadcast.  [default: all others, 3 at most]"
              )  # fmt: skip
@click.option("--allow-small-cohort", is_flag=True, help="Permit --min-cohort below 2; the audit log records it.")
@click.option("--database", metavar="URL", default="",
              help="PostgreSQL database of its own for the store, postgresql://USER@HOST/NAME, which several processes "
                   "share.  [default: a file in DIR]")  # fmt: skip
@click.option("--payloads", metavar="URL", default="",
              help="S3-compatible store for payloads above 64 KiB, which servers on several machines share: "
                   "s3://BUCKET/PREFIX?region=NAME&endpoint=https://HOST, or region and endpoint in the environment.  "
                   "[default: DIR]")  # fmt: skip
@click.option("--suite", type=click.Choice(["1", "2"]), default="2", show_default=True,
              help="How messages are encrypted: 1 is X25519, 2 is ML-KEM-768 with X25519.")  # fmt: skip
@PASSPHRASE
@guarded
def init(folder: Path, passphrase_file: Path | None, **options: Any) -> None:
    """Make the folder DIR of a new coordinator.

    It holds keys, a development certificate and the settings.
    """
    from edgefl_coordinator.founding.folder import (
        check_database,
        check_finishable,
        check_free,
        check_payloads,
        check_table,
        make_home,
    )
    from edgefl_coordinator.founding.task import each_map_line, reply_cap, try_first_job, untrained_line
    from edgefl_coordinator.rounds.quorum import when_it_closes
    from edgefl_coordinator.settings import CoordinatorHome
    from edgefl_coordinator.web.setting_changes import other_port

    home = CoordinatorHome(folder.resolve())
    check_free(home)
    _check_early(options)
    check_database(options["database"])
    check_payloads(options["payloads"])
    secret = read_passphrase(passphrase_file)
    click.echo("trying the method and its settings with PyTorch, which takes some seconds to load", err=True)
    table = settings_table(options)
    settings = check_table(table)
    check_finishable(settings, _members(options))
    limits = {"reply_bytes": reply_cap(try_first_job(settings))}
    make_home(home, {**table, "limits": limits}, secret)
    for line in filter(None, (untrained_line(settings), each_map_line(settings))):
        click.echo(f"warning: {line}", err=True)
    if secret is None:
        click.echo("warning: the private keys are not encrypted; their files have mode 0600", err=True)
    rounds, typed = settings.rounds, Operator(home.root, passphrase_file)
    click.echo(
        f"a round {when_it_closes(rounds.quorum_min, rounds.quorum_target)}; a broadcast holds contributions of at "
        f"least {counted(rounds.min_cohort, 'other', 'others')}",
        err=True,
    )
    click.echo(f"made the coordinator of {settings.federation} in {home.root}", err=True)
    click.echo(f"members will call {settings.public_url}, which every invite names (--url)", err=True)
    if unheard := other_port(settings):
        click.echo(
            f"warning: the server listens on port {settings.port}, and members will call another; unless that one is "
            f"forwarded to it, run: {typed.typed(f'edgefl-coordinator set public_url {unheard}')}",
            err=True,
        )
    _warn_of_taken_port(settings, typed)
    click.echo(
        f"move {home.keys / 'root.key'} to an offline medium: with it you can recover after a break-in", err=True
    )
    click.echo(f"next: {typed.typed('edgefl-coordinator serve')}", err=True)


def settings_table(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the options of `init` stand for, as parsed TOML.

    An `OperatorError` where options contradict each other or lack something; an `EdgeflError` where there is no such
    run, method or backbone.
    """
    task, count = _task(options)
    return _table_with(options, task, count)


def _warn_of_taken_port(settings: "CoordinatorSettings", typed: Operator) -> None:
    """Warn where another program listens on the port: `serve` would refuse, and an invite name it."""
    from edgefl_coordinator.web.door import port_is_taken

    if port_is_taken(settings.host, settings.port):
        other = typed.typed("edgefl-coordinator set port PORT public_url https://HOST:PORT")
        click.echo(
            f"warning: another program listens on port {settings.port} now; stop it before you serve, or, before you "
            f"invite, choose another: {other}",
            err=True,
        )


def _check_early(options: Mapping[str, Any]) -> None:
    """Refuse what can be refused before the trainer is loaded, which takes many seconds: all but what is learned."""
    from edgefl_coordinator.errors import USAGE, OperatorError
    from edgefl_coordinator.founding.folder import check_finishable, check_table
    from edgefl_coordinator.founding.task import check_names
    from edgefl_coordinator.settings import LEAST_COHORT

    classes = (options["classes"] or "a,b").split(",")
    nothing = {"image_px": 1, "patch": 1}  # stands for the backbone, which the trainer describes
    head = {"name": options["task"], "line": options["line"], "seed": options["seed"], "classes": classes}
    table = _table_with(options, {**head, "method": "any", "backbone": nothing, "shares_maps": False}, 1)
    rounds, members = table["rounds"], _members(options)
    if options["min_cohort"] is None and rounds["min_cohort"] < LEAST_COHORT and not options["allow_small_cohort"]:
        fewest = rounds["quorum_min"]
        what = counted(members, "member") if members <= LEAST_COHORT else f"a quorum of {fewest}"
        raise OperatorError(
            f"with {what} the contribution of each could be told apart: you need at least {LEAST_COHORT + 1}, or "
            "--allow-small-cohort",
            USAGE,
        )
    check_finishable(check_table(table), members)
    check_names(options["run_"], options["method"], options["backbone"], options["settings"])


def _table_with(options: Mapping[str, Any], task: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the settings around a [task] table."""
    from edgefl_coordinator.errors import USAGE, OperatorError
    from edgefl_coordinator.founding.folder import EVERY_ADDRESS
    from edgefl_coordinator.rounds.quorum import usual_quorum

    host, port = options["host"], options["port"]
    if host in EVERY_ADDRESS and not options["url"]:
        raise OperatorError(
            f"--host {host} listens on every address of this machine, but members need one to call: give --url "
            f"https://NAME:{port}",
            USAGE,
        )
    members = _members(options)
    quorum = usual_quorum(members, options["quorum_min"], options["quorum_target"], options["min_cohort"])
    shown = f"[{host}]" if ":" in host else host
    return {
        "federation": options["federation"],
        "public_url": (options["url"] or f"https://{shown}:{port}").rstrip("/"),
        "host": host,
        "port": port,
        "suite": int(options["suite"]),
        "database": options["database"],
        "payloads": options["payloads"],
        "task": task,
        "rounds": {
            "count": count,
            "quorum_min": quorum.quorum_min,
            "quorum_target": quorum.quorum_target,
            "deadline_s": options["deadline"],
            "start": options["start"],
            "min_cohort": quorum.min_cohort,
            "allow_small_cohort": options["allow_small_cohort"],
        },
        "protection": {"claim_most": 1.0, "norm_most": 1.0},  # docs/decisions/0065: a new federation knows nobody yet
    }


def _members(options: Mapping[str, Any]) -> int:
    from edgefl_coordinator.rounds.quorum import USUAL_MEMBERS

    return int(options["members"] or options["quorum_target"] or USUAL_MEMBERS)


def _task(options: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the [task] table and the training rounds."""
    from edgefl_coordinator.errors import USAGE, OperatorError
    from edgefl_coordinator.founding.task import task_of_method, task_of_run
    from edgefl_protocol.rules.maps import MAX_MAPS

    if options["run_"] is not None:
        if options["classes"]:
            raise OperatorError("--run takes the classes from the run; leave --classes out", USAGE)
        table, rounds = task_of_run(options["run_"], options["settings"])
    else:
        if not options["classes"]:
            told = "give the class names in index order with --classes A,B,…, or a finished run with --run"
            raise OperatorError(told, USAGE)
        table, rounds = task_of_method(
            options["method"],
            options["backbone"],
            preset=options["preset"],
            assignments=options["settings"],
            image_px=options["image_px"],
            seed=options["seed"],
        )
        head = {"name": options["task"], "classes": options["classes"].split(","), "seed": options["seed"]}
        table = {**head, **table}
    if not table["travels"]:
        name = table["method"]
        raise OperatorError(f"{name} sends nothing, so it needs no coordinator: edgefl-train run {name} runs it", USAGE)
    most = options["maps_per_class"] or table["settings"].get("maps_per_class", MAX_MAPS)
    bound = {"maps_per_class": most} if "maps_per_class" in table["settings"] else {}  # what members send by
    chosen = {"line": options["line"], "maps_per_class": most, "settings": {**table["settings"], **bound}}
    epochs = {} if options["epochs"] is None else {"epochs": options["epochs"]}
    return {**table, **chosen, **epochs}, options["rounds"] or rounds
