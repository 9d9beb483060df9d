"""What of a picture travels, by kind, as a function that an attacker can compute, too.

    maps          rollout map of the site's model, float16, of each picture           each picture
    logits        mean answer of the site's model over a class                        each class
    prototypes    mean of what the head reads over a class                            each class
    features      of a network that learns without labels: a unit vector a picture    each picture
                  else the first two moments of the frozen network's readouts         the whole site
    weights       what a round changes of the head (`audit.head_change`)              each class

The attacker holds the exported model, and so can compute what any candidate would have sent: the strongest position
that a payload's receiver can be in. Beside it stands a member, who holds the model of another site. Source:
docs/methods.md, what travels; `edgefl_protocol.rules.travels`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8

from edgefl_protocol import Payload
from edgefl_protocol.rules.draws import bank_rng
from edgefl_protocol.rules.feature_rows import SENT, first_order
from edgefl_trainer.audit.line import NotAttacked
from edgefl_trainer.contract import Examples, Method, Phase, Predictor, Site, State
from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.engine.models import BATCH, FinishedRun, predict
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.learning.features import frozen_features
from edgefl_trainer.method_halves import call_broadcast, call_local_round, stamped
from edgefl_trainer.models.cnn import Backbone

Read = Callable[[UInt8[np.ndarray, "n px px 3"]], Float[np.ndarray, "n P"]]
Alone = Callable[[UInt8[np.ndarray, "n px px 3"], Int[np.ndarray, " n"]], Float[np.ndarray, "n P"]]
EXCHANGED = 512  # most pictures of one exchange, fewer where a bank holds fewer
GUESSES = 4  # random views that an attacker averages


@dataclass(frozen=True)
class PicturePayload:
    """What travels of pictures: what one picture alone would give, and over how many the payload is a mean."""

    kind: str
    over: Literal["picture", "class", "site"]
    sent: Read
    guessed: Read  # what the attacker computes of a candidate
    by_member: Read | None = None  # what another site, which holds its own model alone, computes of a candidate
    known_means: Mapping[int, np.ndarray] | None = None  # of each class, where they are not means of `sent`
    alone: Alone | None = None  # what is sent of each picture, with its class, where a site learns from it alone

    @property
    def names_class(self) -> bool:
        """Whether the payload says of which class it is."""
        return self.over == "class" or self.kind == "maps"

    def means(self, site: Site) -> dict[int, Float[np.ndarray, " P"]]:
        """Average over a site's training rows: by class, or under -1 over all; nothing where no payload is a mean."""
        if self.known_means is not None:
            return dict(self.known_means)
        if self.over == "picture":
            return {}
        rows = site.train
        values = self.sent(rows.images[rows.places]).astype(np.float64)
        if self.over == "site":
            return {-1: values.mean(axis=0)}
        return {int(k): values[rows.targets == k].mean(axis=0) for k in np.unique(rows.targets)}

    def payloads(
        self, means: Mapping[int, np.ndarray], pictures: UInt8[np.ndarray, "n px px 3"], labels: Int[np.ndarray, " n"]
    ) -> Float[np.ndarray, "n P"]:
        """Make the payload that each of some training pictures took part in."""
        if self.over == "picture":
            return self.sent(pictures)
        return np.stack([means[-1 if self.over == "site" else int(label)] for label in labels])


def release_of(run: FinishedRun, method: Method, server: State, site: Site, kind: str) -> PicturePayload | NotAttacked:
    """Say what of one kind a site sends of its pictures; where single pictures cannot be read so, why not."""
    if kind == "features" and not run.sites:
        sent, guessed = (_exchanged(one, server, site) for one in (method, without_noise(run.settings)))
        return PicturePayload(kind, "picture", sent(1), guessed(GUESSES))
    if kind == "features":
        return _moments(run.backbone, site)
    found = _of_model(kind, run.predictor(site.name), site)
    others = [name for name in run.sites if name != site.name]
    if isinstance(found, NotAttacked) or not others:
        return found
    theirs = _of_model(kind, run.predictor(others[0]), site)
    return replace(found, by_member=theirs.guessed) if isinstance(theirs, PicturePayload) else found


def without_noise(settings: RunSettings) -> Method:
    """Make the method of a run without the noise of its settings, `dp_…`: an attacker computes features without it."""
    quiet = {name: value for name, value in settings.hyper.items() if not name.startswith("dp_")}
    return replace(settings, hyper=quiet).build_method()


