"""Sites that never train: scored with what the others learned together, and reported apart (docs/methods.md 8.4).

Guarantees: a held-out site takes part in no phase; its images, tune rows included, touch no weight, no temperature and
no threshold. It scores with the method's `predictor` on an empty state and a broadcast as a newcomer would get it; of
its own data only what scoring reads from the training rows enters: the class counts of its prior, and where evidence is
discounted what is usual there (`learning.unusual_features`).
Where the head is learned at home and never sent, a held-out site has no model: its figures are null (NA in the papers).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from edgefl_protocol import Payload, digest
from edgefl_protocol.sentences import listed
from edgefl_trainer.contract import Method, Phase, Predictor, Site, State, Task
from edgefl_trainer.engine.checkpoint import SelectedRound
from edgefl_trainer.evaluate.answer_figures import answer_summary
from edgefl_trainer.evaluate.intervals import Scored
from edgefl_trainer.evaluate.metrics import federation_summary
from edgefl_trainer.evaluate.no_round import trained_sites
from edgefl_trainer.evaluate.one_class import others
from edgefl_trainer.evaluate.site_figures import figures_of_sites
from edgefl_trainer.evaluate.undefined import HEAD_STAYS
from edgefl_trainer.method_halves import call_broadcast, call_predictor, stamped

LEARNED_HEAD = "head.weight"  # what a broadcast must hold for a newcomer to have a learned model


def without_model(method: str, server: State, held_out: Sequence[str]) -> str | None:
    """Say, before anything is learned, which held-out sites the method will have no model for; None where it has one.

    Args:
        server: as `start` makes it: a head that sites learn together stands in it from the beginning.
    """
    if not held_out or LEARNED_HEAD in server.arrays:
        return None
    return (
        f"{listed(held_out)} will have no figures: {HEAD_STAYS}, and {method} sends none to a site that never trains. "
        "With a method whose sites share their head there would be some."
    )


def newcomers(
    method: Method,
    task: Task,
    server: State,
    sites: Mapping[str, Site],
    kept: Mapping[str, SelectedRound] | None = None,
) -> dict[str, Predictor]:
    """Return what each site that never trained would score with; sites without a model are left out.

    `kept` is the round that all trained sites keep, where one was chosen for all. A newcomer gets what that round sent,
    if it was the same to every site; else what the last one would send.
    """
    phase = Phase("final", task.rounds + 1)
    chosen = _sent_to_all(kept or {})
    made = {} if chosen else call_broadcast(method, server, phase, sorted(sites))
    broadcasts = {name: chosen or stamped(made[name], phase, task.rounds) for name in sites if chosen or name in made}
    found = {
        name: call_predictor(method, site, State(), broadcasts[name])
        for name, site in sites.items()
        if name in broadcasts and LEARNED_HEAD in broadcasts[name].arrays
    }
    return {name: predictor for name, predictor in found.items() if predictor is not None}


def _sent_to_all(kept: Mapping[str, SelectedRound]) -> Payload | None:
    """What a chosen round sent to each site; None where that differs from site to site, or none was chosen."""
    sent = {digest(one.broadcast.arrays): one.broadcast for one in kept.values()}
    return next(iter(sent.values())) if len(sent) == 1 else None


def federation_figures(scored: Mapping[str, Scored], facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Compute all figures of some sites' models, and means over trained and over held-out sites."""
    report = figures_of_sites(scored, facts)
    return {**report, **summary_of(report["sites"])}


def summary_of(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Compute means, spread and worst over the trained sites, and under `held_out` the same over the others, if any."""
    trained = {name: found for name, found in figures.items() if not found.get("held_out")}
    apart = {name: found for name, found in figures.items() if found.get("held_out")}
    held_out = {"held_out": {"sites": sorted(apart), **federation_summary(apart)}} if apart else {}
    several = {"several_classes": found} if (found := others(trained)) else {}
    absent = trained_sites({"sites": trained})
    return {**federation_summary(trained), **several, **absent, **held_out, **answer_summary(trained)}
