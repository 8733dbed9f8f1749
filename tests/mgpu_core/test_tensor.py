"""Tensors: arithmetic like NumPy's, gradients like calculus's, and what the tape promises to those who build on it."""

import gc
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mgpu_core import Tensor
from mgpu_core.autograd import is_recording, no_grad
from mgpu_core.tensor import backward, record

rng = np.random.default_rng(0)


def positive(*shape):
    return rng.uniform(0.5, 2.0, shape)


def normal(*shape):
    return rng.standard_normal(shape)


SHAPES = [((), ()), ((3,), ()), ((2, 3), (3,)), ((2, 1, 3), (4, 1)), ((5, 3), (5, 3)), ((0, 3), (3,)), ((1, 1), (7, 5))]

BINARY = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "power": lambda a, b: a**b,
}

UNARY = {
    "negative": lambda x: -x,
    "exp": lambda x: x.exp(),
    "log": lambda x: x.log(),
    "sqrt": lambda x: x.sqrt(),
    "tanh": lambda x: x.tanh(),
    "sigmoid": lambda x: x.sigmoid(),
    "relu": lambda x: (x - 1).relu(),
    "square": lambda x: x**2,
    "inverse cube": lambda x: x**-3,
    "number plus": lambda x: 2 + x,
    "number minus": lambda x: 2 - x,
    "number times": lambda x: 3 * x,
    "number over": lambda x: 2 / x,
    "array plus": lambda x: np.array([0.5]) + x,
    "array minus": lambda x: np.array([0.5]) - x,
    "array times": lambda x: np.array([0.5]) * x,
    "array over": lambda x: np.array([0.5]) / x,
}


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary_gradients(name, shapes, check_gradients):
    a, b = (positive(*shape) for shape in shapes)
    check_gradients(BINARY[name], a, b)
    check_gradients(BINARY[name], b, a)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary_gradients(name, shape, check_gradients):
    check_gradients(UNARY[name], positive(*shape))


@given(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=4, min_side=0))
def test_any_broadcasting(shapes):
    """The gradient of a sum of products is the other factor, summed over where it was repeated."""
    a, b = (Tensor(normal(*shape), requires_grad=True) for shape in shapes.input_shapes)
    (a * b).sum().backward()
    whole = np.broadcast_to(b.data, shapes.result_shape)
    extra = len(shapes.result_shape) - a.ndim
    axes = tuple(i for i in range(len(shapes.result_shape)) if i < extra or a.shape[i - extra] == 1)
    np.testing.assert_allclose(a.grad, whole.sum(axis=axes).reshape(a.shape))


def test_power_of_zero():
    x = Tensor([0.0, 2.0], requires_grad=True)
    p = Tensor([2.0, 2.0], requires_grad=True)
    (x**p).sum().backward()
    np.testing.assert_allclose(x.grad, [0, 4])
    np.testing.assert_allclose(p.grad, [0, 4 * np.log(2)], rtol=1e-6)


def test_relu_passes_nan_on_and_is_flat_at_zero():
    x = Tensor([-1.0, 0.0, 2.0, np.nan], requires_grad=True)
    y = x.relu()
    np.testing.assert_array_equal(y.data, np.float32([0, 0, 2, np.nan]))
    y.backward(np.ones(4))
    np.testing.assert_array_equal(x.grad[:3], [0, 0, 1])


def test_sigmoid_and_tanh_far_out():
    x = Tensor([-1000.0, 1000.0], requires_grad=True)
    np.testing.assert_array_equal(x.sigmoid().data, [0, 1])
    x.sigmoid().sum().backward()
    np.testing.assert_array_equal(x.grad, [0, 0])


AXES = [None, 0, -1, 1, (0, 2), (0, 1, 2)]


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", AXES, ids=str)
def test_reductions(axis, keepdims, check_gradients):
    x = normal(3, 4, 5)
    for name in ("sum", "mean", "max"):
        result = getattr(Tensor(x), name)(axis, keepdims)
        np.testing.assert_allclose(result.data, getattr(np, name)(x, axis=axis, keepdims=keepdims))
        check_gradients(lambda x, name=name: getattr(x, name)(axis, keepdims), x)


