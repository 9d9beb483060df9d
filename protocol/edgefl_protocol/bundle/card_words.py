"""How good a card says its model is, in sentences for whoever scores with it: two lines, and what speaks against it.

Guarantees: a figure is never said without the number of pictures behind it; a model is called better than chance only
where the lower ends of both intervals, of balanced accuracy and of AUROC, lie above chance; an interval without width
is none. Trainer and device make these sentences of the same figures: `metrics.site` of a card is the site's entry in
`summary.json` (docs/design.md 5).
"""

from collections.abc import Mapping, Sequence
from typing import Final

from edgefl_protocol.bundle.figures import (
    HALF,
    CardFigure,
    figures_of,
    interval_of,
    number,
    rounds_without,
    site_figures,
    taught_elsewhere,
    temperature_at_bound,
)
from edgefl_protocol.bundle.model_card import REPORTED_RULE, Card, Labels, rule_tried
from edgefl_protocol.bundle.never_predicted import never_predicted
from edgefl_protocol.bundle.question_table import QuestionTable
from edgefl_protocol.bundle.question_words import question_lines, question_weaknesses
from edgefl_protocol.pictures.class_info import undescribed
from edgefl_protocol.pictures.suspicious import DEFAULT_SUSPICIOUS_FROM, threshold_in_force
from edgefl_protocol.sentences import UNTRAINED, counted, listed

_NAMES: Final = {"balanced_accuracy": "balanced accuracy", "auroc": "AUROC"}
_OFF: Final = 0.05  # from where on probabilities are called too high or too low: the whole interval lies beyond
_NO_THRESHOLD: Final = (
    "No threshold for suspicious classes was chosen on pictures: by default they ask for a look from "
    f"{DEFAULT_SUSPICIOUS_FROM:.0%} together."
)


def better_than_chance(figures: Mapping[str, object]) -> bool | None:
    """Tell whether a site's figures clear chance; None where they are missing, or lie above it without an interval."""
    found = [one.above_chance for one in _figures(figures)]
    if False in found:
        return False
    return True if len(found) == len(_NAMES) and all(found) else None


def at_chance_sentence(
    figures: Mapping[str, object], site: str | None, classes: Sequence[str] | None = None
) -> str | None:
    """Say that a model was not found better than chance; None where it was, or nobody can tell."""
    if better_than_chance(figures) is not False:
        return None
    return f"This model was not found better than chance: {_judged(figures, site, classes)}."


def quality_lines(card: Card, labels: Labels, questions: QuestionTable | None = None) -> tuple[str, str]:
    """Say in two lines how right the model was, and what its rule for suspicious classes or its threshold reached."""
    if questions is not None:
        return question_lines(card, labels, questions)
    figures = site_figures(card)
    right = (
        _judged(figures, card.site, labels.classes)
        if _figures(figures)
        else "its card states neither balanced accuracy nor AUROC"
    )
    return f"how right it was: {right}", f"suspicious classes: {_suspicion(card, labels)}"


def card_lines(card: Card, labels: Labels, questions: QuestionTable | None = None) -> list[str]:
    """Give the two lines, and what speaks against the model but for a missing threshold: the second line says it."""
    return [*quality_lines(card, labels, questions), *shown_weaknesses(card, labels, questions)]


def shown_weaknesses(
    card: Card, labels: Labels, questions: QuestionTable | None = None, *, learned_here: bool = False
) -> tuple[str, ...]:
    """Say what goes with every result: the weaknesses but for a missing threshold, which the result tells itself."""
    said = weaknesses(card, labels, questions, learned_here=learned_here)
    return tuple(one for one in said if one != _NO_THRESHOLD)


