"""Which SuperNode holds which site: asked of the SuperNodes themselves.

Guarantees: a site has one SuperNode, which runs the server's version. One that was of no use is asked once more in the
next round, where a site lacks its own: it may have been mended. Why it is of no use is told as long as it is online.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from edgefl_protocol import Payload
from edgefl_protocol.distribution import VERSION
from edgefl_trainer.engine.display import tell
from edgefl_trainer.errors import RunError
from edgefl_trainer.flower.asking import Asking, NodeRequest, Silence

QUERY_S = 300.0  # for a SuperNode to say which site it is: its process loads PyTorch first
ABSENT = "no SuperNode answers for it"


@dataclass(frozen=True)
class Introduction:
    """What a SuperNode said of itself."""

    site: str  # "" where it said nothing
    why: str = ""  # it is of no use; "" where it is of use


@dataclass
class SiteNodes:
    """The SuperNodes that a server has met."""

    asking: Asking
    sites: Sequence[str]
    wait_s: float  # for SuperNodes that are away
    told: dict[int, Introduction] = field(default_factory=dict)
    online: Collection[int] = ()
    said: set[str] = field(default_factory=set)

    def find(self, names: Collection[str]) -> dict[str, int]:
        """Find the SuperNodes of these sites, and wait a while for those that are away.

        A `RunError` where two say that they are the same site.
        """
        until = self.asking.clock() + self.wait_s
        again = {node for node, one in self.told.items() if one.why}
        while True:
            self.online = sorted(self.asking.grid.get_node_ids())
            self._ask(node for node in self.online if node not in self.told)
            found = self._found()
            if not set(names) <= set(found) and again & set(self.online):
                self._ask(sorted(again & set(self.online)))
                again, found = set(), self._found()
            if set(names) <= set(found) or self.asking.clock() >= until:
                return found
            self.asking.sleep(self.asking.poll_s)

    def why_absent(self, name: str) -> str:
        """Say why no SuperNode is asked for a site, as of the last look."""
        held = (self.told[node] for node in self.online)
        return next((one.why for one in held if one.site == name and one.why), ABSENT)

    def _found(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for node in self.online:
            if self.told[node].why:
                continue
            name = self.told[node].site
            if name in found:
                raise RunError(f"two SuperNodes say that they are site {name}: give each its own site=NAME.", "run")
            found[name] = node
        return found

    def _ask(self, nodes: Iterable[int]) -> None:
        """Ask nodes which site they are. One that was silent before is given no longer than a round waits."""
        parts: dict[float, list[int]] = {}
        for node in nodes:
            silent = node in self.told and not self.told[node].site
            parts.setdefault(self.wait_s if silent else QUERY_S, []).append(node)
        for within_s, part in parts.items():
            requests = [NodeRequest(str(node), node, {"facts": Payload({}, {})}) for node in part]
            for asked, found in self.asking.ask("query", requests, ("facts",), within_s):
                self.told[int(asked)] = self._read(int(asked), found)

    def _read(self, node: int, found: dict[str, Payload] | Silence) -> Introduction:
        if isinstance(found, Silence):
            self._say_once(f"SuperNode {node} does not say which site it is: {found.why}")
            return Introduction("", found.why)
        facts = found["facts"].scalars
        name, version = str(facts.get("site", ""))[:64], str(facts.get("version", ""))[:64]
        if name not in self.sites:
            self._say_once(f"SuperNode {node} says it is site {name!r}, which is not among {', '.join(self.sites)}")
            return Introduction(name, "it is no site of this federation")
        if version != VERSION:
            return Introduction(name, f"it runs EdgeFL {version!r}, and the server {VERSION}: install one version")
        return Introduction(name)

    def _say_once(self, line: str) -> None:
        if line not in self.said:
            self.said.add(line)
            tell(line)
