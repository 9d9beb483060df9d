"""FedCLF's round on the device (docs/methods.md, FedCLF; docs/design.md 9), small enough to follow by hand.

The oracle is a second round in numpy: queues are deques, the network is one matrix.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from math import cos, pi
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.edge_client.learning.contrast_lab import VIEW_PX, contrast_bundle, contrast_plan
from tests.told import told_task

from edgefl_client.home import Home
from edgefl_client.learning.checkpoint import load_standing
from edgefl_client.learning.errors import LearningError, Paused
from edgefl_client.learning.fedclf import FedCLFLearner
from edgefl_client.learning.learner_table import learner_for
from edgefl_client.learning.limits import LearningLimits
from edgefl_client.learning.live_round import LiveRound, count_reply, drop_reply, learn_live
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.own_pictures import Dealt, Table, read_dealt
from edgefl_client.learning.picture_rows import PreparedRows
from edgefl_client.learning.round_alone import run_train
from edgefl_client.learning.round_learner import Circumstances, PointFile
from edgefl_client.learning.views import draw, views
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.fedclf_plan import FedCLFPlan
from edgefl_protocol.bundle.learning_plan import GRAPH
from edgefl_protocol.errors import BundleError
from edgefl_protocol.payload import Payload, digest
from edgefl_protocol.rules.draws import generator
from edgefl_protocol.rules.travels import travels_of

SITE, ROWS, ROUNDS = "ward-3", 9, 4  # batches of four and five: a single picture joins the last
LIMITS = LearningLimits(battery=lambda: None)
REMOTE = np.random.default_rng(2).normal(size=(7, 128))
REMOTE = (REMOTE / np.linalg.norm(REMOTE, axis=1, keepdims=True)).astype(np.float16)


@pytest.fixture(scope="module")
def bundle(lab: SimpleNamespace) -> Bundle:
    return contrast_bundle(lab, contrast_plan())


def rows(n: int = ROWS) -> PreparedRows:
    images = np.random.default_rng(3).integers(0, 256, (n, 24, 24, 3)).astype(np.uint8)
    return PreparedRows(images, np.zeros(n, np.int64), tuple(f"{index:064x}" for index in range(n)))


def network() -> dict[str, np.ndarray]:
    weight = np.random.default_rng(4).normal(size=(128, 3)).astype(np.float32)
    return {
        "head.weight": weight, "backbone.mean": np.full(3, 0.5, np.float32), "backbone.seen": np.asarray(3, np.int64)
    }  # fmt: skip


def broadcast(phase: str = "train", number: int = 1, **arrays: np.ndarray) -> Payload:
    return Payload({**network(), **arrays}, {"phase": phase, "round": number, "rounds": ROUNDS})


def learner(bundle: Bundle, folder: Path, pictures: int = ROWS, **changes: Any) -> FedCLFLearner:
    options = TrainOptions(**{"threads": 1, "limits": LIMITS, **changes})
    none = rows().take(np.zeros(ROWS, np.bool_))
    around = Circumstances(points=PointFile(folder / "point.payload"), site=SITE, options=options)
    found = learner_for(bundle, Dealt(learn=rows(pictures), held=none), around)
    assert isinstance(found, FedCLFLearner)
    return found


def quiet(facts: Any) -> None:
    return None


def told_before(most: int, reply: Payload, queue: int = 10) -> bool:
    """Whether the bytes told before the work hold for the reply that came, with at most a full bank to spare."""
    size = len(reply.to_bytes())
    return size <= most <= size + 2 * 128 * queue + 2048


def by_hand(plan: FedCLFPlan, bank: np.ndarray, remote: np.ndarray | None) -> dict[str, np.ndarray]:
    """The first train round: MoCo's order of steps (arXiv 1911.05722, Algorithm 1) with FedCLF's queues."""
    own = {name: value.astype(np.float64) for name, value in network().items()}
    slow, buffer = dict(own), np.zeros((128, 3))
    q_local, others = deque(bank, maxlen=plan.queue), None if remote is None else remote.astype(np.float64)
    if others is not None:
        others = others / np.linalg.norm(others, axis=1, keepdims=True)
    shares = {"remote": (others, len(REMOTE)), "both": (bank, plan.queue)}
    q_cl = None if others is None else deque(shares[plan.negatives][0], maxlen=shares[plan.negatives][1])
    entering, images = generator(plan.seed, SITE, "remote", 1), rows().images
    for epoch in range(plan.epochs):
        order = generator(plan.seed, SITE, "order", 1, epoch).permutation(ROWS)
        for step, chosen in enumerate((order[:4], order[4:])):
            rate = plan.lr * 0.5 * (1 + cos(pi * (epoch + step / 2) / (ROUNDS * plan.epochs)))
            rng = generator(plan.seed, SITE, "views", 1, epoch, step)
            x1, x2 = (
                views(images[chosen], draw(rng, len(chosen), 24), VIEW_PX).astype(np.float64).mean(axis=(2, 3))
                for _ in range(2)
            )
            slow["head.weight"] = 0.9 * slow["head.weight"] + 0.1 * own["head.weight"]
            keys = x2 @ slow["head.weight"].T
            keys /= np.linalg.norm(keys, axis=1, keepdims=True)
            negatives = np.array(q_local if q_cl is None else q_cl)
            gradient = np.outer(negatives.mean(axis=0), x1.mean(axis=0))
            buffer = 0.9 * buffer + gradient + plan.weight_decay * own["head.weight"]
            own["head.weight"] = own["head.weight"] - rate * buffer
            own["backbone.mean"] = 0.9 * own["backbone.mean"] + 0.1 * x1.mean(axis=0)
            own["backbone.seen"] = own["backbone.seen"] + 1
            q_local.extend(keys)
            if q_cl is not None and others is not None:
                q_cl.extend(keys if plan.negatives == "both" else [])
                q_cl.extend(others[entering.choice(len(others), size=len(keys), replace=len(others) < len(keys))])
    return {**own, "bank": np.array(q_local)}


@pytest.mark.parametrize("negatives", ["remote", "both", "local"])
def test_a_round_is_the_one_by_hand(lab, tmp_path, negatives):
    """docs/methods.md, FedCLF: order of a step, both queues, what enters them, rates and pace over a whole round."""
    plan = contrast_plan(negatives=negatives)
    ours = learner(contrast_bundle(lab, plan), tmp_path)
    state, warm = ours.local_round(ours.start(), broadcast("warm", 0), quiet)
    assert set(warm.arrays) == ({"features"} if plan.shares else set()) and warm.scalars["n_train"] == ROWS
    bank = state["bank"]
    assert bank.shape == (ROWS, 128) and bank.dtype == np.float32  # nothing but features of its pictures
    remote = REMOTE if plan.shares else None
    after, reply = ours.local_round(state, broadcast(**({"remote": REMOTE} if plan.shares else {})), quiet)
    expected = by_hand(plan, bank, remote)
    np.testing.assert_allclose(after["bank"], expected.pop("bank"), atol=2e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(reply.arrays[name], value, rtol=2e-4, atol=2e-5)
    assert set(reply.arrays) == {*network(), *(["features"] if plan.shares else [])}
    assert reply.arrays["backbone.seen"].dtype == np.int64 and int(reply.arrays["backbone.seen"]) == 7
    assert set(after) == {"bank"} and reply.scalars["site_sha256"] == digest(dict(after))
    assert ours.travels == (("features", "weights") if plan.shares else ("weights",))
    assert told_before(ours.most_reply_bytes(broadcast("warm", 0)), warm)
    assert told_before(ours.most_reply_bytes(broadcast()), reply)


def test_a_warm_exchange_waits_for_no_step(bundle, tmp_path):
    """It takes none, and to load the graph of one takes longer than all else of the exchange."""
    without = replace(bundle, extras={**bundle.extras, GRAPH: b"no graph"})
    state, _ = learner(bundle, tmp_path).local_round({}, broadcast("warm", 0), quiet)
    found, _ = learner(without, tmp_path).local_round({}, broadcast("warm", 0), quiet)
    np.testing.assert_array_equal(found["bank"], state["bank"])
    with pytest.raises(BundleError, match="cannot load the model"):
        learner(without, tmp_path).local_round(found, broadcast(), quiet)


def test_a_device_that_is_alone_contrasts_with_its_own(bundle, tmp_path):
    """docs/methods.md, FedCLF 2.5: without others, local features are the negatives."""
    ours = learner(bundle, tmp_path)
    state, _ = ours.local_round({}, broadcast("warm", 0), quiet)
    _, reply = ours.local_round(state, broadcast(), quiet)
    expected = by_hand(contrast_plan(negatives="local"), state["bank"], None)
    np.testing.assert_allclose(reply.arrays["head.weight"], expected["head.weight"], rtol=2e-4, atol=2e-5)


def test_features_that_leave_are_of_unit_length(bundle, tmp_path):
    """docs/methods.md, feature exchange: float16 rows of length 1, at most K."""
    ours = learner(bundle, tmp_path)
    state, warm = ours.local_round({}, broadcast("warm", 0), quiet)
    _, reply = ours.local_round(state, broadcast(remote=REMOTE), quiet)
    for sent, most in ((warm, ROWS), (reply, 10)):
        features = sent.arrays["features"]
        assert features.dtype == np.float16 and features.shape == (most, 128)
        np.testing.assert_allclose(np.linalg.norm(features.astype(np.float64), axis=1), 1, atol=1e-3)


def test_what_leaves_is_what_the_round_made(lab, tmp_path):
    """FedCLF III-A: K is more than the device's pictures, so its bank also holds rows of the warm phase. They stay."""
    ours = learner(contrast_bundle(lab, contrast_plan(queue=20, epochs=1)), tmp_path)
    state, warm = ours.local_round({}, broadcast("warm", 0), quiet)
    after, reply = ours.local_round(state, broadcast(remote=REMOTE), quiet)
    assert len(after["bank"]) == 2 * ROWS and len(warm.arrays["features"]) == ROWS
    np.testing.assert_array_equal(reply.arrays["features"], after["bank"][ROWS:].astype(np.float16))


