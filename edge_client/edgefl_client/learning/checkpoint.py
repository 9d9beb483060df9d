"""Where learning stands: after a kill at any moment the next start goes on from the last point written.

A `Point` is kept inside a round, between two steps; a `Standing` is a site's state between two rounds. Each lies in a
file of its own that is replaced atomically and carries a checksum (`scoring.checked_file`). Both name what they belong
to, so weights are never continued on another network, nor in another federation.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from numpy.typing import NDArray

from edgefl_client.home import Home
from edgefl_client.learning.errors import LearningError
from edgefl_client.scoring.checked_file import read_checked, write_checked
from edgefl_client.scoring.personal import PERSONAL
from edgefl_protocol.durable import flush_to_disk
from edgefl_protocol.errors import PayloadError, StorageError
from edgefl_protocol.lock_file import LockFile
from edgefl_protocol.payload import Payload

LOCK = "lock"
# The warning of a learner whose kept point is of other pictures: going on would weigh a reply by those of today.
CHANGED = "pictures, settings or the others' part have changed since learning stopped: the round begins anew"

Stage = Literal["learning", "learned"]
_STAGES: Mapping[object, Stage] = {"learning": "learning", "learned": "learned"}


@dataclass(frozen=True, kw_only=True)
class Point:
    """Hold where learning stands between two steps of a round."""

    begun: str  # digest of what the round began with: bundle, site, number of the round, state before it
    given: str  # digest of what it learns from: pictures, settings, the others' part
    stage: Stage = "learning"  # `learned` where all epochs are done
    round: int  # from 1
    epoch: int = 0  # of the next step, from 0
    step: int = 0  # of the epoch, from 0
    state: Mapping[str, NDArray[Any]]  # what steps change
    # sums over this epoch's pictures so far of what a step reports
    sums: Mapping[str, float] = field(default_factory=dict)

    def stepped(self, state: Mapping[str, NDArray[Any]], figures: Mapping[str, float], pictures: int) -> Self:
        """Return the point after a step of the same epoch; `figures` are means over the step's pictures."""
        sums = {name: self.sums.get(name, 0.0) + pictures * value for name, value in figures.items()}
        return replace(self, state=state, step=self.step + 1, sums=sums)

    def next_epoch(self) -> Self:
        """Return the point before the first step of the next epoch."""
        return replace(self, epoch=self.epoch + 1, step=0, sums={})

    def to_payload(self) -> Payload:
        """Make the payload that is kept."""
        scalars: dict[str, int | float | str] = {
            "begun": self.begun, "given": self.given, "stage": self.stage, "round": self.round, "epoch": self.epoch,
            "step": self.step, **{f"sum.{name}": float(value) for name, value in self.sums.items()},
        }  # fmt: skip
        return Payload(self.state, scalars)

    @classmethod
    def from_payload(cls, payload: Payload) -> Self | None:
        """Read the point that was kept; None for what is of another kind of learning."""
        facts = payload.scalars
        wanted = {"begun", "given", "stage", "round", "epoch", "step"}
        if not wanted <= facts.keys() or facts["stage"] not in _STAGES:
            return None
        return cls(
            begun=str(facts["begun"]),
            given=str(facts["given"]),
            stage=_STAGES[facts["stage"]],
            round=int(facts["round"]),
            epoch=int(facts["epoch"]),
            step=int(facts["step"]),
            state=payload.arrays,
            sums={name.removeprefix("sum."): float(facts[name]) for name in facts.keys() - wanted},
        )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Hold a site's state between two rounds."""

    bundle_sha256: str  # of the file of the bundle it learns with
    federation: str  # name; empty for a device that learns alone
    round: int  # the last one that counts
    state: Mapping[str, NDArray[Any]]  # after it


def save_standing(file: Path, standing: Standing) -> None:
    """Keep a standing durably, in place of the one before."""
    scalars: dict[str, int | float | str] = {
        "bundle_sha256": standing.bundle_sha256,
        "federation": standing.federation,
        "round": standing.round,
    }
    write_checked(file, Payload(standing.state, scalars))


def load_standing(file: Path) -> Standing | None:
    """Read the standing in a file, None where there is none; the caller asks what it belongs to."""
    if not file.exists():
        return None
    try:
        payload = read_checked(file)
        facts = payload.scalars
        return Standing(
            bundle_sha256=str(facts["bundle_sha256"]),
            federation=str(facts["federation"]),
            round=int(facts["round"]),
            state=payload.arrays,
        )
    except (PayloadError, KeyError, TypeError, ValueError) as error:
        raise damaged(file) from error


def begun_with(file: Path, bundle_sha256: str, federation: str, start: Mapping[str, NDArray[Any]]) -> Standing:
    """Return what the next round begins with.

    Args:
        federation: name; empty for a device that learns alone.
        start: the site's state before its first round; empty for a learner that looks at what it gets.

    Returns:
        The standing in the file; where that belongs to another bundle or federation, or there is none, the start with
        the number 0.
    """
    found = load_standing(file)
    if found is None or (found.bundle_sha256, found.federation) != (bundle_sha256, federation):
        return Standing(bundle_sha256=bundle_sha256, federation=federation, round=0, state=start)
    if start and not same_form(found.state, start):
        raise damaged(file)
    return found


def digest_of(*parts: str) -> str:
    """Compute SHA-256 of several texts, as a point names what it belongs to."""
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()


def same_form(one: Mapping[str, NDArray[Any]], other: Mapping[str, NDArray[Any]]) -> bool:
    """Tell whether two states hold arrays of the same names, types and shapes."""
    return {name: (value.dtype, value.shape) for name, value in one.items()} == {
        name: (value.dtype, value.shape) for name, value in other.items()
    }


@contextlib.contextmanager
def only_one(home: Home) -> Iterator[None]:
    """Let one process at a time learn in this home, and remove values that a kill left half written.

    Raises:
        LearningError: another process learns here (`busy`).
    """
    busy = LearningError(
        "another edgefl train or edgefl sync is learning in this home folder; wait for it to end", "busy"
    )
    with LockFile(home.prepare(home.learning) / LOCK, busy):
        for half in home.learning.glob(".*.payload.*.tmp"):  # written by who holds the lock alone
            with contextlib.suppress(OSError):  # the next one tries again
                half.unlink()
        yield


def forget(home: Home, *, everything: bool) -> list[str]:
    """Remove the personal values, or everything that learning left here.

    What left the device before cannot be called back, and what others learned from it stays learned
    (docs/reference/sharing.md). The files are unlinked; what a disk keeps of them is the disk's matter.

    Args:
        everything: also where learning stands, in federations too, which table was named and who was held back: the
            next round begins with the bundle's values.

    Returns:
        Names of the files removed, in order; damaged ones too.

    Raises:
        LearningError: another process learns here (`busy`).
    """
    if not home.learning.exists():
        return []
    with only_one(home):
        names = sorted(path.name for path in home.learning.iterdir() if path.is_file() and path.name != LOCK)
        removed = [name for name in names if everything or name == PERSONAL]
        try:
            for name in removed:
                (home.learning / name).unlink()
            flush_to_disk(home.learning)
        except OSError as error:
            raise StorageError(f"cannot remove {error.filename}: {error.strerror}; try again", "storage") from error
    return removed


def damaged(file: Path) -> StorageError:
    """Make the error of a file of learning that is not what was written."""
    return StorageError(
        f"{file} is damaged: it does not say how far learning has come; begin again with edgefl train --restart",
        "damaged",
    )
