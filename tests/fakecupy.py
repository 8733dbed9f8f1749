"""CuPy in memory: the module `cupy` with arrays that keep apart from NumPy's as CuPy's do, and count what is copied.

    with fakecupy.installed() as counts:
        ...                       # `import cupy` finds it, and array_api_compat, and mgpu_core's device "cuda"
        counts["to host"]         # copies from the "GPU", each of which the host would wait for

An array is no numpy.ndarray, converts to none by itself, and computes with no NumPy array: TypeError, where CuPy raises
one too, and in a few places where CuPy would convert. Functions are NumPy's, by the names in NAMES alone, all of which
CuPy 14.2 has. Kernels of `kernels.optimizers` run on the CPU; streams do nothing, and note what was asked.
Beside a `fakegpu` communicator, `settle` says how to wait for what that has put into the current stream.
"""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np

from kernels import cubin, native, optimizers

counts: Counter[str] = Counter()
settle: list[Callable[[], object]] = []
_freed: list[Any] = []  # memory that what is in the current stream may still use: as with CuPy's pool, nobody else may
TYPES = (
    "bool_ complex128 complex64 complexfloating dtype float16 float32 float64 floating inexact integer int16 int32 "
    "int64 int8 intp signedinteger uint16 uint32 uint64 uint8 unsignedinteger"
).split()
NAMES = (
    "abs add all any arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argsort array asarray "
    "ascontiguousarray broadcast_to clip concatenate empty empty_like exp expand_dims expm1 full full_like isfinite "
    "isinf isnan invert left_shift log matmul max maximum mean min minimum moveaxis nonzero ones ones_like power prod "
    "reshape "
    "right_shift round sqrt stack sum swapaxes take take_along_axis tanh transpose where zeros zeros_like"
).split()


ADDED = ("int32", "float16", "float32", "float64", "complex64", "complex128", "uint32", "uint64")  # by `add.at`


