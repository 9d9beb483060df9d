"""A half that breaks its contract is named, with method and site, in one sentence. Source: docs/design.md 4."""

from dataclasses import make_dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, State
from edgefl_trainer.engine.local_engine import InProcessSite
from edgefl_trainer.errors import MethodError, SettingError, TrainingError
from edgefl_trainer.method_halves import (
    call_aggregate,
    call_broadcast,
    call_local_round,
    call_predictor,
    call_start,
    check_travels,
)
from edgefl_trainer.methods.fedavg import FedAvg

HEAD = Payload({"head.weight": np.zeros(2, np.float32)}, {"n_train": 3})
PHASE = Phase("train", 1)
SITE = SimpleNamespace(name="site-1")


def a_method(travels=("weights",), **halves):
    """A method of which one half is wrong."""
    return type("Mine", (), {"travels": travels, **{name: staticmethod(half) for name, half in halves.items()}})()


def fails(error):
    def half(*_):
        raise error

    return half


def test_a_state_that_is_empty_is_told():
    """A `predictor` that does not begin where the state is empty ended `run` in `KeyError: 'readout'`."""
    method = a_method(predictor=lambda site, state, broadcast: state.values["readout"])
    with pytest.raises(MethodError) as caught:
        call_predictor(method, SITE, State(), HEAD)
    said = str(caught.value)
    assert said.startswith("predictor of Mine failed for site-1, whose state is empty: KeyError 'readout' (test_halves")
    assert "docs/design.md 4" in said
    with pytest.raises(MethodError, match="failed for site-1: KeyError 'readout'"):
        call_predictor(method, SITE, State({"a": np.zeros(1)}), HEAD)
    with pytest.raises(MethodError, match="predictor of Mine returned dict, and not a Predictor or None"):
        call_predictor(a_method(predictor=lambda *_: {}), SITE, State(), HEAD)
    assert call_predictor(a_method(predictor=lambda *_: None), SITE, State(), HEAD) is None


@pytest.mark.parametrize(
    ("found", "kinds"), [(HEAD, "Payload"), ((HEAD, State()), "Payload and State"), (None, "NoneType")]
)
def test_what_local_round_returns_is_checked(found, kinds):
    with pytest.raises(MethodError, match=f"local_round of Mine returned {kinds} for site-1, and not the site's new"):
        call_local_round(a_method(local_round=lambda *_: found), SITE, State(), HEAD)


def test_a_reply_without_a_count_is_named():
    """FedAvg weighs by `n_train`, docs/methods.md 4; a reply without it names neither site nor method otherwise."""
    replies = {"site-1": HEAD, "site-2": Payload(HEAD.arrays, {})}
    method = FedAvg()
    with pytest.raises(TrainingError, match=r"aggregate of fedavg: the reply of site-2 says n_train = None"):
        call_aggregate(method, State(HEAD.arrays), PHASE, replies)
    own = a_method(aggregate=lambda state, phase, found: [one.scalars["n_train"] for one in found.values()])
    with pytest.raises(MethodError) as caught:
        call_aggregate(own, State(), PHASE, replies)
    assert "KeyError 'n_train', which the reply of site-2 does not hold" in str(caught.value)
    with pytest.raises(MethodError, match="aggregate of Mine returned Payload"):
        call_aggregate(a_method(aggregate=lambda *_: HEAD), State(), PHASE, replies)


def test_a_broadcast_lacks_nobody():
    with pytest.raises(MethodError, match="broadcast of Mine failed in the train phase 1: KeyError 'site-2'"):
        call_broadcast(a_method(broadcast=lambda *_: {"site-1": HEAD}), State(), PHASE, ["site-1", "site-2"])


def test_what_leaves_is_what_is_declared():
    """`travels` is what `run`, `init` and a device's owner are told: others are refused."""
    with pytest.raises(SettingError, match="Mine declares travels wieghts; known kinds are maps, features, "):
        check_travels(a_method(("wieghts",)))
    check_travels(FedAvg())
    wrong = a_method(("maps",), local_round=lambda *_: (State(), HEAD))
    said = "the reply of site-1 holds head.weight, which is of the kind weights, and Mine declares travels maps"
    with pytest.raises(MethodError, match=said):
        call_local_round(wrong, SITE, State(), HEAD)
    with pytest.raises(MethodError, match=r"do not send it from local_round \(test_halves\.py, line \d+\)\.$"):
        call_local_round(wrong, SITE, State(), HEAD)
    site = make_dataclass("Named", [("name", str), ("report", object)])("site-1", None)
    with pytest.raises(MethodError, match=said):  # of the local engine and of a live federation: before it leaves
        InProcessSite(wrong, site).local_round(State(), HEAD, print)


def divides(*_):
    return 1 / 0


def shapes_that_differ(*_):
    return torch.zeros(2) @ torch.zeros(3)


def a_name_that_is_none(*_):
    return nowhere  # noqa: F821


@pytest.mark.parametrize(
    ("half", "what"),
    [
        (divides, "ZeroDivisionError division by zero"),
        (shapes_that_differ, "RuntimeError inconsistent tensor size"),
        (a_name_that_is_none, "NameError name 'nowhere' is not defined"),
    ],
)
def test_a_programming_error_is_told_with_half_method_site_file_and_line(half, what):
    """CONTRIBUTING.md: a NameError in `aggregate` ended in a traceback of thirty lines."""
    line = half.__code__.co_firstlineno + 1
    with pytest.raises(MethodError, match=rf"^aggregate of Mine failed in the train phase 1: {what}.*line {line}\); "):
        call_aggregate(a_method(aggregate=half), State(), PHASE, {})
    with pytest.raises(MethodError, match=rf"^local_round of Mine failed for site-1: {what}.*line {line}\); "):
        call_local_round(a_method(local_round=half), SITE, State({"a": np.zeros(1)}), HEAD)
    with pytest.raises(MethodError, match=rf"^start of Mine failed for 2 sites: {what}.*line {line}\); "):
        call_start(a_method(start=half), None, ["a", "b"])


def test_the_line_of_the_method_stands_before_the_one_that_raised():
    """An error inside numpy names the method's own line first, which is where to look."""
    with pytest.raises(MethodError, match=r"\(test_halves\.py, line \d+; raised in \w+\.py, line \d+\); docs"):
        call_predictor(a_method(predictor=lambda *_: np.stack([])), SITE, State(), HEAD)


@pytest.mark.parametrize("error", [TrainingError("no picture"), MemoryError("full"), KeyboardInterrupt()])
def test_what_is_no_mistake_of_the_method_passes(error):
    with pytest.raises(type(error)) as caught:
        call_predictor(a_method(predictor=fails(error)), SITE, State(), HEAD)
    assert caught.value is error
