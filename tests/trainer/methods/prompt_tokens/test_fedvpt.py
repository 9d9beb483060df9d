"""FedVPT and FedVPT-Deep: what travels at the papers' size, and local training by hand (docs/methods.md 5.3)."""

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import play
from timm.models.vision_transformer import VisionTransformer
from torch.nn.functional import cross_entropy

from edgefl_trainer.contract import Examples, Site, Task
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS
from edgefl_trainer.models.spec import ViTSpec
from edgefl_trainer.models.vit import FrozenViT

PAPER = {"readout": "cls", "head_norm": "none", "augment": "none"}


@pytest.fixture(scope="module")
def paper_site() -> Site:
    """Width 768, 12 blocks, patch 16, 100 classes; one patch and thin MLPs, which the counts do not see."""
    spec = ViTSpec(
        name="b", image_px=16, patch=16, depth=12, heads=12, width=768, mean=(0.5,) * 3, std=(0.5,) * 3,
        self_supervised=False, sha256="0" * 64,
    )  # fmt: skip
    vit = VisionTransformer(
        img_size=16, patch_size=16, embed_dim=768, depth=12, num_heads=12, num_classes=0, mlp_ratio=0.01
    )
    task = Task(name="all", classes=tuple(map(str, range(100))), backbone=spec, rounds=1, epochs=1, seed=0)
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    rows = Examples(images, np.array([3, 7]), np.arange(2))
    return Site(name="a", task=task, backbone=FrozenViT(vit, spec), train=rows, tune=rows, unlabelled=rows)


@pytest.mark.parametrize(
    ("name", "hyper", "count"),
    [
        ("fedvpt", {}, 77_568),  # PEP-FedPT, Table 6: 7.7 M in 100 rounds
        ("fedvpt-deep", {}, 85_248),  # 7.67 M in 90 rounds: 11 blocks of one token
        ("fedvpt-deep", {"last_block": "L-1"}, 86_016),
        ("fedpr", {}, 84_480),  # more than 8.4 M in more than 100 rounds: ten tokens
        ("head", {}, 76_800),
        ("p-pt", {}, 76_800),  # the head alone
        ("pfedpg", {}, 7_680),  # the change of ten tokens
    ],
)
def test_a_reply_at_the_papers_size_holds_as_many_numbers(name, hyper, count, paper_site):
    """PEP-FedPT section 5.3, "why 4.6 M": array elements of one reply; ViT-B/16 and 100 classes."""
    method = build(METHODS[name], {**PAPER, **hyper})
    state = method.start(paper_site.task, ["a"])
    [phase] = method.phases(1)
    broadcast = stamped(method.broadcast(state, phase, ["a"])["a"], phase, 1)
    _, reply = method.local_round(paper_site, type(state)(), broadcast)
    assert sum(value.size for value in reply.arrays.values()) == count


@pytest.mark.parametrize(("name", "blocks"), [("fedvpt", 1), ("fedvpt-deep", 3)])
def test_one_site_is_local_training_of_it(name, blocks, make_task, make_site, backbone):
    """A loop over timm's blocks with torch.optim.SGD: two rounds of two epochs, velocity from zero each round."""
    task = make_task(rounds=2, epochs=2)
    site, method = make_site(task), build(METHODS[name], {**PAPER, "n": 2, "batch": 4, "lr_decay": 0.5, "clip": 0.5})
    start = method.start(task, ["a"]).arrays
    prompts, head = (torch.from_numpy(start[key].copy()).requires_grad_(True) for key in ("prompts.s", "head.weight"))
    assert tuple(prompts.shape) == (blocks, 2, task.backbone.width)  # four blocks: deep prompts in 0, 1, 2
    for round_ in (1, 2):
        optimizer = torch.optim.SGD([prompts, head], lr=0.1 * 0.5 ** (round_ - 1), momentum=0.9)
        for epoch in range(2):
            for images, target in site.batches(site.train, 4, round_, epoch):
                x = backbone.vit._pos_embed(backbone.vit.patch_embed(backbone.normalise(images)))
                for index, block in enumerate(backbone.vit.blocks):
                    if index < blocks:
                        rest = x[:, 1:] if index == 0 else x[:, 3:]
                        x = torch.cat([x[:, :1], prompts[index].expand(len(x), -1, -1), rest], dim=1)
                    x = block(x)
                logits = backbone.vit.norm(x)[:, 0] @ head.T
                optimizer.zero_grad()
                cross_entropy(logits, target).backward()
                torch.nn.utils.clip_grad_norm_([prompts, head], 0.5)
                optimizer.step()
    found, _ = play(method, task, {"a": site})
    np.testing.assert_allclose(found.arrays["prompts.s"], prompts.detach().numpy(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.arrays["head.weight"], head.detach().numpy(), rtol=1e-3, atol=1e-4)
    assert not np.allclose(found.arrays["prompts.s"], start["prompts.s"], atol=1e-3)  # there was something to learn


def test_deep_prompts_follow_the_depth(make_task):
    """11 of 12 blocks as in the paper's count; all with last_block=L-1."""
    task = make_task()  # four blocks
    for last, blocks in (("L-2", 3), ("L-1", 4)):
        method = build(METHODS["fedvpt-deep"], {"last_block": last})
        assert method.start(task, ["a"]).arrays["prompts.s"].shape == (blocks, 1, task.backbone.width)
