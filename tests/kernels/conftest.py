"""What the kernels' tests share: `handmade`, and a head start for the compiler."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for `import handmade`

COMPILE_BACKWARDS = """
import sys
print("started", flush=True)
from kernels import native
for name in reversed(sys.argv[1:]):
    native.load(name)
"""


@pytest.fixture(scope="session", autouse=True)
def second_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where many kernels will be needed, another process compiles them too, beginning at the other end."""
    here = Path(__file__).parent
    items = [item for item in request.session.items if here in item.path.parents]
    names = [item.callspec.params["kernel"] for item in items if "kernel" in _parameters(item)]
    names = list(dict.fromkeys(names))
    process = None
    if len(names) > 4:
        process = subprocess.Popen([sys.executable, "-c", COMPILE_BACKWARDS, *names], stdout=subprocess.PIPE)
        process.stdout.readline()
    yield
    if process is not None:
        process.terminate()
        process.wait()


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}