def test_sgds_momentum_stays_where_it_is_kept(lab, tmp_path):
    """`optimizer_state=keep`: buffers stay on the device, and the next round goes on from them, not from the
    broadcast's; of zero they are those of `reset`."""
    (tmp_path / "keep").mkdir()
    (tmp_path / "reset").mkdir()
    keeps = learner(contrast_bundle(lab, contrast_plan(optimizer_state="keep")), tmp_path / "keep")
    resets = learner(contrast_bundle(lab, contrast_plan()), tmp_path / "reset")
    name = "optimizer.momentum_buffer.head.weight"
    warm, _ = keeps.local_round({}, broadcast("warm", 0), quiet)
    state, reply = keeps.local_round(warm, broadcast(remote=REMOTE), quiet)
    plain, same = resets.local_round(warm, broadcast(remote=REMOTE), quiet)
    assert set(state) == {"bank", name} and set(plain) == {"bank"} and name not in reply.arrays
    np.testing.assert_array_equal(reply.arrays["head.weight"], same.arrays["head.weight"])
    assert np.abs(state[name]).max() > 0
    second = broadcast("train", 2, remote=REMOTE, **{name: np.full((128, 3), 9, np.float32)})
    _, from_zero = keeps.local_round({**state, name: np.zeros_like(state[name])}, second, quiet)
    _, fresh = resets.local_round(plain, second, quiet)
    _, gone_on = keeps.local_round(state, second, quiet)
    np.testing.assert_array_equal(from_zero.arrays["head.weight"], fresh.arrays["head.weight"])
    assert np.abs(gone_on.arrays["head.weight"] - fresh.arrays["head.weight"]).max() > 1e-6


