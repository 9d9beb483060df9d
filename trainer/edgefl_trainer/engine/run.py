"""One run from settings to results: read the data, run the federation, judge it, leave a directory that says it all.

DIR/config.toml        the resolved settings
DIR/environment.json   versions, machine, commit, seed, threads, dates
DIR/partition.json     who has which image, where a partition was named
DIR/metrics.jsonl      a line for each phase and site
DIR/checkpoints/       see `engine.checkpoint`
DIR/privacy/           of sites that send under noise, see `engine.privacy.ledger`
DIR/backbone.safetensors   the frozen network (or the learned one), so that the directory stands alone
DIR/models/NAME.safetensors   what each site scores with, see `engine.models`
DIR/calibration.json   temperature and referral threshold, from tune rows
DIR/summary.json       the results
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from edgefl_protocol.durable import write_atomic
from edgefl_protocol.sentences import counted
from edgefl_trainer.contract import Method, Site, State, Task, declared
from edgefl_trainer.data import Federation
from edgefl_trainer.data.partitions.partition import PARTITION_FILE, Partition, read_partition
from edgefl_trainer.data.site_rows import ROW_KINDS
from edgefl_trainer.engine.card.step_memory import fitted, has_batch, memory_line
from edgefl_trainer.engine.display import Display, JudgedSite, RunPace, epochs_of_work, judged_sites, tell, warn
from edgefl_trainer.engine.first_run import (
    has_learned,
    learned_by,
    other_colour_line,
    repetition_digest,
    untrained_line,
)
from edgefl_trainer.engine.folder import (
    begun_inputs,
    begun_settings,
    check_alone,
    check_claim,
    check_free,
    check_inputs,
    finished_summary,
    read_metrics,
    working_in,
)
from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.judging.held_out import without_model
from edgefl_trainer.engine.judging.results import results_of
from edgefl_trainer.engine.local_engine import FederationState, InProcessSite, LocalEngine
from edgefl_trainer.engine.models import save_questions
from edgefl_trainer.engine.privacy.ledger import Ledgers, check_budget
from edgefl_trainer.engine.privacy.spent import privacy_cost
from edgefl_trainer.engine.probing import make_prober
from edgefl_trainer.engine.selection import judge_for, most_judged, selecting_sites
from edgefl_trainer.engine.settings import RunSettings, check_start
from edgefl_trainer.engine.sites import (
    build_held_out_sites,
    choose_device,
    one_class_sites,
    read_sites,
    repeatable,
    slow_bf16_line,
)
from edgefl_trainer.engine.workers.pool import Workers, cores_here, crowded_line
from edgefl_trainer.environment import write_environment, write_finished
from edgefl_trainer.evaluate.tables.shares import SIZES
from edgefl_trainer.method_halves import call_start, check_travels
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.spec import BackboneSpec

Drive = Callable[[LocalEngine], FederationState]


def run(
    settings: RunSettings,
    folder: Path,
    *,
    resume: bool,
    during: AbstractContextManager[None] | None = None,
    fit_batch: bool = False,
    drive: Drive = LocalEngine.run,
) -> dict[str, Any]:
    """Run a method, leave its results in `folder` and return the contents of `summary.json`.

    `during` is entered once the folder is this process's, and left at the end. With `fit_batch` a run that begins takes
    the largest batch that fits the card. `drive` runs the engine, perhaps elsewhere. An `EdgeflError` is one sentence.
    """
    method = settings.build_method()
    check_travels(method)
    check_free(folder)
    check_claim(folder, settings, resume=resume)
    check_alone(folder)
    during = during or nullcontext()
    if resume and (finished := finished_summary(folder)) is not None:
        tell(f"the run in {folder} is finished; nothing was computed again")
        with during:
            return finished
    check_backbone(settings, method)
    check_budget(settings, method)
    choose_device(settings.device)
    partition = read_partition(Path(settings.partition).expanduser()) if settings.partition else None
    backbone = load_backbone(settings.backbone, image_px=settings.image_px or None, seed=settings.seed)
    federation, task, sites = read_sites(settings, method, backbone, partition)
    if fit_batch and begun_settings(folder) is None:
        settings = fitted(settings, sites)
        method = settings.build_method()
    server = call_start(method, task, sorted(sites))  # what does not fit shows before the folder is taken
    tell_before(settings, method, federation, sites, server)
    device = next(iter(sites.values())).device
    with working_in(folder, settings, resume=resume), repeatable(device), during:
        check_inputs(folder, federation.partition_sha256, backbone.spec.sha256, hyper_values(method))
        _write_inputs(folder, settings, task, partition, device)
        asked = {**what_was_asked(settings, method, partition), **_measured_before(method, sites)}
        held_out = {} if declared(method).encoder else build_held_out_sites(federation, task, backbone, settings)
        judged = {} if declared(method).encoder else judged_sites(federation, sites, held_out)
        final = run_phases(settings, folder, method, task, sites, epochs_of_work(judged, settings.epochs), drive)
        privacy = privacy_cost(folder, method, final.sites, seeded=True)
        started = time.perf_counter()
        results = results_of(folder, method, task, backbone, final, federation, sites, held_out)
        head = {
            **asked,
            "partition_sha256": federation.partition_sha256,
            **({"partition": partition.facts()} if partition else {}),
            **results,
        }
        digests = {"state_sha256": final.digest()}
        return write_summary(folder, head, privacy, time.perf_counter() - started, digests)


def _measured_before(method: Method, sites: Mapping[str, Site]) -> dict[str, Any]:
    """Measure what the method wants to know before its first round, and warn where it speaks against the run."""
    measure = declared(method).measured_before
    found = measure(method, sites) if measure else None
    if found is None:
        return {}
    if found.warning:
        warn(found.warning)
    return {found.name: dict(found.figures)}


def _write_inputs(
    folder: Path, settings: RunSettings, task: Task, partition: Partition | None, device: torch.device
) -> None:
    """Leave what a run begins with, so that the directory says it all."""
    began = begun_settings(folder) or settings
    write_environment(folder, settings.seed, device, began_on=began.device)
    if task.questions is not None:
        save_questions(folder, task.questions)
    if partition is not None:
        write_atomic(folder / PARTITION_FILE, partition.to_bytes())


def tell_before(
    settings: RunSettings, method: Method, federation: Federation, sites: Mapping[str, Site], server: State
) -> None:
    """Say what a run stands on, what it learns from, what speaks against it, and on a card what a step takes."""
    first = next(iter(sites.values()))
    tell(backbone_line(settings, method, first.task.backbone))
    tell(data_line(federation, settings.images_per_site))
    told = declared(method).told_before
    if told and (line := told(hyper_values(method), settings.rounds, settings.epochs)):
        tell(line)
    apart = None if declared(method).encoder else without_model(settings.method, server, federation.held_out)
    for line in (*federation.warnings, *filter(None, [apart, other_colour_line(settings)])):
        warn(line)
    if first.device.type == "cpu" and (line := crowded_line(settings.workers, torch.get_num_threads(), cores_here())):
        warn(line)
    if line := slow_bf16_line(first.autocast, first.device):
        warn(line)
    if first.device.type == "cuda" and has_batch(method):
        tell(memory_line(settings, first))


def write_summary(
    folder: Path, head: Mapping[str, Any], privacy: Mapping[str, Any], evaluated: float, digests: Mapping[str, Any]
) -> dict[str, Any]:
    """Write `summary.json`: the head, then bytes, speed, cost of privacy and seconds, then digests.

    `privacy` is what `privacy_cost` gives; `evaluated` is the seconds that judging took.
    """
    lines = read_metrics(folder)
    sent = traffic(lines)
    summary = {
        **head,
        **sent,
        **shares_of_models(head, lines, sent["bytes_up_per_round"]),
        **speed(folder),
        **privacy,
        "seconds": round(sum(float(line["seconds"]) for line in lines) + evaluated, 1),
        **digests,
    }
    write_finished(folder)
    write_atomic(folder / "summary.json", _json(summary))
    return summary


def what_was_asked(settings: RunSettings, method: Method, partition: Partition | None) -> dict[str, Any]:
    """Write the head of a summary: what was asked for."""
    first = learned_by(settings.backbone)
    return {
        "method": settings.method,
        "task": settings.task,
        "seed": settings.seed,
        "rounds": settings.rounds,
        "preset": settings.preset,
        "select": settings.select,
        "labels": settings.labels,
        **{name: getattr(method, name) for name in declared(method).summary},
        **({} if first is None else {"pretraining": first["method"]}),
        "travels": list(method.travels),
        "settings_sha256": repetition_digest(settings, first, partition.plan if partition else None),
    }


def run_phases(
    settings: RunSettings,
    folder: Path,
    method: Method,
    task: Task,
    sites: Mapping[str, Site],
    after: float,
    drive: Drive = LocalEngine.run,
) -> FederationState:
    """Run every phase that is left, with progress on stderr; `after` is the work that follows, see `RunPace`."""
    most = most_judged(settings.select)
    judge = judge_for(settings.select, method, sites) if declared(method).encoder is None else None
    watched = {name: JudgedSite(0, len(site.tune.rows[:most])) for name, site in sites.items() if judge}
    learning = {name: len(site.train if method.needs_labels else site.unlabelled) for name, site in sites.items()}
    judged = epochs_of_work(watched, settings.epochs)
    phases, together = method.phases(settings.rounds), settings.select == "pooled"
    pace = RunPace(phases, learning, settings.participation, after=after, judged=judged, judges_all=together)
    network = next(iter(sites.values())).backbone
    side_by_side: AbstractContextManager[Workers | None] = nullcontext()
    if settings.workers > 1 and drive is LocalEngine.run and network is not None:
        same = settings.to_toml(), begun_inputs(folder)["partition_sha256"]
        side_by_side = Workers(settings.workers, same, network, learning)
    with Display(pace, settings.epochs, one_class_sites(sites)) as display, side_by_side as crew:
        if untrained := untrained_line(settings):
            display.warn(untrained)
        engine = LocalEngine(
            method=method,
            task=task,
            sites={name: InProcessSite(method, site) for name, site in sites.items()},
            folder=folder,
            observer=display,
            participation=settings.participation,
            judge=judge,
            selecting=frozenset() if settings.select == "last" else selecting_sites(sites),
            selecting_together=together,
            probe=make_prober(method, task, sites, settings.probe_every),
            selecting_encoder=settings.select == "tune",
            crew=crew,
            ledgers=Ledgers(folder, method, settings.privacy_budget),
        )
        return drive(engine)


def backbone_line(settings: RunSettings, method: Method, spec: BackboneSpec) -> str:
    """Write which network a run stands on, in what state, and what becomes of it: the first line that a run prints."""
    trained, freezes = has_learned(settings.backbone) is not False, declared(method).freezes
    state = "trained" if trained else "untrained" if freezes else "starts from random weights"
    use = ", stays as it is" if freezes else ", is trained further" if trained else ""
    return f"backbone {settings.backbone}, for images of {spec.image_px} px: {state}{use} (--backbone names another)"


def data_line(federation: Federation, images_per_site: int = 0) -> str:
    """Write how much data a run has, and what a bound on it bounds; `edgefl-train data SPEC` shows it site by site."""
    rows = {kind: sum(len(site.rows(kind)) for site in federation.sites.values()) for kind in ROW_KINDS}
    told = ", ".join(f"{count:,} {kind}" for kind, count in rows.items() if count)
    named = counted(len(federation.classes), *(("class", "classes") if federation.questions is None else ("answer",)))
    judged = f"all tune and {federation.report_split} rows are judged, as without it"
    bound = f" (--images-per-site {images_per_site:,} bounds the train rows; {judged})" if images_per_site else ""
    return f"data: {counted(len(federation.sites), 'site')}, {named}; rows: {told}{bound}"


def check_backbone(settings: RunSettings, method: Method) -> None:
    """Refuse a backbone that this run's method cannot start from, as `check_start` does."""
    learned = has_learned(settings.backbone)
    check_start(settings.method, method, settings.backbone, settings.preset, learned=learned)


