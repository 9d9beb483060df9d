"""From the options of the command line to settings and keys."""

from collections.abc import Mapping
from typing import Any

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.setup import ask_trainer, table_from_run


def settings_table(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the options of `init` stand for, as parsed TOML.

    Raises:
        OperatorError: options contradict each other or lack something.
        EdgeflError: no such run, method or backbone.
    """
    host, port = options["host"], options["port"]
    shown = f"[{host}]" if ":" in host else host
    return {
        "federation": options["federation"],
        "public_url": (options["url"] or f"https://{shown}:{port}").rstrip("/"),
        "host": host,
        "port": port,
        "suite": int(options["suite"]),
        "task": _task(options),
        "rounds": {
            "count": options["rounds"],
            "quorum_min": options["quorum_min"],
            "quorum_target": options["quorum_target"],
            "deadline_s": options["deadline"],
            "start": options["start"],
            "min_cohort": options["min_cohort"],
            "allow_small_cohort": options["allow_small_cohort"],
        },
    }


def _task(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the [task] table."""
    settings = dict(_assignment(text) for text in options["settings"])
    chosen = {"line": options["line"], "maps_per_class": options["maps_per_class"]}
    if options["run_"] is not None:
        if options["classes"]:
            raise OperatorError("--run brings its own classes; leave --classes out")
        table = table_from_run(options["run_"])
        return {**table, **chosen, "settings": {**table["settings"], **settings}}
    if not options["classes"]:
        raise OperatorError("give the class names in index order with --classes A,B,… or a finished run with --run")
    facts = ask_trainer(options["method"], options["backbone"], options["image_px"], options["seed"])
    return {
        **chosen,
        "method": options["method"],
        "name": options["task"],
        "classes": options["classes"].split(","),
        "seed": options["seed"],
        "shares_maps": facts.shares_maps,
        "backbone": dict(facts.backbone),
        "settings": settings,
    }


def _assignment(text: str) -> tuple[str, int | float | str | bool]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise OperatorError(f"--set {text} is not KEY=VALUE")
    if value in ("true", "false"):
        return name, value == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value
