"""What a score says in words: reasons to refer, or the rules that were tried; how much evidence the model has; classes.

Guarantees: no sentence says that nothing needs a look. Where no rule fires, the sentence says that this is no
all-clear, how many pictures of suspicious classes were tried, and how many of these passed; rules that were asked are
named, and those that could not be. Beside a prediction stands what the suspicious classes have together. Two numbers
that are compared are told apart, by one digit more or as "just below", and one number is written alike everywhere.
Device and trainer print these same sentences.
"""

from collections.abc import Sequence

from edgefl_protocol.pictures.fault_words import (
    ANOTHER_CAMERA,
    PICTURE_REASONS,
    faults_in_words,
    hangs_on_the_camera,
    how_again,
)
from edgefl_protocol.pictures.referral import REASON_WORDS
from edgefl_protocol.pictures.score import ModelInfo, Score
from edgefl_protocol.pictures.written_numbers import against, apart, digits_apart, percent, uncertain_share
from edgefl_protocol.sentences import counted, listed

NO_ALL_CLEAR = "No rule asks for a look. That is no all-clear."
SECOND = "second"
NOT_COUNTED = "How many suspicious pictures pass was not counted."

ON_WHITE = "the picture's transparent parts were read as white"  # of a picture; docs/decisions/0011
MODELS_REASONS = (
    "suspicious_class",
    "vacuity",
    "dissonance",
    "unseen_class",
    "untested_class",
    "unsteady",
)  # found by what the network answers
RULE_NAMES = {
    "suspicious_class": "suspicious class",
    "vacuity": "too little evidence",
    "dissonance": "evidence in conflict",
    "blur": "blur",
    "exposure": "exposure",
    "size": "size",
    "shape": "shape",
    "not_skin": "colours of skin",
    "dark_corners": "frame or dark corners",
    "transparent": "transparent parts",
    "light": "light unlike what it learned from",
    "unseen_class": "class it was not trained on",
    "untested_class": "class it was hardly tested on",
    "model_expired": "expiry date",
    "unsteady": "the same picture turned",
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
    another = "; the picture may show another" if info.malignancy == "benign" else ""
    return f"{info.meaning} This class is {info.malignancy}{another}."


def on_white(score: Score) -> str | None:
    """Say that a picture was scored on white, where that is little: more of it is a reason to refer."""
    return ON_WHITE if score.transparent and "transparent" not in score.refer_reasons else None


def second_class(score: Score) -> str | None:
    """Find the most probable class beside the predicted one; None where nothing is predicted."""
    others = [name for name in score.probabilities if name != score.predicted]
    return max(others, key=score.probabilities.__getitem__) if score.predicted is not None and others else None


def second_words(score: Score) -> str | None:
    """Name the second class and its probability, as a clause; None where `suspicious_words` names it as well."""
    second = second_class(score)
    if second is None or (second == _most_suspicious(score) and suspicious_words(score) is not None):
        return None
    place = second_place(score, second)
    return f"{place}{'' if place == SECOND else ':'} {class_title(score, second)} {likely(score, second)}"


def second_place(score: Score, label: str) -> str:
    """Say in which place the most probable other class stands: only one that is never predicted can come first."""
    if score.predicted is None or score.probabilities[label] <= score.probabilities[score.predicted]:
        return SECOND
    return "most probable, but never predicted here"


def likely(score: Score, label: str) -> str:
    """Write the probability of a class, in as many digits as every probability of the score is written in."""
    return percent(score.probabilities[label], _digits(score))


def without_strongest(score: Score) -> str | None:
    """Write the predicted class's probability where the map's strongest part is hidden; None where nobody looked."""
    if score.predicted is None or score.heatmap_fall is None:
        return None
    return percent(score.probabilities[score.predicted] - score.heatmap_fall, _digits(score))


def taught_words(sites: Sequence[str], federation: str | None = None, *, here: bool = False) -> str:
    """Say from which sites' pictures a model learned, as the beginning of a sentence.

    Args:
        federation: a live one whose other sites, too, taught it.
        here: whether its values learned on this device, too.
    """
    whose = [f"the {'site' if len(sites) == 1 else 'sites'} {listed(sites)}"] if sites else []
    whose += ["this device"] if here and (sites or federation) else []
    whose += [] if federation is None else [_others_of(federation)]
    whose = whose or ["sites that it does not name", *(["this device"] if here else [])]
    return f"It learned from pictures of {' and of '.join(whose)}"


def _others_of(federation: str) -> str:
    """Call the sites of a live federation of which a model does not know the names."""
    return f"other sites of the federation {federation}, which it does not name"


def learned_where(model: ModelInfo) -> str:
    """Say whose pictures a model learned from, and what to expect of it elsewhere.

    Of a site's own model that learned from other sites, too, these are elsewhere: its rules were set on its own site's
    pictures, and it may have been fitted to them.
    """
    here, others = model.state_kind == "personal", [site for site in model.learned_from if site != model.site]
    federation = model.learned_from_federation
    if model.site in model.learned_from and model.taught_elsewhere and not here:
        whose = listed(others) if federation is None else _others_of(federation)
        return (
            f"It is the model of the site {model.site}, and also learned from pictures of {whose}; expect "
            f"more wrong answers on pictures of any centre or camera but {model.site}'s."
        )
    whose = taught_words(model.learned_from, federation, here=here)
    return f"{whose}; expect more wrong answers on pictures of another centre or camera."


def _asking_kind(score: Score) -> str:
    """Call the suspicious classes so, or not known to be benign where that is all that is known of each."""
    asking = [one for one in map(score.info_of, score.probabilities) if one.suspicious]
    mixed = all(one.malignancy == "unknown" for one in asking)  # such a class may be benign: its name is no finding
    return "classes not known to be benign" if mixed else "suspicious classes"


def suspicious_words(score: Score) -> str | None:
    """Say how probable the suspicious classes are together, and which of them most.

    None where nothing is predicted, or where the only such class is the predicted one, whose probability is told.
    """
    most = _most_suspicious(score)
    if score.predicted is None or score.info is None or score.suspicious_probability is None or most is None:
        return None
    asking = [one for one in map(score.info_of, score.probabilities) if one.suspicious]
    if len(asking) == 1 and most == score.predicted:
        return None  # the prediction has said it
    if len(asking) == 1:
        what = "not known to be benign:" if asking[0].malignancy == "unknown" else "suspicious class"
        return f"{what} {class_title(score, most)} {_beside_limit(score, most)}"
    likeliest = f"{class_title(score, most)} {_beside_limit(score, most)}"
    return f"{_asking_kind(score)} {_against_limit(score)[0]} together, most probable {likeliest}"


def uncertainty_words(score: Score) -> str:
    """Write how uncertain the answer is, as a clause for a line; above what, where that asks for a look."""
    number, limit = uncertainty_and_limit(score)
    above = f", above the rule's {limit}" if "vacuity" in score.refer_reasons and limit is not None else ""
    return (f"uncertainty {number}" if score.vacuity is None else f"vacuity {number}") + above


def reasons_in_words(score: Score) -> list[str]:
    """Word each other reason to refer as a clause.

    Where nothing is predicted because the picture is too small or not of skin, no reason of the model is given: its
    figures for it are no finding, so every model says the same of such a picture.
    """
    left_out = {*PICTURE_REASONS, *(() if score.judged else MODELS_REASONS)}
    return [_reason(score, reason) for reason in score.refer_reasons if reason not in left_out]


def outcome(score: Score) -> str:
    """Say in sentences what to do: a new picture first where this one is at fault.

    Where no rule asks for a look it says what that is worth, never that nothing needs one; `tried_words` names the
    rules.
    """
    if score.refer:
        faults, reasons = faults_in_words(score), reasons_in_words(score)
        said = [f"Take the picture again{how_again(score, faults)}: {'; '.join(faults)}."] if faults else []
        said += [ANOTHER_CAMERA] if hangs_on_the_camera(score, faults) else []
        if reasons:
            said.append(f"Refer to a dermatologist: {'; '.join(reasons)}.")
        elif faults:
            said.append("If you cannot, refer to a dermatologist. A new picture that passes is no all-clear either.")
        return " ".join(said)
    return " ".join([NO_ALL_CLEAR, *passed_words(score), *not_set(score)])


def tried_words(score: Score) -> str | None:
    """Name the rules that did not ask for a look; None where one did."""
    if score.refer:
        return None
    return f"Rules tried: {', '.join(_rule(score, rule) for rule in score.rules_tried)}."


def in_brief(score: Score) -> str:
    """Give the reasons, or what it is worth that no rule asks for a look, as a clause for a line."""
    if score.refer:
        faults, reasons = faults_in_words(score), reasons_in_words(score)
        how = f"{how_again(score, faults)}{'' if reasons else ', or refer'}"
        again = [f"take the picture again{how}: {'; '.join(faults)}"] if faults else []
        return "; ".join([*again, *([f"refer: {'; '.join(reasons)}"] if reasons else [])])
    worth = [*passed_words(score), *not_set(score)]
    said = "; ".join(f"{sentence[0].lower()}{sentence[1:-1]}" for sentence in worth)
    limit = "" if score.suspicious_from is None else f" ({_asking_kind(score)} ask from {_against_limit(score)[1]})"
    return f"no rule asks for a look{limit}; that is no all-clear: {said}"


def passed_words(score: Score) -> list[str]:
    """Say in sentences what passing was worth when it was tried, or that nobody tried.

    First, of the suspicious pictures tried, how many passed: without their number nobody knows how far the next
    sentence goes. That tells of all that passed how many were suspicious: it is what a pass of this picture says.
    """
    tried = score.suspicious_tried
    if tried is None or "suspicious_class" not in score.rules_tried:
        return [NOT_COUNTED]
    before = ", before this device learned" if score.model.state_kind == "personal" else ""
    whose = "" if score.model.site is None else f" at the site {score.model.site}"
    said = [
        f"Of {counted(tried.pictures, 'picture')} {_suspicious_kind(score)}, kept from learning{whose}{before}, "
        f"{tried.passed} passed the rule for suspicious classes."
    ]
    passed = tried.passed + (tried.benign_passed or 0)
    if passed == 0:
        said.append("No tried picture passed, so nobody knows how often a pass is wrong.")
    elif tried.benign_passed is not None:
        were = "was" if tried.passed == 1 else "were"
        one = sum(score.info_of(label).suspicious for label in score.probabilities) == 1
        these = "this class" if one else "these classes"
        said.append(f"Of {counted(passed, 'picture')} that passed in all, {tried.passed} {were} of {these}.")
    return said


def _suspicious_kind(score: Score) -> str:
    """Name what the suspicious classes hold, as `of …`: cancers are called so where every such class is one."""
    asking = [one for one in score.probabilities if score.info_of(one).suspicious]
    if len(asking) == 1:
        mixed = ", which may hold cancers" if score.info_of(asking[0]).malignancy == "unknown" else ""
        return f"of the class {class_title(score, asking[0])}{mixed}"
    known = {score.info_of(one).malignancy for one in asking}
    if known == {"malignant"}:
        return "of malignant classes"
    return (
        "of classes that are not known to be benign" if "unknown" in known else "of malignant or premalignant classes"
    )


def not_set(score: Score) -> list[str]:
    """Sentences about rules without a threshold, whose silence is no answer."""
    said = []
    if "vacuity" not in score.rules_tried:
        said.append("No rule says when an uncertain picture asks for a look.")
    if score.suspicious_rule == "default":
        said.append(
            f"No threshold for suspicious classes could be chosen on pictures: {_against_limit(score)[1]} is a default."
        )
    if "light" not in score.rules_tried:
        said.append("No rule compares the light with that of the pictures learned from.")
    if "untested_class" not in score.rules_tried:
        said.append("No rule asks about classes that it was hardly tested on.")
    if "suspicious_class" not in score.rules_tried:
        said.append("This model knows benign classes only, so it cannot find a suspicious one.")
    return said


def _most_suspicious(score: Score) -> str | None:
    """Find the most probable suspicious class; None where there is none."""
    asking = [name for name in score.probabilities if score.info_of(name).suspicious]
    return max(asking, key=score.probabilities.__getitem__, default=None)


def _reason(score: Score, reason: str) -> str:
    if reason == "vacuity" and score.vacuity is None:  # entropy tells how uncertain an answer is, not how much evidence
        return "its answer is too uncertain"
    if reason == "unseen_class":
        likeliest = class_title(score, max(score.probabilities, key=score.probabilities.__getitem__))
        if score.model.site is not None and score.model.taught_elsewhere and score.model.state_kind == "bundle":
            return f"it looks most like {likeliest}, which no training picture of the site {score.model.site} showed"
        return f"it looks most like {likeliest}, which the model was not trained on"
    if reason == "untested_class" and score.predicted is not None:
        return f"too few test pictures tell how well the model knows {class_title(score, score.predicted)}"
    if reason == "unsteady":
        return f"{REASON_WORDS[reason]}{_when_turned(score)}"
    return _suspicious(score) if reason == "suspicious_class" else REASON_WORDS[reason]


def _when_turned(score: Score) -> str:
    """Say what suspicious classes have in a turn, where that is what asks for a look."""
    found, limit = score.turned_suspicious_probability, score.suspicious_from
    if found is None or limit is None or found < limit:
        return ""
    return f": {_asking_kind(score)} then have {against(found, limit, 0)[0]}"


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
    asking = [label for label in score.probabilities if score.info_of(label).suspicious]
    have = f"suspicious classes have {together} together"
    if len(asking) == 1:
        have = f"{class_title(score, asking[0])} has {together}"
    return f"{have}, and the rule asks from {limit}{by_default}"


def uncertainty_and_limit(score: Score) -> tuple[str, str | None]:
    """Write how uncertain the answer is, and above what that asks for a look: of vacuity, without it of entropy."""
    if score.vacuity is None:
        return uncertain_share(score.entropy_nats, score.entropy_from, len(score.probabilities))
    number, above = apart(score.vacuity, score.vacuity if score.vacuity_from is None else score.vacuity_from)
    return number, None if score.vacuity_from is None else above


def _against_limit(score: Score) -> tuple[str, str]:
    """Write what suspicious classes have together, and from where that asks for a look."""
    together, digits = score.suspicious_probability or 0.0, _digits(score)
    limit = together if score.suspicious_from is None else score.suspicious_from
    return against(together, limit, digits)


def _beside_limit(score: Score, label: str) -> str:
    """Write the probability of a suspicious class, which the reader compares with the threshold, too.

    That of the predicted class is written as the headline has it. Where the classes together reach the threshold, no
    single one is called below it: the rule asks for a look.
    """
    limit = score.suspicious_from
    if label == score.predicted or limit is None or (score.suspicious_probability or 0.0) >= limit:
        return likely(score, label)
    return against(score.probabilities[label], limit, _digits(score))[0]


def _digits(score: Score) -> int:
    """Count the digits in which all probabilities of a score are written, so that one is never said in two ways.

    Apart stay the classes that are named, a sum and its threshold, and an answer with and without a part of its map.
    """
    compared: list[set[float]] = []
    if score.predicted is not None:
        first, second, most = score.probabilities[score.predicted], second_class(score), _most_suspicious(score)
        compared.append({first, *(score.probabilities[one] for one in (second, most) if one is not None)})
        compared.append({first, first - (score.heatmap_fall or 0.0)})
    if score.suspicious_probability is not None and score.suspicious_from is not None:
        compared.append({score.suspicious_probability, score.suspicious_from})
    return max(map(digits_apart, compared), default=0)
