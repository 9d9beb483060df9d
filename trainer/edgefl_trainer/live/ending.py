"""What a site is left with when its federation is over: a run directory like that of `edgefl-train run`.

`evaluate`, `predict`, `table` and `edgefl-export bundle` work on it. It holds this site's model and figures; those of
the others never came here. Source: docs/design.md 5; docs/decisions/0030.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgefl_protocol import Payload
from edgefl_protocol.durable import write_atomic
from edgefl_protocol.messages.requests import TaskReply
from edgefl_trainer.contract import State, declared
from edgefl_trainer.engine.federation import FederationState, SelectedEncoder, SelectedRound, read_metrics
from edgefl_trainer.engine.handout import received_encoder
from edgefl_trainer.engine.results import learned_backbone_results, predictor_results
from edgefl_trainer.engine.run import privacy_cost, save_backbone, speed, traffic, what_was_asked
from edgefl_trainer.live.work import Work


def write_results(
    work: Work, folder: Path, told: TaskReply, federation: str, state: State, last: Payload
) -> dict[str, Any]:
    """Judge what the site has now and write `summary.json`.

    Args:
        state: the site's, after its last exchange.
        last: what the coordinator handed out at the end.

    Returns:
        The contents of `summary.json`. `state_sha256` is the whole federation's, as the coordinator told it;
        `site_sha256` this site's own.
    """
    started = time.perf_counter()
    results = _results(work, folder, state, last)
    evaluated = time.perf_counter() - started
    summary = {
        **what_was_asked(work.settings, work.method, None),
        "federation": federation,
        "partition_sha256": work.federation.partition_sha256,
        **results,
        **traffic(folder),
        **speed(folder),
        **privacy_cost({work.site.name: state}),
        "seconds": round(sum(float(line["seconds"]) for line in read_metrics(folder)) + evaluated, 1),
        "site_sha256": state.digest(),
        "state_sha256": told.state_sha256 or None,
    }
    write_atomic(folder / "summary.json", json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n")
    return summary


def _results(work: Work, folder: Path, state: State, last: Payload) -> Mapping[str, Any]:
    name, rounds = work.site.name, work.task.rounds
    if declared(work.method).encoder:
        encoder = None if declared(work.method).apart else SelectedEncoder(rounds, received_encoder(last))
        final = FederationState(State(), {name: state}, encoder=encoder)
        return learned_backbone_results(folder, work.method, final, work.federation, {name: work.site})
    save_backbone(folder, work.backbone)
    kept = SelectedRound(work.method.phases(rounds)[-1].round, state, last)
    final = FederationState(State(), {name: state}, {name: kept})
    return predictor_results(folder, work.method, work.task, final, work.federation, {name: work.site}, held_out={})
