"""A run on a real MLflow server on this machine, with a database of its own, asked over the server's own interface."""

import json
import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import requests
from tests.trainer.conftest import TINY, edgefl_train

from edgefl_trainer.tracking import following, mlflow

WORDS = ("--data", "lesions:sites=2,images=40,px=36", *TINY, "--rounds", "2")
MISSING = "MLflow and its server are not installed: pip install mlflow"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(not (find_spec("mlflow") and find_spec("flask")), reason=MISSING),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A machine that runs all tests at once may need longer than a run is delayed for."""
    monkeypatch.setattr(following, "LAST_SECONDS", 120.0)
    monkeypatch.setitem(mlflow.ENVIRONMENT, "MLFLOW_HTTP_REQUEST_TIMEOUT", "120")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of an `mlflow server` with SQLite."""
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
             "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
             "--default-artifact-root", str(folder / "artifacts")]  # fmt: skip
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONWARNINGS": "ignore"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, env=environment, start_new_session=True)
    uri, until = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
            try:
                if requests.get(f"{uri}/health", timeout=5).ok:
                    break
            except requests.ConnectionError:
                time.sleep(0.2)
        yield uri
    finally:
        os.killpg(process.pid, 9)  # in good order it takes 20 s, which nobody asks for
        process.wait(60)


def ask(server: str, method: str, path: str, **values: object) -> dict:
    given = {"params": values} if method == "GET" else {"json": values}
    found = requests.request(method, f"{server}/api/2.0/mlflow/{path}", timeout=30, **given)
    assert found.ok, found.text
    return found.json()


def runs_of(server: str, name: str) -> list[dict]:
    experiment = ask(server, "GET", "experiments/get-by-name", experiment_name="edgefl")["experiment"]
    found = ask(server, "POST", "runs/search", experiment_ids=[experiment["experiment_id"]], max_results=100)
    return [run for run in found.get("runs", []) if run["info"]["run_name"] == name]


def check(server: str, folder: Path) -> None:
    """One run of that name, with every number of the lines of metrics once, its settings and its digest."""
    (run,) = runs_of(server, folder.name)
    run_id, summary = run["info"]["run_id"], json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "bytes_up", "images_per_second", "tune_balanced_accuracy"):
        for site in ("site-1", "site-2"):
            asked = {"run_id": run_id, "metric_key": f"{name}/{site}"}
            history = ask(server, "GET", "metrics/get-history", **asked)["metrics"]
            wanted = [(line["round"], line[name]) for line in lines if line["site"] == site and name in line]
            found = sorted((int(one.get("step", 0)), one["value"]) for one in history)
            assert found == [(step, pytest.approx(value)) for step, value in wanted]
    last = {one["key"]: one["value"] for one in run["data"]["metrics"]}
    assert last["mean_balanced_accuracy"] == pytest.approx(summary["mean_balanced_accuracy"])
    tags = {one["key"]: one["value"] for one in run["data"]["tags"]}
    assert tags["state_sha256"] == summary["state_sha256"] and run["info"]["status"] == "FINISHED"
    params = {one["key"]: one["value"] for one in run["data"]["params"]}
    assert (params["method"], params["rounds"], params["lr_head"]) == ("fedavg", "2", params["lr_head"])


def test_a_run_and_the_same_bits(server, tmp_path, cached):
    track = ("--track", f"mlflow:{server}", "--track", "tensorboard")
    plain = edgefl_train("run", "fedavg", *WORDS, "--out", tmp_path / "plain", "--json").json()
    followed = edgefl_train("run", "fedavg", *WORDS, "--out", tmp_path / "followed", "--json", *track)
    assert followed.json()["state_sha256"] == plain["state_sha256"] and "warning: MLflow" not in followed.err
    check(server, tmp_path / "followed")
    (run,) = runs_of(server, "followed")
    assert str(tmp_path) not in json.dumps(run["data"])  # no folder of this machine


def test_a_killed_run_is_the_same_run_there_without_doubled_points(server, tmp_path, kill_after):
    folder = tmp_path / "killed"
    words = ("run", "fedavg", *WORDS, "--out", folder, "--track", f"mlflow:{server}")
    kill_after("phase-0001/site-1.metrics.json", *words)
    assert edgefl_train(*words, "--resume").code == 0
    check(server, folder)
    assert edgefl_train(*words, "--resume").code == 0  # of a finished run: all is sent once more, nothing is doubled
    check(server, folder)


def test_a_server_that_is_not_there_costs_one_sentence(tmp_path, cached):
    uri = f"http://127.0.0.1:{free_port()}"
    found = edgefl_train("run", "fedavg", *WORDS, "--out", tmp_path / "run", "--track", f"mlflow:{uri}")
    told = [line for line in found.err.splitlines() if "MLflow" in line or "urllib3" in line or "Retry" in line]
    assert found.code == 0 and len(told) == 1 and told[0].startswith(f"warning: MLflow ({uri}) did not take")
