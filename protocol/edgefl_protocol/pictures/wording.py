"""What a score says in words: reasons to refer, or the rules that were tried; how much evidence the model has; classes.

Guarantees: no sentence says that nothing needs a look. Where no rule fires, the sentence names the rules that were
asked, and those that could not be. Beside a prediction stands what the suspicious classes have together. Two numbers
that differ are never written alike. Device and trainer print these same sentences.
"""

from edgefl_protocol.pictures.referral import GATE_REASONS, REASON_WORDS
from edgefl_protocol.pictures.score import Score

MUCH_BELOW, LITTLE_FROM = 1 / 3, 2 / 3  # vacuity; evidence twice the prior's weight, and half of it

RULE_NAMES = {
    "suspicious_class": "suspicious class",
    "vacuity": "too little evidence",
    "dissonance": "evidence in conflict",
    "blur": "blur",
    "exposure": "exposure",
    "size": "size",
    "not_skin": "colours of skin",
    "unseen_class": "class it was not trained on",
    "model_expired": "expiry date",
}
_EXPOSURE = {"dark": "it is too dark", "bright": "it is too bright"}
_FAULTS = {
    "blur": "it is blurred",
    "exposure": "it is too dark or too bright",
    "size": "it has fewer pixels than the model reads",
    "not_skin": "its colours are not those of skin",
}
_MALIGNANCY = {
    "malignant": "the predicted class is malignant",
    "premalignant": "the predicted class can become malignant",
    "unknown": "it is not known whether the predicted class is benign",
}


def class_title(score: Score, label: str) -> str:
    """Full name of a class with its label, such as `Melanoma (MEL)`."""
    name = score.info_of(label).name
    return name if name.casefold() == label.casefold() else f"{name} ({label})"


def meaning(score: Score, label: str) -> str:
    """Say in sentences what a class means."""
    if score.info is None:
        return "The model does not say what this class means."
    info = score.info_of(label)
    if info.malignancy == "unknown":
        return f"{info.meaning} Whether it is benign is not known."
    return f"{info.meaning} This class is {info.malignancy}."


def second_class(score: Score) -> str | None:
    """Find the most probable class beside the predicted one; None where nothing is predicted."""
    others = [name for name in score.probabilities if name != score.predicted]
    return max(others, key=score.probabilities.__getitem__) if score.predicted is not None and others else None


def percent(share: float) -> str:
    """Write a probability; nothing short of certainty is rounded to it, nor anything above none to none."""
    if share < 0.005:
        return "0%" if share == 0 else "<1%"
    return f"{share:.0%}" if round(share * 100) < 100 else ">99%"


def likely(score: Score, label: str) -> str:
    """Write the probability of a class in as many digits as tell it from the predicted one's and the second one's."""
    named = (score.predicted, second_class(score))
    return percent_beside(score.probabilities[label], *(score.probabilities[one] for one in named if one is not None))


def percent_beside(share: float, *others: float) -> str:
    """Write a probability as `percent` does, in more digits where another one would else read the same."""
    values = {share, *others}
    if len({percent(value) for value in values}) == len(values):
        return percent(share)
    values |= {0.0, 1.0}  # also with more digits nothing is rounded to none or to certainty
    enough = (digits for digits in range(1, 16) if len({f"{one:.{digits}%}" for one in values}) == len(values))
    return f"{share:.{next(enough, 15)}%}"


def apart(value: float, limit: float, form: str) -> tuple[str, str]:
    """Write a number and the limit it is compared with, in as many digits as keep two different ones apart.

    Args:
        form: `%` for shares, `f` for plain numbers.
    """
    least = 1 if form == "%" else 2
    for digits in range(least, 16):
        said = f"{value:.{digits}{form}}", f"{limit:.{digits}{form}}"
        if said[0] != said[1]:
            return said
    return f"{value:.{least}{form}}", f"{limit:.{least}{form}}"


def suspicious_words(score: Score) -> str | None:
    """Say how probable the suspicious classes are together, and which of them most; None where nothing is predicted."""
    asking = [name for name in score.probabilities if score.info_of(name).suspicious]
    if score.predicted is None or score.info is None or score.suspicious_probability is None or not asking:
        return None
    most = max(asking, key=score.probabilities.__getitem__)
    together = _against_limit(score)[0]
    if len(asking) == 1:
        return f"suspicious class {class_title(score, most)} {together}"
    return f"suspicious classes {together} together, most probable {class_title(score, most)} {likely(score, most)}"


def evidence_words(score: Score) -> str:
    """Say how much evidence the model has for its answer, with the number behind it and the rule's threshold.

    Vacuity does not tell whether a picture is like those that the model learned: noise may get much evidence.
    """
    number, limit = _uncertainty(score)
    asks = "" if limit is None else f"; the rule asks for a look above {limit}"
    if score.vacuity is None:
        return f"This model cannot say how much evidence it has. Entropy {number} nats{asks}"
    much = "much" if score.vacuity < MUCH_BELOW else "some" if score.vacuity < LITTLE_FROM else "little"
    if "vacuity" in score.refer_reasons:  # the words never contradict the rule
        much = "little"
    answer = "any answer" if score.predicted is None else "its answer"
    return f"The model has {much} evidence for {answer}. Vacuity {number} (0: much evidence, 1: none){asks}"


