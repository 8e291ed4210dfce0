"""Run: what users hold to watch a run, to wait for it, to read it and to control it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from fanout_procrastinate import (
    codec,
    errors,
    events,
    host,
    hub,
    models,
    sanitise,
    settings,
    steps,
    store,
    subscriptions,
)

T = TypeVar("T")

_FIRST_POLL_SECONDS = 0.1
_LONGEST_POLL_SECONDS = 2.0
_PAGE = 500
_FURTHEST = datetime.timedelta(days=365_000)

UPDATE_OPTIONS = ("max_in_flight", "tolerate", "deadline", "priority")
START_OPTIONS = (
    *UPDATE_OPTIONS,
    "run_key",
    "if_closed",
    "queue",
    "tags",
    "weight",
    "schedule_at",
    "schedule_in",
    "connection",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """How runs reach the database and the declared children.

    Args:
        host: runs calls through the app's connector.
        hub: tells of closed runs.
        events: live events.
        result_codec: the codec of a child task's results, ``None`` where it is not imported.
    """

    host: host.Host
    hub: hub.Hub
    events: events.Events
    result_codec: Callable[[str], codec.Codec | None]


class Pages(Generic[T]):
    """Iterate with ``for`` or ``async for`` over rows that are read page by page."""

    def __init__(
        self,
        access: Access,
        page: Callable[[int], store.Call[list[models.Item]]],
        converter: Callable[[models.RunFacts | None], Callable[[models.Item], T]],
        facts: store.Call[models.RunFacts | None],
    ) -> None:
        self._access = access
        self._page = page
        self._converter = converter
        self._facts = facts

    def __iter__(self) -> Iterator[T]:
        run = self._access.host.run
        convert = self._converter(run(self._facts))
        after = -1
        while page := run(self._page(after)):
            yield from map(convert, page)
            after = page[-1].position

    async def __aiter__(self) -> AsyncIterator[T]:
        run = self._access.host.run_async
        convert = self._converter(await run(self._facts))
        after = -1
        while page := await run(self._page(after)):
            for item in page:
                yield convert(item)
            after = page[-1].position


class Run:
    """A run, by its id. Reading it asks the database each time.

    Args:
        run_id: the run.
        created: whether the call that returned this object started the run; false where its
            ``run_key`` named one that was there already.

    Example:
        >>> run = await extract_folder.defer_async(folder="papers")  # doctest: +SKIP
        >>> progress = await run.wait_async(timeout=3600)  # doctest: +SKIP
    """

    def __init__(
        self,
        run_id: int,
        access: Access,
        *,
        created: bool = False,
        facts: models.RunFacts | None = None,
        closed_progress: models.Progress | None = None,
    ) -> None:
        self.id = run_id
        self.created = created
        self._access = access
        self._facts = facts
        self._closed_progress = closed_progress

    def __repr__(self) -> str:
        return f"Run({self.id})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def facts(self) -> models.RunFacts:
        """Return what never changes: name, key, arguments, tags, tasks.

        Raises:
            RunNotFound: the run is not kept.
        """
        if self._facts is None or self._facts.ledgers == 0:
            self._facts = self._found(self._access.host.run(store.run(self.id)))
        return self._facts

    async def facts_async(self) -> models.RunFacts:
        """Return what never changes; otherwise like `facts`."""
        if self._facts is None or self._facts.ledgers == 0:
            self._facts = self._found(await self._access.host.run_async(store.run(self.id)))
        return self._facts

    @property
    def args(self) -> Mapping[str, Any]:
        """Return the arguments that the run was triggered with."""
        return self._facts.args if self._facts is not None else self.facts.args

    @property
    def closed_progress(self) -> models.Progress | None:
        """Return the progress frozen when the run closed, in a callback: its generation's.

        ``None`` while it is open.

        Raises:
            RunNotFound: the run is not kept.
        """
        if self._closed_progress is not None:
            return self._closed_progress
        generation = self.progress().generation
        return self._access.host.run(store.closed_progress(self.id, generation))

    async def closed_progress_async(self) -> models.Progress | None:
        """Return the progress frozen when the run closed; otherwise like `closed_progress`."""
        if self._closed_progress is not None:
            return self._closed_progress
        generation = (await self.progress_async()).generation
        return await self._access.host.run_async(store.closed_progress(self.id, generation))

    # -- reading

    def progress(self) -> models.Progress:
        """Read where the run stands, all from one snapshot.

        Raises:
            RunNotFound: the run is not kept.
        """
        return self._found(self._access.host.run(store.progress(self.id)))

    async def progress_async(self) -> models.Progress:
        """Read where the run stands, all from one snapshot.

        Raises:
            RunNotFound: the run is not kept.
        """
        return self._found(await self._access.host.run_async(store.progress(self.id)))

    def errors(self, limit: int = 10) -> list[models.ErrorGroup]:
        """Read the failed items by type of error, the most frequent first.

        Args:
            limit: at most so many types.

        Raises:
            RunNotFound: the run is not kept.
            ConfigurationError: the limit is below 1.
        """
        groups = self._access.host.run(self._errors(limit))
        if not groups:
            self._found(self._access.host.run(store.run(self.id)))
        return groups

    async def errors_async(self, limit: int = 10) -> list[models.ErrorGroup]:
        """Read the failed items by type of error; otherwise like `errors`."""
        groups = await self._access.host.run_async(self._errors(limit))
        if not groups:
            self._found(await self._access.host.run_async(store.run(self.id)))
        return groups

    def _errors(self, limit: int) -> store.Call[list[models.ErrorGroup]]:
        return store.errors(self.id, subscriptions.check_limit(limit))

    def items(self, status: str | None = None) -> Pages[models.Item]:
        """Return the items in order, for ``for`` and ``async for``; read page by page.

        Args:
            status: only these: ``pending``, ``processing``, ``succeeded``, ``failed`` or
                ``cancelled``.

        Raises:
            ValueError: there is no such status.
        """
        wanted = None if status is None else str(models.ItemStatus(status))

        def converter(facts: models.RunFacts | None) -> Callable[[models.Item], models.Item]:
            self._found(facts)
            return lambda item: item

        return self._paged(wanted, converter)

    def results(self) -> Pages[Any]:
        """Return the results of the succeeded items in order, for ``for`` and ``async for``.

        They are typed by the child's annotation; raw JSON where the child is not imported, or
        where a stored result no longer fits it.
        """
        return self._paged("succeeded", self._typed)

    # The object that these return serves both worlds.
    items_async = items
    results_async = results

    def _paged(
        self,
        status: str | None,
        converter: Callable[[models.RunFacts | None], Callable[[models.Item], T]],
    ) -> Pages[T]:
        return Pages(
            self._access,
            lambda after: store.items(self.id, status=status, after=after, limit=_PAGE),
            converter,
            store.run(self.id),
        )

    def _typed(self, facts: models.RunFacts | None) -> Callable[[models.Item], Any]:
        results = self._access.result_codec(self._found(facts).child_task)

        def convert(item: models.Item) -> Any:
            if results is None:
                return item.result
            try:
                return results.load_parsed(item.result)
            except errors.InvalidValue:
                return item.result

        return convert

    # -- waiting

    def wait(self, timeout: float | None = None, raise_on_failure: bool = False) -> models.Progress:
        """Wait until the run is closed.

        Args:
            timeout: seconds; ``None`` = for ever.
            raise_on_failure: raise unless it completed with every item done.

        Raises:
            WaitTimeout: it is still open; it goes on.
            RunFailed: see `raise_on_failure`.
            RunNotFound: the run is not kept.
            ConfigurationError: the timeout is no number of seconds.
        """
        changed = threading.Event()
        patience = _Patience(timeout)
        with self._subscribed(changed.set):
            while True:
                changed.clear()
                progress = self.progress()
                if progress.closed:
                    return _judged(progress, raise_on_failure)
                changed.wait(patience.next(progress))

    async def wait_async(
        self, timeout: float | None = None, raise_on_failure: bool = False
    ) -> models.Progress:
        """Wait until the run is closed; otherwise like `wait`."""
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        patience = _Patience(timeout)

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(changed.set)

        with self._subscribed(tell):
            while True:
                changed.clear()
                progress = await self.progress_async()
                if progress.closed:
                    return _judged(progress, raise_on_failure)
                seconds = patience.next(progress)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await changed.wait()

    @contextlib.contextmanager
    def _subscribed(self, tell: Callable[[], None]) -> Iterator[None]:
        def subscriber(event: dict[str, Any]) -> None:
            name = event.get("event")
            if name == "listening" or (name == "closed" and event.get("run") == self.id):
                tell()

        self._access.hub.subscribe(subscriber)
        try:
            yield
        finally:
            self._access.hub.unsubscribe(subscriber)

    def events(self, kinds: Iterable[str] | None = None) -> subscriptions.Subscription:
        """Return the run's live events, for ``for`` and ``async for``, until it is closed.

        It begins with the progress as it stands, and ends after ``closed``; of a closed run it is
        these two. See `Event` for the kinds. With log lines or failures among them ``closed`` comes
        half a second late, for the last of these to come before.

        Args:
            kinds: only these, such as ``{"progress", "log"}``.

        Raises (when iterated over):
            RunNotFound: the run is not kept.

        Example:
            >>> async for event in run.events():  # doctest: +SKIP
            ...     print(event.kind, event.data)
        """
        return self._access.events.subscribe(self.id, kinds=kinds, until_closed=True)

    # The object that it returns serves both worlds.
    events_async = events

    # -- control: each in a transaction of its own

    def cancel(self, abort: bool = False, reason: str | None = None) -> models.Progress:
        """Close the run early: nothing more is handed out, items at work end first.

        Args:
            abort: tell the items at work to end at once.
            reason: shown with the run.

        A closed run's progress is returned unchanged.

        Raises:
            ConfigurationError: the reason is no text.
        """
        self._controlled(self._cancel(abort, reason))
        return self.progress()

    async def cancel_async(self, abort: bool = False, reason: str | None = None) -> models.Progress:
        """Close the run early; otherwise like `cancel`."""
        await self._controlled_async(self._cancel(abort, reason))
        return await self.progress_async()

    def _cancel(self, abort: bool, reason: str | None) -> store.Call[str | None]:
        settings.check_bool("abort", abort)
        text = "" if reason is None else check_text("reason", reason)
        text = text or "cancelled by an operator"
        return store.stop(self.id, status="cancelled", reason=text, abort=abort)

    def pause(self) -> models.Progress:
        """Hand out nothing more until `resume`; items at work end. No effect on a closed run."""
        self._controlled(store.pause(self.id))
        return self.progress()

    async def pause_async(self) -> models.Progress:
        """Hand out nothing more until `resume_async`; otherwise like `pause`."""
        await self._controlled_async(store.pause(self.id))
        return await self.progress_async()

    def resume(self) -> models.Progress:
        """Hand out again. No effect on a closed run."""
        self._controlled(store.resume(self.id))
        return self.progress()

    async def resume_async(self) -> models.Progress:
        """Hand out again. No effect on a closed run."""
        await self._controlled_async(store.resume(self.id))
        return await self.progress_async()

    def retry_failed(self, error_type: str | None = None) -> int:
        """Make the failed items due now, as if never tried; a closed run opens again.

        Args:
            error_type: only items that failed with this type, as `errors` names it.

        Returns how many. The run's next close belongs to the next generation and fires its
        callbacks again.

        Raises:
            RunClosed: another run took over its ``run_key``, or it is being stopped.
            ConfigurationError: the type is no text.
        """
        return self._reopened(self._controlled(self._retry(error_type)))

    async def retry_failed_async(self, error_type: str | None = None) -> int:
        """Make the failed items due now; otherwise like `retry_failed`."""
        return self._reopened(await self._controlled_async(self._retry(error_type)))

    def _retry(self, error_type: str | None) -> store.Call[int | None]:
        wanted = None if error_type is None else check_text("error_type", error_type)
        return store.retry_failed(self.id, statuses=["failed"], error_type=wanted)

    def _reopened(self, items: int | None) -> int:
        if self._found(items) == -1:
            raise errors.RunClosed(self.id, "replaced or being stopped")
        return items or 0

    def update(self, **changes: Any) -> models.Progress:
        """Change the open run: `max_in_flight`, `tolerate`, `deadline` (a time or seconds from
        now, ``None`` for none), `priority`.

        Raises:
            RunClosed: the run is closed.
            ConfigurationError: a value cannot work.
        """
        return self._updated(self._controlled(self._update(changes)), self.progress)

    async def update_async(self, **changes: Any) -> models.Progress:
        """Change the open run; otherwise like `update`."""
        status = await self._controlled_async(self._update(changes))
        if models.RunStatus(status).closed:
            raise errors.RunClosed(self.id, status)
        return await self.progress_async()

    def _updated(
        self, status: str | None, progress: Callable[[], models.Progress]
    ) -> models.Progress:
        found = self._found(status)
        if models.RunStatus(found).closed:
            raise errors.RunClosed(self.id, found)
        return progress()

    def _update(self, changes: dict[str, Any]) -> store.Call[str | None]:
        return store.update(self.id, run_columns(changes, UPDATE_OPTIONS))

    def _controlled(self, call: store.Call[T | None]) -> T:
        return self._access.host.control(self._control(call))

    async def _controlled_async(self, call: store.Call[T | None]) -> T:
        return await self._access.host.control_async(self._control(call))

    def _control(self, call: store.Call[T | None]) -> steps.Steps[T]:
        value: T = self._found((yield call))
        # What became free in the run's limits goes to whoever waits, in transactions of their own.
        yield from steps.pass_on(self.id)
        return value

    def _found(self, value: T | None) -> T:
        if value is None:
            raise errors.RunNotFound(self.id)
        return value


def stopping(progress: models.Progress) -> bool:
    """Return whether a run is being stopped: its `reason` says why, and items at work end."""
    return progress.status is models.RunStatus.PROCESSING and bool(progress.reason)


def check_text(name: str, value: Any) -> str:
    """Return text as the database can hold it: without NUL characters and lone surrogates.

    Raises:
        ConfigurationError: it is no text.
    """
    if not isinstance(value, str):
        raise errors.ConfigurationError(f"{name}={value!r}: give a str")
    return sanitise.clean_text(value)


def run_columns(
    options: Mapping[str, Any], accepted: Sequence[str] = START_OPTIONS
) -> dict[str, Any]:
    """Return options of a run as columns, checked.

    Args:
        options: by name.
        accepted: what the caller takes, for the message about what there is not.

    Raises:
        ConfigurationError: a value cannot work, or there is no such option.
    """
    columns: dict[str, Any] = {}
    for name, value in options.items():
        if name == "max_in_flight":
            columns[name] = settings.check_max_in_flight(value)
        elif name == "tolerate":
            columns |= tolerance_columns(value)
        elif name == "deadline":
            columns[name] = None if value is None else moment(value, name).isoformat()
        elif name == "priority":
            columns[name] = settings.check_priority(value)
        else:
            raise errors.ConfigurationError(
                f"a run has no option {name!r}; there are {', '.join(accepted)}"
            )
    return columns


def tolerance_columns(value: int | float | None) -> dict[str, Any]:
    """Return a tolerance as columns: a count or a share."""
    settings.check_tolerate(value)
    return {
        "tolerate_count": value if isinstance(value, int) else None,
        "tolerate_share": value if isinstance(value, float) else None,
    }


def moment(value: Any, name: str) -> datetime.datetime:
    """Return a time in UTC: of an aware datetime, or one that is so far from now.

    Raises:
        ConfigurationError: it is neither, or further away than can be stored and read.
    """
    if isinstance(value, datetime.datetime):
        return _in_utc(value, name)
    given, fault = value, None
    try:
        if isinstance(value, Mapping):
            value = datetime.timedelta(**value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = datetime.timedelta(seconds=value)
        if abs(value) < _FURTHEST:
            return datetime.datetime.now(tz=datetime.UTC) + value  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError) as exc:
        fault = exc
    raise errors.ConfigurationError(
        f"{name}={given!r}: give an aware datetime, a timedelta, or seconds from now, of less than "
        "1,000 years"
    ) from fault


def _in_utc(value: datetime.datetime, name: str) -> datetime.datetime:
    if value.utcoffset() is None:
        raise errors.ConfigurationError(
            f"{name}={value!r} has no time zone; use datetime.now(tz=...)"
        )
    with contextlib.suppress(OverflowError):
        if (in_utc := value.astimezone(datetime.UTC)) >= models.EARLIEST:
            return in_utc
    raise errors.ConfigurationError(
        f"{name}={value.isoformat()}: give a time from 0001-01-02 to 9999-12-31 in UTC"
    )


class _Patience:
    """Time the polls of a wait: often at first, rarely later, never past its end."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = subscriptions.check_timeout(timeout)
        self._end = None if self._timeout is None else time.monotonic() + self._timeout
        self._poll = _FIRST_POLL_SECONDS

    def next(self, progress: models.Progress) -> float:
        self._poll = min(self._poll * 1.5, _LONGEST_POLL_SECONDS)
        if self._end is None:
            return self._poll
        left = self._end - time.monotonic()
        if left <= 0:
            raise errors.WaitTimeout(
                f"run {progress.run_id} is still {progress.status} after {self._timeout:g} s "
                f"({progress.done} of {progress.total} items); wait longer",
                progress=progress,
            )
        return min(self._poll, left)


def _judged(progress: models.Progress, raise_on_failure: bool) -> models.Progress:
    if raise_on_failure and not progress.clean:
        cancelled = f" and {progress.cancelled} cancelled" if progress.cancelled else ""
        raise errors.RunFailed(
            f"run {progress.run_id} is {progress.status} with {progress.failed} failed{cancelled} "
            f"of {progress.total} items" + (f": {progress.reason}" if progress.reason else ""),
            progress=progress,
        )
    return progress
