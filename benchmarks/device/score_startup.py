"""First score of a cold process against the least any onnxruntime program must do.

Builds a bundle around a random ViT-S/16 at 224 px, then starts fresh processes in turn: one imports numpy and
onnxruntime and loads the bundle's graph; the other is `edgefl score` on a drawn photograph, which verifies the
signature, reads every member, loads the graph and scores. Prints the median of each in seconds and their ratio; the
target is 1.6 at most. Processor seconds stand beside, which other work on the machine disturbs less.

Both processes find the bytecode of every module they import, as after `pip install`: the first turn compiles it into a
folder of its own, fills the disk cache, and is not counted.

    python -m benchmarks.device.score_startup [--repeats N] [--json]
"""

import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from edgefl_export.bundles.assemble import SiteModel
    from edgefl_trainer.contract import Predictor

TARGET = 1.6
CLASSES = ("AK", "BCC", "BKL", "DF", "MEL", "NV", "SCC", "VASC")
HALF = (0.5, 0.5, 0.5)

BASELINE = "import sys, numpy, onnxruntime; onnxruntime.InferenceSession(open(sys.argv[1], 'rb').read())"
SCORE = "import sys; from edgefl_client.cli import main; sys.argv[0] = 'edgefl'; main()"


def predictor() -> "Predictor":
    """A ViT-S/16 with prompts and an evidential head, all random."""
    import torch
    from timm.models.vision_transformer import VisionTransformer

    from edgefl_protocol.rules.defaults import usual_prompt_length
    from edgefl_trainer.contract import Predictor
    from edgefl_trainer.models.head import init_head
    from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions
    from edgefl_trainer.models.spec import ViTSpec
    from edgefl_trainer.models.vit import FrozenViT, init_prompts

    spec = ViTSpec(
        name="vit-s/16", image_px=224, patch=16, depth=12, heads=6, width=384, mean=HALF, std=HALF,
        self_supervised=False, sha256="0" * 64,
    )  # fmt: skip
    torch.manual_seed(0)
    vit = FrozenViT(VisionTransformer(embed_dim=384, depth=12, num_heads=6, num_classes=0), spec)
    draw = torch.Generator().manual_seed(0)
    length = usual_prompt_length(spec.tokens)
    weight, bias = init_head(len(CLASSES), spec.width, draw)
    tensors = {
        "prompts.b": init_prompts(spec, 3, length, "uniform", draw),
        "prompts.t": init_prompts(spec, 9, length, "uniform", draw),
        "head.weight": weight,
        "head.bias": bias,
        "prior": torch.ones(len(CLASSES)),
        "temperature": torch.ones(()),
    }
    values = {name: value.numpy() for name, value in tensors.items()}
    return Predictor(ScoreModule(vit, ScoreOptions()), values, (True,) * len(CLASSES))


def vit_small() -> "SiteModel":
    from edgefl_export.bundles.assemble import SiteModel
    from edgefl_protocol.bundle import Card
    from edgefl_protocol.pictures.preprocess import Preprocess

    card = Card(
        intended_use="A benchmark.", method="none", site=None, sites={}, metrics={}, temperature=1.0, refer_above=None,
        backbone="vit:384x12/16, random", licence_note="None.",
    )  # fmt: skip
    return SiteModel(
        predictor=predictor(),
        classes=CLASSES,
        info={},
        preprocess=Preprocess(size=224, mean=HALF, std=HALF),
        card=card,
        task="all",
    )


def prepare(folder: Path) -> None:
    """Bundle, graph, key and photograph."""
    import numpy as np
    from PIL import Image

    from edgefl_export.bundles.assemble import build_members
    from edgefl_protocol.bundle import BundleFields, build_bundle
    from edgefl_protocol.envelopes.keys import generate_signing_key

    members, key = build_members(vit_small()), generate_signing_key()
    fields = BundleFields(federation=None, line="benchmark", task="all", version=1, created_ms=int(time.time() * 1000))
    (folder / "model.edgefl").write_bytes(build_bundle(members.files, fields, [key]))
    (folder / "score.onnx").write_bytes(members.files["score.onnx"])
    (folder / "signing.pub").write_text(key.public.hex())
    photo = Image.fromarray(np.random.default_rng(0).integers(90, 220, (600, 800, 3), np.uint8))
    buffer = io.BytesIO()
    photo.save(buffer, "JPEG", quality=90)
    (folder / "photo.jpg").write_bytes(buffer.getvalue())


def seconds(command: list[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Elapsed and processor seconds of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    elapsed = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(folder: Path, repeats: int) -> dict[str, float]:
    baseline = [sys.executable, "-c", BASELINE, str(folder / "score.onnx")]
    score = [sys.executable, "-c", SCORE, "score", str(folder / "photo.jpg"), "--model", str(folder / "model.edgefl")]
    score += ["--trust", str(folder / "signing.pub"), "--json", "--home", str(folder / "home")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    times: dict[str, list[tuple[float, float]]] = {"baseline": [], "score": []}
    for turn in range(repeats + 1):
        for name, command in (("baseline", baseline), ("score", score)):
            taken = seconds(command, environment)
            if turn:  # the first turn fills the disk cache and writes the bytecode
                times[name].append(taken)
    figures: dict[str, float] = {}
    for column, unit in enumerate(("seconds", "cpu_seconds")):
        medians = {name: statistics.median(pair[column] for pair in pairs) for name, pairs in times.items()}
        figures |= {f"{name}_{unit}": value for name, value in medians.items()}
        figures["ratio" if column == 0 else "cpu_ratio"] = medians["score"] / medians["baseline"]
    return {**figures, "target": TARGET}


@click.command()
@click.option(
    "--repeats", type=click.IntRange(1), default=7, show_default=True, metavar="N", help="Processes of each kind."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
def main(repeats: int, as_json: bool) -> None:
    """Measure the first score of a cold process; ends with status 1 where the target is missed."""
    with tempfile.TemporaryDirectory(prefix="edgefl-benchmark-") as name:
        prepare(Path(name))
        figures = measure(Path(name), repeats)
    click.echo(json.dumps(figures) if as_json else table(figures))
    if figures["ratio"] > TARGET:
        sys.exit(1)


def table(figures: Mapping[str, float]) -> str:
    """Return one line per kind of process for people to read."""
    kinds = (("import numpy + onnxruntime, load the graph", "baseline"), ("edgefl score, one picture", "score"))
    lines = [
        f"{label:<44}{figures[f'{name}_seconds']:.3f} s, {figures[f'{name}_cpu_seconds']:.3f} s of processor"
        for label, name in kinds
    ]
    ratios = f"ratio {figures['ratio']:.2f}, of processor time {figures['cpu_ratio']:.2f} (target at most {TARGET})"
    return "\n".join([*lines, ratios])


if __name__ == "__main__":
    main()