class ndarray:
    """See the module's docstring. `_a` is the memory, when what was begun before is over."""

    __module__ = "cupy"
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, a: Any) -> None:
        self._memory = a

    @property
    def _a(self) -> Any:
        if settle:
            over = len(_freed)
            for wait in settle:
                wait()
            del _freed[:over]
        return self._memory

    def __del__(self) -> None:
        if settle:
            _freed.append(self._memory)

    shape, dtype, ndim, size, itemsize, nbytes, strides, flags = (
        property(lambda self, name=name: getattr(self._memory, name))
        for name in ("shape", "dtype", "ndim", "size", "itemsize", "nbytes", "strides", "flags")
    )

    @property
    def T(self) -> ndarray:
        return ndarray(self._a.T)

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self._memory.ctypes.data, device_id=0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._a.__array_interface__, "version": 3, "stream": 1}

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc: Any, *_: Any, **__: Any) -> Any:
        raise TypeError(f"numpy.{ufunc.__name__} was called for an array on a GPU")

    def __array_function__(self, function: Any, *_: Any, **__: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} was called for an array on a GPU")

    def get(self) -> Any:
        counts["to host"] += 1
        return self._a.copy()

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __bool__(self) -> bool:
        return bool(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    __index__ = __int__

    def __len__(self) -> int:
        return len(self._a)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> ndarray:
        return _wrapped(self._a[_index(index)], self)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._a[_index(index)] = _unwrapped(value)

    def __repr__(self) -> str:
        return f"cupy.{self._a!r}"


def _index(index: Any) -> Any:
    """NumPy's integers and lists may be in it, as with CuPy."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    return index._a if isinstance(index, ndarray) else index


def _unwrapped(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value._a
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_unwrapped, value))
    if isinstance(value, Ufunc):
        return value.function
    return value


def _wrapped(value: Any, out: Any = None) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_wrapped, value))
    return ndarray(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) else value


class Ufunc:
    """A function of NumPy's for arrays on the GPU. Calls are counted as launches."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        counts["launches"] += 1
        with np.errstate(all="ignore"):
            given = {name: _unwrapped(value) for name, value in options.items()}
            result = self.function(*map(_unwrapped, arguments), **given)
        return options["out"] if options.get("out") is not None else _wrapped(result)

    def at(self, a: ndarray, index: Any, b: ndarray) -> None:
        if a.dtype.name not in ADDED:
            raise TypeError(f"cupyx.scatter_add only supports {', '.join(ADDED)} as data type")
        at = _index(index)
        at = at % len(a) if isinstance(at, np.ndarray) and at.dtype != bool else at
        self.function.at(a._a, at, _unwrapped(b))


def _take(a: Any, index: Any, axis: int) -> Any:
    """Indices out of bounds go round, as with CuPy."""
    return np.take(a, index, axis=axis, mode="wrap")


def _take_along_axis(a: Any, index: Any, axis: int) -> Any:
    return np.take_along_axis(a, index % a.shape[axis], axis=axis)


def _array(value: Any, dtype: Any = None, copy: Any = True, order: Any = "K", **_: Any) -> ndarray:
    if isinstance(value, ndarray):
        kept = not copy and (dtype is None or value.dtype == dtype)
        return value if kept else ndarray(np.array(value._a, dtype=dtype, order=order))
    if hasattr(value, "__cuda_array_interface__"):
        return _of_interface(value)
    if isinstance(value, np.ndarray) or not np.isscalar(value):
        counts["to device"] += 1
    return ndarray(np.array(value, dtype=dtype))


def _of_interface(value: Any) -> ndarray:
    """The memory of another library's array, and not a copy of it."""
    interface = dict(value.__cuda_array_interface__)
    interface.pop("stream", None)
    holder = types.SimpleNamespace(__array_interface__=interface, owner=value)
    return ndarray(np.asarray(holder))


def _operator(name: str) -> Any:
    def operate(self: ndarray, *others: Any, **options: Any) -> Any:
        counts["launches"] += 1
        if any(isinstance(other, np.ndarray) for other in others):
            raise TypeError(f"Unsupported type {np.ndarray}")
        plain = [other._a if isinstance(other, ndarray) else other for other in others]
        with np.errstate(all="ignore"):
            result = _product(self._a, name, plain) if "matmul" in name else getattr(self._a, name)(*plain, **options)
        if result is NotImplemented:
            return result
        if name.startswith("__i") and name != "__invert__":
            return self
        return _wrapped(result)

    return operate


def _product(a: Any, name: str, others: list[Any]) -> Any:
    """Sums of 16-bit numbers are float32's, as in cuBLAS."""
    if a.dtype.itemsize != 2:
        return getattr(a, name)(*others)
    return getattr(a.astype(np.float32), name)(*(b.astype(np.float32) for b in others)).astype(a.dtype)


for _name in "add sub mul truediv pow matmul floordiv mod and or".split():
    for _form in (f"__{_name}__", f"__r{_name}__", f"__i{_name}__"):
        setattr(ndarray, _form, _operator(_form))
for _name in "neg invert abs eq ne lt le gt ge".split():
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
for _name in "sum mean max min argmax all any transpose view ravel copy fill reshape".split():
    setattr(ndarray, _name, _operator(_name))


def _astype(self: ndarray, dtype: Any, copy: bool = True, **_: Any) -> ndarray:
    counts["launches"] += 1
    with np.errstate(all="ignore"):
        return self if not copy and self.dtype == dtype else ndarray(self._a.astype(dtype))


ndarray.astype = _astype  # type: ignore[attr-defined]


class Device:
    """A GPU, the only one."""

    compute_capability, attributes = "90", {"MultiProcessorCount": 2}

    def __init__(self, number: int | None = None) -> None:
        self.id = 0 if number is None else number

    def use(self) -> None:
        counts["use"] += 1

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Stream:
    """What is put into it is done at once. `log` holds what was asked of it."""

    ptr = 0
    current: list[Stream] = []

    def __init__(self, non_blocking: bool = False) -> None:
        self.log: list[str] = []

    def record(self) -> str:
        self.log.append("record")
        return "event"

    def wait_event(self, event: str) -> None:
        self.log.append("wait")

    def synchronize(self) -> None:
        counts["to host"] += 1

    def __enter__(self) -> Stream:
        self.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.current.pop()


class Module:
    """A kernel of `kernels.optimizers`, on the CPU."""

    def load(self, code: bytes) -> None:
        self.code = code.decode()

    def get_function(self, name: str) -> Any:
        step = native.load(self.code).call

        def launch(grid: tuple[int, int], block: tuple[int], arguments: tuple[int]) -> None:
            counts["launches"] += 1
            counts["optimizer"] += 1
            assert self.code.startswith(name)
            for wait in settle:
                wait()
            for row in range(grid[1]):
                job = arguments[0] + 8 * optimizers.JOB_WORDS * row
                assert all(step(job, lane, 2) == 0 for lane in range(2))

        return launch


def _modules(devices: int) -> dict[str, types.ModuleType]:
    names = "cupy cupy.cuda cupy.cuda.device cupy.linalg cupy.fft cupyx"
    modules = {name: types.ModuleType(name) for name in names.split()}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
    cupy = modules["cupy"]
    for name in NAMES:
        setattr(cupy, name, Ufunc(getattr(np, name)))
    for name in TYPES:
        setattr(cupy, name, getattr(np, name))
    cupy.__dict__.update(
        ndarray=ndarray,
        array=_array,
        asarray=lambda value, dtype=None, **_: _array(value, dtype, copy=False),
        ascontiguousarray=lambda a: a if a.flags.c_contiguous else ndarray(np.ascontiguousarray(a._a)),
        asnumpy=lambda a: a.get(),
        broadcast_arrays=lambda *arrays: [ndarray(a) for a in np.broadcast_arrays(*(a._a for a in arrays))],
        take=Ufunc(_take),
        take_along_axis=Ufunc(_take_along_axis),
        issubdtype=np.issubdtype,
        result_type=lambda *arrays: np.result_type(*map(_unwrapped, arrays)),
        cuda=modules["cupy.cuda"],
        linalg=modules["cupy.linalg"],
        fft=modules["cupy.fft"],
        __all__=[*NAMES, *TYPES, "ndarray", "cuda"],
    )
    main = Stream()
    cupy.cuda.__dict__.update(
        Device=Device,
        Stream=Stream,
        Module=Module,
        get_current_stream=lambda: Stream.current[-1] if Stream.current else main,
        runtime=types.SimpleNamespace(getDeviceCount=lambda: devices),
        device=modules["cupy.cuda.device"],
    )
    modules["cupy.cuda.device"].Device = Device  # type: ignore[attr-defined]
    modules["cupy.linalg"].__dict__.update(lstsq=None, norm=Ufunc(np.linalg.norm))
    modules["cupyx"].empty_pinned = np.empty  # type: ignore[attr-defined]
    return modules


def install(devices: int = 1) -> Counter[str]:
    """From now on `import cupy` finds this. Returns the counts, from zero."""
    from mgpu_core import device

    for name in [name for name in sys.modules if name.startswith("array_api_compat.cupy")]:
        del sys.modules[name]
    sys.modules.update(_modules(devices))
    cubin.load_optimizer = lambda rule, dtype, capability: f"{rule}-{dtype}".encode()
    device.cuda.cache_clear()
    counts.clear()
    return counts


@contextmanager
def installed(devices: int = 1) -> Iterator[Counter[str]]:
    """Inside, `import cupy` finds this; afterwards, what was there before."""
    from mgpu_core import device

    before, load = dict(sys.modules), cubin.load_optimizer
    try:
        yield install(devices)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in ("cupy", "cupyx") or "compat.cupy" in name]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in before.items() if name.startswith("cupy")})
        cubin.load_optimizer = load
        device.cuda.cache_clear()
