"""Settings that were changed in `config.toml` by hand: what `serve` refuses, notes, or takes over while several serve.

Source: docs/reference/coordinator.md, settings.
"""

import pytest
from tests.coordinator.web.test_setting_changes import FINISHABLE, change

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.service import _Leader
from edgefl_coordinator.web.setting_changes import check_edits, note_edits
from edgefl_protocol.durable import write_atomic
from edgefl_protocol.envelopes.key_files import signing_key_to_pem
from edgefl_protocol.envelopes.keys import generate_signing_key


def starts(coordinator) -> None:
    """What `serve` does with the settings that it finds."""
    check_edits(coordinator)
    with coordinator.store.transaction() as connection:
        note_edits(connection, coordinator)


def edited(make_coordinator, coordinator, *pairs: tuple[str, str]):
    """Change the file by hand, as with an editor, and open the coordinator again."""
    coordinator.store.close()
    text = coordinator.store.home.config.read_text()
    for old, new in pairs:
        assert text.count(old) == 1
        text = text.replace(old, new)
    coordinator.store.home.config.write_text(text)
    return make_coordinator()


def logged(coordinator) -> list[tuple[str, str, object]]:
    rows = OPERATIONS["log"](coordinator, {"from_ms": 0, "most": 99})["shown"]
    return [(row["event"], row["subject"], row["detail"].get("value")) for row in rows]


# fmt: off
EDITS = [
    ([("epochs = 1", "epochs = 3")],               "task.epochs is 3, but the federation began with 1: put it back in"),
    ([("count = 2", "count = 30"), ("lr = 0.1\n", "")],
     "task.settings.lr is none, but the federation began with 0.1; rounds.count is 30, but .* with 2: put them back"),
    ([('"other"', '"others"')],                    'task.classes is ["nevus", "others"], but .*["nevus", "other"]'),
    ([("quorum_min = 3", "quorum_min = 1"), ("quorum_target = 3", "quorum_target = 1")], "could stop for good"),
    ([('gate = ""', 'gate = "/nowhere/gate"')],    "protection.gate names /nowhere/gate, which is no program"),
    ([("server.key", "other.key")],                "other.key cannot be read"),
    ([("https://127.0.0.1", "https://10.0.0.1")],  "not valid for '10.0.0.1'"),
]
# fmt: on


@pytest.mark.parametrize(("pairs", "words"), EDITS)
def test_a_hand_edit_that_set_would_refuse_keeps_serve_from_starting(make_coordinator, pairs, words) -> None:
    """docs/reference/coordinator.md, settings: told in one sentence; put back, it starts, and the log tells nothing."""
    coordinator = make_coordinator(rounds=FINISHABLE, task={"settings": {"lr": 0.1}})
    starts(coordinator)
    text = coordinator.store.home.config.read_text()
    coordinator = edited(make_coordinator, coordinator, *pairs)
    with pytest.raises(OperatorError, match=words.replace("[", r"\[")):
        check_edits(coordinator)
    coordinator.store.close()
    coordinator.store.home.config.write_text(text)
    coordinator = make_coordinator()
    starts(coordinator)
    assert logged(coordinator) == []


def test_after_a_round_a_hand_edit_is_still_refused(make_coordinator, tools) -> None:
    """A round that closes drops its counts, and none of the settings that counted last."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    starts(coordinator)
    members = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(coordinator)
    for member in members:
        member.reply(1)
    assert step(coordinator, tools.toy_worker)
    assert OPERATIONS["status"](coordinator, {})["round"] == 2
    coordinator = edited(make_coordinator, coordinator, ("count = 2", "count = 9"))
    with pytest.raises(OperatorError, match=r"rounds\.count is 9, but the federation began with 2"):
        check_edits(coordinator)


def test_a_hand_edit_that_is_allowed_is_in_the_log(make_coordinator) -> None:
    """As if `set` had made it, once; it counts from then on."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    starts(coordinator)
    coordinator = edited(make_coordinator, coordinator, ("deadline_s = 60", "deadline_s = 7200"), ("8443\n", "9443\n"))
    for _ in range(2):
        starts(coordinator)
        assert logged(coordinator) == [("setting", "rounds.deadline_s", 7200), ("setting", "port", 9443)]


