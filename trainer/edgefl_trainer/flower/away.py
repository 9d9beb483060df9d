"""A site behind a SuperNode: what it is asked, and what it replies; its data, state and results stay in its folder.

    query        {facts}                               → {facts}         the site's name and the version of EdgeFL
    query.words  {task}                                → {vocabulary}    of its questions, where the site allows it
    train        {facts, task, vocabulary, broadcast}  → {facts, reply}  one exchange
    evaluate     {facts, task, vocabulary, broadcast}  → {facts}         the last hand-out: the site writes its results

Guarantees: method, settings, classes and rounds are the task's, the rows are the site's, as in `edgefl-train join`; an
exchange is on the disk before its reply leaves, and counts at the site once the server says that it counted, so both
go on from a kill with the same state. Each federation has its own folder. Nothing leaves but the reply. Source:
docs/guides/flower.md; docs/decisions/0030.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from edgefl_protocol import Payload
from edgefl_protocol.distribution import VERSION
from edgefl_protocol.errors import PayloadError
from edgefl_protocol.fields import NAME, text
from edgefl_protocol.messages.requests import TaskReply
from edgefl_trainer.data.questions import Vocabulary
from edgefl_trainer.engine.display import RunPace
from edgefl_trainer.engine.folder import CONFIG, check_free, check_inputs, finished_summary, working_in
from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.settings import GivenBudget
from edgefl_trainer.engine.sites import load_data, repeatable
from edgefl_trainer.errors import RunError, SettingError
from edgefl_trainer.flower.records import unpacked
from edgefl_trainer.flower.replying import replied
from edgefl_trainer.flower.vocabulary import read_vocabulary, vocabulary_payload
from edgefl_trainer.live.exchanges import Exchanges
from edgefl_trainer.live.final_results import write_results
from edgefl_trainer.live.site_work import SiteOptions, prepare, settings_of
from edgefl_trainer.typed_values import hints, nearest, read_value

GIVEN = ("facts", "task", "vocabulary", "broadcast")
PLACE = ("site", "data", "out", "classes", "words")  # of --node-config, each read in its own way
OPTIONS = {  # of --node-config, as `edgefl-train join` has them → of `SiteOptions`
    name.replace("_", "-"): name
    for name in ("unlabelled", "balance", "device", "autocast", "task", "backbone", "images_per_site", "privacy_budget")
}


@dataclass(frozen=True)
class Seat:
    """What a SuperNode's --node-config says of its site."""

    folder: Path  # with one below it for each federation
    options: SiteOptions


def seat_of(config: Mapping[str, object]) -> Seat:
    """Read --node-config; a `SettingError` where a word is missing or not known, or its value is not allowed."""
    for name in config:
        if name not in (*PLACE, *OPTIONS):
            raise SettingError(f"--node-config has {name!r}; did you mean {nearest(name, (*PLACE, *OPTIONS))}?")
    told = {name: str(value) for name, value in config.items()}
    lacking = [name for name in ("site", "data", "out") if not told.get(name)]
    if lacking:
        raise SettingError(f"--node-config lacks {lacking[0]}: give site=NAME, data=SPEC and out=DIR.")
    types = {**hints(SiteOptions), "privacy_budget": GivenBudget}
    options = SiteOptions(
        site=told["site"],
        data=tuple(told["data"].split()),
        classes=tuple(told["classes"].split(",")) if "classes" in told else (),
        **{
            field: read_value(told[name], types[field], f"{name} of --node-config", texts=True)
            for name, field in OPTIONS.items()
            if name in told
        },
    )
    return Seat(Path(told["out"]).expanduser(), options)


def query(message: Message, context: Context) -> Message:
    """Say which site this is."""

    def work() -> dict[str, Payload]:
        unpacked(message.content, ("facts",))
        return {"facts": Payload({}, {"site": seat_of(context.node_config).options.site, "version": VERSION})}

    return replied(message, work, own_machine=False)


