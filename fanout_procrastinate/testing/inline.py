"""Running a manager and its children one after the other, without any database."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import procrastinate

from fanout_procrastinate import (
    child,
    context,
    errors,
    execution,
    fanout,
    limits,
    managers,
    models,
    sanitise,
    settings,
    staging,
)
from fanout_procrastinate.testing import loops

_End = execution.Returned | execution.Raised


@dataclasses.dataclass(frozen=True, kw_only=True)
class InlineProgress(models.Progress):
    """Show how a run went that had no database.

    Args:
        items: every item, as `Run.items` shows them.
        results: the succeeded items' results in order, typed as `Run.results` gives them.
        errors: each failed item's last error by its position: ``type``, ``message``, ``class``,
            ``traceback``.
    """

    items: tuple[models.Item, ...]
    results: tuple[Any, ...]
    errors: Mapping[int, Mapping[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Return the progress as plain JSON types."""
        names = [field.name for field in dataclasses.fields(models.Progress)]
        return models.Progress(**{name: getattr(self, name) for name in names}).as_dict()


def run_inline(manager: managers.Manager[..., Any], /, **args: Any) -> InlineProgress:
    """Run a manager and its children one after the other in this thread, without a database.

    Items and results are checked and serialised as for a real run, and errors are classed and
    tried again, without waiting. Callbacks are not called. Sync functions have no time limit here.

    Args:
        manager: the declared manager.
        **args: its arguments.

    Raises:
        InvalidItem: an item does not fit the child.
        Exception: what the manager raised.

    Example:
        >>> progress = run_inline(extract_folder, folder="papers")  # doctest: +SKIP
        >>> assert progress.succeeded == 12 and progress.results[0].pages == 3
    """
    loops.refuse("run_inline")
    inline = _Inline(manager, args)
    with limits.nowhere(), asyncio.Runner() as runner:
        listed = manager.function(**inline.args)
        if inspect.isawaitable(listed) or hasattr(listed, "__aiter__"):
            listed = runner.run(_collected(listed))
        inline.take(listed)

        def call(function: Callable[..., Any], *values: Any) -> _End:
            if inspect.iscoroutinefunction(function):
                code = execution.Execution(function).run(*values, timeout=inline.timeout)
                return runner.run(code)
            return _called(function, *values)

        tries = inline.tries()
        with contextlib.suppress(StopIteration):
            values = next(tries)
            while True:
                values = tries.send(call(manager.child.function, *values))
    return inline.progress()


async def run_inline_async(manager: managers.Manager[..., Any], /, **args: Any) -> InlineProgress:
    """Run a manager and its children one after the other; otherwise like `run_inline`.

    Sync children run in threads, as in a worker.
    """
    inline = _Inline(manager, args)
    listed = manager.function(**inline.args)
    if inspect.isawaitable(listed) or hasattr(listed, "__aiter__"):
        listed = await _collected(listed)
    inline.take(listed)
    tries = inline.tries()
    with limits.nowhere(), contextlib.suppress(StopIteration):
        values = next(tries)
        while True:
            call = execution.Execution(manager.child.function)
            values = tries.send(await call.run(*values, timeout=inline.timeout))
    return inline.progress()


def _called(function: Callable[..., Any], *values: Any) -> _End:
    try:
        return execution.Returned(function(*values))
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # noqa: BLE001 - classed like every error of a child
        return execution.Raised(exc)


async def _collected(listed: Any) -> list[Any]:
    if inspect.isawaitable(listed):
        listed = await listed
    if hasattr(listed, "__aiter__"):
        return [value async for value in listed]
    return list(listed)


