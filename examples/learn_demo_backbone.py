"""Learn the small backbone that `make demo` freezes: a ViT trained with labels on drawn lesions of other sites.

    python examples/learn_demo_backbone.py --epochs 20 -o backbones/drawn-lesions-84.safetensors

The demo's federation has other sites, other lesions and another seed. FedEvPrompt starts from a network pre-trained
with labels (ImageNet-21k in the paper); this one plays that part where nothing can be downloaded. It has seen no photo.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from torch import nn

    from edgefl_trainer.data import Federation
    from edgefl_trainer.models.architectures import Architecture

CLASSES = "NV+MEL+BKL+BCC+VASC"


@click.command(help=__doc__)
@click.option("--images", default=1500, show_default=True, metavar="N", help="Images of each of the six sites.")
@click.option("--epochs", default=20, show_default=True, metavar="N", help="Passes over them.")
@click.option("--seed", default=4242, show_default=True, metavar="N", help="Of the drawings and the network.")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="Backbone file.")
def main(images: int, epochs: int, seed: int, out: Path) -> None:
    from edgefl_protocol.durable import write_atomic
    from edgefl_trainer.data import load_federation
    from edgefl_trainer.models.backbones import backbone_bytes, weights_of

    data = load_federation([f"lesions:sites=6,images={images},seed={seed},classes={CLASSES}"], image_px=84, seed=seed)
    vit = learn(data, epochs, seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, backbone_bytes(architecture(), weights_of(vit), self_supervised=False, half=True))
    click.echo(f"wrote {out} ({out.stat().st_size / 1e6:.2f} MB)")


def architecture() -> "Architecture":
    """The demo's network: 0.7 million weights, small enough to lie in the repository."""
    from edgefl_trainer.models.architectures import Architecture

    return Architecture(width=96, depth=6, heads=3, patch=12, image_px=84)


def learn(data: "Federation", epochs: int, seed: int) -> "nn.Module":
    """Cross-entropy on the class token; prints balanced accuracy on unseen lesions after each epoch."""
    import numpy as np
    import torch
    from torch import nn

    from edgefl_protocol.rules.rates import cosine_rate
    from edgefl_trainer.augment import dihedral, to_float
    from edgefl_trainer.models.architectures import IMAGENET_MEAN, IMAGENET_STD, build_vit, initialise

    torch.manual_seed(seed)
    vit = build_vit(architecture())
    initialise(vit, torch.Generator().manual_seed(seed))
    head = nn.Linear(architecture().width, len(data.classes))
    learned = [value for value in (*vit.parameters(), *head.parameters()) if value.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=0, weight_decay=0.05)
    rows = np.concatenate([site.train for site in data.sites.values()])
    rng = np.random.default_rng(seed)
    steps = -(-len(rows) // 64)
    for epoch in range(epochs):
        losses = []
        for step, chosen in enumerate(np.array_split(rng.permutation(rows), steps)):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * cosine_rate(epoch + step / steps, epochs, 0.1 * epochs)
            views = dihedral(torch.from_numpy(data.images[chosen]), rng)
            logits = head(vit(to_float(views, IMAGENET_MEAN, IMAGENET_STD)))
            loss = nn.functional.cross_entropy(logits, torch.from_numpy(data.labels[chosen]), label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        click.echo(
            f"epoch {epoch + 1}/{epochs}: loss {np.mean(losses):.3f}, unseen lesions {judge(vit, head, data):.1%}"
        )
    return vit


def judge(vit: "nn.Module", head: "nn.Module", data: "Federation") -> float:
    """Balanced accuracy on the tune rows of all sites."""
    import numpy as np
    import torch

    from edgefl_trainer.augment import to_float
    from edgefl_trainer.models.architectures import IMAGENET_MEAN, IMAGENET_STD

    rows = np.concatenate([site.tune for site in data.sites.values()])
    answers = []
    for chosen in np.array_split(rows, max(1, len(rows) // 256)):
        images = to_float(torch.from_numpy(data.images[chosen]), IMAGENET_MEAN, IMAGENET_STD)
        with torch.inference_mode():
            answers.append(head(vit(images)).argmax(dim=1).numpy())
    predicted, target = np.concatenate(answers), data.labels[rows]
    return float(np.mean([(predicted[target == k] == k).mean() for k in np.unique(target)]))


if __name__ == "__main__":
    main()