def weaknesses(
    card: Card, labels: Labels, questions: QuestionTable | None = None, *, learned_here: bool = False
) -> tuple[str, ...]:
    """Say in sentences what speaks against a model: what its own card says, and which cancers it never predicts.

    Args:
        labels: the classes; `seen` is that of the values in use.
        questions: of a bundle that answers some.
        learned_here: whether a device learned these values; else they are the bundle's.
    """
    figures, first = site_figures(card), untrained_warning(untrained=card.untrained)
    if questions is not None:
        without = filter(None, [_took_no_part(figures, card.site)])
        return (*first, *without, *question_weaknesses(card, labels, questions))
    never = never_predicted(labels, learned_here=learned_here, site=taught_elsewhere(card)).warning
    found = (*first, *figures_against(figures, card.site, labels.classes, card.temperature, never))
    chosen = card.suspicion is not None and card.suspicion.threshold is not None
    return (*found, _NO_THRESHOLD) if _has_suspicious(labels) and not chosen else found


def untrained_warning(*, untrained: bool) -> tuple[str, ...]:
    """Say that nothing was ever learned in a model's frozen network; nothing of another."""
    return (f"The network below this model was never trained: {UNTRAINED}.",) if untrained else ()


def figures_against(
    figures: Mapping[str, object],
    site: str | None,
    classes: Sequence[str],
    temperature: float,
    never: str | None = None,
) -> tuple[str, ...]:
    """Say in sentences what a site's figures and temperature say against its model, as card or run states them.

    `never` is the warning of `never_predicted`, which comes first.
    """
    said = (
        never,
        _took_no_part(figures, site),
        at_chance_sentence(figures, site, classes),
        _mostly_wrong(figures, site, classes),
        _off_probabilities(figures, site, classes),
        temperature_at_bound(temperature, "its probabilities and its vacuity"),
    )
    return tuple(one for one in said if one is not None)


def _took_no_part(figures: Mapping[str, object], site: str | None) -> str | None:
    """Say that a site learned in no round of its federation; None where it did, or the card does not tell."""
    part = rounds_without(figures)
    if part is None:
        return None
    rounds = f" of {counted(part['of'], 'round')}" if type(part.get("of")) is int else " of the rounds"
    whose = "The site of this model" if site is None else f"The site {site}"
    return f"{whose} took part in none{rounds}, so this model has learned nothing from that site's pictures."


def _mostly_wrong(figures: Mapping[str, object], site: str | None, classes: Sequence[str]) -> str | None:
    """Say that most answers were wrong where the model is not at chance: the best of eight classes may be wrong."""
    accuracy = number(figures.get("accuracy"))
    if accuracy is None or accuracy >= HALF or better_than_chance(figures) is False:
        return None
    counted_on = _counted_on(figures, site, classes)
    return f"More than half of this model's answers were wrong: accuracy {accuracy:.3f} {counted_on}."


def _off_probabilities(figures: Mapping[str, object], site: str | None, classes: Sequence[str]) -> str | None:
    """Say that the shown probabilities are clearly too high or too low; None where they are not, or nobody tells."""
    shown, gap = number(figures.get("shown_probability")), number(figures.get("overconfidence"))
    bounds = interval_of(figures, "overconfidence")
    if shown is None or gap is None or bounds is None or not bounds[0] <= gap <= bounds[1]:
        return None
    right = shown - gap
    if not (0 <= shown <= 1 and 0 <= right <= 1) or (bounds[0] <= _OFF and bounds[1] >= -_OFF):
        return None
    way, counted_on = "high" if gap > 0 else "low", _counted_on(figures, site, classes)
    return (
        f"This model's probabilities are too {way}: the class that it names has {shown:.0%} on average and is right "
        f"in {right:.0%}, {counted_on}."
    )


def _judged(figures: Mapping[str, object], site: str | None, classes: Sequence[str] | None) -> str:
    return ", ".join([*map(str, _figures(figures)), _counted_on(figures, site, classes)])


def _counted_on(figures: Mapping[str, object], site: str | None, classes: Sequence[str] | None) -> str:
    count = figures.get("n_test")
    pictures = counted(count, "picture") if type(count) is int else "an unknown number of pictures"
    where = "" if site is None else f" of the site {site}"
    return f"on {pictures}{where}{'' if classes is None else _untested(figures, classes)}"


