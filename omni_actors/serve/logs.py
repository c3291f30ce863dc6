"""What the server writes to stderr: plain lines, or JSON with one object a line.

Rules
1. All records of level WARNING or above are written, of every library, and all events of ``log_events``.
2. In JSON, a line has ``timestamp`` (UTC, ISO 8601), ``level``, ``event``, ``logger``, ``message``, and the facts of
   the event as fields of their own. A record that an HTTP request causes has ``request_id``, and one with an exception
   ``traceback``. ``event`` is "log" for a record that is no event.
3. In JSON, warnings and exceptions that end the process or one of its threads are records too.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import click
import msgspec

from omni_actors import log_events
from omni_actors.command_line import click_errors
from omni_actors.log_events import REQUEST_ID, LogEvent, ServerFailed, WorkerEnd

LogFormat = Literal["plain", "json"]

log = logging.getLogger("omni_actors.serve")


class JSONFormatter(logging.Formatter):
    """Formats a record as one JSON object without line breaks, in ASCII, so that no encoding of stderr changes it."""

    def format(self, record: logging.LogRecord) -> str:
        event = getattr(record, "event", None)
        facts: dict[str, Any] = msgspec.to_builtins(event) if isinstance(event, LogEvent) else {"event": "log"}
        line = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **({} if (id := REQUEST_ID.get()) is None else {"request_id": id}),
            **facts,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(format: LogFormat) -> None:
    """Let this process write its log records to stderr, unless its root logger has a handler already."""
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JSONFormatter() if format == "json" else plain)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    log_events.log.setLevel(logging.INFO)
    if format == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_exception
        threading.excepthook = lambda args: _log_exception(args.exc_type, args.exc_value, args.exc_traceback)
        sys.unraisablehook = lambda args: _log_exception(args.exc_type, args.exc_value, args.exc_traceback)


@contextmanager
def logged_errors(*, verbose: bool = False) -> Iterator[None]:
    """As ``click_errors``, but the sentence is logged as an event."""
    try:
        with click_errors(verbose=verbose):
            yield
    except click.ClickException as error:
        cause = error.__cause__
        facts = {name: getattr(cause, name, None) for name in WorkerEnd.__struct_fields__}
        failed = ServerFailed(error=type(cause).__name__, reason=error.message, code=error.exit_code, **facts)
        log_events.record(failed)
        raise SystemExit(error.exit_code) from error


def _log_exception(
    kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None = None
) -> None:
    error = error or kind()
    log.critical("%s", error, exc_info=(kind, error, traceback))
