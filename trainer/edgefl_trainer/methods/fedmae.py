"""FedMAE. "Federated Self-supervised Learning for Skin Lesions", arXiv 2208.11278, section IV; MAE, arXiv 2111.06377.

    server sends all weights but the class token to every site        broadcast
    site c: E epochs of masked autoencoding, its own class token       local_round
            z_cls stays at the site through all rounds
    server: theta = sum_c n_c/n theta_c                                aggregate
    at the end: z_cls = sum_c n_c/n z_cls,c, once                      the two `final` phases

`keep_local` names another part than z_cls, or none: the rows of its Table V.

Differs from the paper: the loss counts hidden patches only (its eq. 7 sums over the image, its text follows MAE);
crops are also turned and mirrored; optimiser moments start afresh each round while the schedule goes on; rounds and
warm-up are not printed there (defaults: 10 % of all epochs, at most 40). What other rows of Table V do at the end is
not printed either: whatever stayed at the sites is averaged once, as the class token is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from edgefl_protocol import Payload
from edgefl_protocol.rules.batches import batches_of
from edgefl_protocol.rules.rates import cosine_rate
from edgefl_trainer.augment import random_crops, to_float
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Arrays, Declaration, Phase, Presets, Site, State, Task
from edgefl_trainer.errors import SettingError, TrainingError
from edgefl_trainer.learning import method_parts
from edgefl_trainer.learning.batches import autocast, read_ahead
from edgefl_trainer.learning.epochs import run_epochs
from edgefl_trainer.learning.named_arrays import as_arrays, as_tensors
from edgefl_trainer.learning.unlabelled.self_supervised import BACKBONE, average, encoder_of
from edgefl_trainer.models.backbones import architecture_of
from edgefl_trainer.models.mae import MaskedAutoencoder
from edgefl_trainer.models.spec import require_vit

DECODER_HEAD = 32  # width of a decoder head
MOST_WARMUP = 40.0  # epochs
POSITIONS = "backbone.pos_embed"  # a table, not learned
KeepLocal = Literal["class_token", "none", "decoder", "patch_embed", "decoder_embed"]
PARTS: Mapping[KeepLocal, tuple[str, ...]] = {  # Table V: how the names of the tensors begin that stay at the sites
    "class_token": ("backbone.cls_token",),  # W/o Class Token: the method
    "none": (),  # Encoder+Decoder
    "decoder": ("decoder.", "mask_token"),  # W/o Decoder
    "patch_embed": ("backbone.patch_embed.",),  # W/o Linear Projection
    "decoder_embed": ("decoder.embed.",),  # W/o Decoder Projection
}

PRESETS: Presets = {
    "tiny": {
        "rounds": 2,
        "epochs": 1,
        "images_per_site": 240,
        "hyper": {"batch": 64, "lr": 1e-3, "decoder_width": 64, "decoder_depth": 1},
    },
    "bench84": {
        "rounds": 20,
        "epochs": 1,
        "images_per_site": 600,
        "backbone": "vit:192x12/12",
        "hyper": {"batch": 64, "lr": 1e-3, "decoder_width": 128, "decoder_depth": 4},
    },
    "paper": {"rounds": 100, "epochs": 10, "backbone": "vit:768x12/16", "image_px": 224},
}


@dataclass(frozen=True, kw_only=True)
class FedMAE:
    """Federated masked autoencoding with a class token that stays at home until the end.

    For many pictures without labels, where a vision transformer is to be learned.
    """

    family: ClassVar[str] = "self-supervised"
    paper: ClassVar[str] = "arXiv 2208.11278"
    travels: ClassVar[tuple[str, ...]] = ("weights",)
    needs_labels: ClassVar[bool] = False
    declares: ClassVar[Declaration] = Declaration(encoder=encoder_of, presets=lambda backbone, hyper: PRESETS)

    keep_local: KeepLocal = "class_token"  # what is not averaged before the end
    mask_ratio: float = 0.75  # share of hidden patches (arXiv 2111.06377)
    norm_pix: bool = True  # whether each target patch is standardised (arXiv 2111.06377; default ours)
    lr: float = 1.5e-4  # peak learning rate of AdamW
    weight_decay: float = 0.05  # weight decay of AdamW; none on one-dimensional tensors (arXiv 2111.06377)
    batch: int = 256  # images of a step
    # share of all epochs in which the rate rises, at most 40 epochs (arXiv 2111.06377; default ours)
    warmup: float = 0.1
    smallest_crop: float = 0.2  # smallest share of the area a view shows (arXiv 2111.06377)
    decoder_width: int = 512  # width of the decoder, which stays behind (arXiv 2111.06377)
    decoder_depth: int = 8  # blocks of the decoder (arXiv 2111.06377)

    def __post_init__(self) -> None:
        width = self.decoder_width
        check_bounds(
            self,
            mask_ratio=(0.01 <= self.mask_ratio <= 0.99, "0.01 to 0.99"),
            lr=(0 < self.lr <= 1, "above 0, at most 1"),
            weight_decay=(0 <= self.weight_decay <= 1, "0 to 1"),
            batch=(self.batch >= 1, "1 or more"),
            warmup=(0 <= self.warmup <= 1, "0 to 1"),
            smallest_crop=(0.01 <= self.smallest_crop <= 1, "0.01 to 1"),
            decoder_width=(0 < width <= 4096 and width % DECODER_HEAD == 0, "a multiple of 32 up to 4096"),
            decoder_depth=(1 <= self.decoder_depth <= 48, "1 to 48"),
        )

    def phases(self, rounds: int) -> Sequence[Phase]:
        """Plan R rounds, then one exchange that collects what stayed local and one that hands out its mean."""
        train = [Phase("train", r) for r in range(1, rounds + 1)]
        final = [Phase("final", rounds + 1), Phase("final", rounds + 2)]
        return train if self.keep_local == "none" else [*train, *final]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with weights of a fresh network, or of the backbone to learn on."""
        model = self._model(task)
        if model.kept(self.mask_ratio) == 0:
            raise SettingError(f"mask_ratio is {self.mask_ratio} and hides all {model.tokens} patches: lower it.")
        model.initialise(task.seed)
        arrays = {**as_arrays(dict(model.named_parameters())), **_initial(task)}
        return State(self._split(arrays)[0])

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """Send the averaged weights; in the `final` phases nothing, then the mean of what stayed local."""
        shared, kept = self._split(state.arrays)
        return dict.fromkeys(sites, Payload(shared if phase.kind == "train" else kept, {}))

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Learn E epochs from the averaged weights and the site's own part; at the end send that part."""
        n_train = len(site.unlabelled)
        if broadcast.scalars["phase"] == "final":
            mean = self._split(broadcast.arrays)[1]
            return (State(mean), Payload({}, {})) if mean else (state, Payload(state.arrays, {"n_train": n_train}))
        model = self._model(site.task)
        model.initialise(site.task.seed)  # local parts start equal; everything else is overwritten
        model.to(site.device)  # only now: the draws come from a generator of the processor
        known = self._split(_initial(site.task))[1]
        received = as_tensors({**known, **broadcast.arrays, **state.arrays}, torch.device("cpu"))
        missing, unknown = model.load_state_dict(received, strict=False)
        if unknown or any(name != POSITIONS and not self._stays(name) for name in missing):
            raise TrainingError(
                f"the broadcast lacks some tensors or holds others: {', '.join(sorted({*missing, *unknown})[:3])}."
            )
        self._train(model, site, int(broadcast.scalars["round"]))
        shared, kept = self._split(as_arrays(dict(model.named_parameters())))
        return State(kept), Payload(shared, {"n_train": n_train})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Average weighted by the sites' numbers of images; at the end over the sites that have learned a part."""
        return average(state, replies)

    predictor = method_parts.no_predictor

    def _stays(self, name: str) -> bool:
        return name.startswith(PARTS[self.keep_local])

    def _split(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        """Split tensors into those averaged each round and those a site keeps; the position table is in neither."""
        learned = {name: value for name, value in arrays.items() if name != POSITIONS}
        kept = {name: value for name, value in learned.items() if self._stays(name)}
        return {name: value for name, value in learned.items() if name not in kept}, kept

    def _model(self, task: Task) -> MaskedAutoencoder:
        return MaskedAutoencoder(
            architecture_of(require_vit(task.backbone, "fedmae")),
            decoder_width=self.decoder_width,
            decoder_depth=self.decoder_depth,
        )

    def _train(self, model: MaskedAutoencoder, site: Site, round_: int) -> None:
        """E epochs; reports the mean loss of each."""
        spec, epochs = require_vit(site.task.backbone, "fedmae"), site.task.epochs
        total = site.task.rounds * epochs

        def batches(epoch: int) -> tuple[int, Iterator[tuple[Tensor, Tensor]]]:
            rng = site.rng("views", round_, epoch)
            parts = batches_of(site.epoch_order(site.unlabelled, round_, epoch), self.batch)
            return len(parts), (drawn(images, rng) for images in read_ahead(site, site.unlabelled, parts))

        def drawn(images: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
            """Draw views, and the noise that hides patches."""
            views = random_crops(images, rng, self.smallest_crop)
            return views, torch.from_numpy(rng.random((len(views), spec.tokens), dtype=np.float32)).to(site.device)

        def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
            views, noise = batch
            with autocast(site):
                return model(to_float(views, spec.mean, spec.std), noise, self.mask_ratio, self.norm_pix)  # type: ignore[no-any-return]

        def rate(done: float) -> float:
            return self.lr * cosine_rate(done, total, min(MOST_WARMUP, self.warmup * total))

        for sums in run_epochs(
            site, round_, range(epochs), batches, loss_of, self._optimizer(model), rate=rate, tells_wait=True
        ):
            site.report({"summary": 1, "loss": sums.mean_of_steps})

    def _optimizer(self, model: MaskedAutoencoder) -> torch.optim.Optimizer:
        learned = [value for value in model.parameters() if value.requires_grad]
        plain = [value for value in learned if value.ndim <= 1]
        decayed = [value for value in learned if value.ndim > 1]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)


def _initial(task: Task) -> Arrays:
    """The encoder of a backbone to learn on; nothing where there is none."""
    return {f"{BACKBONE}{name}": value for name, value in task.initial.items()}
