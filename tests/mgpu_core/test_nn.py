"""Modules: what they hold and under which names, and layers that train, save, load and repeat exactly."""

import numpy as np
import pytest

from mgpu_core import Tensor, nn, optim, random
from mgpu_core.nn import functional as F


def network(seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, bias=False, rng=rng, dtype=dtype),
        nn.BatchNorm2d(3, dtype=dtype),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, (3, 2), stride=2, rng=rng, dtype=dtype),
        nn.GELU(),
        nn.AvgPool2d((1, 2)),
        nn.Flatten(),
        nn.Dropout(0.2, rng=rng),
        nn.Linear(8, 6, rng=rng, dtype=dtype),
        nn.LayerNorm(6, dtype=dtype),
        nn.Tanh(),
        nn.BatchNorm1d(6, dtype=dtype),
        nn.Sigmoid(),
        nn.Linear(6, 5, bias=False, rng=rng, dtype=dtype),
    )


def images(count=6, dtype=np.float64):
    return Tensor(np.random.default_rng(1).standard_normal((count, 1, 11, 10)).astype(dtype))


NAMES = {
    "layers.0.weight": (3, 1, 3, 3),
    "layers.1.weight": (3,),
    "layers.1.bias": (3,),
    "layers.1.running_mean": (3,),
    "layers.1.running_var": (3,),
    "layers.4.weight": (4, 3, 3, 2),
    "layers.4.bias": (4,),
    "layers.9.weight": (6, 8),
    "layers.9.bias": (6,),
    "layers.10.weight": (6,),
    "layers.10.bias": (6,),
    "layers.12.weight": (6,),
    "layers.12.bias": (6,),
    "layers.12.running_mean": (6,),
    "layers.12.running_var": (6,),
    "layers.14.weight": (5, 6),
}


def test_names_in_order():
    model = network()
    assert {name: array.shape for name, array in model.state_dict().items()} == NAMES
    assert list(model.state_dict()) == list(NAMES)
    assert [name for name, _ in model.named_parameters()] == [n for n in NAMES if "running" not in n]
    assert [name for name, _ in model.named_buffers()] == [n for n in NAMES if "running" in n]
    assert len(list(model.parameters())) == 12
    assert len(list(model.buffers())) == 4
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    assert not any(buffer.requires_grad for buffer in model.buffers())


def test_parts_in_attributes_and_lists():
    class Block(nn.Module):
        def __init__(self, rng):
            self.inner = nn.Linear(2, 2, rng=rng)
            self.branches = [nn.Linear(2, 2, rng=rng), nn.ReLU()]
            self.scale = nn.Parameter(np.ones(2))
            self.tied = self.inner.weight
            self.note = "not a part"

        def forward(self, x):
            return self.branches[1](self.branches[0](self.inner(x)) * self.scale + F.linear(x, self.tied))

    block = Block(np.random.default_rng(0))
    assert [name for name, _ in block.named_modules()] == ["", "inner", "branches.0", "branches.1"]
    assert [name for name, _ in block.named_parameters()] == [
        "scale",
        "tied",
        "inner.bias",
        "branches.0.weight",
        "branches.0.bias",
    ]
    block(Tensor(np.ones((1, 2)))).sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())
    block.zero_grad()
    assert all(not parameter.grad.any() for parameter in block.parameters())


def test_the_whole_network_has_the_right_gradients(check_gradients):
    model = network()
    names = [name for name, _ in model.named_parameters()]
    buffers = {name: buffer.data.copy() for name, buffer in model.named_buffers()}

    def run(x, *arrays):
        for name, array in zip(names, arrays):
            owner, attribute = name.rsplit(".", 1)
            setattr(dict(model.named_modules())[owner], attribute, array)
        for name, buffer in model.named_buffers():
            buffer.data = buffers[name].copy() if name in buffers else buffer.data
        with random.batch(seed=0, step=0, samples=range(4)):
            return model(x)

    check_gradients(run, images(4).data, *(parameter.data for parameter in list(model.parameters())))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtypes(dtype):
    model = network(dtype=dtype)
    assert {array.dtype for array in model.state_dict().values()} == {np.dtype(dtype)}
    with random.batch(seed=0, step=0, samples=range(6)):
        y = model(images(dtype=dtype))
    assert y.dtype == dtype
    y.sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {np.dtype(dtype)}
    assert {array.dtype for array in model.state_dict().values()} == {np.dtype(dtype)}


def test_the_same_seed_is_the_same_network_in_every_dtype():
    one, same, rounded, other = network(3), network(3), network(3, np.float32), network(4)
    for name, array in one.state_dict().items():
        np.testing.assert_array_equal(array, same.state_dict()[name])
        np.testing.assert_array_equal(array.astype(np.float32), rounded.state_dict()[name])
    assert not np.array_equal(one[0].weight.data, other[0].weight.data)
    assert one[8].layer == same[8].layer == rounded[8].layer != other[8].layer


