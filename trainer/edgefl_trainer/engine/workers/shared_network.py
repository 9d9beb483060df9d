"""A frozen network that lies once in memory, however many workers there are.

Guarantees: each process that has the block uses the weights in it, bit for bit those of the network that was shared,
and where PyTorch would have put them: at multiples of `ALIGNED` bytes. The block is memory without a name that goes
with the last process that has it; what lies where is told in words. Source: docs/reference/runs.md, workers.
"""

import json
from ctypes import addressof, c_ubyte
from dataclasses import asdict
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

import numpy as np
import torch

from edgefl_trainer.models.backbones import build_network, freeze
from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.spec import spec_from_facts

ALIGNED = 64  # bytes


class SharedNetwork(NamedTuple):
    """What a worker is given of a network."""

    words: str  # JSON: what the network is, and each tensor's name, type, shape and place
    block: Any  # of ctypes

    def open(self) -> Backbone:
        """Make the network; its tensors are those of the block."""
        spec = spec_from_facts(json.loads(self.words)["spec"])
        network = build_network(spec, 0)
        network.load_state_dict(self.tensors(), assign=True)
        return freeze(network, spec)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the block by name."""
        return {
            name: torch.from_numpy(np.ndarray(shape, kind, self.block, place))
            for name, kind, shape, place in json.loads(self.words)["tensors"]
        }


def share(backbone: Backbone) -> SharedNetwork:
    """Share a network with processes of this machine; where it lies on the CPU, it uses the shared memory, too."""
    kept = {name: value.detach().cpu().numpy() for name, value in backbone.network.state_dict().items()}
    sizes = [-(-array.nbytes // ALIGNED) * ALIGNED for array in kept.values()]
    block = RawArray(c_ubyte, sum(sizes) + ALIGNED)
    first = -addressof(block) % ALIGNED  # a process maps it anew at the start of a page
    places = [first + sum(sizes[:i]) for i in range(len(sizes))]
    told = [
        (name, array.dtype.str, array.shape, place) for (name, array), place in zip(kept.items(), places, strict=True)
    ]
    shared = SharedNetwork(json.dumps({"spec": asdict(backbone.spec), "tensors": told}), block)
    tensors = shared.tensors()
    for name, tensor in tensors.items():
        tensor.copy_(torch.from_numpy(kept[name]))
    if backbone.pixel_mean.device.type == "cpu":
        backbone.network.load_state_dict(tensors, assign=True)
    return shared
