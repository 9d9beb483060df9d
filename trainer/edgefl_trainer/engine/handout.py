"""What a live federation hands to its members once the last exchange is aggregated, and what it drops with a member.

A method that makes predictors hands out its `final` broadcast, from which each site makes its model. A method that
learns an encoder together hands out that encoder alone: its projection or decoder has done its work, and a site has no
server state to take the encoder from. Where sites learned apart there is nothing to hand out.

What was averaged cannot be taken back from a member that was shut out. What a method keeps site by site (maps,
features, outputs, prompts) can; which entries of the state those are the method declares.
Source: docs/design.md 4; docs/security.md 4; docs/decisions/0030.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from edgefl_protocol import Payload
from edgefl_trainer.contract import Arrays, Method, Phase, State, Task, declared
from edgefl_trainer.errors import TrainingError
from edgefl_trainer.method_halves import call_broadcast

Entry = TypeVar("Entry")

ENCODER_PREFIX = "backbone."  # begins the names of the encoder's tensors


def final_phase(task: Task) -> Phase:
    """Return the phase of what is handed out at the end."""
    return Phase("final", task.rounds + 1)


def handed_out(method: Method, task: Task, state: State, sites: Sequence[str]) -> Mapping[str, Payload]:
    """Make what each of `sites` receives after the last exchange."""
    learns = declared(method)
    if learns.encoder and not learns.apart:
        encoder = {ENCODER_PREFIX + name: value for name, value in learns.encoder(state).items()}
        return dict.fromkeys(sites, Payload(encoder, {}))
    return call_broadcast(method, state, final_phase(task), sites)


def received_encoder(broadcast: Payload) -> Arrays:
    """Read the encoder from a federation's last hand-out, by timm's names; a `TrainingError` where it holds none."""
    encoder = {
        name.removeprefix(ENCODER_PREFIX): value
        for name, value in broadcast.arrays.items()
        if name.startswith(ENCODER_PREFIX)
    }
    if not encoder:
        raise TrainingError(
            "the federation ended without handing out its network: ask the operator to update edgefl-derm."
        )
    return encoder


def without_sites(method: Method, state: State, gone: Collection[str]) -> State:
    """Drop the entries of a server's state that came from sites of these names alone."""
    site_of = declared(method).site_of
    if site_of is None or not gone:
        return state

    def kept(entries: Mapping[str, Entry]) -> dict[str, Entry]:
        return {name: value for name, value in entries.items() if site_of(name) not in gone}

    return State(kept(state.arrays), kept(state.values))
