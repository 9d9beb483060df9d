"""What a bundle says of the licences that bind its model.

Guarantees: of questions, the sets that the run read are named and no others; where it read one whose licence is not
known here, or its network did, the note says whose licence counts and names none for it.
"""

from typing import Final

from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.models.shipped import APART

PICTURES: Final = (
    "The weights derive from the training sites' images, and the licences of those images bind this model: the images "
    "of ISIC 2019 are CC BY-NC 4.0, so a model learned from them is not for commercial use."
)
_ANSWERS: Final = (
    "The weights derive from the training sites' images and questions and from the images that the network below was "
    "learned on, and the licences of all bind this model: "
)
_QUESTIONS: Final = {"vqa-rad": "VQA-RAD is CC0 1.0", "slake": "SLAKE is CC BY 4.0"}  # by the kind of a SPEC
_PHOTOGRAPHS: Final = "ISIC 2019, of the network, is {}"


def answers_licence(settings: RunSettings) -> str:
    """Say which licences bind a model that answers questions, by the sets and the network that its run names."""
    kinds = dict.fromkeys(spec.partition(":")[0] for spec in settings.data)
    named = [_QUESTIONS[kind] for kind in kinds if kind in _QUESTIONS]
    if len(named) < len(kinds) or not kinds:
        named.append("of other sets, see those that the run names")
    if settings.backbone in APART:
        named.append(_PHOTOGRAPHS.format(APART[settings.backbone]))
    return f"{_ANSWERS}{', '.join(named)}."
