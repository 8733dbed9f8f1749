"""The layers' kernels for NumPy arrays of float32 and float64: compiled loops around BLAS's matrix product.

The same functions as in `portable`, which says what they compute. Images are (N, C, H, W) outside, and channels last
in memory (what PyTorch calls channels_last): results are transposed views of (N, H, W, C) arrays, so that a chain
of image layers never reorders, loops over channels are contiguous, and a convolution is a plain matrix product, or
a kernel of our own where that is faster (`convolution`). An input laid out otherwise is copied once.

Everything runs in a fixed order: the same input gives the same bits.
"""

from mgpu_core.autograd.cpu.activation import (
    gelu,
    gelu_gradient,
    keep,
    log_softmax,
    log_softmax_gradient,
    relu,
    relu_gradient,
    softmax,
    softmax_gradient,
)
from mgpu_core.autograd.cpu.alignment import ctc, ctc_gradient
from mgpu_core.autograd.cpu.attention import self_attention, self_attention_gradient
from mgpu_core.autograd.cpu.channels import (
    channel_moments,
    channel_products,
    channel_sums,
    combine_channels,
    normalize_channels,
)
from mgpu_core.autograd.cpu.convolution import conv2d, conv2d_input_gradient, conv2d_weight_gradient
from mgpu_core.autograd.cpu.optimizer import adamw, sgd
from mgpu_core.autograd.cpu.pooling import avg_pool2d, avg_pool2d_gradient, max_pool2d, max_pool2d_gradient
from mgpu_core.autograd.cpu.recurrent import gru_step, gru_step_gradient, lstm_step, lstm_step_gradient
from mgpu_core.autograd.cpu.rows import (
    add_rows,
    cross_entropy,
    cross_entropy_gradient,
    layer_norm,
    layer_norm_gradient,
)

__all__ = [
    "adamw",
    "add_rows",
    "avg_pool2d",
    "avg_pool2d_gradient",
    "channel_moments",
    "channel_products",
    "channel_sums",
    "combine_channels",
    "conv2d",
    "conv2d_input_gradient",
    "conv2d_weight_gradient",
    "cross_entropy",
    "cross_entropy_gradient",
    "ctc",
    "ctc_gradient",
    "gelu",
    "gelu_gradient",
    "gru_step",
    "gru_step_gradient",
    "keep",
    "layer_norm",
    "layer_norm_gradient",
    "log_softmax",
    "log_softmax_gradient",
    "lstm_step",
    "lstm_step_gradient",
    "max_pool2d",
    "max_pool2d_gradient",
    "normalize_channels",
    "relu",
    "relu_gradient",
    "self_attention",
    "self_attention_gradient",
    "sgd",
    "softmax",
    "softmax_gradient",
]
