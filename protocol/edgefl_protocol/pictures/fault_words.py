"""What a score says in words of the picture itself: what is wrong with it, and how to take it again.

Guarantees: what is only a consequence of another fault is not told beside it. Source: docs/reference/picture-gate.md.
"""

from collections.abc import Sequence

from edgefl_protocol.pictures.referral import PICTURE_FAULTS
from edgefl_protocol.pictures.score import Score

PICTURE_REASONS = (*PICTURE_FAULTS, "light")  # about the picture: a new one may mend it
# What is only a consequence of another fault is not told beside it: a dark picture looks blurred, too.
_HIDDEN_BY = {
    "exposure": {"blur", "not_skin", "dark_corners", "light"},
    "not_skin": {"dark_corners", "light"},
    "dark_corners": {"light"},
}
_EXPOSURE = {"dark": "it is too dark", "bright": "it is too bright"}
_FAULTS = {
    "blur": "it is blurred",
    "exposure": "it is too dark or too bright",
    "size": "it has fewer pixels than the model reads",
    "shape": "it is much longer one way than the other, and the model reads a square",
    "not_skin": "its colours are not those of skin",
    "dark_corners": "it has a frame, an even side or dark corners, and a model can answer by these",
    "transparent": "more than a tenth of it is transparent and was read as white",
    "light": "it is in other light than the pictures that the model learned from",
}
ANOTHER_CAMERA = (
    "If all pictures of your camera are like this, another camera or lamp helps, or a model that learned from such "
    "pictures."
)
_LIGHT = {
    "darker": "it is darker than",
    "brighter": "it is brighter than",
    "redder": "its light is redder than that of",
    "greener": "its light is greener than that of",
    "yellower": "its light is yellower than that of",
    "bluer": "its light is bluer than that of",
    "darker in its corners": "its corners are darker than those of",
}


def faults_in_words(score: Score) -> list[str]:
    """Word as clauses what is wrong with the picture itself, which a new one may mend, without mere consequences."""
    told = [reason for reason in score.refer_reasons if reason in PICTURE_REASONS]
    if "transparent" in told:  # it was read on white, which is no skin, even, and bright, but never dark
        white = {"not_skin", "dark_corners"}
        white |= {"exposure"} if score.exposure == "bright" else set()
        white |= {"light"} if score.light != "darker" else set()
        told = [reason for reason in told if reason not in white]
    hidden = {other for reason in told for other in _HIDDEN_BY.get(reason, ())}
    if score.light == "darker":  # a dim picture has weak edges, and is measured as blurred
        hidden.add("blur")
    return [_fault(score, reason) for reason in told if reason not in hidden]


def hangs_on_the_camera(score: Score, faults: Sequence[str]) -> bool:
    """Tell whether the light is among the faults that are told: a new picture of the same camera may not mend it."""
    return "light" in score.refer_reasons and _fault(score, "light") in faults


def how_again(score: Score, faults: Sequence[str]) -> str:
    """Say how to take a picture again whose light alone is at fault; beside another fault it would stand for that."""
    if len(faults) > 1 or not hangs_on_the_camera(score, faults):
        return ""
    return " with even light" if score.light == "darker in its corners" else " in other light"


def _fault(score: Score, reason: str) -> str:
    if reason == "exposure" and score.exposure is not None:
        return _EXPOSURE[score.exposure]
    if reason == "light" and score.light is not None:
        return f"{_LIGHT[score.light]} the pictures that the model learned from"
    return _FAULTS[reason]
