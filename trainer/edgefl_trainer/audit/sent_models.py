"""The model that a site sent last, before the server averaged it: what a receiver of its reply can attack.

    kept state of the site holds what it sent     where a round, played again, leaves in the state what its reply holds
                                                  and no phase after the last round changes it
    model = predictor(site, kept, broadcast with what was sent in place of the averaged)
    refused where a tensor of it stayed at the site, or is another one than was sent                  sent_model

A predictor falls back to a beginning, or to what its site fitted at home, where it finds nothing better; so the tensors
of the model are compared with those that were sent. Source: docs/design.md 4, what each half returns.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from edgefl_protocol import Payload
from edgefl_protocol.rules.travels import kind_of
from edgefl_protocol.sentences import listed
from edgefl_trainer.audit.audited import Audited
from edgefl_trainer.contract import Arrays, Method, Phase, Predictor, Site, State
from edgefl_trainer.errors import MethodError
from edgefl_trainer.method_halves import call_broadcast, call_local_round, call_predictor, stamped

CARRIERS: Final = ("weights", "prompts")
NETWORK: Final = "network."  # begins the names of a network's tensors in a payload


def sent_models(audited: Audited) -> tuple[dict[str, Predictor], dict[str, str]]:
    """Make the models that the sites sent last; and for the other sites say in a clause why there is none."""
    models, refused = {}, {}
    for name, site in audited.sites.items():
        try:
            found = sent_model(audited.method, audited.server, site, audited.states[name])
        except MethodError as error:
            found = f"the model that {name} sent cannot be made ({str(error).rstrip('.')})"
        if isinstance(found, str):
            refused[name] = found
        else:
            models[name] = found
    return models, refused


def sent_model(method: Method, server: State, site: Site, state: State) -> Predictor | str:
    """Make the model that a site sent last; where what is kept does not hold exactly that model, a clause why not.

    What it reads beside weights and prompts, such as moments of features, is the server's.

    Args:
        state: what the site kept after the run.

    Raises:
        MethodError: a half of the method fails.
    """
    rounds = site.task.rounds
    if any(phase.kind == "final" for phase in method.phases(rounds)):
        return f"{site.name} went on after the last round that it answered, and what it sent was not kept"
    last = Phase("train", rounds)
    received = stamped(call_broadcast(method, server, last, [site.name])[site.name], last, rounds)
    quick = replace(site, task=replace(site.task, epochs=1))  # names and places of what is sent are those of any epoch
    after, reply = call_local_round(method, quick, state, received)
    sent = {name: value for name, value in reply.arrays.items() if kind_of(name) in CARRIERS}
    held = [name for name, value in sent.items() if name in state.arrays and _same(after.arrays.get(name), value)]
    kept = {name: state.arrays[name] for name in held}
    model = call_predictor(method, site, state, Payload({**received.arrays, **kept}, received.scalars))
    if model is None:
        return f"{site.name} sends no model that answers"
    return _why_not(site.name, tensors_of(model), sent, kept, received.arrays, state.arrays) or model


def tensors_of(model: Predictor) -> Arrays:
    """Give the tensors of a model by the names under which they travel."""
    return {**model.tensors, **{f"{NETWORK}{name}": value for name, value in model.network.items()}}


def _why_not(
    site: str, read: Arrays, sent: Arrays, kept: Mapping[str, Any], received: Arrays, state: Arrays
) -> str | None:
    """Say why a model is not the one that was sent; None where it is."""
    private = [name for name in read if name in state and name not in sent and name not in received]
    lost = [name for name in read if name in sent and name not in kept]
    other = [name for name in read if name in kept and not _same(read[name], kept[name])]
    if private:
        return f"the model of {site} answers with {_some(private)}, which never left the site"
    if lost or other:
        return f"the model of {site} answers with {_some(lost or other)}, which is not what the site sent last"
    if not any(name in kept for name in read):
        return f"the model of {site} reads nothing that the site sent"
    return None


def _same(one: Any, other: Any) -> bool:
    return one is not None and np.array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def _some(names: list[str]) -> str:
    return listed(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
