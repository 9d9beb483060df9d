"""Rollout maps from a site to its peers (FedEvPrompt, arXiv 2411.10071, 3.2; docs/methods.md 1.5)."""

from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgefl_protocol import Payload
from edgefl_protocol.errors import MapsError
from edgefl_protocol.rules.maps import (
    MAX_MAPS,
    check_sent_maps,
    class_in_reply,
    first_of_each_class,
    maps_in_broadcast,
    maps_in_buffer,
    most_certain,
    numbered_as_model,
    numbered_as_task,
    others_maps,
    peer_means,
    peer_targets,
    renumbered,
    replaced,
    reply_maps,
    reply_name,
    sent_maps_in,
    travel_alone,
)

ROWS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.1, 0.2, 0.5, 0.9])), max_size=40)


def one(value: float, count: int = 1) -> np.ndarray:
    return np.full((count, 9), value, np.float16)


def test_a_site_keeps_its_model_where_maps_alone_travel() -> None:
    """FedEvPrompt section 3: nothing but maps leaves a site; any other kind beside them is more than that."""
    assert travel_alone(("maps",)) and travel_alone(["maps"])
    assert not any(travel_alone(kinds) for kinds in ((), ("weights",), ("maps", "weights")))


# names


@given(st.integers(0, 99_999))
def test_a_class_is_read_back_from_its_name(label):
    assert class_in_reply(reply_name(label)) == label


@pytest.mark.parametrize("name", ["maps", "maps.", "maps.01", "maps.-1", "maps.x", "maps.1.2", "maps.1\n", "map.1"])
def test_no_other_name_is_that_of_a_class(name):
    """docs/security.md, payloads: a class has one spelling."""
    assert class_in_reply(name) is None


def test_sites_may_have_points_in_their_names():
    found = maps_in_buffer({"maps.3.a.b.c": one(1), "maps.0.1": one(0), "head.weight": one(0)})
    assert set(found) == {(3, "a.b.c"), (0, "1")}


@pytest.mark.parametrize("name", ["maps.0", "maps.0.x", "maps.a.0", "maps.0.1.2", "maps.0.01", "maps.00.1"])
def test_a_broadcast_names_peer_and_class(name):
    with pytest.raises(MapsError, match="to no class of the federation") as error:
        maps_in_broadcast({"head.weight": one(0), name: one(1)})
    assert error.value.code == "other_maps"


# choice


@given(ROWS)
def test_lowest_vacuity_first_ties_by_index(rows):
    """docs/methods.md 1.5: per class rank by u ascending, the first M; ties by sample index; fewer where fewer are."""
    labels, vacuity = np.array([k for k, _ in rows], np.int64), np.array([u for _, u in rows], np.float32)
    chosen = most_certain(vacuity, labels, MAX_MAPS)
    assert set(chosen) == {label for label, _ in rows}
    for label, positions in chosen.items():
        ranked = sorted((u, place) for place, (klass, u) in enumerate(rows) if klass == label)
        assert positions == [place for _, place in ranked][:5]
    assert MAX_MAPS == 5  # M of the paper


def test_another_order_may_leave_pictures_out():
    """`select=correct`: what was answered wrongly is not in the order, so a class may send nothing."""
    assert first_of_each_class(np.array([4, 0, 3]), np.array([0, 1, 1, 0, 0]), 2) == {0: [4, 0]}


def test_a_reply_is_float16_and_reaches_one():
    """docs/design.md 7: float16 at patch resolution, max-normalised; payloads keep the bits."""
    maps = (7 * np.random.default_rng(0).random((8, 16))).astype(np.float32)
    arrays = reply_maps(maps, {0: [2, 0], 3: [7], 4: []})
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        "maps.0": (np.float16, (2, 16)),
        "maps.3": (np.float16, (1, 16)),
    }
    for position, sent in zip([2, 0, 7], [*arrays["maps.0"], *arrays["maps.3"]], strict=True):
        assert sent.max() == 1
        assert np.allclose(sent.astype(np.float64), maps[position] / maps[position].max(), atol=2**-11)
    assert Payload.from_bytes(Payload(arrays, {}).to_bytes()) == Payload(arrays, {})


