"""FedMAE's promises (arXiv 2208.11278, section IV) and MAE's masking (arXiv 2111.06377, section 3)."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.methods.conftest import play

from edgefl_protocol import Payload
from edgefl_trainer.contract import State
from edgefl_trainer.engine.hyper_parameters import build, preset_of
from edgefl_trainer.errors import SettingError
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.methods import METHODS, fedmae
from edgefl_trainer.models.architectures import Architecture
from edgefl_trainer.models.backbones import weights_of
from edgefl_trainer.models.mae import MaskedAutoencoder, patches, standardised

HYPER = {"batch": 4, "decoder_width": 32, "decoder_depth": 1, "lr": 1e-3}
SHAPE = Architecture(width=32, depth=2, heads=2, patch=12, image_px=36)


def autoencoder(seed: int = 0) -> MaskedAutoencoder:
    model = MaskedAutoencoder(SHAPE, decoder_width=32, decoder_depth=1)
    model.initialise(seed)
    return model


TASK_SHAPE = Architecture(width=64, depth=4, heads=2, patch=12, image_px=36)  # of the fixture's backbone
NAMES = dict(MaskedAutoencoder(TASK_SHAPE, decoder_width=32, decoder_depth=1).named_parameters())
LEARNED = {name for name, value in NAMES.items() if value.requires_grad}
# Table V of the paper: what is not synchronised, by the row's name there.
LOCAL = {
    "class_token": {"backbone.cls_token"},
    "none": set(),
    "decoder": {"mask_token"} | {name for name in NAMES if name.startswith("decoder.")},
    "patch_embed": {"backbone.patch_embed.proj.weight", "backbone.patch_embed.proj.bias"},
    "decoder_embed": {"decoder.embed.weight", "decoder.embed.bias"},
}


# docs/methods.md 3.1 to 3.3: part that stays, rate and batch of arXiv 2208.11278; a warm-up of ours; the rest is MAE's.
DEFAULTS = {"keep_local": "class_token", "mask_ratio": 0.75, "norm_pix": True, "lr": 1.5e-4, "weight_decay": 0.05,
            "batch": 256, "warmup": 0.1, "smallest_crop": 0.2, "decoder_width": 512, "decoder_depth": 8}  # fmt: skip


def weights(state: State) -> dict[str, np.ndarray]:
    return dict(state.arrays)


@pytest.mark.parametrize("kept", LOCAL)
def test_what_stays_local_differs_until_the_end_and_agrees_after(kept, make_task, make_site):
    """Section IV-D and Table V: exactly the named tensors stay at a site; all others agree after each aggregation."""
    task = make_task(rounds=2)
    method = build(METHODS["fedmae"], {**HYPER, "keep_local": kept})
    sites = {s: make_site(task, s, seed=i, count=8 + 4 * i) for i, s in enumerate("ab")}
    trained: list[dict[str, np.ndarray]] = []

    def watch(exchange):
        replies = exchange.replies.values()
        if exchange.phase.kind == "train":
            assert all(set(payload.arrays) == LEARNED - LOCAL[kept] for payload in exchange.broadcasts.values())
            assert all(set(reply.arrays) == LEARNED - LOCAL[kept] for reply in replies)
            a, b = (exchange.broadcasts[name].arrays for name in "ab")  # what all sites start the round from
            assert all(np.array_equal(a[name], b[name]) for name in a)
        elif exchange.phase.round == 3:
            trained.extend(dict(reply.arrays) for reply in replies)
            assert all(set(reply.arrays) == LOCAL[kept] for reply in replies)

    server, states = play(method, task, sites, watch=watch)
    assert set(server.arrays) == LEARNED
    assert all(set(state.arrays) == LOCAL[kept] for state in states.values())
    for name in LOCAL[kept]:
        own = [arrays[name] for arrays in trained]
        assert not np.array_equal(*own)
        expected = np.average(own, axis=0, weights=[8, 12])
        np.testing.assert_allclose(server.arrays[name], expected, rtol=1e-5, atol=1e-7)
        for state in states.values():
            np.testing.assert_array_equal(state.arrays[name], server.arrays[name])
    assert len(trained) == (0 if kept == "none" else 2)


@pytest.mark.parametrize("kept", LOCAL)
def test_a_site_goes_on_from_what_it_kept(kept, make_task, make_site):
    """With a rate of nearly nothing, a round returns what it began with: the broadcast, and the site's own part."""
    task = make_task(rounds=2)
    method = build(METHODS["fedmae"], {**HYPER, "keep_local": kept, "lr": 1e-12, "weight_decay": 0.0})
    site, phase = make_site(task), method.phases(2)[0]
    broadcast = stamped(method.broadcast(method.start(task, ["a"]), phase, ["a"])["a"], phase, 2)
    first, _ = method.local_round(site, State(), broadcast)
    own = State({name: np.full_like(value, 0.25) for name, value in first.arrays.items()})
    sent = Payload({name: np.full_like(value, 0.5) for name, value in broadcast.arrays.items()}, broadcast.scalars)
    after, reply = method.local_round(site, own, sent)
    assert set(after.arrays) == LOCAL[kept]
    for arrays, value in ((after.arrays, 0.25), (reply.arrays, 0.5)):
        for name in arrays:
            np.testing.assert_allclose(arrays[name], value, atol=1e-6)


