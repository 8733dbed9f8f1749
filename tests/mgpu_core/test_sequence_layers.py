"""Layers for sequences: shapes, lengths, states, dropout that does not depend on how the batch is split, gradients."""

import numpy as np
import pytest

from mgpu_core import Tensor, nn, optim, random
from mgpu_core.nn import functional as F


def generator(seed=0):
    return np.random.default_rng(seed)


def normal(*shape, seed=1):
    return generator(seed).standard_normal(shape)


def with_parameters(model, function):
    """`function` of x and the parameters' arrays, for check_gradients; and those arrays."""
    parameters = list(model.parameters())
    owners = [
        (module, name, parameters.index(value))
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, nn.Parameter)
    ]

    def run(x, *arrays):
        for module, name, index in owners:
            setattr(module, name, arrays[index])
        with random.batch(seed=0, step=0, samples=range(len(x))):
            return function(x)

    return run, [parameter.data for parameter in parameters]


RECURRENT = {
    "lstm": lambda **options: nn.LSTM(3, 2, rng=generator(), dtype=np.float64, **options),
    "gru": lambda **options: nn.GRU(3, 2, rng=generator(), dtype=np.float64, **options),
}
recurrent = pytest.mark.parametrize("kind", RECURRENT)


@recurrent
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_in_shape_and_gradient(kind, bidirectional, check_gradients):
    model = RECURRENT[kind](layers=2, bidirectional=bidirectional, dropout=0.3)
    lengths = [4, 2]
    run, arrays = with_parameters(model, lambda x: model(x, lengths))
    x = normal(2, 4, 3)
    y = run(Tensor(x), *(Tensor(array) for array in arrays))
    assert y.shape == (2, 4, 4 if bidirectional else 2)
    assert not y.data[1, 2:].any()
    check_gradients(run, x, *arrays)


@recurrent
def test_a_bidirectional_layer_is_one_layer_each_way(kind):
    model = RECURRENT[kind](bidirectional=True)
    x, lengths = normal(3, 5, 3), np.array([5, 1, 3])
    y = model(Tensor(x), lengths).data
    there, back = RECURRENT[kind](), RECURRENT[kind]()
    there.forwards, back.forwards = model.forwards, model.backwards
    for n, length in enumerate(lengths):
        own = x[n : n + 1, :length]
        np.testing.assert_allclose(y[n, :length, :2], there(Tensor(own)).data[0], rtol=1e-12)
        np.testing.assert_allclose(y[n, :length, 2:], back(Tensor(own[:, ::-1])).data[0, ::-1], rtol=1e-12)


@recurrent
def test_a_long_sequence_can_be_read_in_pieces(kind):
    model = RECURRENT[kind](layers=3)
    x = Tensor(normal(2, 9, 3))
    whole, end = model.unroll(x)
    np.testing.assert_array_equal(whole.data, model(x).data)
    state, pieces = None, []
    for first in range(0, 9, 4):
        piece, state = model.unroll(x[:, first : first + 4], state)
        pieces.append(piece.data)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole.data, rtol=1e-12)
    for one, other in zip(end if kind == "lstm" else [end], state if kind == "lstm" else [state]):
        assert one.shape == (3, 2, 2)
        np.testing.assert_allclose(one.data, other.data, rtol=1e-12)


@recurrent
def test_a_bidirectional_layer_has_no_state(kind):
    with pytest.raises(ValueError, match="no state"):
        RECURRENT[kind](bidirectional=True).unroll(Tensor(normal(1, 2, 3)))


def test_names_of_parameters():
    assert [name for name, _ in nn.LSTM(2, 3, layers=2, rng=generator()).named_parameters()] == [
        f"forwards.{layer}.{name}" for layer in range(2) for name in ("weight", "hidden_weight", "bias")
    ]
    assert [name for name, _ in nn.GRU(2, 3, bidirectional=True, rng=generator()).named_parameters()] == [
        f"{way}.0.{name}"
        for way in ("forwards", "backwards")
        for name in ("weight", "hidden_weight", "bias", "hidden_bias")
    ]
    assert {name: p.shape for name, p in nn.MultiHeadAttention(4, 2, rng=generator()).named_parameters()} == {
        "projection.weight": (12, 4),
        "projection.bias": (12,),
        "output.weight": (4, 4),
        "output.bias": (4,),
    }


@pytest.mark.parametrize("causal", [False, True])
def test_a_transformer_block_in_shape_and_gradient(causal, check_gradients):
    block = nn.TransformerBlock(4, 2, hidden=6, causal=causal, dropout=0.2, rng=generator(), dtype=np.float64)
    run, arrays = with_parameters(block, lambda x: block(x, [3, 2]))
    check_gradients(run, normal(2, 3, 4), *arrays)


def test_a_causal_block_does_not_see_the_future():
    block = nn.TransformerBlock(8, 2, causal=True, rng=generator(), dtype=np.float64)
    x = normal(2, 6, 8)
    y = block(Tensor(x)).data
    x[:, 4:] += 1
    changed = block(Tensor(x)).data
    np.testing.assert_array_equal(y[:, :4], changed[:, :4])
    assert not np.isclose(y[:, 4:], changed[:, 4:]).all()


def test_positions(check_gradients):
    layer = nn.PositionalEmbedding(5, 3, rng=generator(), dtype=np.float64)
    x = normal(2, 4, 3)
    np.testing.assert_array_equal(layer(Tensor(x)).data, x + layer.weight.data[:4])
    run, arrays = with_parameters(layer, layer)
    check_gradients(run, x, *arrays)
    with pytest.raises(ValueError, match="a sequence of 6 is longer than the 5 positions"):
        layer(Tensor(normal(2, 6, 3)))


def test_heads_must_divide():
    with pytest.raises(ValueError, match="10 cannot be cut into 4"):
        nn.MultiHeadAttention(10, 4, rng=generator())


MODELS = {
    "lstm": lambda: nn.LSTM(4, 6, layers=2, dropout=0.5, rng=generator(), dtype=np.float64),
    "gru": lambda: nn.GRU(4, 6, layers=2, dropout=0.5, rng=generator(), dtype=np.float64),
    "transformer": lambda: nn.TransformerBlock(4, 2, dropout=0.5, rng=generator(), dtype=np.float64),
}


@pytest.mark.parametrize("name", MODELS)
def test_dropout_does_not_depend_on_how_the_batch_is_split(name):
    model, x = MODELS[name](), normal(6, 5, 4)

    def run(samples):
        with random.batch(seed=3, step=4, samples=samples):
            return model(Tensor(x[list(samples)])).data

    whole = run(range(6))
    for samples in (range(2), range(2, 6), [4, 0]):
        np.testing.assert_allclose(run(samples), whole[list(samples)], rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(model.eval()(Tensor(x)).data, model(Tensor(x)).data)


def test_a_language_model_learns_what_comes_next():
    """Counting: each token is the one before plus 1; learned by a transformer and by a recurrent network."""
    rng = generator()
    tokens = (np.arange(9)[None] + rng.integers(0, 7, 32)[:, None]) % 7
    for middle in (
        [nn.PositionalEmbedding(8, 16, rng=rng), nn.TransformerBlock(16, 4, causal=True, rng=rng), nn.LayerNorm(16)],
        [nn.LSTM(16, 16, rng=rng)],
        [nn.GRU(16, 16, rng=rng)],
    ):
        model = nn.Sequential(nn.Embedding(7, 16, rng=rng), *middle, nn.Linear(16, 7, rng=rng))
        optimizer = optim.AdamW(model.parameters(), 1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            optimizer.step()
        assert loss.item() < 0.3
