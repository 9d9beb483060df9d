"""What a site is left with when its federation is over: a run directory like that of `edgefl-train run`.

`evaluate`, `predict`, `table` and `edgefl-export bundle` work on it. It holds this site's model and figures; those of
the others never came here. Source: docs/design.md 5; docs/decisions/0030.
"""

import time
from pathlib import Path
from typing import Any

from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import TaskReply
from edgefl_trainer.contract import State, declared
from edgefl_trainer.engine.checkpoint import SelectedRound
from edgefl_trainer.engine.folder import SUMMARY
from edgefl_trainer.engine.handout import received_encoder
from edgefl_trainer.engine.judging.results import results_of
from edgefl_trainer.engine.local_engine import FederationState, SelectedEncoder
from edgefl_trainer.engine.privacy.spent import privacy_cost
from edgefl_trainer.engine.run import what_was_asked, write_summary
from edgefl_trainer.live.site_work import SiteWork


def write_results(
    work: SiteWork, folder: Path, told: TaskReply, federation: str, state: State, last: Payload
) -> dict[str, Any]:
    """Judge the site's state after its last exchange with what was handed out at the end, and write `summary.json`.

    Gives its contents: `state_sha256` is the whole federation's, as the coordinator told it; `site_sha256` this site's
    own.
    """
    started = time.perf_counter()
    final, sites = _final(work, state, last), {work.site.name: work.site}
    privacy = privacy_cost(folder, work.method, final.sites, seeded=work.site.noise == "seeded")
    (folder / SUMMARY).unlink(missing_ok=True)  # of an earlier end: while models are replaced, no run is finished
    results = results_of(folder, work.method, work.task, work.backbone, final, work.federation, sites, held_out={})
    head = {
        **what_was_asked(work.settings, work.method, None),
        "preset": None,  # every setting is the coordinator's
        "federation": federation,
        "partition_sha256": work.federation.partition_sha256,
        **results,
    }
    digests = {"site_sha256": state.digest(), "state_sha256": told.state_sha256 or None}
    return write_summary(folder, head, privacy, time.perf_counter() - started, digests)


def _final(work: SiteWork, state: State, last: Payload) -> FederationState:
    """What the site knows of the finished federation: its own state, and the model or encoder made of the hand-out."""
    name, rounds = work.site.name, work.task.rounds
    learns = declared(work.method)
    if learns.encoder:
        encoder = None if learns.apart else SelectedEncoder(rounds, received_encoder(last))
        return FederationState(State(), {name: state}, encoder=encoder)
    kept = SelectedRound(work.method.phases(rounds)[-1].round, state, last)
    return FederationState(State(), {name: state}, {name: kept})
