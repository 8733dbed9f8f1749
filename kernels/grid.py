"""What the host and a GPU's kernel agree on about a launch, beside the executor's words."""

from __future__ import annotations

MOST_LANES = 512  # threads of a block, at most

# How long a lane waits for a flag: LINK_SPINS looks at once, SHORT_NAPS after short naps, and then long naps, as many
# as a record in host memory says. LINK_YIELDS is that record's address.
SHORT_NAPS, SHORT_NS = 1000, 500
LONG_NS = 20_000
PATIENCE_STOP = 0  # a flag: the host gives up
PATIENCE_NAPS = 1  # long naps until the deadline
PATIENCE_WORDS = 2


def naps(seconds: float) -> int:
    """Long naps in so many seconds."""
    return max(1, int(seconds * 1e9 / LONG_NS))
