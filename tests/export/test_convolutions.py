"""Gradients of convolutions, pooling and batch norm as plain operators, against PyTorch's own autograd in float64.

One graph holds all cases, and is run with batches other than the traced one: the batch is free.
"""

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional as F

from edgefl_export.errors import ExportError
from edgefl_export.graphs import convolutions
from edgefl_export.graphs.training import export_training_graph

# channels in and out, side, kernel, stride, padding, groups
CASES = {
    "first": (3, 8, 12, 5, 2, 2, 1),  # few channels: one convolution
    "usual": (16, 20, 9, 3, 1, 1, 1),  # a product for each place
    "strided": (16, 24, 10, 3, 2, 1, 1),  # an even side: the last column is reached by fewer places
    "odd": (8, 8, 9, 3, 2, 1, 1),
    "few": (8, 16, 4, 3, 1, 1, 1),  # over the whole batch at once
    "few-strided": (8, 16, 4, 3, 2, 1, 1),
    "one": (18, 16, 6, 1, 1, 0, 1),
    "one-strided": (18, 16, 7, 1, 2, 0, 1),
    "depthwise": (12, 12, 8, 3, 2, 1, 12),
    "grouped": (16, 8, 7, 2, 1, 0, 4),
    "wide": (16, 8, 8, 2, 2, 0, 1),  # windows that do not overlap
}


def losses(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Something of every layer that weighs each output differently."""
    total = torch.zeros((), dtype=tensors["first.x"].dtype)
    for name, (_, _, _, _, stride, padding, groups) in CASES.items():
        found = F.conv2d(tensors[f"{name}.x"], tensors[f"{name}.w"], tensors[f"{name}.b"], stride, padding, 1, groups)
        total = total + (found * found.sin()).sum()
    image = tensors["usual.x"]
    total = total + F.max_pool2d(image, 3, 2, 1).square().sum() + F.avg_pool2d(image, 2).pow(3).sum()
    weighed = F.max_pool2d(tensors["tied.x"], 3, 2, 1)  # equal pixels: the gradient goes to one of them, the first
    total = total + (weighed * torch.arange(weighed[0].numel()).view(weighed[0].shape)).sum()
    normal = F.batch_norm(image, None, None, tensors["scale"], tensors["shift"], training=True)
    return total + (normal * normal.cos()).sum()


def values(batch: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(batch)
    found = {}
    for name, (inputs, outputs, side, kernel, _, _, groups) in CASES.items():
        found[f"{name}.x"] = torch.randn(batch, inputs, side, side, generator=draw)
        found[f"{name}.w"] = torch.randn(outputs, inputs // groups, kernel, kernel, generator=draw) * 0.1
        found[f"{name}.b"] = torch.randn(outputs, generator=draw)
    found["tied.x"] = torch.randint(0, 3, (batch, 4, 9, 8), generator=draw).float()
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


NO_STEP = {
    "dilated": lambda x, w: F.conv2d(x, w, padding=2, dilation=2),
    "transposed": lambda x, w: F.conv_transpose2d(x, w, padding=1),
    "overlapping average": lambda x, w: F.avg_pool2d(x * w.sum(), 3, 1),
    "average over the edge": lambda x, w: F.avg_pool2d(x * w.sum(), 3, 3, ceil_mode=True),
    "fixed statistics": lambda x, w: F.batch_norm(x * w.sum(), w[0, :, 0, 0], w[0, :, 0, 0].exp()),
}


@pytest.mark.parametrize("way", NO_STEP)
def test_what_has_no_step_is_refused(way):
    """A network whose gradients are not covered makes no graph, and a sentence, rather than a wrong one."""

    def step(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weight = tensors["w"].detach().requires_grad_(True)
        loss = NO_STEP[way](tensors["x"], weight).square().sum()
        return {"d.w": torch.autograd.grad(loss, weight)[0]}

    given = {"x": torch.ones(4, 16, 8, 8), "w": torch.ones(16, 16, 3, 3)}
    with pytest.raises(ExportError, match="training step"):
        export_training_graph(step, given, ["d.w"], {"x": "batch"})


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize(
    ("kernel", "padding"), [((1, 1), (1, 1)), ((1, 1), (0, 2)), ((3, 1), (1, 2)), ((2, 3), (2, 3))]
)
def test_padding_wider_than_the_kernel_reaches(groups, stride, kernel, padding, monkeypatch):
    """Against PyTorch's autograd in float64: outputs that saw only zeros have no part in the input's gradient."""
    monkeypatch.setattr(
        convolutions,
        "_padded",
        lambda x, widths: F.pad(x, [n for axis in reversed(range(x.ndim)) for n in widths.get(axis, (0, 0))]),
    )
    image = torch.randn(3, 16, 9, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 16 // groups, *kernel, dtype=torch.float64, requires_grad=True)
    found = F.conv2d(image, weight, None, stride, padding, 1, groups)
    gradient = torch.randn_like(found)
    expected = torch.autograd.grad(found, (image, weight), gradient)
    with torch.no_grad():
        got = convolutions.convolution_backward(
            gradient, image, weight, None, stride, padding, (1, 1), False, (0, 0), groups, [True, True, False]
        )
    assert all(torch.allclose(want, one) for want, one in zip(expected, got[:2], strict=True))
