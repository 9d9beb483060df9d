"""Replies of SuperNodes that are of no use: named, and the round goes on as its quorum says.

GridHere calls the apps that SuperLink and SuperNodes would run; a node spoils what it replies.
"""

from dataclasses import replace

import numpy as np
import pytest
from tests.trainer.flower.three_nodes import asked, begin, lines

from edgefl_protocol import Payload
from edgefl_trainer.errors import RunError
from edgefl_trainer.flower import away
from edgefl_trainer.flower.federation import serve
from edgefl_trainer.flower.records import packed, unpacked

__all__ = ["begin"]  # a fixture


def phase_of(asked):
    return unpacked(asked.content, away.GIVEN)["broadcast"].scalars["phase"]


def spoiled(change):
    """A node that changes its reply in the rounds of training."""

    def spoil(asked, reply):
        if asked.metadata.message_type != "train" or phase_of(asked) != "train":
            return reply
        found = unpacked(reply.content, ("facts", "reply"))
        reply.content = packed({**found, "reply": change(found["reply"])})
        return reply

    return spoil


def first_with(payload, change):
    name = sorted(payload.arrays)[0]
    return Payload({**payload.arrays, name: change(payload.arrays[name])}, payload.scalars)


@pytest.mark.parametrize(
    ("method", "change", "sentence"),
    [
        ("fedavg", lambda one: first_with(one, lambda array: array[:-1]), "of its reply is float32"),
        ("fedavg", lambda one: Payload({**one.arrays, "maps.0": np.ones((1, 9), np.float16)}, one.scalars), "maps"),
        ("fedavg", lambda one: Payload({}, one.scalars), "cannot be aggregated"),
        ("fedavg", lambda one: Payload(one.arrays, {}), "lacks site_sha256"),
    ],
)
def test_a_reply_of_no_use_is_named_and_does_not_count(method, change, sentence, begin, capsys) -> None:
    grid, plan = begin(method, rounds=1, quorum=2)
    grid.nodes[66].spoil = spoiled(change)
    serve(grid, plan)
    [told] = lines(capsys, "no reply of site site-2 counts")
    assert told.startswith("exchange 2: ") and sentence in told  # after a warm one


@pytest.mark.parametrize("odd", [97, 35])
def test_a_reply_that_fits_no_other_is_named_and_the_round_goes_on(odd, begin, capsys) -> None:
    """Alone it can be aggregated. Whether it came first or last, the two that fit one another decide."""
    grid, plan = begin("fedproto", rounds=1, quorum=2)
    grid.nodes[odd].spoil = spoiled(lambda one: first_with(one, lambda array: array[:-1]))
    assert serve(grid, plan)["without_hand_out"] == []
    [told] = lines(capsys, "no reply of site")
    assert told.startswith(f"exchange 2: no reply of site {grid.nodes[odd].config['site']} counts: beside that of site")
    assert "its reply has another form: the array prototypes.<k> is float32 with shape (63)" in told


def each(change):
    return lambda one: Payload({name: change(array) for name, array in one.arrays.items()}, one.scalars)


@pytest.mark.parametrize(
    ("method", "change", "sentence"),
    [
        ("fedproto", each(lambda array: array[None]), "the array prototypes.<k> is float32 with shape (any, 64)"),
        ("feddistill", each(lambda array: array[:-1]), "the array outputs.<k> is float32 with shape (3)"),
        ("pfl-vqa", each(lambda array: array[..., :-1]), "the array prompts.image is float32 with shape (8, 63)"),
    ],
)
def test_a_reply_of_another_form_never_reaches_the_other_sites(method, change, sentence, begin, tmp_path, capsys):
    """What is passed on, or averaged class by class, can be aggregated in any shape; the next round would fail of it.

    The rule is the coordinator's (docs/security.md, poisoning).
    """
    grid, plan = asked(begin, tmp_path)[:2] if method == "pfl-vqa" else begin(method)
    name = grid.nodes[66].config["site"]
    grid.nodes[66].spoil = spoiled(change)
    assert serve(grid, replace(plan, quorum=2))["without_hand_out"] == []
    told = lines(capsys, "no reply of site")
    assert len(told) == 2 and all(f"no reply of site {name} counts: " in line for line in told)
    assert "counts: beside that of site " in told[0] and f"its reply has another form: {sentence}" in told[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda array: array[:, :-1], "; it must be (1, 9)"),
        (lambda array: array[None], " is not float16 with two axes (maps, tokens)"),
        (lambda array: array.astype(np.float32), " is not float16 with two axes (maps, tokens)"),
        (lambda array: np.repeat(array[:1], 6, axis=0), " has shape (6, 9); it must be (1, 9)"),
        (lambda array: array * np.float16(2), "every map must lie from 0 to 1 and reach 0.2"),
        (lambda array: -array, "every map must lie from 0 to 1 and reach 0.2"),
    ],
)
def test_what_is_no_map_is_refused_even_where_no_other_reply_is_there(change, sentence, begin, capsys) -> None:
    """36 px in patches of 12: a map has nine. Of a class the mean of five travels.

    The rule is the coordinator's (docs/security.md, payloads).
    """
    grid, plan = begin(quorum=1, **{"wait-seconds": 0})
    grid.nodes[97].online = grid.nodes[35].online = False
    grid.nodes[66].spoil = spoiled(each(change))
    with pytest.raises(RunError, match="exchange 1 has 0 replies, but the quorum is 1"):
        serve(grid, plan)
    [told] = lines(capsys, "no reply of site site-2 counts")
    assert "counts: of its reply maps." in told and told.endswith(sentence)


def test_replies_that_do_not_fit_one_another_make_no_round(begin) -> None:
    """Of two nobody can say which is wrong: both are named."""
    grid, plan = begin("fedproto", rounds=1, quorum=2)
    grid.nodes[66].online = False
    grid.nodes[97].spoil = spoiled(lambda one: first_with(one, lambda array: array[:-1]))
    with pytest.raises(RunError, match="exchange 2 has 0 replies, but the quorum is 2") as told:
        serve(grid, plan)
    for name, other in (("site-1", "site-3"), ("site-3", "site-1")):
        assert f"site {name}: beside that of site {other} its reply has another form" in str(told.value)


def test_nan_is_refused_on_arrival(begin, capsys) -> None:
    """docs/security.md, check 37: no payload holds a number that is not finite."""
    grid, plan = begin("fedavg", rounds=1, quorum=2)

    def poison(asked, reply):
        if asked.metadata.message_type == "train" and phase_of(asked) == "train":
            array = reply.content["reply"]["bytes"]
            found = Payload.from_bytes(array.data)
            name = next(name for name in found.arrays if found.arrays[name].dtype == np.float32)
            value = found.arrays[name].tobytes()
            array.data = array.data.replace(value, b"\x00\x00\xc0\x7f" + value[4:])
        return reply

    grid.nodes[66].spoil = poison
    serve(grid, plan)
    assert any("its reply cannot be used" in line and "NaN" in line for line in lines(capsys, "site-2"))
