"""The device "cuda", on a CuPy in memory (`fakecupy`) whose arrays refuse to mix with NumPy's: the same results as on
the CPU, and no look at the GPU's memory, for which the host would wait, but where one is meant."""

import sys
from collections import Counter
from pathlib import Path

import fakecupy
import ml_dtypes
import numpy as np
import pytest

from mgpu_core import Tensor, checkpoint, device, nn, optim, random
from mgpu_core.autograd import autocast
from mgpu_core.data import Loader, Sampler
from mgpu_core.nn import functional as F
from mgpu_core.parallel import clip_grad_norm, recompute
from mgpu_core.precision import Precision

sys.path.append(str(Path(__file__).parents[1] / "collectives"))  # for `import fakegpu`; ranks inherit it

FUNCTIONS = {  # of tensors of these shapes
    "arithmetic": (lambda a, b: (a * 2 + 1) / b - (-a) ** 2 + (2 - b), (2, 3), (3,)),
    "functions": (lambda a: a.exp().log() + a.sqrt().tanh() + a.sigmoid() * a.relu(), (2, 3)),
    "reductions": (lambda a: a.sum(0) + a.mean(1, keepdims=True) + a.max(), (3, 3)),
    "shapes": (lambda a: a.permute(2, 0, 1).reshape(4, 6).transpose()[1:, 0], (2, 3, 4)),
    "indexing": (lambda a: a[[0, 2, 2]] * a[1:2], (3, 4)),
    "matrices": (lambda a, b: (a @ b) @ b, (2, 3, 4), (4, 4)),
    "joining": (lambda a, b: F.pad(F.concat([F.stack([a, a]), F.stack([b, b])], 1), [(1, 0)] * 3), (2, 3), (1, 3)),
    "activations": (lambda a: F.gelu(a) + F.softmax(a) * F.log_softmax(a, 0), (3, 4)),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1, stride=2), (2, 3, 5, 5), (4, 3, 3, 3), (4,)),
    "groups": (lambda x, w: F.conv2d(x, w, groups=2), (2, 4, 5, 5), (4, 2, 3, 3)),
    "pooling": (lambda x: F.max_pool2d(x, 2) * F.avg_pool2d(x, 2), (2, 3, 6, 6)),
    "linear": (F.linear, (2, 4, 3), (5, 3), (5,)),
    "embedding": (lambda w: F.embedding([[0, 1], [1, 1]], w), (4, 3)),
    "layer norm": (F.layer_norm, (4, 3), (3,), (3,)),
    "batch norm": (
        lambda x, w, b: F.batch_norm(
            x, w, b, *(Tensor(np.full(3, v)).to(x.device) for v in (0.0, 1.0)), training=True
        ),
        (4, 3, 2, 2), (3,), (3,),
    ),
    "lstm": (lambda x, w, u, b: F.lstm(x, w, u, b, lengths=[3, 1])[0], (2, 3, 2), (16, 2), (16, 4), (16,)),
    "gru": (lambda *t: F.gru(*t, lengths=[3, 1], reverse=True)[0], (2, 3, 2), (12, 2), (12, 4), (12,), (4,)),
    "attention": (lambda qkv: F.self_attention(qkv, 2, causal=True, lengths=[3, 2], dropout=0.3), (2, 3, 12)),
    "dropout": (lambda x: F.dropout(x, 0.5, 3), (4, 3)),
    "cross-entropy": (lambda x: F.cross_entropy(x, [0, 2, 1, 1], weights=[1.0, 2.0, 0.0, 1.0]), (4, 3)),
    "ctc": (lambda x: F.ctc_loss(x, [[1, 1], [2, 0]], target_lengths=[2, 1], lengths=[5, 4]), (2, 5, 3)),
    "recomputed": (lambda a: recompute(lambda x: (x * x).tanh(), a), (2, 3)),
}  # fmt: skip


@pytest.fixture
def counts():
    with fakecupy.installed() as found:
        yield found


