"""The HTTP routes of the web interface."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import yaml
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from atomrl.tools.ui import catalog, compare, rollouts
from atomrl.tools.ui.catalog import Catalog, UnknownRun
from atomrl.tools.ui.docs import Manual
from atomrl.tools.ui.new_run import (
    TEMPLATE,
    Configs,
    DraftError,
    Launcher,
    LaunchError,
    edited,
    problems,
    read,
    started_from,
)
from atomrl.tools.ui.server import MAX_STREAMS, Questions, Watcher
from atomrl.tracking.reading import Run
from atomrl.tracking.reading.lines import ReadError
from atomrl.tracking.reading.state import LOG, Home, home_of
from atomrl.tracking.reading.token_records import IMAGES

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".json": "application/json",
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
}
MIN_GZIP = 1400
OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
MAX_POINTS = 4000
MAX_LOG = 200_000
"""Maximum number of bytes of a log per response."""
AT_ONCE_S = 5.0
"""Seconds within which the launcher's log and the run's own log are written, if both are of the same start."""


class Routes:
    """Request handlers on the runs of a catalog.

    Args:
        catalog: the runs.
        questions: answers that need the config schema.
        launcher: starts and stops runs; None if that is not allowed.
    """

    def __init__(self, catalog: Catalog, questions: Questions, launcher: Launcher | None) -> None:
        self.catalog, self.questions, self.launcher = catalog, questions, launcher
        self.watcher, self.configs, self.manual = Watcher(catalog), Configs(), Manual()
        self.files = dict(static_files(STATIC))

    def application(self) -> Starlette:
        """Return the ASGI application, without the `Guard`."""
        gets: list[tuple[str, Callable[..., Any]]] = [
            ("/", self.index),
            ("/static/{name:path}", self.static),
            ("/api/runs", self.runs),
            ("/api/runs/{id}", self.run),
            ("/api/runs/{id}/card", self.card),
            ("/api/runs/{id}/config", self.config),
            ("/api/runs/{id}/about", self.describe_config),
            ("/api/runs/{id}/metrics", self.metrics),
            ("/api/runs/{id}/tail", self.tail),
            ("/api/runs/{id}/log", self.log),
            ("/api/runs/{id}/glimpse", self.glimpse),
            ("/api/runs/{id}/before-after", self.before_after),
            ("/api/runs/{id}/rollouts", self.rollouts),
            ("/api/runs/{id}/rollouts/{step}/{split}/{place}", self.group),
            ("/api/runs/{id}/rollouts/{step}/{split}/{place}/tokens", self.tokens),
            ("/api/runs/{id}/rollouts/{step}/{split}/{place}/tokens/{at}", self.token),
            ("/api/runs/{id}/rollouts/{step}/{split}/{place}/advantages", self.advantages),
            ("/api/runs/{id}/prompts/{prompt}", self.prompt),
            ("/api/runs/{id}/images/{name}", self.image),
            ("/api/compare", self.compare),
            ("/api/compare/curves.csv", self.csv),
            ("/api/compare/difference", self.difference),
            ("/api/compare/answers", self.answers),
            ("/api/studies/{id}", self.study),
            ("/api/docs", self.docs),
            ("/api/docs/{name:path}", self.doc),
            ("/api/starts", self.starts),
            ("/api/draft", self.draft),
            ("/api/events", self.events),
        ]
        routes = [Route(path, handler, methods=["GET"]) for path, handler in gets]
        posts: list[tuple[str, Callable[..., Any]]] = [
            ("/api/draft", self.change_draft),
            ("/api/check", self.check),
            ("/api/plan", self.plan),
            ("/api/launches", self.launch),
            ("/api/runs/{id}/stop", self.stop),
            ("/api/runs/{id}/resume", self.resume),
        ]
        routes += [Route(path, handler, methods=["POST"]) for path, handler in posts]
        return Starlette(routes=routes, exception_handlers={HTTPException: _refused, Exception: _refused})

    def index(self, request: Request) -> Response:
        return self._file(request, "index.html")

    def static(self, request: Request) -> Response:
        return self._file(request, request.path_params["name"])

    def runs(self, request: Request) -> Response:
        runs = [self.catalog.card(entry) for entry in self.catalog.entries()]
        server = {"folder": str(self.catalog.root), "launch": self.launcher is not None}
        return answer(request, server | {"runs": runs, "studies": compare.listed(self.catalog)})

    def card(self, request: Request) -> Response:
        with self._reading(request) as (entry, _):
            pass
        return answer(request, self.catalog.card(entry))

    def run(self, request: Request) -> Response:
        with self._reading(request) as (entry, run):
            details = catalog.details(run, entry.id, entry.name) | {"outcome": catalog.outcome(run)}
        return answer(request, details | {"launch": self.launcher is not None})

    def config(self, request: Request) -> Response:
        with self._reading(request) as (_, run):
            config = run.config
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else ""
        return answer(request, {"yaml": text})

    def describe_config(self, request: Request) -> Response:
        with self._reading(request) as (_, run):
            config = run.config
        return answer(request, self.questions.describe(config))

    def metrics(self, request: Request) -> Response:
        """Return curves in binary: the length of a JSON header, the header, then float32."""
        query = request.query_params
        names = query.get("keys", "").split("\n") if query.get("keys") else []
        points = min(MAX_POINTS, natural(query.get("points"), 600))
        first, last = natural(query.get("from"), 0), natural(query.get("to"), 2**52)
        with self._reading(request) as (_, run):
            trained, one = catalog.packed(run, run.metrics, names, points, first, last)
            evaluated, other = catalog.packed(run, run.evaluations, names, points, first, last)
            step = int(run.metrics.steps[-1]) if len(run.metrics.steps) else 0
            state = {"step": step, "evaluations": len(run.evaluations.steps), "resumed": resumed(run)}
        header = orjson.dumps(state | {"train": trained, "eval": evaluated})
        header += b" " * (-(len(header) + 4) % 4)
        body = struct.pack("<I", len(header)) + header + one + other
        return Response(body, media_type="application/octet-stream", headers={"cache-control": "no-store"})

    def tail(self, request: Request) -> Response:
        """Return the rows after a step. `rewritten` is True if the run was resumed from an earlier step meanwhile, so
        that the page has to load all rows again."""
        after = natural(request.query_params.get("after"), 0)
        with self._reading(request) as (_, run):
            table = run.metrics
            start = int(table.steps.searchsorted(after, "right"))
            rewritten = after > 0 and (start == 0 or int(table.steps[start - 1]) != after)
            rewritten |= natural(request.query_params.get("resumed"), resumed(run)) != resumed(run)
            columns = {name: [catalog.number(value) for value in column[start:]] for name, column in table.items()}
            rows = {"steps": table.steps[start:].tolist(), "columns": columns, "rewritten": rewritten}
            rows["evaluations"] = len(run.evaluations.steps)
        return answer(request, rows)

    def log(self, request: Request) -> Response:
        """Return a run's log: the output of its newest start from a page, or the run's own log if it was started or
        resumed elsewhere since."""
        entry = self._entry(request)
        own, path = entry.path / LOG, self.launcher.log_of(entry.path) if self.launcher else None
        readable = own.is_file() and not own.is_symlink()
        if readable and (path is None or own.stat().st_mtime > path.stat().st_mtime + AT_ONCE_S):
            path = own
        if path is None:
            return answer(request, {"text": None, "end": 0})
        after = natural(request.query_params.get("after"), 0)
        return answer(request, read_log(path, after) | {"own": path == own})

    def glimpse(self, request: Request) -> Response:
        with self._reading(request) as (_, run):
            return answer(request, rollouts.glimpse(run.rollouts))

    def before_after(self, request: Request) -> Response:
        with self._reading(request) as (_, run), _refusals():
            return answer(request, rollouts.before_after(run.rollouts, request.query_params))

    def rollouts(self, request: Request) -> Response:
        with self._reading(request) as (_, run), _refusals():
            return answer(request, rollouts.page(run.rollouts, request.query_params))

    def group(self, request: Request) -> Response:
        with self._reading(request) as (_, run), _refusals():
            return answer(request, rollouts.group(run.rollouts, *rollouts.place_at(request.path_params)))

    def tokens(self, request: Request) -> Response:
        with self._reading(request) as (_, run), _refusals():
            return answer(request, rollouts.tokens(run, *rollouts.place_at(request.path_params)))

    def token(self, request: Request) -> Response:
        with self._reading(request) as (_, run), _refusals():
            config, at = run.config, natural(request.path_params["at"], 0)
            row = rollouts.token_row(run, *rollouts.place_at(request.path_params), at)
        return answer(request, self.questions.token(config, row))

    def advantages(self, request: Request) -> Response:
        with self._reading(request) as (_, run), _refusals():
            config, step = run.config, rollouts.trained_on(run.rollouts, *rollouts.place_at(request.path_params))
        return answer(request, self.questions.advantages(config, step))

    def prompt(self, request: Request) -> Response:
        split = request.query_params.get("split")
        with self._reading(request) as (_, run), _refusals():
            return answer(request, rollouts.prompt_history(run.rollouts, request.path_params["prompt"], split))

    def image(self, request: Request) -> Response:
        """Return a picture of a run's folder, of which only the names of pictures are read."""
        name, run = request.path_params["name"], self._entry(request).path
        path = run / IMAGES / name
        if not rollouts.is_picture(name) or path.resolve() != run.resolve() / IMAGES / name or not path.is_file():
            raise HTTPException(404, "no such picture")
        kind = "image/jpeg" if path.suffix == ".jpg" else f"image/{path.suffix[1:]}"
        headers = {"cache-control": "private, max-age=86400, immutable"}
        return Response(path.read_bytes(), media_type=kind, headers=headers)

    def compare(self, request: Request) -> Response:
        parts, everything = [], request.query_params.get("all") == "true"
        for entry in self._compared(request):
            with self.catalog.reading(entry) as run:
                parts.append(compare.run_data(run, entry.id, entry.name, everything))
        combined, cut = compare.combine(parts), max(0, len(_run_ids(request)) - compare.MAX_RUNS)
        return answer(request, combined | {"unfinished": combined["left_out"], "left_out": cut})

    def csv(self, request: Request) -> Response:
        """Return the values of some metrics of some runs as CSV."""
        names = [name for name in request.query_params.get("keys", "").split("\n") if name]
        lines = [catalog.csv_line([*catalog.CSV_HEAD, *names])]
        for entry in self._compared(request):
            with self.catalog.reading(entry) as run:
                lines += catalog.csv_lines(entry.name, run, names)
        headers = {"cache-control": "no-store", "content-disposition": 'attachment; filename="curves.csv"'}
        return Response("".join(lines).encode("utf-8", "replace"), media_type="text/csv", headers=headers)

    def difference(self, request: Request) -> Response:
        entries = self._compared(request)
        if len(entries) != 2:
            raise HTTPException(400, "the comparison needs two runs")
        return answer(request, compare.difference([entry.path for entry in entries]))

    def answers(self, request: Request) -> Response:
        entries, evaluations = self._compared(request), []
        for entry in entries:
            with self.catalog.reading(entry) as run:
                evaluations.append(compare.held_out(run))
        differing = request.query_params.get("differing") == "true"
        prompts, total = compare.answers_page(evaluations, natural(request.query_params.get("offset"), 0), differing)
        columns = []
        for entry, one in zip(entries, evaluations, strict=True):
            with self.catalog.reading(entry) as run:
                columns.append(compare.answers_of(run, one, prompts))
        page = {"steps": [one["step"] for one in evaluations], "total": total, "page": compare.ANSWERS}
        return answer(request, page | {"rows": list(zip(*columns, strict=True))})

    def _compared(self, request: Request) -> list[Any]:
        return [self._find(run_id) for run_id in _run_ids(request)[: compare.MAX_RUNS]]

    def study(self, request: Request) -> Response:
        try:
            return answer(request, compare.study_page(self.catalog, request.path_params["id"]))
        except LookupError as error:
            raise HTTPException(404, str(error)) from None
        except (ImportError, ReadError) as error:
            raise HTTPException(503, str(error)) from None

    def docs(self, request: Request) -> Response:
        return answer(request, {"pages": list(self.manual.titles().items())})

    def doc(self, request: Request) -> Response:
        name = request.path_params["name"]
        with _refusals():
            return answer(request, {"tree": self.manual.tree(name), "title": self.manual.title(name)})

    async def events(self, request: Request) -> Response:
        if self.watcher.streams >= MAX_STREAMS:
            raise HTTPException(503, "too many pages are open")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self.watcher.stream(), media_type="text/event-stream", headers=headers)

    def starts(self, request: Request) -> Response:
        """List the config files that a new run may start from."""
        self._launcher()
        self.configs = Configs()
        return answer(request, {"configs": self.configs.listed()})

    def draft(self, request: Request) -> Response:
        """Return the config of a new run, made from a run, a config file, or the template."""
        launcher, query = self._launcher(), request.query_params
        if query.get("from"):
            with self.catalog.reading(self._find(query["from"])) as run:
                text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else ""
        else:
            with _refusals():
                text = self.configs.text(query["config"]) if query.get("config") else TEMPLATE
        root = self.catalog.root if self.catalog.root.resolve() == launcher.root else launcher.root
        return answer(request, started_from(text, root))

    async def change_draft(self, request: Request) -> Response:
        """Change some keys of a config's text, without validation."""
        body = await _body(request)
        self._launcher()
        text, values = str(body.get("yaml") or ""), body.get("set")
        try:
            for key, value in (values if isinstance(values, dict) else {}).items():
                text = edited(text, str(key), None if value is None else str(value))
            return answer(request, {"yaml": text, **read(text)})
        except DraftError as error:
            return answer(request, {"yaml": text, "given": {}, "lines": {}, "errors": [str(error)], "line": error.line})

    async def check(self, request: Request) -> Response:
        body = await _body(request)
        return answer(request, await asyncio.to_thread(self._check, body))

    def _check(self, body: dict[str, Any]) -> dict[str, Any]:
        """Validate a config; `problems` are the reasons not to start it, by key."""
        checked = self.questions.check(str(body.get("yaml") or ""))
        reasons = problems(checked.get("errors") or ())
        if self.launcher and checked.get("run_dir") and (refused := self.launcher.refusal(checked["run_dir"])):
            reasons = [{"key": refused[0], "message": refused[1]}]
        return checked | {"problems": reasons}

    def _home(self, body: dict[str, Any]) -> Home:
        """Return where the run was started that the new run is a variant of."""
        if not body.get("from"):
            return Home()
        with self.catalog.reading(self._find(str(body["from"]))) as run:
            return home_of(run.environment)

    async def plan(self, request: Request) -> Response:
        body, launcher = await _body(request), self._launcher()
        with _refusals():
            return answer(request, await asyncio.to_thread(launcher.plan, str(body.get("yaml")), self._home(body)))

    async def launch(self, request: Request) -> Response:
        body, launcher = await _body(request), self._launcher()
        checked = await asyncio.to_thread(self._check, body)
        if checked.get("errors"):
            raise HTTPException(400, "\n".join(checked["errors"]))
        if checked.get("failed"):
            raise HTTPException(503, checked["failed"])
        with _refusals():
            text, home = str(body.get("yaml") or ""), self._home(body)
            if refused := launcher.refusal(checked["run_dir"]):
                raise LaunchError(refused[1])
            plan = await asyncio.to_thread(launcher.plan, text, home)
            if not plan["fits"] and not plan["late"]:
                raise LaunchError(plan["text"])
            launched = await asyncio.to_thread(launcher.start, text, checked["run_dir"], home)
        return answer(request, launched)

    async def stop(self, request: Request) -> Response:
        launcher, entry = self._launcher(), self._entry(request)
        with _refusals():
            return answer(request, launcher.stop(entry.path))

    async def resume(self, request: Request) -> Response:
        launcher, entry = self._launcher(), self._entry(request)
        with _refusals():
            return answer(request, await asyncio.to_thread(launcher.resume, entry.path))

    def _launcher(self) -> Launcher:
        if self.launcher is None:
            raise HTTPException(403, "start the server with --allow-launch to start, stop and resume runs")
        return self.launcher

    def _find(self, run_id: str) -> Any:
        try:
            return self.catalog.entry(run_id)
        except UnknownRun:
            raise HTTPException(404, "no such run") from None

    def _entry(self, request: Request) -> Any:
        return self._find(request.path_params["id"])

    @contextmanager
    def _reading(self, request: Request) -> Iterator[tuple[Any, Run]]:
        entry = self._entry(request)
        with self.catalog.reading(entry) as run:
            yield entry, run

    def _file(self, request: Request, name: str) -> Response:
        """Serve a file that existed when the server started; a request's name is never used as a path."""
        if name not in self.files:
            raise HTTPException(404, "no such file")
        plain, packed, kind, tag = self.files[name]
        headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, media_type=kind, headers=headers | {"content-encoding": "gzip"})
        return Response(plain, media_type=kind, headers=headers)


