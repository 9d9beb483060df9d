"""What a run's noise has cost its sites, and what that promises: two keys of `summary.json`, and lines for a person.

    epsilon_spent    of each site; null where the noise is no guarantee
    privacy_noise    `NoiseTerms`, with `without_noise`, the kinds that left without, `seeded`, and `ledger`: whether
                     each release is in the site's ledger, or those alone count that were not taken back

Guarantees: no epsilon is told without what it covers and for whom, nor one that bounds nothing; nor one that the site's
ledger contradicts. Source: docs/methods.md 2.2 and 6; docs/design.md 5.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgefl_protocol.sentences import capital, joined_by_and
from edgefl_trainer.contract import Method, State, declared
from edgefl_trainer.engine.privacy.ledger import PrivacyLedger, counted_by
from edgefl_trainer.gaussian_noise import PROTECTED, told_epsilon


def privacy_cost(folder: Path, method: Method, states: Mapping[str, State], *, seeded: bool) -> dict[str, Any]:
    """Write the two keys; none where a method adds no noise. Raises as `PrivacyLedger.check`.

    Args:
        states: of the sites at the end.
        seeded: the noise came from the seed of the run, as in every simulation.
    """
    found = declared(method)
    terms = found.noise(method) if found.noise else None
    if terms is None:
        return {}
    spent = {name: counted_by(state) for name, state in sorted(states.items())}
    if found.release:
        ledgers = {name: PrivacyLedger(folder, name) for name in spent}
        spent = {name: ledgers[name].check(own, terms.delta, fresh=not seeded) for name, own in spent.items()}
    told = {name: epsilon for name, epsilon in spent.items() if epsilon}
    facts = {
        **asdict(terms),
        "without_noise": terms.without(method.travels),
        "seeded": seeded,
        "ledger": found.release is not None,
    }
    return {"epsilon_spent": None if terms.no_guarantee else told, "privacy_noise": facts}


def privacy_lines(summary: Mapping[str, Any]) -> list[str]:
    """Say what the noise has cost and what that covers; nothing where a run had none."""
    facts, spent = summary.get("privacy_noise"), summary.get("epsilon_spent")
    most = f"epsilon {told_epsilon(max(spent.values()))}" if spent else "epsilon 0"
    if facts is not None and not facts["seeded"] and not facts["ledger"]:
        most = f"at least {most}, counted of the replies that came in time,"
    if facts is None:
        unknown = "of a run that does not tell what this covers or whether it is a bound: docs/methods.md 2.2 and 6"
        older = f"privacy noise: {most} in all, {unknown}"
        return [older] if spent else []
    if facts["no_guarantee"]:
        first = f"privacy noise: no guarantee, so no epsilon is told: {facts['no_guarantee']}"
    else:
        first = (
            f"privacy noise: {most} at delta {facts['delta']:g} in all, at the site that sent most often, {PROTECTED}, "
            f"given {facts['given']}"
        )
    second = f"the noise is on {facts['on']} only"
    if facts["without_noise"]:
        second += f"; {joined_by_and(facts['without_noise'])} left the sites without noise"
    if facts["seeded"]:
        second += ". It came from the seed, which stands in config.toml: it protects from nobody who knows that"
    return [first, capital(second)]
