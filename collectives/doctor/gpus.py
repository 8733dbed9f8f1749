"""GPUs, how they reach each other, and the packages that drive them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from collectives.doctor.finding import Finding, size
from collectives.doctor.software import _last_line, _run, _version

_NEEDED = ("numba-cuda", "cuda-core", "cuda-bindings", "nccl4py")


class Gpus(NamedTuple):
    """What the driver tells. peers: pairs (i, j) where i can read j's memory."""

    driver: int  # such as 12040 for CUDA 12.4
    names: list[str]
    capabilities: list[tuple[int, int]]
    memory: list[int]  # bytes
    peers: set[tuple[int, int]]


def examine() -> list[Finding]:
    """All findings about GPUs."""
    return [devices(), packages(), nccl()]


def devices(ask: Callable[[], Gpus] | None = None, nodes: Path = Path("/dev")) -> Finding:
    """The GPUs that the driver shows. `ask` stands in for the driver, and `nodes` for /dev, in tests."""
    there = sorted(path.name for path in nodes.glob("nvidia[0-9]*"))
    try:
        gpus = (ask or ask_driver)()
    except (ImportError, OSError, RuntimeError) as error:
        if not there:
            return Finding("GPUs", "none: ranks compute on the CPU", facts={"count": 0})
        advice = "install what drives them: pip install 'mgpu-core[cuda12]' (or cuda13)"
        if not isinstance(error, ImportError):
            advice = "the driver refuses; does nvidia-smi work here? In a container: docker run --gpus all"
        return Finding("GPUs", f"{', '.join(there)} are there, but: {error}", advice, True, {"count": 0})
    facts = {**gpus._asdict(), "peers": sorted(gpus.peers), "count": len(gpus.names)}
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus.names:
        what = "the driver shows none" + ("" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden!r})")
        return Finding("GPUs", what, facts=facts)
    kinds = "; ".join(
        f"{index}: {name}, {size(nbytes)}, sm_{major}{minor}"
        for index, (name, nbytes, (major, minor)) in enumerate(zip(gpus.names, gpus.memory, gpus.capabilities))
    )
    pairs = {(i, j) for i in range(len(gpus.names)) for j in range(len(gpus.names)) if i != j}
    missing = sorted(pairs - gpus.peers)
    what = f"{kinds}; CUDA {gpus.driver // 1000}.{gpus.driver % 1000 // 10}"
    if missing:
        which = ", ".join(f"{i}-{j}" for i, j in missing if i < j or (j, i) not in missing)
        advice = f"no peer access between {which}: those go through the host's memory, slower; NCCL may do better"
        return Finding("GPUs", what, advice, facts=facts)
    if len(gpus.names) > 1:
        what += "; each reads every other's memory"
    return Finding("GPUs", what, facts=facts)


def ask_driver() -> Gpus:
    """What the CUDA driver tells, through cuda.bindings. Raises ImportError without it, RuntimeError if it refuses."""
    driver = importlib.import_module("cuda.bindings.driver")

    def call(name: str, *arguments: Any) -> Any:
        error, *values = getattr(driver, name)(*arguments)
        if int(error):
            raise RuntimeError(f"{name} fails with error {int(error)}")
        return values[0] if values else None

    call("cuInit", 0)
    version = call("cuDriverGetVersion")
    handles = [call("cuDeviceGet", index) for index in range(call("cuDeviceGetCount"))]
    attribute = driver.CUdevice_attribute
    major = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    return Gpus(
        version,
        [call("cuDeviceGetName", 128, handle).decode().strip("\0") for handle in handles],
        [
            (call("cuDeviceGetAttribute", major, handle), call("cuDeviceGetAttribute", minor, handle))
            for handle in handles
        ],
        [call("cuDeviceTotalMem", handle) for handle in handles],
        {
            (i, j)
            for i, one in enumerate(handles)
            for j, other in enumerate(handles)
            if i != j and call("cuDeviceCanAccessPeer", one, other)
        },
    )


def packages() -> Finding:
    """What our GPU kernels are compiled and launched with."""
    found = {name: _version(name) for name in (*_NEEDED, "cupy-cuda12x", "cupy-cuda13x")}
    there = {name: version for name, version in found.items() if version}
    what = ", ".join(f"{name} {version}" for name, version in there.items()) or "none of the CUDA packages is installed"
    return Finding("CUDA packages", what, facts=found)


def nccl() -> Finding:
    """The NCCL that would be loaded: its version and its path."""
    if _version("nccl4py") is None:
        return Finding("NCCL", "nccl4py is not installed: no nccl backend", facts={"version": None})
    script = "import nccl.core as n; v = n.get_version().libnccl; print(v.version, v.cuda_variant, v.path, sep='\\n')"
    ended, text = _run([sys.executable, "-c", script])
    if not ended:
        advice = "install the library: pip install nvidia-nccl-cu12 (or -cu13), and look at LD_LIBRARY_PATH"
        return Finding("NCCL", f"nccl4py cannot load it: {_last_line(text)}", advice, True, {"version": None})
    version, variant, path = text.split("\n")[:3]
    facts = {"version": version, "cuda": variant, "path": path}
    spec = importlib.util.find_spec("nvidia.nccl")
    own = [Path(folder) / "lib" for folder in spec.submodule_search_locations or []] if spec else []
    what = f"{version} for CUDA {variant}, {path}"
    if own and Path(path).parent not in own:
        advice = f"this is not the one that pip has installed in {own[0]}; LD_LIBRARY_PATH or LD_PRELOAD is the cause"
        return Finding("NCCL", what, advice, facts=facts)
    return Finding("NCCL", what, facts=facts)
