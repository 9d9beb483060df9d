"""MLflow: a run's figures on a tracking server, sent by MLflow's own library.

Guarantees: a run that goes on is the same run there, found by a tag; a figure has the same value, step and time however
often it is sent, and the server keeps it once. The library's reports to its makers are off. A request ends within
`REQUEST_SECONDS`; who calls tries again. User name, password and certificates are those of MLflow's own variables.
"""

import os
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

from edgefl_trainer.tracking.tracker import Ending, FollowedRun

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

REQUEST_SECONDS = 10
EXPERIMENT = "edgefl"  # where MLFLOW_EXPERIMENT_NAME names none
IDENTITY = "edgefl_run"  # tag by which a run is known again
MOST_METRICS, MOST_PARAMS, MOST_NAME = 1000, 100, 250  # in one request, and characters of a name
FOREIGN = re.compile(r"[^\w\-. :]|^\.+$")  # what a part of a metric's name may not hold
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(REQUEST_SECONDS),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # where results go
}


class MlflowServer:
    """A run on an MLflow server."""

    def __init__(self, uri: str) -> None:
        """Nothing is sent yet."""
        self._uri = uri
        self._client: MlflowClient | None = None
        self._id, self._start_ms = "", 0

    def begin(self, run: FollowedRun) -> None:
        """Find the run that the server has of this one, or make it, and send the settings that it lacks."""
        os.environ.update(ENVIRONMENT)  # read by the library, some of it when it is imported
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self._uri)
        found = _found_or_made(self._client, run)
        self._id, self._start_ms = found.info.run_id, found.info.start_time
        params = [Param(name, value) for name, value in run.settings.items() if name not in found.data.params]
        for begin in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + MOST_PARAMS])
        self._client.update_run(self._id, status="RUNNING")

    def figures(self, step: int, seconds: float, figures: Mapping[str, float]) -> None:
        """Send the figures of a round; their time is that of the run's work, so that it is the same every time."""
        from mlflow.entities import Metric

        assert self._client is not None
        at = self._start_ms + round(seconds * 1000)
        metrics = [Metric(metric_name(name), value, at, step) for name, value in figures.items()]
        for begin in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + MOST_METRICS])

    def end(self, ending: Ending, texts: Mapping[str, str]) -> None:
        """Send digests and words of the summary as tags, and how the run ended."""
        assert self._client is not None
        for name, value in texts.items():
            self._client.set_tag(self._id, name, value)
        self._client.set_terminated(self._id, ending)


def _found_or_made(client: "MlflowClient", run: FollowedRun) -> "Run":
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    experiment = client.get_experiment_by_name(name)
    place = client.create_experiment(name) if experiment is None else experiment.experiment_id
    known = client.search_runs([place], f"tags.{IDENTITY} = '{run.identity}'", max_results=1)
    return known[0] if known else client.create_run(place, run_name=run.name, tags={IDENTITY: run.identity})


def metric_name(name: str) -> str:
    """Return a name as the server takes it; one that has to be changed stays unlike every other."""
    figure, slash, site = name.partition("/")
    taken = f"{FOREIGN.sub('_', figure)}{slash}{FOREIGN.sub('_', site)}"
    if taken == name and len(name) <= MOST_NAME:
        return name
    return f"{taken[: MOST_NAME - 9]}-{sha256(name.encode()).hexdigest()[:8]}"