def test_defaults_are_those_of_the_page():
    """A new hyper-parameter needs a place here and there. 3.2: E = 10, ViT-B/16 at 224 px; 3.3: 100 rounds."""
    assert dataclasses.asdict(build(METHODS["fedmae"], {})) == DEFAULTS
    paper = preset_of("fedmae", "paper")
    assert [paper[key] for key in ("rounds", "epochs", "backbone", "image_px")] == [100, 10, "vit:768x12/16", 224]
    assert not paper.get("hyper")


def test_without_a_local_part_the_run_is_fedavg_of_the_whole_autoencoder(make_task, make_site):
    """`none` is Table V's Encoder+Decoder row: one site that synchronises everything learns what it learns alone."""
    task = make_task(rounds=2)
    ends = [
        weights(play(build(METHODS["fedmae"], {**HYPER, "keep_local": kept}), task, {"a": make_site(task)})[0])
        for kept in LOCAL
    ]
    for other in ends[1:]:
        for name in LEARNED:
            np.testing.assert_allclose(other[name], ends[0][name], rtol=1e-5, atol=1e-7)


def test_a_site_that_never_took_part_does_not_weigh_at_the_end(make_task, make_site):
    """The last average is over the sites that have learned a class token."""
    task = make_task(rounds=1)
    sites = {s: make_site(task, s, seed=i) for i, s in enumerate("ab")}
    method = build(METHODS["fedmae"], HYPER)
    server, states = play(method, task, sites, absent={1: "b"})
    alone, _ = play(method, task, {"a": sites["a"]})
    np.testing.assert_array_equal(server.arrays["backbone.cls_token"], alone.arrays["backbone.cls_token"])
    np.testing.assert_array_equal(states["b"].arrays["backbone.cls_token"], server.arrays["backbone.cls_token"])


@pytest.mark.parametrize("kept", LOCAL)
def test_position_tables_never_move_nor_travel(kept, make_task, make_site):
    """MAE's fixed tables: in no payload and in no state, and an optimiser step leaves them where they are."""
    task = make_task(rounds=1)
    travelled: set[str] = set()

    def watch(exchange):
        for payload in (*exchange.broadcasts.values(), *exchange.replies.values()):
            travelled.update(payload.arrays)

    server, states = play(
        build(METHODS["fedmae"], {**HYPER, "keep_local": kept}), task, {"a": make_site(task)}, watch=watch
    )
    held = travelled | set(server.arrays) | set(states["a"].arrays)
    assert "backbone.blocks.0.attn.qkv.weight" in travelled
    assert not any("pos" in name for name in held)
    model = autoencoder()
    before = (model.backbone.pos_embed.clone(), model.decoder_positions.clone())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(torch.randn(2, 3, 36, 36), torch.rand(2, 9), 0.75, True).backward()
    optimizer.step()
    assert model.backbone.pos_embed.equal(before[0])
    assert model.decoder_positions.equal(before[1])


