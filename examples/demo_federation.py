"""The demo's federation: a coordinator on this machine, four devices, one round of FedEvPrompt.

Every exchange is an HTTPS request to 127.0.0.1 that carries a signed and sealed envelope.
"""

import csv
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from demo_picture import TestImages

DEVICES = ("device-1", "device-2", "device-3", "device-4")
PATIENCE_S = 90  # longest wait for the coordinator to start, or to aggregate
Run = Callable[..., str]


def federate(out: Path, bundle: Path, images: TestImages, run: Run) -> None:
    """Start a coordinator, enrol four devices, publish the bundle, exchange one round, show what travelled."""
    home, port = out / "coordinator", free_port()
    run(
        "edgefl-coordinator", "init", home, "--federation", "demo", "--run", out / "fedevprompt", "--port", port,
        "--quorum-target", len(DEVICES), "--rounds", "2",
    )  # fmt: skip
    with serving(home, out / "coordinator.log"):
        for number, name in enumerate(DEVICES):
            enrol(out, home, name, run, quiet=number > 0)
        click.echo(f"… and so {', '.join(DEVICES[1:])}")
        run("edgefl-coordinator", "publish", bundle, "--home", home, "--trust", out / "signer" / "signing.pub")
        wait_for(lambda: status(home, run)["round"] == 1, "round 1 to open")
        for number, name in enumerate(DEVICES):
            contribute(out, name, images, f"site-{number + 1}", run, quiet=number > 0)
        wait_for(lambda: status(home, run)["round"] == 2, "the aggregation of round 1")
        exchange(out, run)
        run("edgefl-coordinator", "status", "--home", home)


def enrol(out: Path, home: Path, name: str, run: Run, *, quiet: bool) -> None:
    """Invite, enrol, compare the fingerprint, approve, trust the signer."""
    device = out / "devices" / name
    invite = run("edgefl-coordinator", "invite", "--home", home, "--role", "device", name, quiet=True).strip()
    if not quiet:
        click.secho(f"$ edgefl-coordinator invite --role device {name}", bold=True)
        click.echo(f"{invite[:40]}… (one string; carries address, certificate, pins and a token that works once)")
        click.secho("$ edgefl enrol INVITE", bold=True)
    told = run("edgefl", "enrol", invite, "--home", device, "--json", quiet=True)
    fingerprint = json.loads(told)["fingerprint"]
    run("edgefl-coordinator", "approve", name, "--fingerprint", fingerprint, "--home", home, quiet=quiet)
    run("edgefl", "trust", "add", out / "signer" / "signing.pub", "--home", device, quiet=quiet)


def contribute(out: Path, name: str, images: TestImages, site: str, run: Run, *, quiet: bool) -> None:
    """Fetch the model, score a labelled folder, send the most certain rollout maps."""
    device, table = out / "devices" / name, out / "devices" / f"{name}.csv"
    with table.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "label"])
        rows.writerows([image.path.resolve(), image.label] for image in images.of_site(site))
    run("edgefl", "sync", "--home", device, quiet=quiet)
    run("edgefl", "policy", "allow", "maps", "--home", device, quiet=quiet)
    if not quiet:
        click.secho("$ edgefl contribute --labels TABLE --send", bold=True)
    given = run("edgefl", "contribute", "--labels", table, "--send", "--home", device, "--json", quiet=True)
    sent = json.loads(given)["sync"]
    size = sum(one["bytes"] for one in sent["sent"])
    click.echo(
        f"{name} sent {size:,} bytes for round {sent['round']['number']}: maps and a digest, no image, no weight"
    )


def exchange(out: Path, run: Run) -> None:
    """The second round begins: every device receives the others' maps."""
    for name in DEVICES:
        found = json.loads(run("edgefl", "sync", "--home", out / "devices" / name, "--json", quiet=True))["broadcast"]
        click.echo(f"{name} received {found['bytes']:,} bytes: {found['maps']} maps of the others")


@contextmanager
def serving(home: Path, log: Path) -> Iterator[None]:
    """A coordinator in the background, stopped at the end."""
    program = str(Path(sys.executable).parent / "edgefl-coordinator")
    click.secho(f"$ edgefl-coordinator serve --home {home} &", bold=True)
    with log.open("w") as file:
        server = subprocess.Popen([program, "serve", "--home", str(home)], stdout=file, stderr=file)
        try:
            wait_for(lambda: answers(home), "the coordinator to start", server)
            yield
        finally:
            server.terminate()
            server.wait(timeout=20)


def answers(home: Path) -> bool:
    """Whether the server takes connections: its administration socket is there."""
    return any(home.rglob("*.sock"))


def status(home: Path, run: Run) -> dict[str, Any]:
    """The coordinator's own account."""
    found: dict[str, Any] = json.loads(run("edgefl-coordinator", "status", "--home", home, "--json", quiet=True))
    return found


def wait_for(done: Callable[[], bool], what: str, server: "subprocess.Popen[bytes] | None" = None) -> None:
    """Poll until something is done; give up with a sentence."""
    end = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > end or (server is not None and server.poll() is not None):
            raise click.ClickException(f"gave up waiting for {what}; see coordinator.log")
        time.sleep(0.3)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