def _untested(figures: Mapping[str, object], classes: Sequence[str]) -> str:
    """Say of how many classes there were pictures, and of which there were none where the card's recalls tell."""
    tested, known = figures.get("classes_tested"), len(classes)
    if type(tested) is not int or not 0 <= tested < known:
        return ""
    said, recall = f"; {tested} of {known} classes had pictures there", figures.get("recall")
    if not isinstance(recall, list) or len(recall) != known or recall.count(None) != known - tested:
        return said
    return f"{said}, {listed([name for name, one in zip(classes, recall, strict=True) if one is None])} had none"


def _suspicion(card: Card, labels: Labels) -> str:
    if labels.info is None:
        return "the model does not say which of its classes are benign, so every picture asks for a look"
    if not _has_suspicious(labels):
        return "the model knows none"
    chosen, whose = card.suspicion, "this rule"
    in_force = threshold_in_force(None if chosen is None else chosen.threshold)
    if chosen is None or chosen.threshold is None:
        few = "" if chosen is None else f", for there were {counted(chosen.suspicious, 'picture')} of them"
        rule = f"no threshold was chosen{few}; by default they ask for a look from {in_force:.0%} together"
    elif in_force < chosen.threshold:  # of a bundle from before docs/decisions/0072
        whose = "the card's threshold"
        rule = (
            f"they ask for a look from {in_force:.1%} together, for no threshold in force is above a third. The card "
            f"states {chosen.threshold:.1%}, chosen so that at least 95% of the site's tune pictures of them ask, and "
            f"figures of that one. From {in_force:.1%} no fewer pictures ask"
        )
    else:
        rule = (
            f"they ask for a look from {in_force:.1%} together, a threshold chosen so that at least 95% of the "
            "site's tune pictures of them do; expect fewer of other pictures"
        )
    if chosen is None:
        return rule
    asked = _reached(chosen.sensitivity, chosen.suspicious, f"of {_counted_classes(labels)}", "sensitivity")
    spared = _reached(chosen.specificity, chosen.benign, "of benign classes", "specificity")
    told = f"{rule}. On the tune pictures {whose} asks for a look at {asked}, and asks for none at {spared}"
    return told + _where_nothing_was_chosen(card)


def _where_nothing_was_chosen(card: Card) -> str:
    """Say how the rule did on the pictures that figures are reported on; empty where the card does not tell."""
    tried = rule_tried(card) if REPORTED_RULE in card.metrics else None
    if tried is None:
        return ""
    asked = tried.pictures - tried.passed
    benign = "" if tried.benign_passed is None else f", and passes {tried.benign_passed} of benign classes"
    return (
        f". On other pictures of the site, on which nothing was chosen, it asks for a look at {asked} of "
        f"{tried.pictures} ({asked / tried.pictures:.1%}) of these classes{benign}"
    )


def _reached(share: float | None, count: int, classes: str, called: str) -> str:
    """Say at how many pictures the rule did what it is for, and what that share is called."""
    if share is None:
        return f"no picture {classes}, for there were none"
    return f"{round(share * count)} of {counted(count, 'picture')} ({called} {share:.1%}) {classes}"


def _counted_classes(labels: Labels) -> str:
    """Name the classes that sensitivity counts, and whether they are cancers: `other` may hold benign lesions too."""
    info = labels.info or {}
    groups: dict[bool, list[str]] = {True: [], False: []}
    for name in labels.classes:
        malignancy = info.get(name, undescribed(name)).malignancy
        if malignancy != "benign":
            groups[malignancy == "unknown"].append(name)
    told = []
    if groups[False]:
        told.append(f"{listed(groups[False])} (malignant or premalignant)")
    if groups[True]:
        they = "it is" if len(groups[True]) == 1 else "they are"
        told.append(f"{listed(groups[True])} (whether {they} benign is not known)")
    return " and of ".join(told)


def _has_suspicious(labels: Labels) -> bool:
    return labels.suspicious is not None and any(labels.suspicious)


def _figures(figures: Mapping[str, object]) -> list[CardFigure]:
    tested = figures.get("classes_tested")
    chances = {"auroc": 0.5, "balanced_accuracy": 1 / tested if type(tested) is int and tested > 0 else None}
    return figures_of(figures, _NAMES, chances)