def words(message: Message, context: Context) -> Message:
    """Tell the answers and words of the site's training questions."""

    def work() -> dict[str, Payload]:
        told = TaskReply.from_payload(unpacked(message.content, ("task",))["task"])
        options = seat_of(context.node_config).options
        if context.node_config.get("words") != "share":
            raise SettingError(f"{options.site} tells no words of its questions: to allow it give words=share.")
        settings = settings_of(told, options, asked=True)
        federation = load_data(settings, int(str(told.backbone["image_px"])))
        if federation.questions is None:
            raise SettingError(f"the data of {options.site} asks no questions, and this federation learns answers.")
        known = Vocabulary(federation.classes, federation.questions.vocabulary)
        return {"vocabulary": vocabulary_payload(known)}

    return replied(message, work, own_machine=False)


def train(message: Message, context: Context) -> Message:
    """Learn one exchange, or give what was learned before a kill."""

    def work() -> dict[str, Payload]:
        with _sitting(message, context) as (exchanges, facts, broadcast, _):
            _settle(exchanges, int(facts["counted"]), int(facts["number"]))
            exchanges.judged(broadcast)
            reply = exchanges.learned(int(facts["number"]), broadcast).reply
        return {"facts": Payload({}, {"number": facts["number"]}), "reply": reply}

    return replied(message, work, own_machine=False)


def evaluate(message: Message, context: Context) -> Message:
    """Take the last hand-out and write the site's results."""

    def work() -> dict[str, Payload]:
        with _sitting(message, context) as (exchanges, facts, broadcast, told):
            if finished_summary(exchanges.folder) is None:
                _settle(exchanges, int(facts["counted"]), int(facts["number"]))
                exchanges.judged(broadcast)
                federation = str(facts["federation"])
                write_results(exchanges.work, exchanges.folder, told, federation, exchanges.state, broadcast)
        return {"facts": Payload({}, {"number": facts["number"]})}

    return replied(message, work, own_machine=False)


@contextmanager
def _sitting(
    message: Message, context: Context
) -> Iterator[tuple[Exchanges, Mapping[str, int | float | str], Payload, TaskReply]]:
    """Hold the site's folder and give its exchanges, and what the request says."""
    given = unpacked(message.content, GIVEN)
    facts, told = given["facts"].scalars, TaskReply.from_payload(given["task"])
    if set(facts) != {"federation", "site", "number", "counted", "version"}:
        raise PayloadError("the server's request has another form: update edgefl-derm, here or there", "bad_message")
    if facts["version"] != VERSION:
        raise RunError(f"this site runs EdgeFL {VERSION}, and the server {facts['version']}: install one version.")
    seat = seat_of(context.node_config)
    if facts["site"] != seat.options.site:
        raise RunError(
            f"its SuperNode says that it is site {seat.options.site} now: start it with site={facts['site']} as before "
            "or with another key."
        )
    folder = seat.folder / text(facts["federation"], "federation", NAME)
    check_free(folder, (CONFIG,))
    work = prepare(told, seat.options, read_vocabulary(given["vocabulary"]))
    with working_in(folder, work.settings, resume=True), repeatable(work.site.device):
        begun = work.federation.partition_sha256, work.backbone.spec.sha256, hyper_values(work.method)
        check_inputs(folder, *begun)
        images = {work.site.name: len(work.site.train if work.method.needs_labels else work.site.unlabelled)}
        pace = RunPace(work.method.phases(work.task.rounds), images)
        yield Exchanges(work, folder, pace), facts, given["broadcast"], told


def _settle(exchanges: Exchanges, counted: int, number: int) -> None:
    """Bring the site to the exchange that the server counted last; what it learned since does not count.

    A `RunError` where folder and server are not at one.
    """
    done = exchanges.done
    for pending in range(done + 1, number):
        if pending == counted:
            exchanges.count(pending)
        else:
            exchanges.drop(pending)
    if exchanges.done != counted:
        raise RunError(
            f"the server counted exchange {counted} of this site last, but the site's folder holds {exchanges.done}: "
            "put both folders back as they were at one time, or begin anew with other folders."
        )


app = ClientApp()
app.query()(query)
app.query("words")(words)
app.train()(train)
app.evaluate()(evaluate)