@pytest.mark.parametrize("values", [np.zeros(9), np.full(9, np.nan), np.array([1.0] * 8 + [np.inf]), -np.ones(9)])
def test_empty_or_broken_maps_never_travel(values):
    with pytest.raises(MapsError, match="empty or holds a value that is not finite") as error:
        reply_maps([values.astype(np.float32)], {0: [0]})
    assert error.value.code == ("bad_map" if np.isfinite(values).all() else "not_finite")


@given(
    st.lists(
        st.tuples(st.integers(0, 1), arrays(np.float32, 9, elements=st.floats(0, 4, width=32)).filter(np.any)),
        min_size=1, max_size=12,
    )
)  # fmt: skip
def test_a_mean_teaches_what_its_maps_teach(held):
    """docs/methods.md 1.5: distances to a peer's maps differ from the distance to their mean by a constant, so a step
    is given the same targets, but for the rounding to float16 (2^-12 of numbers up to 1)."""
    maps = [values for _, values in held]
    chosen = {label: [row for row, (one, _) in enumerate(held) if one == label] for label in (0, 1)}
    each, mean = (reply_maps(maps, chosen, sent) for sent in ("each", "mean"))
    assert each.keys() == mean.keys() and all(array.shape == (1, 9) for array in mean.values())
    assert all(array.dtype == np.float16 for array in mean.values())
    for name in each:  # a server takes both, and holds a mean against 1/M
        check_sent_maps(name, each[name], 2, 9, len(each[name]))
        check_sent_maps(name, mean[name], 2, 9, len(each[name]), "mean")
    targets = [
        peer_targets({f"maps.3.{name[5:]}": array for name, array in one.items()}, 2, 9, "sum") for one in (each, mean)
    ]
    np.testing.assert_allclose(targets[1][0], targets[0][0], atol=2**-11)
    np.testing.assert_array_equal(targets[1][1], targets[0][1])


MAP = np.array([[0, 0.25, 1]], np.float16)


@pytest.mark.parametrize(
    ("name", "maps", "sent", "why"),
    [
        ("maps.2", MAP, "each", "is not maps.<k> with k below 2"),
        ("maps.0.1", MAP, "each", "is not maps.<k>"),
        ("maps.0", MAP.astype(np.float32), "each", "is not float16 with two axes"),
        ("maps.0", MAP[0], "each", "is not float16 with two axes"),
        ("maps.0", MAP[:, 1:], "each", r"has shape \(1, 2\); it must be \(1 to 5, 3\)"),
        ("maps.0", MAP[:0], "each", r"has shape \(0, 3\)"),
        ("maps.0", np.repeat(MAP, 6, axis=0), "each", r"has shape \(6, 3\)"),
        ("maps.0", np.repeat(MAP, 2, axis=0), "mean", r"it must be \(1, 3\)"),
        ("maps.0", MAP * np.float16(2), "each", "from 0 to 1 and reach 1$"),
        ("maps.0", MAP - np.float16(0.25), "each", "from 0 to 1 and reach 1$"),
        ("maps.0", np.concatenate([MAP, MAP / 2]), "each", "from 0 to 1 and reach 1$"),
        ("maps.0", MAP * np.float16(0.19), "mean", r"from 0 to 1 and reach 0\.2$"),
    ],
)
def test_what_is_no_map_of_a_reply_is_passed_on_to_nobody(name, maps, sent, why):
    """docs/security.md, payloads: float16 (m, N), m at most M = 5, from 0 to 1, and 1 is reached; of a mean 1/M."""
    check_sent_maps("maps.1", MAP if sent == "each" else MAP * np.float16(0.2), 2, 3, sent=sent)
    with pytest.raises(MapsError, match=why):
        check_sent_maps(name, maps, 2, 3, sent=sent)


