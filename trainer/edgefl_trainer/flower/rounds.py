"""A round over SuperNodes: who is there, who replies in time, and whether that is enough.

Guarantees: a reply counts only if it is of a kind that the method sends, has the shapes that the site was sent, and
can be aggregated, alone and beside another that counts and has the same form; any other is as good as none, and its
site is named with the reason. Of a site the server keeps its digest and no state.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from edgefl_protocol import Payload
from edgefl_protocol.distribution import VERSION
from edgefl_protocol.errors import EdgeflError, MapsError, PayloadError
from edgefl_protocol.messages.requests import TaskReply
from edgefl_protocol.rules.maps import MAX_MAPS, check_sent_maps, sent_maps_in
from edgefl_protocol.rules.reply_forms import difference, form_parts
from edgefl_protocol.rules.travels import kind_of
from edgefl_protocol.sentences import counted
from edgefl_trainer.contract import Method, Scalar, State, Task
from edgefl_trainer.data.questions import Vocabulary
from edgefl_trainer.engine.checkpoint import Checkpoints, SiteResult
from edgefl_trainer.engine.display import tell
from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.local_engine import Given, RunObserver
from edgefl_trainer.errors import RunError
from edgefl_trainer.flower.asking import Asking, NodeRequest, Silence
from edgefl_trainer.flower.site_nodes import ABSENT, SiteNodes
from edgefl_trainer.flower.vocabulary import read_vocabulary, together, vocabulary_payload
from edgefl_trainer.method_halves import call_aggregate
from edgefl_trainer.models.spec import ViTSpec

DIGEST = "site_sha256"

NodeAnswer = tuple[str, Payload | Silence]  # of a site: its reply, or why none counts


class AwaySite:
    """A site that is not in this process."""

    def local_round(
        self, state: State, broadcast: Payload, report: Callable[[Mapping[str, Scalar]], None]
    ) -> SiteResult:
        """Never called: `AwayCrew` asks the SuperNodes."""
        raise NotImplementedError


def site_digest(state: State) -> str:
    """Return the digest of a site's state, which the server knows from its last reply that counted."""
    return str(state.values.get(DIGEST, State().digest()))


