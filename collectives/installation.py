"""Is the `kernels` beside us ours? Such plain names are taken by other distributions too, and whoever comes first on
sys.path, or was installed last into the same folder, wins.
"""

import importlib.util
from pathlib import Path

DISTRIBUTION = "mgpu-core"
MARKER = f'__distribution__ = "{DISTRIBUTION}"'.encode()


class ShadowedPackageError(ImportError):
    """Another distribution's package hides one of ours."""


def check_ours(package: str) -> None:
    """Raise ShadowedPackageError unless importing `package` would give mgpu-core's own.

    The package is looked at and not imported, since a stranger's import may fail or do anything. It costs what the
    import system's own search costs; distributions are only scanned when something is wrong.
    """
    spec = importlib.util.find_spec(package)
    if spec and spec.origin and MARKER in Path(spec.origin).read_bytes():
        return
    found = [spec.origin] if spec and spec.origin else list(spec.submodule_search_locations or ()) if spec else []
    raise ShadowedPackageError(explain(package, found))


def explain(package: str, found: list[str]) -> str:
    """Say which distribution's `package` was found, where, and what to do."""
    if not found:
        return (
            f"mgpu-core's package `{package}` is missing; "
            "reinstall it: pip install --force-reinstall --no-deps mgpu-core"
        )
    from importlib.metadata import packages_distributions

    owners = sorted({owner for owner in packages_distributions().get(package, []) if owner != DISTRIBUTION})
    if owners:
        whose = f"it belongs to the distribution {' or '.join(map(repr, owners))}"
        remedy = (
            f"Give each an environment of its own, or uninstall that one and put ours back: pip uninstall {owners[0]}; "
            "pip install --force-reinstall --no-deps mgpu-core"
        )
    else:
        whose = "it belongs to no installed distribution"
        remedy = "Rename it, or take its folder off sys.path (the script's folder, the working folder, PYTHONPATH)"
    return (
        f"mgpu-core's package `{package}` is hidden by another one of that name at {' and '.join(found)}; "
        f"{whose}. {remedy}."
    )
