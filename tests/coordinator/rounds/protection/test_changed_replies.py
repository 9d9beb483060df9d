"""Bounded replies: the same bits as on whole arrays, in memory that does not grow with their number.

Source: docs/methods.md, aggregation (the same job gives the same bytes); the rules of `updates`, written anew below.
"""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_coordinator.rounds.judging import judge
from edgefl_coordinator.rounds.protection import changed_replies, updates
from edgefl_coordinator.rounds.protection.bounding import Protection, bounded_claims, bounded_updates
from edgefl_coordinator.settings import ProtectionSettings
from edgefl_protocol import Payload
from edgefl_protocol.errors import PayloadError
from edgefl_trainer.learning.averaging import sample_weights, weighted_mean

RULES = ("clip", "median", "trimmed-mean", "mixed-mean")
SHAPES = {"backbone.a": (7, 61), "head.b": (331,), "prototypes.0": (3, 67)}  # each is a group of its own
Arrays = dict[str, np.ndarray]
NEW = {"claim_most": 1.0, "norm_most": 1.0}  # what `init` writes


def protection(rule: str, **bounds: float) -> Protection:
    return Protection(ProtectionSettings(rule=rule, **bounds))  # type: ignore[arg-type]


def on_whole_arrays(replies: list[Arrays], sent: Arrays, rule: str) -> list[Arrays]:
    """Clip to the lower median of the lengths, then take one centre of all: whole arrays, every reply at once."""

    def changes(name: str, some: list[Arrays]) -> np.ndarray:
        return np.stack([one[name].astype(np.float64) - sent[name] for one in some])

    found = [dict(reply) for reply in replies]
    for name, array in sent.items():
        having = [reply for reply in found if name in reply]
        rows = array.shape[0] if array.ndim > 1 else 1
        lengths = [math.sqrt(np.square(change).sum() / rows) for change in changes(name, having)]
        usual = sorted(lengths)[(len(lengths) - 1) // 2]
        for reply, change, length in zip(having, changes(name, having), lengths, strict=True):
            if length > usual:
                reply[name] = (array + change * (1 / (length / usual))).astype(array.dtype)
    if rule == "clip":
        return found
    count, hostile = len(found), min(math.ceil(len(found) / 5), (len(found) - 1) // 2)
    flat = [
        np.hstack([changes(n, [one])[0].ravel() if n in one else np.zeros(sent[n].size) for n in sent]) for one in found
    ]
    nearest = [np.argsort([np.square(a - b).sum() for b in flat], kind="stable")[: count - hostile] for a in flat]
    for name, array in sent.items():
        holders = [place for place in range(count) if name in found[place]]
        block = changes(name, [found[place] for place in holders]).reshape(len(holders), -1)
        if rule == "mixed-mean":
            among = np.array([[float(two in nearest[one]) / (count - hostile) for two in holders] for one in holders])
            block = (among / among.sum(axis=1, keepdims=True)) @ block
        few = min(math.ceil(len(holders) / 5), (len(holders) - 1) // 2)
        trimmed = np.sort(block, axis=0)[few : len(holders) - few].mean(axis=0)
        centre = np.median(block, axis=0) if rule == "median" else trimmed
        for place in holders:
            found[place][name] = (array + centre.reshape(array.shape)).astype(array.dtype)
    return found


@st.composite
def rounds(draw: st.DrawFn) -> tuple[str, Arrays, list[Arrays]]:
    """A rule, what was sent, and replies of unlike lengths, of which one may lack a class."""
    rule = draw(st.sampled_from(RULES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    # BLAS may round the last bit of a mixed update otherwise: float32 has fewer
    kinds = ["f2", "f4"] if rule == "mixed-mean" else ["f2", "f4", "f8"]
    sent = {name: rng.normal(size=shape).astype(draw(st.sampled_from(kinds))) for name, shape in SHAPES.items()}
    scales = draw(st.lists(st.sampled_from([0.01, 0.1, 1.0, 3.0, 20.0]), min_size=4, max_size=23))
    replies = [
        {name: (array + scale * rng.normal(size=array.shape)).astype(array.dtype) for name, array in sent.items()}
        for scale in scales
    ]
    if draw(st.booleans()):
        del replies[draw(st.integers(0, len(replies) - 1))]["prototypes.0"]
    return rule, sent, replies


@given(rounds())
def test_the_same_bits_as_on_whole_arrays(drawn) -> None:
    """Made on demand and in blocks of 64 numbers, an array is what it is when all are made at once."""
    rule, sent, plain = drawn
    wanted = on_whole_arrays(plain, sent, rule)
    replies = {f"site-{place:02}": Payload(one) for place, one in enumerate(plain)}
    with pytest.MonkeyPatch.context() as context:
        context.setattr(updates, "_NUMBERS", 64 * len(replies))
        found = bounded_updates(replies, dict.fromkeys(replies, Payload(sent)), protection(rule, norm_most=1.0))
        for reply, arrays in zip(found.replies.values(), wanted, strict=True):
            assert list(reply.arrays) == sorted(arrays)
            assert {name: array.tobytes() for name, array in reply.arrays.items()} == {
                name: array.tobytes() for name, array in arrays.items()
            }


def peak(count: int, settings: Protection) -> int:
    """Most bytes that a round of so many replies of 256 KiB takes beside them."""
    rng = np.random.default_rng(0)
    sent = Payload({f"{name}.w": np.zeros((2**7, 2**7), np.float32) for name in ("backbone", "head", "neck", "tail")})
    replies = {
        f"site-{place:02}": Payload(
            {
                name: ((1 + place % 4) * rng.normal(size=array.shape)).astype(np.float32)
                for name, array in sent.arrays.items()
            },
            {"n_train": 100 + place},
        )
        for place in range(count)
    }
    tracemalloc.start()
    try:
        verdict = judge(
            replies,
            dict.fromkeys(replies, sent),
            lambda chosen: weighted_mean(chosen, sample_weights(chosen)),
            quorum=2,
            protection=settings,
        )
        assert verdict.result is not None and len(verdict.bounded) >= count // 4
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rule", [*RULES, "multi-krum"])
def test_memory_does_not_grow_with_the_replies(rule: str, monkeypatch) -> None:
    """With the bounds that `init` writes three of four are cut: of 32 replies of 256 KiB as much as of 4."""
    monkeypatch.setattr(updates, "_NUMBERS", 2**15)  # as it is, 32 MiB: nothing shows below
    assert peak(32, protection(rule, **NEW)) < peak(4, protection(rule, **NEW)) + 2**18


def test_what_is_made_is_checked_and_cannot_be_written() -> None:
    """A changed reply promises what a payload does."""
    reply = Payload({"head.w": np.ones(3, np.float32), "head.b": np.ones(3, np.float32)}, {"n_train": 3})
    found = changed_replies.replaced(reply, "head.w", np.full(2, 2.0))
    found = changed_replies.changed(found, scalars={"n_train": 2})
    assert found == Payload({"head.w": np.full(2, 2.0), "head.b": reply.arrays["head.b"]}, {"n_train": 2})
    assert found.arrays["head.b"] is reply.arrays["head.b"] and "head.c" not in found.arrays
    with pytest.raises(ValueError, match="read-only"):
        found.arrays["head.w"][0] = 1
    with pytest.raises(PayloadError):
        changed_replies.replaced(reply, "head.w", np.array([np.nan])).arrays["head.w"]


def test_a_claim_that_is_cut_leaves_the_arrays_where_they_are() -> None:
    """Mapped replies keep the window that lets go of their pages."""
    arrays = {"head.w": np.ones(3, np.float32)}
    replies = {f"site-{place}": Payload(arrays, {"n_train": claim}) for place, claim in enumerate((100, 100, 900))}
    cut = bounded_claims(replies, protection("clip", **NEW)).replies["site-2"]
    assert cut.scalars == {"n_train": 100}
    assert changed_replies.as_it_came(cut) is replies["site-2"].arrays
