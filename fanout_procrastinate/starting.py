"""A run about to be started: its options checked, and turned into columns."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict

import procrastinate

from fanout_procrastinate import (
    errors,
    fanout,
    models,
    registration,
    run,
    sanitise,
    settings,
    staging,
    store,
)

Moment = datetime.datetime | datetime.timedelta | float


class MapOptions(TypedDict, total=False):
    """The options of a run that is staged at once; see `Manager.configure`."""

    run_key: str | None
    if_closed: Literal["return", "replace"]
    max_in_flight: int | None
    tolerate: int | float | None
    deadline: Moment | None
    priority: int | None
    queue: str | None
    tags: Iterable[str]
    weight: float | None


class RunOptions(MapOptions, total=False):
    """The options of a run; see `Manager.configure`."""

    schedule_at: Moment | None
    schedule_in: Moment | Mapping[str, float] | None
    connection: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A run about to be started."""

    owner: fanout.FanOut
    name: str
    run_key: str | None
    columns: Mapping[str, Any]
    connection: Any = None

    @classmethod
    def of(
        cls,
        task: procrastinate.tasks.Task[..., Any, ...],
        columns: Mapping[str, Any],
        given: Mapping[str, Any],
    ) -> Plan:
        """Check the options of a start and return it as columns.

        Args:
            task: whose run it is: the manager's, or without one the child's.
            columns: as declared.
            given: what the caller wants otherwise.

        Raises:
            ConfigurationError: an option cannot work.
        """
        options = dict(given)
        connection = options.pop("connection", None)
        wanted = _start_columns(options)
        return cls(
            owner=fanout.FanOut.of(registration.app_of(task)),
            name=task.name,
            run_key=wanted.get("run_key"),
            columns={"name": task.name, **columns, **wanted},
            connection=connection,
        )

    def start_call(self, args: Mapping[str, Any] | None = None) -> store.Call[models.Started]:
        """Return the call that starts it.

        Raises:
            InvalidValue: the arguments are no JSON.
        """
        text = _args_json(args or {})
        columns = dict(self.columns) | {
            "args": json.loads(text),
            "args_digest": hashlib.sha256(text.encode()).hexdigest(),
        }
        telemetry = self.owner.telemetry
        span, carrier = telemetry.trigger(self.name)
        if carrier:
            # Among the callbacks, for no close calls one on "trace": it needs no column.
            traced = {"on": "trace", "carrier": carrier}
            columns["callbacks"] = [*columns.get("callbacks", ()), traced]
        call = store.start(columns)

        def parse(rows: store.Rows) -> models.Started:
            started = call.parse(rows)
            telemetry.end_trigger(span, started.run_id)
            return started

        return call if span is None else dataclasses.replace(call, parse=parse)


def _start_columns(given: dict[str, Any]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    run_key = given.pop("run_key", None)
    if run_key is not None:
        columns["run_key"] = _checked_run_key(run_key)
    if_closed = given.pop("if_closed", "return")
    if if_closed not in ("return", "replace"):
        raise errors.ConfigurationError(f'if_closed={if_closed!r}: use "return" or "replace"')
    columns["if_closed"] = if_closed
    columns["tags"] = _tags(given.pop("tags", ()))
    at, after = given.pop("schedule_at", None), given.pop("schedule_in", None)
    if at is not None and after is not None:
        raise errors.ConfigurationError("schedule_at and schedule_in exclude each other")
    if at is not None or after is not None:
        name = "schedule_in" if at is None else "schedule_at"
        columns["scheduled_at"] = run.moment(after if at is None else at, name).isoformat()
    queue = given.pop("queue", None)
    if queue is not None:
        columns["child_queue"] = columns["manager_queue"] = settings.check_queue_name(queue)
    weight = given.pop("weight", None)
    if weight is not None:
        columns["weight"] = settings.check_weight(weight)
    if given.get("priority") is not None:
        columns["child_priority"] = columns["manager_priority"] = given["priority"]
    return columns | {
        name: value
        for name, value in run.run_columns(
            # For a tolerance None says something: any number.
            {
                name: value
                for name, value in given.items()
                if value is not None or name == "tolerate"
            }
        ).items()
        if name != "priority"
    }


def _checked_run_key(run_key: Any) -> str:
    if not _is_plain_text(run_key) or not 0 < len(run_key.encode()) <= staging.MAX_KEY_BYTES:
        raise errors.ConfigurationError(
            f"run_key={run_key!r}: give a str of 1 to {staging.MAX_KEY_BYTES} bytes, without NUL "
            "characters and lone surrogates"
        )
    return str(run_key)


def _tags(tags: Any) -> list[str]:
    listed = isinstance(tags, Iterable) and not isinstance(tags, str)
    found = list(tags) if listed else []
    if not listed or not all(map(_is_plain_text, found)):
        raise errors.ConfigurationError(
            f"tags={tags!r}: give a list of str, without NUL characters and lone surrogates"
        )
    return found


def _is_plain_text(text: Any) -> bool:
    return isinstance(text, str) and sanitise.clean_text(text) == text


def _args_json(args: Mapping[str, Any]) -> str:
    for name, value in args.items():
        try:
            text = sanitise.to_json(value)
        except (TypeError, ValueError, RecursionError) as exc:
            raise errors.InvalidValue(
                f"argument {name!r} is no JSON ({exc}); pass ids, text, numbers, lists and dicts"
            ) from exc
        if not sanitise.is_storable(text):
            raise errors.InvalidValue(
                f"argument {name!r} contains a NUL character, a lone surrogate or a number that "
                "the database cannot store; remove it"
            )
    return sanitise.to_json(dict(args))


def manager_columns(options: settings.ManagerOptions) -> dict[str, Any]:
    """Return a manager's options as columns of its runs."""
    return {
        "manager_priority": options.priority,
        "max_in_flight": options.max_in_flight,
        "stuck_after": options.stuck_after,
        "manager_max_attempts": options.max_attempts,
        "weight": options.weight,
        **run.tolerance_columns(options.tolerate),
    }
