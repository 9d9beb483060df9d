"""What a head's change gives away: Phong et al. 2018; Geiping et al. 2020, proposition 3.1."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from edgefl_trainer.audit.audited import Audited, open_audit
from edgefl_trainer.audit.head_change import head_release
from edgefl_trainer.audit.line import NotAttacked
from edgefl_trainer.audit.payloads import PicturePayload
from edgefl_trainer.contract import Phase, State
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS


def test_one_step_from_one_picture_gives_the_features_away() -> None:
    """dL/dw_k = dL/dlogit_k · f: the row of the picture's class is its feature, up to a factor."""
    features = torch.randn(7, generator=torch.Generator().manual_seed(0))
    head = torch.zeros(3, 7, requires_grad=True)
    torch.nn.functional.cross_entropy((head @ features)[None], torch.tensor([1])).backward()
    assert head.grad is not None
    cosine = torch.cosine_similarity(-head.grad[1], features, dim=0)
    assert cosine.item() == pytest.approx(1.0)


@pytest.fixture
def audited(run_of: Callable[[str], Path], small: None) -> Audited:
    return open_audit(open_run(run_of("fedavg")), ("site-1",), 20, lambda line: None)


@pytest.mark.slow
def test_a_picture_that_a_site_learned_from_alone_is_found(audited: Audited) -> None:
    """Though the optimiser divides each number by its size, what is left points to the picture's own feature."""
    site = audited.sites["site-1"]
    release = head_release(audited.method, audited.server, site, audited.states["site-1"], "weights")
    assert isinstance(release, PicturePayload) and release.alone is not None
    rows = np.arange(8)
    pictures = site.train.images[site.train.places[rows]]
    found = release.alone(pictures, site.train.targets[rows]) @ release.guessed(pictures).T
    others = found[~np.eye(len(rows), dtype=bool)]
    assert np.diag(found).mean() > max(0.5, others.mean() + 0.05)  # an untrained network's features are much alike


@pytest.mark.slow
def test_where_no_head_travels_nothing_is_read(audited: Audited) -> None:
    """FedAvg of the prompts of the first blocks alone."""
    site, method = audited.sites["site-1"], build(METHODS["fedavg"], {"share": "b"})
    server = method.start(site.task, sorted(audited.sites))
    assert isinstance(head_release(method, server, site, State(), "weights"), NotAttacked)


@pytest.mark.slow
def test_a_site_that_went_on_from_its_own_head_is_refused(audited: Audited) -> None:
    """With FedAvg and personal fits, a round played again says nothing of one that was sent."""
    site, method = audited.sites["site-1"], build(METHODS["fedavgpers"], {})
    phase = Phase("final", site.task.rounds + 1)
    told = stamped(method.broadcast(audited.server, phase, [site.name])[site.name], phase, site.task.rounds)
    personal, _ = method.local_round(site, audited.states["site-1"], told)
    found = head_release(method, audited.server, site, personal, "weights")
    assert isinstance(found, NotAttacked) and "no longer begins" in found.why
