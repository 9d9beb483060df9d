"""Every method with its sites on `cuda` and bfloat16 inside the network, on a machine without a card.

docs/design.md 4: a site's tensors lie on `Site.device`. Rounds, aggregation, choice of maps, models and their scores
run as on a card (`tests.trainer.pretended_card`): a tensor that was left on the processor ends a step.
"""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import FORMS, RESTING, members, play, tiers, told
from tests.trainer.methods.test_conformance import small
from tests.trainer.pretended_card import CARD, pretended_card

from edgefl_trainer.contract import declared
from edgefl_trainer.engine.card.step_memory import has_batch, peak_of
from edgefl_trainer.engine.judging.results import tune_logits
from edgefl_trainer.engine.models import predict_rows
from edgefl_trainer.models.backbones import load_backbone, weights_of


@pytest.fixture(scope="module")
def backbone(request):
    """Of two blocks: which tensors meet does not depend on their number."""
    return load_backbone(getattr(request, "param", "vit:64x2/12"), image_px=36, seed=3)


def test_a_method_runs_on_a_card(name, make_task, make_site, backbone):
    """Two rounds of two sites: from the second on a site has maps, features or prototypes of the other."""
    runs_on_a_card(small(name), make_task(rounds=2), make_site, backbone)


@pytest.mark.parametrize("backbone", ["cnn:test_resnet"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("fedclf", {}), ("finetune", {"private": "head_and_norms"}), ("finetune", {"home": "statistics"}), ("head", {})],
)
def test_a_convolutional_network_runs_on_a_card(kind, options, make_task, make_site, backbone):
    """Batch norm has statistics of its own, and `finetune` fits a part of the network at home."""
    runs_on_a_card(small(kind, **options), make_task(rounds=2), make_site, backbone)


@pytest.mark.parametrize("kind", ["local-asked"])
def test_an_answer_model_that_learns_its_network_runs_on_a_card(kind, make_task, make_site, backbone):
    """Each site then has a vision transformer of its own, which answers, too."""
    task = replace(make_task(rounds=2), initial=weights_of(backbone.network))
    runs_on_a_card(small(kind, encoder="learned"), task, make_site, backbone)


def runs_on_a_card(method, task, make_site, backbone):
    with pretended_card():
        network = deepcopy(backbone).to(CARD)
        sites = {
            site: replace(made, backbone=network, device=CARD, autocast=torch.bfloat16)
            for site, made in members(task, make_site, a=4, b=5).items()
        }
        server, states = play(method, task, sites)
        assert all(np.isfinite(array).all() for array in server.arrays.values())
        sent = told(method, server, task, "a")
        further = declared(method).further_predictors
        models = {"": method.predictor(sites["a"], states["a"], sent)}
        models |= further(method, sites["a"], states["a"], sent) if further else {}
        for predictor in filter(None, models.values()):
            scores = predict_rows(predictor, sites["a"].tune, CARD)
            assert np.isfinite(scores.probabilities).all()
            assert np.isfinite(tune_logits(predictor, sites["a"].tune, CARD)).all()


KINDS_OF_STEPS = (  # the others step as one of these does
    "fedclf",
    "feddistill",
    "fedevprompt",
    "fedmae",
    "fedvpt",
    "finetune",
    "fedproto",
    "pfedpg",
    "pfl-vqa",
    "sgpt",
)


@pytest.mark.parametrize("kind", tiers(FORMS.keys() - RESTING, FORMS.keys() - set(KINDS_OF_STEPS)))
def test_the_memory_of_its_step_can_be_told(kind, make_task, make_site, backbone):
    """`run` plays it on a card before the first round: twice the images take more, less than twice with the weights."""
    method, site = small(kind), replace(make_site(make_task()), backbone=backbone)
    assert has_batch(method)
    four, eight = (peak_of(small(kind, batch=batch), site, batch) for batch in (4, 8))
    assert 0 < four < eight < 2 * four
