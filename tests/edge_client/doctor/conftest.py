"""What the tests of `edgefl doctor` share."""

import json

import pytest


@pytest.fixture
def unprobed(monkeypatch):
    """Without the second process: other tests look at that."""
    monkeypatch.setattr("edgefl_client.doctor.checks.probe", lambda *_, **__: iter(()))


def diagnosed(run, *options):
    """Exit code, and findings by the name of their check."""
    code, out, _ = run("doctor", "--no-measure", "--json", *options)
    value = json.loads(out)
    assert value["healthy"] == (code == 0) and code in (0, 1)
    for one in value["findings"]:
        assert one["state"] in ("ok", "warn", "fail") and one["found"] and "\n" not in one["found"]
    found = {}
    for one in value["findings"]:
        found.setdefault(one["check"], []).append(one)
    return code, {name: ones if len(ones) > 1 else ones[0] for name, ones in found.items()}
