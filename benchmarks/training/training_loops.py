"""The two loops that `training_epoch.py` times: the plain PyTorch loop, and a FedEvPrompt epoch of EdgeFL.

The plain one is what a researcher who knows PyTorch would write first from FedEvPrompt (arXiv 2411.10071), section 3:
a data set that opens and resizes each JPEG behind a DataLoader, prompts patched into timm's attention, which keeps all
probabilities, rollout by products of whole matrices, maps upsampled to 224 px and compared with every map of the
buffer, lgamma and digamma in float32, AdamW. Both take a `Case` and give the losses of their steps, from the same start
over the same batches.
"""

import copy
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from edgefl_trainer.contract import Arrays, Site
    from edgefl_trainer.learning.evidential import EvidentialRecipe
    from edgefl_trainer.learning.loss_terms import Term

ROUND = 11  # one epoch a round: the KL weight has come to 1
KD_WEIGHT = 1e-6  # lambda
MAP_PX = 224  # the size at which maps are compared
MAPS_OF_A_PEER = 5  # M
LABELS = ("MEL", "NV")


@dataclass(frozen=True)
class Case:
    """What both loops learn."""

    site: "Site"
    recipe: "EvidentialRecipe"
    start: "Arrays"  # prompts, head and feature statistics
    maps: "Arrays"  # the peers', as they travel
    photos: tuple[Path, ...]  # one for each row of the site
    network: Any  # the plain loop's own copy of the timm network
    decoding_seconds: float  # processor time of the one pass that fills the image cache


def make_case(folder: Path, backbone: str, sizes: Mapping[str, int], device: str) -> Case:
    """Site, start and maps over photographs at SITE/CLASS/NAME in `folder`.

    Args:
        folder: of the photographs.
        backbone: name of an untrained network.
        sizes: `image_px`; most `images` of an epoch; `batch`; `maps` of each class that the peers hold.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        EdgeflError: no such backbone or device, or the photographs cannot be read.
    """
    import numpy as np
    import torch

    from edgefl_trainer.contract import Examples, Site, Task
    from edgefl_trainer.data.cache import cached_pictures
    from edgefl_trainer.data.sources.folder import read_folder
    from edgefl_trainer.engine.sites import autocast_dtype, choose_device
    from edgefl_trainer.learning import evidential, features
    from edgefl_trainer.learning.named_arrays import as_arrays
    from edgefl_trainer.models.backbones import load_backbone
    from edgefl_trainer.models.spec import require_vit

    torch.set_num_threads(1)
    chosen = choose_device(device)
    vit = load_backbone(backbone, image_px=sizes["image_px"], seed=0).to(chosen)
    table = read_folder(folder)
    with tempfile.TemporaryDirectory() as cache:  # on Linux and macOS a mapped file stays readable when it is removed
        started = time.process_time()
        pictures = cached_pictures([table], vit.spec.image_px, "squash", Path(cache))
        decoding = time.process_time() - started
    classes = tuple(sorted({row.label for row in table.rows if row.label}))
    labels = np.array([-1 if row.label is None else classes.index(row.label) for row in table.rows])
    rows = np.sort(np.random.default_rng(0).permutation(np.flatnonzero(labels >= 0))[: sizes["images"]])
    train = Examples(pictures.images, labels, rows)
    task = Task(name="all", classes=classes, backbone=vit.spec, rounds=ROUND, epochs=1, seed=0)
    recipe = evidential.EvidentialRecipe(batch=sizes["batch"], readout="cls")
    site = Site(
        name="a", task=task, backbone=vit, train=train, tune=train, unlabelled=train,
        device=chosen, autocast=autocast_dtype("auto", chosen),
    )  # fmt: skip
    own = features.own_features(site, "cls", standardise=True)
    start = {**as_arrays(evidential.initial_tensors(recipe, vit.spec, len(classes), 0)), **own.arrays}
    maps = drawn_maps(sizes["maps"], len(classes), require_vit(vit.spec, "fedevprompt").tokens)
    photos = tuple(folder / table.rows[row].source for row in rows)
    return Case(site, recipe, start, maps, photos, copy.deepcopy(vit.vit), decoding)


def draw_photos(folder: Path, images: int, px: int) -> None:
    """Drawn lesions as JPEG files at SITE/CLASS/NUMBER.jpg, classes in turn."""
    from PIL import Image

    from edgefl_trainer.data.lesions import draw_lesion

    for number in range(images):
        label = LABELS[number % len(LABELS)]
        path = folder / "a" / label / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw_lesion(label, site=0, number=number, px=px)[0]).save(path, quality=90)


