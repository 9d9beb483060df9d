"""The members of `live_federation.py`: each function types, on behalf of a person, the commands of one role."""

import csv
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from PIL import Image

from demo import shown
from demo_federation import free_port
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.web.admin import run_operation
from edgefl_trainer.data.lesions import draw_lesion
from live_processes import Background, check, in_background, line_of, run, wait_for

HOSPITALS = ("hospital-1", "hospital-2")  # each with its own drawn lesions, in the style of its camera
DEVICES = ("device-1", "device-2", "device-3")
PHOTO_PX, OTHERS = 128, ("MEL", "BKL", "BCC")


@dataclass(frozen=True)
class Exchange:
    """One exchange of the federation, as the coordinator tells it."""

    number: int
    rounds: int
    phase: str

    def __str__(self) -> str:
        return f"exchange {self.number} of {self.rounds} ({self.phase})"


@dataclass(frozen=True)
class Coordinator:
    """The operator's machine."""

    home: Path
    log: Path

    def make(self, federation: str, task: tuple[str | Path, ...], members: int, rounds: int) -> None:
        """Make it: a round closes when all have replied."""
        run(
            "edgefl-coordinator", "init", self.home, "--federation", federation, *task, "--rounds", rounds,
            "--port", free_port(), "--quorum-min", members, "--quorum-target", members,
        )  # fmt: skip

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve in the background until the end."""
        with in_background("edgefl-coordinator", "serve", "--home", self.home, log=self.log) as server:
            wait_for(lambda: self._is_up(server), "the coordinator to start")
            yield

    def invite(self, name: str, role: str, file: Path) -> None:
        """Write an invite, to be handed over on a channel that both trust."""
        file.parent.mkdir(parents=True, exist_ok=True)
        words = ("edgefl-coordinator", "invite", "--home", self.home, "--role", role, name)
        click.secho(f"$ {line_of(words)} > {shown(file)}", bold=True)
        file.write_text(run(*words, quiet=True))
        file.chmod(0o600)

    def approve(self, name: str, fingerprint: str) -> None:
        """Let a member in whose fingerprint was compared."""
        run("edgefl-coordinator", "approve", name, "--fingerprint", fingerprint, "--home", self.home)

    def publish(self, bundle: Path, signer: Path) -> None:
        """Make a bundle the one that devices fetch."""
        run("edgefl-coordinator", "publish", bundle, "--home", self.home, "--trust", signer / "signing.pub")

    def status(self) -> dict[str, Any]:
        """Its own account."""
        found: dict[str, Any] = json.loads(
            run("edgefl-coordinator", "status", "--home", self.home, "--json", quiet=True)
        )
        return found

    def exchanges(self) -> Iterator[Exchange]:
        """Each exchange once it is open, until the federation is over."""
        number = 0
        while True:
            found = self._after(number)
            if found["state"] == "done":
                return
            number = found["round"]
            yield Exchange(number, found["rounds"], found["phase"])

    def _after(self, number: int) -> dict[str, Any]:
        """The account once an exchange later than `number` is open, or all are over."""
        found: dict[str, Any] = {}

        def moved() -> bool:
            found.update(
                run_operation(CoordinatorHome(self.home), "status", {})
            )  # as `status` does, without a process each time
            return bool(found["state"] == "done" or (found["state"] == "open" and found["round"] > number))

        wait_for(moved, f"exchange {number + 1} to open")
        return found

    def _is_up(self, server: Background) -> bool:
        check(server, self.log)
        return any(self.home.rglob("*.sock"))


@dataclass
class Hospitals:
    """Two GPU servers, each with its own data and run directory."""

    coordinator: Coordinator
    out: Path
    data: str
    processes: dict[str, Background] = field(default_factory=dict)

    @contextmanager
    def joined(self) -> Iterator["Hospitals"]:
        """Both take part in the background, from enrolment to their results."""
        with ExitStack() as stack:
            for number, name in enumerate(HOSPITALS, 1):
                invite = self.out / f"{name}.invite"
                self.coordinator.invite(name, "site", invite)
                self.processes[name] = stack.enter_context(
                    in_background(
                        "edgefl-train",
                        "join",
                        "-",
                        "--data",
                        self.data,
                        "--site",
                        f"site-{number}",
                        "--out",
                        self.out / name,
                        log=self._log(name),
                        given=invite,
                    )
                )
            for name in HOSPITALS:
                wait_for(lambda name=name: self._fingerprint(name) != "", f"{name} to enrol")  # type: ignore[misc]
                self.coordinator.approve(name, self._fingerprint(name))
            yield self

    def check(self) -> None:
        """Both still learn, or have ended well."""
        for name, process in self.processes.items():
            check(process, self._log(name))

    def results(self) -> dict[str, dict[str, Any]]:
        """What each was left with: its `summary.json`."""
        found = {}
        for name, process in self.processes.items():
            wait_for(lambda process=process: process.status() is not None, f"{name} to end")  # type: ignore[misc]
            check(process, self._log(name))
            found[name] = json.loads((self.out / name / "summary.json").read_text())
            lines = (self.out / name / "metrics.jsonl").read_text().splitlines()
            found[name]["metrics"] = [json.loads(line) for line in lines]
        return found

    def _fingerprint(self, name: str) -> str:
        """What its screen shows."""
        self.check()
        _, _, after = self._log(name).read_text().partition("fingerprint ")
        return after[:20] if len(after) >= 20 else ""

    def _log(self, name: str) -> Path:
        return self.out / f"{name}.log"


@dataclass(frozen=True)
class Devices:
    """Three devices without PyTorch, each with its own home folder and pictures."""

    coordinator: Coordinator
    folder: Path

    def join(self, name: str, signer: Path, kinds: tuple[str, ...]) -> None:
        """Enrol, be approved, allow what may leave, trust the signer, fetch the model."""
        quiet, home, invite = name != DEVICES[0], self.folder / name, self.folder / f"{name}.invite"
        self.coordinator.invite(name, "device", invite)
        told = run(
            "edgefl", "enrol", invite.read_text().strip(), "--home", home, "--json", quiet=True,
        )  # fmt: skip
        self.coordinator.approve(name, json.loads(told)["fingerprint"])
        run("edgefl", "policy", "allow", *kinds, "--home", home, quiet=quiet)
        run("edgefl", "trust", "add", signer / "signing.pub", "--home", home, quiet=quiet)
        run("edgefl", "sync", "--home", home, quiet=quiet)

    def learn_alone(self, name: str, labels: Path) -> dict[str, Any]:
        """A round for itself: nothing leaves."""
        words = ("edgefl", "train", "--labels", labels, "--epochs", "1", "--threads", "1", "--home", self.folder / name)
        click.secho(f"$ {line_of(words)}", bold=True)
        found: dict[str, Any] = json.loads(run(*words, "--json", quiet=True))
        return found

    def answer(self, pictures: Path | None = None, *, labelled: bool = True) -> dict[str, dict[str, Any]]:
        """Each does what is due, and leaves; with `pictures`, it learns from its own there from now on."""
        found = {}
        for name in DEVICES:
            named: tuple[str | Path, ...] = ()
            if pictures is not None:
                folder = pictures / name
                named = ("--labels", folder / "labels.csv") if labelled else ("--pictures", folder)
            words = ("edgefl", "sync", *named, "--threads", "1", "--home", self.folder / name)
            click.secho(f"$ {line_of(words)}", bold=True)
            found[name] = json.loads(run(*words, "--json", quiet=True))
        return found

    def what_left(self, name: str) -> dict[str, Any]:
        """What its owner allows, and what left in the last 24 hours."""
        found: dict[str, Any] = json.loads(
            run("edgefl", "policy", "show", "--home", self.folder / name, "--json", quiet=True)
        )
        return found


def draw_pictures(site: int, each: int, folder: Path) -> None:
    """Write drawn lesions as JPEG files with a table `labels.csv`: `each` nevi, and as many others."""
    folder.mkdir(parents=True)
    with (folder / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "label", "lesion_id"])
        for number in range(2 * each):
            label = "NV" if number < each else OTHERS[number % len(OTHERS)]
            photo, _ = draw_lesion(label, site=site, number=number, px=PHOTO_PX)
            name = f"{label}-{number}"
            Image.fromarray(photo).save(folder / f"{name}.jpg", quality=95)
            table.writerow([f"{name}.jpg", "nevus" if label == "NV" else "other", name])