def traffic(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sum the bytes of payloads: mean over train rounds of the sum over sites, and the sum of all phases.

    Args:
        lines: objects of `metrics.jsonl`, one for each phase and site.
    """
    train = [line for line in lines if line["phase"] == "train"]
    rounds = len({line["round"] for line in train}) or 1
    figures: dict[str, float] = {}
    for way in ("up", "down"):
        figures[f"bytes_{way}_per_round"] = round(sum(int(line[f"bytes_{way}"]) for line in train) / rounds, 1)
        figures[f"bytes_{way}_total"] = sum(int(line[f"bytes_{way}"]) for line in lines)
    return figures


def shares_of_models(head: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], bytes_up: float) -> dict[str, float]:
    """Compute what a round's replies are of the models of the sites that sent them, if these had sent those instead.

    Args:
        head: of a summary, with the sizes of a model; a share whose size it lacks is left out.
        lines: objects of `metrics.jsonl`, one for each phase and site.
        bytes_up: of a round.
    """
    train = [line for line in lines if line["phase"] == "train"]
    if not train:
        return {}
    replies = len(train) / len({line["round"] for line in train})
    return {share: bytes_up / (head[size] * replies) for share, size in SIZES.items() if head.get(size)}


def speed(folder: Path) -> dict[str, float]:
    """Compute images learned from per second of the sites' work, and the share spent waiting for data, where told."""
    lines = [line for line in read_metrics(folder) if line["phase"] == "train"]
    figures: dict[str, float] = {}
    for told, name, places in (("images", "images_per_second", 1), ("wait_seconds", "wait_share", 4)):
        known = [line for line in lines if told in line]
        seconds = sum(float(line["seconds"]) for line in known)
        if seconds > 0:
            figures[name] = round(sum(float(line[told]) for line in known) / seconds, places)
    return figures


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=False, allow_nan=False).encode() + b"\n"
