"""Which SuperNode holds which site: who is asked, how long, and what is said of one that is of no use."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: make test-flower")

from edgefl_protocol import Payload
from edgefl_protocol.distribution import VERSION
from edgefl_trainer.errors import RunError
from edgefl_trainer.flower.asking import Heard, NodeRequest, Silence
from edgefl_trainer.flower.site_nodes import ABSENT, QUERY_S, SiteNodes

OLD = ("site-1", "0.0.9")


class Answering:
    """Nodes that say, one after the other, what they are told to; None is silence."""

    def __init__(self, **says: list[tuple[str, str] | None]) -> None:
        self.says = {int(name.removeprefix("node_")): list(words) for name, words in says.items()}
        self.online = list(self.says)
        self.grid = SimpleNamespace(get_node_ids=lambda: self.online)
        self.now, self.poll_s = 0.0, 1.0
        self.asked: list[tuple[int, float]] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def ask(self, kind: str, requests: Iterable[NodeRequest], reply: object, within_s: float) -> Iterator[Heard]:
        for one in requests:
            self.asked.append((one.node, within_s))
            said = self.says[one.node].pop(0)
            if said is None:
                yield one.site, Silence("no reply came")
            else:
                yield one.site, {"facts": Payload({}, {"site": said[0], "version": said[1]})}


def nodes_of(asking: Answering, wait_s: float = 0.0) -> SiteNodes:
    return SiteNodes(asking, ("site-1", "site-2"), wait_s)  # type: ignore[arg-type]


def test_one_of_another_version_is_asked_again_in_the_next_round_with_time_to_begin(capsys) -> None:
    """Its process loads PyTorch before it answers, however short a round waits for SuperNodes that are away."""
    asking = Answering(node_7=[OLD, ("site-1", VERSION)])
    nodes = nodes_of(asking)
    assert nodes.find(["site-1"]) == {} and asking.asked == [(7, QUERY_S)]
    assert nodes.why_absent("site-1") == f"it runs EdgeFL '0.0.9', and the server {VERSION}: install one version"
    assert nodes.why_absent("site-2") == ABSENT
    assert nodes.find(["site-1"]) == {"site-1": 7} and asking.asked[1:] == [(7, QUERY_S)]
    assert nodes.find(["site-1"]) == {"site-1": 7} and len(asking.asked) == 2
    assert capsys.readouterr().err == ""  # the round's line says why


def test_why_one_is_of_no_use_is_forgotten_when_it_leaves() -> None:
    asking = Answering(node_7=[OLD])
    nodes = nodes_of(asking)
    assert nodes.find(["site-1"]) == {}
    asking.online = []
    assert nodes.find(["site-1"]) == {} and nodes.why_absent("site-1") == ABSENT


def test_a_silent_one_is_told_once_and_holds_no_later_round_up(capsys) -> None:
    asking = Answering(node_7=[None, None, None], node_8=[("site-2", VERSION)])
    nodes = nodes_of(asking, wait_s=2.0)
    for _ in range(3):
        assert nodes.find(["site-1", "site-2"]) == {"site-2": 8}
    assert [within for node, within in asking.asked if node == 7] == [QUERY_S, 2.0, 2.0]
    assert capsys.readouterr().err.count("SuperNode 7 does not say which site it is") == 1


def test_nobody_is_asked_again_where_no_site_lacks_its_own() -> None:
    asking = Answering(node_7=[("site-9", VERSION)], node_8=[("site-2", VERSION)])
    nodes = nodes_of(asking)
    for _ in range(2):
        assert nodes.find(["site-2"]) == {"site-2": 8}
    assert len(asking.asked) == 2


def test_two_of_one_site_are_refused() -> None:
    asking = Answering(node_7=[("site-1", VERSION)], node_8=[("site-1", VERSION)])
    with pytest.raises(RunError, match="two SuperNodes say that they are site site-1"):
        nodes_of(asking).find(["site-1"])