def test_sum_of_nothing(check_gradients):
    check_gradients(lambda x: x.sum(0), np.zeros((0, 3)))
    check_gradients(lambda x: x.sum(), np.zeros((0, 3)))


def test_equal_largest_elements_share_the_gradient():
    x = Tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]], requires_grad=True)
    x.max(1).backward(np.array([1.0, 1.0]))
    np.testing.assert_array_equal(x.grad, [[0, 0.5, 0.5], [1, 0, 0]])


MATMULS = [
    ((3, 4), (4, 5)),
    ((4,), (4,)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (6, 4, 2)),
    ((3, 4), (2, 4, 5)),
    ((4,), (2, 4, 5)),
    ((2, 3, 4), (4,)),
    ((0, 4), (4, 5)),
    ((3, 0), (0, 5)),
    ((0, 3, 4), (4, 5)),
]


@pytest.mark.parametrize("shapes", MATMULS, ids=str)
def test_matmul(shapes, check_gradients):
    a, b = (normal(*shape) for shape in shapes)
    np.testing.assert_allclose((Tensor(a) @ Tensor(b)).data, a @ b)
    np.testing.assert_allclose((a @ Tensor(b)).data, a @ b)
    check_gradients(lambda a, b: a @ b, a, b)


def test_shapes(check_gradients):
    x = normal(2, 3, 4)
    cases = [
        (lambda t: t.reshape(4, 6), x.reshape(4, 6)),
        (lambda t: t.reshape((-1, 2)), x.reshape(-1, 2)),
        (lambda t: t.flatten(), x.reshape(-1)),
        (lambda t: t.flatten(1), x.reshape(2, 12)),
        (lambda t: t.permute(2, 0, 1), x.transpose(2, 0, 1)),
        (lambda t: t.permute(-1, 0, 1), x.transpose(2, 0, 1)),
        (lambda t: t.transpose(), x.swapaxes(-1, -2)),
        (lambda t: t.transpose(0, 2), x.swapaxes(0, 2)),
        (lambda t: t.reshape(2, 1, 12).squeeze(1), x.reshape(2, 12)),
    ]
    for function, expected in cases:
        np.testing.assert_array_equal(function(Tensor(x)).data, expected)
        check_gradients(function, x)
    with pytest.raises(ValueError, match="not length 1"):
        Tensor(x).squeeze(0)
    assert Tensor(np.zeros((0, 3, 4))).flatten(1).shape == (0, 12)


INDICES = [
    0,
    -1,
    (1, 2),
    slice(1, None),
    slice(None, None, -1),
    (slice(None), slice(0, 4, 2)),
    (..., 1),
    (None, slice(0, 0)),
    np.array([0, 2, 2, 1]),
    [2, 0, 2],
    (np.array([0, 0, 2]), np.array([1, 1, 3])),
    (slice(None), np.array([3, 3])),
    np.array([[True, False, True, False, True]] * 3),
    np.array([True, False, True]),
    Tensor(np.array([1, 1])),
]


@pytest.mark.parametrize("index", INDICES, ids=lambda index: str(index).replace("\n", ""))
def test_indexing(index, check_gradients):
    x = normal(3, 5)
    plain = index.data if isinstance(index, Tensor) else index
    np.testing.assert_array_equal(Tensor(x)[index].data, x[plain])
    check_gradients(lambda x: x[index], x)


def test_iteration_and_length():
    x = Tensor([[1.0, 2.0], [3.0, 4.0]])
    assert len(x) == 2
    assert [row.data.tolist() for row in x] == [[1, 2], [3, 4]]
    with pytest.raises(TypeError, match="0-d"):
        len(Tensor(1.0))


