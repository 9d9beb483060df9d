"""What a card makes of it, for FedEvPrompt, FedMAE and FedCLF: images a second, memory of a step, several workers.

One command runs the three step benchmarks on the card, one after the other, each beside its plain loop: their losses
are compared before anything is timed. Work of an image is counted by PyTorch's own `FlopCounterMode` over one epoch of
EdgeFL's loop; the peak is that of a product of two 8192 x 8192 matrices in bfloat16, measured on the card by
`training_epoch.py`. Memory of a step is what `edgefl-train run` tells before the first round, beside the most that
PyTorch's allocator gave while such steps were played. `engines.py` runs one worker and two; with several cards each
has its own. Where there is no card, one sentence says so and nothing is written.

    python -m benchmarks.training.gpu                  # writes docs/results/gpu.md
    python -m benchmarks.training.gpu --json           # prints the figures instead
"""

import json
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from benchmarks.processes import ROOT, started
from edgefl_protocol.sentences import counted

PAGE = ROOT / "docs" / "results" / "gpu.md"
# The sizes of the papers where they fit any card of today: a ViT-S/16 at 224 px, and FedCLF's ResNet-18.
ROWS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "FedEvPrompt": (
        "training_epoch",
        ("--device", "cuda", "--backbone", "vit:384x12/16", "--image-px", "224", "--images", "4096", "--batch", "256"),
    ),
    "FedMAE": (
        "fedmae_step",
        ("--device", "cuda", "--autocast", "bf16", "--backbone", "vit:384x12/16", "--image-px", "224",
         "--images", "8192", "--batch", "256", "--decoder", "512x8"),
    ),
    "FedCLF": ("fedclf_step", ("--image-px", "72", "--images", "8192", "--batch", "256")),
}  # fmt: skip

MIB = 1 << 20
BATCH = 256  # images of a step whose memory is told
STEPS: Mapping[str, tuple[str, int]] = {  # network and side of its input
    "FedEvPrompt": ("vit:384x12/16", 224), "FedMAE": ("vit:384x12/16", 224), "FedCLF": ("cnn:resnet18", 72),
}  # fmt: skip
WORKERS = ("--device", "cuda", "--rows", "1,2", "--images", "512", "--backbone", "vit:384x12/12", "--repeats", "2")


