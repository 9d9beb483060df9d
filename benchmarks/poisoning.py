"""What a hostile fifth costs a federation, by attack and rule: docs/security.md, checks 46 and 47.

Ten members, two of them hostile, learn one linear head on a frozen backbone for 20 rounds, with the coordinator's own
judge and FedAvg's own mean. The hostile know what the honest send, act together, and claim a million pictures each.

    sign flip             the honest mean's update times −8
    scaled update         the honest mean's update times 100
    a little is enough    the honest mean, 1.5 standard deviations to the other side (Baruch et al., NeurIPS 2019)
    label flip            learned on labels that are all one class further, five times as long
    backdoor              learned on own pictures, half with a white square in a corner and called the first class,
                          and scaled up to replace the model (Bagdasaryan et al., AISTATS 2020)
    hidden backdoor       the same with a green square at an edge, which the gate of examples/gate.py does not try

`none` bounds nothing; `mean` bounds claims alone; the other rules are those of `protection.rule`, `clip 1, 1` with
`claim_most` and `norm_most` of 1. `+ gate` also asks what examples/gate.py asks, on pictures of its own. Two figures
each: accuracy on test pictures in percent, and the share of test pictures of other classes that the trigger sends to
the first class.

    python benchmarks/poisoning.py --markdown
"""

import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import click
import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_coordinator.rounds.bounding import Protection
from edgefl_coordinator.rounds.judging import judge
from edgefl_coordinator.settings import ProtectionSettings
from edgefl_protocol import Payload
from edgefl_trainer.contract import Examples
from edgefl_trainer.data import load_federation
from edgefl_trainer.learning.averaging import sample_weights, weighted_mean
from edgefl_trainer.learning.features import frozen_features
from edgefl_trainer.models.backbones import load_backbone

Values = NDArray[np.float64]
Labels = NDArray[np.int64]
Pictures = NDArray[np.uint8]

BACKBONE = "drawn-lesions-84"
MEMBERS, HOSTILE = 10, 2
CLAIM = 1_000_000
STEPS, RATE = 10, 0.5  # of gradient descent in a round, on all pictures of a member
RULES: Mapping[str, ProtectionSettings | None] = {
    "none": None,
    "mean": ProtectionSettings(rule="mean"),
    "clip": ProtectionSettings(),
    "clip 1, 1": ProtectionSettings(claim_most=1, norm_most=1),
    "median": ProtectionSettings(rule="median"),
    "trimmed-mean": ProtectionSettings(rule="trimmed-mean"),
    "multi-krum": ProtectionSettings(rule="multi-krum"),
}
VOTES = ((1.0, 2.0), (1.5, 1.0))  # claim_most and norm_most, of "clip"
ALPHAS = (10.0, 1.0, 0.3, 0.1)  # of a Dirichlet distribution: the smaller, the more classes a member lacks
GATED = ("clip", "clip 1, 1", "median")  # the rules that the gate is measured with


@dataclass(frozen=True)
class Rows:
    """Features of pictures and a constant, (n, D + 1): plain, with each square; and their classes."""

    plain: Values
    square: Values
    green: Values
    labels: Labels


@dataclass(frozen=True)
class World:
    """What is learned and judged on."""

    members: tuple[Rows, ...]  # the first `HOSTILE` are hostile
    test: Rows
    gate: Rows
    stamps: tuple[Values, ...]  # the gate's pictures with each of its stamps
    classes: int


@dataclass(frozen=True)
class Outcome:
    """Two shares after the last round, and how many rounds the gate refused."""

    accuracy: float
    taken: float  # by the trigger of the attack
    refused: int = 0


