"""Layers: modules that hold parameters, and the functions that they apply."""

from mgpu_core.nn import functional
from mgpu_core.nn.layers import (
    GELU,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Embedding,
    Flatten,
    LayerNorm,
    Linear,
    MaxPool2d,
    ReLU,
    Sigmoid,
    Tanh,
    synchronize_batch_norm,
)
from mgpu_core.nn.module import Module, Parameter, Sequential
from mgpu_core.nn.recurrent import GRU, LSTM
from mgpu_core.nn.resnet import GlobalAvgPool2d, ResidualBlock, resnet18, resnet20
from mgpu_core.nn.transformer import MultiHeadAttention, PositionalEmbedding, TransformerBlock

__all__ = [
    "GELU",
    "GRU",
    "LSTM",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "Conv2d",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAvgPool2d",
    "LayerNorm",
    "Linear",
    "MaxPool2d",
    "Module",
    "MultiHeadAttention",
    "Parameter",
    "PositionalEmbedding",
    "ReLU",
    "ResidualBlock",
    "Sequential",
    "Sigmoid",
    "Tanh",
    "TransformerBlock",
    "functional",
    "resnet18",
    "resnet20",
    "synchronize_batch_norm",
]
