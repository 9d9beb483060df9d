"""What the change of a head tells: after a round, row k of what a site sends differs by a sum over its pictures.

    d L / d w_k = sum_i (d L / d logit_ik) · f_i, so row k of the change points to the features f of the pictures of
    class k, and after one step of one picture to its own feature                                  head_release

The last layer gives its input away: Phong et al., "Privacy-preserving deep learning via additively homomorphic
encryption" (IEEE TIFS 2018), section III, for one picture; Geiping et al., "Inverting gradients" (arXiv 2003.14053),
proposition 3.1. The round is played again, once, from what the run left, since a run does not keep what was sent.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int, UInt8

from edgefl_protocol import Payload
from edgefl_trainer.audit.identification import unit
from edgefl_trainer.audit.line import NotAttacked
from edgefl_trainer.audit.payloads import PicturePayload, examples_of_pictures, head_features
from edgefl_trainer.contract import Method, Phase, Site, State
from edgefl_trainer.method_halves import call_broadcast, call_local_round, call_predictor, stamped

HEAD = "head.weight"


def head_release(method: Method, server: State, site: Site, state: State, kind: str) -> PicturePayload | NotAttacked:
    """Play one more round of a site and read its head's change as a payload of each class.

    Gives why not where the head does not travel, or the site begins a round with another: nothing is then read.
    """
    rounds = site.task.rounds
    last = Phase("train", rounds)
    broadcast = stamped(call_broadcast(method, server, last, [site.name])[site.name], last, rounds)
    if HEAD not in broadcast.arrays:
        return NotAttacked(kind, "re-identification and reconstruction", "no head travels, and nothing else is read")
    model = call_predictor(method, site, state, broadcast)
    reply = call_local_round(method, site, state, broadcast)[1]
    if HEAD not in reply.arrays or model is None:
        return NotAttacked(kind, "re-identification and reconstruction", "no head travels, and nothing else is read")
    if not np.array_equal(model.tensors[HEAD], broadcast.arrays[HEAD]):
        why = f"{site.name} has fitted its model on, and no longer begins a round with what the server sends"
        return NotAttacked(kind, "re-identification and reconstruction", why)
    features = head_features(model, site.device)

    def directions(pictures: UInt8[np.ndarray, "n px px 3"]) -> Float[np.ndarray, "n P"]:
        return unit(features(pictures))

    def alone(pictures: UInt8[np.ndarray, "n px px 3"], labels: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n P"]:
        """Let the site learn one step from each picture alone."""
        rows = []
        for picture, label in zip(pictures, labels.tolist(), strict=True):
            train = replace(examples_of_pictures(picture[None]), labels=np.array([label], dtype=np.int64))
            one = replace(site, train=train, task=replace(site.task, epochs=1))
            sent = call_local_round(method, one, state, broadcast)[1]
            rows.append(_change(sent, broadcast)[label])
        return unit(np.stack(rows))

    change = unit(_change(reply, broadcast))
    means: Mapping[int, np.ndarray] = {int(k): change[k] for k in np.unique(site.train.targets)}
    return PicturePayload(kind, "class", directions, directions, known_means=means, alone=alone)


def _change(reply: Payload, broadcast: Payload) -> Float[np.ndarray, "K P"]:
    return np.asarray(reply.arrays[HEAD], dtype=np.float64) - np.asarray(broadcast.arrays[HEAD], dtype=np.float64)
