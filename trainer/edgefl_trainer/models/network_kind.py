"""Which kind of network a backbone's name stands for, without building it: what presets by architecture ask."""

from pathlib import Path
from typing import Literal

from edgefl_trainer.models.backbone_names import BACKBONE_FILE, file_facts
from edgefl_trainer.models.shipped import shipped_backbones

NetworkKind = Literal["vit", "cnn"]
PLAIN_VITS = ("vision_transformer", "deit")  # modules of timm


def network_kind(name: str) -> NetworkKind:
    """Tell the kind of a network: `cnn` where it is convolutional, else `vit`, also where the name stands for nothing.

    `models.backbones.load_backbone` takes the same names and says what is wrong with one.
    """
    form, _, rest = name.partition(":")
    if form in ("cnn", "package"):
        return "cnn"
    if form == "timm":
        return _kind_in_timm(rest)
    if form in ("run", "file"):
        return _kind_in_file(Path(rest) / BACKBONE_FILE if form == "run" else Path(rest))
    shipped = shipped_backbones().get(name)
    return "vit" if shipped is None else _kind_in_file(shipped)


def names_learned_positions(name: str) -> bool:
    """Tell whether a name means one of timm's vision transformers: their positions are learned."""
    import timm

    form, _, model = name.partition(":")
    return form == "timm" and timm.is_model(model.partition(".")[0]) and network_kind(name) == "vit"


def _kind_in_timm(model: str) -> NetworkKind:
    import timm

    architecture = model.partition(".")[0]
    if not timm.is_model(architecture):
        return "vit"
    module = timm.model_entrypoint(architecture).__module__.rpartition(".")[2]
    return "vit" if module in PLAIN_VITS else "cnn"


def _kind_in_file(path: Path) -> NetworkKind:
    architecture = file_facts(path).get("architecture")
    return "cnn" if isinstance(architecture, dict) and "cnn" in architecture else "vit"
