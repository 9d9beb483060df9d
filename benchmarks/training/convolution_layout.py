"""How much faster convolutional networks learn on a CPU with channels last: a ratio, both layouts in turn in one run.

A step is forward, backward and AdamW over a batch of drawn pixels, on one thread; an image's share of the processor's
seconds is the least of several turns. `inference` is the forward pass alone.

    python -m benchmarks.training.convolution_layout
"""

import time
from collections.abc import Callable

import click
import timm
import torch

from edgefl_trainer.evaluate.tables.text import markdown

LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}
BATCH = 16
USUAL = ("tf_efficientnet_lite0:112", "efficientnet_b0:112", "mobilenetv3_small_100:84", "resnet18:84", "resnet18:224")


def turns_of(name: str, px: int, layout: torch.memory_format) -> dict[str, Callable[[], object]]:
    """Make a network in a layout; return what is timed: a step, and a forward pass."""
    network = timm.create_model(name, pretrained=False, num_classes=2).to(memory_format=layout)
    optimiser = torch.optim.AdamW(network.parameters(), 1e-4)
    images = torch.randn((BATCH, 3, px, px), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        optimiser.zero_grad()
        network.train()(images).square().mean().backward()
        optimiser.step()

    def forward() -> object:
        with torch.inference_mode():
            return network.eval()(images)

    return {"training": step, "inference": forward}


def least_s(timed: Callable[[], object]) -> float:
    """Processor seconds of one call."""
    begun = time.process_time()
    timed()
    return time.process_time() - begun


@click.command(context_settings={"show_default": True})
@click.option(
    "--network", "networks", metavar="NAME:PX", multiple=True, default=USUAL, help="By timm's name; repeatable."
)
@click.option("--turns", metavar="N", default=6, help="Of each layout.")
def main(networks: tuple[str, ...], turns: int) -> None:
    """Print images a second of one thread, and the ratio of the layouts."""
    torch.set_num_threads(1)
    rows = []
    for network in networks:
        name, _, px = network.partition(":")
        if not (timm.is_model(name) and px.isdigit()):
            raise click.UsageError(f"{network!r} is no network of timm's with a number of pixels, such as {USUAL[0]}")
        made = {label: turns_of(name, int(px), layout) for label, layout in LAYOUTS.items()}
        for what in ("training", "inference"):
            for timed in made.values():
                timed[what]()  # the first call prepares
            took = {label: min(least_s(made[label][what]) for _ in range(turns)) for label in LAYOUTS}
            first, last = (BATCH / took[label] for label in LAYOUTS)
            rows.append([name, px, what, f"{first:.0f}", f"{last:.0f}", f"{last / first:.2f}"])
    click.echo(markdown(["network", "px", "", *LAYOUTS, "ratio"], rows, "").strip())


if __name__ == "__main__":
    main()
