"""Learn, judge and publish the backbone that others use, `backbones/derm-vit-tiny-84.safetensors`, as one command.

    make backbone DATA=manifest:fed_isic2019_84.zip ROUNDS=30

1. `edgefl-train run fedmae` over the sites of the data (it goes on where it was stopped; a finished RUN is taken as it
   is, so a longer run or one on other machines can be published);
2. the encoder as float16, with its digest;
3. class-balanced linear probes from `train` to `tune` rows, of each site and pooled: this encoder, the same in float32,
   24 colour statistics, and an untrained network of its shape;
4. the figures as `derm-vit-tiny-84.json` and the model card, which is written from them.
"""

import json
import sys
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from string import Template
from typing import Any

import click

sys.path.append(str(Path(__file__).parents[1]))

NAME = "derm-vit-tiny-84"
TASKS = ("nevus", "all")
CENTRES = {"bcn", "msk", "rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias"}  # what the card's text is about
SHOWN = {
    "backbone.mean": "**patches**",
    "backbone.cls": "class token",
    "colours": "24 colour statistics",
    "random.mean": "untrained, patches",
    "random.cls": "untrained, class token",
}
SELECTED = "--select tune"
LABELS_CHOSE = "labels of `train` and `tune` rows were read to choose the round, by its probe"
TASK_WORDS = {"nevus": "Nevus against the rest", "all": "Eight classes"}


@click.command(help=__doc__)
@click.option("--data", required=True, metavar="SPEC", help="Data of the federation; see docs/reference/data.md.")
@click.option(
    "--run", type=click.Path(path_type=Path), default=Path("runs") / NAME, metavar="DIR", help="Run directory."
)
@click.option("--rounds", default=30, show_default=True, metavar="N", help="Rounds of one epoch each.")
@click.option("--start", default="vit:192x12/12", show_default=True, metavar="NAME", help="Network to start from.")
@click.option(
    "--select",
    type=click.Choice(["last", "tune"]),
    default="last",
    show_default=True,
    help="Round that is kept: the last, for which no label is read, or the best by probes on tune rows.",
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), default=Path("backbones"), metavar="DIR", help="Where to."
)
def main(data: str, run: Path, rounds: int, start: str, select: str, out: Path) -> None:
    from edgefl_protocol.errors import EdgeflError

    try:
        make(data, run, rounds, start, select, out)
    except EdgeflError as error:
        raise click.ClickException(str(error)) from error


def make(data: str, run: Path, rounds: int, start: str, select: str, out: Path) -> None:
    """Learn where RUN is not finished, then publish it."""
    from edgefl_protocol.durable import write_atomic

    if not (run / "summary.json").exists():
        learn(data, run, rounds, start, select)
    file = export(run)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / f"{NAME}.safetensors", file)
    record = describe(run, out / f"{NAME}.safetensors") | {"probe": judge(run, out / f"{NAME}.safetensors", data)}
    publish(record, out)
    click.echo(card(record))
    if set(record["images"]) != CENTRES:
        found = ", ".join(record["images"])
        click.echo(f"warning: the card speaks of Fed-ISIC2019's six centres, this run has {found}: edit it.", err=True)


def learn(data: str, run: Path, rounds: int, start: str, select: str) -> None:
    """FedMAE over all images of the sites, and those of no site, dealt to them."""
    from edgefl_trainer.engine.run import run as run_federation
    from edgefl_trainer.engine.settings import resolve

    flags = {"data": (data,), "task": "nevus", "rounds": rounds, "images_per_site": 0, "autocast": "bf16"}
    settings = resolve("fedmae", {**flags, "backbone": start, "preset": "bench84", "select": select}, None, ())
    run_federation(settings, run, resume=run.exists())


def export(run: Path) -> bytes:
    """The encoder of a finished run as float16."""
    from edgefl_trainer.models.backbones import backbone_bytes, load_backbone, weights_of
    from edgefl_trainer.models.vit import FrozenViT

    backbone = load_backbone(f"run:{run}")
    network = backbone.vit if isinstance(backbone, FrozenViT) else backbone.network
    return backbone_bytes(backbone.spec, weights_of(network), self_supervised=True, half=True)


def judge(run: Path, file: Path, data: str) -> dict[str, Any]:
    """The probes, and how far float16 moves the largest of their figures."""
    from benchmarks.federation.backbone_probes import compare

    from edgefl_trainer.data import load_federation
    from edgefl_trainer.engine.sites import choose_device
    from edgefl_trainer.errors import SettingError
    from edgefl_trainer.models.backbones import load_backbone
    from edgefl_trainer.models.spec import ViTSpec

    half, full = load_backbone(f"file:{file}"), load_backbone(f"run:{run}")
    spec = half.spec
    if not isinstance(spec, ViTSpec):
        raise SettingError(f"{run} learned a convolutional network; this recipe is of vision transformers.")
    untrained = load_backbone(f"vit:{spec.width}x{spec.depth}/{spec.patch}", image_px=spec.image_px, seed=0)
    networks = {"backbone": half, "float32": full, "random": untrained}
    federations = {task: load_federation([data], image_px=spec.image_px, task=task, seed=0) for task in TASKS}
    return compare(networks, federations, choose_device("auto"))


