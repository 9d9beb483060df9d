"""Gradients of convolutional networks out of operators that every runtime has, for graphs.

    convolution             a convolution; over few positions one over the whole batch, (1, C, B, H, W)
    convolution_backward    data: a convolution with the turned kernel; weights: matrix products or one convolution
    native_batch_norm       with the statistics of the batch, and its gradient
    pooling, backward       largest: each gradient added at the place of its maximum; average: shared out

`DECOMPOSITIONS` puts them in the place of PyTorch's own while a step is traced. Each weight gradient takes the form
that measured fastest for its shape (docs/decisions/0027). Guarantees: the result is PyTorch's up to the order of sums,
for every batch size, stride, padding and number of groups; what has no form here is refused. Source: docs/design.md,
section 9; batch norm: arXiv 1502.03167, Algorithm 1 and its gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import conv2d, conv3d

from edgefl_export.errors import ExportError

FEW_POSITIONS = 16  # of an output, at most: images too small to be worth a matrix product each
WIDE = 16  # input channels from which a matrix product for each place of the kernel pays

Maps = Float[Tensor, "B C H W"]
Kernel = Float[Tensor, "K C h w"]
Two = Sequence[int]


def convolution(
    image: Maps,
    weight: Kernel,
    bias: Float[Tensor, " K"] | None,
    stride: Two,
    padding: Two,
    dilation: Two,
    transposed: bool,
    output_padding: Two,
    groups: int,
) -> Float[Tensor, "B K h2 w2"]:
    """Convolve: as it stands, or for few positions over the whole batch at once.

    Raises:
        ExportError: it is a transposed one.
    """
    if weight.ndim != 4:
        return NotImplemented  # type: ignore[no-any-return]
    if transposed:
        raise ExportError("a transposed convolution has no training step; choose another network")
    if not _few(_length(image, weight, stride, padding, dilation)) or groups != 1 or weight.shape[-1] == 1:
        return NotImplemented  # type: ignore[no-any-return]
    found = _over_batch(image, weight, stride, padding, dilation)
    return found if bias is None else found + bias.view(1, -1, 1, 1)


def convolution_backward(
    gradient: Maps,
    image: Maps,
    weight: Kernel,
    bias_sizes: Sequence[int] | None,
    stride: Two,
    padding: Two,
    dilation: Two,
    transposed: bool,
    output_padding: Two,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of a convolution.

    Args:
        mask: which of input, kernel and bias are asked for.

    Returns:
        Gradients of input, kernel and bias; None where not asked for.

    Raises:
        ExportError: it is a transposed or dilated one.
    """
    if transposed or tuple(dilation) != (1, 1):
        raise ExportError("a transposed or dilated convolution has no training step; choose another network")
    data = _data_gradient(gradient, image, weight, stride, padding, groups) if mask[0] else None
    kernel = _weight_gradient(gradient, image, weight, stride, padding, groups) if mask[1] else None
    return data, kernel, gradient.sum(dim=(0, 2, 3)) if mask[2] else None


