"""The server of a federation of SuperNodes: `flwr run` starts it at the SuperLink.

Guarantees: the rounds are the engine's own, on the disk after each site and each round, so a server that is killed goes
on with the same command to the same digest; sites are known by name, not by node, and count in the order of their
names. A round needs `quorum` replies; whose reply is missing, late or of no use is told by name with the cause.
Source: docs/guides/flower.md.
"""

import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from msgspec import Meta

from edgefl_protocol import state_digest
from edgefl_protocol.durable import read_bounded, read_private, write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.messages.requests import TaskReply
from edgefl_trainer.contract import Method, State, Task, declared
from edgefl_trainer.data.specs import asks_questions
from edgefl_trainer.data.tasks import task_word
from edgefl_trainer.engine.checkpoint import Checkpoints
from edgefl_trainer.engine.display import Display, RunPace, tell
from edgefl_trainer.engine.folder import FEDERATION, check_free, is_worked_on, working_in
from edgefl_trainer.engine.handout import final_phase, handed_out
from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.local_engine import FederationState, LocalEngine
from edgefl_trainer.engine.run import check_backbone, what_was_asked, write_summary
from edgefl_trainer.engine.settings import RunSettings, from_toml, resolve
from edgefl_trainer.engine.sites import SELF_SUPERVISED_TASK
from edgefl_trainer.errors import SettingError
from edgefl_trainer.flower import away
from edgefl_trainer.flower.asking import Asking
from edgefl_trainer.flower.rounds import AwayCrew, AwaySite, site_digest
from edgefl_trainer.flower.site_nodes import SiteNodes
from edgefl_trainer.flower.vocabulary import keep_vocabulary, kept_vocabulary
from edgefl_trainer.method_halves import check_travels, secret_numbering, stamped
from edgefl_trainer.models.backbone_names import has_own_weights
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.typed_values import read_value