# What a tensor holds


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_dtypes_are_kept(dtype):
    """Numbers take on the tensor's dtype, NumPy's float64 scalars too, so float32 graphs stay float32."""
    x = Tensor(np.ones((2, 3), dtype), requires_grad=True)
    y = ((2 * x + np.float64(1.5) - 0.5) / 3 * np.float64(0.5)) ** 2 @ Tensor(np.ones((3, 2), dtype))
    y = (y.exp() + y.tanh().sqrt() + y.sigmoid().log() + y.relu()).max(0).mean() + y.sum()
    assert y.dtype == dtype
    y.backward()
    assert x.grad.dtype == dtype


def test_mixed_dtypes_promote_and_each_gradient_keeps_its_own():
    a, b = Tensor(np.ones(3, np.float32), requires_grad=True), Tensor(np.ones(3, np.float64), requires_grad=True)
    y = a * b
    assert y.dtype == np.float64
    y.sum().backward()
    assert (a.grad.dtype, b.grad.dtype) == (np.float32, np.float64)


def test_what_can_be_a_tensor():
    assert Tensor([1.5, 2]).dtype == np.float32
    assert Tensor([1, 2]).dtype == np.int64
    assert Tensor(np.float64(3)).dtype == np.float64
    assert Tensor([1, 2], dtype=np.float64).dtype == np.float64
    data = np.zeros(3)
    assert Tensor(data).data is data
    with pytest.raises(TypeError, match="real numbers"):
        Tensor(np.array(["a"]))
    with pytest.raises(TypeError, match="real numbers"):
        Tensor(np.array([1j]))
    with pytest.raises(TypeError, match="floating-point"):
        Tensor([1, 2], requires_grad=True)


def test_as_numbers_and_arrays():
    x = Tensor([[2.5]], requires_grad=True)
    assert x.item() == float(x) == 2.5
    assert bool(x)
    with pytest.raises(ValueError):
        bool(Tensor([1.0, 2.0]))
    assert "requires_grad" in repr(x)
    assert not x.detach().requires_grad
    np.testing.assert_array_equal(np.asarray(Tensor([1.0, 2.0])), [1, 2])


# The tape


def leaf(*shape):
    return Tensor(normal(*shape), requires_grad=True)


def test_gradients_add_up_over_uses_and_passes():
    x = leaf(3)
    (x * x + 3 * x).sum().backward()
    expected = 2 * x.data + 3
    np.testing.assert_allclose(x.grad, expected)
    (2 * x).sum().backward()
    np.testing.assert_allclose(x.grad, expected + 2)


def test_a_tensor_used_often_has_its_gradients_summed_once():
    """Fan-out of intermediate results, where the first gradient to arrive must not be changed in place."""
    x = leaf(4)
    y = x * 2
    total = y + y
    (total + y + y.sum() + total * y).sum().backward()
    y_grad = 3 + 4 + 4 * y.data
    np.testing.assert_allclose(x.grad, 2 * y_grad)


def test_gradients_go_into_the_array_that_is_given():
    bucket = np.full(10, 7.0)
    x, y = leaf(2, 3), leaf(4)
    x.grad, y.grad = bucket[:6].reshape(2, 3), bucket[6:]
    x.zero_grad()
    (x.sum() + (2 * y).sum()).backward()
    np.testing.assert_array_equal(bucket, [1] * 6 + [9] * 4)  # y's was not zeroed, so it was added to
    for _ in range(3):
        x.zero_grad()
        y.zero_grad()
        (3 * x.sum() + y.sum() + y.sum()).backward()
        np.testing.assert_array_equal(bucket, [3] * 6 + [2] * 4)
    assert x.grad.base is bucket


def test_an_unused_gradient_reads_as_zero_after_zero_grad():
    x, y = leaf(3), leaf(3)
    (x + y).sum().backward()
    kept = x.grad
    x.zero_grad()
    y.sum().backward()
    assert x.grad is kept
    np.testing.assert_array_equal(kept, 0)
    x.sum().backward()
    np.testing.assert_array_equal(kept, 1)
    with pytest.raises(ValueError, match=r"shape \(3,\), not \(4,\)"):
        x.grad = np.zeros(4)


