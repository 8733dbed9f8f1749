"""What the tests of collectives share: modules beside them that ranks import too, and nothing shared left in memory."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for `import expected`; ranks inherit it

from leftovers import descriptors, symmetric_maps


@pytest.fixture
def nothing_shared_left() -> Iterator[None]:
    """A test that leaves a descriptor open, or symmetric memory mapped, in this process fails."""
    gc.collect()
    before = descriptors()
    yield
    gc.collect()
    assert descriptors() <= before
    assert symmetric_maps("self") == 0
