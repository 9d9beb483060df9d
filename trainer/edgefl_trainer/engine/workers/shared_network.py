"""A frozen network that lies once in memory, however many workers there are.

Guarantees: each process that has the block uses the weights in it, bit for bit those of the network that was shared,
and where PyTorch would have put them: at multiples of `ALIGNED` bytes. The block is memory without a name that goes
with the last process that has it; what lies where is told in words. Source: docs/reference/runs.md, workers.
"""

import json
from ctypes import addressof, c_ubyte
from dataclasses import asdict
from itertools import accumulate
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import torch

from edgefl_trainer.models.backbones import empty_network, freeze
from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.spec import ViTSpec, spec_from_facts

ALIGNED = 64  # bytes


def share(backbone: Backbone) -> tuple[str, Any]:
    """Share a network with processes of this machine; where it lies on the CPU, it uses the shared memory, too.

    Returns:
        JSON that says what the network is, and each tensor's name, type, shape and place; the block, of ctypes.
    """
    kept = {name: value.detach().cpu().numpy() for name, value in backbone.network.state_dict().items()}
    sizes = [-(-array.nbytes // ALIGNED) * ALIGNED for array in kept.values()]
    block = RawArray(c_ubyte, sum(sizes) + ALIGNED)
    places = accumulate(sizes, initial=-addressof(block) % ALIGNED)  # a process maps it anew at the start of a page
    told = [(name, array.dtype.str, array.shape, next(places)) for name, array in kept.items()]
    words = json.dumps({"spec": asdict(backbone.spec), "tensors": told})
    tensors = _tensors(words, block)
    for name, tensor in tensors.items():
        tensor.copy_(torch.from_numpy(kept[name]))
    if backbone.pixel_mean.device.type == "cpu":
        backbone.network.load_state_dict(tensors, assign=True)
    return words, block


def shared_network(words: str, block: Any) -> Backbone:
    """Make the network that was shared; its tensors are those of the block."""
    spec = spec_from_facts(json.loads(words)["spec"])
    with torch.device("meta" if isinstance(spec, ViTSpec) else "cpu"):  # a plain one holds no other tensors
        network = empty_network(spec)
    network.load_state_dict(_tensors(words, block), assign=True)
    return freeze(network, spec)


def _tensors(words: str, block: Any) -> dict[str, torch.Tensor]:
    """The tensors of the block by name."""
    return {
        name: torch.from_numpy(np.ndarray(shape, kind, block, place))
        for name, kind, shape, place in json.loads(words)["tensors"]
    }
