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
`claim_most` and `norm_most` of 1. `+ gate` also asks what examples/gate.py asks, on pictures of its own, with a limit 5
points above what rounds without an attack showed it. Figures over several draws: the mean accuracy on test pictures in
percent, its largest fall below no attack, and the largest share of test pictures of other classes that the trigger
sends to the first class.

    python -m benchmarks.coordinator.poisoning
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import click
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.processes import ROOT
from edgefl_coordinator.rounds.judging import judge
from edgefl_coordinator.rounds.protection.bounding import Protection
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
    "mixed-mean": ProtectionSettings(rule="mixed-mean"),
    "multi-krum": ProtectionSettings(rule="multi-krum"),
}
VOTES = ((1.0, 2.0), (1.5, 1.0))  # claim_most and norm_most, of "clip"
ALIKE = 1e6  # of the same: every member has the same share of each class, and of each camera
ALPHAS = (10.0, 1.0, 0.3, 0.1)  # of a Dirichlet distribution: the smaller, the more classes a member lacks
MARGIN = 0.05  # of the gate's limit above what it saw in rounds without an attack
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
    stamped: float = 0.0  # the most that a stamp of the gate's took after a round that counts


def gate_program() -> ModuleType:
    """The gate that the documentation shows."""
    file = ROOT / "examples/gate.py"
    spec = importlib.util.spec_from_file_location("gate_example", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GATE = gate_program()


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
    stamped = [features(one, own.labels) for one in GATE.stamped_pictures(np.array(own.images))]
    mean, std = shown["own"][0].mean(axis=0), shown["own"][0].std(axis=0) + 1e-6

    def ready(values: Values) -> Values:
        return np.hstack([(values - mean) / std, np.ones((len(values), 1))])

    def rows(source: str, labels: Labels, places: Labels) -> Rows:
        plain, square, green = (ready(values[places]) for values in shown[source])
        return Rows(plain, square, green, labels[places])

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
    mean: Values = np.mean(heads, axis=0)
    return sent + MEMBERS / HOSTILE * (mean - sent)


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


def stamped_by(world: World, head: Values) -> float:
    """What examples/gate.py measures of stamps."""
    plain, sent_to = predicted(head, world.gate.plain), [predicted(head, one) for one in world.stamps]
    return float(GATE.taken_over(plain, sent_to, world.classes))


def passes(world: World, before: Values, after: Values, taken: float) -> bool:
    """What examples/gate.py asks of two states, with `--taken`."""
    right = [float((predicted(head, world.gate.plain) == world.gate.labels).mean()) for head in (before, after)]
    return right[0] - right[1] <= GATE.FALL and stamped_by(world, after) <= max(taken, stamped_by(world, before))


def federation(
    world: World,
    attack: str,
    rule: ProtectionSettings | None,
    rounds: int,
    taken: float | None = None,
    begins: int = 0,
) -> Outcome:
    """Learn, and judge the head of the last round; the hostile behave for the first `begins` rounds.

    With `taken` the gate is asked, with that limit.
    """
    refused, most = 0, 0.0
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
        if taken is None or passes(world, head, new, taken):
            head, most = new, max(most, stamped_by(world, new))
        else:
            refused += 1
    trigger = world.test.green if attack.startswith("hidden") else world.test.square
    others = world.test.labels != 0
    accuracy = (predicted(head, world.test.plain) == world.test.labels).mean()
    return Outcome(float(accuracy), float((predicted(head, trigger)[others] == 0).mean()), refused, most)


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


def measured(
    world: World, rounds: int, names: Sequence[str] = tuple(RULES), gated: Sequence[str] = GATED
) -> dict[str, dict[str, Outcome]]:
    """Every attack with each of these rules, and with the gate.

    Args:
        names: of the rules without the gate.
        gated: of the rules with it.
    """
    limits = {
        name: max(GATE.TAKEN, federation(world, "no attack", RULES[name], rounds).stamped + MARGIN) for name in gated
    }
    return {
        attack: {
            **{name: federation(world, attack, RULES[name], rounds) for name in names},
            **{f"{name} + gate": federation(world, attack, RULES[name], rounds, limits[name]) for name in gated},
        }
        for attack in ATTACKS
    }


def table(found: Sequence[dict[str, dict[str, Outcome]]], names: Sequence[str]) -> Iterator[str]:
    """Means, with the largest fall of the accuracy and the most that the trigger took, over the draws."""
    yield f"| attack | {' | '.join(names)} |\n|---|{'---|' * len(names)}"
    for attack in ATTACKS:
        cells = []
        for name in names:
            ends = [one[attack][name] for one in found]
            fall = max(one["no attack"][name].accuracy - end.accuracy for one, end in zip(found, ends, strict=True))
            right, most = np.mean([end.accuracy for end in ends]), max(end.taken for end in ends)
            cells.append(f"{100 * right:.1f} (−{max(0.0, 100 * fall):.1f}), {100 * most:.0f}")
        yield f"| {attack} | {' | '.join(cells)} |"


@click.command()
@click.option("--images", type=int, default=100, show_default=True, help="Pictures of a member.")
@click.option("--rounds", type=int, default=20, show_default=True)
@click.option("--seed", "seeds", type=int, multiple=True, default=(0, 10, 20), show_default=True, help="Repeatable.")
@click.option("--deals", type=int, default=0, help="Print instead what rules cost without an attack, over so many.")
@click.option("--mixed", is_flag=True, help="Deal the members' pictures at random, so that they are alike.")
def main(images: int, rounds: int, seeds: tuple[int, ...], deals: int, mixed: bool) -> None:
    """Print accuracy and the share that the trigger takes, by attack and rule."""
    torch.set_num_threads(1)
    worlds = [drawn_world(images, seed) for seed in seeds]
    if deals:
        for name, by_rule in cost_of_rules(worlds[0], rounds, deals).items():
            cells = [f"{100 * np.mean(one):.1f} ({100 * min(one):.1f})" for one in by_rule.values()]
            print(f"| {name} | {' | '.join(cells)} |")
        return
    worlds = [redealt(world, ALIKE, 0) for world in worlds] if mixed else worlds
    found = [measured(world, rounds) for world in worlds]
    print(*table(found, list(RULES)), "", *table(found, [f"{name} + gate" for name in GATED]), sep="\n")
    for name in GATED:
        refused = [f"{attack} {sum(one[attack][f'{name} + gate'].refused for one in found)}" for attack in ATTACKS]
        print(f"\nrounds refused with {name} + gate, of {rounds * len(seeds)}: {', '.join(refused)}")
    for claim, norm in VOTES:
        rule = ProtectionSettings(claim_most=claim, norm_most=norm)
        right = [federation(world, "sign flip", rule, rounds).accuracy for world in worlds]
        print(f"\nsign flip, clip with claim_most {claim:g} and norm_most {norm:g}: {100 * np.mean(right):.1f}")


if __name__ == "__main__":
    main()
