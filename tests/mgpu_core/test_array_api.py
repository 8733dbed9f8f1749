"""Nothing but the array API: the same results on its strict implementation, which has nothing else, as on NumPy."""

import numpy as np
import pytest

from mgpu_core import Tensor, optim
from mgpu_core.autograd.memory import keep_freed_memory
from mgpu_core.nn import functional as F
from mgpu_core.parallel import clip_grad_norm

FUNCTIONS = {
    "arithmetic": (lambda a, b: (a * 2 + 1) / b - (-a) ** 2 + (2 - b), (2, 3), (3,)),
    "functions": (lambda a: a.exp().log() + a.sqrt().tanh() + a.sigmoid() * a.relu(), (2, 3)),
    "reductions": (lambda a: a.sum(0) + a.mean(1, keepdims=True) + a.max(), (3, 3)),
    "shapes": (lambda a: a.permute(2, 0, 1).reshape(4, 6).transpose()[1:, 0], (2, 3, 4)),
    "matrices": (lambda a, b: (a @ b) @ b, (2, 3, 4), (4, 4)),
    "joining": (lambda a, b: F.pad(F.concat([F.stack([a, a]), F.stack([b, b])], 1), [(1, 0)] * 3), (2, 3), (1, 3)),
    "activations": (lambda a: F.gelu(a) + F.softmax(a) * F.log_softmax(a, 0), (3, 4)),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 3, 5, 5), (4, 3, 3, 3), (4,)),
    "pooling": (lambda x: F.max_pool2d(x, 2) * F.avg_pool2d(x, 2), (2, 3, 6, 6)),
    "linear": (F.linear, (2, 4, 3), (5, 3), (5,)),
    "layer norm": (F.layer_norm, (4, 3), (3,), (3,)),
    "lstm": (lambda x, w, u, b: F.lstm(x, w, u, b, lengths=[3, 1])[0], (2, 3, 2), (16, 2), (16, 4), (16,)),
    "lstm, its last state": (lambda x, w, u, b: F.lstm(x, w, u, b)[1][1], (2, 3, 2), (16, 2), (16, 4), (16,)),
    "gru": (lambda *t: F.gru(*t, lengths=[3, 1], reverse=True)[0], (2, 3, 2), (12, 2), (12, 4), (12,), (4,)),
    "attention": (lambda qkv: F.self_attention(qkv, 2, causal=True, lengths=[3, 2]), (2, 3, 12)),
    "ctc": (lambda x: F.ctc_loss(x, [[1, 1], [2, 0]], target_lengths=[2, 1], lengths=[5, 4]), (2, 5, 3)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    strict = pytest.importorskip("array_api_strict")
    function, *shapes = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(1, 2, shape) for shape in shapes]
    g = None
    results = []
    for make in (np.asarray, strict.asarray):
        tensors = [Tensor(make(array), requires_grad=True) for array in arrays]
        y = function(*tensors)
        g = rng.standard_normal(y.shape) if g is None else g
        y.backward(make(g))
        assert type(y.data) is type(make(g)) is type(tensors[0].grad)
        results.append([np.asarray(y.data), *(np.asarray(t.grad) for t in tensors)])
    for own, other in zip(*results):
        np.testing.assert_allclose(own, other, rtol=1e-12, atol=1e-12)


def test_training():
    strict = pytest.importorskip("array_api_strict")
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((6, 4)), rng.standard_normal((3, 4))
    results = []
    for make in (np.asarray, strict.asarray):
        running = [Tensor(make(np.full(4, value))) for value in (0.0, 1.0)]
        scale, shift, w = (Tensor(make(a), requires_grad=True) for a in (np.ones(4), np.zeros(4), weight.copy()))
        parameters = [scale, shift, w]
        for optimizer in (optim.SGD(parameters, 0.1, momentum=0.9), optim.AdamW(parameters)):
            optimizer.zero_grad()
            hidden = F.batch_norm(Tensor(make(x)), scale, shift, *running, training=True)
            F.cross_entropy(F.linear(hidden, w), make(np.arange(6) % 3)).backward()
            clip_grad_norm(parameters, 0.5)
            optimizer.step()
        results.append([np.asarray(tensor.data) for tensor in [*parameters, *running]])
    for own, other in zip(*results):
        np.testing.assert_allclose(own, other, rtol=1e-12, atol=1e-12)


def test_memory_can_be_kept():
    keep_freed_memory()
    assert Tensor(np.ones(10**6)).sum().item() == 10**6
