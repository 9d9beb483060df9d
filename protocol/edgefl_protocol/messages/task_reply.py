"""The signed answer to `/v1/task`: what a federation learns, with all that a site needs to take part, and its round.

Guarantees: as in `messages`, a value that came from `from_payload` was checked. The settings and the backbone's
description are flat tables of plain values: what they mean is for the trainer of the site to judge, which refuses what
it does not know. Source: docs/security.md, envelope; docs/decisions/0030.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from edgefl_protocol.fields import (
    MAX_ROUND,
    NAME,
    choice,
    class_names,
    expect_names,
    flag,
    plain_table,
    scalar_payload,
    sentence,
    text,
    whole,
    words,
)
from edgefl_protocol.fields import Plain as Plain
from edgefl_protocol.payload import Payload
from edgefl_protocol.rules.bounds import MOST_EPOCHS, MOST_SEED
from edgefl_protocol.strict_json import MAX_INT

ROUND_STATES = ("waiting", "open", "closed", "done")
_DIGEST = re.compile(r"([0-9a-f]{64})?")
_MAX_TRAVELS = 16
MAX_SENTENCE = 1000  # characters
REPLY_REFUSED = "the reply of round"  # how `stuck` begins where aggregation refused this member's reply
CORRECTABLE = "; another contribution may replace it, once in this round"  # how that ends where this is so
GATE_REFUSED = "was refused by the operator's gate"  # of a round; what `stuck` may say behind it


@dataclass(frozen=True, kw_only=True)
class TaskReply:
    """What the federation learns and where its round stands."""

    method: str  # name of the federated method, e.g. "fedevprompt"
    task: str  # name of the task; with `line` it names the bundle a device wants
    line: str  # the federation's line of bundles
    classes: tuple[str, ...]  # class names in index order; `maps.<k>` is the class at index k
    rounds: int  # how many rounds of the exchange there will be, first and last exchange of the method included
    round: int  # the current round, from 1; 0 before the first
    phase: str  # the method's phase of the current round ("warm", "train", "final"), "" before the first
    state: str  # "waiting" (not begun), "open" (replies are taken), "closed" (being aggregated), "done" (all rounds)
    deadline_ms: int  # Unix milliseconds at which the open round closes; 0 where none is open
    tokens: int  # patch tokens N of a rollout map; 0 where the method shares no maps
    maps_per_class: int  # most maps M a site may send for one class
    quorum_min: int  # replies below which a round is not aggregated
    quorum_target: int  # replies at which a round closes before its deadline
    max_reply_bytes: int  # total size of a reply's payload that is accepted
    replied: bool  # whether this member's reply of the current round has come, also where aggregation refused it
    settings: Mapping[str, Plain]  # hyper-parameters of the method; what is not named has its default
    train_rounds: int = 0  # training rounds R of the method; 0 from a coordinator that does not tell
    epochs: int = 0  # local epochs E of a round; 0 likewise
    seed: int = 0  # of every draw that server and sites share
    travels: tuple[str, ...] = ()  # what a site's replies hold, such as ("maps",) or ("features", "weights")
    # description of the network, its `sha256` among it; empty where it is not told
    backbone: Mapping[str, Plain] = field(default_factory=dict)
    state_sha256: str = ""  # digest of server and sites after the last round; "" before
    # why the round does not go on, since when, and what mends it; before that, why aggregation refused this member's
    # reply. A field of its own would be refused by older members. "" where there is neither
    stuck: str = ""

    @property
    def takes_maps(self) -> bool:
        """Whether replies are rollout maps."""
        return self.tokens > 0 and self.maps_per_class > 0

    @property
    def refusal(self) -> str:
        """Why this member's reply, of this round or the one before, was refused: the first part of `stuck`, or ""."""
        if not self.stuck.startswith(REPLY_REFUSED):
            return ""
        behind = (f"; round {self.round} is stuck", f"; round {self.round - 1} {GATE_REFUSED}")
        return min((self.stuck.split(one)[0] for one in behind), key=len)

    @property
    def refused(self) -> bool:
        """Whether aggregation refused this member's reply of this round."""
        return self.refusal.startswith(f"{REPLY_REFUSED} {self.round} was refused")

    @property
    def correctable(self) -> bool:
        """Whether aggregation refused it, and takes another one in its place."""
        return self.refused and self.refusal.endswith(CORRECTABLE)

    @property
    def takes_features(self) -> bool:
        """Whether features are among what replies hold."""
        return "features" in self.travels

    def to_payload(self) -> Payload:
        """Return the payload that carries this message; what is not stuck is understood by older members too."""
        payload = scalar_payload(self)
        told = {name: value for name, value in payload.scalars.items() if name != "stuck" or value}
        return Payload(payload.arrays, told)

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        scalars = {"stuck": "", **payload.scalars}  # an older coordinator does not tell
        expect_names(Payload(payload.arrays, scalars), "task reply", frozenset(cls.__dataclass_fields__))
        return cls(
            method=text(scalars["method"], "method", NAME),
            task=text(scalars["task"], "task", NAME),
            line=text(scalars["line"], "line", NAME),
            classes=class_names(scalars["classes"]),
            rounds=whole(scalars["rounds"], "rounds", 1, MAX_ROUND),
            round=whole(scalars["round"], "round", 0, MAX_ROUND),
            phase=choice(scalars["phase"], "phase", ("", "warm", "train", "final")),
            state=choice(scalars["state"], "state", ROUND_STATES),
            deadline_ms=whole(scalars["deadline_ms"], "deadline_ms", 0, MAX_INT),
            tokens=whole(scalars["tokens"], "tokens", 0, 2**20),
            maps_per_class=whole(scalars["maps_per_class"], "maps_per_class", 0, 2**20),
            quorum_min=whole(scalars["quorum_min"], "quorum_min", 1, 2**20),
            quorum_target=whole(scalars["quorum_target"], "quorum_target", 1, 2**20),
            max_reply_bytes=whole(scalars["max_reply_bytes"], "max_reply_bytes", 1, MAX_INT),
            replied=flag(scalars["replied"], "replied"),
            settings=plain_table(scalars["settings"], "settings"),
            train_rounds=whole(scalars["train_rounds"], "train_rounds", 0, MAX_ROUND),
            epochs=whole(scalars["epochs"], "epochs", 0, MOST_EPOCHS),
            seed=whole(scalars["seed"], "seed", 0, MOST_SEED),
            travels=words(scalars["travels"], "travels", _MAX_TRAVELS),
            backbone=plain_table(scalars["backbone"], "backbone"),
            state_sha256=text(scalars["state_sha256"], "state_sha256", _DIGEST),
            stuck=sentence(scalars["stuck"], "stuck", MAX_SENTENCE),
        )
