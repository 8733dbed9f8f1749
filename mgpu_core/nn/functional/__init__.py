"""The layers' functions, without the layers' state: tensors in, tensors out.

Images are (N, C, H, W); axis 0 is the batch everywhere, and may have length zero.
"""

from mgpu_core.nn.functional.activation import gelu, log_softmax, relu, sigmoid, softmax, tanh
from mgpu_core.nn.functional.attention import self_attention
from mgpu_core.nn.functional.convolution import avg_pool2d, conv2d, max_pool2d
from mgpu_core.nn.functional.dropout import dropout
from mgpu_core.nn.functional.joining import concat, pad, stack
from mgpu_core.nn.functional.linear import embedding, linear
from mgpu_core.nn.functional.loss import cross_entropy, ctc_loss
from mgpu_core.nn.functional.normalization import batch_norm, layer_norm
from mgpu_core.nn.functional.recurrent import gru, lstm

__all__ = [
    "avg_pool2d",
    "batch_norm",
    "concat",
    "conv2d",
    "cross_entropy",
    "ctc_loss",
    "dropout",
    "embedding",
    "gelu",
    "gru",
    "layer_norm",
    "linear",
    "log_softmax",
    "lstm",
    "max_pool2d",
    "pad",
    "relu",
    "self_attention",
    "sigmoid",
    "softmax",
    "stack",
    "tanh",
]
