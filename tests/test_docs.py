"""The README and the docs: every Python snippet runs, and what they name is there.

The Python blocks of a page run in order, in one namespace, as the module `papers`, on a database of
the page's own. A worker serves the page's `app` meanwhile, and the app is open, as both are in a
program. What readers do not see:

- `% check: ...` (in the README `<!-- check: ... -->`) is an expression that must be true there;
- `% no worker: why` stands on pages that do without.

A block that cannot run says why in its first line: ```` ```python no-run: why ````.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import copy
import dataclasses
import importlib.util
import inspect
import re
import shlex
import shutil
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import procrastinate
import procrastinate.cli
import pytest
from procrastinate.testing import InMemoryConnector

import fanout_procrastinate
from fanout_procrastinate import FanOut, fanout, outcomes, schema, settings
from fanout_procrastinate.cli import program
from tests.databases import environment
from tests.support import serving
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "fanout_procrastinate"
PAPERS = ROOT / "examples/extract_papers/papers"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
MODULE = "papers"

_FENCE = re.compile(r"(?P<fence>`{3,}|:{3,})(?P<info>[^`]*)")
_CHECK = re.compile(r"(?:% check:|<!-- check:) (?P<expression>.*?)(?: -->)?")
_COMMAND = re.compile(r"`((?:fanout|make|pip|python -m|procrastinate) [^`\n]+)`")
_PROVED = re.compile(r"`(tests/[a-z_/]+\.py)::([A-Za-z_:]+)`")


# -- pages


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block, or a check (`info` is then "check")."""

    info: str
    text: str
    line: int
    """Of the page, counted from 1, where the text begins."""

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info.split() else ""

    @property
    def excuse(self) -> str | None:
        """Why it is not run; `None` if it is."""
        _, found, excuse = self.info.partition("no-run:")
        return excuse.strip() if found else None


def blocks(page: Path) -> Iterator[Block]:
    """Yield the code blocks and checks of a page, in order."""
    open_fence, info, begin, lines = "", "", 0, list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = _FENCE.fullmatch(line.strip())
        if open_fence:
            if line.strip() == open_fence:
                yield Block(info, "\n".join(lines) + "\n", begin)
                open_fence = ""
            else:
                lines.append(line)
        elif fence and fence["fence"].startswith("`"):
            open_fence, info, begin, lines = fence["fence"], fence["info"].strip(), number + 1, []
        elif check := _CHECK.fullmatch(line.strip()):
            yield Block("check", check["expression"], number)
    assert not open_fence, f"{page.name}: the block of line {begin} has no end"


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def with_snippets() -> list[Path]:
    return [page for page in PAGES if any(one.language == "python" for one in blocks(page))]


def shell_lines(page: Path) -> Iterator[str]:
    """Yield the commands of a page: of its shell blocks, and those in its sentences."""
    for block in blocks(page):
        if block.language == "sh":
            text = block.text.replace("\\\n", " ")
            yield from (line.partition(" #")[0] for line in text.splitlines() if line.strip())
    yield from _COMMAND.findall(page.read_text())


