"""Rollout maps on their way from a site to its peers: named, chosen, kept, numbered and averaged.

A scoring graph gives one `map` (N,) a picture, or `maps` (n, N). On the way an array is called

    maps.<class>           in a site's reply: (m, N) float16, m at most M; 1 where their mean   reply_maps,
                           is sent                                                              check_sent_maps
    maps.<class>.<site>    in the server's buffer: the newest of each site                      replaced
    maps.<peer>.<class>    in a broadcast: a peer is a number, drawn anew every time            others_maps, renumbered

and no other module makes or takes apart these names. Every array keeps its values until `peer_targets` averages it. A
receiver uses nothing of a peer's maps but their mean, so a site that sends that mean alone teaches the same.
Source: FedEvPrompt (arXiv 2411.10071) section 3.2, eq. 6 and 7; docs/methods.md 1.5.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.errors import MapsError

MAX_MAPS: Final = 5  # M of the paper
MEAN5: Final = 5.0

Arrays = Mapping[str, NDArray[Any]]
PeerWeight = Literal["sum", "mean5"]
SentMaps = Literal["each", "mean"]  # what a site sends of the maps that it chose of a class

_NUMBER: Final = "(0|[1-9][0-9]{0,4})"
_REPLY: Final = re.compile(rf"maps\.{_NUMBER}")
_BUFFER: Final = re.compile(rf"maps\.{_NUMBER}\.(.+)", re.DOTALL)
_BROADCAST: Final = re.compile(rf"maps\.{_NUMBER}\.{_NUMBER}")
_HALF_STEP: Final = 2**-11  # half the spacing of float16 just below 1


def travel_alone(travels: Sequence[str]) -> bool:
    """Tell whether rollout maps are all that leaves a site, so that its model is its own."""
    return tuple(travels) == ("maps",)


# Names


def is_maps(name: str) -> bool:
    """Tell whether an array of a reply, a buffer or a broadcast holds rollout maps."""
    return name.startswith("maps.")


def reply_name(label: int) -> str:
    """Name the maps of a class in a reply."""
    return f"maps.{label}"


def buffer_name(label: int, site: str) -> str:
    """Name the maps of a class and site in the server's buffer."""
    return f"maps.{label}.{site}"


def broadcast_name(peer: int, label: int) -> str:
    """Name the maps of a numbered peer and a class in a broadcast."""
    return f"maps.{peer}.{label}"


def class_in_reply(name: str) -> int | None:
    """Return the class of an array of a reply; None where it holds no maps of a class."""
    found = _REPLY.fullmatch(name)
    return int(found[1]) if found else None


def maps_in_buffer(buffer: Arrays) -> dict[tuple[int, str], NDArray[Any]]:
    """Return the maps that a server keeps, by class and site; arrays of other kinds are passed over."""
    named = {name: _BUFFER.fullmatch(name) for name in buffer}
    return {(int(found[1]), found[2]): buffer[name] for name, found in named.items() if found}


def site_in_buffer(name: str) -> str | None:
    """Return whose maps an array of the server's buffer holds; None where it holds no maps."""
    found = _BUFFER.fullmatch(name)
    return found[2] if found else None


def maps_in_broadcast(broadcast: Arrays) -> dict[tuple[int, int], NDArray[Any]]:
    """Return the others' maps by peer and class; arrays of other kinds are passed over.

    Raises:
        MapsError: an array of maps is not named after a peer and a class.
    """
    parts = {name: _BROADCAST.fullmatch(name) for name in broadcast if is_maps(name)}
    found = {(int(one[1]), int(one[2])): broadcast[name] for name, one in parts.items() if one}
    if len(found) < len(parts):
        wrong = min(name for name, one in parts.items() if one is None)
        raise MapsError(f"the others' array {wrong[:40]} belongs to no class of the federation")
    return found


# A site's choice


def most_certain(uncertainty: NDArray[Any], labels: NDArray[np.int64], most: int) -> dict[int, list[int]]:
    """Choose of each class the pictures of lowest uncertainty; equal ones in the order of the rows.

    There is no filter for correct answers: the paper names none. Gives at most `most` (M) positions of each class, the
    lowest uncertainty first.
    """
    return first_of_each_class(np.argsort(uncertainty, kind="stable"), labels, most)


def first_of_each_class(order: NDArray[np.int64], labels: NDArray[np.int64], most: int) -> dict[int, list[int]]:
    """Take of each class the first pictures of an order.

    Args:
        order: positions of all pictures, or of those that may be chosen.
        labels: class index of each picture, (n,).
        most: M, pictures of a class.
    """
    ranked = labels[order]
    return {int(label): order[ranked == label][:most].tolist() for label in np.unique(ranked)}


