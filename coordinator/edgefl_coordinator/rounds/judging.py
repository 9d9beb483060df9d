"""Which replies of a round are aggregated: one of another form than it should have is refused by name, not averaged.

Guarantees: whatever the method, a result comes only of replies that agree with the broadcast and with each other, and
that the method takes. The rules, in order:
    (1) An array that also stands in the round's broadcast has the type and shape it has there.
    (2) All replies have one form: names, types and shapes of the arrays, names and kinds of the scalars. The form that
        more than half of them have is the right one. Arrays whose names end in a class index (`prototypes.<k>`) may be
        missing. They and `features` may have any number of rows. A reply without arrays is left to the method.
    (3) Of three replies or more that change what was broadcast (weights, prompts, heads), one that lies more than eight
        times as far from it as the median reply is refused. A site with more images than the median may lie farther, in
        proportion; where (4) cuts nothing, only for granted images. So a reply times a million does not enter the mean.
    (4) What is left weighs and moves no more than `bounding` and `passed_on` allow. Who was bounded is told, and whose
        maps or features are odd.
    (5) Where the method cannot take these replies together, each that it cannot take alone is refused.
A contribution of features (`beside_the_average`) is compared only with others like it, and counts for no quorum. Where
the method fails and no single reply is at fault, the problem is told and nothing is aggregated. Pure: the method comes
as a function. Source: docs/security.md, poisoning, and check 46.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edgefl_coordinator.rounds.passed_on import bounded_features, bounded_maps, oddities
from edgefl_coordinator.rounds.protection import updates
from edgefl_coordinator.rounds.protection.bounding import (
    LEAST_TO_COMPARE,
    Protection,
    bounded_claims,
    bounded_updates,
    granted_ratios,
    images_of,
    usual,
)
from edgefl_protocol import EdgeflError, Payload
from edgefl_protocol.rules.reply_forms import difference, form_parts
from edgefl_protocol.sentences import counted

Result = TypeVar("Result")
Found = TypeVar("Found")
Replies = Mapping[str, Payload]

_BESIDE = frozenset({"features"})  # what says something without anything that is averaged
_GRANT = ", and more with a grant of {}"  # how a reason ends where the claimed images would explain the distance
_FAR = "it lies {:.3g} times as far from the broadcast as the median reply; "  # how a reason of rule (3) begins
_GRANTED = re.compile(re.escape(_GRANT).replace(r"\{\}", r"([1-9][0-9]*)") + r"\Z")

# What a missing name, or arithmetic on arrays that do not fit, raises; never a failure of the machine.
_DOES_NOT_FIT = (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, RuntimeError, EdgeflError)
_MAX_REASON = 300  # characters
FARTHEST = 8.0  # times the median distance from the broadcast; an update times −10 is ten times as far


@dataclass(frozen=True)
class RoundVerdict(Generic[Result]):
    """What became of a round's replies."""

    result: Result | None = None  # what the method made of the sound ones; None where nothing was aggregated
    refused: Mapping[str, str] = field(default_factory=dict)  # site name → why its reply does not count
    problem: str = ""  # why nothing was aggregated; "" where something was
    bounded: Mapping[str, str] = field(default_factory=dict)  # site name → why its reply counts for less than it says
    noticed: Mapping[str, str] = field(default_factory=dict)  # site name → what is odd about its maps or features


def beside_the_average(travels: Collection[str], phase: str) -> frozenset[str]:
    """Return the arrays that a member may send alone in a round in which the others send more: FedCLF's features.

    They join what is passed on to the others. In the warm phase they are what everybody sends, so nothing is beside it.
    """
    return frozenset() if phase == "warm" else _BESIDE & frozenset(travels)


def is_beside(names: Collection[str], beside: Collection[str]) -> bool:
    """Tell whether a reply with arrays of these names is a contribution beside the average."""
    return bool(names) and set(names) <= set(beside)


def judge(
    replies: Replies,
    broadcasts: Replies,
    take: Callable[[Replies], Result],
    *,
    quorum: int,
    beside: Collection[str] = frozenset(),
    protection: Protection | None = None,
) -> RoundVerdict[Result]:
    """Aggregate the sound replies, at least `quorum` of them, contributions not counted.

    `broadcasts` are what these sites were sent at the start of the round; `beside`: see `beside_the_average`;
    `protection` is the default one where none is given.
    """
    protection = protection or Protection()

    def weighing_in(sound: Replies) -> int:
        return sum(not is_beside(reply.arrays, beside) for reply in sound.values())

    refused = {name: why for name in sorted(replies) if (why := _against_broadcast(replies[name], broadcasts[name]))}
    sound = _without(replies, refused)
    others, problem = _minority(sound, beside)
    refused, sound = {**refused, **others}, _without(sound, others)
    if problem:
        return RoundVerdict(None, refused, problem)
    far = _too_far(sound, broadcasts, protection)
    refused, sound = {**refused, **far}, _without(sound, far)
    if weighing_in(sound) < quorum:
        return RoundVerdict(None, refused, _too_few(weighing_in(sound), quorum))
    odd = oddities(sound, broadcasts)
    sound, told = _bounded(sound, broadcasts, protection, beside)
    result, why = _try(take, sound)
    if result is not None:
        return RoundVerdict(result, refused, bounded=told, noticed=odd)
    alone = {name: fault for name in sorted(sound) if (fault := _try(take, {name: sound[name]})[1])}
    if not alone:
        return RoundVerdict(None, refused, f"the replies cannot be aggregated together: {why}")
    refused, sound = {**refused, **alone}, _without(sound, alone)
    if weighing_in(sound) < quorum:
        return RoundVerdict(None, refused, _too_few(weighing_in(sound), quorum))
    result, why = _try(take, sound)
    problem = "" if result is not None else f"the replies cannot be aggregated together: {why}"
    return RoundVerdict(result, refused, problem, _without(told, alone), _without(odd, alone))


