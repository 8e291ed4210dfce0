"""Faults as they were done: each by its kind, from when until when, and what it hit."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable

from tests.chaos.breakage import Breakage
from tests.chaos.hands import Hands
from tests.chaos.plan import Fault

_SILENCING = (
    *("restart fast", "restart immediate", "restart kill", "read only", "timeouts", "serializable"),
    *("hold locks", "swallow", "freeze", "delay", "refuse"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """A fault that was done: from when until when, and what it hit; nothing where that is empty."""

    fault: Fault
    began: float
    ended: float
    hit: str

    def silence(self, began: float, ended: float) -> float:
        """Return for how long in this time it can have kept a worker from the database."""
        if not self.hit or self.fault.kind not in _SILENCING:
            return 0.0
        return max(0.0, min(ended, self.ended) - max(began, self.began))

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Faults:
    """Do faults, and note what they hit."""

    def __init__(self, breakage: Breakage, hands: Hands) -> None:
        self._actors = (breakage, hands)
        self.spans: list[Span] = []
        self.errors: list[str] = []

    def do(self, fault: Fault) -> None:
        """Do one fault; it lasts until this returns."""
        began = time.time()
        hit: object = None
        try:
            hit = self.act(fault.kind)(fault)
        except Exception as exc:  # noqa: BLE001 - it is part of the verdict
            self.errors.append(f"{fault}: {exc!r}")
        self.spans.append(Span(fault=fault, began=began, ended=time.time(), hit=str(hit or "")))

    def act(self, kind: str) -> Callable[[Fault], object]:
        """Return what does this kind of fault."""
        name = kind.replace(" ", "_")
        actor = next(actor for actor in self._actors if hasattr(actor, name))
        act: Callable[[Fault], object] = getattr(actor, name)
        return act

    def count(self, *, hit: bool) -> Counter[str]:
        """Count, by kind, the faults that hit something, or those that did not."""
        return Counter(span.fault.kind for span in self.spans if bool(span.hit) is hit)