def _of_model(kind: str, predictor: Predictor, site: Site) -> PicturePayload | NotAttacked:
    module = predictor.score_module
    if module.options.insert is not None:
        why = "the model puts prompt tokens among those of a picture, inside its network; no attack here reads that"
        return NotAttacked(kind, "re-identification and reconstruction", why)
    cold = replace(predictor, tensors={**predictor.tensors, "temperature": np.ones((), dtype=np.float32)})
    readers: dict[str, tuple[Literal["picture", "class"], Read]] = {
        "maps": ("picture", _maps(cold, site.device)),
        "logits": ("class", lambda pictures: predict(cold, pictures, site.device).probabilities),
        "prototypes": ("class", head_features(cold, site.device)),
    }
    over, read = readers[kind]
    return PicturePayload(kind, over, read, read)


def _maps(predictor: Predictor, device: torch.device) -> Read:
    def read(pictures: UInt8[np.ndarray, "n px px 3"]) -> Float[np.ndarray, "n P"]:
        maps = predict(predictor, pictures, device).maps
        assert maps is not None
        return np.asarray((maps / maps.max(axis=1, keepdims=True)).astype(np.float16), dtype=np.float32)

    return read


def head_features(predictor: Predictor, device: torch.device) -> Read:
    """Make the function that gives what a model's head reads of pictures."""
    module = predictor.score_module.to(device).eval()
    tensors = {name: torch.from_numpy(np.array(value)).to(device) for name, value in predictor.tensors.items()}

    def read(pictures: UInt8[np.ndarray, "n px px 3"]) -> Float[np.ndarray, "n P"]:
        parts = []
        with torch.inference_mode():
            for start in range(0, len(pictures), BATCH):
                batch = torch.from_numpy(np.array(pictures[start : start + BATCH])).to(device)
                output = module.output(batch, tensors, need_attention=False)
                parts.append(module.features(output, tensors).cpu().numpy())
        return np.concatenate(parts)

    return read


def _moments(backbone: Backbone, site: Site) -> PicturePayload:
    network = backbone.to(site.device)

    def read(pictures: UInt8[np.ndarray, "n px px 3"]) -> Float[np.ndarray, "n P"]:
        found = frozen_features(network, examples_of_pictures(pictures), site.device)
        values = np.concatenate([found[name] for name in sorted(found)], axis=1)
        return np.concatenate([values, np.square(values)], axis=1)

    return PicturePayload("features", "site", read, read)


def _exchanged(method: Method, server: State, site: Site) -> Callable[[int], Read]:
    """Have the site half send features of given pictures, as it does before the first round.

    A row of such a bank belongs to the picture that `rules.feature_rows.first_order` puts there; under noise the order
    is that of the release.
    """
    warm = Phase("warm", 0)
    broadcast: Payload = stamped(call_broadcast(method, server, warm, [site.name])[site.name], warm, site.task.rounds)
    most = min(EXCHANGED, int(hyper_values(method).get("queue", EXCHANGED)))  # K: of more pictures some are left out

    def once(pictures: UInt8[np.ndarray, "n px px 3"], seed: int) -> Float[np.ndarray, "n P"]:
        asked = replace(site, unlabelled=examples_of_pictures(pictures), task=replace(site.task, seed=seed))
        reply = call_local_round(method, asked, State(), broadcast)[1]
        drawn = asked.rng("release", warm.round) if "dp_noise" in reply.scalars else bank_rng(seed, site.name)
        rows = np.asarray(reply.arrays[SENT], dtype=np.float32)
        found = np.empty_like(rows)
        found[first_order(drawn, len(pictures))] = rows
        return found

    def many(pictures: UInt8[np.ndarray, "n px px 3"], seed: int) -> Float[np.ndarray, "n P"]:
        asked = pictures
        if most == 2 and len(pictures) % 2:  # one picture alone has no batch norm, so another goes beside the last
            asked = np.concatenate([pictures, pictures[:1]])
        parts = np.array_split(asked, max(1, -(-len(asked) // most)))
        return np.concatenate([once(part, seed) for part in parts])[: len(pictures)]

    def reading(guesses: int) -> Read:
        first = 0 if guesses == 1 else 1  # other draws than those of the payload

        def read(pictures: UInt8[np.ndarray, "n px px 3"]) -> Float[np.ndarray, "n P"]:
            return np.asarray(np.mean([many(pictures, site.task.seed + first + n) for n in range(guesses)], axis=0))

        return read

    return reading


def examples_of_pictures(pictures: UInt8[np.ndarray, "n px px 3"]) -> Examples:
    """Make rows without labels of pictures."""
    return Examples(pictures, np.full(len(pictures), -1, dtype=np.int64), np.arange(len(pictures), dtype=np.int64))
