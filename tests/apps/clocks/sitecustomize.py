"""On the path of a process: its clock differs from the others', by `FANOUT_TEST_CLOCK` seconds.

`jumps` has the clock go ten minutes to and fro, every second.
"""

import datetime
import os
import time

_given = os.environ["FANOUT_TEST_CLOCK"]
_time = time.time


def _shift() -> float:
    return 600.0 * (-1) ** int(time.monotonic()) if _given == "jumps" else float(_given)


def _shifted() -> float:
    return _time() + _shift()


class _Datetime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "_Datetime":
        return super().now(tz) + datetime.timedelta(seconds=_shift())

    @classmethod
    def utcnow(cls) -> "_Datetime":
        return cls.now(datetime.UTC).replace(tzinfo=None)


time.time = _shifted
datetime.datetime = _Datetime  # type: ignore[misc]
