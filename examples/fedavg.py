"""FedAvg over a frozen network: both halves, and the loop around them. McMahan et al., arXiv 1602.05629, algorithm 1.

server sends the head w                                      broadcast
site k: E epochs of SGD on its own pictures, from w          local_round
server: w = sum_k n_k/n w_k                                  aggregate
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn, optim

from edgefl_protocol import Payload
from edgefl_trainer.contract import Examples, Phase, Predictor, Site, State, Task
from edgefl_trainer.data import load_federation
from edgefl_trainer.engine.models import predict
from edgefl_trainer.learning.averaging import sample_weights, weighted_mean
from edgefl_trainer.learning.named_arrays import as_arrays, as_tensors
from edgefl_trainer.method_halves import stamped
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions


class FedAvg:
    """One linear head for all sites: the mean of what each learned, weighted by its number of pictures."""

    family, paper, needs_labels, travels = "example", "arXiv 1602.05629", True, ("weights",)

    def phases(self, rounds: int) -> Sequence[Phase]:
        return [Phase("train", number) for number in range(1, rounds + 1)]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        k, width = len(task.classes), task.backbone.width
        return State({"head.weight": np.zeros((k, width), np.float32), "head.bias": np.zeros(k, np.float32)})

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        return dict.fromkeys(sites, Payload(state.arrays))

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        head = {name: value.requires_grad_() for name, value in as_tensors(broadcast.arrays, site.device).items()}
        module, optimizer = self.module(site), optim.SGD(head.values(), lr=0.1)
        for epoch in range(site.task.epochs):
            for images, target in site.batches(site.train, 32, int(broadcast.scalars["round"]), epoch):
                features = module.features(module.output(images, head, need_attention=False), head).detach()  # frozen
                optimizer.zero_grad()
                nn.functional.cross_entropy(module.logits(features, head), target).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return State(), Payload(as_arrays(head), {"n_train": len(site.train)})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        return State(weighted_mean(replies, sample_weights(replies)))

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor:
        return Predictor(self.module(site), {**broadcast.arrays, "temperature": np.ones((), np.float32)}, site.seen)

    def module(self, site: Site) -> ScoreModule:
        assert site.backbone is not None
        return ScoreModule(site.backbone, ScoreOptions(readout="mean", output="softmax", prompts=()))


def main(rounds: int = 5, images: int = 60) -> None:
    backbone, method, sites = load_backbone("drawn-lesions-84"), FedAvg(), {}
    data = load_federation([f"lesions:sites=3,images={images}"], image_px=backbone.spec.image_px)
    task = Task(name="all", classes=data.classes, backbone=backbone.spec, rounds=rounds, epochs=2, seed=0)
    for name, rows in data.sites.items():
        train, test = (Examples(data.images, data.labels, part) for part in (rows.train, rows.test))
        sites[name] = Site(name=name, task=task, backbone=backbone, train=train, tune=test, unlabelled=train)
    server = method.start(task, sorted(sites))
    for phase in method.phases(rounds):  # `LocalEngine.run` does this, and keeps books
        sent = {name: stamped(one, phase, rounds) for name, one in method.broadcast(server, phase, list(sites)).items()}
        replies = {name: method.local_round(site, State(), sent[name])[1] for name, site in sites.items()}
        server, right = method.aggregate(server, phase, replies), []
        for name, broadcast in method.broadcast(server, phase, list(sites)).items():
            model, judged = method.predictor(sites[name], State(), broadcast), sites[name].tune
            right.extend(predict(model, data.images[judged.rows]).predicted == judged.targets)
        print(f"round {phase.round}: accuracy {np.mean(right):.3f} of {len(right)} test pictures")


if __name__ == "__main__":
    main()
