"""FedCLF. "Federated Self-supervised Learning for Skin Lesions", arXiv 2208.11278, section III; MoCo v2, 2003.04297.

    before round 1: each site's bank Q_l of local features          local_round, `warm`
    server sends theta, and to site i Q_r = the others' banks       broadcast
    site i: Q_CL := Q_r (remote) or Q_l (both, local);              contrast_round
            E epochs of momentum contrast against Q_CL, into which
            B of Q_r enter each step, and with `both` B local ones;
            the momentum encoder's features enter Q_l
    sites send theta_i and what of Q_l the round made;              aggregate
            theta = sum_c n_c/n theta_c

`negatives=remote` is FE+Neg, the paper's method; `both` is FE; `local` shares no features and is FedMoCo. A site that
is alone has no others: its own features serve as negatives.

Differs from the paper: K = 1024, tau = 0.2, m = 0.99 (0.999 from 20,000 local steps on) and the momentum encoder
averaged like the network, none of which it prints; nor does it say what becomes of SGD's momentum between rounds
(`optimizer_state`); a bank holds fewer than K features where a site has fewer images, never random vectors; a site that
misses a round keeps its old bank at the server; `dp_noise` (see `learning.unlabelled.feature_bank`). Devices learn it
by `edgefl_client.learning.fedclf`, with the graph of `edgefl_export.methods.fedclf`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol import Payload
from edgefl_protocol.rules import feature_rows
from edgefl_protocol.rules.defaults import FedCLFDefaults as Default
from edgefl_protocol.rules.feature_rows import BANK
from edgefl_protocol.rules.negatives import Negatives, keeps_local, shares
from edgefl_trainer.contract import Arrays, Declaration, Phase, Scalar, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import method_parts
from edgefl_trainer.learning.unlabelled import contrast, feature_bank, self_supervised
from edgefl_trainer.learning.unlabelled.contrast import ContrastRecipe
from edgefl_trainer.learning.unlabelled.feature_bank import FeatureNoise
from edgefl_trainer.learning.unlabelled.self_supervised import LearningNetwork


@dataclass(frozen=True, kw_only=True)
class FedCLF:
    """Federated momentum contrast with features of the other sites as negatives.

    For many pictures without labels, at sites that may send weights and features.
    """

    family: ClassVar[str] = "self-supervised"
    paper: ClassVar[str] = "arXiv 2208.11278"
    needs_labels: ClassVar[bool] = False
    declares: ClassVar[Declaration] = replace(
        self_supervised.DECLARES,
        site_of=feature_bank.site_of,
        release=lambda method, phase: None if phase.kind == "final" else method.noise.release,
        noise=lambda method: method.noise.terms,
    )

    contrast: ContrastRecipe = field(default_factory=ContrastRecipe)
    noise: FeatureNoise = field(default_factory=FeatureNoise)
    # what a step contrasts with: others' features (remote, FE+Neg), both (FE), or own ones, without exchange (local)
    negatives: Negatives = Default.negatives

    def __post_init__(self) -> None:
        if self.noise.dp_noise and not self.shares:
            raise SettingError(
                f"dp_noise is {self.noise.dp_noise}, but with negatives=local no feature travels: leave one of the "
                "two out."
            )

    @property
    def shares(self) -> bool:
        """Whether features travel."""
        return shares(self.negatives)

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`."""
        return ("features", "weights") if self.shares else ("weights",)

    def phases(self, rounds: int) -> Sequence[Phase]:
        """Plan a warm exchange of features where they travel, then R rounds."""
        warm = [Phase("warm", 0)] if self.shares else []
        return [*warm, *self_supervised.phases(self.contrast.sgd, rounds)]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with a fresh network, or the backbone to learn on, and a fresh projection."""
        self.noise.check_accountant()
        return contrast.start(self.contrast, task)

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """Send the averaged weights, and in train rounds the others' features."""
        weights = contrast.weights_to_send(state, phase)
        if phase.kind != "train" or not self.shares:
            return dict.fromkeys(sites, Payload(weights, {}))
        remote = feature_bank.others_features(state.arrays, sites)
        return {name: Payload({**weights, **remote[name]}, {}) for name in sites}

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Send the first bank in the warm phase, then learn E epochs; at last send batch norm where it stayed."""
        kind, round_ = broadcast.scalars["phase"], int(broadcast.scalars["round"])
        if kind == "final":
            return contrast.last_exchange(site, state)
        if kind == "warm":
            model = contrast.received(self.contrast, site, state, broadcast.arrays)
            bank = contrast.begun_bank(self.contrast, site, state, model)
            new = State(contrast.kept(bank), state.values)
            return self._divided(site, new, {}, model, round_, new.arrays[BANK])
        others = feature_bank.incoming(broadcast.arrays, site.device) if self.shares else None
        if self.shares and others is None and round_ == 1:
            site.report(
                {"warning": (f"site {site.name} received no other site's features, so it uses its own as negatives.")}
            )
        learned = contrast.contrast_round(
            self.contrast, site, state, broadcast.arrays, round_, others=others, keeps_local=keeps_local(self.negatives)
        )
        new, weights = contrast.divided(self.contrast, learned, state)
        made = feature_rows.made_in_round(new.arrays[BANK], len(site.unlabelled), site.task.epochs)
        return self._divided(site, new, weights, learned.slow, round_, made)

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Average the weights by numbers of images; new banks replace those of their sites."""
        learned = contrast.average(state, phase, replies)
        if phase.kind == "final" or not self.shares:
            return learned
        return State(feature_bank.accepted(learned.arrays, replies, self.contrast.queue), learned.values)

    predictor = method_parts.no_predictor

    def _divided(
        self,
        site: Site,
        new: State,
        weights: Arrays,
        slow: LearningNetwork,
        round_: int,
        made: NDArray[np.generic],
    ) -> tuple[State, Payload]:
        """Split a round's result into state and reply: what it made of Q_l, or with noise fresh features."""
        scalars: dict[str, Scalar] = {"n_train": len(site.unlabelled)}
        if not self.shares:
            return new, Payload(weights, scalars)
        if not self.noise.dp_noise:
            return new, Payload({**weights, **feature_rows.sent(made)}, scalars)
        fresh = contrast.local_features(self.contrast, site, slow, site.rng("release", round_), training=False)
        noised = self.noise.added(fresh.cpu().numpy(), site.noise_rng("features", round_))
        releases = int(new.values.get("releases", 0)) + 1
        if releases == 1:
            site.report({"warning": self.noise.sentence(site.name, site.task.rounds + 1) + site.noise_warning})
        values = {**new.values, "releases": releases, "epsilon_spent": self.noise.epsilon(releases)}
        sent = {**weights, **feature_rows.sent(noised)}
        return State(new.arrays, values), Payload(sent, {**scalars, "dp_noise": self.noise.dp_noise})