def test_zero_grad_without_a_gradient():
    x = leaf(2)
    x.zero_grad()
    assert x.grad is None
    x.sum().backward()
    np.testing.assert_array_equal(x.grad, 1)


def test_a_leaf_is_announced_once_when_complete_while_backward_goes_on():
    """The parameter that is used twice waits for its second use; the others come latest layer first."""
    events = []

    def layer(x, weight, name):
        def to_input(g):
            events.append(f"backward {name}")
            return g * weight.data

        a = x.data
        return record(a * weight.data, (x, to_input), (weight, lambda g: g * a))

    shared, middle, last = leaf(3), leaf(3), leaf(3)
    names = {shared: "shared", middle: "middle", last: "last"}
    for tensor in names:
        tensor.on_grad_ready(lambda t: events.append((names[t], t.grad.copy())))
    x = leaf(3)
    layer(layer(layer(layer(x, shared, "1"), middle, "2"), shared, "3"), last, "4").sum().backward()
    order = [event if isinstance(event, str) else event[0] for event in events]
    assert order == ["backward 4", "last", "backward 3", "backward 2", "middle", "backward 1", "shared"]
    seen = {event[0]: event[1] for event in events if not isinstance(event, str)}
    for tensor, name in names.items():
        np.testing.assert_array_equal(seen[name], tensor.grad)  # complete when it was announced
    np.testing.assert_allclose(shared.grad, 2 * x.data * shared.data * middle.data * last.data)


def test_hooks_run_once_in_every_pass_and_can_be_removed():
    x, unused = leaf(2), leaf(2)
    calls = []
    remove = x.on_grad_ready(lambda t: calls.append(1))
    x.on_grad_ready(lambda t: calls.append(2))
    unused.on_grad_ready(lambda t: calls.append("unused"))
    (x + x).sum().backward()
    x.sum().backward()
    assert calls == [1, 2, 1, 2]
    remove()
    remove()
    x.sum().backward()
    assert calls == [1, 2, 1, 2, 2]
    with pytest.raises(ValueError, match="leaf"):
        (x * 2).on_grad_ready(print)
    with pytest.raises(ValueError, match="leaf"):
        Tensor([1.0]).on_grad_ready(print)


def test_the_order_of_announcements_depends_on_the_forward_pass_alone():
    orders = []
    for _ in range(5):
        weights = [leaf(3, 3) for _ in range(10)]
        order = []
        for i, weight in enumerate(weights):
            weight.on_grad_ready(lambda _, i=i: order.append(i))
        x = Tensor(normal(2, 3))
        for weight in weights:
            x = (x @ weight).tanh()
        x.sum().backward()
        orders.append(order)
    assert orders == [list(range(9, -1, -1))] * 5


def test_an_error_in_a_hook_reaches_the_caller():
    x = leaf(2)

    def fail(_):
        raise ConnectionError("rank 1 is gone")

    x.on_grad_ready(fail)
    with pytest.raises(ConnectionError, match="rank 1"):
        x.sum().backward()


def test_a_second_backward_pass_is_refused():
    x = leaf(3)
    y = x.exp()
    y.sum().backward()
    with pytest.raises(RuntimeError, match="run the forward pass again"):
        y.sum().backward()
    before = x.grad.copy()
    with pytest.raises(RuntimeError, match="freed"):
        (x.sum() + y.sum()).backward()
    np.testing.assert_array_equal(x.grad, before)


def test_backward_frees_what_was_saved_as_it_goes():
    """When an operation is visited, what later ones saved is gone already."""

    class Saved(np.ndarray):
        """An array that can be watched."""

    factors = [normal(3).view(Saved) for _ in range(3)]
    watched = [weakref.ref(factor) for factor in factors]
    alive = []

    def multiply(x, factor):
        def vjp(g):
            alive.append([ref() is not None for ref in watched])
            return np.asarray(g * factor)

        return record(np.asarray(x.data * factor), (x, vjp))

    y = leaf(3)
    while factors:
        y = multiply(y, factors.pop(0))
    gc.disable()  # reference counts alone must do it
    try:
        y.sum().backward()
    finally:
        gc.enable()
    assert alive == [[True, True, True], [True, True, False], [True, False, False]]
    assert [ref() for ref in watched] == [None] * 3