def _bounded(
    replies: Replies, broadcasts: Replies, protection: Protection, beside: Collection[str]
) -> tuple[dict[str, Payload], dict[str, str]]:
    """Rule (4): return what is aggregated, and of whom it differs from what was sent."""
    alone = {name: reply for name, reply in replies.items() if is_beside(reply.arrays, beside)}
    weighed = bounded_claims(_without(replies, dict.fromkeys(alone, "")), protection)
    moved = bounded_updates(weighed.replies, broadcasts, protection)
    drawn = bounded_maps(moved.replies, protection)
    fewer = bounded_features({**drawn.replies, **alone}, protection, alone)
    steps = (weighed, moved, drawn, fewer)
    told = {
        name: "; ".join(found.told[name] for found in steps if name in found.told)
        for name in sorted({name for found in steps for name in found.told})
    }
    return fewer.replies, told


def _against_broadcast(reply: Payload, broadcast: Payload) -> str:
    """Rule (1): return what differs, or ""."""
    for name, array in reply.arrays.items():
        sent = broadcast.arrays.get(name)
        if sent is not None and (sent.dtype, sent.shape) != (array.dtype, array.shape):
            found, wanted = (f"{one.dtype} with shape {one.shape}" for one in (array, sent))
            return f"the array {name[:60]} is {found}, but in the round's broadcast it is {wanted}"
    return ""


def _minority(replies: Replies, beside: Collection[str]) -> tuple[dict[str, str], str]:
    """Rule (2): return the replies of another form than most, and a problem where no form is that of most."""
    parts = {
        name: form_parts(reply, "beside" if is_beside(reply.arrays, beside) else "")
        for name, reply in replies.items()
        if reply.arrays
    }
    refused: dict[str, str] = {}
    for part in sorted({part for found in parts.values() for part in found}):
        forms = {name: found[part] for name, found in parts.items() if part in found and name not in refused}
        usual, votes = Counter(forms.values()).most_common(1)[0]
        if 2 * votes <= len(forms):
            return refused, f"{len(forms)} replies have different forms, and no form is that of more than half"
        odd = {name: form for name, form in forms.items() if form != usual}
        most = f"{votes} of {len(forms)} replies"
        refused |= {name: difference(form, usual, most, many=True) for name, form in sorted(odd.items())}
    return refused, ""


def _too_far(replies: Replies, broadcasts: Replies, protection: Protection) -> dict[str, str]:
    """Rule (3): return the replies that lie farther from the broadcast than their images explain."""
    moved = {name: updates.distance(reply, broadcasts[name]) for name, reply in sorted(replies.items())}
    distances = {name: distance for name, distance in moved.items() if distance is not None}
    typical = usual(distances.values()) if len(distances) >= LEAST_TO_COMPARE else 0.0
    if typical == 0:  # nothing to compare with
        return {}
    claimed = {name: images_of(reply) for name, reply in replies.items()}
    ratios = granted_ratios(replies, protection.granted if protection.settings.rule == "mean" else claimed)
    explained = {name: FARTHEST * ratio * typical for name, ratio in granted_ratios(replies, claimed).items()}
    return {
        name: _FAR.format(distance / typical)
        + f"{FARTHEST * ratios[name]:.3g} times is allowed for its {counted(claimed[name], 'image')}"
        + (_GRANT.format(claimed[name]) if distance <= explained[name] else "")
        for name, distance in distances.items()
        if distance > FARTHEST * ratios[name] * typical
    }


def grant_that_allows(reason: str) -> int | None:
    """Return how many images have to be granted so that a reply refused for this reason counts; None where none do."""
    found = _GRANTED.search(reason)
    return int(found.group(1)) if found else None


def is_of_form(reason: str) -> bool:
    """Tell whether a reply was refused for its form, or as one that the method cannot use; not for where it lies."""
    return not reason.startswith(_FAR.partition("{")[0])


def _try(take: Callable[[Replies], Result], replies: Replies) -> tuple[Result | None, str]:
    """Return the result, or None and why there is none."""
    try:
        return take(replies), ""
    except _DOES_NOT_FIT as error:
        said = str(error) if isinstance(error, EdgeflError) else f"{type(error).__name__}: {error}"
        return None, f"the method cannot use it ({said[:_MAX_REASON]})"


def _too_few(sound: int, quorum: int) -> str:
    return f"too few sound replies: {sound}, at least {quorum} are needed"


def _without(found: Mapping[str, Found], names: Mapping[str, str]) -> dict[str, Found]:
    return {name: one for name, one in found.items() if name not in names}