@pytest.mark.parametrize("stopped_after", range(1, 5))
def test_a_round_that_was_stopped_ends_with_the_same_bits(bundle, tmp_path, stopped_after):
    """docs/design.md 10: a limit after any step, another process, the same result; a state that came is left as it
    was."""
    whole, cut_ = learner(bundle, tmp_path / "a"), tmp_path / "b"
    for folder in (tmp_path / "a", cut_):
        folder.mkdir()
    state, _ = whole.local_round({}, broadcast("warm", 0), quiet)
    given = {name: value.copy() for name, value in state.items()}
    expected, sent = whole.local_round(state, broadcast(remote=REMOTE), quiet)
    steps = count(1)

    def reached(started: float) -> str | None:
        return "enough" if next(steps) == stopped_after else None

    limits = SimpleNamespace(reached=reached, clock=LIMITS.clock, memory_mib=None)
    with pytest.raises(Paused, match="enough"):
        learner(bundle, cut_, limits=limits).local_round(state, broadcast(remote=REMOTE), quiet)
    told: list[Any] = []
    found, again = learner(bundle, cut_).local_round(state, broadcast(remote=REMOTE), told.append)
    assert sum("step" in facts for facts in told) == 4 - stopped_after
    assert digest(dict(found)) == digest(dict(expected)) and again == sent
    assert all((state[name] == given[name]).all() for name in given)
    repeated = learner(bundle, cut_).local_round(state, broadcast(remote=REMOTE), quiet)  # killed before it was counted
    assert repeated[1] == sent