def drawn_maps(of_a_class: int, classes: int, tokens: int) -> "Arrays":
    """A broadcast with that many maps of each class, M of each peer; the last peer has the rest."""
    import numpy as np

    rng = np.random.default_rng(1)
    shares = [min(MAPS_OF_A_PEER, of_a_class - at) for at in range(0, of_a_class, MAPS_OF_A_PEER)]
    return {
        f"maps.{peer}.{k}": rng.random((share, tokens)).astype(np.float16)
        for peer, share in enumerate(shares)
        for k in range(classes)
    }


# --- The plain loop


@dataclass(frozen=True)
class Photos:
    """A map-style data set: opens, resizes, turns and normalises one photograph each time it is asked for."""

    paths: Sequence[Path]
    labels: Sequence[int]
    turns: Sequence[int]  # one of eight symmetries for each
    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> "tuple[Tensor, int]":
        import numpy as np
        import torch
        from PIL import Image

        with Image.open(self.paths[index]) as file:
            image = file.convert("RGB").resize((self.side, self.side), Image.Resampling.BICUBIC)
        pixels = np.rot90(np.asarray(image), self.turns[index] % 4)
        pixels = pixels[:, ::-1] if self.turns[index] >= 4 else pixels
        planes = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().div(255)
        shape = (3, 1, 1)
        return (planes - torch.tensor(self.mean).view(shape)) / torch.tensor(self.std).view(shape), self.labels[index]


def plain_batches(case: Case, workers: int) -> Any:
    """A DataLoader over one epoch, in the order and with the turns of the site's own."""
    from torch.utils.data import DataLoader

    site, batch = case.site, case.recipe.batch
    order = site.epoch_order(site.train, ROUND, 0)
    rng = site.rng("augment", ROUND, 0)
    turns = [int(n) for at in range(0, len(order), batch) for n in rng.integers(8, size=len(order[at : at + batch]))]
    spec = site.task.backbone
    labels = site.train.targets[order].tolist()
    photos: Any = Photos([case.photos[i] for i in order], labels, turns, spec.image_px, spec.mean, spec.std)
    return DataLoader(photos, batch_size=batch, num_workers=workers, pin_memory=site.device.type == "cuda")


def patch_attention(network: Any, tensors: "Mapping[str, Tensor]", seen: "list[Tensor]") -> None:
    """Give every block its prefix (2, P, h, d_h) and note its probabilities (B, h, T, P+T) in `seen`."""
    import torch

    first = len(tensors["prompts.b"])

    def patched(index: int, attention: Any) -> Any:
        def forward(tokens: "Tensor", attn_mask: None = None, is_causal: bool = False) -> "Tensor":
            batch, length, width = tokens.shape
            parts = attention.qkv(tokens).reshape(batch, length, 3, attention.num_heads, -1)
            query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
            own = tensors["prompts.b"][index] if index < first else tensors["prompts.t"][index - first]
            prefix = own.transpose(1, 2).unsqueeze(1).expand(-1, batch, -1, -1, -1)
            key = torch.cat([prefix[0].to(key.dtype), key], dim=2)
            value = torch.cat([prefix[1].to(value.dtype), value], dim=2)
            probabilities = ((query @ key.transpose(-2, -1)) * attention.scale).softmax(dim=-1)
            seen.append(probabilities)
            mixed = (probabilities.to(value.dtype) @ value).transpose(1, 2).reshape(batch, length, width)
            return attention.proj(mixed)  # type: ignore[no-any-return]

        return forward

    for index, block in enumerate(network.blocks):
        block.attn.forward = patched(index, block.attn)


def plain_rollout(attentions: "Sequence[Tensor]", prefix: int) -> "Tensor":
    """Class-token map (B, N): the product of all (A + I)/2, prompt columns dropped and rows divided by their rest."""
    import torch

    rolled = identity = torch.eye(attentions[0].shape[2], device=attentions[0].device)
    for attention in attentions:
        image = attention[..., prefix:]
        image = (image / image.sum(dim=-1, keepdim=True)).mean(dim=1)
        rolled = (image + identity) / 2 @ rolled
    return rolled[:, 0, 1:]


def upsampled(maps: "Tensor") -> "Tensor":
    """(B, N) → (B, 224, 224), bilinear."""
    from torch.nn.functional import interpolate

    grid = round(maps.shape[1] ** 0.5)
    return interpolate(maps.view(-1, 1, grid, grid), size=MAP_PX, mode="bilinear", align_corners=False)[:, 0]


