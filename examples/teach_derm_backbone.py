"""Teach, judge and publish the second backbone, `backbones/derm-vit-taught-84.safetensors`, as one command.

    python examples/teach_derm_backbone.py --data manifest:fed_isic2019_84.zip --folder runs/taught

1. `taught_network`: from `derm-vit-tiny-84`, site by site, without a label; a round that lies in FOLDER is kept;
2. class-balanced linear probes from `train` to `tune` rows, of each site and pooled: of the student, of the network
   that it began with, of the teacher, of 24 colour statistics, and of a network that a federation tuned with its
   labels (`--tuned RUN`, a finished `edgefl-train run finetune` whose network all sites share);
3. the student as float16, the record as `derm-vit-taught-84.json`, and the model card, written from it.
"""

import json
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from string import Template
from typing import Any

import click

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

NAME, START = "derm-vit-taught-84", "derm-vit-tiny-84"
TASKS = {"nevus": "Nevus against the rest", "all": "Eight diagnoses"}
ROWS = {
    "colours": "24 colour statistics",
    "start.mean": f"`{START}`, patches",
    "start.cls": f"`{START}`, class token",
    "tuned.mean": f"`{START}` tuned with labels, patches",
    "tuned.cls": f"`{START}` tuned with labels, class token",
    "taught.mean": "**taught**, patches",
    "taught.cls": "taught, class token",
    "teacher.pooled": "the teacher, at 112 px",
}


@click.command(help=__doc__)
@click.option("--data", required=True, metavar="SPEC", help="Data of the federation; see docs/reference/data.md.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Where rounds lie.")
@click.option("--rounds", default=4, show_default=True, metavar="N", help="Rounds of one epoch each.")
@click.option("--tuned", type=click.Path(path_type=Path, exists=True), metavar="RUN", help="A run to probe beside it.")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), default=Path("backbones"), metavar="DIR", help="Where to."
)
def main(data: str, folder: Path, rounds: int, tuned: Path | None, out: Path) -> None:
    from edgefl_protocol.durable import write_atomic
    from edgefl_protocol.errors import EdgeflError

    try:
        student = taught(data, folder, rounds)
        networks = {"taught": student, **({"tuned": network_of(tuned)} if tuned else {})}
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / f"{NAME}.safetensors", student.read_bytes())
        record = describe(out / f"{NAME}.safetensors", rounds, beside=tuned is not None) | {
            "probe": judge(data, networks)
        }
        write_atomic(out / f"{NAME}.json", json.dumps(record, indent=1).encode() + b"\n")
        write_atomic(out / f"{NAME}.md", card(record).encode())
    except EdgeflError as error:
        raise click.ClickException(str(error)) from error
    click.echo(card(record))


def taught(data: str, folder: Path, rounds: int) -> Path:
    """The file of the student, taught where FOLDER has it not."""
    from edgefl_trainer.data import load_federation
    from taught_network import teach

    folder.mkdir(parents=True, exist_ok=True)
    teach(load_federation([data], image_px=84, task="nevus", seed=0, unlabelled="spread"), START, rounds, 0, folder)
    return folder / f"round-{rounds:02}.safetensors"


def network_of(run: Path) -> Path:
    """The file of the network that all sites of a fine-tuning share."""
    from edgefl_protocol import digest
    from edgefl_protocol.durable import write_atomic
    from edgefl_trainer.engine.models import open_run
    from edgefl_trainer.errors import RunError
    from edgefl_trainer.models.backbones import backbone_bytes

    opened = open_run(run)
    found = {digest(one.network): one.network for one in map(opened.predictor, opened.sites)}
    if len(found) != 1 or not all(found.values()):
        raise RunError(f"the sites of {run} learned no network that all share: name a federated fine-tuning.")
    file = run / "network.safetensors"
    write_atomic(file, backbone_bytes(opened.backbone.spec, *found.values(), self_supervised=False, half=True))
    return file


def judge(data: str, networks: Mapping[str, Path]) -> dict[str, Any]:
    """The probes; the teacher sees pictures of 112 px, as it did when it taught."""
    from benchmarks.federation.backbone_probes import compare

    from edgefl_trainer.data import load_federation
    from edgefl_trainer.engine.sites import choose_device
    from edgefl_trainer.models.backbones import load_backbone
    from taught_network import TEACHER, TEACHER_PX

    device, found = choose_device("auto"), dict[str, Any]()
    small = {"start": load_backbone(START), **{name: load_backbone(f"file:{file}") for name, file in networks.items()}}
    for px, shown in ((84, small), (TEACHER_PX, {"teacher": load_backbone(TEACHER, image_px=TEACHER_PX)})):
        federations = {task: load_federation([data], image_px=px, task=task, seed=0) for task in TASKS}
        for task, rows in compare(shown, federations, device).items():
            found[task] = rows | found.get(task, {})  # the colours of 84 px stay
    return found


def describe(file: Path, rounds: int, *, beside: bool) -> dict[str, Any]:
    """What the file is, and where it comes from; no path of this machine."""
    from edgefl_trainer.engine.sites import choose_device
    from edgefl_trainer.environment import environment
    from edgefl_trainer.models.backbones import load_backbone

    here = environment(seed=0, device=choose_device("auto"))
    return {
        "name": NAME,
        "sha256": load_backbone(f"file:{file}").spec.sha256,
        "bytes": file.stat().st_size,
        "dtype": "float16",
        "command": f"python examples/teach_derm_backbone.py --data manifest:$EDGEFL_DATA/fed_isic2019_84.zip "
        f"--folder runs/taught --rounds {rounds}{' --tuned runs/tuned' if beside else ''}",
        "commit": here["commit"],
        "machine": here["machine"]["cuda"] or here["machine"]["processor"],
        "measured": date.today().isoformat(),
    }


def card(record: Mapping[str, Any]) -> str:
    """The model card."""
    from benchmarks.federation.backbone_probes import probe_table

    tables = "\n\n".join(probe_table(TASKS[task], ROWS, probes) for task, probes in record["probe"].items())
    values = {**record, "tables": tables, "megabytes": f"{record['bytes'] / 1e6:.1f}"}
    for task, probes in record["probe"].items():
        for row in ("start", "taught"):
            values |= {f"{task}_{row}_{part}": f"{probes[f'{row}.mean'][part]:.3f}" for part in ("mean", "pooled")}
    return Template((Path(__file__).parent / "derm_taught_card.md").read_text()).substitute(values)


if __name__ == "__main__":
    main()
