"""From the options of the command line to settings and keys."""

from collections.abc import Mapping
from typing import Any

from edgefl_coordinator.commands.setup import task_of_method, task_of_run
from edgefl_coordinator.errors import OperatorError

USUAL_MAPS = 5  # rollout maps that a site may send for one class


def settings_table(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the options of `init` stand for, as parsed TOML.

    Raises:
        OperatorError: options contradict each other or lack something.
        EdgeflError: no such run, method or backbone.
    """
    host, port = options["host"], options["port"]
    task, rounds = _task(options)
    shown = f"[{host}]" if ":" in host else host
    return {
        "federation": options["federation"],
        "public_url": (options["url"] or f"https://{shown}:{port}").rstrip("/"),
        "host": host,
        "port": port,
        "suite": int(options["suite"]),
        "task": task,
        "rounds": {
            "count": rounds,
            "quorum_min": options["quorum_min"],
            "quorum_target": options["quorum_target"],
            "deadline_s": options["deadline"],
            "start": options["start"],
            "min_cohort": options["min_cohort"],
            "allow_small_cohort": options["allow_small_cohort"],
        },
    }


def _task(options: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the [task] table and the training rounds."""
    if options["run_"] is not None:
        if options["classes"]:
            raise OperatorError("--run brings its own classes; leave --classes out")
        table, rounds = task_of_run(options["run_"], options["settings"])
    else:
        if not options["classes"]:
            raise OperatorError("give the class names in index order with --classes A,B,… or a finished run with --run")
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
    most = options["maps_per_class"] or table["settings"].get("maps_per_class", USUAL_MAPS)
    settings = {**table["settings"], "maps_per_class": most} if table["shares_maps"] else table["settings"]
    chosen = {"line": options["line"], "maps_per_class": most, "settings": settings}
    epochs = {} if options["epochs"] is None else {"epochs": options["epochs"]}
    return {**table, **chosen, **epochs}, options["rounds"] or rounds