def reply_maps(
    maps: Sequence[NDArray[Any]] | NDArray[Any], chosen: Mapping[int, Sequence[int]], sent: SentMaps = "each"
) -> Arrays:
    """Make the arrays of a reply from all maps (n, N): the chosen ones, float16, each divided by its largest value.

    With `sent` "mean" the mean of these stands for them, (1, N), as it is: what `peer_means` makes of them.

    A `MapsError` where a map is not finite (`not_finite`), or holds nothing to share (`bad_map`).
    """
    arrays = {}
    for label, positions in chosen.items():
        if not positions:
            continue
        taken = np.stack([maps[position] for position in positions]).astype(np.float64)  # (m, N)
        largest = taken.max(axis=1, keepdims=True)
        finite = np.isfinite(taken).all()
        if not (finite and (taken >= 0).all() and (largest > 0).all()):
            code = "bad_map" if finite else "not_finite"
            raise MapsError(
                ("a rollout map is empty or holds a value that is not finite; report it to the signer of the model"),
                code,
            )
        shares = taken / largest
        arrays[reply_name(label)] = (shares if sent == "each" else shares.mean(axis=0, keepdims=True)).astype(
            np.float16
        )
    return arrays


def sent_maps_in(settings: Mapping[str, Any]) -> SentMaps:
    """Read what a federation's settings ask its members to send of the maps of a class; each map where they are silent.

    A `MapsError` for what this version does not know (`other_settings`).
    """
    asked = settings.get("sent_maps", "each")
    if asked not in get_args(SentMaps):
        raise MapsError(
            f"the federation sets sent_maps to {str(asked)[:60]}, which this version does not know: install a newer "
            "edgefl-derm",
            "other_settings",
        )
    return "mean" if asked == "mean" else "each"


def check_sent_maps(
    name: str, maps: NDArray[Any], classes: int, tokens: int, most: int = MAX_MAPS, sent: SentMaps = "each"
) -> None:
    """Check an array of a reply: one class's maps, float16 (m, N), m from 1 to M, each within [0, 1] with maximum 1.

    Of `sent` "mean" it is one map, whose maximum is at least 1/M: where one of the maps is 1.

    Raises:
        MapsError: it is not; it would be passed on to every other site.
    """
    label = class_in_reply(name)
    if label is None or label >= classes:
        raise MapsError(f"the array {name[:40]} is not maps.<k> with k below {classes}")
    if maps.dtype != np.float16 or maps.ndim != 2:
        raise MapsError(f"{name} is not float16 with two axes (maps, tokens)")
    count, found = maps.shape
    if not 1 <= count <= (1 if sent == "mean" else most) or not found or found != tokens:
        allowed = "1" if sent == "mean" else f"1 to {most}"
        raise MapsError(f"{name} has shape ({count}, {found}); it must be ({allowed}, {tokens})")
    reached = 1 / most if sent == "mean" else 1
    if float(maps.min()) < 0 or float(maps.max()) > 1 or bool((maps.max(axis=1) < reached - _HALF_STEP).any()):
        raise MapsError(
            f"{name} is not normalised by its maximum: every map must lie from 0 to 1 and reach {reached:g}"
        )


# The server's buffer


def replaced(buffer: Arrays, replies: Mapping[str, Arrays], classes: int) -> dict[str, NDArray[Any]]:
    """Put the maps of replies into the buffer: a reply replaces all maps of its site.

    Args:
        replies: arrays by site; those of other kinds are passed over.

    Raises:
        MapsError: maps of a class that the task does not have.
    """
    gone = {buffer_name(label, site) for label, site in maps_in_buffer(buffer) if site in replies}
    kept = {name: value for name, value in buffer.items() if name not in gone}
    for site in sorted(replies):
        for name in sorted(filter(is_maps, replies[site])):
            label = class_in_reply(name)
            if label is None or label >= classes:
                raise MapsError(
                    f"the array {name[:40]} names no class of this task: {reply_name(0)} to {reply_name(classes - 1)}."
                )
            kept[buffer_name(label, site)] = replies[site][name]
    return kept


def others_maps(buffer: Arrays, sites: Iterable[str]) -> dict[str, Arrays]:
    """Give each receiver the maps of all others, which are numbered in the order of their names.

    Whoever sends a broadcast draws these numbers anew (`renumbered`), so that a number names no site over time.
    """
    held = maps_in_buffer(buffer)
    holders = sorted({site for _, site in held})
    found: dict[str, Arrays] = {}
    for receiver in sites:
        number = {peer: index for index, peer in enumerate(peer for peer in holders if peer != receiver)}
        found[receiver] = {
            broadcast_name(number[site], label): maps for (label, site), maps in held.items() if site in number
        }
    return found


