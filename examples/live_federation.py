"""A live federation in one command: a coordinator, two GPU servers and three devices, on this machine alone.

    python examples/live_federation.py [--tiny] [--out live-out]

The GPU servers run `edgefl-train join` (PyTorch), the devices `edgefl sync` (no PyTorch); they learn together, three
rounds (two with --tiny), over signed and sealed messages inside HTTPS. Every step is a command that you could type; it
is printed before it runs. Data are drawn lesions; nothing leaves the loopback interface.
"""

import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click

from demo import heading, shown
from live_account import Account
from live_members import DEVICES, HOSPITALS, Coordinator, Devices, Hospitals, draw_pictures
from live_processes import run

METHODS = ("fedevprompt", "fedclf")


@dataclass(frozen=True)
class Size:
    """How much there is to learn, and from what.

    Attributes:
        images: of each hospital.
        pictures: of each class on a device; 20 are held back to judge with.
        rounds: of the federation.
        epochs: of a round.
        prompted: what FedEvPrompt's prompts are learned for.
    """

    images: int
    pictures: int
    rounds: int
    epochs: int
    prompted: tuple[str, ...]


SMALL = ("--preset", "tiny", "--backbone", "vit:64x2/12", "--set", "b_blocks=1", "--image-px", "36")
TINY = Size(images=40, pictures=25, rounds=2, epochs=1, prompted=SMALL)
USUAL = Size(
    images=300, pictures=80, rounds=3, epochs=2, prompted=("--preset", "bench84", "--backbone", "drawn-lesions-84")
)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("live-out"),
    show_default=True,
    metavar="DIR",
    help="New folder for everything that is made.",
)
@click.option("--tiny", is_flag=True, help="Few pictures, small networks: shows the path, not what the methods can do.")
@click.option(
    "--method",
    "methods",
    type=click.Choice(METHODS),
    multiple=True,
    default=METHODS,
    show_default=True,
    help="Only this one; repeatable.",
)
@click.option(
    "--network",
    default="cnn:test_resnet",
    show_default=True,
    metavar="NAME",
    help="What FedCLF learns. A cnn:resnet18 sends 45 MB a reply, as blobs, and takes longer.",
)
@click.option(
    "--image-px",
    type=click.IntRange(32, 512),
    default=36,
    show_default=True,
    metavar="PX",
    help="Side of the pictures that FedCLF learns from.",
)
def main(out: Path, tiny: bool, methods: tuple[str, ...], network: str, image_px: int) -> None:
    if out.exists() and any(out.iterdir()):
        raise click.UsageError(f"{out} is not empty: remove it or name another folder with --out.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what runs in the background, as Ctrl-C does
    size, started = TINY if tiny else USUAL, time.monotonic()
    data = f"lesions:sites={len(HOSPITALS)},images={size.images}"
    for number, name in enumerate(DEVICES, len(HOSPITALS)):
        draw_pictures(number, size.pictures, out / "pictures" / name)
    if "fedevprompt" in methods:
        fedevprompt(out / "fedevprompt", data, size, out / "pictures")
    if "fedclf" in methods:
        fedclf(out / "fedclf", data, size, (network, image_px), out / "pictures")
    click.echo(f"\ntook {time.monotonic() - started:.0f} s; everything lies in {shown(out)}")


def fedevprompt(out: Path, data: str, size: Size, pictures: Path) -> None:
    """FedEvPrompt: attention maps travel, prompts and head stay."""
    heading("FedEvPrompt · a hospital learns alone, and makes the model that devices begin with")
    pilot, bundle, signer = out / "pilot", out / "begin.edgefl", out / "signer"
    run(
        "edgefl-train", "run", "fedevprompt", "--data", f"{data}@site=site-1", "--task", "nevus", *size.prompted,
        "--rounds", "1", "--epochs", size.epochs, "--out", pilot,
    )  # fmt: skip
    run("edgefl-export", "keygen", signer)
    run(
        "edgefl-export", "bundle", pilot, "--site", "site-1", "--federation", "prompts", "--with-training",
        "--sign", signer, "-o", bundle,
    )  # fmt: skip
    federate(out, "prompts", ("--run", pilot), data, size.rounds, bundle, signer, pictures, kinds=("maps",))


def fedclf(out: Path, data: str, size: Size, learned: tuple[str, int], pictures: Path) -> None:
    """FedCLF: an encoder is learned without labels; features and averaged weights travel."""
    heading("FedCLF · a hospital learns alone, and makes the bundle that tells devices how to learn")
    pilot, head, bundle, signer = out / "pilot", out / "head", out / "begin.edgefl", out / "signer"
    site = ("--data", f"{data}@site=site-1", "--task", "nevus", "--preset", "tiny")
    network = ("--backbone", learned[0], "--image-px", learned[1])
    once = ("--rounds", "1", "--epochs", size.epochs, "--probe-every", "0")
    run("edgefl-train", "run", "fedclf", *site, *network, *once, "--out", pilot)
    run("edgefl-train", "run", "head", *site, "--rounds", "1", "--backbone", f"run:{pilot}", "--out", head)
    run("edgefl-export", "keygen", signer)
    run(
        "edgefl-export", "bundle", head, "--site", "site-1", "--federation", "encoder", "--with-training",
        "--sign", signer, "-o", bundle,
    )  # fmt: skip
    task = ("--run", pilot)
    kinds = ("features", "weights")
    federate(out, "encoder", task, data, size.rounds, bundle, signer, pictures, kinds, labelled=False)


def federate(
    out: Path,
    name: str,
    task: tuple[str | Path, ...],
    data: str,
    rounds: int,
    bundle: Path,
    signer: Path,
    pictures: Path,
    kinds: tuple[str, ...],
    *,
    labelled: bool = True,
) -> None:
    """Start a coordinator, let everybody in, do its rounds, and account for them."""
    heading(f"{name} · a coordinator; two GPU servers and three devices join it")
    coordinator = Coordinator(out / "coordinator", out / "coordinator.log")
    coordinator.make(name, task, members=len(HOSPITALS) + len(DEVICES), rounds=rounds)
    account = Account()
    with coordinator.serving(), Hospitals(coordinator, out, data).joined() as hospitals:
        devices = Devices(coordinator, out / "devices")
        coordinator.publish(bundle, signer)
        for device in DEVICES:
            devices.join(device, signer, kinds)
            if labelled:  # what it learns it can score with, alone too
                account.alone(device, devices.learn_alone(device, pictures / device / "labels.csv"))
        for exchange in coordinator.exchanges():
            heading(f"{name} · {exchange}")
            account.sent(devices.answer(pictures if exchange.number == 1 else None, labelled=labelled))
            hospitals.check()
        account.ended(devices.answer(), hospitals.results())
    heading(f"{name} · what it came to")
    account.show(coordinator.status(), devices)


if __name__ == "__main__":
    main()
