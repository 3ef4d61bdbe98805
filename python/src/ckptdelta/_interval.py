"""When a save is due. The library measures what saves cost; its own account of it is engine/session/interval.c."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

DEFAULT_OVERHEAD = 0.035
WARM_UP = 4  # steps before the first save, in which memory is allocated and caches are filled
REST = 0.25  # of a save's duration passes before the next one, to see iterations without a save


@dataclass
class Costs:
    """Seconds since the session was opened: of training, and of what saves have cost it. `step`: an iteration; 0: not known."""

    trained: float
    lost: float
    step: float
    last_save: float
    saved: int
    under_way: int


@dataclass
class Interval:
    """Each of the three may make a save due; with none of them, `overhead` is DEFAULT_OVERHEAD.

    Attributes:
        every: at multiples of this number of steps.
        every_s: this many seconds after the last save began.
        overhead: as soon as the last save has cost at most this share of the time since it began.
    """

    every: int | None
    every_s: float | None
    overhead: float | None
    own: float = 0.0  # seconds that preparing saves took, which the library does not see
    _begun: float = field(default_factory=time.monotonic)
    _at: Costs | None = None
    _own_at: float = 0.0
    _steps: int = 0

    def __post_init__(self) -> None:
        if self.every is None and self.every_s is None and self.overhead is None:
            self.overhead = DEFAULT_OVERHEAD

    def due(self, step: int, costs: Costs) -> bool:
        if self.every is not None and step % self.every == 0:
            return True
        if self.every_s is not None and time.monotonic() - self._begun >= self.every_s:
            return True
        return self.overhead is not None and self._affordable(self.overhead, costs)

    def _affordable(self, overhead: float, now: Costs) -> bool:
        self._steps += 1
        if now.under_way or (not now.step and self._at is not None):
            return False
        if self._at is None:  # the first save shows what one costs
            return self._steps > WARM_UP
        passed, lost = now.trained - self._at.trained, now.lost - self._at.lost + self.own - self._own_at
        return passed >= (1 + REST) * now.last_save and lost <= overhead * passed

    def begun(self, costs: Costs, own: float) -> None:
        """A save begins. costs: before it; own: seconds that its preparation took."""
        self._begun, self._at, self._own_at = time.monotonic(), costs, self.own
        self.own += own
