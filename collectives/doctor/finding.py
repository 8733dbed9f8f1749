"""What an examination finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One fact about this machine. `advice`: what to do about it; empty where all is well.

    `serious`: something will fail, or be very slow, unless the advice is taken. `facts`: the same for programs, as
    JSON values.
    """

    topic: str
    what: str
    advice: str = ""
    serious: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mark(self) -> str:
        """How it is shown: a tick, a remark, or a trouble."""
        return "✗" if self.serious else "!" if self.advice else "✓"

    def as_json(self) -> dict[str, Any]:
        """The finding as JSON values."""
        return asdict(self)


def size(nbytes: float) -> str:
    """Bytes for people: "64 MB" is 64 * 2**20."""
    units = ["bytes", "KB", "MB", "GB", "TB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.0f} {units[0]}" if nbytes >= 100 else f"{nbytes:.3g} {units[0]}"
