"""The parts of learning on the device: rows, prior, peers, limits, gate, draws."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_client.learning.dealt_rows import Rows, hold_back, skewed_prior
from edgefl_client.learning.draws import dihedral, epoch_order, generator
from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.gate import balanced_accuracy, judge
from edgefl_client.learning.limits import Battery, Limits, read_battery
from edgefl_client.learning.peers import peer_targets
from edgefl_client.runtime import load_graph
from edgefl_client.scoring.verdict import Verdict
from edgefl_protocol.payload import Payload

CLASSES = ("a", "b", "c")


def rows(labels: list[int], groups: list[str] | None = None) -> Rows:
    import hashlib

    names = groups or [f"lesion {index}" for index in range(len(labels))]
    images = np.zeros((len(labels), 2, 2, 3), np.uint8)
    return Rows(images, np.array(labels), tuple(hashlib.sha256(name.encode()).hexdigest() for name in names))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(25, 200), min_size=2, max_size=3))
def test_hold_back_takes_its_share_and_keeps_sides(sizes):
    """docs/design.md 7 and 5: 15 % and at least 20 of each class; a picture never changes sides when others come."""
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    held, limits = hold_back(rows(labels), CLASSES, {})
    for label, size in enumerate(sizes):
        assert held[np.array(labels) == label].sum() == max(20, round(0.15 * size))
    more = labels + [0] * 40
    later, kept = hold_back(rows(more), CLASSES, limits)
    assert np.array_equal(later[: len(labels)], held) and kept == limits


def test_a_lesion_stands_on_one_side():
    """Pictures of one lesion never teach and judge at once (data/README: splits by lesion)."""
    groups = [f"{label}-{index // 3}" for label in range(2) for index in range(90)]
    held, _ = hold_back(rows([0] * 90 + [1] * 90, groups), CLASSES, {})
    for group in set(groups):
        assert len({bool(held[index]) for index, name in enumerate(groups) if name == group}) == 1


def test_copies_do_not_count_as_many():
    """Thirty copies of a picture are one picture: they cannot both teach and judge."""
    with pytest.raises(LearningError) as caught:
        hold_back(rows([0] * 30 + [1] * 30, ["same"] * 30 + [str(n) for n in range(30)]), CLASSES, {})
    assert caught.value.code == "few_images"


def test_prior_has_the_numbers_of_the_paper():
    """docs/methods.md 1.3: (2977, 186) → (0.118, 1.882), (1470, 1221) → (0.907, 1.093); balanced draws count alike."""
    for counts, wanted in (((2977, 186), (0.118, 1.882)), ((1470, 1221), (0.907, 1.093))):
        labels = np.repeat([0, 1], counts)
        assert skewed_prior(labels, 2, 1e-2, balanced=False) == pytest.approx(wanted, abs=6e-4)
        assert skewed_prior(labels, 2, 1e-2, balanced=True) == pytest.approx((1, 1))
    only = skewed_prior(np.zeros(9, np.int64), 3, 1e-2, balanced=False)
    assert only.sum() == pytest.approx(3) and (only > 0).all()


def test_peers_are_averaged_peer_by_peer(school):
    """FedEvPrompt eq. 7: every peer counts once for a class, whatever the number of its maps."""
    maps = {
        "maps.0.0": np.array([[1, 0], [0, 1]], np.float16),
        "maps.1.0": np.array([[0, 0]], np.float16),
        "maps.1.2": np.array([[1, 1]], np.float16),
    }
    found = peer_targets(Payload(maps, {"round": 2}), school.plan(), 3, 2)
    assert found["peers.means"].tolist() == [[0.25, 0.25], [0, 0], [1, 1]]
    assert found["peers.counts"].tolist() == [2, 0, 1]
    five = peer_targets(Payload(maps, {}), school.plan(kd_peers="mean5"), 3, 2)
    assert five["peers.counts"].tolist() == [5, 0, 5]
    assert not peer_targets(Payload({}, {}), school.plan(), 3, 2)["peers.counts"].any()
    for name, value in (("maps.0.3", (1, 2)), ("maps.0.0", (1, 4)), ("maps.0.x", (1, 2))):
        with pytest.raises(LearningError):
            peer_targets(Payload({name: np.ones(value, np.float16)}, {}), school.plan(), 3, 2)


def supply(folder, **files) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


@pytest.mark.parametrize("numbers", list(permutations(range(4))))
def test_what_the_peers_are_called_changes_no_bit(school, numbers):
    """docs/methods.md, distillation: the coordinator deals the peers' numbers anew; the targets are the same bytes.

    Means of 1/6, 5/6, 2^-24 and 1/2: their exact mean lies half-way between two float32 numbers, so that plain sums in
    two orders end on different ones.
    """
    columns = [[1] + [0] * 5, [1] * 5 + [0], [2.0**-24], [0.5]]
    stacks = [np.array(column, np.float16)[:, None] for column in columns]
    dealt = {f"maps.{numbers[peer]}.0": stacks[peer] for peer in range(4)}
    found = peer_targets(Payload(dealt, {}), school.plan(), 2, 1)
    plain = peer_targets(Payload({f"maps.{peer}.0": stacks[peer] for peer in range(4)}, {}), school.plan(), 2, 1)
    assert all(found[name].tobytes() == plain[name].tobytes() for name in found)


def test_battery_is_read_as_linux_tells_it(tmp_path):
    """Documentation/ABI/testing/sysfs-class-power: type, scope, status, capacity."""
    assert read_battery(tmp_path / "none") is None
    supply(tmp_path / "AC", type="Mains", online=1)
    supply(tmp_path / "mouse", type="Battery", scope="Device", status="Discharging", capacity=3)
    assert read_battery(tmp_path) is None
    supply(tmp_path / "BAT0", type="Battery", status="Discharging", capacity=42)
    supply(tmp_path / "BAT1", type="Battery", status="Charging", capacity=90)
    assert read_battery(tmp_path) == Battery(True, 42)
    limits = Limits(battery=lambda: read_battery(tmp_path), battery_percent=43)
    assert "42 %" in limits.reached(0) and replace(limits, battery_percent=42).reached(0) is None
    supply(tmp_path / "BAT2", type="Battery", status="Not charging", capacity=5)  # rests while BAT0 drains
    assert read_battery(tmp_path) == Battery(True, 42)
    supply(tmp_path / "BAT0", type="Battery", status="Unknown", capacity="full")  # tells nothing that can be used
    assert read_battery(tmp_path) == Battery(False, 5)
    charging = replace(limits, battery=lambda: Battery(False, 1))
    assert charging.reached(0) is None


def test_minutes_and_memory():
    """Each limit speaks for itself; none given, none applies."""
    limits = Limits(battery=lambda: None, clock=lambda: 130.0, memory=lambda: 300.0)
    assert limits.reached(0) is None
    assert "2 minutes" in replace(limits, minutes=2).reached(0)
    assert replace(limits, minutes=2).reached(11) is None
    assert "300 MiB" in replace(limits, memory_mib=299).reached(0)
    assert replace(limits, memory_mib=300).reached(0) is None


def test_balanced_accuracy_and_gate():
    """Mean of the recalls, abstention counts as missed; equal is enough, too few pictures are not."""
    labels = np.array([0] * 90 + [1] * 10)
    assert balanced_accuracy(np.zeros(100, np.int64), labels) == pytest.approx(0.5)
    assert balanced_accuracy(np.where(labels == 1, 1, -1), labels) == pytest.approx(0.5)
    verdict = Verdict(
        bundle=0.7, personal=0.7, held=40, least_of_a_class=20, bundle_unnoticed=0, personal_unnoticed=0
    )  # fmt: skip
    assert verdict.passed and not replace(verdict, personal=0.699).passed
    assert not replace(verdict, least_of_a_class=19).passed


def test_gate_asks_both_the_same_question(make_bundle):
    """The bundle must not lose for naming a class that the table does not hold: equal values are judged equal."""
    wide = np.array([[0, 0, 0], [9, 0, 0], [9.5, 0, 0]], np.float32)  # BCC a little above NV wherever there is red
    bias, prior = np.array([3, -2, -2], np.float32), np.ones(3, np.float32)
    bundle = make_bundle(head__weight=wide, head__bias=bias, prior=prior)
    images = np.zeros((40, 24, 24, 3), np.uint8)
    images[20:, :, :, 0] = 255  # NV
    held = Rows(images, np.repeat([0, 1], 20), ("",) * 40)
    graph = load_graph(bundle.score_onnx, 1)
    verdict = judge(graph, bundle, bundle.weights, (True, True, False), held)
    assert (verdict.bundle, verdict.personal) == (1.0, 1.0)
    assert judge(graph, bundle, bundle.weights, (True, True, True), held).bundle == 0.5  # it does prefer BCC


def test_gate_tells_what_would_be_wrong_without_a_word(make_bundle):
    """Wrong with much evidence is counted, with little it is referred; numbers that are not finite recognise none."""
    held = Rows(np.zeros((40, 24, 24, 3), np.uint8), np.repeat([0, 1], 20), ("",) * 40)

    def values(evidence_for_mel: float) -> dict[str, np.ndarray]:
        bias = np.array([evidence_for_mel, -50, -50], np.float32)
        own = {"head.weight": np.zeros((3, 3), np.float32), "head.bias": bias, "prior": np.ones(3, np.float32)}
        return own | {"temperature": np.asarray(1, np.float32)}

    sure, unsure = values(50), values(1)  # vacuity 3/53 and 3/4.3
    bundle = make_bundle(refer_above=0.5, **{name.replace(".", "__"): value for name, value in unsure.items()})
    graph = load_graph(bundle.score_onnx, 1)
    verdict = judge(graph, bundle, sure, (True, True, True), held)
    assert (verdict.bundle, verdict.personal) == (0.5, 0.5)
    assert (verdict.bundle_unnoticed, verdict.personal_unnoticed) == (0, 20)
    wild = judge(graph, bundle, values(3e38) | {"prior": np.full(3, 3e38, np.float32)}, (True, True, True), held)
    assert (wild.personal, wild.personal_unnoticed, wild.passed) == (0, 0, False)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 50))
def test_draws_visit_every_row_and_turn_by_symmetries(seed, count):
    """An epoch without balance is a permutation; the eight symmetries keep the pixels of a picture."""
    labels = np.arange(count) % 2
    assert sorted(epoch_order(generator(seed, "x", "order", 1, 0), labels, "none")) == list(range(count))
    picture = np.random.default_rng(seed).integers(0, 256, (1, 5, 5, 3), np.uint8)
    views = [dihedral(picture, np.array([number])) for number in range(8)]
    assert len({view.tobytes() for view in views}) == 8
    assert all(np.array_equal(np.sort(view, axis=None), np.sort(picture, axis=None)) for view in views)


def test_balanced_draws_are_equal_in_the_mean():
    """`--balance class`: of a 9:1 table, both classes come equally often."""
    labels = np.array([0] * 900 + [1] * 100)
    drawn = labels[epoch_order(generator(0, "x", "order", 1, 0), labels, "class")]
    assert drawn.mean() == pytest.approx(0.5, abs=0.06)
