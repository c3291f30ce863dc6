"""The live state as tables for a terminal."""

from __future__ import annotations

from rich import filesize
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from omni_actors.cli.top.rates import ENDED, Rates
from omni_actors.system import LiveState
from omni_actors.system.live_requests import LiveRequest
from omni_actors.system.live_state import LiveReplica

STATE_STYLES = {
    "ready": "green",
    "loading": "yellow",
    "draining": "yellow",
    "restarting": "bold red",
    "failed": "bold red",
    "asleep": "dim",
    "queued": "yellow",
    "running": "cyan",
    "streaming": "cyan",
    "done": "green",
    "aborted": "yellow",
}
BAR_STYLES = {
    "queue": "yellow",
    "transfer": "magenta",
    "step": "green",
    "run": "green",
    "lost": "red",
    "resume": "blue",
}
BAR_WIDTH = 32
FILL_WIDTH = 10
FRAME_LINES = 9
"""Lines that are not rows: the head, the heads of the tables, and the legend."""


def screen(
    state: LiveState, rates: Rates, *, now: float, url: str, lost: str | None, lines: int | None
) -> RenderableType:
    """Return the screen. now: the server's Unix time. lines: rows that fit; None: all. lost: why the state is old."""
    stages = _stages(state, now)
    left = None if lines is None else max(0, lines - FRAME_LINES - stages.row_count)
    rings = _rings(state, rates, left)
    requests = _requests(state, now, None if left is None else max(0, left - rings.row_count))
    parts = [part for table in (stages, rings, requests) if table.row_count for part in (Text(), table)]
    legend = Text("  ").join(Text(kind, style) for kind, style in BAR_STYLES.items())
    return Group(_head(state, rates, url, lost), *parts, *([legend] if requests.row_count else []))


def _head(state: LiveState, rates: Rates, url: str, lost: str | None) -> Text:
    status = ("failed", "bold red") if state.errored else ("ready", "green") if state.ready else ("not ready", "yellow")
    head = Text.assemble((state.pipeline, "bold"), f" at {url}  ", status)
    head.append(f"   requests {state.in_flight}/{state.max_requests}, {state.waiting} waiting")
    if rates.requests_s is not None:
        head.append(f", {rates.requests_s:.1f} ended/s")
    if state.error is not None:
        head.append(f"\n{state.error}", "red")
    if lost is not None:
        head.append(f"\nconnecting again: {lost}", "bold yellow")
    return head


def _table(title: str, *columns: str) -> Table:
    """Return a table. Columns whose names begin with ">" are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate((title, *columns)):
        is_number = column.startswith(">")
        table.add_column(
            column.removeprefix(">"),
            justify="right" if is_number else "left",
            style="bold" if not number else "",
            no_wrap=True,
        )
    return table


def _stages(state: LiveState, now: float) -> Table:
    table = _table("stage", "engine", "state", ">pid", ">generation", ">restarts", ">requests", ">load", "note")
    for name, stage in state.stages.items():
        for number, replica in stage.replicas.items():
            label = f"{name}.{number}" + (" (standby)" if replica.standby else "")
            load = "" if replica.load_s is None else f"{replica.load_s:.1f} s"
            counts = (replica.pid or "", replica.generation, replica.restarts, replica.requests)
            status = Text(replica.state, STATE_STYLES.get(replica.state, ""))
            table.add_row(label, stage.engine, status, *map(str, counts), load, _note(replica, now))
    return table


def _note(replica: LiveReplica, now: float) -> Text:
    """Return what the worker is doing, or how the last one died."""
    note = Text(replica.note if replica.state != "ready" else "")
    if replica.down_since is not None:
        note.append(f" down for {max(0.0, now - replica.down_since):.1f} s", "red")
    if replica.deaths:
        note.append(f" last death: {replica.deaths[-1].how}", "dim")
    return note


def _rings(state: LiveState, rates: Rates, most: int | None) -> Table:
    table = _table("ring", "used", ">", ">bytes/s", ">messages/s")
    for name, ring in list(state.rings.items())[:most]:
        full = round(FILL_WIDTH * ring.used / ring.capacity)
        style = "green" if ring.used < ring.capacity / 2 else "red"
        fill = Text.assemble(("█" * full, style), ("·" * (FILL_WIDTH - full), "dim"))
        used = f"{filesize.decimal(ring.used)} of {filesize.decimal(ring.capacity)}"
        bytes_s = filesize.decimal(int(rates.bytes_s[name])) if name in rates.bytes_s else "–"
        messages_s = f"{rates.messages_s[name]:.1f}" if name in rates.messages_s else "–"
        table.add_row(f"{ring.producer} → {ring.consumer}", fill, used, bytes_s, messages_s)
    return table


def _requests(state: LiveState, now: float, most: int | None) -> Table:
    table = _table("request", "state", ">time", ">TTFT", ">TTFA", ">replays", "life")
    newest = sorted(state.requests.values(), key=lambda each: (each.state in ENDED, -each.submitted))
    for request in newest[:most]:
        total = request.total_s if request.total_s is not None else max(0.0, now - request.submitted)
        times = (_seconds(value) for value in (total, request.ttft_s, request.ttfa_s))
        status = Text(request.state, STATE_STYLES.get(request.state, "red"))
        failure = Text(f"  {request.failure.message}", "red") if request.failure is not None else Text()
        table.add_row(request.name, status, *times, str(request.replays or ""), _bar(request, total) + failure)
    return table


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _bar(request: LiveRequest, total: float) -> Text:
    """Return the parts of a request's life in ``BAR_WIDTH`` characters. A later part covers an earlier one."""
    styles = [""] * BAR_WIDTH
    for bar in request.bars if total else ():
        first = min(BAR_WIDTH - 1, int(BAR_WIDTH * bar.began / total))
        last = min(BAR_WIDTH, max(first + 1, round(BAR_WIDTH * (total if bar.ended is None else bar.ended) / total)))
        styles[first:last] = [BAR_STYLES.get(bar.kind, "")] * (last - first)
    return Text.assemble(*(("█" if style else " ", style) for style in styles))