def test_a_point_of_another_round_is_not_gone_on_from(bundle, tmp_path):
    """Another broadcast is another round, also under the same number."""
    ours = learner(bundle, tmp_path)
    state, _ = ours.local_round({}, broadcast("warm", 0), quiet)
    _, first = ours.local_round(state, broadcast(remote=REMOTE), quiet)
    moved = {"head.weight": network()["head.weight"] + 1}
    _, second = ours.local_round(state, broadcast(remote=REMOTE, **moved), quiet)
    (tmp_path / "fresh").mkdir()
    _, fresh = learner(bundle, tmp_path / "fresh").local_round(state, broadcast(remote=REMOTE, **moved), quiet)
    assert second == fresh != first


def test_batch_norm_stays_where_it_is_told_to(lab, tmp_path):
    """FedBN (arXiv 2102.07623): with bn=local its tensors neither leave nor come in, and are sent once at the end."""
    ours = learner(contrast_bundle(lab, contrast_plan(bn="local", momentum_encoder="averaged")), tmp_path)
    state, _ = ours.local_round({}, broadcast("warm", 0), quiet)
    state, reply = ours.local_round(state, broadcast(remote=REMOTE), quiet)
    kept = {"backbone.mean", "backbone.seen"}
    assert set(reply.arrays) == {"head.weight", "momentum.head.weight", "features"}
    assert set(state) == {"bank", *kept, *(f"momentum.{name}" for name in kept)}
    assert told_before(ours.most_reply_bytes(broadcast()), reply)
    other = broadcast("train", 2, remote=REMOTE, **{"backbone.mean": np.full(3, 77, np.float32)})
    state, _ = ours.local_round(state, other, quiet)
    assert abs(state["backbone.mean"]).max() < 1 and int(state["backbone.seen"]) == 11
    collect = Payload({}, {"phase": "final", "round": 5, "rounds": ROUNDS})
    unchanged, last = ours.local_round(state, collect, quiet)
    assert set(last.arrays) == kept and unchanged is state
    assert told_before(ours.most_reply_bytes(collect), last, queue=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head.weight": np.zeros((128, 4), np.float32)}, r"\(128, 4\); fetch its bundle with edgefl sync$"),
        ({"head.weight": np.zeros((128, 3), np.float64)}, "head.weight is of float64"),
        ({"backbone.seen": np.asarray(3, np.int32)}, "backbone.seen is of int32"),
        ({"remote": np.zeros((4, 64), np.float16)}, r"the others' features are of type float16 and shape \(4, 64\)"),
    ],
)
def test_another_network_is_refused_in_a_sentence(bundle, tmp_path, change, message):
    """A broadcast of another federation or version: nothing is learned, and the sentence says what to do."""
    with pytest.raises(LearningError, match=message):
        learner(bundle, tmp_path).local_round({}, broadcast(**change), quiet)


