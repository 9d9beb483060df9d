"""A finished run, opened to be attacked: its data, its sites and their states."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgefl_trainer.contract import Method, Site, State
from edgefl_trainer.data import Federation
from edgefl_trainer.data.partitions.partition import PARTITION_FILE, read_partition
from edgefl_trainer.engine.checkpoint import Checkpoints
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.engine.sites import read_sites
from edgefl_trainer.errors import RunError
from edgefl_trainer.models.backbones import load_backbone


@dataclass(frozen=True)
class Audited:
    """A run, its data and its states, as the attacks read them."""

    run: FinishedRun
    method: Method
    federation: Federation
    sites: Mapping[str, Site]  # all that trained
    attacked: tuple[str, ...]
    server: State
    states: Mapping[str, State]
    pictures: int  # most that are looked for at a site
    report: Callable[[str], None]


def open_audit(run: FinishedRun, names: Sequence[str], pictures: int, report: Callable[[str], None]) -> Audited:
    """Read again what a run learned from and what it left; raises as `running.audit`."""
    if run.questions is not None:
        raise RunError(
            f"the run in {run.folder} answers questions, and audit attacks what is sent of pictures alone: name "
            "another run."
        )
    if "site_sha256" in run.summary:
        raise RunError(
            f"{run.folder} holds one site's part of a federation, and audit also needs the server's state and the "
            "other sites' pictures, which are not here: name a folder of edgefl-train run."
        )
    method, path = run.settings.build_method(), run.folder / PARTITION_FILE
    partition = read_partition(path) if path.exists() else None
    backbone = load_backbone(run.settings.backbone, image_px=run.settings.image_px or None, seed=run.settings.seed)
    federation, _, sites = read_sites(run.settings, method, backbone, partition)
    if federation.partition_sha256 != run.summary.get("partition_sha256"):
        raise RunError(
            f"the rows of the data have changed since the run in {run.folder}: audit needs the pictures that it "
            "learned from."
        )
    unknown = [name for name in names if name not in sites]
    if unknown:
        raise RunError(f"the run in {run.folder} has no site {unknown[0]!r}; it has {', '.join(sites)}.")
    checkpoints = Checkpoints(run.folder / "checkpoints")
    progress = checkpoints.progress()
    if not progress.server:
        raise RunError(f"the run in {run.folder} kept no states: audit needs its folder checkpoints.")
    server = checkpoints.load_state(progress.server)
    states = checkpoints.states(sorted(sites))
    return Audited(
        run, method, federation, sites, tuple(dict.fromkeys(names or sites)), server, states, pictures, report
    )