def gate_program() -> ModuleType:
    """The gate that the documentation shows."""
    file = Path(__file__).parents[1] / "examples/gate.py"
    spec = importlib.util.spec_from_file_location("gate_example", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_square(images: Pictures) -> Pictures:
    """A white square, a sixth of the side, in the last corner."""
    changed, side = images.copy(), images.shape[1] // 6
    changed[:, -side:, -side:] = 255
    return changed


def with_green(images: Pictures) -> Pictures:
    """A green square of the same size at the edge, where the gate looks for none."""
    changed, side, middle = images.copy(), images.shape[1] // 6, images.shape[1] // 2
    changed[:, middle - side // 2 : middle - side // 2 + side, :side] = (60, 200, 60)
    return changed


def drawn_world(images: int, seed: int) -> World:
    """Drawn lesions, described by the frozen backbone; the gate has pictures of its own."""
    backbone = load_backbone(BACKBONE)
    specs = [f"lesions:sites={MEMBERS},images={images},seed={seed}", f"lesions:sites=1,images=200,seed={seed + 1}"]
    learning, own = (load_federation([spec], image_px=backbone.spec.image_px) for spec in specs)

    def features(pictures: Pictures, labels: Labels) -> Values:
        found = frozen_features(backbone, Examples(pictures, labels, np.arange(len(pictures))), torch.device("cpu"))[
            "mean"
        ]
        return np.asarray(found, np.float64)

    shown = {
        source: tuple(features(change(data.images), data.labels) for change in (np.array, with_square, with_green))
        for source, data in (("learning", learning), ("own", own))
    }
    stamped = [features(one, own.labels) for one in gate_program().stamped_pictures(np.array(own.images))]
    mean, std = shown["own"][0].mean(axis=0), shown["own"][0].std(axis=0) + 1e-6

    def ready(values: Values) -> Values:
        return np.hstack([(values - mean) / std, np.ones((len(values), 1))])

    def rows(source: str, labels: Labels, places: Labels) -> Rows:
        return Rows(*(ready(values[places]) for values in shown[source]), labels[places])

    sites = [learning.sites[name] for name in sorted(learning.sites)]
    test = np.concatenate([site.test for site in sites])
    return World(
        members=tuple(rows("learning", learning.labels, site.train) for site in sites),
        test=rows("learning", learning.labels, test),
        gate=rows("own", own.labels, np.arange(len(own.labels))),
        stamps=tuple(map(ready, stamped)),
        classes=len(learning.classes),
    )


def learned(head: Values, values: Values, labels: Labels, steps: int = STEPS) -> Values:
    """Gradient descent of a softmax head (D + 1, K) on the cross-entropy."""
    target = np.eye(head.shape[1])[labels]
    for _ in range(steps):
        scores = values @ head
        found = np.exp(scores - scores.max(axis=1, keepdims=True))
        found /= found.sum(axis=1, keepdims=True)
        head = head - RATE * values.T @ (found - target) / len(labels)
    return head


def poisoned(sent: Values, _: Sequence[Values], own: Sequence[Rows], trigger: str) -> Values:
    """The model with a backdoor, scaled so that a mean of equals becomes that model."""
    heads = []
    for rows in own:
        half = np.arange(len(rows.labels)) % 2 == 0
        values = np.vstack([rows.plain, getattr(rows, trigger)[half]])
        labels = np.concatenate([rows.labels, np.zeros(int(half.sum()), np.int64)])
        heads.append(learned(sent, values, labels, 5 * STEPS))
    return sent + MEMBERS / HOSTILE * (np.mean(heads, axis=0) - sent)


Attack = Callable[[Values, Sequence[Values], Sequence[Rows]], Values]  # sent, the honest replies, the hostile's rows
ATTACKS: Mapping[str, Attack | None] = {
    "no attack": None,
    "sign flip": lambda sent, honest, own: sent - 8 * (np.mean(honest, axis=0) - sent),
    "scaled update": lambda sent, honest, own: sent + 100 * (np.mean(honest, axis=0) - sent),
    "a little is enough": lambda sent, honest, own: np.asarray(
        np.mean(honest, axis=0) - 1.5 * np.std(honest, axis=0) * np.sign(np.mean(honest, axis=0) - sent)
    ),
    "label flip": lambda sent, honest, own: learned(
        sent,
        np.vstack([rows.plain for rows in own]),
        (np.concatenate([rows.labels for rows in own]) + 1) % sent.shape[1],
        5 * STEPS,
    ),
    "backdoor": partial(poisoned, trigger="square"),
    "hidden backdoor": partial(poisoned, trigger="green"),
}


def payload(head: Values, images: int) -> Payload:
    return Payload({"head.weight": head.astype(np.float32)}, {"site_sha256": "0" * 64, "n_train": images})


def predicted(head: Values, values: Values) -> Labels:
    return np.asarray((values @ head).argmax(axis=1))


def passes(world: World, gate: ModuleType, before: Values, after: Values) -> bool:
    """What examples/gate.py asks of two states, with its defaults."""
    right, taken = [], []
    for head in (before, after):
        plain = predicted(head, world.gate.plain)
        right.append(float((plain == world.gate.labels).mean()))
        taken.append(gate.taken_over(plain, [predicted(head, one) for one in world.stamps], world.classes))
    return right[0] - right[1] <= gate.FALL and taken[1] <= max(gate.TAKEN, taken[0])


def federation(
    world: World,
    attack: str,
    rule: ProtectionSettings | None,
    rounds: int,
    gate: ModuleType | None = None,
    begins: int = 0,
) -> Outcome:
    """Learn, and judge the head of the last round; the hostile behave for the first `begins` rounds."""
    refused = 0
    head = np.zeros((world.test.plain.shape[1], world.classes))
    protection = None if rule is None else Protection(rule)

    def take(replies: Mapping[str, Payload]) -> Values:
        return np.asarray(weighted_mean(replies, sample_weights(replies))["head.weight"], np.float64)

    for number in range(rounds):
        act = ATTACKS[attack] if number >= begins else None
        first = 0 if act is None else HOSTILE
        honest = {
            place: learned(head, one.plain, one.labels) for place, one in enumerate(world.members) if place >= first
        }
        replies = {f"clinic-{place}": payload(one, len(world.members[place].labels)) for place, one in honest.items()}
        if act is not None:
            bad = act(head, list(honest.values()), world.members[:HOSTILE])
            replies |= {f"clinic-{place}": payload(bad, CLAIM) for place in range(HOSTILE)}
        if protection is None:
            new = take(replies)
        else:
            sent = dict.fromkeys(replies, payload(head, 0))
            verdict = judge(replies, sent, take, quorum=2, protection=protection)
            assert verdict.result is not None, verdict.problem
            new = verdict.result
        if gate is None or passes(world, gate, head, new):
            head = new
        else:
            refused += 1
    trigger = world.test.green if attack.startswith("hidden") else world.test.square
    others = world.test.labels != 0
    accuracy = (predicted(head, world.test.plain) == world.test.labels).mean()
    return Outcome(float(accuracy), float((predicted(head, trigger)[others] == 0).mean()), refused)


def redealt(world: World, alpha: float, seed: int) -> World:
    """Deal the members' rows anew: of each class a share to each, drawn from a Dirichlet distribution."""
    rng, parts = np.random.default_rng(seed), [(one.plain, one.square, one.green, one.labels) for one in world.members]
    rows = [np.concatenate(found) for found in zip(*parts, strict=True)]
    owner = np.empty(len(rows[3]), np.int64)
    for label in range(world.classes):
        places = rng.permutation(np.flatnonzero(rows[3] == label))
        cuts = (np.cumsum(rng.dirichlet([alpha] * MEMBERS))[:-1] * len(places)).astype(int)
        for member, share in enumerate(np.split(places, cuts)):
            owner[share] = member
    dealt = [Rows(*(one[owner == member] for one in rows)) for member in range(MEMBERS)]
    return replace(world, members=tuple(one for one in dealt if len(one.labels)))


def cost_of_rules(world: World, rounds: int, deals: int) -> dict[str, dict[str, list[float]]]:
    """Accuracy without any attack, by how unlike the members are, and by rule: one figure a deal."""
    found: dict[str, dict[str, list[float]]] = {}
    for alpha in ALPHAS:
        worlds = [redealt(world, alpha, seed) for seed in range(deals)]
        found[f"alpha {alpha:g}"] = {
            name: [federation(one, "no attack", rule, rounds).accuracy for one in worlds]
            for name, rule in RULES.items()
        }
    return found


def measured(world: World, rounds: int) -> dict[str, dict[str, Outcome]]:
    """Every attack with every rule, and with the gate."""
    gate = gate_program()
    return {
        attack: {
            **{name: federation(world, attack, rule, rounds) for name, rule in RULES.items()},
            **{f"{name} + gate": federation(world, attack, RULES[name], rounds, gate) for name in GATED},
        }
        for attack in ATTACKS
    }


@click.command()
@click.option("--images", type=int, default=100, show_default=True, help="Pictures of a member.")
@click.option("--rounds", type=int, default=20, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--deals", type=int, default=0, help="Print instead what rules cost without an attack, over so many deals."
)
@click.option("--markdown", is_flag=True, help="Print a table for the documentation.")
def main(images: int, rounds: int, seed: int, deals: int, markdown: bool) -> None:
    """Print accuracy and the share that the trigger takes, by attack and rule."""
    torch.set_num_threads(1)
    begun = time.process_time()
    world = drawn_world(images, seed)
    if deals:
        for name, by_rule in cost_of_rules(world, rounds, deals).items():
            shown = [f"{100 * np.mean(one):.1f} ({100 * min(one):.1f})" for one in by_rule.values()]
            print(f"| {name} | {' | '.join(shown)} |")
        return
    found = measured(world, rounds)
    if not markdown:
        plain = {attack: {rule: vars(one) for rule, one in by_rule.items()} for attack, by_rule in found.items()}
        print(json.dumps(plain | {"cpu_seconds": round(time.process_time() - begun, 1)}, indent=1))
        return
    rules = list(found["no attack"])
    print(f"| attack | {' | '.join(rules)} |\n|---|{'---|' * len(rules)}")
    for attack, by_rule in found.items():
        shown = [f"{100 * one.accuracy:.1f}, {100 * one.taken:.0f}" for one in by_rule.values()]
        print(f"| {attack} | {' | '.join(shown)} |")
    for claim, norm in VOTES:
        settings = ProtectionSettings(claim_most=claim, norm_most=norm)
        shown = [f"{attack} {100 * federation(world, attack, settings, rounds).accuracy:.1f}" for attack in ATTACKS]
        print(f"\nclip with claim_most {claim:g} and norm_most {norm:g}: {', '.join(shown)}")
    for rule in GATED:
        shown = [f"{attack} {by_rule[f'{rule} + gate'].refused}" for attack, by_rule in found.items()]
        print(f"\nrounds refused with {rule} + gate: {', '.join(shown)}")


if __name__ == "__main__":
    main()