def static_files(folder: Path) -> Iterator[tuple[str, tuple[bytes, bytes, str, str]]]:
    """Yield (name, (content, compressed content, type, etag)) of the static files."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in TYPES:
            content = path.read_bytes()
            tag = f'"{sha256(content).hexdigest()[:16]}"'
            yield path.relative_to(folder).as_posix(), (content, gzip.compress(content), TYPES[path.suffix], tag)


def answer(request: Request, content: Any) -> Response:
    """Return a JSON response. NaN becomes null, invalid Unicode (half a surrogate pair) a replacement character."""
    try:
        body = orjson.dumps(content, default=str, option=OPTIONS)
    except TypeError:
        body = orjson.dumps(_clean(content), default=str, option=OPTIONS)
    headers = {"cache-control": "no-store"}
    if len(body) > MIN_GZIP and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["content-encoding"] = gzip.compress(body, 1), "gzip"
    return Response(body, media_type="application/json", headers=headers)


def _clean(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if depth > 200:  # orjson cannot serialize more levels
        return "…"
    if isinstance(value, dict):
        return {_clean(key): _clean(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, depth + 1) for item in value]
    large = isinstance(value, int) and value.bit_length() > 63
    return (str if value.bit_length() < 10_000 else hex)(value) if large else value  # str() refuses very large ints


def read_log(path: Path, after: int) -> dict[str, Any]:
    """Read a log from byte `after` on; only its end, if that is more than `MAX_LOG` bytes."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = max(after if after <= size else 0, size - MAX_LOG)
        file.seek(start)
        text = file.read(MAX_LOG).decode("utf-8", "replace")
    return {"text": text, "start": start, "end": size}


def resumed(run: Run) -> int:
    """Return how often a run was resumed, by its `env.json`."""
    attempts = run.environment.get("resumed")
    return len(attempts) if isinstance(attempts, list) else 0


def natural(text: str | None, default: int) -> int:
    """Parse a parameter that is a non-negative integer."""
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 16:
        raise HTTPException(400, f"{text[:40]!r} is not an integer")
    return int(text)


def _run_ids(request: Request) -> list[str]:
    return [run for run in request.query_params.get("runs", "").split(",") if run]


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError:
        raise HTTPException(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "the body is not a mapping")
    return body


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except rollouts.BadQuestion as error:
        raise HTTPException(400, str(error)) from None
    except LookupError as error:
        raise HTTPException(404, str(error)) from None
    except LaunchError as error:
        raise HTTPException(409, str(error)) from None


def _refused(request: Request, error: Exception) -> Response:
    """Return an error response; an unexpected error gets the message that the list shows for an unreadable run."""
    status, detail = 500, f"cannot be read: {error!r}"[:1000]
    if isinstance(error, HTTPException):
        status, detail = error.status_code, error.detail
    return Response(orjson.dumps({"detail": detail}), status, {"cache-control": "no-store"}, "application/json")
