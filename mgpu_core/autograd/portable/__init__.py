"""The layers' kernels in terms of the array API alone: for any array library, and the reference for `cpu`.

Images are (N, C, H, W). A window of kh x kw elements moves by `stride` over an image with `padding` around it; both
are pairs, for rows and columns.
"""

from mgpu_core.autograd.portable.activation import (
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
from mgpu_core.autograd.portable.alignment import ctc, ctc_gradient
from mgpu_core.autograd.portable.attention import self_attention, self_attention_gradient
from mgpu_core.autograd.portable.channels import (
    channel_moments,
    channel_products,
    channel_sums,
    combine_channels,
    normalize_channels,
)
from mgpu_core.autograd.portable.convolution import conv2d, conv2d_input_gradient, conv2d_weight_gradient
from mgpu_core.autograd.portable.optimizer import adamw, sgd
from mgpu_core.autograd.portable.pooling import avg_pool2d, avg_pool2d_gradient, max_pool2d, max_pool2d_gradient
from mgpu_core.autograd.portable.recurrent import gru_step, gru_step_gradient, lstm_step, lstm_step_gradient
from mgpu_core.autograd.portable.rows import (
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
