"""Speed, memory and agreement of a score on a device: ViT-S/16 at 224 px, rollout and evidence included.

One run, one process, a fixed number of threads. The ways stand in turn, in blocks of warm repeats; printed are medians
of block medians, as ratios. onnxruntime's threads are those of a device in every way alike: they wait up to 50 µs for
the next part of a run, and not between runs (`edgefl_client.runtime`); PyTorch's are as PyTorch sets them:

    PyTorch eager           the same model, float32
    linear layers, fp32     the network's linear layers alone as one graph of Gemm nodes: the floor, with all
                            197 tokens in the last block too, where ours computes the class token alone
    linear layers, int8     the same with 8 bits per weight, in two forms; the faster one is the floor
    ours                    what `edgefl-export bundle` puts into a bundle, fused fp32 and int8; and the plain form

Weights are random: times do not depend on them. Then: pictures a second in batches; peak memory of `edgefl score` on a
photo of 12 megapixels, as VmHWM of a fresh process. Targets stand beside the figures; status 1 where one is missed.
Without VNNI, int8 is printed and not judged. Agreement on real pictures: `int8_agreement.py`.

    python -m benchmarks.device.device_scoring --write docs/results/device.md
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

Way = Callable[[], object]
DEPTH, WIDTH, TOKENS, PIXELS = 12, 384, 197, 768
IMAGE_PX = 224
MEGAPIXELS_12 = (4000, 3000)
MARKS = ("<!-- scoring -->", "<!-- end of scoring -->")
HWM = (
    "import atexit, sys; peak = lambda: [line for line in open('/proc/self/status') if line.startswith('VmHWM')][0]; "
    "atexit.register(lambda: print(peak(), file=sys.stderr)); "
    "from edgefl_client.cli import main; sys.argv[0] = 'edgefl'; main()"
)


@dataclass(frozen=True)
class Target:
    """One judged figure."""

    what: str
    found: float
    allowed: float
    judged: bool = True

    @property
    def line(self) -> str:
        """As a row of a table."""
        verdict = "not judged" if not self.judged else "met" if self.found <= self.allowed else "MISSED"
        return f"| {self.what} | {self.found:.3g} | ≤ {self.allowed:g} | {verdict} |"

    @property
    def missed(self) -> bool:
        """Judged, and beyond what is allowed."""
        return self.judged and not self.found <= self.allowed


@click.command()
@click.option("--threads", default=2, show_default=True, metavar="N", help="Of every way.")
@click.option("--blocks", default=7, show_default=True, metavar="N", help="Blocks of each way, in turn.")
@click.option("--repeats", default=7, show_default=True, metavar="N", help="Measured runs of a block, after two warm.")
@click.option("--write", type=click.Path(path_type=Path), metavar="FILE", help="Put the tables into this page as well.")
@click.option(
    "--graphs",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep the graphs, and take them from there.",
)
def main(threads: int, blocks: int, repeats: int, write: Path | None, folder: Path | None) -> None:
    """Measure, print, and end with 1 where a target is missed."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import torch

    torch.set_num_threads(threads)
    from edgefl_protocol.processor import has_vnni

    vnni = has_vnni()
    graphs = kept(folder, "ours", our_graphs)
    every = {**graphs, **kept(folder, "floors", floors)}
    ways = {name: session_way(graph, threads, 1) for name, graph in every.items()}
    ways["PyTorch eager, fp32"] = torch_way(1)
    times = measure(ways, blocks, repeats)
    lines, targets = speed_tables(times, vnni)
    lines += batch_table(graphs, threads)
    found, memory = memory_table(graphs)
    lines += found
    targets += memory
    table = ["", "| target | found | allowed | |", "| --- | ---: | ---: | --- |", *(target.line for target in targets)]
    text = "\n".join([machine(threads, blocks, repeats, vnni), "", *lines, *table])
    print(text)
    if write is not None:
        replace_section(write, text)
    sys.exit(any(target.missed for target in targets))


