"""The static files of the page, and the facts that it needs of the server.

Rules
1. The files are read once, at the start. No path of a request reaches the file system.
2. They need no key, because they hold nothing of the pipeline. The facts need it. The page asks for the key, keeps it
   in the browser's sessionStorage, and sends it as every client does.
3. The Content-Security-Policy allows nothing but this server: no inline script, no other host, no frame around it.
4. A browser asks each time whether a file has changed (``ETag``), so that a new version of the package is seen at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files as package_files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omni_actors.serve.api.responses import JSONResponse
from omni_actors.serve.settings import ServerSettings

INDEX = "index.html"
FOLDER = "/page/"
"""The path below which the files are, except ``INDEX``, which is ``/``."""
FACTS = "/page/facts"
MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "LICENSE": "text/plain; charset=utf-8",
}
"""The media type of a file, by the end of its name. Files with another end are not served."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
        "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "microphone=(self), camera=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def read_files() -> dict[str, tuple[bytes, str]]:
    """Return the content and the media type of each static file, by its path on the server."""
    found: dict[str, tuple[bytes, str]] = {}

    def add(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            name = f"{prefix}{entry.name}"
            media_type = MEDIA_TYPES.get(entry.name.rpartition(".")[2])
            if entry.is_dir():
                add(entry, f"{name}/")
            elif media_type is not None:
                found["/" if name == INDEX else FOLDER + name] = entry.read_bytes(), media_type

    add(package_files("omni_actors.serve.page") / "static", "")
    return found


def routes() -> list[Route]:
    """Return the routes of the files. They accept GET, and need no key."""
    return [Route(path, _file(*each), methods=["GET"]) for path, each in read_files().items()]


def facts_route(settings: ServerSettings) -> Route:
    """Return the route of the facts. It accepts GET."""
    return Route(FACTS, _facts(settings), methods=["GET"])


def _file(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**HEADERS, "etag": tag}

    async def send_file(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return send_file


def _facts(settings: ServerSettings) -> Callable[[Request], Awaitable[Response]]:
    async def facts(request: Request) -> Response:
        """Return what the page must know of the server: whether its clients need a key, and what it offers."""
        paths = {getattr(route, "path", None) for route in request.app.routes}
        return JSONResponse(
            {
                "needs_key": settings.api_key is not None,
                "has_realtime": "/v1/realtime" in paths,
                "has_chaos": settings.chaos,
                "pipelines": list(request.app.state.pipelines.by_name),
            }
        )

    return facts
