"""What the library asks of the database: one function per named query, rows to models.

A function builds a `Call`; who runs it (`database.Database` or `host.Host`) is another question.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from fanout_procrastinate import models, queries

T = TypeVar("T")
Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One statement, its parameters, and how to read its rows."""

    name: str
    params: Mapping[str, Any]
    parse: Callable[[Rows], T]

    @property
    def sql(self) -> str:
        return queries.QUERIES[self.name]


RunCall: TypeAlias = Callable[[Call[Any]], Any]
"""Runs a call and returns what it parsed."""


def _first(column: str) -> Callable[[Rows], Any]:
    return lambda rows: rows[0][column] if rows else None


def _json(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _time(text: str | None) -> datetime.datetime | None:
    return None if text is None else models.moment(text)


# -- starting, staging


def start(spec: Mapping[str, Any]) -> Call[models.Started]:
    return Call(
        "start",
        {"spec": json.dumps(spec)},
        lambda rows: models.Started(
            run_id=rows[0]["run_id"], outcome=rows[0]["outcome"], status=rows[0]["run_status"]
        ),
    )


def manager_begin(run_id: int, job_id: int) -> Call[models.ManagerClaim | None]:
    def parse(rows: Rows) -> models.ManagerClaim | None:
        if not rows:
            return None
        row = rows[0]
        return models.ManagerClaim(
            fence=row["fence"],
            args=_json(row["args"]),
            attempt=row["attempt"],
            child_task=row["child_task"],
        )

    return Call("manager_begin", {"run_id": run_id, "job_id": job_id}, parse)


def append(
    run_id: int,
    fence: int,
    keys: Sequence[str | None],
    payloads: Sequence[str],
    lanes: Sequence[str] | None = None,
) -> Call[int | None]:
    """Stage a chunk; answers how many items are staged now, or ``None`` for a stale manager."""
    params = {"run_id": run_id, "fence": fence, "keys": list(keys), "payloads": list(payloads)}
    return Call("append", params | {"lanes": lanes and list(lanes)}, _first("staged"))


def seal(run_id: int, fence: int) -> Call[str | None]:
    return Call("seal", {"run_id": run_id, "fence": fence}, _first("status"))


def manager_fail(
    run_id: int, fence: int, *, reason: str, retry_in: float | None, charge: bool = True
) -> Call[bool | None]:
    params = {"run_id": run_id, "fence": fence, "reason": reason, "retry_in": retry_in}
    return Call("manager_fail", params | {"charge": charge}, _first("again"))


# -- callbacks


def callback_begin(run_id: int, generation: int, task: str, job_id: int) -> Call[int | None]:
    params = {"run_id": run_id, "generation": generation, "task": task, "job_id": job_id}
    return Call("callback_begin", params, _first("attempt"))


def callback_end(
    run_id: int,
    generation: int,
    task: str,
    job_id: int,
    *,
    error: str | None,
    retry_in: float | None,
) -> Call[bool]:
    params = {"run_id": run_id, "generation": generation, "task": task, "job_id": job_id}
    return Call("callback_end", params | {"error": error, "retry_in": retry_in}, _first("accepted"))


# -- slots


def _replies(rows: Rows) -> list[models.Reply]:
    return [models.Reply(**row) for row in rows]


def begin(
    run_id: int, slot: int, job_id: int, *, token: str, ledger: int | None, suspect: bool
) -> Call[models.Reply]:
    params = {"run_id": run_id, "slot": slot, "job_id": job_id, "token": token}
    return Call(
        "begin", params | {"ledger": ledger, "suspect": suspect}, lambda rows: _replies(rows)[0]
    )


def report(
    run_id: int, ledger: int, entries: Sequence[models.Entry], *, suspect: bool
) -> Call[list[models.Reply]]:
    params = {
        "run_id": run_id,
        "ledger": ledger,
        "suspect": suspect,
        "slots": [entry.slot for entry in entries],
        "epochs": [entry.epoch for entry in entries],
        "wishes": [entry.wish for entry in entries],
        "positions": [entry.position for entry in entries],
        "claims": [entry.claim for entry in entries],
        "outcomes": [entry.outcome for entry in entries],
        "retry_ins": [entry.retry_in for entry in entries],
        "results": [entry.result for entry in entries],
        "errors": [entry.error for entry in entries],
        "sanitised": [entry.sanitised for entry in entries],
        "aheads": [entry.ahead for entry in entries],
    }
    return Call("report", params, _replies)


def give_back(holding: models.Holding, position: int) -> Call[bool]:
    params = dataclasses.asdict(holding) | {"position": position}
    return Call("give_back", params, _first("given"))


def renew(
    holdings: Sequence[models.Holding], fresh: float
) -> Call[list[tuple[models.Holding, str]]]:
    params = {
        "runs": [holding.run_id for holding in holdings],
        "slots": [holding.slot for holding in holdings],
        "epochs": [holding.epoch for holding in holdings],
        "fresh": fresh,
    }
    return Call(
        "renew",
        params,
        lambda rows: [
            (models.Holding(row["run_id"], row["slot"], row["epoch"]), row["verdict"])
            for row in rows
        ],
    )


def renew_manager(run_id: int, fence: int) -> Call[bool]:
    return Call("renew_manager", {"run_id": run_id, "fence": fence}, _first("mine"))


def renew_callback(run_id: int, generation: int, task: str, job_id: int) -> Call[bool]:
    params = {"run_id": run_id, "generation": generation, "task": task, "job_id": job_id}
    return Call("renew_callback", params, _first("mine"))


def pass_on(run_id: int) -> Call[bool]:
    return Call("pass_on", {"run_id": run_id}, _first("more"))


def lines() -> Call[list[int]]:
    return Call("lines", {}, lambda rows: [row["run_id"] for row in rows])


# -- limits, permits


def take_permit(
    specs: Sequence[Mapping[str, Any]],
    *,
    key: str | None,
    holder: str,
    label: str,
    run_id: int | None,
    position: int | None,
    lease: float,
) -> Call[models.PermitReply]:
    params = {"specs": json.dumps(list(specs)), "key": key, "holder": holder, "label": label}
    return Call(
        "take_permit",
        params | {"run_id": run_id, "position": position, "lease": lease},
        lambda rows: models.PermitReply(**rows[0]),
    )


def give_permit(holder: str) -> Call[list[int]]:
    """Answers the runs for which places are to be passed on."""
    return Call("give_permit", {"holder": holder}, _first("runs"))


def renew_permits(holders: Sequence[str]) -> Call[list[str]]:
    """Answers those that are lost."""
    return Call(
        "renew_permits", {"holders": list(holders)}, lambda rows: [row["holder"] for row in rows]
    )


def serve_lines(name: str) -> Call[list[int]]:
    """Answers the runs for which places are to be passed on."""
    return Call("serve_lines", {"name": name}, _first("runs"))


def sweep_permits() -> Call[int]:
    return Call("sweep_permits", {}, _first("removed"))


def update_limit(
    name: str, changes: Mapping[str, Any] | None = None, pause: float | None = None
) -> Call[bool]:
    """Change a limit; `pause` seconds from now, 0 = resume."""
    params = {"name": name, "changes": json.dumps(changes or {}), "pause": pause}
    return Call("update_limit", params, _first("found"))


def pause_limit(spec: Mapping[str, Any], seconds: float) -> Call[bool]:
    return Call("pause_limit", {"spec": json.dumps(spec), "seconds": seconds}, _first("found"))


def limits(name: str | None = None) -> Call[list[models.LimitState]]:
    return Call(
        "limits",
        {"name": name},
        lambda rows: [models.LimitState.from_json(_json(row["state"])) for row in rows],
    )


def run_limits(run_id: int) -> Call[list[models.LimitState]]:
    return Call(
        "run_limits",
        {"run_id": run_id},
        lambda rows: [models.LimitState.from_json(_json(row["state"])) for row in rows],
    )


def audit_limits() -> Call[list[models.Finding]]:
    return Call("audit_limits", {}, _findings)


def still_mine(holding: models.Holding, position: int, claim: int) -> Call[bool]:
    params = dataclasses.asdict(holding) | {"position": position, "claim": claim}
    return Call("still_mine", params, _first("mine"))


# -- the sweep


def silent(lease: float) -> Call[dict[int, str]]:
    """Return the runs with something at work that is silent, and what."""
    return Call(
        "silent", {"lease": lease}, lambda rows: {row["run_id"]: row["finding"] for row in rows}
    )


def sweep_plan(lease: float, limit: int) -> Call[dict[int, str]]:
    return Call(
        "sweep_plan",
        {"lease": lease, "limit": limit},
        lambda rows: {row["run_id"]: row["finding"] for row in rows},
    )


def sweep_run(run_id: int, lease: float) -> Call[dict[str, int]]:
    return Call(
        "sweep_run", {"run_id": run_id, "lease": lease}, lambda rows: _json(rows[0]["done"])
    )


def unserved(limit: int) -> Call[dict[int, str]]:
    """Answers the runs that wait for a worker, and the queue of each."""
    return Call(
        "unserved", {"limit": limit}, lambda rows: {row["id"]: row["queue"] for row in rows}
    )


def untidy(limit: int) -> Call[list[int]]:
    return Call("untidy", {"limit": limit}, lambda rows: [row["run_id"] for row in rows])


def tidy(run_id: int, limit: int) -> Call[int]:
    return Call("tidy", {"run_id": run_id, "limit": limit}, _first("rows"))


def prune(age: float, limit: int) -> Call[int]:
    return Call("prune", {"age": age, "limit": limit}, _first("rows"))


def prune_jobs(tasks: Sequence[str], age: float, limit: int) -> Call[int]:
    params = {"tasks": list(tasks), "age": age, "limit": limit}
    return Call("prune_jobs", params, _first("rows"))


# -- the audit


def audit_runs(run_id: int | None) -> Call[list[int]]:
    return Call("audit_runs", {"run_id": run_id}, lambda rows: [row["id"] for row in rows])


def audit_state(runs: Sequence[int], lease: float) -> Call[list[models.Finding]]:
    return Call("audit_state", {"runs": list(runs), "lease": lease}, _findings)


def audit_items(run_id: int, seconds: float) -> Call[list[models.Finding]]:
    return Call("audit_items", {"run_id": run_id, "seconds": seconds}, _findings)


def audit_orphans() -> Call[list[models.Finding]]:
    return Call("audit_orphans", {}, _findings)


def limit_time(seconds: float) -> Call[None]:
    """Limit each further statement of this transaction."""
    return Call("limit_time", {"milliseconds": max(1, int(seconds * 1000))}, lambda rows: None)


def _findings(rows: Rows) -> list[models.Finding]:
    return [
        models.Finding(
            run_id=row["run_id"],
            kind=models.FindingKind(row["kind"]),
            subject=row["subject"],
            detail=row["detail"],
            repairable=row["repairable"],
        )
        for row in rows
    ]


# -- control


def stop(run_id: int, *, status: str, reason: str | None, abort: bool) -> Call[str | None]:
    params = {"run_id": run_id, "status": status, "reason": reason, "abort": abort}
    return Call("stop", params, _first("status"))


def pause(run_id: int) -> Call[str | None]:
    return Call("pause", {"run_id": run_id}, _first("status"))


def resume(run_id: int) -> Call[str | None]:
    return Call("resume", {"run_id": run_id}, _first("status"))


def update(run_id: int, changes: Mapping[str, Any]) -> Call[str | None]:
    return Call("update", {"run_id": run_id, "changes": json.dumps(changes)}, _first("status"))


def retry_failed(
    run_id: int, *, statuses: Sequence[str], error_type: str | None
) -> Call[int | None]:
    params = {"run_id": run_id, "statuses": list(statuses), "error_type": error_type}
    return Call("retry_failed", params, _first("items"))


# -- reading


def _progress(rows: Rows) -> models.Progress | None:
    data = _json(rows[0]["progress"]) if rows else None
    return None if data is None else models.Progress.from_json(data)


def progress(run_id: int) -> Call[models.Progress | None]:
    return Call("progress", {"run_id": run_id}, _progress)


def progresses(run_ids: Sequence[int]) -> Call[dict[int, models.Progress]]:
    """Read several runs; one that is not kept is not there."""

    def parse(rows: Rows) -> dict[int, models.Progress]:
        found = (models.Progress.from_json(_json(row["progress"])) for row in rows)
        return {progress.run_id: progress for progress in found}

    return Call("progresses", {"runs": list(run_ids)}, parse)


def open_runs(limit: int) -> Call[list[int]]:
    return Call("open_runs", {"limit": limit}, lambda rows: [row["id"] for row in rows])


def hint(events: Sequence[str]) -> Call[int]:
    """Tell listeners, in JSON texts of at most 7,000 bytes; answers how many were sent."""
    return Call("hint", {"events": list(events)}, _first("sent"))


def closed_progress(run_id: int, generation: int | None) -> Call[models.Progress | None]:
    return Call("closed_progress", {"run_id": run_id, "generation": generation}, _progress)


def run(run_id: int) -> Call[models.RunFacts | None]:
    def parse(rows: Rows) -> models.RunFacts | None:
        if not rows:
            return None
        row = rows[0]
        return models.RunFacts(
            run_id=row["id"],
            name=row["name"],
            run_key=row["run_key"],
            args=_json(row["args"]),
            tags=tuple(row["tags"]),
            manager_task=row["manager_task"],
            child_task=row["child_task"],
            child_queue=row["child_queue"],
            ledgers=row["ledgers"],
        )

    return Call("run", {"run_id": run_id}, parse)


def trace(run_id: int) -> Call[models.Trace | None]:
    def parse(rows: Rows) -> models.Trace | None:
        if not rows:
            return None
        row = rows[0]
        return models.Trace(
            name=row["name"],
            child_task=row["child_task"],
            waited=float(row["waited"]),
            carrier=_json(row["carrier"]) or {},
        )

    return Call("trace", {"run_id": run_id}, parse)


def closes() -> Call[dict[str, int]]:
    return Call("closes", {}, lambda rows: {row["status"]: row["closes"] for row in rows})


def find_run(name: str, run_key: str) -> Call[int | None]:
    return Call("find_run", {"name": name, "run_key": run_key}, _first("id"))


def runs(
    *, name: str | None, status: str | None, tag: str | None, limit: int
) -> Call[list[models.Progress]]:
    return Call(
        "runs",
        {"name": name, "status": status, "tag": tag, "limit": limit},
        lambda rows: [models.Progress.from_json(_json(row["progress"])) for row in rows],
    )


def items(run_id: int, *, status: str | None, after: int, limit: int) -> Call[list[models.Item]]:
    params = {"run_id": run_id, "after": after, "limit": limit}
    if status == models.ItemStatus.FAILED:
        return Call("failed_items", params, _items)
    return Call("items", params | {"status": status}, _items)


def _items(rows: Rows) -> list[models.Item]:
    return [
        models.Item(
            position=row["position"],
            key=row["item_key"],
            status=models.ItemStatus(row["status"]),
            payload=_json(row.get("payload")),
            result=_json(row.get("result")),
            error=_json(row["error"]),
            attempts=row["failures"] + (row["status"] in ("processing", "succeeded")),
            crashes=row["crashes"],
            sanitised=row["sanitised"],
            due=_time(row["due"]),
            started_at=_time(row["started_at"]),
            finished_at=_time(row["finished_at"]),
        )
        for row in rows
    ]


def errors(run_id: int, limit: int) -> Call[list[models.ErrorGroup]]:
    return Call(
        "errors",
        {"run_id": run_id, "limit": limit},
        lambda rows: [
            models.ErrorGroup(
                error_type=row["error_type"],
                count=row["items"],
                message=row["message"] or "",
                position=row["position"],
                key=row["item_key"],
            )
            for row in rows
        ],
    )


def item_list(
    run_id: int, *, status: str | None, search: str | None, after: int, until: int, limit: int
) -> Call[list[models.Item]]:
    """Read items without payloads and results, after a position up to another."""
    params = {"run_id": run_id, "search": search, "after": after, "limit": limit}
    if status == models.ItemStatus.FAILED:
        return Call("failed_item_list", params, _items)
    return Call("item_list", params | {"status": status, "until": until}, _items)


def slots(run_id: int, limit: int) -> Call[list[models.Slot]]:
    return Call(
        "slots",
        {"run_id": run_id, "limit": limit},
        lambda rows: [
            models.Slot(
                slot=row["slot"],
                job_id=row["job_id"],
                active=row["active"],
                position=row["position"],
                key=row["item_key"],
                started_at=_time(row["started_at"]),
                seen_at=_time(row["seen_at"]),
                scheduled_at=_time(row["scheduled_at"]),
                suspected=row["suspected"],
            )
            for row in rows
        ],
    )


def pace(run_id: int, *, last: int, stride: int) -> Call[list[tuple[float, str]]]:
    """Read when each `stride`-th item up to the last position ended, and how."""
    return Call(
        "pace",
        {"run_id": run_id, "last": last, "stride": stride},
        lambda rows: [(row["at"], row["status"]) for row in rows],
    )