def kept(folder: Path | None, kind: str, make: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
    """Graphs by name, from the folder where it has them: making them takes minutes."""
    place = None if folder is None else folder / kind
    if place is not None and place.is_dir():
        return {path.stem: path.read_bytes() for path in sorted(place.glob("*.onnx"))}
    made = make()
    if place is not None:
        place.mkdir(parents=True)
        for name, graph in made.items():
            (place / f"{name}.onnx").write_bytes(graph)
    return made


def model() -> Any:
    """The random ViT-S/16 of `score_startup`, with biases: a fresh network has none, and none would be computed."""
    import torch

    from benchmarks.device.score_startup import vit_small

    made = vit_small()
    draw = torch.Generator().manual_seed(1)
    for name, value in made.predictor.score_module.vit.named_parameters():
        if name.endswith("bias"):
            value.data.normal_(0, 0.02, generator=draw)
    return made


def our_graphs() -> dict[str, bytes]:
    """Plain, fused and 8-bit form of one model."""
    from edgefl_export.graphs.score import export_score_graph
    from edgefl_export.int8.quantise import Quantiser
    from edgefl_export.parity.score_parity import parity_images

    predictor = model().predictor
    module = predictor.score_module.eval()
    fused = export_score_graph(module, predictor.tensors, "fused").onnx
    return {
        "ours, plain fp32": export_score_graph(module, predictor.tensors, "plain").onnx,
        "ours, fp32": fused,
        "ours, int8": Quantiser(fused, predictor.tensors, parity_images(IMAGE_PX, 16)).build(),
    }


def floors() -> dict[str, bytes]:
    """The linear layers alone, with biases: patches, then 12 times query-key-value, projection and the two of MLP."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from edgefl_export.int8.quantise import Quantiser

    gemm = linear_graph("Gemm")
    static = Quantiser(gemm, {}, np.random.default_rng(0).standard_normal((8 * TOKENS, PIXELS), np.float32))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "floor.onnx"
        path.write_bytes(linear_graph("MatMul"))
        quantize_dynamic(path, Path(folder) / "int8.onnx", per_channel=True, weight_type=QuantType.QInt8)
        dynamic = (Path(folder) / "int8.onnx").read_bytes()
    return {
        "linear layers, fp32": gemm,
        "linear layers, int8, fixed ranges": static.build(),
        "linear layers, int8, dynamic": dynamic,
    }


def linear_graph(operator: str) -> bytes:
    """One graph of linear layers, on the 197 tokens of one picture."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    draw = np.random.default_rng(0)
    nodes, tensors, outputs = [], [], []

    def linear(x: str, name: str, rows: int, columns: int) -> str:
        weight = draw.standard_normal((rows, columns), np.float32) * np.float32(0.05)
        tensors.append(numpy_helper.from_array(weight, f"{name}.weight"))
        tensors.append(numpy_helper.from_array(draw.standard_normal(columns, np.float32), f"{name}.bias"))
        if operator == "Gemm":
            nodes.append(helper.make_node("Gemm", [x, f"{name}.weight", f"{name}.bias"], [name], name=name))
        else:
            nodes.append(helper.make_node("MatMul", [x, f"{name}.weight"], [f"{name}.product"], name=name))
            nodes.append(helper.make_node("Add", [f"{name}.product", f"{name}.bias"], [name], name=f"{name}.add"))
        return name

    x = linear("image", "patches", PIXELS, WIDTH)
    for block in range(DEPTH):
        outputs.append(linear(x, f"blocks.{block}.qkv", WIDTH, 3 * WIDTH))
        x = linear(x, f"blocks.{block}.proj", WIDTH, WIDTH)
        x = linear(x, f"blocks.{block}.fc1", WIDTH, 4 * WIDTH)
        x = linear(x, f"blocks.{block}.fc2", 4 * WIDTH, WIDTH)
    outputs.append(x)
    graph = helper.make_graph(
        nodes,
        "floor",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["rows", PIXELS])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", None]) for name in outputs],
        tensors,
    )
    made: bytes = helper.make_model(
        graph, opset_imports=[onnx.OperatorSetIdProto(version=21)], ir_version=10
    ).SerializeToString()
    return made


