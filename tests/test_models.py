"""Values that users read: their derived figures, and their plain form."""

import datetime
import json
from typing import Any

import pytest

from fanout_procrastinate import (
    ErrorGroup,
    Item,
    ItemStatus,
    Progress,
    RunStatus,
    SweepReport,
    models,
)

NOW = datetime.datetime(2026, 5, 4, 12, 0, tzinfo=datetime.UTC)


def progress(**values: Any) -> Progress:
    data = {
        "run_id": 7,
        "name": "lister",
        "status": "processing",
        "total": 8,
        "pending": 3,
        "waiting": 1,
        "processing": 1,
        "succeeded": 2,
        "failed": 1,
        "cancelled": 1,
        "duplicates": 0,
        "paused": False,
        "generation": 1,
        "rate": 2.0,
        "reason": None,
        "callbacks": {},
        "max_in_flight": 10,
        "created_at": NOW.isoformat(),
        "scheduled_at": None,
        "deadline": None,
        "started_at": NOW.isoformat(),
        "closed_at": None,
        "last_activity_at": None,
        "staged": 8,
        "closing": None,
    }
    return Progress.from_json(data | values)


def test_progress_is_read_from_json() -> None:
    one = progress(deadline="2026-05-04T14:00:00+02:00")
    assert (one.status, one.created_at, one.deadline) == (RunStatus.PROCESSING, NOW, NOW)
    assert one.scheduled_at is None and one.callbacks == {}
    assert progress(callbacks=None, rate=None).rate == 0.0


@pytest.mark.parametrize("hours", [-23, 23])
@pytest.mark.parametrize("text", ["9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+00:00"])
def test_times_can_be_shown_in_any_zone(text: str, hours: int) -> None:
    zone = datetime.timezone(datetime.timedelta(hours=hours))
    assert models.moment(text).astimezone(zone)
    assert models.moment("2026-05-04T12:00:00+00:00") == NOW


def test_figures() -> None:
    one = progress()
    assert (one.done, one.percent, one.eta, one.closed) == (4, 50.0, 2.0, False)


@pytest.mark.parametrize(
    ("values", "percent", "eta"),
    [
        ({"total": None}, 0.0, None),
        ({"paused": True}, 50.0, None),
        ({"rate": 0.0}, 50.0, None),
        ({"rate": 1e-300}, 50.0, None),
        ({"status": "completed"}, 50.0, 0.0),
        (
            {"status": "completed", "total": 0, "succeeded": 0, "failed": 0, "cancelled": 0},
            100.0,
            0.0,
        ),
    ],
)
def test_figures_that_nobody_can_tell(
    values: dict[str, Any], percent: float, eta: float | None
) -> None:
    one = progress(**values)
    assert (one.percent, one.eta) == (percent, eta)


def test_statuses() -> None:
    assert [status for status in RunStatus if status.closed] == ["completed", "failed", "cancelled"]
    assert ItemStatus("failed") == "failed"


def test_everything_has_a_plain_form() -> None:
    plain = progress(rate=3.0, closed_at=NOW.isoformat()).as_dict()
    assert (plain["status"], plain["percent"], plain["eta"]) == ("processing", 50.0, 1.3)
    assert plain["closed_at"] == "2026-05-04T12:00:00+00:00" and plain["deadline"] is None
    assert progress(total=None).as_dict()["eta"] is None
    item = Item(
        position=0,
        key="k",
        status=ItemStatus.FAILED,
        payload={"x": 1},
        result=None,
        error={"type": "E"},
        attempts=2,
        crashes=0,
        sanitised=False,
        due=None,
        started_at=NOW,
        finished_at=NOW,
    )
    assert item.as_dict()["started_at"] == NOW.isoformat()
    group = ErrorGroup(error_type="E", count=2, message="m", position=1, key=None)
    report = SweepReport(runs={7: "counters"}, done={"recounted": 1}, errors={8: "broken"})
    assert report.as_dict() == {
        "runs": {"7": "counters"},
        "done": {"recounted": 1},
        "errors": {"8": "broken"},
    }
    assert report.changed and not SweepReport().changed
    for value in (plain, item.as_dict(), group.as_dict(), report.as_dict()):
        assert json.loads(json.dumps(value)) == value
