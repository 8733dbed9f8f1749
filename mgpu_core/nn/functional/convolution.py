"""Convolution and pooling of images (N, C, H, W)."""

from __future__ import annotations

from mgpu_core.autograd.autocast import narrowed
from mgpu_core.autograd.kernels import kernels_for
from mgpu_core.autograd.portable.windows import Pair, output_size
from mgpu_core.nn.functional.joining import concat
from mgpu_core.nn.functional.shapes import check_shapes
from mgpu_core.tensor import Tensor, record


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    groups: int = 1,
) -> Tensor:
    """Cross-correlation: x (N, C, H, W) with weight (O, C / groups, kh, kw), plus bias (O,): (N, O, Ho, Wo).

    Ho = (H + 2 padding - kh) // stride + 1, and Wo likewise. With `groups`, the channels of x and of the result are cut
    into that many equal parts, and each part of the result sees one part of x.
    Raises ValueError where the shapes do not fit.
    """
    stride, padding = pair(stride), pair(padding)
    if x.ndim != 4 or weight.ndim != 4 or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        raise ValueError(
            f"conv2d of x {x.shape} with weight {weight.shape} and groups={groups}: expected x (N, C, H, W) and "
            "weight (O, C / groups, kh, kw), with O a multiple of groups"
        )
    check_shapes("conv2d", weight.shape[:1], bias=bias)
    _check_window(x, weight.shape[2:], stride, padding)
    if groups > 1:
        inputs, outputs = weight.shape[1], weight.shape[0] // groups
        parts = [
            conv2d(
                x[:, i * inputs : (i + 1) * inputs],
                weight[i * outputs : (i + 1) * outputs],
                None if bias is None else bias[i * outputs : (i + 1) * outputs],
                stride=stride,
                padding=padding,
            )
            for i in range(groups)
        ]
        return concat(parts, axis=1)
    a, w, b = narrowed(x.data, weight.data, None if bias is None else bias.data)
    x_shape, w_shape = a.shape, w.shape
    kernels = kernels_for(a)
    return record(
        kernels.conv2d(a, w, b, stride, padding),
        (x, lambda g: kernels.conv2d_input_gradient(g, w, x_shape, stride, padding)),
        (weight, lambda g: kernels.conv2d_weight_gradient(g, a, w_shape, stride, padding)),
        (bias, kernels.channel_sums),
    )


def max_pool2d(x: Tensor, kernel_size: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> Tensor:
    """The largest element in each window of kernel_size; windows are `stride` apart, by default side by side.

    The gradient goes to the largest element, the first where several are. Padding never is the largest.
    """
    window, padding = pair(kernel_size), pair(padding)
    stride = window if stride is None else pair(stride)
    _check_window(x, window, stride, padding)
    kernels, shape = kernels_for(x.data), x.shape
    y, taken = kernels.max_pool2d(x.data, window, stride, padding)
    return record(y, (x, lambda g: kernels.max_pool2d_gradient(g, taken, shape, window, stride, padding)))


def avg_pool2d(x: Tensor, kernel_size: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> Tensor:
    """The mean of each window of kernel_size; padding counts as zeros. Windows as in `max_pool2d`."""
    window, padding = pair(kernel_size), pair(padding)
    stride = window if stride is None else pair(stride)
    _check_window(x, window, stride, padding)
    kernels, shape = kernels_for(x.data), x.shape
    y = kernels.avg_pool2d(x.data, window, stride, padding)
    return record(y, (x, lambda g: kernels.avg_pool2d_gradient(g, shape, window, stride, padding)))


def pair(value: int | Pair) -> Pair:
    """(value, value) for one number."""
    return (value, value) if isinstance(value, int) else value


def _check_window(x: Tensor, window: tuple[int, ...], stride: Pair, padding: Pair) -> None:
    if x.ndim != 4 or min(output_size(x.shape[2:], window, stride, padding)) < 1:
        raise ValueError(f"a window of {window} with padding {padding} does not fit on images of shape {x.shape}")
