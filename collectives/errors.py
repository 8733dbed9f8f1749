"""What a collective raises, and what each error means for the caller."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """Something went wrong in a collective call; every error of this package derives from it.

    After a `CollectiveMismatchError` raised at entry nothing has been written. After any other
    error the contents of outputs are undefined and the communicator refuses further calls.
    """

    echo: bool = False  # whether this only repeats what went wrong at another rank


class CollectiveMismatchError(CollectiveError):
    """The ranks called different things: another operation, dtype, count, root or reduction.

    Raised on every rank; the message names who called what.
    """


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A call did not finish before its deadline; the message names who arrived and who did not."""


class PeerLostError(CollectiveError, ConnectionError):
    """A rank died, or closed its communicator, while others still counted on it; the message names it."""


class ProgramError(CollectiveError):
    """A program is wrong: its result, its progress or its memory ordering could not be proven.

    `rank` and `step` (the position in that rank's instruction list) say where the proof broke off, and
    `chunk` which part of the data it concerns; each is None where it does not apply.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, step: int | None = None, chunk: int | None = None
    ) -> None:
        self.rank = rank
        self.step = step
        self.chunk = chunk
        place = [
            f"{name} {value}" for name, value in (("rank", rank), ("step", step), ("chunk", chunk)) if value is not None
        ]
        super().__init__(f"{', '.join(place)}: {message}" if place else message)
