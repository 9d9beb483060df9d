"""Learning answers: the loss, what learns, and pictures that pass the vision transformer once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import IMAGE_PX, QUESTIONS, asked, examples, play

from edgefl_protocol import Payload
from edgefl_protocol.rules.questions import Questions
from edgefl_trainer.contract import Examples, Site, State, Task, declared
from edgefl_trainer.engine.hyper_parameters import blank, build
from edgefl_trainer.engine.models import load_predictor, predict, predict_rows, save_predictor
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.learners import answer_rows
from edgefl_trainer.learning.learners.answers import AnswerLearner, AnswerRecipe
from edgefl_trainer.learning.named_arrays import as_tensors
from edgefl_trainer.models.answers import AnswerModule
from edgefl_trainer.models.backbones import load_backbone, weights_of

RECIPE = AnswerRecipe(width=16, heads=2, batch=4, dropout=0.0)
FIRST = Payload({}, {"phase": "train", "round": 1, "rounds": 1})


@pytest.fixture(autouse=True)
def every_test_on_one_thread(one_thread) -> None:
    """Models are compared bit by bit."""


@pytest.fixture(scope="module")
def backbone():
    return load_backbone("tiny", image_px=IMAGE_PX, seed=3)


@pytest.fixture
def task(backbone) -> Task:
    return Task(
        name="all",
        classes=("no", "yes", "two"),
        backbone=backbone.spec,
        rounds=1,
        epochs=1,
        seed=0,
        questions=QUESTIONS,
    )


def site_of(task: Task, backbone, rows: Examples, name: str = "a") -> Site:
    return Site(name=name, task=task, backbone=backbone, train=rows, tune=rows, unlabelled=rows)


@pytest.fixture
def rows() -> Examples:
    """Twelve questions about four pictures."""
    found = asked(examples(12, 3, 0), 1)
    return replace(found, images=found.images[:4], pictures=np.arange(12, dtype=np.int64) // 3)


def learned(recipe: AnswerRecipe, site: Site, **more) -> State:
    learner = AnswerLearner(recipe)
    return learner.learned(site, learner.begun(site, State(), FIRST), FIRST, keep_optimizer=True, **more)


def test_a_step_is_adams_on_cross_entropy_and_the_norms_beside_it(task, backbone, rows):
    """L_CE by PyTorch's Adam on the whole batch; the gradient of beta R, 2 beta theta, beside it (arXiv 1711.05101).

    Prompts and gates have a rate of their own.
    """
    recipe = replace(RECIPE, batch=12, beta=0.05, lr=0.01, lr_prompts=0.04)
    site = site_of(task, backbone, rows)
    tensors = {name: value.requires_grad_(True) for name, value in AnswerLearner(recipe).initial(task).items()}
    rates = {name: 0.04 if name.startswith("prompts.") or "gate" in name else 0.01 for name in tensors}
    shrunk = {name: value.detach() * (1 - rates[name] * 2 * 0.05) for name, value in tensors.items()}
    order = site.epoch_order(rows, 1, 0)
    images, target = rows.read(order)
    given = {**tensors, "temperature": torch.tensor(1.0)}
    probabilities = AnswerModule(backbone, recipe.options())(images, rows.asked(order), given).probabilities
    before = {name: value.detach().clone() for name, value in tensors.items()}
    optimizer = torch.optim.Adam([{"params": [value], "lr": rates[name]} for name, value in tensors.items()])
    (-probabilities[range(12), target].log().mean()).backward()
    optimizer.step()
    found = learned(recipe, site)
    for name, value in tensors.items():
        own, wanted = found.arrays[name], (shrunk[name] + value.detach() - before[name]).numpy()
        if name.endswith("qkv.bias"):  # softmax takes the bias of keys away again: its gradient is rounding alone
            own, wanted = (np.delete(each, np.s_[16:32]) for each in (own, wanted))
        np.testing.assert_allclose(own, wanted, rtol=1e-3, atol=2e-5, err_msg=name)
    assert {name for name in found.arrays if not name.startswith("optimizer.")} == set(tensors)


def test_prompts_of_two_sites_come_apart(task, backbone, rows):
    """What is exchanged says something: prompts neither stay what they were nor shrink to nothing."""
    recipe = replace(RECIPE, lr=0.003)
    others = replace(rows, labels=(rows.labels + 1) % 3)
    one, other = (learned(recipe, site_of(task, backbone, each), epochs=20).arrays for each in (rows, others))
    first = AnswerLearner(recipe).initial(task)
    for name in ("prompts.image", "prompts.text"):
        a, b, begun = (np.asarray(each[name]).ravel() for each in (one, other, first))
        assert np.linalg.norm(a) > 0.5 * np.linalg.norm(begun)
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) < 0.99


def test_all_that_learns_is_of_an_answer(task, backbone, rows):
    recipe = RECIPE
    assert {*AnswerLearner(recipe).trained(task), "temperature"} == set(recipe.options().tensors)
    before, after = AnswerLearner(recipe).initial(task), learned(recipe, site_of(task, backbone, rows)).arrays
    still = [name for name in before if np.array_equal(before[name].numpy(), after[name])]
    assert still == []


def test_a_picture_passes_the_network_once_whatever_is_asked(task, backbone, rows, monkeypatch):
    """Docstring of `learners.answers`: four pictures, twelve questions, two epochs, one pass."""
    passed, plain = [], AnswerModule.picture_tokens

    def counting(module, images, *more):
        passed.append(len(images))
        return plain(module, images, *more)

    monkeypatch.setattr(AnswerModule, "picture_tokens", counting)
    kept = learned(RECIPE, site_of(task, backbone, rows), epochs=2)
    assert passed == [4]
    monkeypatch.setattr(answer_rows, "MOST_KEPT", 0)
    anew = learned(RECIPE, site_of(task, backbone, rows), epochs=2)
    assert len(passed) > 2
    for name, value in kept.arrays.items():
        np.testing.assert_allclose(anew.arrays[name], value, rtol=1e-4, atol=1e-6)


def test_rows_are_answered_as_the_module_answers_them(task, backbone, rows):
    site = site_of(task, backbone, rows)
    predictor = AnswerLearner(RECIPE).predictor(site, learned(RECIPE, site))
    found = predict_rows(predictor, replace(rows, rows=rows.rows[::-1].copy()))
    images, _ = rows.read(np.arange(12)[::-1].copy())
    tensors = as_tensors(predictor.tensors, torch.device("cpu"))
    expected = predictor.module(images, rows.asked(np.arange(12)[::-1].copy()), tensors)
    np.testing.assert_allclose(found.probabilities, expected.probabilities.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.maps, expected.map.numpy(), rtol=1e-4, atol=1e-5)


def test_a_vision_transformer_learns_where_it_is_asked_to(task, backbone, rows, tmp_path):
    """`encoder=learned`: from the run's weights, which stay as they are; the site scores with its own."""
    recipe = replace(RECIPE, encoder="learned")
    weights = weights_of(backbone.network)
    task = replace(task, initial={name: value.copy() for name, value in weights.items()})
    site = site_of(task, backbone, rows)
    state = learned(recipe, site)
    moved = [name for name in weights if not np.array_equal(state.arrays[f"network.{name}"], weights[name])]
    assert set(moved) == set(weights)  # that of the class token through its attention to the patches
    assert all(np.array_equal(value, weights_of(backbone.network)[name]) for name, value in weights.items())
    predictor = AnswerLearner(recipe).predictor(site, state)
    assert set(predictor.network) == set(weights) and not any(n.startswith("network.") for n in predictor.tensors)
    save_predictor(tmp_path / "a.safetensors", predictor)
    again = load_predictor(tmp_path / "a.safetensors", backbone)
    one, other = (predict_rows(each, rows).probabilities for each in (predictor, again))
    np.testing.assert_array_equal(one, other)
    frozen = replace(predictor, module=AnswerModule(backbone, recipe.options()))
    assert not np.array_equal(predict_rows(frozen, rows).probabilities, one)


