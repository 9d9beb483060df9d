"""A server asks the nodes of a Flower federation, and hears from each its reply or why there is none.

Guarantees: replies come as they arrive; each that is yielded was judged by `records`; what a node does not say within
the time is yielded as `Silence`, and so is what it failed at, with its cause. Nothing waits for a node for ever where a
deadline is given. Source: docs/guides/flower.md, when a site fails.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from flwr.app import Error, Message
from flwr.serverapp import Grid

from edgefl_protocol import Payload
from edgefl_protocol.errors import PayloadError
from edgefl_trainer.flower.records import packed, unpacked
from edgefl_trainer.flower.replying import TROUBLE, Trouble

LONGEST_S = 30 * 24 * 3600.0  # that a request without a deadline stays valid; Flower's own default is 12 hours
LEAST_S = 1.0  # that a request stays valid: Flower takes none of no time
MOST_TOLD = 300  # characters of a cause that Flower gives
# What Flower's codes of errors mean, as its source has them: a number that is not here is told with its own text.
_CAUSES = {
    1: "its SuperNode cannot load the app: install edgefl-derm[flower] there",
    3: "its SuperNode did not get the request in time",
    4: "its reply was lost on its way",
    5: "its SuperNode does not answer any more",
    8: "its process ended in the middle of the work",
}


@dataclass(frozen=True)
class NodeRequest:
    """What one site is asked, at the node where it is."""

    site: str
    node: int
    payloads: Mapping[str, Payload]


@dataclass(frozen=True)
class Silence:
    """Why a site gave nothing: in words, and where it told so itself, its trouble."""

    why: str
    trouble: Trouble | None = None


Heard = tuple[str, dict[str, Payload] | Silence]


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How nodes are asked."""

    grid: Grid
    poll_s: float  # between two looks for replies
    most_open: int = 1 << 20  # requests under way at once
    most_bytes: int  # of one payload of a reply
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def ask(
        self, kind: str, requests: Iterable[NodeRequest], reply: Collection[str], within_s: float | None = None
    ) -> Iterator[Heard]:
        """Ask and yield what is heard from each site, in the order of arrival.

        Args:
            kind: of message, such as `train`.
            requests: made one by one, when they are due.
            reply: names of the payloads that a reply holds.
            within_s: seconds after which those that did not reply are given up; None waits.
        """
        until = None if within_s is None else self.clock() + within_s
        ahead = iter(requests)
        under_way: dict[str, str] = {}  # message → site
        more = True
        while more or under_way:
            while more and len(under_way) < self.most_open:
                request = next(ahead, None)
                more = request is not None
                if request is not None:
                    under_way[self._sent(kind, request, within_s)] = request.site
            heard = list(self.grid.pull_messages(list(under_way))) if under_way else []
            for message in heard:
                site = under_way.pop(message.metadata.reply_to_message_id, None)
                if site is not None:
                    yield site, self._read(message, reply)
            if until is not None and self.clock() >= until:
                late = [*under_way.values(), *(request.site for request in ahead)]
                yield from ((site, Silence(f"no reply came within {within_s:g} s")) for site in late)
                return
            if not heard:
                self.sleep(self.poll_s)

    def _sent(self, kind: str, request: NodeRequest, within_s: float | None) -> str:
        ttl = LONGEST_S if within_s is None else max(within_s, LEAST_S)
        message = Message(packed(request.payloads), request.node, kind, ttl=ttl)
        found: list[str] = list(self.grid.push_messages([message]))
        return found[0]

    def _read(self, message: Message, reply: Collection[str]) -> dict[str, Payload] | Silence:
        if message.has_error():
            return Silence(cause_of(message.error))
        try:
            if set(message.content) == {TROUBLE}:
                trouble = Trouble.from_payload(unpacked(message.content, (TROUBLE,), self.most_bytes)[TROUBLE])
                return Silence(trouble.sentence, trouble)
            return unpacked(message.content, reply, self.most_bytes)
        except PayloadError as error:
            return Silence(f"its reply cannot be used: {error}")


def cause_of(error: Error) -> str:
    """Say in words why Flower has no reply of a node."""
    reason = " ".join((error.reason or "").split())[:MOST_TOLD]
    if "ActorDiedError" in reason or "OutOfMemoryError" in reason:  # of Ray
        return "its worker process was ended, perhaps by the system for want of memory: fewer workers need less"
    return _CAUSES.get(error.code, f"Flower says: {reason or 'nothing'}")
