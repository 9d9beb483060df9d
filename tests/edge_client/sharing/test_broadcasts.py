"""Broadcasts that a device keeps.

Source: docs/guides/federation.md, "Keys over time": coordinators come back from backups.
"""

import json

import numpy as np
import pytest

from edgefl_protocol import Payload
from edgefl_protocol.envelopes.keys import generate_sealing_key


def broadcast_of(number, value):
    return Payload({"maps.0.0": np.full((1, 36), value, np.float16)}, {"phase": "train", "round": number, "rounds": 20})


@pytest.fixture
def fetched(run, device, live):
    """`sync` in a round, and what it then keeps: round number → value of the maps in it."""

    def sync(number, value):
        live.round, live.broadcasts[number] = number, broadcast_of(number, value)
        code, out, err = run("sync", "--no-learn", "--json")
        assert code == 0, err
        assert json.loads(out)["broadcast"]["file"].endswith(f"{number:06d}.payload")
        return {
            int(path.stem.rpartition("-")[2]): float(Payload.from_bytes(path.read_bytes()).arrays["maps.0.0"][0, 0])
            for path in (run.home / "broadcasts").iterdir()
        }

    return sync


def test_the_last_three_are_kept(fetched):
    for number in range(1, 6):
        kept = fetched(number, number)
    assert kept == {3: 3, 4: 4, 5: 5}


def test_a_coordinator_restored_from_a_backup_does_its_rounds_again(fetched):
    """What it sent of those rounds before is not learned from, and does not push out what it sends now."""
    for number in range(9, 13):
        fetched(number, number)
    assert fetched(8, 80) == {8: 80}
    for number in (9, 10, 11):
        kept = fetched(number, 10 * number)
    assert kept == {9: 90, 10: 100, 11: 110}


def test_a_restored_coordinator_may_do_the_very_round_again(fetched, live):
    """A device that did not ask in between sees the number of a round that it has; only the coordinator's key, which
    `restore` makes anew (docs/decisions/0056), tells that it is another round."""
    for number in (6, 7, 8):
        fetched(number, number)
    assert fetched(8, 80) == {6: 6, 7: 7, 8: 8}  # one round has one broadcast: it is fetched once
    live.sealing, live.key_number = generate_sealing_key(2), 4711
    assert fetched(8, 80) == {8: 80}
    assert fetched(9, 90) == {8: 80, 9: 90}


def test_a_damaged_one_is_fetched_again(fetched, run):
    fetched(1, 1)
    (path,) = (run.home / "broadcasts").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert fetched(1, 1) == {1: 1}