@pytest.mark.parametrize(
    ("name", "unread"),
    [("vit_tiny_patch16_224", set()), ("beit3_base_patch16_224", {"fc_norm.weight", "fc_norm.bias"})],
)
def test_a_site_answers_with_the_network_of_timms_hub_that_it_learned(name, unread, hub, task, rows):
    """docs/methods.md 11.1: positions of timm's networks learn with all else; a norm behind the mean is not read."""
    vit = load_backbone(f"timm:{name}", image_px=IMAGE_PX)
    begun = {key: value.numpy().copy() for key, value in vit.network.state_dict().items()}
    task = replace(task, backbone=vit.spec, initial=weights_of(vit.network))
    learner, site = AnswerLearner(replace(RECIPE, encoder="learned")), site_of(task, vit, rows)
    once = learned(learner.recipe, site)
    state = learner.learned(site, once, Payload({}, {"phase": "train", "round": 2, "rounds": 2}), keep_optimizer=True)
    assert {key for key in begun if np.array_equal(state.arrays[f"network.{key}"], begun[key])} == unread
    answering = learner.predictor(site, state).module.backbone.network.state_dict()
    for key in begun:
        np.testing.assert_array_equal(answering[key].numpy(), state.arrays[f"network.{key}"], err_msg=key)


def test_a_method_says_whether_its_network_learns():
    """What the engine reads: whether an untrained backbone may be named, and which weights a task carries."""
    for name in ("local", "fedavg", "fedprox", "fedavgpers", "pfl-vqa"):
        begun = blank(name, ("vqa-rad:x",))
        for encoder in ("frozen", "learned"):
            method = build(lambda begun=begun: begun, {"encoder": encoder})
            assert declared(method).trains_network == (encoder == "learned") == (not declared(method).freezes)
        assert not declared(blank(name)).trains_network


