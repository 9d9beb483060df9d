"""One run from settings to results: read the data, run the federation, judge it, leave a directory that says it all.

DIR/config.toml        the resolved settings
DIR/environment.json   versions, machine, commit, seed, threads
DIR/metrics.jsonl      a line for each phase and site
DIR/checkpoints/       see `engine.checkpoint`
DIR/backbone.safetensors   the frozen network (or the learned one), so that the directory stands alone
DIR/models/NAME.safetensors   what each site scores with, see `engine.models`
DIR/calibration.json   temperature and referral threshold, from tune rows
DIR/summary.json       the results
"""

import json
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from edgefl_protocol.durable import write_atomic

from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.engine.display import Display
from edgefl_trainer.engine.federation import InProcessSite, LocalEngine, read_metrics
from edgefl_trainer.engine.results import learned_backbone_results, predictor_results, tune_judge
from edgefl_trainer.engine.settings import RunSettings, from_toml
from edgefl_trainer.engine.sites import build_sites
from edgefl_trainer.errors import BackboneError, RunError
from edgefl_trainer.methods.contract import LearnsBackbone, Method, Task
from edgefl_trainer.models.backbones import (
    BACKBONE_FILE,
    architecture_of,
    backbone_bytes,
    is_trained,
    load_backbone,
    weights_of,
)
from edgefl_trainer.models.vit import FrozenViT

SELF_SUPERVISED_TASK = "pixels"
MAX_CONFIG_BYTES = 1 << 20
NOT_COMPARED = {"device"}  # a run may go on elsewhere


def run(settings: RunSettings, folder: Path, *, resume: bool) -> dict[str, Any]:
    """Run a method and leave its results in `folder`.

    Args:
        settings: resolved settings.
        folder: run directory.
        resume: go on with the run that is there.

    Returns:
        The contents of `summary.json`.

    Raises:
        EdgeflError: one sentence about what is wrong and what to do.
    """
    method = settings.build_method()
    claim(folder, settings, resume=resume)
    backbone = load_backbone(settings.backbone, image_px=settings.image_px or None, seed=settings.seed)
    federation = load_data(settings, backbone.spec.image_px)
    task = build_task(settings, method, federation, backbone)
    sites = build_sites(federation, task, backbone, settings, needs_labels=method.needs_labels)
    write_atomic(folder / "environment.json", _json(environment(settings)))
    phases = len(method.phases(settings.rounds))
    with Display(phases, len(sites)) as display:
        engine = LocalEngine(
            method=method,
            task=task,
            sites={name: InProcessSite(method, site) for name, site in sites.items()},
            folder=folder,
            observer=display,
            participation=settings.participation,
            judge=None if isinstance(method, LearnsBackbone) else tune_judge(method, sites),
        )
        final = engine.run()
    started = time.perf_counter()
    results: Mapping[str, Any]
    if isinstance(method, LearnsBackbone):
        results = learned_backbone_results(folder, method, final, federation, sites)
    else:
        save_backbone(folder, backbone)
        results = predictor_results(folder, method, task, final, federation, sites)
    evaluated = time.perf_counter() - started
    summary = {
        "method": settings.method,
        "task": settings.task,
        "seed": settings.seed,
        "rounds": settings.rounds,
        "preset": settings.preset,
        "partition_sha256": federation.partition_sha256,
        **results,
        **traffic(folder),
        "seconds": round(sum(float(line["seconds"]) for line in read_metrics(folder)) + evaluated, 1),
        "state_sha256": final.digest(),
    }
    write_atomic(folder / "summary.json", _json(summary))
    return summary


def claim(folder: Path, settings: RunSettings, *, resume: bool) -> None:
    """Make the run directory ours, or check that the run in it is the same one.

    Raises:
        RunError: the folder holds another run, or one that was not asked to be resumed.
    """
    path = folder / "config.toml"
    if path.exists():
        if not resume:
            raise RunError(f"{folder} already holds a run: add --resume to go on with it, or name another --out.")
        before = RunSettings(**from_toml(path.read_text(), str(path)))
        differing = [
            name
            for name in vars(settings)
            if name not in NOT_COMPARED and getattr(before, name) != getattr(settings, name)
        ]
        if differing:
            name = differing[0]
            raise RunError(
                f"the run in {folder} has {name} = {getattr(before, name)!r}, this command {getattr(settings, name)!r}: "
                "resume with the same settings or name another --out."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, settings.to_toml().encode())


def load_data(settings: RunSettings, image_px: int) -> Federation:
    """The federation that the settings describe."""
    return load_federation(
        settings.data,
        image_px=image_px,
        task=settings.task,
        classes=settings.classes or None,
        seed=settings.seed,
        unlabelled=settings.unlabelled,
        limit=settings.images_per_site or None,
    )


def build_task(settings: RunSettings, method: Method, federation: Federation, backbone: FrozenViT) -> Task:
    """What server and sites agree on.

    Raises:
        BackboneError: a random network would be frozen outside the `tiny` preset.
    """
    trained = is_trained(settings.backbone)
    if method.needs_labels and not trained and settings.preset != "tiny":
        raise BackboneError(
            f"backbone {settings.backbone} is untrained, and a frozen random network learns nothing: give "
            "--backbone run:DIR of a finished `edgefl-train run fedmae`, timm:NAME, or --preset tiny for a trial."
        )
    learns = isinstance(method, LearnsBackbone)
    return Task(
        name=SELF_SUPERVISED_TASK if learns else settings.task,
        classes=federation.classes,
        backbone=backbone.spec,
        rounds=settings.rounds,
        epochs=settings.epochs,
        seed=settings.seed,
        initial=weights_of(backbone.vit) if learns and trained else {},
    )


def save_backbone(folder: Path, backbone: FrozenViT) -> None:
    """Keep the frozen network beside the results, so that they can be scored and exported without its source."""
    if backbone.spec.name.startswith("timm:"):
        return  # positions of timm's networks are learned and their files large: named, not copied
    data = backbone_bytes(
        architecture_of(backbone.spec), weights_of(backbone.vit), self_supervised=backbone.spec.self_supervised
    )
    write_atomic(folder / BACKBONE_FILE, data)


def environment(settings: RunSettings) -> dict[str, Any]:
    """What a reader needs to judge or repeat the run."""
    packages = ("edgefl", "torch", "timm", "numpy", "pillow", "scikit-learn")
    return {
        "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
        "commit": _commit(),
        "seed": settings.seed,
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "threads": torch.get_num_threads(),
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def traffic(folder: Path) -> dict[str, float]:
    """Bytes of payloads: mean over train rounds of the sum over sites, and the sum of all phases."""
    lines = read_metrics(folder)
    rounds = len({line["round"] for line in lines if line["phase"] == "train"}) or 1
    figures: dict[str, float] = {}
    for way in ("up", "down"):
        train = sum(int(line[f"bytes_{way}"]) for line in lines if line["phase"] == "train")
        figures[f"bytes_{way}_per_round"] = round(train / rounds, 1)
        figures[f"bytes_{way}_total"] = sum(int(line[f"bytes_{way}"]) for line in lines)
    return figures


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=False, allow_nan=False).encode() + b"\n"


def _commit() -> str | None:
    """The commit of a source checkout; None for an installed wheel."""
    here = Path(__file__).parent
    found = subprocess.run(  # noqa: S603
        ["git", "-C", str(here), "rev-parse", "HEAD"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    names = [
        line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
    ]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()
