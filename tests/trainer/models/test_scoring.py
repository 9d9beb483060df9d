"""The evidential head and the score against numpy (docs/methods.md, prior and shown quantities)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgefl_trainer.losses import class_prior
from edgefl_trainer.models.head import dirichlet_summary, dissonance, evidence_of, init_head, standardise
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions
from edgefl_trainer.rollout import rollout_from_factors

EVIDENCE = st.lists(st.floats(0, 1e4), min_size=2, max_size=6)


def numpy_dissonance(evidence: np.ndarray, strength: float) -> float:
    """Jøsang et al. 2018, eq. 10 and 11, as loops."""
    belief, total = evidence / strength, 0.0
    for k, own in enumerate(belief):
        others = [b for j, b in enumerate(belief) if j != k]
        balance = [0.0 if own + b == 0 else 1 - abs(own - b) / (own + b) for b in others]
        if sum(others) > 0:
            total += own * sum(b * x for b, x in zip(others, balance, strict=True)) / sum(others)
    return total


@given(EVIDENCE)
def test_belief_vacuity_and_dissonance_follow_their_definitions(values):
    """docs/methods.md, shown quantities: Σ p = 1, Σ b + u = 1, dissonance as defined and within [0, 1 − u]."""
    evidence = torch.tensor([values], dtype=torch.float64)
    prior = class_prior(range(1, len(values) + 1))
    probabilities, vacuity = dirichlet_summary(evidence, prior)
    strength = sum(values) + len(values)
    shown = float(dissonance(evidence, vacuity)[0])
    assert probabilities[0].numpy() == pytest.approx((np.array(values) + prior.numpy()) / strength)
    assert float(vacuity[0]) == pytest.approx(len(values) / strength)
    assert shown == pytest.approx(numpy_dissonance(np.array(values), strength), abs=1e-12)
    assert -1e-12 <= shown <= 1 - float(vacuity[0]) + 1e-12


def test_zero_evidence_is_full_vacuity_without_dissonance():
    """docs/methods.md, tests: u = 1 at zero evidence, p = W/K, dissonance 0; one-sided evidence has none."""
    prior = class_prior([30, 1])
    probabilities, vacuity = dirichlet_summary(torch.zeros((1, 2), dtype=torch.float64), prior)
    assert vacuity.tolist() == pytest.approx([1.0])
    assert probabilities[0].numpy() == pytest.approx(prior.numpy() / 2)
    assert dissonance(torch.tensor([[0.0, 0.0], [7.0, 0.0]]), torch.tensor([1.0, 0.2])).tolist() == [0, 0]


@given(st.floats(1e-3, 1e4))
def test_even_evidence_has_the_published_dissonance(a):
    """docs/methods.md, shown quantities: e = (a, a), K = 2 gives 2a/S."""
    evidence = torch.full((1, 2), a, dtype=torch.float64)
    _, vacuity = dirichlet_summary(evidence, torch.ones(2, dtype=torch.float64))
    assert float(dissonance(evidence, vacuity)[0]) == pytest.approx(2 * a / (2 * a + 2))


def test_evidence_functions():
    """docs/methods.md, prior: ReLU; softplus; exp of logits clipped to ±10."""
    logits = torch.tensor([[-1000.0, -1.0, 0.0, 2.0, 1000.0]], dtype=torch.float64)
    assert evidence_of(logits, "relu").tolist() == [[0, 0, 0, 2, 1000]]
    assert evidence_of(logits, "softplus")[0].numpy() == pytest.approx(np.logaddexp(0, logits[0].numpy()))
    assert evidence_of(logits, "exp")[0].numpy() == pytest.approx(np.exp(np.clip(logits[0].numpy(), -10, 10)))


def test_fresh_head_has_live_relu_gradients():
    """docs/methods.md, training: N(0, 0.02) and bias +1, so that ReLU evidence starts above zero."""
    weight, bias = init_head(8, 384, torch.Generator().manual_seed(0))
    assert float(weight.std()) == pytest.approx(0.02, rel=0.05)
    assert bias.tolist() == [1] * 8


def test_standardised_features_have_unit_spread_and_constant_ones_stay_finite():
    """docs/methods.md, training: (x − mean)/std; a feature without spread is not blown up to infinity."""
    features = torch.randn((50, 3), generator=torch.Generator().manual_seed(0)) * torch.tensor([5.0, 0.1, 0.0]) + 2
    scaled = standardise(features, features.mean(0), features.std(0))
    assert scaled[:, :2].std(0).tolist() == pytest.approx([1, 1], rel=1e-4)
    assert torch.isfinite(scaled).all()


@pytest.fixture
def tensors(spec, prompts) -> dict[str, torch.Tensor]:
    weight, bias = init_head(3, spec.width, torch.Generator().manual_seed(3))
    return {
        "prompts.b": prompts[:1],
        "prompts.t": prompts[1:],
        "head.weight": weight * 20,
        "head.bias": bias,
        "features.mean": torch.full((16,), 0.1),
        "features.std": torch.full((16,), 0.7),
        "prior": class_prior([5, 3, 2]).float(),
        "temperature": torch.tensor(1.7),
    }


@pytest.fixture
def image() -> torch.Tensor:
    return torch.randint(0, 256, (2, 32, 32, 3), generator=torch.Generator().manual_seed(4)).to(torch.uint8)


@pytest.mark.parametrize("readout", ["cls", "mean"])
@pytest.mark.parametrize("head_norm", ["none", "standardise"])
def test_score_is_the_documented_chain(vit, prompts, tensors, image, readout, head_norm):
    """docs/methods.md, prior: features → head → e = f(logits/T) → α = e + W → p, u; in numpy from the readout on."""
    score = ScoreModule(vit, ScoreOptions(readout=readout, head_norm=head_norm))(image, tensors)
    output = vit(vit.normalise(image), prompts, need_attention=True)
    features = output.readout(readout).numpy()
    if head_norm == "standardise":
        features = (features - 0.1) / 0.7
    logits = features @ tensors["head.weight"].numpy().T + 1
    evidence = np.logaddexp(0, logits / 1.7)
    alpha = evidence + tensors["prior"].numpy()
    strength = alpha.sum(1)
    maps = rollout_from_factors(output.factors).numpy()
    assert score.evidence.numpy() == pytest.approx(evidence, rel=1e-4)
    assert score.probabilities.numpy() == pytest.approx(alpha / strength[:, None], rel=1e-4)
    assert score.vacuity.numpy() == pytest.approx(3 / strength, rel=1e-4)
    shown = [numpy_dissonance(e, s) for e, s in zip(evidence, strength, strict=True)]
    assert score.dissonance.numpy() == pytest.approx(shown, rel=1e-4)
    assert score.map.numpy() == pytest.approx(maps / maps.max(1, keepdims=True), rel=1e-4)
    assert list(score.named()) == ["probabilities", "evidence", "vacuity", "dissonance", "map"]
    assert all(value.dtype == torch.float32 for value in score.named().values())


def test_softmax_score_shows_probabilities_and_map_only(vit, tensors, image):
    """Contract: softmax methods have no evidence; the prior is not even asked for."""
    options = ScoreOptions(output="softmax", prompts=())
    without = {name: value for name, value in tensors.items() if name in options.tensors}
    assert set(without) == {"head.weight", "head.bias", "temperature"}
    score = ScoreModule(vit, options)(image, without)
    features = vit(vit.normalise(image)).cls.numpy()
    raw = np.exp((features @ tensors["head.weight"].numpy().T + 1) / 1.7)
    assert score.probabilities.numpy() == pytest.approx(raw / raw.sum(1, keepdims=True), rel=1e-4)
    assert tuple(score.named()) == options.outputs == ("probabilities", "map")


def test_missing_tensor_is_named(vit, tensors, image):
    """A score without one of its tensors says which."""
    del tensors["prompts.t"]
    with pytest.raises(ValueError, match=r"needs the tensors prompts\.t"):
        ScoreModule(vit, ScoreOptions())(image, tensors)