def session_way(graph: bytes, threads: int, batch: int) -> Way:
    """One run of a graph, as a device runs it."""
    from edgefl_client.runtime import load_graph

    session = load_graph(graph, threads)
    draw = np.random.default_rng(0)
    tensors = model_tensors()
    feeds: dict[str, Any] = {}
    for value in session.get_inputs():
        if value.name != "image":
            feeds[value.name] = tensors[value.name]
        elif value.type == "tensor(uint8)":
            feeds["image"] = draw.integers(0, 256, (batch, IMAGE_PX, IMAGE_PX, 3), np.uint8)
        else:
            feeds["image"] = draw.standard_normal((batch * TOKENS, PIXELS), np.float32)
    return lambda: session.run(None, feeds)


def model_tensors() -> Mapping[str, Any]:
    from benchmarks.device.score_startup import predictor

    return dict(predictor().tensors)


def torch_way(batch: int) -> Way:
    """One score of the trainer's module."""
    import torch

    predictor = model().predictor
    module = predictor.score_module.eval()
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in predictor.tensors.items()}
    image = torch.randint(0, 256, (batch, IMAGE_PX, IMAGE_PX, 3), dtype=torch.uint8)

    def run() -> object:
        with torch.inference_mode():
            return module(image, tensors)

    return run


