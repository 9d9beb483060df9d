"""Federated logistic regression on the class token of a frozen network: McMahan et al., arXiv 1602.05629, algorithm 1.

server sends the head                                   broadcast
site c: E epochs of SGD from it                         local_round
server: head = sum_c n_c/n head_c                       aggregate
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, Predictor, Site, State, Task
from edgefl_trainer.learning.averaging import sample_weights, weighted_mean
from edgefl_trainer.learning.batches import LabelledBatch, labelled_batches
from edgefl_trainer.learning.epochs import run_epochs
from edgefl_trainer.learning.named_arrays import as_arrays

HEAD = ("head.weight", "head.bias")


@dataclass(frozen=True, kw_only=True)
class HeadAvg:
    """One linear head for all sites."""

    family: ClassVar[str] = "heads"
    paper: ClassVar[str] = "arXiv 1602.05629"
    travels: ClassVar[tuple[str, ...]] = ("weights",)
    needs_labels: ClassVar[bool] = True

    lr: float = 0.1
    batch: int = 8

    def phases(self, rounds: int) -> Sequence[Phase]:
        return [Phase("train", r) for r in range(1, rounds + 1)]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        classes = len(task.classes)
        zeros = np.zeros((classes, task.backbone.width), np.float32), np.zeros(classes, np.float32)
        return State(dict(zip(HEAD, zeros, strict=True)))

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        return dict.fromkeys(sites, Payload(state.arrays, {}))

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        head = {name: torch.tensor(broadcast.arrays[name], requires_grad=True) for name in HEAD}
        optimizer, round_ = torch.optim.SGD(head.values(), lr=self.lr), int(broadcast.scalars["round"])

        def batches(epoch: int) -> tuple[int, Iterator[LabelledBatch]]:
            return labelled_batches(site, self.batch, "none", round_, epoch)

        def loss_of(batch: LabelledBatch) -> torch.Tensor:
            images, target, _ = batch
            seen = site.backbone(site.backbone.normalise(images)).readout("cls")
            return cross_entropy(seen @ head["head.weight"].T + head["head.bias"], target)

        for sums in run_epochs(site, round_, range(site.task.epochs), batches, loss_of, optimizer):
            site.report({"summary": 1, "loss": sums.mean_of_images})
        return State(), Payload(as_arrays(head), {"n_train": len(site.train)})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        return State(weighted_mean(replies, sample_weights(replies)))

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        return None