def test_the_loss_ignores_visible_patches():
    """Changing the target of a visible patch cannot change the loss, changing a hidden one does.

    The prediction is held fixed by a decoder that answers zero, so only the target differs.
    """
    model = autoencoder()
    torch.nn.init.zeros_(model.decoder["prediction"].weight)
    images, noise = torch.rand(1, 3, 36, 36), torch.arange(9.0)[None] / 9  # patches 0 and 1 stay visible
    assert model.kept(0.75) == 2
    reference = model(images, noise, 0.75, False)
    visible, hidden = images.clone(), images.clone()
    visible[:, :, :12, :24] = torch.rand(3, 12, 24)
    hidden[:, :, 24:, 24:] = torch.rand(3, 12, 12)
    assert model(visible, noise, 0.75, False).item() == reference.item()
    assert model(hidden, noise, 0.75, False).item() != reference.item()


def test_the_loss_is_the_mean_over_hidden_patches():
    """Ten-line numpy reference of MAE's loss with per-patch standardisation."""
    model = autoencoder()
    torch.nn.init.zeros_(model.decoder["prediction"].weight)
    images, noise = torch.rand(2, 3, 36, 36), torch.rand(2, 9)
    errors = []
    for image, order in zip(images.numpy(), noise.argsort(1).numpy(), strict=True):
        for patch in order[2:]:
            row, column = divmod(int(patch), 3)
            pixels = image[:, row * 12 : row * 12 + 12, column * 12 : column * 12 + 12].ravel().astype(np.float64)
            target = (pixels - pixels.mean()) / np.sqrt(pixels.var(ddof=1) + 1e-6)
            errors.append((target**2).mean())
    np.testing.assert_allclose(model(images, noise, 0.75, True).item(), np.mean(errors), rtol=1e-5)


def test_hidden_pixels_cannot_reach_the_encoder():
    model = autoencoder().eval()
    images, visible = torch.rand(1, 3, 36, 36), torch.tensor([[0, 4]])
    changed = images.clone()
    changed[:, :, 24:, :] = 0.0  # patches 6, 7, 8
    with torch.no_grad():
        assert model.encode(images, visible).equal(model.encode(changed, visible))


