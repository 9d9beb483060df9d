"""docs/methods.md 3.4: a step of fine-tuning is that of MAE's public code; views, drop path and the first head."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.trainer.learning.test_whole_network import mae_scales
from tests.trainer.methods.conftest import play, told
from tests.trainer.methods.self_supervised.test_finetune import PX, method, site_of, task_of
from timm.models.vision_transformer import VisionTransformer
from torch.nn.functional import cross_entropy
from torchvision.transforms.v2.functional import normalize

from edgefl_trainer.contract import Examples
from edgefl_trainer.engine.models import predict
from edgefl_trainer.learning import whole_network
from edgefl_trainer.learning.whole_network import NetworkRecipe
from edgefl_trainer.methods.finetune import FineTune
from edgefl_trainer.models.backbones import load_backbone

EPOCHS = 4
IMAGES, BATCH = 10, 4  # three steps an epoch, the last of two images
PEAK, LEAST, DECAY, DROPPED = 1e-3, 1e-4, 0.65, 0.5
WARMUP = 1.0  # epochs
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # ImageNet's


@pytest.fixture(scope="module")
def tiny():
    return load_backbone("tiny", image_px=PX, seed=3)


@pytest.fixture
def seen(monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """What each step learns from: views, classes, and the state that drop path draws from."""
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    loss = whole_network._loss

    def watched(model, site, images, target):
        found.append((images.clone(), target.clone(), torch.get_rng_state()))
        return loss(model, site, images, target)

    monkeypatch.setattr(whole_network, "_loss", watched)
    return found


def timm_network(tuning: FineTune, task) -> VisionTransformer:
    """timm's own classifier over the mean of the patch tokens, drop path included, with a run's first weights."""
    vit = VisionTransformer(
        img_size=PX, patch_size=12, embed_dim=64, depth=4, num_heads=2, num_classes=2, global_pool="avg", fc_norm=False,
        drop_path_rate=DROPPED,
    )  # fmt: skip
    start = tuning.beginning(task)
    fixed = tuning.model(task).network.pos_embed.detach()
    weights = {name.removeprefix("network."): torch.from_numpy(np.array(value)) for name, value in start.items()}
    vit.load_state_dict({**weights, "pos_embed": fixed})
    vit.pos_embed.requires_grad_(False)
    return vit


def pixels(images: torch.Tensor) -> torch.Tensor:
    return normalize(images.permute(0, 3, 1, 2).float() / 255, MEAN, STD)


def plain_fine_tuning(vit: VisionTransformer, seen: list, per_epoch: int) -> None:
    """facebookresearch/mae, engine_finetune.py with util/lr_decay.py and util/lr_sched.py, on views that are given."""
    learned = {name: value for name, value in vit.named_parameters() if value.requires_grad}
    scales = mae_scales(list(learned), 4, DECAY)
    still = vit.no_weight_decay()
    groups = [
        {"params": [value], "lr_scale": scales[name], "weight_decay": 0.0 if value.ndim == 1 or name in still else 0.05}
        for name, value in learned.items()
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK)
    vit.train()
    for step, (images, target, draws) in enumerate(seen):
        epoch = step / per_epoch
        if epoch < WARMUP:
            lr = PEAK * epoch / WARMUP
        else:
            turn = math.pi * (epoch - WARMUP) / (EPOCHS - WARMUP)
            lr = LEAST + (PEAK - LEAST) * 0.5 * (1 + math.cos(turn))
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        torch.set_rng_state(draws)
        loss = cross_entropy(vit(pixels(images)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def comparable(name: str, value: torch.Tensor) -> torch.Tensor:
    """A weight without the bias of attention's keys: softmax takes it away, AdamW moves it by rounding alone."""
    return torch.cat([value[:64], value[128:]]) if name.endswith("qkv.bias") else value


