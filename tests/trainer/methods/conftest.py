"""Small federations in memory: nine tokens, four blocks, a handful of random images whose brightness is the label."""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from edgefl_protocol import Payload
from edgefl_trainer.contract import Examples, Method, Phase, Questions, Site, State, Task, declared
from edgefl_trainer.engine.hyper_parameters import blank
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.backbones import load_backbone

IMAGE_PX = 36
ASKED = "-asked"  # ends the name of a method's form that answers questions about pictures
FORMS: dict[str, Callable[[], Method]] = {
    **METHODS,
    **{
        f"{name}{ASKED}": partial(blank, name, ("vqa-rad:drawn",))
        for name, kind in METHODS.items()
        if declared(kind).asked and not declared(kind).questions_only
    },
}
RESTING = {"random-init"}  # without a phase: nothing is sent, nothing can be stopped
MADE_FOR_MEMBERS = {"pfedpg"}  # the server makes prompts from what it knows of a member

# Runs of many rounds are alike for the engine: `make test` plays those of a few methods, and of every new one.
LATER = {
    "fedavgpers", "fedclf", "feddistill", "fedmoco", "fedpr", "fedproto", "fedprox", "fedrotation", "fedsimclr",
    "fedvpt", "fedvpt-deep", "finetune", "head", "local", "local-cl", "p-pt", "pep-fedpt", "pfedpg", "sgpt",
    "fedavgpers-asked", "fedprox-asked", "local-asked",
}  # fmt: skip
SIBLINGS = {"fedmoco", "local-cl"}  # learn with FedCLF's own loop


def tiers(names: Iterable[str], later: Set[str]) -> list[object]:
    """Parameters in order, those of `later` slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in later else []) for name in sorted(names)]


@pytest.fixture(params=tiers(FORMS, SIBLINGS))
def name(request) -> str:
    return request.param


@pytest.fixture(params=tiers(FORMS.keys() - RESTING, LATER))
def active(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def backbone():
    return load_backbone("tiny", image_px=IMAGE_PX, seed=3)


QUESTIONS = Questions(("how", "bright", "is", "it"), 6)


def questions_of(request: pytest.FixtureRequest) -> Questions | None:
    """What is asked where the method that a test is given learns from nothing else."""
    named = getattr(request.node, "callspec", None)
    names = [value for value in (named.params.values() if named else ()) if value in list(FORMS)]
    return QUESTIONS if any(one.endswith(ASKED) or declared(METHODS[one]).questions_only for one in names) else None


@pytest.fixture(scope="session")
def played() -> dict[tuple[str, str], Any]:
    """What several tests ask of one and the same run is played once, by `test_conformance.py`."""
    return {}


@pytest.fixture
def make_task(backbone, request) -> Callable[..., Task]:
    def make(rounds: int = 1, epochs: int = 1, classes: tuple[str, ...] = ("nevus", "other"), seed: int = 0) -> Task:
        length = {"rounds": rounds, "epochs": epochs, "seed": seed}
        return Task(name="nevus", classes=classes, backbone=backbone.spec, questions=questions_of(request), **length)

    return make


def asked(examples: Examples, seed: int) -> Examples:
    """The same, each asked a question of two to six words."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 2 + len(QUESTIONS.words), (len(examples.labels), QUESTIONS.length))
    tokens[np.arange(QUESTIONS.length) >= rng.integers(2, QUESTIONS.length + 1, len(tokens))[:, None]] = 0
    return replace(examples, tokens=tokens)


def examples(count: int, classes: int, seed: int) -> Examples:
    rng = np.random.default_rng(seed)
    labels = np.arange(count, dtype=np.int64) % classes
    shade = 60 + 120 * labels / max(1, classes - 1)
    images = rng.normal(shade[:, None, None, None], 25, size=(count, IMAGE_PX, IMAGE_PX, 3)).clip(0, 255)
    return Examples(images.astype(np.uint8), labels, np.arange(count, dtype=np.int64))


@pytest.fixture
def make_site(backbone) -> Callable[..., Site]:
    def make(task: Task, name: str = "a", count: int = 12, seed: int = 1, labels: list[int] | None = None) -> Site:
        train = examples(count, len(task.classes), seed)
        if labels is not None:
            train = Examples(train.images, np.array(labels, dtype=np.int64), train.rows)
        tune = examples(8, len(task.classes), seed + 1000)
        if task.questions is not None:
            train, tune = asked(train, seed), asked(tune, seed + 1000)
        return Site(name=name, task=task, backbone=backbone, train=train, tune=tune, unlabelled=train)

    return make


@dataclass(frozen=True)
class Exchange:
    """What crossed between server and sites in one phase."""

    phase: Phase
    broadcasts: Mapping[str, Payload]
    replies: Mapping[str, Payload]


def play(
    method: Method,
    task: Task,
    sites: Mapping[str, Site],
    *,
    absent: Mapping[int, str] | None = None,
    carry: Callable[[Payload], Payload] = lambda payload: payload,
    watch: Callable[[Exchange], object] = lambda exchange: None,
) -> tuple[State, dict[str, State]]:
    """A plain loop over the contract: the reference that the engine is compared with.

    Args:
        method: what is played.
        task: with its number of rounds.
        sites: all members.
        absent: for a train round, the names of those that do not take part in it.
        carry: what the way between sites and server does to a payload.
        watch: is told of every exchange.
    """
    server, states = method.start(task, sorted(sites)), {name: State() for name in sites}
    for phase in method.phases(task.rounds):
        away = (absent or {}).get(phase.round, "") if phase.kind == "train" else ""
        present = [name for name in sites if name not in away]
        made = method.broadcast(server, phase, sorted(present))
        broadcasts = {name: carry(stamped(made[name], phase, task.rounds)) for name in present}
        replies = {}
        for name in present:
            states[name], reply = method.local_round(sites[name], states[name], broadcasts[name])
            replies[name] = carry(reply)
        server = method.aggregate(server, phase, replies)
        watch(Exchange(phase, broadcasts, replies))
    return server, states


def after(task: Task) -> Phase:
    return Phase("final", task.rounds + 1)


def told(method: Method, server: State, task: Task, name: str) -> Payload:
    """What a site is sent after the last round, to score with."""
    return stamped(method.broadcast(server, after(task), [name])[name], after(task), task.rounds)


@pytest.fixture(autouse=True)
def every_test_on_one_thread(one_thread) -> None:
    """Methods are compared bit by bit."""


@pytest.fixture(scope="session")
def convolutional():
    return load_backbone("cnn:test_resnet", image_px=IMAGE_PX, seed=3)


@pytest.fixture
def cnn_task(convolutional) -> Callable[..., Task]:
    def make(rounds: int = 1, seed: int = 0) -> Task:
        return Task(name="pixels", classes=("x", "y"), backbone=convolutional.spec, rounds=rounds, epochs=1, seed=seed)

    return make


def members(task: Task, make_site: Callable[..., Site], **counts: int) -> dict[str, Site]:
    return {name: make_site(task, name, count=count, seed=i) for i, (name, count) in enumerate(counts.items())}
