"""The sites of a run in Ray's worker processes: what a node of Flower's simulation is asked, and what it replies.

    query      {facts}                    → {facts}                 which site this node is, and what it reads
    train      {facts, state, broadcast}  → {facts, state, reply}   the method's site half
    evaluate   {facts, state, broadcast}  → {facts}                 the site's model on its tune rows

Guarantees: a worker process makes data and network from the run's settings (`run_again`); a site's state comes
with the request and goes back, so that any worker can do the work of any site, and the engine keeps it.
"""

from collections.abc import Mapping

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from edgefl_protocol import Payload
from edgefl_trainer.contract import Scalar, State
from edgefl_trainer.engine.checkpoint import SiteResult
from edgefl_trainer.engine.workers.messages import state_of, words_of, words_payload
from edgefl_trainer.engine.workers.run_again import RunAgain, read_run
from edgefl_trainer.flower.records import unpacked
from edgefl_trainer.flower.replying import replied

PARTITION_ID = "partition-id"  # Flower's number of a node in its simulation
RESULT = ("facts", "state", "reply")
GIVEN = ("facts", "state", "broadcast")


def facts_of(settings: str, threads: int, **more: Scalar) -> Payload:
    """Make the first part of a request: what the run is, and which site is asked."""
    return Payload({}, {"settings": settings, "threads": threads, **more})


def result_of(found: Mapping[str, Payload]) -> tuple[SiteResult, list[str]]:
    """Read the reply of a site that learned: the result, and what the site warned of."""
    told = words_of(found["facts"])
    return SiteResult(state_of(found["state"]), found["reply"], told["metrics"]), told["warnings"]


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
        read, name, state, broadcast = _given(message)
        warnings: list[str] = []

        def listen(told: Mapping[str, Scalar]) -> None:
            if "warning" in told:
                warnings.append(str(told["warning"]))

        result = read.learn(name, state, broadcast, listen)
        facts = words_payload({"metrics": result.metrics, "warnings": warnings})
        return {"facts": facts, "state": result.state.payload(), "reply": result.reply}

    return replied(message, work, own_machine=True)


def evaluate(message: Message, context: Context) -> Message:
    """Score a site's current model on its tune rows; on all of them where the run selects its round by them."""

    def work() -> dict[str, Payload]:
        read, name, state, broadcast = _given(message)
        return {"facts": Payload({}, read.judge(name, state, broadcast))}

    return replied(message, work, own_machine=True)


def _run_of(facts: Payload) -> RunAgain:
    return read_run(str(facts.scalars["settings"]), int(facts.scalars["threads"]))


def _given(message: Message) -> tuple[RunAgain, str, State, Payload]:
    """What a request asks for: the run, the site, and what it works on."""
    given = unpacked(message.content, GIVEN)
    facts = given["facts"]
    return _run_of(facts), str(facts.scalars["site"]), state_of(given["state"]), given["broadcast"]


app = ClientApp()
app.query()(query)
app.train()(train)
app.evaluate()(evaluate)
