"""What an earlier version left behind is opened by this one: a device's home, a coordinator's folder, runs.

The folders and how they were made: tests/vectors/old_folders/README.md. Source: docs/design.md 5.
"""

import json
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.coordinator.conftest import AsgiClient
from tests.coordinator.payloads.conftest import Wire
from tests.trainer.conftest import edgefl_train

from edgefl_client.cli import main
from edgefl_client.sharing import enrolled_device
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.coordinator import open_coordinator, wall_clock_ms
from edgefl_coordinator.store.tables import replies
from edgefl_coordinator.web.admin import run_operation
from edgefl_export.cli import main as edgefl_export
from edgefl_protocol import Payload

ARCHIVES = Path(__file__).resolve().parents[1] / "vectors/old_folders"
YEAR_NS = 366 * 24 * 3600 * 10**9


@pytest.fixture
def unpacked(tmp_path: Path) -> Callable[[str], Path]:
    """The folder of an archive, each file with its mode; folders are their owner's alone."""

    def unpack(name: str) -> Path:
        folder = tmp_path / name
        with tarfile.open(ARCHIVES / f"{name}.tar.gz") as archive:
            for entry in archive:
                content = archive.extractfile(entry)
                assert content is not None
                path = folder / entry.name
                for above in (folder, *(folder / part for part in reversed(Path(entry.name).parents))):
                    above.mkdir(mode=0o700, exist_ok=True)
                path.write_bytes(content.read())
                path.chmod(entry.mode)
        return folder

    return unpack


@pytest.fixture
def edgefl(unpacked, monkeypatch, capsys) -> Callable[..., Any]:
    """`edgefl … --json` on the old device: what it prints."""
    monkeypatch.setenv("EDGEFL_HOME", str(unpacked("device")))

    def call(*words: str, codes: tuple[int, ...] = (0,)) -> Any:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([*words, "--json"])
        out, err = capsys.readouterr()
        assert left.value.code in codes, out + err
        return json.loads(out)

    return call


def test_a_devices_home(edgefl, lab) -> None:
    """Membership, model, signers, policy and outbox are read as they were left."""
    status = edgefl("status", "--offline")
    assert (status["membership"]["name"], status["membership"]["state"]) == ("dermatoscope-1", "approved")
    assert (status["model"]["version"], status["waiting"]) == (1, 1)
    (signer,) = edgefl("trust", "list")["keys"]
    assert signer["public"] == lab.SIGNER.public.hex()
    assert list(edgefl("policy", "show")["allowed"]) == ["maps"]
    (item,) = edgefl("outbox")["items"]
    assert item["federation"] == "skin"
    found = edgefl("doctor", "--offline", "--no-measure", codes=(0, 1))["findings"]  # 1: as years pass, records end
    ended = ("certificate", "signers", "outbox", "model")
    assert {one["check"] for one in found} >= {"home", "disk", "keys", "policy", "personal", *ended}
    assert not [
        one for one in found if one["check"] not in ended and one["state"] != "ok" and "asked" not in one["found"]
    ]


@pytest.mark.parametrize("years", [0, 3])
def test_what_waited_on_the_device_arrives(edgefl, unpacked, monkeypatch, years) -> None:
    """The old device meets the old coordinator, both run by this version, today and in three years."""
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + years * YEAR_NS)
    coordinator = open_coordinator(CoordinatorHome(unpacked("coordinator")), clock=wall_clock_ms)
    client = AsgiClient(coordinator)
    monkeypatch.setattr(enrolled_device, "HttpsTransport", lambda *_: Wire(client))
    try:
        found = edgefl("sync", "--no-learn")
        with coordinator.store.transaction() as connection:
            (reply,) = connection.execute(replies.select()).all()
        stored = Payload.from_bytes(coordinator.store.get_blob(reply.blob))
    finally:
        client.close()
        coordinator.store.close()
    assert [(one["outcome"], one["round"]) for one in found["sent"]] == [("accepted", 1)]
    assert (found["waiting"], sorted(stored.arrays)) == (0, ["maps.0", "maps.1"])


def test_a_coordinator_is_served(unpacked) -> None:
    """`status` of the closed folder and of the served one; the audit log's chain is whole."""
    home = CoordinatorHome(unpacked("coordinator"))
    config = home.config.read_text()
    assert config.count("port = 18443\n") == 1
    home.config.write_text(config.replace("port = 18443\n", "port = 0\n"))
    closed = run_operation(home, "status", {})
    assert (closed["federation"], closed["round"], [one["name"] for one in closed["members"]]) == (
        "skin", 1, ["dermatoscope-1"],
    )  # fmt: skip
    command = [sys.executable, "-m", "edgefl_coordinator.cli", "serve", "--home", str(home.root)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = iter(server.stderr)
        assert any("listening on https://" in line for line in lines)
        assert run_operation(home, "status", {})["bundles"] == closed["bundles"] != []
        assert run_operation(home, "audit", {})["rows"] > 0
        server.send_signal(signal.SIGTERM)
        assert not [line for line in lines if "Traceback" in line]
    assert server.returncode == 0


LESIONS = "lesions:sites=3,images=30"


def trained(*words: object) -> str:
    """`edgefl-train …`: what it prints."""
    outcome = edgefl_train(*words)
    assert outcome.code == 0, outcome.err
    return outcome.out


def test_a_finished_run(unpacked) -> None:
    """Its table is that of its summary, and its models are judged on other data."""
    run = unpacked("run")
    summary = json.loads((run / "summary.json").read_text())
    row = next(line for line in trained("table", run).splitlines() if line.startswith("| fedevprompt |"))
    assert [f"{site['balanced_accuracy']:.3f}" for site in summary["sites"].values()] == row.split(" | ")[1:4]
    judged = json.loads(trained("evaluate", run, "--data", LESIONS, "--json"))
    assert set(judged["sites"]) == set(summary["sites"])


@pytest.mark.slow
def test_a_bundle_of_a_finished_run(unpacked, tmp_path) -> None:
    """Its graph agrees with the models that were learned then, and the bundle verifies."""
    call = CliRunner().invoke
    bundle = tmp_path / "model.edgefl"
    assert call(edgefl_export, ["keygen", str(tmp_path / "keys")]).exit_code == 0
    options = ["--site", "site-1", "--graph", "plain", "--sign", str(tmp_path / "keys"), "--output", str(bundle)]
    made = call(edgefl_export, ["bundle", str(unpacked("run")), *options])
    assert made.exit_code == 0, made.stderr
    checked = call(edgefl_export, ["verify", str(bundle), "--trust", str(tmp_path / "keys/signing.pub")])
    assert checked.exit_code == 0, checked.stderr


def test_a_stopped_run_goes_on(unpacked) -> None:
    """`--resume` takes the round that was under way to its end; what had been learned stays as it was."""
    run = unpacked("stopped")
    before = (run / "metrics.jsonl").read_text().splitlines()
    network = ("--backbone", "vit:16x2/12", "--set", "b_blocks=1", "--image-px", 24)
    given = ("--data", LESIONS, *network, "--preset", "tiny", "--rounds", 2)
    trained("run", "fedevprompt", *given, "--resume", "--out", run)
    after = (run / "metrics.jsonl").read_text().splitlines()
    assert after[: len(before)] == before and len(after) == 2 * len(before)
    assert set(json.loads((run / "summary.json").read_text())["sites"]) == {"site-1", "site-2", "site-3"}