POLL_S = 1.0
NUMBERING = "numbering.key"  # in the server's folder, and known to nobody else
_KEY_BYTES = 32
NOWHERE = ("folder:away",)  # data of a server, which has none
Seconds = Annotated[float, Meta(ge=0, description="0 or more")]
NUMBERS: Mapping[str, tuple[Any, float]] = {  # of --run-config, with what they are where nothing is given
    "quorum": (Annotated[int, Meta(ge=0, description="0 (all) or more")], 0),
    "deadline-seconds": (Seconds, 0),
    "wait-seconds": (Seconds, 60),
}
# What a server has no part in, with the value that says nothing: each site gives it, or nobody can.
OF_SITES: Mapping[str, Any] = {
    "images_per_site": 0, "unlabelled": "none", "balance": "none", "privacy_budget": 0.0,
    "partition": "", "colour": "none", "labels": 1.0, "select": "last", "probe_every": 0,
    "device": "auto", "autocast": "auto", "workers": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """What `flwr run --run-config` says."""

    config: Path  # TOML file of the run's settings, at the SuperLink
    out: Path  # the server's folder
    sites: tuple[str, ...]
    quorum: int  # replies that a round needs
    deadline_s: float | None  # of a round; None waits
    wait_s: float  # for SuperNodes that are away when a round begins

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Arrangement":
        """Read the run configuration; a `SettingError` where something is missing or out of range."""
        for name in ("config", "out", "sites"):
            if not str(config.get(name, "")):
                raise SettingError(f"the run configuration lacks {name}: give --run-config '{name}=\"…\"'.")
        sites = tuple(sorted(str(config["sites"]).replace(",", " ").split()))
        numbers = {
            name: read_value(config.get(name, usual), kind, name, texts=True) for name, (kind, usual) in NUMBERS.items()
        }
        quorum = numbers["quorum"] or len(sites)
        if len(set(sites)) != len(sites) or not 1 <= quorum <= len(sites):
            raise SettingError(f"quorum is {quorum} of the sites {', '.join(sites)}: name each once, and 1 to all.")
        return cls(
            config=Path(str(config["config"])).expanduser(),
            out=Path(str(config["out"])).expanduser(),
            sites=sites,
            quorum=quorum,
            deadline_s=numbers["deadline-seconds"] or None,
            wait_s=numbers["wait-seconds"],
        )


def task_of(settings: RunSettings, method: Method, plan: Arrangement) -> tuple[Task, TaskReply]:
    """Make the task, for the server and as it is told to sites.

    A `SettingError` where the method needs what a server without data does not have.
    """
    learns = declared(method)
    if method.needs_labels and not settings.classes and not asks(settings):
        raise SettingError(f'{plan.config} names no classes: the server has no data, so give classes = ["…", …].')
    if not learns.freezes and has_own_weights(settings.backbone):
        raise SettingError(f"{settings.method} would start from weights that do not travel: name a fresh backbone.")
    backbone = load_backbone(settings.backbone, image_px=settings.image_px or None, seed=settings.seed)
    name = SELF_SUPERVISED_TASK if learns.encoder else settings.task
    task = Task(
        name=name,
        classes=settings.classes,
        backbone=backbone.spec,
        rounds=settings.rounds,
        epochs=settings.epochs,
        seed=settings.seed,
    )
    spec = asdict(backbone.spec)
    told = TaskReply(
        method=settings.method, task=task_word(settings.task), line="flower", classes=settings.classes or ("none",),
        rounds=max(1, len(method.phases(settings.rounds))), round=0, phase="", state="open", deadline_ms=0, tokens=0,
        maps_per_class=0, quorum_min=plan.quorum, quorum_target=len(plan.sites), max_reply_bytes=1 << 32, replied=False,
        settings=hyper_values(method), train_rounds=settings.rounds, epochs=settings.epochs, seed=settings.seed,
        travels=tuple(method.travels), backbone=spec,
    )  # fmt: skip
    return task, told


def asks(settings: RunSettings) -> bool:
    """Tell whether the pictures of the sites are asked questions: the kind of `data` in the settings says so."""
    return any(map(asks_questions, settings.data))


def serve(grid: Grid, plan: Arrangement) -> dict[str, Any]:
    """Run what is left of the federation and return the contents of `summary.json`.

    Raises:
        EdgeflError: a setting, the folder, or a round without its quorum, with the sites that were missing and why.
    """
    settings = settings_of_server(plan.config)
    method = settings.build_method()
    check_travels(method)
    check_backbone(settings, method)
    check_free(plan.out)
    task, told = task_of(settings, method, plan)
    started = time.perf_counter()
    asking = Asking(grid=grid, poll_s=POLL_S, most_bytes=1 << 32)
    _wait_for(plan.out, asking, plan.wait_s)
    with working_in(plan.out, settings, resume=True):
        federation = _federation(plan.out)
        crew = AwayCrew(
            asking=asking,
            method=method,
            task=task,
            told=told,
            federation=federation,
            checkpoints=Checkpoints(plan.out / "checkpoints"),
            sites=plan.sites,
            quorum=plan.quorum,
            deadline_s=plan.deadline_s,
            nodes=SiteNodes(asking, plan.sites, plan.wait_s),
        )
        if method.needs_labels and asks(settings):
            known = kept_vocabulary(plan.out) or crew.words()
            keep_vocabulary(plan.out, known)
            task = replace(task, classes=known.answers, questions=known.questions)
            crew = replace(crew, task=task, vocabulary=known)
        numbering_key = _numbering_key(plan.out)
        final = _rounds(settings, method, task, plan, crew, numbering_key)
        digests = {name: site_digest(state) for name, state in final.sites.items()}
        ended = state_digest(final.server.digest(), digests)
        without = _hand_out(crew, method, task, final.server, ended, numbering_key)
        head = {**what_was_asked(settings, method, None), "site_names": list(plan.sites), "quorum": plan.quorum}
        told_end = {"without_hand_out": without, "state_sha256": ended}
        return write_summary(plan.out, head, {}, time.perf_counter() - started, told_end)


def settings_of_server(path: Path) -> RunSettings:
    """Read the settings as `edgefl-train run --config` does; the data stands for nothing.

    A `SettingError` where one would have no effect here: a run would be another one than its file says.
    """
    given = from_toml(read_bounded(path, 1 << 20), str(path))
    if not given.get("method"):
        raise SettingError(f'{path} names no method: give method = "…".')
    for name, nothing in OF_SITES.items():
        if given.get(name, nothing) != nothing:
            word = name.replace("_", "-")
            where = f"each SuperNode gives {word} in its --node-config" if word in away.OPTIONS else "leave it out"
            raise SettingError(f"{path} has {name} = {given[name]}, and the server has no pictures: {where}.")
    flags = {} if given.get("data") else {"data": NOWHERE}
    return replace(resolve(str(given["method"]), flags, path, []), select="last")


def _wait_for(out: Path, asking: Asking, wait_s: float) -> None:
    """Wait for the server before this one: it outlives a killed SuperLink by up to a minute."""
    until = asking.clock() + wait_s
    while is_worked_on(out) and asking.clock() < until:
        asking.sleep(asking.poll_s)


def _federation(out: Path) -> str:
    """Return the name by which sites know this federation: that of the folder, and a number drawn once."""
    path = out / FEDERATION
    if not path.exists():
        plain = re.sub("[^A-Za-z0-9]+", "-", out.resolve().name).strip("-")[:40] or "federation"
        write_atomic(path, json.dumps({"federation": f"{plain}-{secrets.token_hex(4)}"}).encode())
    return str(json.loads(read_bounded(path, 1 << 12))["federation"])


def _numbering_key(out: Path) -> bytes:
    """Return the secret, drawn once, from which peers' numbers are drawn (`secret_numbering`)."""
    path = out / NUMBERING
    if not path.exists():
        write_atomic(path, secrets.token_bytes(_KEY_BYTES), 0o600)
    return read_private(path, _KEY_BYTES)


def _rounds(
    settings: RunSettings, method: Method, task: Task, plan: Arrangement, crew: AwayCrew, numbering_key: bytes
) -> FederationState:
    """Run the engine with its sites away."""
    pace = RunPace(method.phases(settings.rounds), dict.fromkeys(plan.sites, 1), settings.participation)
    with Display(pace, settings.epochs) as display:
        engine = LocalEngine(
            method=method,
            task=task,
            sites={name: AwaySite() for name in plan.sites},
            folder=plan.out,
            observer=display,
            participation=settings.participation,
            crew=crew,
            numbering_key=numbering_key,
        )
        return engine.run()


def _hand_out(crew: AwayCrew, method: Method, task: Task, server: State, ended: str, numbering_key: bytes) -> list[str]:
    """Hand out what the sites make their models of; return the sites that did not take it."""
    phase = final_phase(task)
    found = handed_out(method, task, server, crew.sites)
    number = len(method.phases(task.rounds)) + 1
    payloads = {
        name: stamped(found[name], phase, task.rounds, secret_numbering(numbering_key, name, number))
        for name in crew.sites
    }
    last = replace(crew, told=replace(crew.told, state="done", state_sha256=ended))
    without = last.give(payloads)
    for name, why in without.items():
        tell(f"site {name} has no results yet: {why}; start the same command again to hand them out")
    return sorted(without)


def main(grid: Grid, context: Context) -> None:
    """Serve; a known failure is one sentence and ends the run."""
    try:
        summary = serve(grid, Arrangement.of(context.run_config))
    except EdgeflError as error:
        tell(f"edgefl: {error}")
        raise SystemExit(1) from error
    tell(f"finished: state_sha256 {summary['state_sha256']}")


app = ServerApp()
app.main()(main)
