"""The whole path in one command: learn, compare, export, federate and score, on drawn lesions and this machine alone.

    python examples/demo.py [--out demo-out]

Every step is a command that you could type; it is printed before it runs. Nothing leaves the loopback interface.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
BACKBONE = ROOT / "backbones" / "drawn-lesions-84.safetensors"
DATA = "lesions:sites=6,images=240"
COMMON = ("--data", DATA, "--task", "nevus", "--preset", "bench84")
WANTED_ACCURACY, WANTED_RATIO = 0.80, 1.5


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), default=Path("demo-out"), show_default=True, metavar="DIR")
def main(out: Path) -> None:
    from demo_federation import federate
    from demo_picture import attention_in_lesion, draw_test_images

    if out.exists() and any(out.iterdir()):
        raise click.UsageError(f"{out} is not empty: remove it or name another folder with --out.")
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    heading("1 of 6 · A backbone: six sites learn a masked autoencoder together (FedMAE), shortly")
    run("edgefl-train", "run", "fedmae", *COMMON, "--rounds", "3", "--backbone", "vit:96x6/12", "--out", out / "fedmae")
    click.echo(
        f"Half a minute is too short for a useful network. The demo goes on with {shown(BACKBONE)}, learned with"
    )
    click.echo(
        "labels from other drawn lesions of the same kinds (backbones/README.md), so every site does well alone here."
    )

    heading("2 of 6 · FedEvPrompt against every site for itself, on the frozen backbone")
    for method in ("local", "fedevprompt"):
        run("edgefl-train", "run", method, *COMMON, "--backbone", f"file:{BACKBONE}", "--out", out / method)
    run("edgefl-train", "table", out / "local", out / "fedevprompt")
    accuracy = json.loads((out / "fedevprompt" / "summary.json").read_text())["mean_balanced_accuracy"]

    heading("3 of 6 · Export: one signed file with graph, weights, preprocessing and model card")
    bundle = out / "site-1.edgefl"
    run("edgefl-export", "keygen", out / "signer")
    run(
        "edgefl-export", "bundle", out / "fedevprompt", "--site", "site-1", "--federation", "demo",
        "--sign", out / "signer", "-o", bundle,
    )  # fmt: skip
    run("edgefl-export", "verify", bundle, "--trust", out / "signer" / "signing.pub")

    heading("4 of 6 · A coordinator, four devices, one round over signed and sealed messages")
    images = draw_test_images(DATA, out / "images")
    federate(out, bundle, images, run)

    heading("5 of 6 · A device without PyTorch scores three images")
    pictures = [image.path for image in images.of_site("site-1")[:3]]
    home = out / "devices" / "device-1"
    run("edgefl", "score", *pictures, "--home", home, "--heatmap", out / "heatmaps")

    heading("6 of 6 · Does the model look at the lesion?")
    share, area = attention_in_lesion(bundle, out / "signer" / "signing.pub", images.of_site("site-1"))
    ratio = share / area
    click.echo(
        f"{share:.0%} of the rollout map lies inside the drawn lesion, which covers {area:.0%}: {ratio:.2f} times"
    )
    verdict("FedEvPrompt's mean balanced accuracy", accuracy, WANTED_ACCURACY)
    verdict("rollout-map mass in the lesion over its area", ratio, WANTED_RATIO)
    click.echo(f"took {time.monotonic() - started:.0f} s")
    click.echo(f"\nLook at {shown(out / 'heatmaps')}/*.png, then try:")
    click.echo(f"  edgefl score {shown(pictures[-1])} --home {shown(home)} --json")
    click.echo(f"  edgefl-export inspect {shown(bundle)}")
    click.echo(f"  edgefl-train run fedavg {' '.join(COMMON)} --backbone file:{shown(BACKBONE)} --out {out}/fedavg")
    if accuracy < WANTED_ACCURACY or ratio < WANTED_RATIO:
        sys.exit(1)


def run(*command: str | Path, environment: Mapping[str, str] | None = None, quiet: bool = False) -> str:
    """Show a command, run it beside this interpreter, show what it prints, and give its standard output."""
    words = [shown(word) if isinstance(word, Path) else str(word) for word in command]
    if not quiet:
        click.secho(f"$ {shlex.join(words)}", bold=True)
    program = [str(Path(sys.executable).parent / words[0]), *(str(word) for word in command[1:])]
    done = subprocess.run(
        program, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}, check=False
    )
    if not quiet and done.stdout:
        click.echo(done.stdout.rstrip())
    if done.returncode:
        raise click.ClickException(f"{words[0]} {words[1]} ended with status {done.returncode}")
    return done.stdout


def heading(text: str) -> None:
    """A line that a reader finds again."""
    click.secho(f"\n== {text}", fg="cyan", bold=True)


def verdict(name: str, found: float, wanted: float) -> None:
    """Say whether a promise of this demo was kept."""
    word = "reached" if found >= wanted else "MISSED"
    click.echo(f"{name}: {found:.3f}, wanted at least {wanted}: {word}")


def shown(path: Path) -> str:
    """A path as short as it can be written from here."""
    return os.path.relpath(path) if path.is_absolute() else str(path)


if __name__ == "__main__":
    main()