@dataclass(frozen=True, kw_only=True)
class AwayCrew:
    """The sites of a federation at their SuperNodes."""

    asking: Asking
    method: Method
    task: Task
    told: TaskReply
    federation: str
    checkpoints: Checkpoints
    sites: Sequence[str]
    quorum: int
    deadline_s: float | None
    nodes: SiteNodes
    vocabulary: Vocabulary | None = None  # of pictures that are asked questions

    def learn(self, names: Sequence[str], given: Given, observer: RunObserver) -> Iterator[tuple[str, SiteResult]]:
        """Ask the sites of a round; yield what counts.

        A `RunError` where fewer reply than the quorum: which sites did not, and why.
        """
        number = self.checkpoints.progress().phases + 1
        began, missing = self.asking.clock(), dict.fromkeys(names, ABSENT)
        for name, reply in self._fitting(number, self._replies(number, names, given)):
            if isinstance(reply, Silence):
                missing[name] = reply.why
                tell(f"exchange {number}: no reply of site {name} counts: {reply.why}")
                continue
            del missing[name]
            state = State({}, {DIGEST: str(reply.scalars[DIGEST])})
            observer.site_started(name)
            yield name, SiteResult(state, reply, {"seconds": round(self.asking.clock() - began, 3)})
        replies = sum(self.checkpoints.load_site(number - 1, name) is not None for name in self.sites)
        least = min(self.quorum, replies + len(missing))  # a round may have fewer participants than the quorum
        if replies < least:
            told = "; ".join(f"site {name}: {why}" for name, why in sorted(missing.items()))
            raise RunError(
                f"exchange {number} has {counted(replies, 'reply', 'replies')}, but the quorum is {least}. {told}. "
                "Once that is mended, start the same command again: what came is kept.",
                "quorum",
            )

    def judge(self, names: Sequence[str], given: Given) -> Iterator[tuple[str, Mapping[str, Scalar]]]:
        """Judge nothing: each site does, at home."""
        yield from ((name, {}) for name in names)

    def give(self, broadcasts: Mapping[str, Payload]) -> dict[str, str]:
        """Hand out the last broadcasts; return the sites that did not take theirs, and why."""
        nodes = self.nodes.find(list(broadcasts))
        number = self.checkpoints.progress().phases + 1
        requests = [self._request(name, nodes[name], number, broadcasts[name]) for name in broadcasts if name in nodes]
        without = {name: self.nodes.why_absent(name) for name in broadcasts if name not in nodes}
        for name, found in self.asking.ask("evaluate", requests, ("facts",), self.deadline_s):
            if isinstance(found, Silence):
                without[name] = found.why
        return without

    def words(self) -> Vocabulary:
        """Ask every site for the answers and words of its questions; a `RunError` where one does not tell."""
        nodes = self.nodes.find(self.sites)
        asked = {"task": self.told.to_payload()}
        requests = [NodeRequest(name, nodes[name], asked) for name in self.sites if name in nodes]
        missing, found = {name: self.nodes.why_absent(name) for name in self.sites if name not in nodes}, []
        for name, told in self.asking.ask("query.words", requests, ("vocabulary",), self.deadline_s):
            part = told if isinstance(told, Silence) else _words_of(told["vocabulary"])
            if isinstance(part, Silence):
                missing[name] = part.why
            else:
                found.append(part)
        if missing:
            why = "; ".join(f"site {name}: {one}" for name, one in sorted(missing.items()))
            raise RunError(f"the words of all sites are needed before the first round. {why}", "quorum")
        return together(found)

    def _replies(self, number: int, names: Sequence[str], given: Given) -> Iterator[NodeAnswer]:
        """Ask the sites that are there, and yield each reply, or why there is none."""
        nodes = self.nodes.find(names)
        sent: dict[str, Payload] = {}

        def requests() -> Iterator[NodeRequest]:
            for name in names:
                _, sent[name] = given(name)
                if name in nodes:
                    yield self._request(name, nodes[name], number, sent[name])

        for name, found in self.asking.ask("train", requests(), ("facts", "reply"), self.deadline_s):
            if isinstance(found, Silence):
                yield name, found
            elif found["facts"].scalars.get("number") != number:
                yield name, Silence("its reply is of another exchange")
            else:
                yield name, found["reply"] if (why := differs(found["reply"], sent[name])) is None else Silence(why)
        yield from ((name, Silence(self.nodes.why_absent(name))) for name in names if name not in nodes)

    def _request(self, name: str, node: int, number: int, broadcast: Payload) -> NodeRequest:
        file = self.checkpoints.progress().sites.get(name)
        last = int(file.partition("/")[0].removeprefix("phase-")) + 1 if file else 0
        facts: dict[str, Scalar] = {
            "federation": self.federation,
            "site": name,
            "number": number,
            "counted": last,
            "version": VERSION,
        }
        return NodeRequest(name, node, {**self._begun(facts), "broadcast": broadcast})

    def _begun(self, facts: Mapping[str, Scalar]) -> dict[str, Payload]:
        """What a request tells beside its broadcast."""
        words = vocabulary_payload(self.vocabulary)
        return {"facts": Payload({}, facts), "task": self.told.to_payload(), "vocabulary": words}

    def _fitting(self, number: int, replies: Iterable[NodeAnswer]) -> Iterator[NodeAnswer]:
        """Yield each reply that can be aggregated, alone and beside one that counts; of the others why they do not.

        The first waits for one that it fits, so that the odd one of three does not decide for the others.
        """
        kept = {name: self.checkpoints.load_site(number - 1, name) for name in self.sites}
        one = next(((name, site.reply) for name, site in kept.items() if site is not None), None)
        waiting: list[tuple[str, Payload]] = []
        for name, reply in replies:
            if isinstance(reply, Silence) or (why := self._unusable(reply) or self._refused(number, {name: reply})):
                yield name, reply if isinstance(reply, Silence) else Silence(why)
                continue
            waiting.append((name, reply))
            if one is None and any(self._fits(number, name, reply, *pair) for pair in waiting[:-1]):
                one = name, reply
            while one is not None and waiting:
                yield self._beside(number, *one, *waiting.pop(0))
        for name, reply in waiting:
            other = next((pair for pair in waiting if pair[0] != name), (name, reply))
            yield self._beside(number, *other, name, reply)

    def _fits(self, number: int, name: str, reply: Payload, other: str, its: Payload) -> bool:
        """Tell whether two replies have one form and can be aggregated together."""
        return not unlike(reply, its) and not self._refused(number, {other: its, name: reply})

    def _beside(self, number: int, other: str, its: Payload, name: str, reply: Payload) -> NodeAnswer:
        """Judge a reply beside another site's."""
        why = unlike(reply, its) or self._refused(number, {other: its, name: reply})
        return name, Silence(f"beside that of site {other} {why}") if why else reply

    def _unusable(self, reply: Payload) -> str:
        """Say why a reply cannot count, whatever the method does with it; "" where it can."""
        if not isinstance(reply.scalars.get(DIGEST), str):
            return f"its reply lacks {DIGEST}"
        beside = sorted({kind_of(name) for name in reply.arrays} - set(self.method.travels))
        if beside:
            return f"its reply holds {', '.join(beside)}, and this method sends {', '.join(self.method.travels)}"
        tokens = self.task.backbone.tokens if isinstance(self.task.backbone, ViTSpec) else 0
        hyper = hyper_values(self.method)
        most, sent = hyper.get("maps_per_class", MAX_MAPS), sent_maps_in(hyper)
        try:
            for name in (name for name in reply.arrays if kind_of(name) == "maps"):
                check_sent_maps(name, reply.arrays[name], len(self.task.classes), tokens, most, sent)
        except MapsError as error:
            return f"of its reply {error}"
        return ""

    def _refused(self, number: int, replies: Mapping[str, Payload]) -> str:
        """Say why these replies cannot be aggregated; "" where they can."""
        server = self.checkpoints.progress().server
        state = self.checkpoints.load_state(server) if server else self.method.start(self.task, self.sites)
        try:
            call_aggregate(self.method, state, self.method.phases(self.task.rounds)[number - 1], replies)
        except EdgeflError as error:
            return f"its reply cannot be aggregated: {error}"
        return ""


def _words_of(payload: Payload) -> Vocabulary | Silence:
    """Read the words that a site told, or say why they are of no use."""
    try:
        return read_vocabulary(payload) or Silence("it told no words")
    except PayloadError as error:
        return Silence(f"its words cannot be used: {error}")


def differs(reply: Payload, sent: Payload) -> str | None:
    """Say in which array that it was sent a reply has another type or shape."""
    for name, array in reply.arrays.items():
        other = sent.arrays.get(name)
        if other is not None and (array.shape, array.dtype) != (other.shape, other.dtype):
            form = f"{array.dtype} {array.shape}, and was sent as {other.dtype} {other.shape}"
            return f"{name} of its reply is {form}"
    return None


def unlike(reply: Payload, its: Payload) -> str:
    """Say in what a reply has another form than another site's; "" where they are alike, or one holds no arrays."""
    if not (reply.arrays and its.arrays):
        return ""
    mine, theirs = form_parts(reply), form_parts(its)
    odd = [part for part in sorted(mine) if part in theirs and mine[part] != theirs[part]]
    return f"its reply has another form: {difference(mine[odd[0]], theirs[odd[0]], 'that one')}" if odd else ""