def table(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the first table whose head starts with `heading`."""
    rows: list[list[str]] = []
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            if rows:
                break
        elif rows or cells[0] == heading:
            rows.append(cells)
    assert rows, f"{page.name} has no table headed {heading!r}"
    return rows[2:]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


# -- snippets


class Serving:
    """A worker of an app in a thread of its own, for snippets that wait without async too."""

    def __init__(self, app: procrastinate.App, dsn: str) -> None:
        self._app = _twin(app, dsn)
        self.learn(app)
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), name="worker")
        self._thread.start()
        wait_until(lambda: self._loop is not None, 20.0, "the worker works")

    def learn(self, app: procrastinate.App) -> None:
        """Take over the tasks that were declared since."""
        for name in set(app.tasks) - set(self._app.tasks):
            task = copy.copy(app.tasks[name])
            task.blueprint = self._app  # it defers by its app, open on another loop or not at all
            self._app.tasks[name] = task

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30.0)
        assert not self._thread.is_alive(), "the worker does not end"

    async def _serve(self) -> None:
        async with serving(self._app):
            self._loop = asyncio.get_running_loop()
            await self._stop.wait()


def _twin(app: procrastinate.App, dsn: str) -> procrastinate.App:
    """Return an app with the same settings, as another process would have it."""
    twin = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))
    given = FanOut.of(app).settings
    FanOut(twin, **{one.name: getattr(given, one.name) for one in dataclasses.fields(given)})
    return twin


class Reader:
    """Somebody who tries a page's snippets from the top to the bottom."""

    def __init__(self, page: Path, dsn: str) -> None:
        self._page = page
        self._dsn = dsn
        self._module = types.ModuleType(MODULE)
        self._with_worker = "\n% no worker:" not in page.read_text()
        self._worker: Serving | None = None
        self._served: list[procrastinate.App] = []
        sys.modules[MODULE] = self._module  # dataclasses look their module up

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        del sys.modules[MODULE]
        if self._worker is not None:
            self._worker.close()
        for app in self._served:
            FanOut.of(app).close()

    def read(self, block: Block) -> None:
        if block.info == "check":
            code = self._compiled(block, "eval")
            assert eval(code, self._names), f"{self._place(block)}: {block.text}"  # noqa: S307
        elif block.language == "python" and block.excuse is None:
            app = self._names.get("app")
            if isinstance(app, procrastinate.App) and self._with_worker:
                self._serve(app)
            self._run(self._compiled(block, "exec"), app)

    @property
    def _names(self) -> dict[str, Any]:
        return self._module.__dict__

    def _place(self, block: Block) -> str:
        return f"{named(self._page)}:{block.line}"

    def _compiled(self, block: Block, mode: str) -> types.CodeType:
        # Empty lines before it: a traceback then tells the line of the page.
        tree = ast.parse("\n" * (block.line - 1) + block.text, mode=mode)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compiled: types.CodeType = compile(tree, str(self._page), mode, flags=flags)
        return compiled

    def _serve(self, app: procrastinate.App) -> None:
        if self._worker is not None and app is self._served[-1]:
            self._worker.learn(app)
            return
        if self._worker is not None:
            self._worker.close()
        self._served.append(app)
        self._worker = Serving(app, self._dsn)

    def _run(self, code: types.CodeType, app: Any) -> None:
        opened = app if isinstance(app, procrastinate.App) else None
        if not code.co_flags & inspect.CO_COROUTINE:
            with opened.open() if opened else contextlib.nullcontext():
                exec(code, self._names)  # noqa: S102
            return

        async def run() -> None:
            async with opened.open_async() if opened else contextlib.nullcontext():
                await eval(code, self._names)  # noqa: S307

        asyncio.run(run())


@pytest.mark.parametrize("page", with_snippets(), ids=named)
def test_snippets_run(
    page: Path, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(dsn).items():
        monkeypatch.setenv(name, value)
    shutil.copytree(PAPERS, tmp_path / "papers")
    monkeypatch.chdir(tmp_path)
    with Reader(page, dsn) as reader:
        for block in blocks(page):
            reader.read(block)


@pytest.mark.parametrize("page", with_snippets(), ids=named)
def test_what_is_not_run_says_why(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            assert block.excuse is None or len(block.excuse) > 8, f"line {block.line}"
        else:
            assert block.language not in ("py", "python3", "pycon"), f"line {block.line}"


# -- commands


def _parse(words: list[str]) -> None:
    if words[:3] == ["python", "-m", "procrastinate"]:
        words = words[2:]
    if words[0] == "fanout" and len(words) == 2:
        assert words[1] in _subcommands()
    elif words[0] == "fanout":
        program.parser().parse_args(words[1:])
    elif words[0] == "procrastinate":
        parser = argparse.ArgumentParser()
        procrastinate.cli.add_arguments(parser)
        parser.parse_args(words[1:])
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None
    elif words[:2] == ["pip", "install"]:
        _check_extras(words[2])
    elif words[0] == "cp":
        assert (ROOT / words[-2].removeprefix("path/to/clone/")).exists()


def _check_extras(wanted: str) -> None:
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    found = re.fullmatch(r"(?:fanout_procrastinate|\.)\[([a-z,]+)\]", wanted)
    assert found is not None and set(found[1].split(",")) <= set(extras), wanted


def _needs_path(line: str) -> bool:
    """Whether a line would look for the app's module elsewhere than in the current folder."""
    return re.match(r"procrastinate .*(--app|-a)\b", line) is not None


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(MODULE)
    module.app = procrastinate.App(connector=InMemoryConnector())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    for line in shell_lines(page):
        assert not _needs_path(line), f"{line}: say python -m procrastinate"
        try:
            _parse(shlex.split(line))
        except SystemExit as exc:
            assert exc.code == 0, line


# -- tables that must agree with the code


def test_rule_table_is_the_one_that_decides() -> None:
    """Each exception and status that the table names is classed as it says."""
    seen: set[str] = set()
    for verdict, _, which in table(DOCS / "howto/errors.md", "Verdict"):
        wanted = {"permanent": True, "transient": False}.get(verdict.strip("*").split(",")[0])
        for name in quoted(which):
            if wanted is None or not re.fullmatch(r"\d+|([a-z]+\.)*[A-Z]\w+", name):
                continue
            seen.add(name.rpartition(".")[2])
            assert outcomes.classify(_example(name)).permanent is wanted, name
    assert {kind.__name__ for kinds, _ in outcomes._TYPE_RULES for kind in kinds} <= seen
    assert {str(status) for status in outcomes.TRANSIENT_STATUSES} <= seen


def _example(name: str) -> BaseException:
    if name.isdigit():
        exc = Exception()
        exc.status_code = int(name)  # type: ignore[attr-defined]
        return exc
    module, _, name = name.rpartition(".")
    for place in [module] if module else ["builtins", "fanout_procrastinate", "json"]:
        kind = getattr(sys.modules[place], name, None)
        if kind is not None:
            return kind.__new__(kind)  # type: ignore[no-any-return]
    raise AssertionError(f"no exception is named {name}")


@pytest.mark.parametrize(
    ("heading", "options"),
    [
        ("Setting", settings.Settings()),
        ("Option of `fanout_child`", settings.ChildOptions()),
        ("Option of `fanout_manager`", settings.ManagerOptions()),
        ("`Backoff`", outcomes.Backoff()),
    ],
    ids=["settings", "child", "manager", "backoff"],
)
def test_settings_and_defaults(heading: str, options: Any) -> None:
    told = {quoted(name)[0]: quoted(value) for name, value, *_ in table(_SETTINGS, heading)}
    known = {one.name: getattr(options, one.name) for one in dataclasses.fields(options)}
    given = {name: value for name, value in told.items() if name in known}
    assert given.keys() == known.keys()
    for name, value in given.items():
        if value:
            assert eval(value[0], vars(fanout_procrastinate) | {"__builtins__": {}}) == known[name]  # noqa: S307


_SETTINGS = DOCS / "reference/settings.md"


def test_every_log_action_is_listed() -> None:
    code = "".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    told = {quoted(action)[0] for action, *_ in table(DOCS / "reference/logging.md", "Action")}
    assert told == set(re.findall(r'"action": "([a-z_]+)"', code)) | _actions_by_argument(code)


def _actions_by_argument(code: str) -> set[str]:
    return set(re.findall(r'_guarded\(self\.\w+, "([a-z_]+)"\)', code))


def test_every_table_and_function_is_listed() -> None:
    page = DOCS / "reference/database.md"
    sql = schema.read()
    for kind, heading in (("TABLE", "Table"), ("FUNCTION", "Function")):
        found = set(re.findall(rf"CREATE (?:OR REPLACE )?{kind} (?:IF NOT EXISTS )?(\w+)", sql))
        told = {name for first, *_ in table(page, heading) for name in quoted(first)}
        assert {name for name in told if "…" not in name} == {
            name for name in found if not name.startswith("fanout_audit_")
        }


def test_every_command_is_documented() -> None:
    told = (DOCS / "reference/cli.md").read_text()
    for command in _subcommands():
        assert f"{{fanout-help}} {command}\n" in told, command


def _subcommands() -> list[str]:
    (action,) = [
        one
        for one in program.parser()._actions
        if one.dest in ("command", "==SUPPRESS==") and isinstance(one, argparse._SubParsersAction)
    ]
    return list(action.choices)


def test_every_public_name_is_in_the_reference() -> None:
    told = "".join((DOCS / f"reference/{name}.md").read_text() for name in ("api", "errors"))
    described = re.findall(r"^\.\. auto\w+:: (\w+)", told, re.MULTILINE)
    assert set(described) - {"fanout_procrastinate"} == set(fanout_procrastinate.__all__)


# -- what guarantees and links point to


@pytest.mark.parametrize(("page", "least"), [("guarantees.md", 22), ("reliability.md", 20)])
def test_proofs_exist(page: str, least: int) -> None:
    found = _PROVED.findall((DOCS / page).read_text())
    assert len(found) >= least, "the page names a test for each promise"
    for file, path in found:
        code = (ROOT / file).read_text()
        for name in path.split("::"):
            assert re.search(rf"^\s*(?:async )?(?:def|class) {name}\b", code, re.MULTILINE), (
                f"{file} has no {name}"
            )


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
            assert anchor in [_slug(heading) for heading in headings], target


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_sweep_task_is_named_as_it_is() -> None:
    assert fanout.SWEEP_TASK in (DOCS / "howto/deployment.md").read_text()