def test_initial_weights_are_uniform_by_fan_in():
    rng = np.random.default_rng(0)
    for layer, fan_in in [(nn.Linear(100, 50, rng=rng), 100), (nn.Conv2d(10, 30, 3, groups=2, rng=rng), 45)]:
        bound = 1 / np.sqrt(fan_in)
        assert 0.95 * bound < abs(layer.weight.data).max() <= bound
        assert abs(layer.bias.data).max() <= bound
    assert abs(nn.Embedding(1000, 10, rng=rng).weight.data.std() - 1) < 0.05


def test_train_and_eval():
    model = network()
    x = images()
    with pytest.raises(RuntimeError, match=r"random\.batch"):
        model(x)
    assert model.eval() is model
    assert not any(module.training for module in model.modules())
    before = {name: array.copy() for name, array in model.state_dict().items()}
    first, second = model(x).data, model(x).data
    np.testing.assert_array_equal(first, second)
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    assert all(module.training for module in model.train().modules())


def test_an_empty_batch():
    model = network().eval()
    y = model(images(0))
    assert y.shape == (0, 5)
    y.sum().backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_state_goes_from_one_model_to_another():
    model, other = network(0), network(1, np.float32)
    with random.batch(seed=0, step=0, samples=range(6)):
        model(images())  # so that the running statistics are not the initial ones
    arrays = other.state_dict()
    other.load_state_dict(model.state_dict())
    for name, array in other.state_dict().items():
        assert array is arrays[name]
        np.testing.assert_array_equal(array, model.state_dict()[name].astype(np.float32))


def test_state_that_does_not_fit_changes_nothing():
    model = network(0)
    before = {name: array.copy() for name, array in model.state_dict().items()}
    state = network(1).state_dict()
    missing = {name: array for name, array in state.items() if name != "layers.4.bias"}
    with pytest.raises(KeyError, match=r"missing \['layers.4.bias'\]"):
        model.load_state_dict(missing)
    with pytest.raises(KeyError, match=r"not expected \['more'\]"):
        model.load_state_dict({**state, "more": np.zeros(1)})
    with pytest.raises(ValueError, match=r"layers.14.weight has shape \(5, 7\)"):
        model.load_state_dict({**state, "layers.14.weight": np.zeros((5, 7))})
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


def test_parts_of_a_sequential():
    model = network().eval()
    head, tail = model[:7], model[7:]
    assert (len(model), len(head), len(tail)) == (15, 7, 8)
    assert model[0] is head[0] is next(iter(model))
    np.testing.assert_array_equal(tail(head(images())).data, model(images()).data)


def test_batch_norm_over_ranks_is_switched_on_for_the_whole_model():
    model = network()
    calls = []

    def reduce(vector):
        calls.append(vector.shape)
        return vector

    nn.synchronize_batch_norm(model, reduce)
    with random.batch(seed=0, step=0, samples=range(6)):
        model(images()).sum().backward()
    assert calls == [(7,), (13,), (12,), (6,)]
    nn.synchronize_batch_norm(model, None)
    with random.batch(seed=0, step=0, samples=range(6)):
        model(images())
    assert len(calls) == 4


def test_layers_refuse_what_they_cannot_take():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"BatchNorm2d takes \(N, C, H, W\) with C = 3, not \(2, 4, 5, 5\)"):
        nn.BatchNorm2d(3)(Tensor(np.zeros((2, 4, 5, 5))))
    with pytest.raises(ValueError, match=r"BatchNorm1d takes \(N, C\)"):
        nn.BatchNorm1d(3)(Tensor(np.zeros((2, 3, 5))))
    with pytest.raises(ValueError, match="2 equal groups"):
        nn.Conv2d(3, 4, 3, groups=2, rng=rng)


def test_embedding_trains():
    rng = np.random.default_rng(0)
    layer = nn.Embedding(4, 2, rng=rng)
    layer([[1, 1], [3, 0]]).sum().backward()
    np.testing.assert_array_equal(layer.weight.grad[:, 0], [1, 2, 0, 1])


def test_a_network_learns_and_repeats_exactly():
    """Two runs from one seed give the same bits; the loss falls."""

    def train():
        model = network(0, np.float32)
        optimizer = optim.SGD(model.named_parameters(), 0.1, momentum=0.9)
        x, y = images(32, np.float32), np.arange(32) % 5
        losses = []
        for step in range(60):
            optimizer.zero_grad()
            with random.batch(seed=0, step=step, samples=range(32)):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    losses = train()
    assert np.mean(losses[-5:]) < 0.7 * losses[0]
    assert train() == losses