def test_graphs_and_intermediate_gradients_leave_nothing_behind():
    x = leaf(100)
    intermediates = []
    y = x
    for _ in range(5):
        y = (y * 1.5).tanh()
        intermediates.append(weakref.ref(y._node))
    gc.disable()
    try:
        y.sum().backward()
        assert y._node.edges is None
        assert [ref() for ref in intermediates[:-1]] == [None] * 4
    finally:
        gc.enable()


def test_a_graph_that_is_never_used_is_freed_with_its_result():
    x = leaf(10)
    y = x.exp()
    node = weakref.ref(y._node)
    gc.disable()
    try:
        del y
        assert node() is None
    finally:
        gc.enable()


def test_a_deep_graph():
    x = Tensor(1.0, requires_grad=True)
    y = x
    for _ in range(20_000):
        y = y + 1
    y.backward()
    assert x.grad == 1


def test_no_grad_is_for_one_thread_and_ends_with_its_block():
    x = leaf(2)
    others = []

    @no_grad()
    def quiet():
        assert not is_recording()
        thread = threading.Thread(target=lambda: others.append(is_recording()))
        thread.start()
        thread.join()
        return x * 2

    assert not quiet().requires_grad
    assert others == [True]
    with pytest.raises(ZeroDivisionError), no_grad():
        1 / 0  # noqa: B018
    assert (x * 2).requires_grad
    with pytest.raises(RuntimeError, match="requires a gradient"):
        quiet().sum().backward()


def test_inputs_that_need_no_gradient_are_not_differentiated():
    def never(g):
        raise AssertionError

    x, frozen = leaf(3), Tensor(normal(3))
    record(x.data * frozen.data, (x, lambda g: g), (frozen, never)).sum().backward()
    assert frozen.grad is None


def test_several_outputs_at_once():
    x = leaf(3)
    y = x * 2
    backward([y, y.exp().sum(), x], [np.ones(3), None, np.full(3, 5.0)])
    np.testing.assert_allclose(x.grad, 2 + 2 * np.exp(y.data) + 5)


def test_wrong_gradients_are_refused():
    x = leaf(2, 3)
    with pytest.raises(ValueError, match="one element"):
        x.exp().backward()
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        x.exp().backward(np.ones(3))
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(2, 3\)"):
        record(x.data, (x, lambda g: g.T)).sum().backward()
    with pytest.raises(RuntimeError, match="requires a gradient"):
        Tensor([1.0]).backward()


@given(st.integers(0, 2**32 - 1))
def test_random_graphs_agree_with_forward_differences_of_a_polynomial(seed):
    """Any mixture of sharing and broadcasting: the directional derivative matches a central difference."""
    random = np.random.default_rng(seed)
    leaves = [Tensor(random.uniform(0.5, 1.5, shape), requires_grad=True) for shape in [(2, 3), (3,), (1,), (2, 1)]]
    choices = random.integers(0, 100, (8, 3))

    def run():
        values = list(leaves)
        for first, second, operation in choices:
            a, b = values[first % len(values)], values[second % len(values)]
            values.append([a + b, a * b, a - b, (a * b).tanh()][operation % 4])
        total = values[-1]
        for value in values[4:-1]:
            total = total + value * 0.1
        return total.sum()

    run().backward()
    direction = [random.standard_normal(t.shape) for t in leaves]
    slope = sum(np.sum(t.grad * d) for t, d in zip(leaves, direction) if t.grad is not None)
    ends = []
    for side in (1e-6, -1e-6):
        for t, d in zip(leaves, direction):
            t.data = t.data + side * d
        ends.append(run().item())
        for t, d in zip(leaves, direction):
            t.data = t.data - side * d
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-4, atol=1e-4)