def test_a_model_survives_its_file(task, backbone, rows, tmp_path):
    site = site_of(task, backbone, rows)
    predictor = AnswerLearner(RECIPE).predictor(site, learned(RECIPE, site))
    save_predictor(tmp_path / "a.safetensors", predictor)
    again = load_predictor(tmp_path / "a.safetensors", backbone)
    assert again.module.options == predictor.module.options and again.seen == predictor.seen
    np.testing.assert_array_equal(predict_rows(again, rows).probabilities, predict_rows(predictor, rows).probabilities)


def test_a_model_that_answers_scores_no_picture_alone(task, backbone, rows):
    site = site_of(task, backbone, rows)
    predictor = AnswerLearner(RECIPE).predictor(site, AnswerLearner(RECIPE).begun(site, State(), FIRST))
    with pytest.raises(TypeError, match="answers questions about pictures"):
        assert predictor.score_module
    with pytest.raises(TypeError):
        predict(predictor, rows.images)


@pytest.mark.parametrize("method", ["fedavg", "fedavgpers"])
def test_one_site_is_local_training(method, task, backbone, rows):
    """As of pictures: FedAvg over one site is that site alone with a fresh optimiser each round, bit for bit."""
    task = replace(task, rounds=2)
    members = {"a": site_of(task, backbone, rows)}
    hyper = {"width": 16, "heads": 2, "batch": 4}
    averaged, _ = play(build(lambda: blank(method, ("vqa-rad:x",)), hyper), task, members)
    alone = build(lambda: blank("local", ("vqa-rad:x",)), {**hyper, "optimizer_state": "reset"})
    _, states = play(alone, task, members)
    for name in AnswerLearner(RECIPE).trained(task):
        np.testing.assert_array_equal(averaged.arrays[name], states["a"].arrays[name])


def test_fedprox_holds_an_answer_model_back(task, backbone, rows):
    members = {"a": site_of(task, backbone, rows)}
    hyper = {"width": 16, "heads": 2, "batch": 4, "lr": 0.01}

    def strayed(mu: float) -> float:
        method = build(lambda: blank("fedprox", ("vqa-rad:x",)), {**hyper, "mu": mu})
        first = method.start(task, ["a"]).arrays
        server, _ = play(method, task, members)
        return float(sum(np.square(server.arrays[name] - first[name]).sum() for name in first))

    assert strayed(10.0) < 0.5 * strayed(0.0)


@pytest.mark.parametrize(
    ("hyper", "sentence"),
    [
        ({"lr": 0.0}, "lr is 0.0; allowed: above 0, at most 1"),
        ({"lr_prompts": 2.0}, "lr_prompts is 2.0; allowed: above 0, at most 1"),
        ({"width": 10, "heads": 4}, "width is 10, which 4 heads cannot share"),
        ({"fusion_blocks": 0}, "fusion_blocks is 0; allowed: 1 to 48"),
        ({"dropout": 1.0}, "dropout is 1.0; allowed: 0 to below 1"),
        ({"picture": "hidden", "encoder": "learned"}, "with picture=hidden no picture is seen"),
    ],
)
def test_settings_out_of_range_are_one_sentence(hyper, sentence):
    with pytest.raises(SettingError, match=sentence):
        build(lambda: blank("local", ("vqa-rad:x",)), hyper)


def test_what_does_not_fit_is_told_before_the_first_step(task, backbone):
    learner = AnswerLearner(RECIPE)
    with pytest.raises(SettingError, match="are asked none"):
        learner.initial(replace(task, questions=None))
    with pytest.raises(SettingError, match="have 1 answer, and a model needs at least two"):
        learner.initial(replace(task, classes=("yes",)))
    convolutional = load_backbone("cnn:test_resnet", image_px=IMAGE_PX).spec
    with pytest.raises(SettingError, match="an answer model needs a vision transformer"):
        learner.initial(replace(task, backbone=convolutional))
    with pytest.raises(SettingError, match="carries no weights to learn on"):
        AnswerLearner(replace(RECIPE, encoder="learned")).initial(task)
    assert learner.initial(replace(task, questions=Questions((), 1)))["words.embedding"].shape == (2, 16)


@pytest.mark.parametrize("hyper", [{"share": "b"}, {"share": "g"}, {"kd": True}])
def test_an_answer_model_is_averaged_whole(hyper):
    with pytest.raises(SettingError, match="averaged as a whole, so leave share and kd out"):
        build(lambda: blank("fedavg", ("vqa-rad:x",)), hyper)


def test_an_answer_that_the_site_never_had_is_none_in_the_accuracy_that_is_sent(task, backbone, rows):
    """docs/methods.md 11.2: whatever the model holds of it, the most probable of the others counts."""
    learner = AnswerLearner(RECIPE)
    two = replace(rows, labels=rows.labels % 2)
    site = site_of(task, backbone, two)
    model = learner.begun(site, State(), FIRST)
    found = []
    for bias in (-9.0, 9.0):  # of the third answer
        arrays = {**model.arrays, "head.bias": np.array([0.0, 0.0, bias], np.float32)}
        found.append(learner.accuracy(site, State(arrays)))
    assert site.seen == (True, True, False)
    assert found[0] == found[1] > 0