def test_a_network_without_patches_has_no_maps():
    """A map of no value has no maximum: it is refused, and ends nobody's server."""
    with pytest.raises(MapsError, match=r"has shape \(1, 0\)"):
        check_sent_maps("maps.0", np.zeros((1, 0), np.float16), 2, 0)


def test_what_a_federation_asks_for_is_known_or_refused():
    assert [sent_maps_in(given) for given in ({}, {"sent_maps": "each"}, {"sent_maps": "mean"})] == [
        "each", "each", "mean",
    ]  # fmt: skip
    with pytest.raises(MapsError, match="sent_maps to median, which this version does not know") as error:
        sent_maps_in({"sent_maps": "median"})
    assert error.value.code == "other_settings"


# the server's buffer


def test_a_reply_replaces_all_maps_of_its_site():
    """docs/methods.md 1: a new reply replaces that site's old maps; those of others stay, and so do other arrays."""
    buffer = {"maps.0.a": one(0, 5), "maps.1.a": one(0), "maps.0.b": one(0.5), "head.bias": np.ones(2)}
    after = replaced(buffer, {"a": {"maps.0": one(1, 3), "head.bias": np.zeros(2)}, "c": {"maps.1": one(0.25)}}, 2)
    assert set(after) == {"maps.0.a", "maps.0.b", "maps.1.c", "head.bias"}
    assert after["maps.0.a"].shape == (3, 9) and after["head.bias"].all()
    for name in ("maps.2", "maps.x", "maps.0.1"):
        with pytest.raises(MapsError, match=r"names no class of this task: maps\.0 to maps\.1"):
            replaced(buffer, {"a": {name: one(1)}}, 2)


def test_a_site_receives_the_maps_of_all_others():
    """docs/methods.md 1: all maps but the receiver's own; classes of one site stay together under its number."""
    buffer = {"maps.0.a": one(0.25), "maps.1.a": one(0.25), "maps.0.b": one(0.5), "maps.2.c": one(1)}
    sent = others_maps({**buffer, "head.bias": np.ones(2)}, ["a", "b", "new"])
    values = {name: {key: float(maps.max()) for key, maps in arrays.items()} for name, arrays in sent.items()}
    assert values["a"] == {"maps.0.0": 0.5, "maps.1.2": 1}
    assert values["b"] == {"maps.0.0": 0.25, "maps.0.1": 0.25, "maps.1.2": 1}
    assert values["new"] == {"maps.0.0": 0.25, "maps.0.1": 0.25, "maps.1.0": 0.5, "maps.2.2": 1}


def test_renumbering_keeps_every_map_and_keeps_peers_together():
    arrays = {f"maps.{peer}.{label}": np.full(2, 10 * peer + label) for peer in (0, 4, 7) for label in (0, 3)}
    found = renumbered({**arrays, "other": np.zeros(1)}, np.random.default_rng(0))
    assert set(found) == {f"maps.{p}.{k}" for p in range(3) for k in (0, 3)} | {"other"}
    assert {(int(found[f"maps.{p}.0"][0]), int(found[f"maps.{p}.3"][0])) for p in range(3)} == {
        (0, 3), (40, 43), (70, 73),
    }  # fmt: skip


def test_a_number_names_no_peer_over_time():
    """docs/security.md, exchange policy: all orders of three peers come, equally often (chi-square, 5 degrees)."""
    rng, orders = np.random.default_rng(1), dict[tuple[float, ...], int]()
    for _ in range(600):
        found = renumbered({f"maps.{peer}.0": one(peer) for peer in range(3)}, rng)
        order = tuple(float(found[f"maps.{peer}.0"][0, 0]) for peer in range(3))
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 6 and sum((count - 100) ** 2 / 100 for count in orders.values()) < 20.5  # p = 0.001


# class numbers


