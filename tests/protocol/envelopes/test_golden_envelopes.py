"""Envelopes of the first version stay what they were. Source: docs/security.md check 4."""

import base64
import json
from pathlib import Path

import pytest

from edgefl_protocol import EnvelopeError, Expected, ReplayWindow, SealingKey, open_envelope

FILE = json.loads((Path(__file__).parents[2] / "vectors/envelopes/envelopes.json").read_text())
SENDERS = {key_id: bytes.fromhex(public) for key_id, public in FILE["senders"].items()}


def test_there_are_twenty_good_and_twenty_bad_ones():
    verdicts = [case["verdict"] for case in FILE["cases"]]
    assert verdicts.count("accept") == 20 and len(verdicts) == 40


@pytest.mark.parametrize("case", FILE["cases"], ids=lambda case: f"{case['name']}-{case['recipient'][-1]}")
def test_a_golden_envelope_keeps_its_verdict_and_text(case):
    """docs/security.md check 4: identical verdict and plaintext in every later version."""
    known = FILE["recipients"][case["recipient"]]
    box = SealingKey(known["suite"], bytes.fromhex(known["secret"]))
    data, expected = base64.b64decode(case["envelope"]), Expected(**case["expected"])
    try:
        opened = open_envelope(data, box, SENDERS, expected, case["now_ms"], ReplayWindow())
        verdict, payload = "accept", opened.payload
    except EnvelopeError as error:
        verdict, payload = f"{type(error).__name__}:{error.code}", b""
    assert (verdict, payload) == (case["verdict"], base64.b64decode(case["payload"]))
