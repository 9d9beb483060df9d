"""What `edgefl sync` prints of a round that it learned. Source: docs/reference/device-learning.md."""

from edgefl_client.commands.sync import sync_text


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
