"""How much evidence a model has for its answer, and which other class has as much, in words under a drawn picture."""

from edgefl_protocol.pictures.score import Score
from edgefl_protocol.pictures.wording import SECOND, class_title, second_place, uncertainty_and_limit

MUCH_BELOW, LITTLE_FROM = 1 / 3, 2 / 3  # K/(K + evidence): evidence twice the prior's weight, and half of it
ALMOST, HALF = 0.9, 0.5  # of the named class's evidence, which another class has


def evidence_words(score: Score) -> str:
    """Say how much evidence the model has for its answer, which other class has as much, and the vacuity of them all.

    Vacuity does not tell whether a picture is like those that the model learned: noise may get much evidence.
    """
    number, limit = uncertainty_and_limit(score)
    asks = "" if limit is None else f"; the rule asks for a look above {limit}"
    if score.vacuity is None:
        uncertainty = f"Uncertainty {number} (0: none, 1: all classes alike)"
        return f"This model cannot say how much evidence it has. {uncertainty}{asks}"
    alone = _vacuity_alone(score, score.vacuity)
    much = "much" if alone < MUCH_BELOW else "some" if alone < LITTLE_FROM else "little"
    answer = "any answer" if score.predicted is None else "its answer"
    proof = "" if much == "little" else ", which does not make it right"
    if "vacuity" in score.refer_reasons:  # the words contradict neither the rule nor the scale
        much, proof = "too little", " by its rule"
    said = f"The model has {much} evidence for {answer}{proof}.{_evidence_for_another(score)}"
    return f"{said} Vacuity {number} (0: much evidence in all, 1: none){asks}"


def _vacuity_alone(score: Score, vacuity: float) -> float:
    """Compute what vacuity would be if the predicted class's evidence were all that there is; never less than it is."""
    if score.predicted is None or score.evidence is None:
        return vacuity
    classes = len(score.evidence)
    return max(vacuity, classes / (classes + score.evidence[score.predicted]))


def _evidence_for_another(score: Score) -> str:
    """Say in a sentence which other class has more evidence than the predicted one, or about as much; else nothing."""
    if score.predicted is None or score.evidence is None or len(score.evidence) == 1:
        return ""
    others = {name: value for name, value in score.evidence.items() if name != score.predicted}
    most, own = max(others, key=others.__getitem__), score.evidence[score.predicted]
    if others[most] <= HALF * own:
        return ""
    less = "almost as much" if others[most] >= ALMOST * own else "more than half as much"
    amount = "more" if others[most] > own else "as much" if others[most] == own else less
    never = "" if second_place(score, most) == SECOND else ", which is never predicted here"
    return f" It has {amount} for {class_title(score, most)}{never}."
