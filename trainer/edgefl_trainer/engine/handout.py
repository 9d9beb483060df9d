"""What a live federation hands to its members once the last exchange is aggregated, and how a site reads it.

A method that makes predictors hands out its `final` broadcast, from which each site makes its model. A method that
learns an encoder together hands out that encoder alone: its projection or decoder has done its work, and a site has no
server state to take the encoder from. Where sites learned apart there is nothing to hand out.
Source: docs/design.md 4; docs/decisions/0030.
"""

from collections.abc import Mapping, Sequence

from edgefl_protocol import Payload
from edgefl_trainer.contract import Arrays, Method, Phase, State, Task, declared
from edgefl_trainer.errors import TrainingError

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
    return method.broadcast(state, final_phase(task), sites)


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