def describe(run: Path, file: Path) -> dict[str, Any]:
    """What the file is, and where it comes from; no path of this machine."""
    from edgefl_trainer.models.backbones import load_backbone

    summary = json.loads((run / "summary.json").read_text())
    environment = json.loads((run / "environment.json").read_text())
    runs = runs_behind(run)
    places = [f"runs/{NAME}-{number}" for number in range(1, len(runs))] + [f"runs/{NAME}"]
    history = [_learning(*one) for one in zip(runs, [None, *places], places, strict=False)]
    return {
        "name": NAME,
        "sha256": load_backbone(f"file:{file}").spec.sha256,
        "bytes": file.stat().st_size,
        "weights": sum(array.size for array in _arrays(file).values()),
        "dtype": "float16",
        "learned": history,
        "epochs": sum(one["rounds"] * one["epochs"] for one in history),
        "images": {name: site["n_train"] for name, site in sorted(summary["sites"].items())},
        "commit": environment["commit"],
        "machine": environment["machine"]["cuda"] or environment["machine"]["processor"],
        "measured": date.today().isoformat(),
    }


def runs_behind(run: Path) -> list[Path]:
    """The runs that made this encoder, first to last: one may have started from another's."""
    start = _settings(run)["backbone"]
    before = Path(start.removeprefix("run:"))
    earlier = runs_behind(before) if start.startswith("run:") and (before / "config.toml").exists() else []
    return [*earlier, run]


def publish(record: Mapping[str, Any], out: Path) -> None:
    """Write the record and the card."""
    from edgefl_protocol.durable import write_atomic

    write_atomic(out / f"{NAME}.json", json.dumps(record, indent=1).encode() + b"\n")
    write_atomic(out / f"{NAME}.md", card(record).encode())


def card(record: Mapping[str, Any]) -> str:
    """The model card."""
    from benchmarks.federation.backbone_probes import probe_table

    nevus = record["probe"]["nevus"]
    shown = {"best": "backbone.mean", "colours": "colours", "untrained": "random.mean"}
    figures = {
        f"{word}_{part}": f"{nevus[row][part]:.3f}" for word, row in shown.items() for part in ("mean", "pooled")
    }
    best = nevus["backbone.mean"]["sites"]
    above = {
        f"over_{word}": sum(best[site] > nevus[shown[word]]["sites"][site] for site in best)
        for word in ("colours", "untrained")
    }
    values = {
        **record,
        **figures,
        **above,
        "centres": len(best),
        "megabytes": f"{record['bytes'] / 1e6:.1f}",
        "millions": f"{record['weights'] / 1e6:.1f}",
        "total": f"{sum(record['images'].values()):,}",
        "labels": LABELS_CHOSE if any(SELECTED in one["command"] for one in record["learned"]) else "no label was read",
        "commands": "\n".join(f"    {one['command']}" for one in record["learned"]),
        "hours": f"{sum(one['hours'] for one in record['learned']):.1f}",
        "tables": "\n\n".join(probe_table(TASK_WORDS[task], SHOWN, record["probe"][task]) for task in TASKS),
        "drift": f"{_drift(record['probe']):.3f}",
    }
    return Template((Path(__file__).parent / "derm_backbone_card.md").read_text()).substitute(values)


def _drift(probe: Mapping[str, Any]) -> float:
    """Largest difference that float16 makes in a mean or pooled figure."""
    pairs = ((rows[f"backbone.{name}"], rows[f"float32.{name}"]) for rows in probe.values() for name in ("cls", "mean"))
    return float(max(abs(half[key] - full[key]) for half, full in pairs for key in ("mean", "pooled")))


def _learning(run: Path, before: str | None, place: str) -> dict[str, Any]:
    """One run as a command that another could give, with names of folders that are the same everywhere.

    Args:
        run: its folder.
        before: where that command finds the run it starts from, if there is one.
        place: where it leaves its own.
    """
    settings = _settings(run)
    summary = json.loads((run / "summary.json").read_text())
    data = [
        f"{kind}:$EDGEFL_DATA/{Path(rest).name}" for kind, _, rest in (one.partition(":") for one in settings["data"])
    ]
    hyper = [f"--set {name}={value}" for name, value in settings["hyper"].items()]
    start = f"run:{before or 'one-that-is-gone'}" if settings["backbone"].startswith("run:") else settings["backbone"]
    words = ["edgefl-train run", settings["method"], *(f"--data {one}" for one in data), f"--task {settings['task']}"]
    words += [f"--preset {settings['preset']}", f"--backbone {start}", f"--rounds {settings['rounds']}"]
    words += [f"--epochs {settings['epochs']}", f"--images-per-site {settings['images_per_site']}"]
    words += [SELECTED] if settings.get("select") == "tune" else []
    words += [f"--autocast {settings['autocast']}", f"--seed {settings['seed']}", *hyper]
    words += [f"--out {place}"]
    return {
        "command": " ".join(words),
        "rounds": summary.get("selected_round", settings["rounds"]),
        "epochs": settings["epochs"],
        "hours": round(summary["seconds"] / 3600, 2),
        "state_sha256": summary["state_sha256"],
    }


def _settings(run: Path) -> dict[str, Any]:
    return tomllib.loads((run / "config.toml").read_text())


def _arrays(file: Path) -> Mapping[str, Any]:
    from edgefl_protocol.tensors import read_tensors

    return read_tensors(file.read_bytes(), max_bytes=1 << 30)[0]


if __name__ == "__main__":
    main()
