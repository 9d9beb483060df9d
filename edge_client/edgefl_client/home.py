"""The home folder of a device: where everything it keeps lies, readable by its owner only.

    trust.json           keys of bundle signers trusted by hand
    current.json         the bundle in use, and the highest version seen of each (federation, line, task)
    models/              bundles, named by the SHA-256 of the file
    member/              membership, private keys, sequence numbers, coordinator's certificate
    broadcasts/          payloads received, one file a round
    learning/            where learning on this device stands, and the values that passed their gate
    policy.toml          what may leave, how often, how much, until when
    spent.json           what left in the last 24 hours: bytes and rounds, no content
    outbox.sqlite3       work items waiting to be sent
    watched.sqlite3      which pictures edgefl watch has scored
    watch-*.lock         held while a folder is watched

Nothing is created by looking: a folder comes into being when something is first kept in it.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgefl_protocol.durable import foreign_content, holds_any, read_bounded, write_atomic
from edgefl_protocol.errors import StorageError
from edgefl_protocol.strict_json import MAX_JSON_BYTES, parse_integers

ENVIRONMENT = "EDGEFL_HOME"
OWN = (
    "trust.json", "current.json", "models", "member", "broadcasts", "learning", "policy.toml", "spent.json",
    "outbox.sqlite3", "watched.sqlite3", "watch-*.lock",
)  # fmt: skip


class Home:
    """Paths below one home folder."""

    def __init__(self, root: Path) -> None:
        self.root = root  # the home folder
        self.trust_file = root / "trust.json"
        self.current_file = root / "current.json"
        self.models = root / "models"
        self.member = root / "member"
        self.broadcasts = root / "broadcasts"
        self.learning = root / "learning"
        self.outbox_file = root / "outbox.sqlite3"
        self.policy_file = root / "policy.toml"
        self.spent_file = root / "spent.json"

    def prepare(self, folder: Path | None = None) -> Path:
        """Make the home folder, and a folder in it, with mode 0700.

        Args:
            folder: a folder below the root; None for the root alone.

        Raises:
            StorageError: the folder cannot be made, belongs to somebody else, or holds something else.
        """
        if found := foreign_content(self.root, OWN):
            raise StorageError(
                f"{self.root} holds {found} and nothing of a device; choose a new or empty folder with --home", "home"
            )
        for path in (self.root, *([folder] if folder is not None else [])):
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                if path.stat().st_mode & 0o077:
                    path.chmod(0o700)
            except OSError as error:
                raise StorageError(
                    f"cannot use the home folder {path}: {error.strerror}; choose another with --home", "home"
                ) from error
        return folder or self.root

    def refuse_in_new_home(self, file: Path | None) -> None:
        """Refuse, by a `StorageError`, a file or folder to write in a home that holds nothing of a device yet.

        `prepare` would take that home for a folder of something else.
        """
        if file is not None and file.resolve().is_relative_to(self.root.resolve()) and not holds_any(self.root, OWN):
            raise StorageError(
                f"{file} lies in the home folder, which nothing of a device is in yet: name another folder, or run "
                "edgefl use first",
                "home",
            )


def find_home(given: str | None) -> Home:
    """Return the home folder of this process: the given one, else EDGEFL_HOME, else `~/.edgefl`.

    Raises:
        StorageError: something that is no folder lies there; an empty answer would hide the mistake.
    """
    root = Path(given or os.environ.get(ENVIRONMENT) or "~/.edgefl").expanduser()
    if root.exists() and not root.is_dir():
        raise StorageError(f"the home {root} is not a folder; choose another with --home", "home")
    return Home(root)


def read_json(path: Path, what: str) -> dict[str, Any] | None:
    """Read the JSON object in a file, whose numbers are integers; None where there is no file.

    Raises:
        StorageError: it is no such object, or names a key twice (`damaged`); or it cannot be read.
    """
    try:
        value = parse_integers(read_bounded(path, MAX_JSON_BYTES).decode())
    except StorageError as error:
        if error.code != "missing":
            raise
        return None
    except ValueError as error:
        raise StorageError(
            f"{path} is damaged: {what} cannot be read; restore or remove the file", "damaged"
        ) from error
    if not isinstance(value, dict):
        raise StorageError(f"{path} is damaged: {what} cannot be read; restore or remove the file", "damaged")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object durably, mode 0600."""
    write_atomic(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), mode=0o600)