def plain_buffer(case: Case) -> "dict[int, list[Tensor]]":
    """For each class the upsampled maps of each peer, (m, 224, 224)."""
    import torch

    from edgefl_protocol.rules.maps import maps_in_broadcast

    buffer: dict[int, list[Tensor]] = {k: [] for k in range(len(case.site.task.classes))}
    for (_, label), maps in maps_in_broadcast(case.maps).items():
        buffer[label].append(upsampled(torch.from_numpy(maps).float().to(case.site.device)))
    return buffer


def plain_distance(maps: "Tensor", target: "Tensor", buffer: "Mapping[int, Sequence[Tensor]]") -> "Tensor":
    """Eq. 7: squared distances to every map of the own class, mean over a peer's maps, sum over peers, batch mean."""
    maps = maps / maps.amax(dim=1, keepdim=True)
    large = upsampled(maps)
    total = maps.sum() * 0
    for label, peers in buffer.items():
        own = large[target == label][:, None]  # (b, 1, 224, 224)
        for stack in peers:
            total = total + (own - stack).square().sum(dim=(2, 3)).mean(dim=1).sum()
    return total / len(maps)


def plain_evidential_loss(evidence: "Tensor", target: "Tensor", prior: "Tensor", kl_weight: float) -> "Tensor":
    """L_mse + weight·KL(Dir(α̃) ‖ Dir(W)), batch mean."""
    from torch import digamma, lgamma
    from torch.nn.functional import one_hot

    alpha = evidence + prior
    strength = alpha.sum(dim=1, keepdim=True)
    truth = one_hot(target, len(prior)).float()
    error = (truth - alpha / strength).square() + alpha * (strength - alpha) / (strength**2 * (strength + 1))
    wrong = truth * prior + (1 - truth) * alpha
    total = wrong.sum(dim=1, keepdim=True)
    divergence = lgamma(total[:, 0]) - lgamma(prior.sum()) + (lgamma(prior) - lgamma(wrong)).sum(dim=1)
    divergence = divergence + ((wrong - prior) * (digamma(wrong) - digamma(total))).sum(dim=1)
    return (error.sum(dim=1) + kl_weight * divergence).mean()


def plain_epoch(case: Case, workers: int) -> list[float]:
    """One epoch of the plain loop; its losses by step."""
    import torch
    from torch.nn.functional import softplus

    from edgefl_trainer.learning.evidential import site_prior

    site, recipe, device = case.site, case.recipe, case.site.device
    tensors = {name: torch.from_numpy(value.copy()).to(device) for name, value in case.start.items()}
    for name in recipe.trained:
        tensors[name].requires_grad_(True)
    slow = [tensors["prompts.b"]]
    fast = [tensors[name] for name in ("prompts.t", "head.weight", "head.bias")]
    groups = [{"params": slow, "lr": recipe.lr_b}, {"params": fast, "lr": recipe.lr_t}]
    optimizer = torch.optim.AdamW(groups, weight_decay=recipe.weight_decay)
    prior, buffer = site_prior(recipe, site), plain_buffer(case)
    seen: list[Tensor] = []
    patch_attention(case.network, tensors, seen)
    losses: list[float] = []
    for given, labels in plain_batches(case, workers):
        images, target = given.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        seen.clear()
        with torch.autocast(device.type, dtype=site.autocast, enabled=site.autocast is not None):
            features = case.network.forward_features(images)[:, 0].float()
        features = (features - tensors["features.mean"]) / tensors["features.std"]
        evidence = softplus(features @ tensors["head.weight"].T + tensors["head.bias"])
        maps = plain_rollout(seen, tensors["prompts.b"].shape[2])
        loss = plain_evidential_loss(evidence, target, prior, 1.0) + KD_WEIGHT * plain_distance(maps, target, buffer)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    seen.clear()  # the next turn of the other loop shall not find them in memory
    return losses


# --- EdgeFL's own


def edgefl_epoch(case: Case) -> list[float]:
    """One epoch as a run makes it; its losses by step."""
    from edgefl_trainer.learning import evidential

    losses: list[float] = []

    def note(facts: Mapping[str, Any]) -> None:
        if "step" in facts:
            losses.append(float(facts["loss"]))

    site = replace(case.site, report=note)
    tensors = evidential.trainable(case.recipe, case.start, site.device)
    optimizer = evidential.make_optimizer(case.recipe, tensors, None)
    evidential.learn(case.recipe, site, tensors, "cls", ROUND, optimizer=optimizer, terms=terms_of(case))
    return losses


def terms_of(case: Case) -> "list[Term]":
    """The distillation term, folded from the peers' maps."""
    from edgefl_trainer.learning.maps.sharing import MapSharing, distillation

    return [*distillation(MapSharing(kd_weight=KD_WEIGHT), case.site, case.maps)]