@settings(max_examples=20)
@given(ratio=st.sampled_from([0.25, 0.5, 0.75]), side=st.sampled_from([2, 4, 6]), seed=st.integers(0, 99))
def test_the_encoder_sees_the_patches_of_smallest_noise_and_no_other(ratio, side, seed):
    """MAE section 3: (1 - ratio)·N patches, those of smallest noise, and the class token reach the encoder's blocks."""
    model = MaskedAutoencoder(
        Architecture(width=8, depth=1, heads=1, patch=4, image_px=4 * side), decoder_width=8, decoder_depth=1
    )
    model.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(2, 3, 4 * side, 4 * side, generator=generator)
    noise = torch.rand(2, side * side, generator=generator)
    seen = []
    model.backbone.blocks.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.no_grad():
        model(images, noise, ratio, True)
        every = model.backbone.patch_embed(images) + model.backbone.pos_embed[:, 1:]
    count = {0.25: 3 * side**2 // 4, 0.5: side**2 // 2, 0.75: side**2 // 4}[ratio]
    [tokens] = seen
    assert tokens.shape == (2, 1 + count, 8)
    for image in range(2):
        smallest = np.argsort(noise[image].numpy())[:count]
        np.testing.assert_allclose(tokens[image, 1:], every[image, smallest], atol=1e-6)
        np.testing.assert_allclose(tokens[image, 0], model.backbone.cls_token.detach()[0, 0], atol=1e-6)


def test_mae_shows_49_of_196_patches_to_the_encoder():
    """MAE section 3: three quarters of 14 × 14 patches are hidden."""
    shape = Architecture(width=8, depth=1, heads=1, patch=16, image_px=224)
    model = MaskedAutoencoder(shape, decoder_width=8, decoder_depth=1)
    seen = []
    model.backbone.blocks.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
    with torch.no_grad():
        model(torch.rand(1, 3, 224, 224), torch.rand(1, 196), 0.75, True)
    assert seen == [1 + 49]


def test_a_ratio_that_hides_every_patch_is_refused_before_anything_begins(make_task):
    """Nine patches: int(9 · (1 − 0.9)) = 0."""
    with pytest.raises(SettingError, match=r"mask_ratio is 0\.9 and hides all 9 patches: lower it"):
        build(METHODS["fedmae"], {**HYPER, "mask_ratio": 0.9}).start(make_task(), ["a"])
    assert build(METHODS["fedmae"], {**HYPER, "mask_ratio": 0.88}).start(make_task(), ["a"]).arrays


def test_patches_follow_the_image_and_standardise():
    image = torch.arange(3 * 36 * 36, dtype=torch.float32).reshape(1, 3, 36, 36)
    cut = patches(image, 12)
    assert cut.shape == (1, 9, 432)
    np.testing.assert_array_equal(cut[0, 5].reshape(12, 12, 3), image[0, :, 12:24, 24:36].permute(1, 2, 0))
    unit = standardised(cut)
    np.testing.assert_allclose(unit.mean(-1), 0.0, atol=1e-5)
    np.testing.assert_allclose(unit.std(-1), 1.0, rtol=1e-5)


def mae_rate(done: float, epochs: int, warmup: float, lr: float) -> float:
    """facebookresearch/mae util/lr_sched.py with min_lr 0; `done` is data_iter_step / len(data_loader) + epoch."""
    if done < warmup:
        return lr * done / warmup
    return lr * 0.5 * (1.0 + math.cos(math.pi * (done - warmup) / (epochs - warmup)))


def plain_mae(model, batches, before: int, total: int, warmup: float, per_epoch: int, lr: float) -> None:
    """main_pretrain.py's loop on given batches: timm's two groups, AdamW (0.9, 0.95), a rate for every step."""
    learned = {name: value for name, value in model.named_parameters() if value.requires_grad}
    plain = [name for name, value in learned.items() if value.ndim == 1 or name.endswith(".bias")]
    groups = [
        {"params": [learned[name] for name in plain], "weight_decay": 0.0},
        {"params": [learned[name] for name in learned if name not in plain], "weight_decay": 0.05},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    for step, (images, noise) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = mae_rate(before + step / per_epoch, total, warmup, lr)
        optimizer.zero_grad()
        model(images, noise, 0.75, True).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("rounds", "epochs", "round_", "share", "warmup"),
    [
        (4, 2, 1, 0.25, 2.0),  # warming up
        (4, 2, 2, 0.25, 2.0),  # at the peak and down, from where the round before has left the schedule
        (1000, 1, 30, 0.1, 40.0),  # a tenth of all epochs would be 100: at most 40 warm up
    ],
)
def test_steps_are_those_of_maes_public_loop(rounds, epochs, round_, share, warmup, make_task, make_site, monkeypatch):
    """Same start, same views and noise: the same weights after a round of three steps an epoch."""
    task, seen = make_task(rounds=rounds, epochs=epochs), []
    method = build(METHODS["fedmae"], {**HYPER, "warmup": share, "keep_local": "none"})
    plain = MaskedAutoencoder.forward

    def noting(self, images, noise, *more):
        seen.append((images.clone(), noise.clone()))
        return plain(self, images, noise, *more)

    monkeypatch.setattr(MaskedAutoencoder, "forward", noting)
    site, phase = make_site(task, count=10), method.phases(rounds)[round_ - 1]
    broadcast = stamped(method.broadcast(method.start(task, ["a"]), phase, ["a"])["a"], phase, rounds)
    _, reply = method.local_round(site, State(), broadcast)
    monkeypatch.undo()
    assert [len(images) for images, _ in seen] == [4, 4, 2] * epochs
    model = MaskedAutoencoder(TASK_SHAPE, decoder_width=32, decoder_depth=1)
    start = {name: torch.from_numpy(value.copy()) for name, value in broadcast.arrays.items()}
    assert model.load_state_dict(start, strict=False).missing_keys == ["backbone.pos_embed"]
    plain_mae(model, seen, (round_ - 1) * epochs, rounds * epochs, warmup, 3, HYPER["lr"])
    for name, value in reply.arrays.items():
        wanted = model.get_parameter(name).detach().numpy()
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7, err_msg=name)
    assert not np.array_equal(reply.arrays["mask_token"], broadcast.arrays["mask_token"])