def flops_of_an_image(epoch: Callable[[], object], images: int) -> float:
    """Floating-point operations of an image: what PyTorch counts in an epoch of so many, forward and backward.

    Attention is made of plain products meanwhile: those of the processor's fused one are not counted.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        epoch()
    return float(counter.get_total_flops()) / images


def counted_work() -> dict[str, float]:
    """The work of an image of FedMAE and FedCLF; that of FedEvPrompt its own benchmark tells."""
    from benchmarks.training import fedclf_step
    from edgefl_protocol.rules.batches import LEAST_BATCH

    contrast = fedclf_step.make_case("cnn:resnet18", 72, LEAST_BATCH, LEAST_BATCH, "cpu")
    return {
        "FedMAE": fedmae_work(),
        "FedCLF": flops_of_an_image(fedclf_step.edgefl_epoch(contrast), LEAST_BATCH),
    }


def fedmae_work(backbone: str = "vit:384x12/16", width: int = 512, depth: int = 8) -> float:
    """The work of an image of FedMAE at 224 px, with such an encoder and decoder: by default those of `ROWS`."""
    import numpy as np

    from benchmarks.training import fedmae_step
    from edgefl_trainer.methods.fedmae import FedMAE

    case = fedmae_step.Case(
        FedMAE(batch=1, decoder_width=width, decoder_depth=depth),
        fedmae_step.make_site(backbone, np.zeros((1, 224, 224, 3), np.uint8), "cpu", "none", []),
    )
    return flops_of_an_image(fedmae_step.edgefl_epoch(case), 1)


def measured(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The last line of a benchmark that prints JSON: that of the card.

    Raises:
        click.ClickException: it failed, or the two losses differ.
    """
    command = [*started(f"benchmarks.training.{name}"), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():  # a ratio below its target is a figure, too, whatever the status says
        raise click.ClickException(f"{name} failed: {done.stderr.strip()[-400:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def figures(found: Mapping[str, Mapping[str, Any]], work: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """For each method images a second of both loops, their ratio, the work of an image, and the share of the peak."""
    peak = float(found["FedEvPrompt"]["bf16"]["measured_peak_flops"])
    told = {**work, "FedEvPrompt": float(found["FedEvPrompt"]["flops_of_an_image"])}
    rows = {}
    for name, one in found.items():
        speed = one["images_per_second"]
        plain = max(value for loop, value in speed.items() if loop != "edgefl")
        rows[name] = {
            "edgefl": float(speed["edgefl"]),
            "plain": float(plain),
            "ratio": speed["edgefl"] / plain,
            "gflops": told[name] / 1e9,
            "share": told[name] * speed["edgefl"] / peak,
        }
    return rows


def step_bytes(method: str, network: str, px: int, images: int, **hyper: int) -> dict[str, float]:
    """Bytes of a step on the card: told beforehand, and the most that PyTorch's allocator gave."""
    import numpy as np
    import torch

    from edgefl_trainer.contract import Examples, Site, Task
    from edgefl_trainer.engine.card.step_memory import peak_of, step_memory, with_batch
    from edgefl_trainer.engine.settings import RunSettings
    from edgefl_trainer.models.backbones import load_backbone

    card = torch.device("cuda", 0)
    backbone = load_backbone(network, image_px=px, seed=0).to(card)
    drawn = np.random.default_rng(0).integers(0, 256, (images, px, px, 3), dtype=np.uint8)
    places = np.arange(images, dtype=np.int64)
    rows = Examples(drawn, places % 2, places)
    task = Task(name="nevus", classes=("a", "b"), backbone=backbone.spec, rounds=1, epochs=1, seed=0)
    site = Site(
        name="bench", task=task, backbone=backbone, train=rows, tune=rows, unlabelled=rows, device=card,
        autocast=torch.bfloat16,
    )  # fmt: skip
    settings = RunSettings(method=method, data=("lesions:",), hyper={"batch": images, **hyper})
    told = step_memory(settings, site).of(images)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    peak_of(with_batch(settings, images).build_method(), site, images)
    return {"told": told, "given": float(torch.cuda.max_memory_allocated())}


def table_of_workers() -> str:
    """What `engines.py` prints of one worker and two on the card or cards: a table, and whether the digests agree."""
    command = [*started("benchmarks.training.engines"), *WORKERS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise click.ClickException(f"engines.py failed: {done.stderr.strip()[-400:]}")
    table, _, digests = done.stdout.strip().rpartition("\n")
    return f"{table}\n\nOf the runs' `state_sha256`: {digests}."


def page(
    rows: Mapping[str, Mapping[str, float]],
    machine: Mapping[str, str],
    peak: float,
    steps: Mapping[str, Mapping[str, float]],
    workers: str,
) -> str:
    """The page of results, in Markdown."""
    memory = [
        f"| {name} | {one['told'] / MIB:,.0f} | {one['given'] / MIB:,.0f} | {one['told'] / one['given']:.2f} |"
        for name, one in steps.items()
    ]
    lines = [
        f"| {name} | {row['edgefl']:,.0f} | {row['plain']:,.0f} | {row['ratio']:.2f} | {row['gflops']:.1f} | "
        f"{row['share']:.1%} |"
        for name, row in rows.items()
    ]
    parts = (*ROWS.values(), ("engines", WORKERS))
    commands = [f"python -m benchmarks.training.{name} {' '.join(words)}" for name, words in parts]
    return f"""# On a card

For a researcher with a GPU. Afterwards you know how fast three methods learn there, what share of the card they use,
and whether the memory of a step is what was told.

State of {machine["date"]}: {machine["card"]}, PyTorch {machine["torch"]}, bfloat16. A product of two matrices reached
{peak / 1e12:,.0f} TFLOP/s there: the peak of the last column. The plain loop is the one a researcher would write
first; its losses are the same, which is looked at before anything is timed. `benchmarks/training/gpu.py` writes this
page.

| method | EdgeFL, images/s | plain loop, images/s | ratio | GFLOP of an image | share of the peak |
| --- | ---: | ---: | ---: | ---: | ---: |
{chr(10).join(lines)}

## Memory of a step

A step of {BATCH} images: what `edgefl-train run` tells before the first round, and the most that PyTorch's allocator
gave in such steps.

| method | told, MiB | given, MiB | ratio |
| --- | ---: | ---: | ---: |
{chr(10).join(memory)}

## One worker and two

On {machine["cards"]}: FedEvPrompt at six sites, as in [engines](engines.md).

{workers}

## Commands

```
{chr(10).join(commands)}
```
"""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the figures; write no page.")
def main(as_json: bool) -> None:
    """Measure three methods on this machine's card and write docs/results/gpu.md."""
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("this machine has no CUDA device: nothing was measured and nothing written.")
    machine = {
        "date": datetime.now(UTC).date().isoformat(),
        "card": torch.cuda.get_device_name(),
        "cards": counted(torch.cuda.device_count(), "card"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    found = {name: measured(module, words) for name, (module, words) in ROWS.items()}
    rows = figures(found, counted_work())
    steps = {name: step_bytes(name.lower(), *of, BATCH) for name, of in STEPS.items()}
    workers = table_of_workers()
    if as_json:
        click.echo(json.dumps({**machine, "methods": rows, "step_bytes": steps, "workers": workers}))
        return
    peak = float(found["FedEvPrompt"]["bf16"]["measured_peak_flops"])
    PAGE.write_text(page(rows, machine, peak, steps, workers), encoding="utf-8")
    click.echo(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