def test_what_cannot_be_learned_is_refused(bundle, tmp_path):
    """A missing tensor, a phase that the method has not, too few pictures, a loss that is not finite."""
    ours = learner(bundle, tmp_path)
    short = Payload({"head.weight": network()["head.weight"]}, broadcast().scalars)
    with pytest.raises(LearningError, match=r"backbone\.mean is missing"):
        ours.local_round({}, short, quiet)
    for told in ({}, {"phase": "train", "rounds": 5}, {"phase": "train", "round": 1}):
        with pytest.raises(LearningError) as mute:
            ours.local_round({}, Payload(broadcast().arrays, told), quiet)
        assert mute.value.code == "other_broadcast"
    with pytest.raises(LearningError, match="no phase probe"):
        ours.local_round({}, broadcast("probe"), quiet)
    with pytest.raises(LearningError, match="not a finite number"):
        ours.local_round({}, broadcast(**{"head.weight": np.full((128, 3), 3e38, np.float32)}), quiet)


@pytest.mark.parametrize(("n", "different"), [(1, 1), (3, 3), (40, 3)])
def test_a_handful_of_look_alike_pictures_is_no_batch(bundle, tmp_path, n: int, different: int):
    """docs/methods.md 2.3: of two pictures batch norm knows signs alone, and the weights run away; copies of a picture
    are that picture. Said before the work, in one sentence."""
    few = replace(rows(n), groups=tuple(f"{index % different:064x}" for index in range(n)))
    dealt = Dealt(learn=few, held=few.take(np.zeros(n, np.bool_)))
    with pytest.raises(LearningError, match=f"needs 4 different pictures, but there are {different}; name more$") as no:
        learner_for(bundle, dealt, Circumstances(points=PointFile(tmp_path / "point")))
    assert no.value.code == "few_images"


def test_a_collapse_is_told(bundle, tmp_path):
    """Half-way and at the end, keys of different pictures that are nearly the same are worth a warning."""
    ours, told = learner(bundle, tmp_path), list[Any]()
    flat = np.ones((128, 3), np.float32)  # every picture points the same way
    ours.local_round({}, broadcast("train", 2, remote=REMOTE, **{"head.weight": flat}), told.append)
    assert any("nearly the same in round 2" in str(facts.get("warning")) for facts in told)
    assert all(facts["key_similarity"] > 0.99 for facts in told if "summary" in facts)


def test_learning_alone_says_what_to_do(bundle, home: Home, labels: Path):
    """What a device alone would learn is an encoder that no score reads: one sentence, and the table is remembered."""
    with pytest.raises(LearningError, match="edgefl sync"):
        run_train(home, bundle, labels, TrainOptions(threads=1, limits=LIMITS))
    assert (home.learning / "table.json").exists()
    (home.learning / "live.payload").write_bytes(b"damaged")
    with pytest.raises(LearningError, match="edgefl sync"):  # what is damaged says to begin again with --restart
        run_train(home, bundle, labels, TrainOptions(threads=1, limits=LIMITS, restart=True))
    assert not (home.learning / "live.payload").exists()


