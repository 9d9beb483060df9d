"""Gradients of convolutions, pooling and batch norm as plain operators, against PyTorch's own autograd in float64.

One graph holds all cases, and is run with batches other than the traced one: the batch is free.
"""

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional as F

from edgefl_export.training_graph import export_training_graph

# channels in and out, side, kernel, stride, padding, groups
CASES = {
    "first": (3, 8, 12, 5, 2, 2, 1),  # few channels: one convolution
    "usual": (16, 20, 9, 3, 1, 1, 1),  # a product for each place
    "strided": (16, 24, 10, 3, 2, 1, 1),  # an even side: the last column is reached by fewer places
    "odd": (16, 8, 9, 3, 2, 1, 1),
    "few": (20, 16, 4, 3, 1, 1, 1),  # over the whole batch at once
    "few-strided": (16, 16, 4, 3, 2, 1, 1),
    "one": (18, 16, 6, 1, 1, 0, 1),
    "one-strided": (18, 16, 7, 1, 2, 0, 1),
    "depthwise": (12, 12, 8, 3, 2, 1, 12),
    "grouped": (16, 8, 6, 3, 1, 1, 4),
    "wide": (16, 8, 8, 4, 4, 0, 1),  # windows that do not overlap
}


def losses(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Something of every layer that weighs each output differently."""
    total = torch.zeros((), dtype=tensors["first.x"].dtype)
    for name, (_, _, _, _, stride, padding, groups) in CASES.items():
        found = F.conv2d(tensors[f"{name}.x"], tensors[f"{name}.w"], tensors[f"{name}.b"], stride, padding, 1, groups)
        total = total + (found * found.sin()).sum()
    image = tensors["usual.x"]
    total = total + F.max_pool2d(image, 3, 2, 1).square().sum() + F.avg_pool2d(image, 2).pow(3).sum()
    normal = F.batch_norm(image, None, None, tensors["scale"], tensors["shift"], training=True)
    return total + (normal * normal.cos()).sum()


def values(batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(batch)
    found = {}
    for name, (inputs, outputs, side, kernel, _, _, groups) in CASES.items():
        found[f"{name}.x"] = torch.randn(batch, inputs, side, side, generator=draw)
        found[f"{name}.w"] = torch.randn(outputs, inputs // groups, kernel, kernel, generator=draw) * 0.1
        found[f"{name}.b"] = torch.randn(outputs, generator=draw)
    found |= {"scale": torch.rand(16, generator=draw) + 0.5, "shift": torch.randn(16, generator=draw)}
    return {name: value.to(dtype) for name, value in found.items()}


def gradients(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    leaves = {name: value.detach().requires_grad_(True) for name, value in tensors.items()}
    found = torch.autograd.grad(losses(leaves), list(leaves.values()))
    return {f"d.{name}": value for name, value in zip(leaves, found, strict=True)}


@pytest.mark.slow
def test_gradients_are_pytorchs():
    """docs/design.md 9: convolution_backward as convolutions and products, max-pool backward as scatter-add, batch norm
    with the statistics of the batch; strides, groups, few positions, even and odd sides."""
    example = values(4, torch.float32)
    free = {name: "batch" for name in example if name.endswith(".x")}
    graph = export_training_graph(gradients, example, [f"d.{name}" for name in example], free, "gradients")
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    for batch in (2, 7):
        found = session.run(names, {k: v.numpy() for k, v in values(batch, torch.float32).items()})
        expected = gradients(values(batch, torch.float64))
        for name, got in zip(names, found, strict=True):
            want = expected[name].numpy()
            assert np.linalg.norm(want - got) <= 2e-5 * np.linalg.norm(want), (batch, name)


@pytest.mark.parametrize("change", [{"dilation": 2}, {"transposed": True}])
def test_what_has_no_step_is_refused(change):
    """A convolution that the gradients do not cover makes no graph, rather than a wrong one."""
    from edgefl_export.convolutions import convolution_backward

    image, weight = torch.zeros(2, 16, 8, 8), torch.zeros(16, 16, 3, 3)
    dilation = [change.get("dilation", 1)] * 2
    with pytest.raises(ValueError, match="has no training step"):
        convolution_backward(
            image, image, weight, None, [1, 1], [1, 1], dilation, change.get("transposed", False), [0, 0], 1, [True] * 3
        )
