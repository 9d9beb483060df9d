"""What `--track` names: `tensorboard`, `tensorboard:DIR` or `mlflow:URI`, read and checked before anything begins.

Guarantees: no address with a password, a query or another scheme than HTTP is taken, so none is ever shown or kept;
event files are never mixed with those of another run. Nothing here loads PyTorch or a tracker's library.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from edgefl_protocol.distribution import needs_extra
from edgefl_protocol.durable import foreign_content, read_bounded, write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.engine.folder import make_folder
from edgefl_trainer.errors import RunError, SettingError

LIBRARIES = {"tensorboard": "tensorboard", "mlflow": "mlflow"}  # kind, and extra → module
IDENTITY = "tracking.json"  # in a run's folder: by what a tracker knows the run again
OWNER = ".edgefl-run"  # in a folder of event files: whose they are
MAX_IDENTITY_BYTES = 1 << 10
FORM = "use tensorboard, tensorboard:DIR or mlflow:URI"


@dataclass(frozen=True)
class NamedTracker:
    """One tracker that is to follow a run."""

    kind: str  # tensorboard | mlflow
    place: str  # a folder, empty for the run's own; or the address of a server

    @property
    def name(self) -> str:
        """How a person is told of it."""
        library = "TensorBoard" if self.kind == "tensorboard" else "MLflow"
        return f"{library} ({self.place})" if self.place else library

    def folder(self, run: Path) -> Path:
        """Return where event files of a run lie."""
        return Path(self.place).expanduser() if self.place else run / "tensorboard"


def read_tracks(texts: Sequence[str], run: Path, name: str = "") -> list[NamedTracker]:
    """Read the values of `--track` for a run in this folder; one of a study has a `name`, and its own place in DIR.

    Raises:
        SettingError: a value of another form, an address that is not taken, or an extra that is not installed.
        RunError: a folder of event files that are not this run's; a damaged `tracking.json`.
    """
    tracks = [_read(text, name) for text in dict.fromkeys(texts)]
    for track in tracks:
        if find_spec(LIBRARIES[track.kind]) is None:
            raise SettingError(f"--track {track.kind} needs {needs_extra(track.kind)}.")
        known = identity_of(run)
        if track.kind == "tensorboard":
            _check_own(track.folder(run), known)
    return tracks


def _read(text: str, name: str) -> NamedTracker:
    kind, colon, place = text.partition(":")
    if kind not in LIBRARIES or (colon and not place) or (kind == "mlflow" and not place):
        raise SettingError(f"--track {kind} names no tracker: {FORM}.")
    if kind == "mlflow":
        _check_address(place)
    return NamedTracker(kind, str(Path(place) / name) if kind == "tensorboard" and place else place)


def _check_address(uri: str) -> None:
    """Refuse an address that could hold a secret, without repeating it."""
    try:
        parts = urlsplit(uri)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        whole = False
    if not whole:
        raise SettingError("--track mlflow takes the address of a server, such as mlflow:http://localhost:5000.")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise SettingError(
            "--track mlflow takes neither a password nor a query in the address, which others on this machine could "
            "read: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, instead."
        )


def _check_own(folder: Path, known: str) -> None:
    if folder.is_file():
        raise RunError(f"{folder} is a file: name a new or empty folder with --track tensorboard:DIR.")
    owner = folder / OWNER
    if owner.exists() and owner.read_text(errors="replace").strip() != known:
        raise RunError(f"{folder} holds event files of another run: name another folder, --track tensorboard:DIR.")
    if not owner.exists() and (found := foreign_content(folder, ())):
        raise RunError(f"{folder} holds {found}: name a new or empty folder with --track tensorboard:DIR.")


def identity_of(run: Path) -> str:
    """Read by what trackers know the run again; empty where none has followed it yet.

    A `RunError` where the file is damaged: under another name a tracker would have the run twice.
    """
    path = run / IDENTITY
    if not path.exists():
        return ""
    try:
        return str(json.loads(read_bounded(path, MAX_IDENTITY_BYTES))["id"])
    except (EdgeflError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is damaged: remove it and what trackers have of this run, or leave --track out.", "damaged"
        ) from error


def identify(run: Path) -> str:
    """Return by what trackers know the run again; made and kept in its folder where it was never followed."""
    known = identity_of(run)
    if not known:
        known = secrets.token_hex(16)
        make_folder(run)
        write_atomic(run / IDENTITY, json.dumps({"id": known}).encode())
    return known