def test_it_learns_on_random_crops_each_hidden_in_its_own_way(make_task, make_site, monkeypatch):
    """MAE section 3: the crop is its augmentation, and masks are drawn anew for each image and step."""
    asked: list[float] = []
    shown: list[torch.Tensor] = []
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain, forward = fedmae.random_crops, MaskedAutoencoder.forward

    def noting_crops(images, rng, smallest):
        asked.append(smallest)
        shown.append(plain(images, rng, smallest))
        return shown[-1]

    def noting(self, images, noise, *more):
        seen.append((images.clone(), noise.clone()))
        return forward(self, images, noise, *more)

    monkeypatch.setattr(fedmae, "random_crops", noting_crops)
    monkeypatch.setattr(MaskedAutoencoder, "forward", noting)
    task = make_task(rounds=2)
    site = make_site(task, count=8)
    play(build(METHODS["fedmae"], {**HYPER, "smallest_crop": 0.3}), task, {"a": site})
    assert asked == [0.3] * 4
    for crops, (images, _) in zip(shown, seen, strict=True):
        torch.testing.assert_close(images, site.backbone.normalise(crops), atol=1e-5, rtol=1e-5)
    orders = torch.cat([noise for _, noise in seen]).argsort(dim=1)
    assert len({tuple(order.tolist()) for order in orders}) == 16  # of 9! orders


def test_learning_goes_on_from_a_given_backbone(make_task, backbone):
    task = dataclasses.replace(make_task(), initial=weights_of(backbone.vit))
    state = build(METHODS["fedmae"], HYPER).start(task, ["a"])
    name = "blocks.0.attn.qkv.weight"
    np.testing.assert_array_equal(state.arrays[f"backbone.{name}"], weights_of(backbone.vit)[name])


@pytest.mark.parametrize("kept", LOCAL)
def test_what_stays_local_begins_as_the_given_backbones(kept, make_task, make_site, backbone):
    """Section IV: a class token is a site's own from the first round on. With a rate of nearly nothing a round ends
    where it began, so what is sent and what stays are together the given encoder."""
    task = dataclasses.replace(make_task(), initial=weights_of(backbone.vit))
    method = build(METHODS["fedmae"], {**HYPER, "keep_local": kept, "lr": 1e-12, "weight_decay": 0.0})
    phase = method.phases(1)[0]
    broadcast = stamped(method.broadcast(method.start(task, ["a"]), phase, ["a"])["a"], phase, 1)
    after, reply = method.local_round(make_site(task), State(), broadcast)
    ended = {**reply.arrays, **after.arrays}
    for name, value in task.initial.items():
        np.testing.assert_allclose(ended[f"backbone.{name}"], value, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_the_loss_falls(make_task, make_site):
    """Six rounds on a dozen images: the mean loss of the last is clearly below that of the first."""
    losses: list[float] = []
    task = make_task(rounds=6, epochs=2)
    site = dataclasses.replace(
        make_site(task), report=lambda facts: losses.append(float(facts["loss"])) if "summary" in facts else None
    )
    play(build(METHODS["fedmae"], {**HYPER, "lr": 3e-3, "norm_pix": False}), task, {"a": site})
    assert losses[-1] < 0.8 * losses[0]


def test_the_reply_carries_the_number_of_images(make_task, make_site):
    task = make_task()
    method, site = build(METHODS["fedmae"], HYPER), make_site(task, count=8)
    start = method.broadcast(method.start(task, ["a"]), method.phases(1)[0], ["a"])["a"]
    _, reply = method.local_round(site, State(), stamped(start, method.phases(1)[0], 1))
    assert reply.scalars["n_train"] == 8
    assert isinstance(reply, Payload)