def on(where, *arrays):
    return [Tensor(device.move(array.copy(), where), requires_grad=True) for array in arrays]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_those_of_the_cpu_and_wait_for_nothing(name, counts):
    function, *shapes = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(1, 2, shape) for shape in shapes]
    results = []
    for where in ("cpu", "cuda"):
        tensors = on(where, *arrays)
        before = counts["to host"]
        with random.batch(seed=1, step=2, samples=range(len(arrays[0]))):
            y = function(*tensors)
        y.backward(device.move(np.random.default_rng(1).standard_normal(y.shape), where))
        assert counts["to host"] <= before + (name == "cross-entropy")  # the sum of the weights
        assert y.device == where and all(device.of(t.grad) == where for t in tensors)
        results.append([device.to_host(y.data), *(device.to_host(t.grad) for t in tensors)])
    for own, other in zip(*results):
        np.testing.assert_allclose(own, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("short", ["float16", "bfloat16"])
def test_mixed_precision(short, counts):
    rng = np.random.default_rng(0)
    x, conv, qkv = (0.3 * rng.standard_normal(s, np.float32) for s in ((2, 3, 6, 6), (4, 3, 3, 3), (12, 4)))
    results = []
    for where in ("cpu", "cuda"):
        tensors = on(where, x, conv, qkv)
        with autocast(np.dtype(getattr(ml_dtypes, short, short))):
            y = F.conv2d(*tensors[:2], padding=1).relu().max(3).permute(0, 2, 1)
            loss = (F.self_attention(F.linear(y, tensors[2]), 2) ** 2).sum()
        loss.backward()
        results.append([device.to_host(loss.data), *(device.to_host(t.grad) for t in tensors)])
    for own, other in zip(*results):
        assert own.dtype == other.dtype == np.float32
        np.testing.assert_allclose(own, other, rtol=0.1, atol=0.03 * float(np.abs(own).max()))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("short", ["float16", "bfloat16"])
def test_rows_of_16_bits_are_added_in_float32_as_cupy_adds_no_bfloat16(dtype, short, counts):
    dtype, short = (np.dtype(getattr(ml_dtypes, name, name)) for name in (dtype, short))
    table, weight = on("cuda", np.ones((4, 3), dtype), np.ones((1, 3), np.float32))
    indices = np.repeat([1, 3], [300, 2])
    for rows in (lambda: F.embedding(indices, table), lambda: table[indices]):
        with autocast(short):
            y = F.linear(rows(), weight)
        y.sum().backward()
        assert table.grad.dtype == dtype
        assert table.grad.get().astype(int)[:, 0].tolist() == [0, 300, 0, 2]  # bfloat16's sum of ones ends at 256
        table.zero_grad()


def trained(where, make, steps=4, precision="float32"):
    rng = np.random.default_rng(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, rng=rng), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5, rng=rng)
    ).to(where)
    optimizer, mixed, losses = make(list(model.named_parameters())), Precision(precision), []
    for step in range(steps):
        x = Tensor(np.random.default_rng(step).standard_normal((8, 1, 6, 6)).astype(np.float32)).to(where)
        optimizer.zero_grad()
        with mixed.autocast():
            loss = F.cross_entropy(model(x), np.arange(8) % 5)
            mixed.backward(loss)
        clip_grad_norm(model.parameters(), 1.0)
        mixed.step(optimizer)
        losses.append(loss.item())
    return model, optimizer, losses


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.05),
    "nesterov": lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "dampened": lambda p: optim.SGD(p, 0.05, momentum=0.9, dampening=0.1),
    "lars": lambda p: optim.LARS(p, 1.0, weight_decay=1e-3),
    "adamw": lambda p: optim.AdamW(p, 1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_all_parameters_in_one_launch_and_asks_once_for_a_norm(name, counts):
    _, _, wanted = trained("cpu", OPTIMIZERS[name])
    model, optimizer, found = trained("cuda", OPTIMIZERS[name])
    np.testing.assert_allclose(found, wanted, rtol=2e-4)
    assert counts["optimizer"] == 4
    # Of each step: the loss, the norm of the gradients, and LARS's two norms of all parameters; it tries one when made.
    assert counts["to host"] == (4 * 4 + 1 if name == "lars" else 4 * 2)
    assert all(device.of(array) == "cuda" for kind in optimizer.state.values() for array in kind.values())


def test_float16_asks_once_more_for_whether_gradients_are_finite(counts):
    _, _, found = trained("cuda", OPTIMIZERS["nesterov"], precision="float16")
    assert counts["to host"] == 4 * 3
    np.testing.assert_allclose(found, trained("cpu", OPTIMIZERS["nesterov"], precision="float16")[2], rtol=0.02)


def test_a_module_moves_with_its_gradients_and_back(counts):
    model = nn.Sequential(nn.Linear(3, 2, rng=np.random.default_rng(0)), nn.BatchNorm1d(2))
    model(Tensor(np.ones((4, 3), np.float32))).sum().backward()
    before = {name: array.copy() for name, array in model.state_dict().items()}
    slopes = [p.grad.copy() for p in model.parameters()]
    assert model.to("cuda") is model
    assert all(t.device == "cuda" for t in [*model.parameters(), *model.buffers()])
    assert all(device.of(p.grad) == "cuda" for p in model.parameters())
    model.load_state_dict({name: 2 * array for name, array in before.items()})  # NumPy's into CuPy's
    model.to("cpu")
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, 2 * before[name])
    for parameter, slope in zip(model.parameters(), slopes):
        np.testing.assert_array_equal(parameter.grad, slope)


