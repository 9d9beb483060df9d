"""What the presets `tiny`, `bench84` and `paper` mean for a method: what it declares, else a schedule without settings.

`paper` is the schedule and the settings of the paper; the others shorten them to what a person can wait for.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from edgefl_trainer.contract import Method, Presets

PresetName = Literal["tiny", "bench84", "paper"]

_USUAL: "Presets" = {
    "tiny": {"rounds": 2, "epochs": 1, "images_per_site": 120},
    "bench84": {"rounds": 5, "epochs": 2, "images_per_site": 1200},
    "paper": {"rounds": 5, "epochs": 15},
}


def preset_of(
    method: "type[Method]", preset: PresetName, backbone: str, hyper: Mapping[str, Any], *, asked: bool = False
) -> Mapping[str, Any]:
    """Return what a preset stands for with one method; `backbone` and `hyper` are what is given, if anything.

    `asked`: the pictures are asked questions, which the method answers.
    """
    from edgefl_trainer.contract import declared

    own = declared(method)
    if asked and own.asked is not None:
        return own.asked.presets[preset]
    return (_USUAL if own.presets is None else own.presets(backbone, hyper))[preset]
