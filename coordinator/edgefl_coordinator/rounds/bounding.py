"""How much one member's reply weighs in a round, and how far it can move the result.

Guarantees: a count of images weighs at most `claim_most` times the usual count of the round, or what the operator
granted to its member. With the rule "clip" an update is at most `norm_most` times as long as the usual one, and longer
only for granted images. So with the defaults one of five members, or two of ten, move a mean by at most half a usual
update, whatever they send. Replies within the bounds stay as they are, bit for bit. The usual value is the lower
median, which fewer than half of the members cannot move beyond the honest values. Pure.

Source: Sun et al., "Can you really backdoor federated learning?", arXiv 1911.07963 (clipping); `updates` for the other
rules; docs/security.md 4, checks 46 and 47.
"""

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from edgefl_coordinator.rounds import updates
from edgefl_coordinator.settings import ProtectionSettings
from edgefl_protocol import Payload
from edgefl_protocol.sentences import counted

Replies = Mapping[str, Payload]

LEAST_TO_COMPARE = 3  # replies of which a median tells the usual update
_CLAIM = re.compile(r"n_train|n\.(?:0|[1-9][0-9]*)")  # of all images, or of those of a class


@dataclass(frozen=True)
class Protection:
    """A federation's rule against hostile replies, and the images that its operator granted, by member's name."""

    settings: ProtectionSettings = field(default_factory=ProtectionSettings)
    granted: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Bounded:
    """The replies that are aggregated, and which were changed or left out: member's name → how."""

    replies: dict[str, Payload]
    told: dict[str, str] = field(default_factory=dict)


def bounded_claims(replies: Replies, protection: Protection) -> Bounded:
    """Bound the images that each reply claims; counts of classes are bounded by their sum, whatever its shares."""
    claimed = {site: images_of(reply) for site, reply in sorted(replies.items())}
    times, found = protection.settings.claim_most, Bounded(dict(replies))
    most = times * usual(claimed.values())
    for site, images in claimed.items():
        grant = protection.granted.get(site)
        weighs = min(images, int(most) if grant is None else grant)
        if weighs < images:
            reply, why = replies[site], f"{times:g} times the median" if grant is None else "what it was approved for"
            counts = {name: count * weighs // images for name, count in _claims(reply).items()}
            found.replies[site] = Payload(reply.arrays, {**reply.scalars, **counts})
            found.told[site] = f"it claims {counted(images, 'image')} and weighs as {weighs}, {why}"
    return found


def bounded_updates(replies: Replies, broadcasts: Replies, protection: Protection) -> Bounded:
    """Bound how far each reply moves the result, by the federation's rule; `broadcasts` are what members were sent.

    With fewer than three updates there is nothing to compare, and they stay as they are.
    """
    lengths = {name: updates.length(reply, broadcasts[name]) for name, reply in sorted(replies.items())}
    moved = {name: length for name, length in lengths.items() if length is not None}
    settings = protection.settings
    if settings.rule == "mean" or len(moved) < LEAST_TO_COMPARE:
        return Bounded(dict(replies))
    if settings.rule == "clip":
        return _clipped(replies, broadcasts, moved, protection)
    if settings.rule == "multi-krum":
        return _without_farthest(replies, broadcasts, sorted(moved), settings.hostile)
    centre = updates.median if settings.rule == "median" else partial(updates.trimmed_mean, share=settings.hostile)
    return _centred(replies, broadcasts, sorted(moved), centre)


def granted_ratios(replies: Replies, granted: Mapping[str, int]) -> dict[str, float]:
    """Return how many times the usual number of images each member claims and was granted, at least 1.

    Its update may be as many times as long: more images mean more steps.
    """
    claimed = {name: images_of(reply) for name, reply in replies.items()}
    typical = max(1.0, usual(claimed.values()))
    return {name: max(1.0, min(claimed[name], granted.get(name, 0)) / typical) for name in replies}


def images_of(reply: Payload) -> int:
    """Return how many images a reply says it comes from; 0 where it says nothing."""
    claims = _claims(reply)
    return claims["n_train"] if "n_train" in claims else sum(claims.values())


def usual(values: Iterable[float]) -> float:
    """Return the lower median of the values above 0; 0 where there is none."""
    known = [value for value in values if value > 0]
    return statistics.median_low(known) if known else 0.0


def _clipped(replies: Replies, broadcasts: Replies, moved: Mapping[str, float], protection: Protection) -> Bounded:
    """Shorten updates that are longer than the rule allows."""
    found, typical = Bounded(dict(replies)), usual(moved.values())
    ratios = granted_ratios(replies, protection.granted)
    for name, length in moved.items():
        allowed = protection.settings.norm_most * ratios[name] * typical
        if typical and length > allowed:
            found.replies[name] = updates.with_update(
                replies[name], broadcasts[name], partial(_times, allowed / length)
            )
            found.told[name] = (
                f"its update is {length / typical:.3g} times as long as the median and was cut to "
                f"{allowed / typical:.3g} times"
            )
    return found


def _times(factor: float, _: str, update: updates.Values) -> updates.Values:
    return update * factor


def _without_farthest(replies: Replies, broadcasts: Replies, names: list[str], hostile: float) -> Bounded:
    """Leave out the updates that multi-Krum finds farthest from the others."""
    places = updates.farthest([replies[name] for name in names], [broadcasts[name] for name in names], hostile)
    left_out = {names[place] for place in places}
    why = "its update lies farthest from those of the others, and was left out"
    kept = {name: reply for name, reply in replies.items() if name not in left_out}
    return Bounded(kept, dict.fromkeys(sorted(left_out), why))


def _centred(replies: Replies, broadcasts: Replies, names: list[str], centre: updates.Centre) -> Bounded:
    """Give all replies one robust update, so that it is the mean whatever weights the method takes."""
    holders: dict[str, list[str]] = {}
    for name in names:
        for key in updates.updated(replies[name], broadcasts[name]):
            holders.setdefault(key, []).append(name)
    centres = {
        key: centre(np.stack([updates.update_of(replies[name], broadcasts[name], key) for name in having]))
        for key, having in holders.items()
        if len(having) >= LEAST_TO_COMPARE
    }
    return Bounded(
        dict(replies)
        | {
            name: updates.with_update(replies[name], broadcasts[name], lambda key, own: centres.get(key, own))
            for name in names
        }
    )


def _claims(reply: Payload) -> dict[str, int]:
    """The numbers of images that a reply claims, by scalar; what is no number of images is left to the method."""
    found = {name: value for name, value in reply.scalars.items() if _CLAIM.fullmatch(name)}
    return {name: value for name, value in found.items() if isinstance(value, int) and value >= 0}