def measure(ways: Mapping[str, Way], blocks: int, repeats: int) -> dict[str, float]:
    """Median of block medians in milliseconds, blocks in turn."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(blocks):
        for name, way in ways.items():
            way()
            way()
            marks = []
            for _ in range(repeats):
                started = time.perf_counter()
                way()
                marks.append((time.perf_counter() - started) * 1e3)
            found[name].append(statistics.median(marks))
    return {name: statistics.median(times) for name, times in found.items()}


def speed_tables(times: Mapping[str, float], vnni: bool) -> tuple[list[str], list[Target]]:
    """The table of times, and the judged ratios."""
    floor = times["linear layers, fp32"]
    eager = times["PyTorch eager, fp32"]
    floor8 = min(time for name, time in times.items() if name.startswith("linear layers, int8"))
    lines = ["| way | ms | × PyTorch | × its floor |", "| --- | ---: | ---: | ---: |"]
    for name, ms in sorted(times.items(), key=lambda pair: -pair[1]):
        base = floor8 if "int8" in name else floor
        lines.append(f"| {name} | {ms:.1f} | {ms / eager:.2f} | {ms / base:.2f} |")
    fp32, int8 = times["ours, fp32"], times["ours, int8"]
    return lines, [
        Target("fp32, times the fp32 floor", fp32 / floor, 1.30),
        Target("int8, times PyTorch eager fp32", int8 / eager, 0.38, vnni),
        Target("int8, times the int8 floor", int8 / floor8, 2.2, vnni),
    ]


def batch_table(graphs: Mapping[str, bytes], threads: int) -> list[str]:
    """Pictures a second in batches."""
    lines = ["", "| pictures a second, in batches of | 1 | 8 | 32 |", "| --- | ---: | ---: | ---: |"]
    for name in ("ours, fp32", "ours, int8"):
        sizes = (1, 8, 32)
        ways = {str(size): session_way(graphs[name], threads, size) for size in sizes}
        times = measure(ways, 3, 2)
        rates = [size * 1e3 / times[str(size)] for size in sizes]
        lines.append(f"| {name} | " + " | ".join(f"{rate:.1f}" for rate in rates) + " |")
    return lines


def memory_table(graphs: Mapping[str, bytes]) -> tuple[list[str], list[Target]]:
    """VmHWM of `edgefl score` on a photo of 12 megapixels."""
    lines = ["", "| peak memory of `edgefl score`, 12-megapixel JPEG | MB |", "| --- | ---: |"]
    targets = []
    with tempfile.TemporaryDirectory() as folder:
        photo = camera_photo(Path(folder) / "photo.jpg")
        for name, allowed in (("ours, fp32", 400), ("ours, int8", 250)):
            peak = statistics.median(peak_mb(Path(folder), graphs[name], photo) for _ in range(3))
            lines.append(f"| {name} | {peak:.0f} |")
            targets.append(Target(f"{name}: peak memory in MB", peak, allowed))
    return lines, targets


def camera_photo(path: Path) -> Path:
    """A drawn lesion with grain, 4000 × 3000 px."""
    from PIL import Image

    from edgefl_client.doctor.drawn_picture import drawn_picture

    picture = drawn_picture(*MEGAPIXELS_12[::-1])
    grain = np.random.default_rng(0).integers(-12, 13, (*picture.shape[:2], 1), np.int16)
    Image.fromarray(np.clip(picture + grain, 0, 255).astype(np.uint8)).save(path, quality=92)
    return path


def peak_mb(folder: Path, graph: bytes, photo: Path) -> float:
    """Peak memory of one fresh process that scores the photo, 10⁶ bytes."""
    from edgefl_protocol.bundle import BundleFields, Labels, build_bundle
    from edgefl_protocol.envelopes.keys import generate_signing_key
    from edgefl_protocol.strict_json import write_json
    from edgefl_protocol.tensors import write_tensors

    site, key = model(), generate_signing_key()
    files = {
        "score.onnx": graph,
        "weights.safetensors": write_tensors(dict(site.predictor.tensors), {}),
        "preprocess.json": write_json(site.preprocess.to_json()),
        "labels.json": Labels(site.classes, site.predictor.seen, site.info).to_bytes(),
        "card.json": site.card.to_bytes(),
    }
    fields = BundleFields(federation=None, line="main", task=site.task, version=1, created_ms=int(time.time() * 1000))
    (folder / "m.edgefl").write_bytes(build_bundle(files, fields, [key]))
    (folder / "m.pub").write_text(key.public.hex())
    command = [sys.executable, "-c", HWM, "--home", str(folder / "home"), "score", str(photo), "--json"]
    command += ["--model", str(folder / "m.edgefl"), "--trust", str(folder / "m.pub")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    if "probabilities" not in json.loads(done.stdout):
        raise SystemExit(f"the photo was not scored: {done.stdout}")
    return next(int(line.split()[1]) * 1024 / 1e6 for line in done.stderr.splitlines() if line.startswith("VmHWM"))


def machine(threads: int, blocks: int, repeats: int, vnni: bool) -> str:
    """What was measured on, in one paragraph."""
    import onnxruntime
    import torch

    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return (
        f"{time.strftime('%Y-%m-%d')}: {cpu}, {os.cpu_count()} processors, {'with' if vnni else 'without'} VNNI, "
        f"{platform.system()} {platform.release().split('-')[0]}; Python {platform.python_version()}, onnxruntime "
        f"{onnxruntime.__version__}, PyTorch {torch.__version__}; {threads} threads, {blocks} blocks of {repeats} "
        f"repeats in turn, load average {os.getloadavg()[0]:.1f}."
    )


def replace_section(path: Path, text: str, marks: tuple[str, str] = MARKS) -> None:
    """Put the tables between their marks."""
    page = path.read_text()
    before, _, rest = page.partition(marks[0])
    _, found, after = rest.partition(marks[1])
    if not found:
        raise SystemExit(f"{path} has no marks {marks[0]} and {marks[1]}")
    path.write_text(f"{before}{marks[0]}\n\n{text}\n\n{marks[1]}{after}")


if __name__ == "__main__":
    main()
