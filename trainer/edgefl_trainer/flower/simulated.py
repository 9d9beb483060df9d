"""The sites of a run in Ray's worker processes: what a node of Flower's simulation is asked, and what it replies.

    query      {facts}                    → {facts}                 which site this node is, and what it reads
    train      {facts, state, broadcast}  → {facts, state, reply}   the method's site half
    evaluate   {facts, state, broadcast}  → {facts}                 the site's model on its tune rows

Guarantees: a worker process makes data and network from the run's settings, once for all sites; a site's state comes
with the request and goes back, so that any worker can do the work of any site, and the engine keeps it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from edgefl_protocol import Payload
from edgefl_trainer.contract import Method, Scalar, Site, State
from edgefl_trainer.data.partition import read_partition
from edgefl_trainer.engine.checkpoint import SiteResult
from edgefl_trainer.engine.local_engine import InProcessSite
from edgefl_trainer.engine.run import read_sites, repeatable
from edgefl_trainer.engine.selection import tune_judge
from edgefl_trainer.engine.settings import RunSettings, from_toml
from edgefl_trainer.flower.records import unpacked
from edgefl_trainer.flower.replying import replied
from edgefl_trainer.models.backbones import load_backbone

PARTITION_ID = "partition-id"  # Flower's number of a node in its simulation
RESULT = ("facts", "state", "reply")
GIVEN = ("facts", "state", "broadcast")


@dataclass(frozen=True)
class Read:
    """What a worker makes of a run's settings."""

    method: Method
    sites: Mapping[str, Site]
    digests: Mapping[str, str]  # of rows and network


@lru_cache(maxsize=1)
def read_run(settings: str, threads: int) -> Read:
    """Read data and network as the run's own process did; `threads` as there, for sums depend on their number."""
    torch.set_num_threads(threads)
    wanted = RunSettings(**from_toml(settings.encode(), "the run's settings"))
    method = wanted.build_method()
    partition = read_partition(Path(wanted.partition).expanduser()) if wanted.partition else None
    backbone = load_backbone(wanted.backbone, image_px=wanted.image_px or None, seed=wanted.seed)
    federation, _, sites = read_sites(wanted, method, backbone, partition)
    digests = {"partition_sha256": federation.partition_sha256, "backbone_sha256": backbone.spec.sha256}
    return Read(method, sites, digests)


def facts_of(settings: str, threads: int, **more: Scalar) -> Payload:
    """Make the first part of a request: what the run is, and which site is asked."""
    return Payload({}, {"settings": settings, "threads": threads, **more})


def result_payloads(result: SiteResult, warnings: list[str]) -> dict[str, Payload]:
    """Make the reply of a site that learned."""
    told = json.dumps({"metrics": dict(result.metrics), "warnings": warnings}).encode()
    state = Payload(result.state.arrays, result.state.values)
    return {"facts": Payload({"json": np.frombuffer(told, np.uint8)}, {}), "state": state, "reply": result.reply}


def result_of(found: Mapping[str, Payload]) -> tuple[SiteResult, list[str]]:
    """Read a reply of `result_payloads`: the result, and what the site warned of."""
    told = json.loads(found["facts"].arrays["json"].tobytes())
    state = State(found["state"].arrays, found["state"].scalars)
    return SiteResult(state, found["reply"], told["metrics"]), told["warnings"]


def query(message: Message, context: Context) -> Message:
    """Say which site this node is, and digests of what its worker reads."""

    def work() -> dict[str, Payload]:
        read = _run_of(unpacked(message.content, ("facts",))["facts"])
        name = sorted(read.sites)[int(context.node_config[PARTITION_ID])]
        return {"facts": Payload({}, {"site": name, **read.digests})}

    return replied(message, work, own_machine=True)


def train(message: Message, context: Context) -> Message:
    """Do a site's share of a phase."""

    def work() -> dict[str, Payload]:
        read, site, given = _given(message)
        warnings: list[str] = []

        def listen(told: Mapping[str, Scalar]) -> None:
            if "warning" in told:
                warnings.append(str(told["warning"]))

        state = State(given["state"].arrays, given["state"].scalars)
        with repeatable(site.device):
            result = InProcessSite(read.method, site).local_round(state, given["broadcast"], listen)
        return result_payloads(result, warnings)

    return replied(message, work, own_machine=True)


def evaluate(message: Message, context: Context) -> Message:
    """Score a site's current model on its tune rows; on all of them where the run selects its round by them."""

    def work() -> dict[str, Payload]:
        read, site, given = _given(message)
        every = RunSettings(**from_toml(str(given["facts"].scalars["settings"]).encode(), "")).select == "tune"
        judge = tune_judge(read.method, {site.name: site}, **({"most": None} if every else {}))
        state = State(given["state"].arrays, given["state"].scalars)
        with repeatable(site.device):
            return {"facts": Payload({}, judge(site.name, state, given["broadcast"]))}

    return replied(message, work, own_machine=True)


def _run_of(facts: Payload) -> Read:
    return read_run(str(facts.scalars["settings"]), int(facts.scalars["threads"]))


def _given(message: Message) -> tuple[Read, Site, dict[str, Payload]]:
    """What a request asks for: the run, the site, and what it works on."""
    given = unpacked(message.content, GIVEN)
    read = _run_of(given["facts"])
    return read, read.sites[str(given["facts"].scalars["site"])], given


app = ClientApp()
app.query()(query)
app.train()(train)
app.evaluate()(evaluate)
