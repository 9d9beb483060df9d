"""A Grid of Flower's that calls the ClientApps in this process: no Ray, no network, nothing to start.

Without the extra `flower` these tests are left out; `make test-flower` makes an environment that has it.
"""

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: make test-flower")

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1  # a process of Flower's sets these


@dataclass
class Node:
    """A SuperNode: its app and its configuration; `spoil` may change what it replies, None loses it."""

    app: ClientApp
    config: dict[str, Any]
    online: bool = True
    spoil: Callable[[Message, Message], Message | None] = lambda asked, reply: reply
    heard: list[str] = field(default_factory=list)


class GridHere(Grid):
    """Does the work of a message when it is pushed; the reply waits to be pulled."""

    def __init__(self, nodes: dict[int, Node]) -> None:
        self.nodes, self.replies, self.time = nodes, {}, 0.0

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **options):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [number for number, node in self.nodes.items() if node.online]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        name = uuid.uuid4().hex
        message.metadata.__dict__["_message_id"] = name
        node = self.nodes[message.metadata.dst_node_id]
        if not node.online:
            self.replies[name] = Message(Error(5, "Node Unavailable"), reply_to=message)
            return name
        node.heard.append(message.metadata.message_type)
        context = Context(1, message.metadata.dst_node_id, node.config, RecordDict(), {})
        reply = node.spoil(message, node.app(message, context))
        if reply is not None:
            self.replies[name] = reply
        return name

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(name) for name in message_ids if name in self.replies]

    def clock(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