def test_what_a_store_of_before_holds_is_taken_as_it_is(make_coordinator) -> None:
    """Its settings were noted nowhere: with old defaults that could stop, too, and these bar no other edit."""
    coordinator = make_coordinator(rounds={"quorum_min": 2, "quorum_target": 3, "min_cohort": 3})
    coordinator = edited(make_coordinator, coordinator, ("epochs = 1", "epochs = 3"))
    starts(coordinator)
    coordinator = edited(make_coordinator, coordinator, ("deadline_s = 60", "deadline_s = 70"))
    starts(coordinator)
    assert logged(coordinator) == [("setting", "rounds.deadline_s", 70)]


def test_set_puts_no_hand_edit_into_force(make_coordinator) -> None:
    """What never changes is told there, too; a quorum that was edited by hand is mended by one that can finish."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    starts(coordinator)
    coordinator = edited(make_coordinator, coordinator, ("epochs = 1", "epochs = 3"))
    with pytest.raises(OperatorError, match="put it back"):
        change(coordinator, rounds__deadline_s="70")
    coordinator = edited(make_coordinator, coordinator, ("epochs = 3", "epochs = 1"), ("min = 3", "min = 1"))
    with pytest.raises(OperatorError, match="could stop for good"):
        change(coordinator, rounds__deadline_s="70")
    change(coordinator, rounds__quorum_min="3")
    starts(coordinator)
    assert logged(coordinator) == [("setting", "rounds.quorum_min", 3)]
    coordinator = edited(make_coordinator, coordinator, ('gate = ""', 'gate = "/nowhere/gate"'))
    with pytest.raises(OperatorError, match="no program that can be started"):
        change(coordinator, rounds__deadline_s="70")


def test_before_the_first_start_nothing_has_begun(make_coordinator) -> None:
    """docs/guides/own-address.md sets a certificate first; what never changes may be edited until `serve` runs."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    change(coordinator, rounds__deadline_s="70")
    coordinator = edited(make_coordinator, coordinator, ("epochs = 1", "epochs = 3"))
    starts(coordinator)
    assert coordinator.settings.task.epochs == 3


def test_a_hand_edit_while_several_serve(make_coordinator, monkeypatch) -> None:
    """Each request looks at the files: what `set` changed in another process counts, and no edit by hand."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    starts(coordinator)
    monkeypatch.setattr(coordinator.store.database, "shared", True)
    home, own = coordinator.store.home, coordinator.keys.signing.key_id
    write_atomic(home.config, home.config.read_text().replace("deadline_s = 60", "deadline_s = 50").encode())
    home.signing.write_bytes(signing_key_to_pem(generate_signing_key()))
    coordinator.keep_up()
    assert (coordinator.settings.rounds.deadline_s, coordinator.keys.signing.key_id) == (60, own)
    before = coordinator.settings
    change(coordinator, rounds__deadline_s="70")
    coordinator.settings = before  # as of a process that did not change it
    coordinator.keep_up()
    assert (coordinator.settings.rounds.deadline_s, coordinator.keys.signing.key_id) == (70, own)


def test_who_leads_next_does_not_take_a_change_back(make_coordinator, monkeypatch) -> None:
    """Another process changed a setting and ended before a member asked this one, which had not looked since."""
    coordinator = make_coordinator(rounds=FINISHABLE)
    starts(coordinator)
    before = coordinator.settings
    change(coordinator, rounds__deadline_s="7200")
    coordinator.settings = before
    monkeypatch.setattr(coordinator.store.database, "shared", True)
    monkeypatch.setattr(coordinator.store, "lead", lambda: None)
    _Leader(coordinator, None).begin()
    assert coordinator.settings.rounds.deadline_s == 7200
    assert [row for row in logged(coordinator) if row[0] == "setting"] == [("setting", "rounds.deadline_s", 7200)]