@given(st.permutations("abcd"), st.permutations("abcd"), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_classes_keep_their_names_there_and_back(task, model, held):
    """A federation may number its classes in another order than the bundle: a map stays with its class's name."""
    broadcast = {f"maps.{p}.{k}": np.array([10 * p + k]) for p, k in held} | {"head": np.zeros(1)}
    for name, array in numbered_as_model(broadcast, task, model).items():
        if name != "head":
            _, peer, label = name.split(".")
            assert task[int(array[0]) % 10] == model[int(label)] and int(array[0]) // 10 == int(peer)
    reply = {f"maps.{k}": np.array([k]) for _, k in held} | {"head": np.zeros(1)}
    sent = numbered_as_task(reply, task, model)
    assert {(task[int(name[5:])], model[int(array[0])]) for name, array in sent.items() if name != "head"} == {
        (model[k], model[k]) for _, k in held
    }
    assert "head" in sent


def test_other_classes_are_refused():
    with pytest.raises(MapsError, match="fetch its bundle") as error:
        numbered_as_model({}, "ab", "abc")
    assert error.value.code == "other_classes"
    with pytest.raises(MapsError, match=r"maps\.0\.2 belongs to no class of the federation"):
        numbered_as_model({"maps.0.2": one(1)}, "ab", "ba")


# peers' means


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 5), st.integers(0, 2)),
        st.lists(st.lists(st.integers(0, 8), min_size=2, max_size=2), min_size=1, max_size=4),
    )
)
def test_every_peer_counts_once_for_a_class(held):
    """Eq. 7 in exact fractions: the mean over peers of each peer's own mean, and how many peers there are."""
    broadcast = {f"maps.{p}.{k}": np.array(rows, np.float16) / 8 for (p, k), rows in held.items()}
    means, counts = peer_targets(broadcast, 3, 2, "sum")
    for label in range(3):
        stacks = [rows for (_, k), rows in held.items() if k == label]
        own = [[Fraction(sum(row[n] for row in rows), 8 * len(rows)) for n in range(2)] for rows in stacks]
        wanted = [float(sum(mean[n] for mean in own) / len(own)) if own else 0.0 for n in range(2)]
        assert means[label] == pytest.approx(wanted, abs=1e-7)
        assert counts[label] == len(own)
    assert peer_targets(broadcast, 3, 2, "mean5")[1].tolist() == [5 * bool(count) for count in counts]


@pytest.mark.parametrize("numbers", list(permutations(range(4))))
def test_what_the_peers_are_called_changes_no_bit(numbers):
    """Decision 0028: the coordinator draws the peers' numbers anew for every receiver; the targets are the same bytes.

    Means of 1/6, 5/6, 2^-24 and 1/2: their exact mean lies half-way between two float32 numbers, so that plain sums in
    two orders end on different ones.
    """
    columns = [[1] + [0] * 5, [1] * 5 + [0], [2.0**-24], [0.5]]
    stacks = [np.array(column, np.float16)[:, None] for column in columns]
    renamed = Payload({f"maps.{numbers[peer]}.0": stacks[peer] for peer in range(4)}, {})  # in the order of names
    found = peer_targets(renamed.arrays, 2, 1, "sum")
    plain = peer_targets({f"maps.{peer}.0": stacks[peer] for peer in range(4)}, 2, 1, "sum")
    assert [array.tobytes() for array in found] == [array.tobytes() for array in plain]


@pytest.mark.parametrize(("name", "shape"), [("maps.0.3", (1, 2)), ("maps.0.0", (1, 4)), ("maps.0.0", (2,))])
def test_maps_of_another_class_or_grid_are_refused(name, shape):
    with pytest.raises(MapsError, match="does not fit this model of 3 classes and 2 patches"):
        peer_targets({name: np.ones(shape, np.float16)}, 3, 2, "sum")
    with pytest.raises(ValueError, match=r"\[2, 4\] tokens"):
        peer_means([(0, np.ones((1, 2))), (0, np.ones((1, 4)))])


def test_without_maps_nothing_is_compared():
    """docs/methods.md 1.5: an empty buffer gives L_KD = 0; a peer without maps of a class is left out."""
    means, counts = peer_targets({"maps.0.1": np.zeros((0, 2), np.float16), "head": np.ones(1)}, 3, 2, "sum")
    assert means.shape == (3, 2) and not means.any() and not counts.any()
