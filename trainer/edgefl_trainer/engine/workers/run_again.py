"""A run in another process of this machine, made again from its settings: what its workers work with.

Guarantees: a process reads rows and network as the run's own did, once for all sites, and says by digests what it
read. A site gives the same bits here as there, with as many threads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from edgefl_protocol import Payload
from edgefl_trainer.contract import Method, Scalar, Site, State
from edgefl_trainer.data.partitions.partition import read_partition
from edgefl_trainer.engine.checkpoint import SiteResult
from edgefl_trainer.engine.local_engine import InProcessSite
from edgefl_trainer.engine.selection import Judge, judge_for
from edgefl_trainer.engine.settings import RunSettings, from_toml
from edgefl_trainer.engine.sites import read_sites, repeatable
from edgefl_trainer.errors import RunError
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.cnn import Backbone


@dataclass(frozen=True)
class RunAgain:
    """What a process makes of a run's settings."""

    method: Method
    sites: Mapping[str, Site]
    scored: Judge  # figures of a site's current model on its tune rows
    digests: Mapping[str, str]  # of rows and network

    def learn(
        self, name: str, state: State, broadcast: Payload, report: Callable[[Mapping[str, Scalar]], None]
    ) -> SiteResult:
        """Do a site's share of a phase."""
        with repeatable(self.sites[name].device):
            return InProcessSite(self.method, self.sites[name]).local_round(state, broadcast, report)

    def judge(self, name: str, state: State, broadcast: Payload) -> Mapping[str, Scalar]:
        """Score a site's current model on its tune rows."""
        with repeatable(self.sites[name].device):
            return self.scored(name, state, broadcast)


@lru_cache(maxsize=1)
def read_run(settings: str, threads: int, network: Backbone | None = None) -> RunAgain:
    """Read data and network as the run's own process did; `threads` as there, for sums depend on their number.

    Args:
        settings: the run's, as TOML.
        threads: of a sum.
        network: what the run's own process read; None reads it again.
    """
    torch.set_num_threads(threads)
    wanted = RunSettings(**from_toml(settings.encode(), "the run's settings"))
    method = wanted.build_method()
    partition = read_partition(Path(wanted.partition).expanduser()) if wanted.partition else None
    backbone = network or load_backbone(wanted.backbone, image_px=wanted.image_px or None, seed=wanted.seed)
    federation, _, sites = read_sites(wanted, method, backbone, partition)
    digests = {"partition_sha256": federation.partition_sha256, "backbone_sha256": backbone.spec.sha256}
    return RunAgain(method, sites, judge_for(wanted.select, method, sites), digests)


def check_same(then: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Compare digests: a `RunError` where a process read other rows or another network than the run's own did."""
    if {name: now.get(name) for name in then} != then:
        raise RunError("the data or the network changed while the run began: start it again with another --out.")
