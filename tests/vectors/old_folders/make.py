"""Make the archives of this folder with the commands of one commit: see README.md.

Run by hand, in a checkout of that commit with its packages on the path: `python …/make.py OUT`. It uses that commit's
`tests/conftest.py` for a bundle and pictures, and a coordinator on 127.0.0.1.
"""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))
from tests.conftest import CLASSES, SIGNER, bundle_bytes, encoded, photo

PORT = 18443
PROGRAMS = {"edgefl": "edgefl_client.cli", "edgefl-coordinator": "edgefl_coordinator.cli",
            "edgefl-train": "edgefl_trainer.cli"}  # fmt: skip


def started(*words: object, stderr: int | None = None) -> subprocess.Popen[str]:
    """A command of the checkout, in a process of its own."""
    program, *rest = map(str, words)
    code = f"from {PROGRAMS[program]} import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, *rest], stdout=subprocess.PIPE, stderr=stderr, text=True)


def run(*words: object) -> str:
    """Its result, once it has ended well."""
    process = started(*words)
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{words} ended with {process.returncode}")
    return out


def packed(folder: Path, out: Path) -> None:
    """The folder's files with their modes, without owners and times."""
    with tarfile.open(out, "w:gz", compresslevel=9) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
                content = path.read_bytes()
                entry.size, entry.mode = len(content), path.stat().st_mode & 0o777
                archive.addfile(entry, io.BytesIO(content))


def federation(home: Path, device: Path, pictures: Path) -> None:
    """A coordinator whose first round is open, and a device with a policy and a contribution that waits."""
    rounds = ("--start", "manual", "--quorum-min", 1, "--min-cohort", 1, "--allow-small-cohort", "--deadline", 10**9)
    network = ("--backbone", "tiny", "--image-px", 72)
    run("edgefl-coordinator", "init", home, "--federation", "skin", "--classes", ",".join(CLASSES), *network, *rounds,
        "--port", PORT)  # fmt: skip
    bundle = pictures / "model.edgefl"
    bundle.write_bytes(bundle_bytes())
    signer = pictures / "signing.pub"
    signer.write_text(SIGNER.public.hex())
    run("edgefl-coordinator", "publish", "--home", home, bundle, "--trust", signer)
    server = started("edgefl-coordinator", "serve", "--home", home)
    time.sleep(10)
    invite = run("edgefl-coordinator", "invite", "--home", home, "--role", "device", "dermatoscope-1").strip()
    run("edgefl", "enrol", invite, "--ca", home / "tls" / "ca.pem", "--home", device)
    shown = json.loads(run("edgefl", "status", "--json", "--home", device))["membership"]["fingerprint"]
    run("edgefl-coordinator", "approve", "--home", home, "dermatoscope-1", "--fingerprint", shown)
    run("edgefl", "trust", "add", signer, "--home", device)
    run("edgefl", "policy", "allow", "maps", "--until", "always", "--home", device)
    run("edgefl", "pull", "--home", device)
    run("edgefl-coordinator", "start", "--home", home)
    time.sleep(30)  # the worker imports PyTorch
    run("edgefl", "sync", "--home", device)
    run("edgefl", "score", *sorted(pictures.glob("*.png")), "--home", device)
    run("edgefl", "contribute", "--labels", pictures / "labels.csv", "--home", device)
    server.terminate()
    server.wait()


def main(out: Path) -> None:
    """Make both folders and a run, and pack them."""
    os.environ.pop("EDGEFL_HOME", None)
    out.mkdir(parents=True)
    pictures = out / "pictures"
    pictures.mkdir()
    with (pictures / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "label"])
        for number in range(6):
            (pictures / f"{number}.png").write_bytes(encoded(photo(50, 40, (180 + number, 120, 90))))
            rows.writerow([f"{number}.png", CLASSES[number % 2]])
    federation(out / "coordinator", out / "device", pictures)
    given = ("fedevprompt", "--data", "lesions:sites=3,images=30", "--backbone", "vit:16x2/12", "--set", "b_blocks=1",
             "--image-px", 24, "--preset", "tiny", "--rounds", 2, "--out")  # fmt: skip
    run("edgefl-train", "run", *given, out / "run")
    stopped = started("edgefl-train", "run", *given, out / "stopped", stderr=subprocess.PIPE)
    for line in stopped.stderr or ():
        if line.startswith("round 2/2 · site-1"):
            stopped.send_signal(signal.SIGINT)
    stopped.wait()
    for name in ("coordinator", "device", "run", "stopped"):
        packed(out / name, out / f"{name}.tar.gz")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