def _data_gradient(gradient: Maps, image: Maps, weight: Kernel, stride: Two, padding: Two, groups: int) -> Maps:
    """Return the output's gradient, spread out to the steps of the kernel, under the kernel turned by half a turn."""
    height, width = weight.shape[2:]
    if (
        (height, width) == (1, 1) and groups == 1 and not any(padding)
    ):  # a matrix product, then places that nothing looked at
        found = conv2d(gradient, weight.transpose(0, 1))
        return found if tuple(stride) == (1, 1) else _spread(found, stride, image.shape[2:])
    turned = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).flip(3, 4)
    turned = turned.reshape(-1, weight.shape[0] // groups, height, width)
    # of the padded input, so that every position is reached by the same number of places
    sides = [int(image.shape[2 + axis]) + 2 * padding[axis] - weight.shape[2 + axis] + 1 for axis in (0, 1)]
    spread = gradient if tuple(stride) == (1, 1) else _spread(gradient, stride, sides)
    edges = [height - 1 - padding[0], width - 1 - padding[1]]
    for axis, edge in enumerate(edges):
        if edge < 0:  # wider padding than the kernel reaches: places of which only zeros were seen
            spread, edges[axis] = spread.narrow(axis + 2, -edge, spread.shape[axis + 2] + 2 * edge), 0
    if groups == 1 and _few([int(side) for side in image.shape[2:]]):
        return _over_batch(spread, turned, (1, 1), edges, (1, 1))
    return conv2d(spread, turned, padding=edges, groups=groups)


def _weight_gradient(gradient: Maps, image: Maps, weight: Kernel, stride: Two, padding: Two, groups: int) -> Kernel:
    if groups != 1:
        return _grouped_weight_gradient(gradient, image, weight, stride, padding, groups)
    if weight.shape[1] < WIDE:
        return _weight_gradient_as_convolution(gradient, image, weight, stride, padding)
    return _weight_gradient_as_products(gradient, image, weight, stride, padding)


def _weight_gradient_as_convolution(gradient: Maps, image: Maps, weight: Kernel, stride: Two, padding: Two) -> Kernel:
    """Batch and channels change places: images (1, B, C, H, W) under a kernel (K, B, 1, h2, w2) of gradients."""
    kernel = gradient.transpose(0, 1).unsqueeze(2)
    # PyTorch takes no free number of channels, ONNX does.
    sides = [
        side + 2 * edge - step * (length - 1)
        for side, edge, step, length in zip(image.shape[2:], padding, stride, gradient.shape[2:], strict=True)
    ]
    found: Tensor = torch.onnx.ops.symbolic(
        "Conv",
        (image.unsqueeze(0), kernel),
        attrs={"pads": [0, *padding, 0, *padding], "dilations": [1, *stride]},
        dtype=image.dtype,
        shape=(1, weight.shape[0], weight.shape[1], *sides),
    )
    return found.squeeze(0)[:, :, : weight.shape[2], : weight.shape[3]]


def _weight_gradient_as_products(gradient: Maps, image: Maps, weight: Kernel, stride: Two, padding: Two) -> Kernel:
    """For each place of the kernel: gradients (K, B·h2·w2) times what that place saw (B·h2·w2, C)."""
    outputs, channels = weight.shape[:2]
    rows, columns = gradient.shape[2:]
    flat = gradient.transpose(0, 1).reshape(outputs, -1)  # (K, B·h2·w2)
    last = _padded(
        image.permute(0, 2, 3, 1), {1: (padding[0], padding[0]), 2: (padding[1], padding[1])}
    )  # (B, H, W, C)
    parts = []
    for i in range(weight.shape[2]):
        for j in range(weight.shape[3]):
            seen = last[:, i : i + stride[0] * (rows - 1) + 1 : stride[0]]
            seen = seen[:, :, j : j + stride[1] * (columns - 1) + 1 : stride[1]]
            parts.append(torch.mm(flat, seen.reshape(-1, channels)))  # (K, C)
    return torch.stack(parts, dim=2).reshape(weight.shape)


def _grouped_weight_gradient(
    gradient: Maps, image: Maps, weight: Kernel, stride: Two, padding: Two, groups: int
) -> Kernel:
    """For each place of the kernel: what that place saw times the gradients, summed over images and positions."""
    batch = image.shape[0]
    rows, columns = gradient.shape[2:]
    each, inner = weight.shape[0] // groups, weight.shape[1]
    of_group = gradient.reshape(batch, groups, each, rows * columns).permute(1, 2, 0, 3)
    of_group = of_group.reshape(groups, each, -1)  # (groups, K/groups, B·h2·w2)
    wide = _padded(image, {2: (padding[0], padding[0]), 3: (padding[1], padding[1])})
    parts = []
    for i in range(weight.shape[2]):
        for j in range(weight.shape[3]):
            seen = wide[:, :, i : i + stride[0] * (rows - 1) + 1 : stride[0]]
            seen = seen[:, :, :, j : j + stride[1] * (columns - 1) + 1 : stride[1]]
            seen = seen.reshape(batch, groups, inner, rows * columns).permute(1, 0, 3, 2).reshape(groups, -1, inner)
            parts.append(torch.bmm(of_group, seen))  # (groups, K/groups, C/groups)
    return torch.stack(parts, dim=3).reshape(weight.shape)


def _over_batch(image: Maps, weight: Kernel, stride: Two, padding: Two, dilation: Two) -> Maps:
    """One product for all images together: (1, C, B, H, W) under (K, C, 1, h, w)."""
    found = conv3d(
        image.transpose(0, 1).unsqueeze(0),
        weight.unsqueeze(2),
        stride=(1, *stride),
        padding=(0, *padding),
        dilation=(1, *dilation),
    )
    return found.squeeze(0).transpose(0, 1)


def _spread(image: Maps, stride: Two, sides: Sequence[int]) -> Maps:
    """Put zeros between neighbours: position p goes to stride·p, in a map of these sides."""
    for axis, (step, side) in enumerate(zip(stride, sides, strict=True), start=2):
        if step == 1:
            continue
        apart = image.unsqueeze(axis + 1)
        apart = _padded(apart, {axis + 1: (0, step - 1)}).flatten(axis, axis + 1)
        length = apart.shape[axis]
        if length < side:
            apart = _padded(apart, {axis: (0, side - length)})
        image = apart if length <= side else apart.narrow(axis, 0, side)
    return image


def _length(image: Maps, weight: Kernel, stride: Two, padding: Two, dilation: Two) -> list[int]:
    return [
        (int(image.shape[2 + a]) + 2 * padding[a] - dilation[a] * (int(weight.shape[2 + a]) - 1) - 1) // stride[a] + 1
        for a in (0, 1)
    ]


def _few(sides: Sequence[int]) -> bool:
    return sides[0] * sides[1] <= FEW_POSITIONS


def batch_norm(
    image: Maps,
    weight: Float[Tensor, " C"] | None,
    bias: Float[Tensor, " C"] | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> tuple[Maps, Float[Tensor, " C"], Float[Tensor, " C"]]:
    """Normalise with the statistics of the batch.

    Args:
        running_mean: None; running statistics are moved by whoever asked (`moments`).

    Returns:
        The output; mean and inverse deviation, for the gradient.

    Raises:
        ExportError: it uses running statistics, or lacks scale or shift.
    """
    if not training or running_mean is not None or weight is None or bias is None:
        raise ExportError("batch norm of a training step must use the batch's statistics, a scale and a shift")
    mean, variance = moments(image)
    inverse = torch.rsqrt(variance + epsilon)
    output = (image - _each(mean)) * _each(weight * inverse) + _each(bias)
    return output, mean, inverse


def moments(image: Maps) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
    """Return mean and biased variance of each channel."""
    mean = image.mean(dim=(0, 2, 3))
    away = image - _each(mean)
    return mean, (away * away).mean(dim=(0, 2, 3))


def batch_norm_backward(
    gradient: Maps,
    image: Maps,
    weight: Float[Tensor, " C"],
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Float[Tensor, " C"],
    inverse: Float[Tensor, " C"],
    training: bool,
    epsilon: float,
    mask: Sequence[bool],
) -> tuple[Maps, Float[Tensor, " C"], Float[Tensor, " C"]]:
    """Return the gradients of `batch_norm`: of input, scale and shift."""
    count = image.shape[0] * image.shape[2] * image.shape[3]
    away = image - _each(mean)
    shift = gradient.sum(dim=(0, 2, 3))
    scale = (gradient * away).sum(dim=(0, 2, 3)) * inverse
    factor = weight * inverse
    # dx = γσ⁻¹·(g − Σg/n − x̂·Σ(g·x̂)/n), the sums gathered into one factor and one offset of each channel
    data = gradient * _each(factor) - away * _each(factor * inverse * scale / count) - _each(factor * shift / count)
    return data, scale, shift


def _padded(image: Float[Tensor, "*axes"], widths: Mapping[int, tuple[int, int]]) -> Float[Tensor, "*wider"]:
    """Put zeros before and after, by axis; PyTorch's own takes no free batch."""
    around = [widths.get(axis, (0, 0)) for axis in range(image.ndim)]
    if not any(map(any, around)):
        return image
    ends = torch.tensor([before for before, _ in around] + [after for _, after in around])
    shape = [side + before + after for side, (before, after) in zip(image.shape, around, strict=True)]
    return torch.onnx.ops.symbolic("Pad", (image, ends), dtype=image.dtype, shape=shape)


def _each(values: Float[Tensor, " C"]) -> Float[Tensor, "one C one one"]:
    return values.view(1, -1, 1, 1)


def max_pool_backward(
    gradient: Maps,
    image: Maps,
    kernel: Two,
    stride: Two,
    padding: Two,
    dilation: Two,
    ceil_mode: bool,
    indices: Int[Tensor, "B C h2 w2"],
) -> Maps:
    """Add each gradient at the place that its window's maximum came from.

    Args:
        kernel: of no meaning here, nor are the four that follow: the places say it all.
        indices: places of the maxima in the flattened maps.
    """
    batch, channels, height, width = image.shape
    flat = torch.zeros_like(image).reshape(batch, channels, height * width)
    flat = flat.scatter_add(2, indices.reshape(batch, channels, -1), gradient.reshape(batch, channels, -1))
    return flat.reshape(batch, channels, height, width)


def average_pool_backward(
    gradient: Maps,
    image: Maps,
    kernel: Two,
    stride: Two,
    padding: Two,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Maps:
    """Share each gradient out to the places of its window; windows neither overlap nor reach over the edge.

    Args:
        stride: of the window; empty for the same.
        divisor: in place of the number of places.

    Raises:
        ExportError: windows overlap, leave gaps or reach over the edge.
    """
    height, width = kernel
    reached = (gradient.shape[2] * height, gradient.shape[3] * width)
    beyond = any(end > side for end, side in zip(reached, image.shape[2:], strict=True))
    if (list(stride) or list(kernel)) != list(kernel) or any(padding) or beyond:
        raise ExportError("average pooling of overlapping or cut windows has no training step; choose another network")
    shared = gradient.unsqueeze(3).unsqueeze(5) / (divisor or height * width)
    batch, channels, rows, columns = gradient.shape
    whole = shared.expand(batch, channels, rows, height, columns, width).reshape(batch, channels, *reached)
    return _padded(whole, {2: (0, image.shape[2] - reached[0]), 3: (0, image.shape[3] - reached[1])})


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.convolution.default: convolution,
    torch.ops.aten.convolution_backward.default: convolution_backward,
    torch.ops.aten.native_batch_norm.default: batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: batch_norm_backward,
    torch.ops.aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    torch.ops.aten.avg_pool2d_backward.default: average_pool_backward,
}
