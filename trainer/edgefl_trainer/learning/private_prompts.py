"""The site half of methods whose prompts and head never leave the site: one round of local learning.

State of such a site: the trained tensors, the feature statistics where they are used, and the optimiser's moments;
its readout as a plain value. Methods differ only in the terms they add and in what is sent.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from edgefl_protocol import Payload
from edgefl_trainer.contract import Arrays, Predictor, Site, State
from edgefl_trainer.learning import evidential
from edgefl_trainer.learning.evidential import EvidentialRecipe
from edgefl_trainer.learning.features import own_features, readout_named
from edgefl_trainer.learning.loss_terms import Step, Term
from edgefl_trainer.learning.named_arrays import as_arrays
from edgefl_trainer.models.spec import Readout
from edgefl_trainer.rollout import WHOLE, Rollout


class PrivatePrompts(Protocol):
    """A method whose prompts and head stay at their site."""

    @property
    def recipe(self) -> EvidentialRecipe:
        """Hyper-parameters of local learning."""


def private_round(
    recipe: EvidentialRecipe,
    site: Site,
    state: State,
    broadcast: Payload,
    *,
    keep_optimizer: bool,
    terms: Sequence[Term] = (),
    rollout: Rollout = WHOLE,
    watch: Callable[[int, Step], None] | None = None,
    epochs: int | None = None,
) -> State:
    """Learn E epochs, or as many as named, from where the site stopped; return its new state. An empty one starts it.

    Of the broadcast the `round` is read, and where it has them a `readout` and feature statistics common to all sites.
    """
    before = begun(recipe, site, state, broadcast)
    learned = {k: v for k, v in before.arrays.items() if not k.startswith("optimizer.")}
    tensors = evidential.trainable(recipe, learned, site.device)
    optimizer = evidential.make_optimizer(recipe, tensors, before if keep_optimizer else None)
    evidential.learn(
        recipe,
        site,
        tensors,
        readout_of(before),
        int(broadcast.scalars["round"]),
        optimizer=optimizer,
        terms=terms,
        rollout=rollout,
        watch=watch,
        epochs=epochs,
    )
    kept = evidential.optimizer_state(recipe, optimizer, tensors) if keep_optimizer else State()
    values = {"readout": before.values["readout"], **kept.values}
    return State({**as_arrays(tensors), **kept.arrays}, values)


def predictor(method: PrivatePrompts, site: Site, state: State, broadcast: Payload) -> Predictor:
    """Return the site's own model; the initial one where it took part in no round. A class takes this over."""
    return scoring(method.recipe, site, begun(method.recipe, site, state, broadcast))


def scoring(recipe: EvidentialRecipe, site: Site, own: State, rollout: Rollout = WHOLE) -> Predictor:
    """Make what scores with a site's tensors and readout."""
    return evidential.make_predictor(recipe, site, own.arrays, readout_of(own), rollout)


def begun(recipe: EvidentialRecipe, site: Site, state: State, broadcast: Payload) -> State:
    """Return the state, or the one a site begins with where it is still empty."""
    return state if state.arrays else begin(recipe, site, broadcast)


def begin(recipe: EvidentialRecipe, site: Site, broadcast: Payload) -> State:
    """Begin a site: shared initial tensors, then readout and feature statistics.

    Those of the broadcast where it names them, the site's own otherwise.
    """
    spec = site.task.backbone
    initial = evidential.initial_tensors(recipe, spec, len(site.task.classes), site.task.seed)
    arrays: Arrays = as_arrays(initial)
    if "readout" in broadcast.scalars:
        common = {name: broadcast.arrays[name] for name in evidential.STATISTICS if name in broadcast.arrays}
        return State({**arrays, **common}, {"readout": broadcast.scalars["readout"]})
    own = own_features(site, recipe.readout, standardise=recipe.standardises(spec))
    return State({**arrays, **own.arrays}, own.values)


def readout_of(state: State) -> Readout:
    """Return the readout a site chose when it began."""
    return readout_named(state.values["readout"])
