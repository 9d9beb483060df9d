"""What `edgefl sync` prints of a round that it learned. Source: docs/reference/device-learning.md."""

import click
import pytest

from edgefl_client.commands.sync import end_synced, sync_text
from edgefl_client.sharing.sync import Synced
from edgefl_protocol.errors import StorageError


def test_a_line_a_fact_what_was_sent_first_and_warnings_after_it(device):
    """One line held all: "…showed one.; reply accepted (436 bytes); 0 maps of other members received"."""
    found = device.report()
    never = "The values learned on this device never predict BCC, whatever a picture shows: …"
    found["learning"]["in_use"]["never_predicts"] = never
    found["round"]["stuck"] = "round 1 is stuck: it has 1 reply and needs 2"
    size = len(device.coordinator.effects[0][2])
    lines = sync_text(found).splitlines()
    assert lines[:2] == [f"reply accepted ({size} bytes)", "round 1 is open"]
    assert {"8 maps of other members received", "0 items wait"} < set(lines[2:5])
    assert lines[5:7] == ["round 1 learned from 14 pictures: the new values are not used", never]
    assert lines[7].startswith("40 pictures held back") and lines[-1] == found["round"]["stuck"]


def test_one_reason_is_told_once(capsys):
    """docs/reference/sharing.md: a policy that cannot be read holds every item, and is the problem of the sync, too."""
    why = "policy.toml is damaged: it does not say what may leave"
    held = [{"outcome": "held", "code": "damaged", "message": message} for message in (why, "one is too large", why)]
    with pytest.raises(click.exceptions.Exit):
        end_synced(click.Context(click.Command("sync")), Synced(report={"sent": held}, problem=StorageError(why)))
    assert capsys.readouterr().err.splitlines() == [f"edgefl: {why}", "edgefl: one is too large"]
