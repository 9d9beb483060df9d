"""`edgefl-coordinator set`: what may change, when it counts, and what is refused.

Source: docs/reference/coordinator.md.
"""

import json
import tomllib

import msgspec
import pytest
from click.testing import CliRunner

from edgefl_coordinator.cli import main
from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.settings import CoordinatorSettings, LimitSettings, RoundSettings, TaskSettings, load_settings
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.setting_changes import AT_ONCE, AT_RESTART
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import TaskReply

FINISHABLE = {"quorum_min": 3, "quorum_target": 3, "min_cohort": 2}
AGREED = {  # with the members, or of the keys: they never change
    "federation", "suite", "root_key_id", "rounds.count",
    *(f"task.{field.name}" for field in msgspec.structs.fields(TaskSettings) if field.name != "max_samples"),
}  # fmt: skip


def change(coordinator, **changes: str) -> dict[str, object]:
    return OPERATIONS["set"](coordinator, {"changes": {key.replace("__", "."): text for key, text in changes.items()}})


def test_every_setting_is_known_to_change_or_not() -> None:
    """A new setting has to be put in one of the three lists."""
    nested = {"task": TaskSettings, "rounds": RoundSettings, "limits": LimitSettings}
    plain = {field.name for field in msgspec.structs.fields(CoordinatorSettings)} - set(nested)
    inner = {f"{name}.{field.name}" for name, kind in nested.items() for field in msgspec.structs.fields(kind)}
    assert plain | inner == {*AT_ONCE, *AT_RESTART} | AGREED
    assert len(AT_ONCE) + len(AT_RESTART) + len(AGREED) == len(plain | inner)


def test_a_change_counts_for_the_next_request_and_the_next_start(make_coordinator, tools) -> None:
    """Members read the new quorum at once; the file has it, readable by the owner alone; the audit log names it."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    member = tools.approved_member(coordinator, "clinic-a")
    told = change(coordinator, rounds__quorum_target="5", rounds__deadline_s="7200")
    assert told == {"changed": {"rounds.quorum_target": 5, "rounds.deadline_s": 7200}, "restart": []}
    assert TaskReply.from_payload(member.call("task", Payload())).quorum_target == 5
    home = coordinator.store.home
    assert load_settings(home) == coordinator.settings
    assert home.config.stat().st_mode & 0o777 == 0o600
    rows = OPERATIONS["log"](coordinator, {"from_ms": 0, "most": 2})["shown"]
    assert [(row["event"], row["subject"], row["detail"]) for row in rows] == [
        ("setting", "rounds.quorum_target", {"value": 5}), ("setting", "rounds.deadline_s", {"value": 7200}),
    ]  # fmt: skip


# fmt: off
REFUSED = [
    ({"rounds__quorum_min": "2"},                        "quorum_min of at least 3, or a min_cohort of at most 1"),
    ({"rounds__quorum_min": "9"},                        r"quorum_min \(9\) must not be above quorum_target \(3\)"),
    ({"rounds__quorum_min": "three"},                    "rounds.quorum_min takes a whole number, not 'three'"),
    ({"rounds__quorum_min": "0"},                        "quorum_min is 0; it must be a whole number of at least 1"),
    ({"rounds__min_cohort": "1"},                        "told apart"),
    ({"rounds__quorum_mn": "3"},                         "did you mean rounds.quorum_min"),
    ({"rounds__start": "later"},                         "allowed: automatic, manual"),
    ({"rounds__allow_small_cohort": "perhaps"},          "takes true or false"),
    ({"rounds__deadline_s": "0"},                        "of at least 1"),
    ({"limits__header_deadline_s": "soon"},              "takes a number"),
    ({"task__method": "fedavg"},                         "task.method cannot be changed, because members rely on it"),
    ({"rounds__count": "9"},                             "rounds.count cannot be changed"),
    ({"federation": "other"},                            "federation cannot be changed"),
    ({"task__backbone.name": "x"},                       "there is no setting task.backbone.name; "),
    ({"elsewhere__x": "9"},                              "these can be changed: ca, certificate, "),
    ({"public_url": "http://fl.example.org"},            "must begin with https"),
    ({"rounds__quorum_target": "4", "host": "", "nonsense": "1"}, "there is no setting nonsense"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_is_refused_changes_nothing(make_coordinator, changes, words) -> None:
    """One sentence with what is allowed; neither the file nor what counts has changed, not in part."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    before, config = coordinator.settings, coordinator.store.home.config.read_bytes()
    with pytest.raises(OperatorError, match=words):
        change(coordinator, **changes)
    assert coordinator.settings == before and coordinator.store.home.config.read_bytes() == config
    assert OPERATIONS["log"](coordinator, {"from_ms": 0, "most": 9})["shown"] == []


def test_old_settings_that_cannot_finish_bar_no_other_change(make_coordinator) -> None:
    """A coordinator made with the old defaults: its deadline may change, its quorum only for one that can finish."""
    coordinator = make_coordinator(rounds={"quorum_min": 2, "quorum_target": 3, "min_cohort": 3})
    assert change(coordinator, rounds__deadline_s="60")["changed"] == {"rounds.deadline_s": 60}
    with pytest.raises(OperatorError, match="could stop for good"):
        change(coordinator, rounds__quorum_min="3")
    assert change(coordinator, rounds__quorum_min="3", rounds__min_cohort="2")["restart"] == []


def test_at_the_command_line(make_coordinator) -> None:
    """Exit 0, 2 for what cannot be had; what needs a restart says so."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    coordinator.store.close()
    home = coordinator.store.home

    def run(*words: str):
        return CliRunner().invoke(main, ["set", *words, "--home", str(home.root)])

    done = run("rounds.quorum_target", "4", "port", "9443", "certificate", "/etc/fl/fullchain.pem")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "rounds.quorum_target is now 4",
        "port is now 9443; it takes effect when `serve` is restarted",
        "certificate is now '/etc/fl/fullchain.pem'; it takes effect when `serve` is restarted",
    ]
    assert tomllib.loads(home.config.read_text())["port"] == 9443
    facts = json.loads(run("rounds.min_cohort", "2", "--json").stdout)
    assert facts == {"changed": {"rounds.min_cohort": 2}, "restart": []}
    for words in (("rounds.quorum_min",), ("rounds.quorum_min", "2"), ("nonsense", "1")):
        refused = run(*words)
        assert refused.exit_code == 2 and refused.stdout == "" and "Traceback" not in refused.stderr
