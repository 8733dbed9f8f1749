"""The limits that a container or a batch system sets on this process: control groups, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cpu_quota(proc: Path = Path("/proc/self")) -> float | None:
    """CPUs this process may use on average, for example 1.5; None where no quota is set."""
    quotas = []
    for group in _groups("cpu", proc):
        words = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):  # not "max", not -1
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_left(proc: Path = Path("/proc/self")) -> int | None:
    """Bytes this process's groups may still take; None where no limit is set. Page cache that can go counts as free."""
    left = []
    for group in _groups("memory", proc):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
        if limit and used and limit[0].isdigit():
            stat = _words(group / "memory.stat")
            values = dict(zip(stat[::2], stat[1::2], strict=False))
            cache = int(values.get("total_inactive_file", values.get("inactive_file", 0)))
            left.append(max(0, int(limit[0]) - int(used[0]) + cache))
    return min(left, default=None)


def _groups(controller: str, proc: Path) -> Iterator[Path]:
    """The folders of this process's group and all its parents, as far up as this mount namespace shows them."""
    paths: dict[str, str] = {}
    for line in _lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):  # the name is empty for version 2
            paths[name] = path
    for line in _lines(proc / "mountinfo"):
        mount, _, source = line.partition(" - ")
        root, point = mount.split()[3:5]
        kind, _, options = source.split()[:3]
        group = "" if kind == "cgroup2" else controller
        if kind not in ("cgroup", "cgroup2") or (group and group not in options.split(",")) or group not in paths:
            continue
        path = paths[group]
        inside = path[len(root) :] if root != "/" and path.startswith(root) else path if root == "/" else "/"
        top = Path(point)
        folder = top / inside.strip("/")
        yield folder
        while folder != top and top in folder.parents:
            folder = folder.parent
            yield folder


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()
