"""Server-Sent Events: subscribe, then the snapshot, then what changes, until the run is closed.

A stream holds no connection to the database: all of a process share one that listens. Its queue is
bounded, and a client that does not read is dropped when a send takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from fanout_procrastinate import errors, models, run, subscriptions
from fanout_procrastinate.web import failures, reading

logger = logging.getLogger(__name__)

PING_SECONDS = 15
SEND_TIMEOUT_SECONDS = 20.0
MOST_STREAMS = 1000

_QUEUE = 200
_RETRY_MILLISECONDS = 2000
_BETWEEN_CHANGES_SECONDS = 1.0
_HEADERS = {"Cache-Control": "no-cache"}


class _Stream(EventSourceResponse):
    """A stream whose client is dropped, not complained about, when it does not read.

    At the end of the server the stream is cut off between two events; its response is then ended
    here, for servers complain of one that stays incomplete, and clients too.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complete = True

        async def send_and_see(message: Message) -> None:
            nonlocal complete
            complete = not message.get("more_body", message["type"] == "http.response.start")
            await send(message)

        try:
            await super().__call__(scope, receive, send_and_see)
            if self.active and not complete:  # and the client is there
                async with asyncio.timeout(self.send_timeout):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            logger.info("Client of a stream does not read", extra={"action": "stream_dropped"})


@dataclasses.dataclass(kw_only=True)
class Streams:
    """Serve the streams of one dashboard.

    Args:
        source: reads.
        send_timeout: seconds that one send may take before the client is dropped.
    """

    source: reading.Reading
    send_timeout: float = SEND_TIMEOUT_SECONDS
    open: int = 0

    async def of_run(self, request: Request, run_id: int) -> Response:
        """Stream one run's events.

        Raises:
            RunNotFound: it is not kept.
            Refused: there are too many streams.
        """
        one = await self.source.find(run_id)
        progress = await one.progress_async()
        # A browser that lost the connection after the close would come back for ever.
        if progress.closed and request.headers.get("last-event-id") == _closed_id(progress):
            return Response(status_code=204)
        return self._response(request, self._run_events(one))

    def of_all(self, request: Request) -> Response:
        """Stream which runs have changed.

        Raises:
            Refused: there are too many streams.
        """
        return self._response(request, self._changes())

    def _response(self, request: Request, events: AsyncIterator[ServerSentEvent]) -> Response:
        if request.method == "HEAD":  # an older sse-starlette would never end it
            return Response(media_type="text/event-stream", headers=_HEADERS)
        if self.open >= MOST_STREAMS:
            raise failures.Refused("too many live streams; close some pages", 503)
        return _Stream(
            events,
            headers=_HEADERS,
            ping=PING_SECONDS,
            ping_message_factory=lambda: ServerSentEvent(comment="ping"),
            send_timeout=self.send_timeout,
        )

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def _run_events(self, one: run.Run) -> AsyncIterator[ServerSentEvent]:
        with self._counted(), _ended_calmly():
            subscribe = self.source.owner.events.subscribe
            async with subscribe(one.id, limit=_QUEUE, until_closed=True) as subscription:
                shown = await _progress(one)
                yield _progress_event("snapshot", shown, retry=_RETRY_MILLISECONDS)
                if shown.closed:
                    yield _progress_event("closed", shown)
                    return
                async for event in subscription:
                    if event.kind in ("closed", "resync"):
                        shown = await _progress(one)
                        yield _progress_event(event.kind, shown)
                        if shown.closed:
                            return
                    elif event.progress is None:
                        yield _other_event(event)
                    elif _place(event.progress) >= _place(shown):  # never backwards
                        shown = event.progress
                        yield _progress_event("progress", shown, items=event.data.get("items"))

    async def _changes(self) -> AsyncIterator[ServerSentEvent]:
        with self._counted(), _ended_calmly():
            kinds = {"progress", "closed", "resync"}
            async with self.source.owner.events.subscribe(kinds=kinds, limit=_QUEUE) as changes:
                yield ServerSentEvent(event="snapshot", data="{}", retry=_RETRY_MILLISECONDS)
                while not changes.ended:
                    event = await changes.get_async()
                    found = set() if event is None else {str(event.run_id)}
                    found |= await _more(changes)
                    if found:
                        data = {"runs": sorted(found)}
                        yield ServerSentEvent(event="changed", data=_json(data))


@contextlib.contextmanager
def _ended_calmly() -> Iterator[None]:
    """End a stream whose run was removed, or whose database went away: its client comes back."""
    try:
        yield
    except (errors.RunNotFound, errors.DatabaseError, failures.Refused) as exc:
        extra = {"action": "stream_ended", "exception": str(exc)}
        logger.info("Stream ends before its run", extra=extra)


@failures.in_time()
async def _progress(one: run.Run) -> models.Progress:
    return await one.progress_async()


async def _more(changes: subscriptions.Subscription) -> set[str]:
    """Gather for a moment what else changes, so that a busy system costs one event a second."""
    found: set[str] = set()
    loop_end = _Moment(_BETWEEN_CHANGES_SECONDS)
    while (left := loop_end.left()) > 0 and not changes.ended:
        event = await changes.get_async(timeout=left)
        if event is not None:
            found.add(str(event.run_id))
    return found


class _Moment:
    """A stretch of time that begins now."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


def _place(progress: models.Progress) -> tuple[int, int]:
    return progress.generation, progress.done


def _closed_id(progress: models.Progress) -> str:
    return f"{progress.generation}-closed"


def _progress_event(
    kind: str, progress: models.Progress, *, items: Any = None, retry: int | None = None
) -> ServerSentEvent:
    place = f"{progress.generation}-{progress.done}"
    data = reading.progress_json(progress) | ({"items": items} if items else {})
    return ServerSentEvent(
        event=kind,
        id=_closed_id(progress) if kind == "closed" else place,
        data=_json(data),
        retry=retry,
    )


def _other_event(event: subscriptions.Event) -> ServerSentEvent:
    data = dict(event.data) | {"at": event.at.isoformat()}
    return ServerSentEvent(event=event.kind, data=_json(data))


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False)
