"""Sites that work on Flower: its simulation on one machine, or SuperNodes of hospitals behind a SuperLink.

    records     our payloads inside Flower's records, judged on arrival
    asking      a server asks nodes, and hears from each its reply or why there is none
    simulated   the sites of a run, in Ray's worker processes
    simulation  starts Ray and runs the engine on it
    study_run   a run of a study on it, in a process of its own
    away        a site behind a SuperNode: its data, state and results stay in its folder
    rounds      a round over these sites: who is there, who replies, whether that is enough
    vocabulary  answers and words of all sites, where pictures are asked questions
    federation  the server's side of these sites: who takes part, how many replies a round needs, and by when

The method, the engine and its checkpoints are those of a run without Flower, and so is every bit of the result. Of
Flower this room takes Message, RecordDict, ClientApp, ServerApp and Grid. Source: docs/guides/flower.md.
"""

import os
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # before Flower is imported, which reads it once
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # else its workers give way to all other work of the machine
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of it
APP = Path(__file__).parent / "app"  # for `flwr run`