def test_a_tensor_moves_and_its_gradient_comes_back(counts):
    x = Tensor(np.arange(3.0), requires_grad=True)
    y = x.to("cuda")
    assert y.device == "cuda" and y.to("cuda") is y and x.to("cpu") is x
    (y * y).sum().to("cpu").backward()
    assert x.grad.tolist() == [0, 2, 4] and type(x.grad) is np.ndarray
    with pytest.raises(TypeError, match=r'tensor.to\("cpu"\)'):
        np.asarray(y)
    for mixed in (lambda: y + np.ones(3), lambda: np.ones(3) @ y, lambda: F.linear(Tensor(np.ones((1, 3))), y)):
        with pytest.raises((TypeError, IndexError)):
            mixed()


def test_what_cannot_be_is_nan_where_a_look_would_be_to_wait(counts):
    logits = Tensor(np.zeros((2, 3))).to("cuda")
    for labels in ([0, 3], [-1, 0]):
        there = device.move(np.array(labels), "cuda")
        assert np.isnan(F.cross_entropy(logits, there).item())
        assert np.isnan(F.embedding(there, logits).data.get()).any(axis=1).sum() >= 1
        with pytest.raises(IndexError):
            F.cross_entropy(logits.to("cpu"), labels)
    steps = Tensor(np.zeros((2, 4, 3))).to("cuda")
    bad = F.ctc_loss(steps, device.move(np.array([[1], [0]]), "cuda"), reduction="sum")
    assert np.isnan(bad.item())
    with pytest.raises(TypeError, match="integer"):
        F.cross_entropy(logits, device.move(np.zeros(2), "cuda"))


def test_a_checkpoint_goes_from_either_device_to_the_other(counts, tmp_path):
    path = tmp_path / "c.safetensors"
    model, optimizer, _ = trained("cuda", OPTIMIZERS["adamw"])
    with checkpoint.Writer(path) as writer:
        writer.save(checkpoint.parts(model, optimizer), {})
    for where in ("cpu", "cuda"):
        other, its, _ = trained(where, OPTIMIZERS["adamw"], steps=1)
        checkpoint.restore(path, checkpoint.parts(other, its))
        for own, loaded in ((model, other), (optimizer, its)):
            for name, array in loaded.state_dict().items():
                assert name == "steps" or device.of(array) == where
                np.testing.assert_array_equal(device.to_host(array), device.to_host(own.state_dict()[name]))