def renumbered(broadcast: Arrays, rng: np.random.Generator) -> Arrays:
    """Give the peers of a broadcast new numbers from 0, in random order; other arrays keep their names."""
    held = maps_in_broadcast(broadcast)
    peers = sorted({peer for peer, _ in held})
    number = {peers[drawn]: index for index, drawn in enumerate(rng.permutation(len(peers)).tolist())}
    others = {name: value for name, value in broadcast.items() if not is_maps(name)}
    return {**others, **{broadcast_name(number[peer], label): maps for (peer, label), maps in held.items()}}


# Class numbers: a model may list the federation's classes in another order


def numbered_as_model(broadcast: Arrays, task: Sequence[str], model: Sequence[str]) -> Arrays:
    """Name the maps of a broadcast by the class numbers of the receiver's model; other arrays keep their names.

    Args:
        broadcast: arrays, numbered as the federation's task does.
        task: names of the task's classes, in index order.
        model: names of the model's classes, in index order.

    Raises:
        MapsError: the two know other classes (`other_classes`), or a number is that of no class.
    """
    if set(task) != set(model):
        raise MapsError(
            f"the model knows the classes {', '.join(model)}, but the federation has {', '.join(task)}: fetch its "
            "bundle",
            "other_classes",
        )
    arrays = {name: value for name, value in broadcast.items() if not is_maps(name)}
    for (peer, label), maps in maps_in_broadcast(broadcast).items():
        if label >= len(task):
            raise MapsError(f"the others' array {broadcast_name(peer, label)} belongs to no class of the federation")
        arrays[broadcast_name(peer, list(model).index(task[label]))] = maps
    return arrays


def numbered_as_task(reply: Arrays, task: Sequence[str], model: Sequence[str]) -> Arrays:
    """Name the maps of a reply by the class numbers of the federation's task: `numbered_as_model` the other way.

    Args:
        reply: arrays, numbered as the model does; those of other kinds keep their names.
    """
    labels = {name: class_in_reply(name) for name in reply}
    return {
        name if label is None else reply_name(list(task).index(model[label])): reply[name]
        for name, label in labels.items()
    }


# What a training step compares with


def peer_targets(
    broadcast: Arrays, classes: int, tokens: int, weight: PeerWeight
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Fold a broadcast's maps into what the distillation term of a step takes.

    Args:
        broadcast: arrays, with class numbers of the model that learns.
        weight: "sum" counts the peers of a class; "mean5" gives every class that has a peer the weight of five.

    Returns:
        See `peer_means`: mean maps (K, N) and their weights (K,).

    Raises:
        MapsError: maps of another grid or class.
    """
    found = maps_in_broadcast(broadcast)
    for (peer, label), maps in found.items():
        if label >= classes or maps.ndim != 2 or maps.shape[1] != tokens:
            raise MapsError(
                f"the others' array {broadcast_name(peer, label)} does not fit this model of {classes} classes and "
                f"{tokens} patches; fetch the federation's bundle"
            )
    means, counts = peer_means(((label, maps) for (_, label), maps in found.items()), classes, tokens)
    weights = MEAN5 * (counts > 0) if weight == "mean5" else counts
    return means.astype(np.float32), weights.astype(np.float32)


def peer_means(
    stacks: Iterable[tuple[int, NDArray[Any]]], classes: int | None = None, tokens: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Average the maps of a class, first each peer's, then over the peers that have any (eq. 7).

    A peer therefore weighs 1/m of its own number m of maps. The cost of a step does not grow with the buffer. Peers are
    summed in the order of their means' bytes, so the result is the same bit for bit whatever they are called.

    Args:
        stacks: class index and one peer's maps of that class, (m, N).
        classes: K; by default one more than the highest class index found.
        tokens: N; by default that of the maps, and 0 when there are none.

    Returns:
        Mean over the peers of their mean maps, (K, N), zero where no peer has the class; number of such peers, (K,).

    Raises:
        ValueError: maps of different lengths, or a class index outside `classes`.
    """
    by_class: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
    for label, maps in stacks:
        if len(maps):
            by_class[label].append(maps.astype(np.float64).mean(axis=0))
    total = max(by_class, default=-1) + 1 if classes is None else classes
    lengths = {len(mean) for found in by_class.values() for mean in found}
    if tokens is not None:
        lengths.add(tokens)
    if len(lengths) > 1:
        raise ValueError(
            f"rollout maps of different sizes were mixed ({sorted(lengths)} tokens); all sites must use one grid"
        )
    if any(not 0 <= label < total for label in by_class):
        raise ValueError(f"rollout maps name the classes {sorted(by_class)}; allowed: 0 to {total - 1}")
    means, counts = np.zeros((total, lengths.pop() if lengths else 0)), np.zeros(total)
    for label, found in by_class.items():
        ordered = sorted(found, key=lambda mean: mean.tobytes())
        means[label] = np.stack(ordered).mean(axis=0)
        counts[label] = len(found)
    return means, counts
