"""`init`: a new coordinator's folder with keys, a development certificate and its settings.

Guarantees: nothing existing is overwritten; `config.toml` is written last, so a folder with it is complete. Private
files have mode 0600 in folders of mode 0700. The federation's root key is made here for convenience and belongs on
another, offline medium. Source: docs/security.md, enrolment and keys at rest.
"""

import dataclasses
import datetime
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tomli_w

from edgefl_coordinator.coordinator import SECRET_BYTES
from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.jobs import make_job
from edgefl_coordinator.settings import Home, Settings, settings_from_table, settings_to_table
from edgefl_coordinator.tls import make_development_certificate
from edgefl_protocol.durable import write_atomic
from edgefl_protocol.key_files import sealing_key_to_pem, signing_key_to_pem
from edgefl_protocol.keys import generate_sealing_key, generate_signing_key


@dataclass(frozen=True)
class TaskFacts:
    """What the trainer knows about a method and a backbone."""

    shares_maps: bool
    backbone: Mapping[str, Any]


def make_home(home: Home, table: Mapping[str, Any], passphrase: bytes | None = None) -> Settings:
    """Make a coordinator's folder.

    Args:
        home: the folder; it may exist, without a config.toml.
        table: the settings as parsed TOML.
        passphrase: encrypts the private keys; None leaves them to the file mode.

    Raises:
        OperatorError: the folder holds a coordinator already, or a setting is out of bounds.
        StorageError: a file cannot be written.
    """
    if home.config.exists():
        raise OperatorError(f"{home.root} holds a coordinator already; choose another folder")
    root = generate_signing_key()
    settings = check_table({**table, "root_key_id": root.key_id})
    for folder in (home.root, home.keys, home.tls, home.blobs, home.jobs):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    signing, sealing = generate_signing_key(), generate_sealing_key(settings.suite)
    host = urlsplit(settings.public_url).hostname or "localhost"
    names = [name for name in (host, settings.host) if name not in ("0.0.0.0", "::")]  # noqa: S104 - never a name
    certificate = make_development_certificate(names, datetime.datetime.now(datetime.UTC))
    private = {
        home.keys / "signing.key": signing_key_to_pem(signing, passphrase),
        home.keys / "sealing.key": sealing_key_to_pem(sealing, passphrase),
        home.keys / "root.key": signing_key_to_pem(root, passphrase),
        home.keys / "secret.bin": secrets.token_bytes(SECRET_BYTES),
        home.tls / "server.key": certificate.key,
    }
    public = {home.tls / "server.pem": certificate.chain, home.tls / "ca.pem": certificate.ca}
    for path, data in private.items():
        write_atomic(path, data, mode=0o600)
    for path, data in public.items():
        write_atomic(path, data)
    write_atomic(home.config, tomli_w.dumps(settings_to_table(settings)).encode(), mode=0o600)
    return settings


def check_table(table: Mapping[str, Any]) -> Settings:
    """Return the settings of a parsed TOML table.

    Raises:
        OperatorError: a setting is unknown, missing or out of bounds.
    """
    try:
        return settings_from_table(table)
    except (ValueError, TypeError) as error:
        raise OperatorError(str(error)) from error


def ask_trainer(method: str, backbone: str, image_px: int | None, seed: int) -> TaskFacts:
    """Return what the server has to know of a method and a backbone. Imports the trainer.

    Args:
        method: a name of the method table.
        backbone: as `edgefl-train --backbone` takes it.
        image_px: side of the images in pixels; None for the backbone's own.
        seed: of an untrained backbone.

    Raises:
        OperatorError: there is no such method.
        EdgeflError: there is no such backbone.
    """
    from edgefl_trainer.methods import METHODS
    from edgefl_trainer.models.backbones import load_backbone

    if method not in METHODS:
        raise OperatorError(f"there is no method {method}; known: {', '.join(sorted(METHODS))}")
    spec = dataclasses.asdict(load_backbone(backbone, image_px=image_px, seed=seed).spec)
    backbone_facts = {**spec, "mean": list(spec["mean"]), "std": list(spec["std"])}
    return TaskFacts(METHODS[method]().travels == ("maps",), backbone_facts)


def try_first_job(settings: Settings) -> None:
    """Do what the worker will do first, so that settings the method refuses show at `init`. Imports the trainer.

    Raises:
        OperatorError: the method does not exist or does not take these settings.
        EdgeflError: the method refuses the task or backbone.
    """
    from edgefl_coordinator.worker import run_job

    run_job(make_job(settings, "start", 0))


def table_from_run(run: Path) -> dict[str, Any]:
    """Return the [task] table and rounds of a finished training run. Imports the trainer.

    Raises:
        EdgeflError: it is not the directory of a finished run.
    """
    from edgefl_trainer.engine.models import open_run

    finished = open_run(run)
    spec = dataclasses.asdict(finished.backbone.spec)
    return {
        "method": finished.settings.method,
        "name": finished.settings.task,
        "classes": list(finished.classes),
        "seed": finished.settings.seed,
        "epochs": finished.settings.epochs,
        "shares_maps": finished.settings.build_method().travels == ("maps",),
        "backbone": {**spec, "mean": list(spec["mean"]), "std": list(spec["std"])},
        "settings": dict(finished.settings.hyper),
    }