def faults_in_words(score: Score) -> list[str]:
    """Word as clauses what is wrong with the picture itself, which a new one may mend."""
    return [_fault(score, reason) for reason in score.refer_reasons if reason in GATE_REASONS]


def reasons_in_words(score: Score) -> list[str]:
    """Word each other reason to refer as a clause.

    Where nothing is predicted because the picture is not of skin, no class is spoken of: the model's figures for it are
    no finding.
    """
    left_out = {*GATE_REASONS, *(("suspicious_class", "unseen_class") if "not_skin" in score.refer_reasons else ())}
    return [_reason(score, reason) for reason in score.refer_reasons if reason not in left_out]


def outcome(score: Score) -> str:
    """Say in sentences what to do: a new picture first where this one is at fault; else which rules were tried."""
    if score.refer:
        faults, reasons = faults_in_words(score), reasons_in_words(score)
        said = [f"Take the picture again: {'; '.join(faults)}."] if faults else []
        if reasons:
            said.append(f"Refer to a dermatologist: {'; '.join(reasons)}.")
        elif faults:
            said.append("If you cannot, refer to a dermatologist.")
        return " ".join(said)
    names = ", ".join(_rule(score, rule) for rule in score.rules_tried)
    return " ".join([f"None of these {len(score.rules_tried)} rules asks for a look: {names}.", *not_set(score)])


def in_brief(score: Score) -> str:
    """Give the reasons, or the number of rules that did not ask for a look, as a clause for a line."""
    if score.refer:
        faults, reasons = faults_in_words(score), reasons_in_words(score)
        again = [f"take the picture again{'' if reasons else ', or refer'}: {'; '.join(faults)}"] if faults else []
        said = "; ".join([*again, *([f"refer: {'; '.join(reasons)}"] if reasons else [])])
    else:
        said = f"none of the {len(score.rules_tried)} rules asks for a look"
    return said if score.model.at_chance is None else f"{said}; this model was not found better than chance"


def not_set(score: Score) -> list[str]:
    """Sentences about rules without a threshold, whose silence is no answer."""
    said = []
    if "vacuity" not in score.rules_tried:
        said.append("No rule says when an uncertain picture asks for a look.")
    if score.suspicious_rule == "default":
        said.append(
            "No threshold for suspicious classes could be chosen on pictures: "
            f"{score.suspicious_from:.0%} is a default."
        )
    if "suspicious_class" not in score.rules_tried:
        said.append("This model knows benign classes only, so it cannot find a suspicious one.")
    return said


def _fault(score: Score, reason: str) -> str:
    if reason == "exposure" and score.exposure is not None:
        return _EXPOSURE[score.exposure]
    return _FAULTS[reason]


def _reason(score: Score, reason: str) -> str:
    if reason == "vacuity" and score.vacuity is None:  # entropy tells how uncertain an answer is, not how much evidence
        number, limit = _uncertainty(score)
        asks = "" if limit is None else f"; the rule asks above {limit}"
        return f"its answer is too uncertain (entropy {number} nats{asks})"
    return _suspicious(score) if reason == "suspicious_class" else REASON_WORDS[reason]


def _rule(score: Score, rule: str) -> str:
    if rule == "suspicious_class" and score.suspicious_from is not None and score.predicted is not None:
        together, limit = _against_limit(score)
        return f"suspicious class ({together} together, asks from {limit})"
    return "uncertain answer" if rule == "vacuity" and score.vacuity is None else RULE_NAMES[rule]


def _suspicious(score: Score) -> str:
    if score.info is None:
        return "the model does not say which of its classes are benign, so it asks for a look at every picture"
    if score.predicted is not None and score.info_of(score.predicted).suspicious:
        return _MALIGNANCY[score.info_of(score.predicted).malignancy]
    if score.predicted is None or score.suspicious_probability is None or score.suspicious_from is None:
        return REASON_WORDS["suspicious_class"]
    together, limit = _against_limit(score)
    by_default = " by default" if score.suspicious_rule == "default" else ""
    return (
        f"classes that are not known to be benign have {together} together, and the rule asks from {limit}{by_default}"
    )


def _uncertainty(score: Score) -> tuple[str, str | None]:
    """Write how uncertain the answer is, and above what that asks for a look: of vacuity, without it of entropy."""
    measure, limit = (
        (score.entropy_nats, score.entropy_from) if score.vacuity is None else (score.vacuity, score.vacuity_from)
    )
    number, above = apart(measure, measure if limit is None else limit, "f")
    return number, None if limit is None else above


def _against_limit(score: Score) -> tuple[str, str]:
    """Write what suspicious classes have together, and from where that asks for a look."""
    together = score.suspicious_probability or 0.0
    return apart(together, together if score.suspicious_from is None else score.suspicious_from, "%")