def test_steps_are_those_of_maes_public_fine_tuning(tiny, seen):
    """Two rounds of two epochs and the same four epochs as MAE's code has them: every weight, and then every score.

    Rates by layer, warm-up and cosine within an epoch, the decay of weights and drop path all show in the weights.
    Scores are the network's without drop path.
    """
    task = task_of(tiny, rounds=2, epochs=2)
    more = {"warmup": WARMUP, "lr": PEAK, "min_lr": LEAST, "layer_decay": DECAY, "drop_path": DROPPED}
    tuning, site = method(tiny, "local", weight_decay=0.05, **more), site_of(tiny, task, count=IMAGES)
    _, states = play(tuning, task, {"a": site})
    predictor = tuning.predictor(site, states["a"], told(tuning, states["a"], task, "a"))
    vit = timm_network(tuning, task)
    first = {name: value.clone() for name, value in vit.state_dict().items()}
    assert len(seen) == EPOCHS * 3
    with torch.random.fork_rng(devices=[]):
        plain_fine_tuning(vit, seen, per_epoch=3)
    learned = {name.removeprefix("network."): value for name, value in states["a"].arrays.items()}
    assert first.keys() - learned.keys() == {"pos_embed"}  # fixed positions do not learn
    for name in sorted(first.keys() - {"pos_embed"}):
        own, plain = comparable(name, torch.from_numpy(learned[name])), comparable(name, vit.state_dict()[name])
        moved = float((plain - comparable(name, first[name])).abs().max())
        assert moved > 0
        torch.testing.assert_close(own, plain, rtol=0, atol=2e-3 * moved, msg=lambda text, name=name: f"{name}: {text}")
    with torch.inference_mode():
        scores = vit.eval()(pixels(torch.from_numpy(site.tune.images))).softmax(dim=1).numpy()
    for _ in range(2):
        np.testing.assert_allclose(predict(predictor, site.tune.images).probabilities, scores, atol=1e-5)


def slopes(count: int) -> np.ndarray:
    """Pictures whose red tells the column and whose green tells the row."""
    ramp = (np.arange(PX) * 7).astype(np.uint8)
    picture = np.stack([np.tile(ramp, (PX, 1)), np.tile(ramp[:, None], (1, PX)), np.zeros((PX, PX), np.uint8)], axis=-1)
    return np.stack([picture] * count)


def views_of(tiny, seen, augment: str, **more: object) -> np.ndarray:
    """What the steps of one epoch over 64 equal pictures learn from."""
    task = task_of(tiny, rounds=1)
    site = site_of(tiny, task)
    train = Examples(slopes(64), np.arange(64, dtype=np.int64) % 2, np.arange(64, dtype=np.int64))
    play(method(tiny, "local", batch=32, augment=augment, **more), task, {"a": replace(site, train=train)})
    return np.concatenate([images.numpy() for images, _, _ in seen])


@pytest.mark.parametrize(("more", "smallest"), [({}, 0.2), ({"smallest_crop": 0.6}, 0.6)])
def test_views_are_random_crops_of_the_recipes_scale(tiny, seen, more, smallest):
    """docs/methods.md 3.4: random crops (scale 0.2 to 1). What a view shows of the two slopes tells its area."""
    views = views_of(tiny, seen, "crops", **more).astype(float)
    sides = np.ptp(views[..., :2].reshape(64, -1, 2), axis=1) / 7 + 1  # (64, 2): columns and rows that are seen
    shares = sides.prod(axis=1) / PX**2
    assert shares.min() > smallest - 0.05 and shares.max() <= 1.001
    assert shares.min() < smallest + 0.1 and shares.max() > 0.85
    assert abs(shares.mean() - (smallest + 1) / 2) < 0.1  # uniform


@pytest.mark.parametrize(("augment", "turns"), [("none", 1), ("dihedral", 8)])
def test_other_views_are_the_picture_and_its_turns(tiny, seen, augment, turns):
    """docs/methods.md 3.4: a square has eight symmetries, and 64 draws show them all."""
    whole = slopes(1)[0]
    allowed = {np.rot90(side, k).tobytes() for side in (whole, whole[:, ::-1]) for k in range(4)}
    found = {view.tobytes() for view in views_of(tiny, seen, augment)}
    assert found <= allowed and len(found) == turns


@pytest.mark.parametrize(("name", "deviation"), [("tiny", 2e-5), ("cnn:resnet18", 0.01)])
def test_a_fresh_head_is_as_small_as_in_the_public_code(name, deviation):
    """MAE's main_finetune.py: trunc_normal_(std=2e-5); MoCo's main_lincls.py: normal_(0, 0.01); no bias."""
    task = replace(task_of(load_backbone(name, image_px=PX, seed=3)), classes=tuple(f"class {k}" for k in range(64)))
    head = FineTune().beginning(task)
    assert head["head.weight"].std() == pytest.approx(deviation, rel=0.05)
    assert abs(head["head.weight"].mean()) < 0.1 * deviation
    assert not head["head.bias"].any()


def test_the_usual_recipe_is_that_of_the_page():
    """docs/methods.md 3.4, column "ViT, federated" and the text below it."""
    assert FineTune().mode == "federated" and FineTune().weighting == "samples"
    recipe = NetworkRecipe()
    assert (recipe.optimizer, recipe.weight_decay, recipe.lr, recipe.batch) == ("adamw", 0.05, 5e-4, 256)
    assert (recipe.schedule, recipe.warmup, recipe.min_lr) == ("cosine", 5, 1e-6)
    assert (recipe.layer_decay, recipe.drop_path, recipe.readout) == (0.65, 0.1, "auto")
    assert (recipe.augment, recipe.smallest_crop) == ("crops", 0.2)
