"""Reverse-mode automatic differentiation: the tape, and the array kernels that operations are made of."""

from mgpu_core.autograd.autocast import autocast
from mgpu_core.autograd.tape import is_recording, no_grad

__all__ = ["autocast", "is_recording", "no_grad"]