def test_a_loader_copies_the_next_batch_while_one_is_in_use(counts):
    images, labels = np.arange(40.0).reshape(20, 2), np.arange(20)
    options = {"sampler": Sampler(20, 4, seed=3), "transform": lambda arrays: (2 * arrays[0], arrays[1]), "workers": 2}
    plain, loader = Loader((images, labels), **options), Loader((images, labels), **options, device="cuda")
    with plain.epoch(1) as wanted, loader.epoch(1) as found:
        streams = found._stream.log
        for one, other in zip(wanted, found, strict=True):
            assert one.step == other.step and one.indices.tolist() == other.indices.tolist()
            for mine, theirs in zip(one.arrays, other.arrays):
                np.testing.assert_array_equal(mine, device.to_host(theirs))
                assert mine.dtype == theirs.dtype
    # Memory that was freed is not overwritten before the stream that used it has come there.
    assert streams == ["wait", "record"] * 5
    assert device.of(loader.read(0, 0).arrays[0]) == "cuda"

    def fail(arrays):
        raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError, match="no such luck"):
        next(Loader((images,), Sampler(20, 4), transform=fail, device="cuda").epoch(0))


def test_without_a_gpu_or_cupy_the_error_says_what_is_missing(monkeypatch):
    device.cuda.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(device.DeviceError, match=r"needs CuPy.*pip install 'mgpu-core\[cuda12\]'"):
        Tensor(np.ones(3)).to("cuda")
    monkeypatch.undo()
    with fakecupy.installed(devices=0), pytest.raises(device.DeviceError, match="shows this process none"):
        Tensor(np.ones(3)).to("cuda")
    with pytest.raises(ValueError, match="not 'cuda:1'"):
        Tensor(np.ones(3)).to("cuda:1")


def test_the_default_is_cuda_where_there_are_gpus_and_cupy(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    assert device.gpus() == 2 and device.default() == "cpu"
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    assert device.default() == "cuda"
    for visible, count in (("1", 1), ("", 0), ("-1", 0), ("0,1,2", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert device.gpus() == count
    assert device.default() == "cuda"
    with fakecupy.installed(devices=2) as counts:
        device.select("cpu", 1)
        device.select("cuda", 3)
        assert counts == Counter(use=1)


def on_two_gpus(comm):
    """Three steps of data parallelism on GPUs in memory: the losses, and the parameters."""
    from fakegpu import on_gpu

    from mgpu_core.parallel import DataParallel, Sharded

    gpu, driver = on_gpu(comm)
    found = []
    with fakecupy.installed(), gpu:
        fakecupy.settle.append(lambda: driver.synchronize(0))
        try:
            for wrap in (DataParallel, lambda model, comm: Sharded(model, comm, stage=2)):
                rng = np.random.default_rng(0)
                model = nn.Sequential(nn.Linear(6, 8, rng=rng), nn.Tanh(), nn.Linear(8, 3, rng=rng)).to("cuda")
                wrapped = wrap(model, gpu)
                optimizer = optim.SGD(wrapped.named_parameters(), 0.1, momentum=0.9)
                losses = []
                for step in range(3):
                    rng = np.random.default_rng(step)
                    x, labels = rng.standard_normal((4, 6)).astype(np.float32), rng.integers(0, 3, 4)
                    mine = slice(0, 1) if comm.rank == 0 else slice(1, 4)
                    optimizer.zero_grad()
                    logits = wrapped(Tensor(x[mine]).to("cuda"))
                    loss = F.cross_entropy(logits, labels[mine], reduction="sum") / 4
                    loss.backward()
                    wrapped.synchronize()
                    optimizer.step()
                    losses.append(float(comm.all_reduce(np.array([float(loss)]))[0]))
                assert all(p.device == "cuda" for _, p in wrapped.named_parameters())
                found.append(losses)
        finally:
            fakecupy.settle.clear()
    assert not driver.errors
    return found


def test_two_ranks_sum_gradients_that_are_on_gpus(crew):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(6, 8, rng=rng), nn.Tanh(), nn.Linear(8, 3, rng=rng))
    optimizer, wanted = optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    for step in range(3):
        rng = np.random.default_rng(step)
        x, labels = rng.standard_normal((4, 6)).astype(np.float32), rng.integers(0, 3, 4)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(Tensor(x)), labels)
        loss.backward()
        optimizer.step()
        wanted.append(float(loss))
    for found in crew(on_two_gpus, 2):
        for losses in found:
            np.testing.assert_allclose(losses, wanted, rtol=1e-4)
