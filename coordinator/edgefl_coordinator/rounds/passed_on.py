"""Maps and features, which are passed on to the others and not averaged: how much one member's move, and what is odd.

Guarantees:
    Maps of a class, of five members or more: a member whose mean map lies farther from the median of all than
    `norm_most` times the usual distance is drawn in to that. So one of P peers moves the mean map that a step compares
    with by at most `norm_most / P` usual distances. Drawn maps stay between 0 and 1. Not with the rule "mean".
    Features: of a bank count at most `claim_most` times the rows of the usual bank, or what the operator granted; the
    newest stay. So its share of what the others learn against is that of a claim of images.
    Maps and features within the bounds stay as they are, bit for bit.
    Told, and not bounded any further: maps that say nothing (all values alike) or one point alone, features that are
    all alike or lie on one axis, and what another member sent too. Nobody can tell a careful forgery.
Of fewer than five members none tells which map is usual: honest ones often lie twice as far from a median of three.
Each is one vote of the mean then, of values from 0 to 1. Pure.

Source: FedEvPrompt (arXiv 2411.10071) eq. 7 for the mean over peers; FedCLF (arXiv 2208.11278) section III for banks;
docs/security.md 4.
"""

from collections.abc import Collection, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgefl_coordinator.rounds.protection.bounding import (
    Bounded,
    Protection,
    Replies,
    of_median,
    usual,
    usual_length,
)
from edgefl_coordinator.rounds.protection.changed_replies import replaced
from edgefl_protocol import Payload
from edgefl_protocol.rules.feature_rows import RECEIVED, SENT
from edgefl_protocol.rules.maps import class_in_reply, maps_in_broadcast
from edgefl_protocol.sentences import counted

Rows = NDArray[Any]

_LEAST_MAPS: Final = 5  # members whose median tells which map of a class is usual
_NOTHING: Final = 2**-10  # what rounding to half precision leaves of a difference, or of a 0


def bounded_maps(replies: Replies, protection: Protection) -> Bounded:
    """Draw in the maps of who lies far from the others, class by class."""
    found = Bounded(dict(replies))
    if protection.settings.rule == "mean":
        return found
    for name in sorted({name for reply in replies.values() for name in _maps(reply)}):
        means = {
            site: reply.arrays[name].astype(np.float64).mean(axis=0)
            for site, reply in sorted(replies.items())
            if name in _maps(reply)
        }
        if len(means) < _LEAST_MAPS:
            continue
        centre = np.median(list(means.values()), axis=0)
        lengths = {site: float(np.linalg.norm(mean - centre)) for site, mean in means.items()}
        typical = usual_length(list(lengths.values()))
        most = protection.settings.norm_most * typical
        for site in (site for site, length in lengths.items() if length > most):
            own = found.replies[site]
            maps = own.arrays[name]
            drawn = (centre + (maps - centre) * (most / lengths[site])).astype(maps.dtype)
            found.replies[site] = replaced(own, name, drawn)
            found.told.setdefault(site, _far(name, lengths[site], typical, protection.settings.norm_most))
    return found


def bounded_features(replies: Replies, protection: Protection, beside: Collection[str]) -> Bounded:
    """Bound the rows of banks; `beside` names who sent nothing else, whose few rows do not tell what is usual."""
    rows = {site: len(reply.arrays[SENT]) for site, reply in sorted(replies.items()) if SENT in reply.arrays}
    found, times = Bounded(dict(replies)), protection.settings.claim_most
    most = times * usual([count for site, count in rows.items() if site not in beside] or rows.values())
    for site, count in rows.items():
        grant = protection.granted.get(site)
        kept = min(count, max(1, int(most) if grant is None else grant))
        if kept < count:
            own = replies[site]
            found.replies[site] = replaced(own, SENT, own.arrays[SENT][count - kept :])
            found.told[site] = f"of its {counted(count, 'feature')} the newest {kept} count, " + (
                f"{of_median(times)}; approve it again with --images to let more count"
                if grant is None
                else "as many as the images it was approved for"
            )
    return found


def oddities(replies: Replies, broadcasts: Replies) -> dict[str, str]:
    """Say what is odd about each reply's maps and features: member's name → a sentence that holds none of them.

    `broadcasts` are what the members were sent: who sends it back shares nothing of its own.
    """
    holders: dict[bytes, set[str]] = {}
    for site, reply in replies.items():
        for _, rows in _passed_on(reply):
            for row in rows:
                holders.setdefault(row.tobytes(), set()).add(site)

    told: dict[str, str] = {}
    for site, reply in sorted(replies.items()):
        handed = {row.tobytes() for rows in _handed(broadcasts[site]) for row in rows}
        found: dict[str, list[str]] = {}
        for kind, rows in _passed_on(reply):
            bytes_of = [row.tobytes() for row in rows]
            for what, is_odd in (
                ("all alike", _are_alike(kind, rows)),
                ("of one point or axis alone", _hold_one_point(rows)),
                ("that another member sent in the same round", any(len(holders[one]) > 1 for one in bytes_of)),
                ("that it was handed", not handed.isdisjoint(bytes_of)),
            ):
                if is_odd:
                    found.setdefault(what, []).append(kind)
        if found:
            told[site] = "it holds " + ", ".join(f"{_named(kinds)} {what}" for what, kinds in found.items())
    return told


def _maps(reply: Payload) -> dict[str, Rows]:
    """The maps of a reply, (m, N) each, by name."""
    return {
        name: array
        for name in reply.arrays
        if class_in_reply(name) is not None and (array := reply.arrays[name]).ndim == 2 and len(array)
    }


def _passed_on(reply: Payload) -> Iterator[tuple[str, Rows]]:
    """Give what a reply holds of others' targets: "maps" of each class, "features"."""
    for rows in _maps(reply).values():
        yield "maps", rows
    if SENT in reply.arrays:
        yield "features", reply.arrays[SENT]


def _handed(broadcast: Payload) -> Iterator[Rows]:
    yield from maps_in_broadcast(broadcast.arrays).values()
    if RECEIVED in broadcast.arrays:
        yield broadcast.arrays[RECEIVED]


def _are_alike(kind: str, rows: Rows) -> bool:
    """Whether a map has one value everywhere, or several features are one."""
    along = 1 if kind == "maps" else 0
    if rows.ndim != 2 or rows.shape[along] < 2:
        return False
    spread = np.ptp(rows.astype(np.float64), axis=along) <= _NOTHING
    return bool(spread.any() if kind == "maps" else spread.all())


def _hold_one_point(rows: Rows) -> bool:
    """Whether a row is nothing but one of its numbers."""
    if rows.ndim != 2 or rows.shape[1] < 3 or not len(rows):
        return False
    return bool((np.sort(np.abs(rows.astype(np.float64)), axis=1)[:, -2] <= _NOTHING).any())


def _named(kinds: list[str]) -> str:
    maps = kinds.count("maps")
    shown = [f"maps of {counted(maps, 'class', 'classes')}"] if maps else []
    return " and ".join(shown + ["features"] * ("features" in kinds))


def _far(name: str, length: float, typical: float, times: float) -> str:
    far = f"{length / typical:.3g} times as far" if typical else "far"
    return f"its {name[:60]} lie {far} from the median map as is usual, and count as {times:g} times"
