"""Is the `kernels` that would be imported ours? Other distributions use such plain names too, and the one that comes
first on sys.path, or was installed last into the same folder, wins.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

MARKER = b'__distribution__ = "mgpu-core"'


class ShadowedPackageError(ImportError):
    """One of our packages is hidden by another of the same name, or missing."""


def check_ours(package: str) -> None:
    """Raise ShadowedPackageError unless importing `package` would give mgpu-core's own.

    The package is looked at and not imported, since importing a stranger may fail or do anything. This costs one search
    of sys.path; the installed distributions are scanned only when something is wrong.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ShadowedPackageError(f"mgpu-core's package `{package}` is missing; reinstall mgpu-core")
    if MARKER in Path(spec.origin).read_bytes():
        return
    owners = owners_of(Path(spec.origin))
    if owners:
        whose = f"it belongs to the distribution {' or '.join(map(repr, owners))}"
        remedy = f"Give each an environment of its own, or pip uninstall {owners[0]} and then reinstall mgpu-core"
    else:
        whose = "it belongs to no installed distribution"
        remedy = "Rename it, or take its folder off sys.path (the script's folder, the working folder, PYTHONPATH)"
    raise ShadowedPackageError(
        f"mgpu-core's package `{package}` is hidden by another one of that name at {spec.origin}; {whose}. {remedy}."
    )


def owners_of(path: Path) -> list[str]:
    """Names of the installed distributions, ours apart, that list `path` among their files."""
    owners = {
        distribution.metadata["Name"]
        for distribution in importlib.metadata.distributions()
        for file in distribution.files or ()
        if file.name == path.name and Path(str(distribution.locate_file(file))) == path
    }
    return sorted(owners - {"mgpu-core"})