class _Inline:
    """The run itself, whoever calls the functions."""

    def __init__(self, manager: managers.Manager[..., Any], args: Mapping[str, Any]) -> None:
        inspect.signature(manager.function).bind(**args)
        self.manager = manager
        self.args: dict[str, Any] = json.loads(sanitise.to_json(dict(args)))
        self.timeout = manager.child.options.timeout
        app = manager.task.blueprint
        configured = settings.Settings()
        if isinstance(app, procrastinate.App):
            configured = fanout.FanOut.of(app).settings
        self._packer = staging.Packer(
            items=manager.child.item_codec,
            item_key=manager.item_key,
            max_item_bytes=configured.max_item_bytes,
            chunk_size=configured.chunk_size,
            chunk_seconds=math.inf,
        )
        self._work = child.Work(
            function=manager.child.function,
            options=manager.child.options,
            items=manager.child.item_codec,
            results=manager.child.result_codec,
            max_result_bytes=configured.max_result_bytes,
        )
        self._created_at = _now()
        self._staged: list[tuple[str | None, str]] = []
        self._duplicates = 0
        self._reason: str | None = None
        self._items: list[models.Item] = []
        self._results: list[Any] = []
        self._counts: Counter[str] = Counter()

    def take(self, listed: Iterable[Any]) -> None:
        """Check and keep what the manager listed."""
        keys: set[str] = set()
        for chunk in self._packer.chunks(iter(listed)):
            for key, payload in zip(chunk.keys, chunk.payloads, strict=True):
                if key is not None and key in keys:
                    self._duplicates += 1
                    continue
                if key is not None:
                    keys.add(key)
                self._staged.append((key, payload))

    def tries(self) -> Generator[list[Any], _End, None]:
        """Yield what to call the child with, and take how that ended."""
        for position, (key, payload) in enumerate(self._staged):
            item = models.Item(
                position=position,
                key=key,
                status=models.ItemStatus.CANCELLED,
                payload=json.loads(payload),
                result=None,
                error=None,
                attempts=0,
                crashes=0,
                sanitised=False,
                due=None,
                started_at=None,
                finished_at=None,
            )
            if self._reason is None:
                item = yield from self._worked(item, payload)
            self._items.append(item)
            self._counts[item.status] += 1
            self._judge()

    def _worked(self, item: models.Item, payload: str) -> Generator[list[Any], _End, models.Item]:
        started_at, attempt = _now(), 0
        columns: dict[str, Any] = {"outcome": "released"}
        end: _End
        while columns["outcome"] == "released":
            attempt += 1
            try:
                values = [self._work.load(payload)]
            except errors.PermanentError as exc:
                end = execution.Raised(exc)
            else:
                end = yield [*self._context(item, attempt), *values]
            columns = self._work.outcome_of(end, attempt)
        if columns["outcome"] == "succeeded":
            self._results.append(self.manager.child.result_codec.load(columns["result"]))
        return dataclasses.replace(
            item,
            status=models.ItemStatus(columns["outcome"]),
            result=json.loads(columns.get("result", "null")),
            error=json.loads(columns.get("error", "null")),
            attempts=attempt,
            sanitised=columns["sanitised"],
            started_at=started_at,
            finished_at=_now(),
        )

    def _context(self, item: models.Item, attempt: int) -> list[context.ItemContext]:
        if not self.manager.child.options.pass_context:
            return []
        return [
            context.ItemContext(
                run_id=0,
                position=item.position,
                key=item.key,
                attempt=attempt,
                run_args=self.args,
            )
        ]

    def _judge(self) -> None:
        tolerated, failed = self.manager.options.tolerate, self._counts["failed"]
        if isinstance(tolerated, float):
            tolerated *= len(self._staged)
        if tolerated is not None and failed > tolerated:
            self._reason = f"more failed items than tolerated: {failed} of {len(self._staged)}"

    def progress(self) -> InlineProgress:
        """Return where the run stands at its end."""
        closed_at = _now()
        status = models.RunStatus.COMPLETED if self._reason is None else models.RunStatus.FAILED
        seconds = (closed_at - self._created_at).total_seconds()
        return InlineProgress(
            run_id=0,
            name=self.manager.task.name,
            status=status,
            total=len(self._items),
            pending=0,
            waiting=0,
            processing=0,
            succeeded=self._counts["succeeded"],
            failed=self._counts["failed"],
            cancelled=self._counts["cancelled"],
            duplicates=self._duplicates,
            paused=False,
            generation=1,
            rate=len(self._items) / max(seconds, 0.001),
            reason=self._reason,
            callbacks={},
            max_in_flight=self.manager.options.max_in_flight,
            created_at=self._created_at,
            scheduled_at=None,
            deadline=None,
            started_at=self._created_at,
            closed_at=closed_at,
            last_activity_at=closed_at,
            items=tuple(self._items),
            results=tuple(self._results),
            errors={item.position: item.error for item in self._items if item.error},
        )


def _now() -> datetime.datetime:
    return datetime.datetime.now(tz=datetime.UTC)
