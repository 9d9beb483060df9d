"""How much one member's reply weighs in a round, and how far it can move the result.

Guarantees:
    Claims of images, and whole-number arrays that count, weigh at most `claim_most` times the round's usual claim, or
    what the operator granted to their member.
    With every rule but "mean" the update of each group of arrays (`updates.group_of`) is at most `norm_most` times as
    long as the usual one, and longer only for granted images; "median", "trimmed-mean", "mixed-mean" (the trimmed
    mean of updates that were mixed with their nearest) and "multi-krum" come on top.
    So with what `init` writes one of five members moves a mean by at most a third of a usual update, and by a fifth of
    one where the claims are alike; with the defaults, which are older, by 0.86 and 0.55.
    Replies within the bounds stay as they are, bit for bit.
Of fewer than three replies none tells what is usual, and of updates only one that changed something: they stay. What is
passed on and not averaged, maps and features, `passed_on` bounds. The usual value is a lower median. Pure.

Source: Sun et al., "Can you really backdoor federated learning?", arXiv 1911.07963 (clipping); `updates` for the other
rules; docs/security.md 4, checks 46 and 47.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from edgefl_coordinator.rounds.protection import updates
from edgefl_coordinator.rounds.protection.changed_replies import as_it_came, changed, replaced
from edgefl_coordinator.rounds.reply_forms import is_claim
from edgefl_coordinator.settings import ProtectionSettings
from edgefl_protocol import Payload
from edgefl_protocol.sentences import counted

Replies = Mapping[str, Payload]

LEAST_TO_COMPARE = 3  # replies of which a median tells what is usual


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
            reply = replies[site]
            counts = {name: max(min(count, 1), count * weighs // images) for name, count in _claims(reply).items()}
            found.replies[site] = changed(reply, scalars=counts)
            found.told[site] = f"it claims {counted(images, 'image')} and weighs as {weighs}, " + (
                f"{of_median(times)}; approve it again with --images to let it weigh more"
                if grant is None
                else "what it was approved for"
            )
    return _bounded_counts(found, protection)


def bounded_updates(replies: Replies, broadcasts: Replies, protection: Protection) -> Bounded:
    """Bound how far each reply moves the result, by the federation's rule; `broadcasts` are what members were sent."""
    settings = protection.settings
    moved = {
        name: found for name, reply in sorted(replies.items()) if (found := updates.lengths(reply, broadcasts[name]))
    }
    if settings.rule == "mean" or len(moved) < LEAST_TO_COMPARE:
        return Bounded(dict(replies))
    clipped = _clipped(replies, broadcasts, moved, protection)
    if settings.rule == "clip":
        return clipped
    names = list(moved)
    own, sent = [clipped.replies[name] for name in names], [broadcasts[name] for name in names]
    if settings.rule == "multi-krum":
        left_out = {names[place] for place in updates.farthest(own, sent, settings.hostile)}
        why = "its update lies farthest from those of the others, and was left out"
        kept = {name: reply for name, reply in clipped.replies.items() if name not in left_out}
        return Bounded(kept, clipped.told | dict.fromkeys(sorted(left_out), why))
    centre = updates.median if settings.rule == "median" else partial(updates.trimmed_mean, share=settings.hostile)
    mixing = updates.nearest_mixing(own, sent, settings.hostile) if settings.rule == "mixed-mean" else None
    common = dict(zip(names, updates.centred(own, sent, centre, LEAST_TO_COMPARE, mixing), strict=True))
    return Bounded(clipped.replies | common, clipped.told)


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


def _bounded_counts(found: Bounded, protection: Protection) -> Bounded:
    """Bound arrays of whole numbers, such as how often a site chose each group of prompts, by their sums."""
    names = sorted({name for reply in found.replies.values() for name in _counts(reply)})
    ratios = granted_ratios(found.replies, protection.granted)
    for name in names:
        sums = {
            site: int(reply.arrays[name].sum(dtype=np.float64))  # whole numbers would begin anew below 0 above 2**63
            for site, reply in found.replies.items()
            if name in _counts(reply)
        }
        for site, total in sums.items():
            most = int(protection.settings.claim_most * ratios[site] * usual(sums.values()))
            if total > most:
                reply = found.replies[site]
                fewer = (reply.arrays[name] * (most / total)).astype(reply.arrays[name].dtype)
                found.replies[site] = replaced(reply, name, fewer)
                found.told.setdefault(site, f"its {name[:60]} count {total}, and count as {most}")
    return found


def _clipped(
    replies: Replies, broadcasts: Replies, moved: Mapping[str, Mapping[str, float]], protection: Protection
) -> Bounded:
    """Shorten updates that are longer than the rule allows, group by group."""
    found, ratios = Bounded(dict(replies)), granted_ratios(replies, protection.granted)
    groups = sorted({group for lengths in moved.values() for group in lengths})
    typical = {
        group: usual_length([lengths[group] for lengths in moved.values() if group in lengths]) for group in groups
    }
    for name, lengths in moved.items():
        times = protection.settings.norm_most * ratios[name]
        over = {
            group: length / typical[group]
            for group, length in lengths.items()
            if typical[group] and length > times * typical[group]
        }
        if over:
            found.replies[name] = updates.scaled(
                replies[name], broadcasts[name], {group: times / far for group, far in over.items()}
            )
            worst = max(over, key=lambda group: over[group])
            found.told[name] = (
                f"its {worst[:60]} changed {_apart(over[worst], times)} times as much as the median, and count as "
                + ("much as the median" if times == 1 else f"{times:.3g} times")
            )
    return found


def _apart(far: float, times: float) -> str:
    """Write a length with so many digits that it differs from what is allowed."""
    return next((text for digits in (3, 5, 8) if (text := f"{far:.{digits}g}") != f"{times:.{digits}g}"), f"{far!r}")


def of_median(times: float) -> str:
    """Say how often the median a reply may count."""
    return "the median" if times == 1 else f"{times:g} times the median"


def usual_length(lengths: list[float]) -> float:
    """Return the lower median; where most did not move, the smallest that did, unless it is alone."""
    positive = sorted(length for length in lengths if length > 0)
    return statistics.median_low(lengths) or (positive[0] if len(positive) > 1 else 0.0)


def _claims(reply: Payload) -> dict[str, int]:
    """The numbers of images that a reply claims, by scalar; `check_reply` has let no others in."""
    return {name: value for name, value in reply.scalars.items() if is_claim(name) and isinstance(value, int)}


def _counts(reply: Payload) -> list[str]:
    return [name for name, array in as_it_came(reply).items() if array.dtype.kind in "iu"]
