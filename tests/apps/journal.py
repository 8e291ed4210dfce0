"""What workers did, one line of JSON each, appended at once: work done twice is seen."""

import json
import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "FANOUT_TEST_JOURNAL"


class Journal:
    """Write and read the file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, **facts: Any) -> None:
        """Append one line: O_APPEND keeps the lines of all processes apart."""
        line = json.dumps({"event": event, "pid": os.getpid(), "at": time.time(), **facts})
        _append(self.path, line.encode() + b"\n")

    def read(self, event: str | None = None, **facts: Any) -> list[dict[str, Any]]:
        """Return the lines of this event with these facts, in order."""
        if not self.path.exists():
            return []
        # The last one may be on its way.
        whole, _, _ = self.path.read_bytes().rpartition(b"\n")
        lines = [json.loads(line) for line in whole.splitlines()]
        return [
            line
            for line in lines
            if event in (None, line["event"])
            and all(line.get(name) == value for name, value in facts.items())
        ]

    def is_first(self, name: str) -> bool:
        """Return whether nobody asked for this name before, in any process."""
        try:
            os.close(os.open(self._beside(name), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def arrive(self, name: str) -> None:
        """Count one more at a barrier."""
        _append(self._beside(name), b".")

    def arrived(self, name: str) -> tuple[int, float]:
        """Return how many have arrived at a barrier, and when the last of them did."""
        try:
            found = self._beside(name).stat()
        except FileNotFoundError:
            return 0, 0.0
        return found.st_size, found.st_mtime

    def _beside(self, name: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{name}")


def of_environment() -> Journal:
    """Return the journal that the test named to this process."""
    return Journal(Path(os.environ.get(VARIABLE, os.devnull)))


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
