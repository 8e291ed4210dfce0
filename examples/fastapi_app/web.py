"""The web application: an upload page, a live page for each run, and the dashboard."""

import contextlib
import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import fastapi
from fastapi.responses import FileResponse, RedirectResponse
from starlette.requests import Request

from fanout_procrastinate import FanOut, RunNotFound, web

from .tasks import app, count_all

PAGES = Path(__file__).parent / "pages"
UPLOADS = Path(os.environ.get("UPLOADS", "uploads"))
HOSTS = os.environ.get("HOSTS", "localhost,127.0.0.1").split(",")
MOST_FILES = 1000


@contextlib.asynccontextmanager
async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
    """Open the procrastinate app for as long as this process serves."""
    async with app.open_async():
        yield
        await FanOut.of(app).close_async()


def anybody_may_read(request: Request, action: str, run_id: int | None) -> bool:
    """Let everybody watch; a real application looks at who is logged in."""
    return action == "read"


main = fastapi.FastAPI(title="Word counts", lifespan=lifespan)
main.mount("/fanout", web.create_app(app, authorize=anybody_may_read, allowed_hosts=HOSTS))


@main.get("/", include_in_schema=False)
async def upload_page() -> FileResponse:
    return FileResponse(PAGES / "upload.html")


@main.post("/uploads")
async def upload(files: Annotated[list[fastapi.UploadFile], fastapi.File()]) -> RedirectResponse:
    """Store the files, start a run over them, and go to its page."""
    if len(files) > MOST_FILES:
        raise fastapi.HTTPException(413, f"at most {MOST_FILES} files at a time")
    if any("\0" in (file.filename or "") for file in files):
        raise fastapi.HTTPException(400, "a file's name has a NUL character, which no text keeps")
    folder = UPLOADS / uuid.uuid4().hex
    folder.mkdir(parents=True)
    texts = []
    for number, file in enumerate(files):
        path = folder / f"{number:04}.txt"  # never a name that somebody sent
        path.write_bytes(await file.read())
        texts.append({"name": file.filename or path.name, "path": str(path.resolve())})
    run = await count_all.defer_async(texts=texts)
    return RedirectResponse(f"/runs/{run.id}", status_code=303)


@main.get("/runs/{run_id}", include_in_schema=False)
async def run_page(run_id: int) -> FileResponse:
    return FileResponse(PAGES / "run.html")


@main.get("/runs/{run_id}/results")
async def results(run_id: int) -> dict[str, Any]:
    """Return what was counted so far, and what could not be read."""
    try:
        run = await FanOut.of(app).get_run_async(run_id)
    except RunNotFound as exc:
        raise fastapi.HTTPException(404, str(exc)) from exc
    counted = [count.model_dump() async for count in run.results()]
    failed = [item.payload["name"] async for item in run.items(status="failed")]
    return {"counted": counted, "failed": failed}