def test_live_rounds_are_the_learners_own(bundle, home: Home, labels: Path, tmp_path: Path):
    """docs/design.md 4, same seed and same digest: warm, train and final by `learn_live`, one of them stopped, give the
    states and replies of the same learner called without a federation; what did not count is learned from anew."""
    table, asked = Table(file=labels), list[tuple[tuple[str, ...], int]]()
    options = TrainOptions(threads=1, limits=LIMITS, seed=5, epochs=2, checkpoint_seconds=0)
    dealt = read_dealt(Home(tmp_path / "alone"), bundle, table, LIMITS, quiet)
    alone = learner_for(bundle, dealt, Circumstances(points=PointFile(tmp_path / "point"), site=SITE, options=options))
    state = alone.start()
    rounds = [("warm", 0, True), ("train", 1, False), ("train", 2, True), ("train", 3, True), ("final", 4, True)]
    for number, (phase, round_, counts) in enumerate(rounds, 1):
        live = LiveRound(
            federation="skin", site=SITE,
            task=told_task(
                round=number, classes=bundle.labels.classes, epochs=2, seed=5, travels=("features", "weights")
            ),
            permitted=lambda kinds, size: asked.append((tuple(kinds), size)),
            broadcast=broadcast(phase, round_, **({"remote": REMOTE} if phase == "train" else {})),
        )  # fmt: skip
        if phase == "train":
            once = replace(options, limits=replace(LIMITS, minutes=1e-9))
            told, reply = learn_live(home, bundle, table, once, live)
            assert told["state"] == "paused" and reply is None
        _, reply = learn_live(home, bundle, table, replace(options, seed=None, epochs=None), live)
        assert told_before(asked[-1][1], reply)
        new, expected = alone.local_round(state, live.broadcast, quiet)
        assert reply == expected and set(travels_of(reply.arrays)) <= {"features", "weights"}
        if counts:
            state = new
            count_reply(home, "skin", number)
        else:
            drop_reply(home, "skin", number, None)
        standing = load_standing(home.learning / "live.payload")
        assert standing is not None and digest(dict(standing.state)) == digest(dict(state))
    assert {kinds for kinds, _ in asked} == {("features", "weights")}


def test_the_owners_batch_is_checked(bundle, tmp_path):
    """docs/methods.md 2.3: three pictures a batch are too few."""
    maker: Callable[[], FedCLFLearner] = lambda: learner(bundle, tmp_path, batch=3)  # noqa: E731
    with pytest.raises(LearningError, match=r"cannot learn with --batch 3: .* number, 4 to 65536"):
        maker()
    assert replace(contrast_plan(), batch=4).batch == 4


def test_a_step_that_takes_too_much_memory_is_refused_before_the_work(bundle, tmp_path):
    """The memory of a step grows with its batch: two small ones tell which fits. Of 9 pictures batches of 6 make one
    step of 9, for the last three join it, so room for 6 is none for --batch 6."""
    used, kept = iter(3 * [90.0, 100.0, 140.0]), {"bank": np.eye(4, 128, dtype=np.float32)}
    limits = LearningLimits(memory_mib=115, battery=lambda: None, memory=lambda: next(used))
    with pytest.raises(LearningError, match=r"a step of 9 pictures needs about 150 MiB .* use --batch 5"):
        learner(bundle, tmp_path, limits=limits, batch=6).local_round(kept, broadcast(remote=REMOTE), quiet)
    roomy = replace(limits, memory_mib=125)
    with pytest.raises(LearningError, match=r"a step of 9 pictures needs about 150 MiB .* use --batch 5"):
        learner(bundle, tmp_path, limits=roomy, batch=6).local_round(kept, broadcast(remote=REMOTE), quiet)
    with pytest.raises(LearningError, match=r"at least 100 MiB .* 4 pictures do not fit either"):
        tight = replace(limits, memory_mib=90)
        learner(bundle, tmp_path, limits=tight).local_round(kept, broadcast(remote=REMOTE), quiet)


def test_a_bank_that_takes_too_much_memory_is_refused_before_the_work(bundle, tmp_path):
    """The first exchange of all asks, too: a batch of it is as large as one of a step."""
    used = iter([90.0, 100.0, 140.0])
    limits = LearningLimits(memory_mib=115, battery=lambda: None, memory=lambda: next(used))
    with pytest.raises(LearningError, match=r"a step of 9 pictures needs about 150 MiB .* use --batch 5"):
        learner(bundle, tmp_path, limits=limits, batch=6).local_round({}, broadcast("warm", 0), quiet)
    assert not (tmp_path / "point.payload").exists()
