"""The live state as tables for a terminal, of any width.

A column has a rank. While the columns do not fit, the one with the highest rank is left out. One in which no row has
anything is left out too, unless its rank is 0. The last column of a table takes the space that is left. No cell is read
as rich's markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
    "alive": "green",
    "starting": "yellow",
    "lost": "bold red",
    "fenced": "bold red",
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
BAR_WIDTH, SHORTEST_BAR = 32, 12
NOTE_WIDTH = 24
"""The space that a note gets before columns of rank 1 and higher."""
NODE_WIDTH = 20
"""The most characters of a node's name beside other things. The table of nodes has the whole name."""
FILL_WIDTH = 10
GAP = 2
"""Spaces between two columns."""
NAME_WIDTH, SHORT_NAME_WIDTH = 48, 17
"""The most characters of a request's name, and those in a terminal with fewer than ``WIDE`` columns."""
WIDE = 110
FRAME_LINES, CLUSTER_LINES = 8, 4
"""Lines that are not rows: the heads of tables with the empty lines before them, the legend, and one to spare; those of
nodes and links."""


class Space(NamedTuple):
    """columns: of the terminal. lines: of the terminal; None: no limit."""

    columns: int
    lines: int | None


class _Column(NamedTuple):
    """rank: when the column is left out, if there is too little space; 0: never."""

    title: str
    rank: int = 0
    is_number: bool = False


def screen(state: LiveState, rates: Rates, *, now: float, url: str, lost: str | None, space: Space) -> RenderableType:
    """Return the screen. now: the server's Unix time. lost: why the state is old; None: it is not."""
    head = _head(state, rates, url, lost)
    head_lines = sum(max(1, -(-line.cell_len // space.columns)) for line in head.split("\n"))
    stages = _stages(state, now, space.columns)
    frame = FRAME_LINES + (CLUSTER_LINES if state.nodes else 0)
    left = None if space.lines is None else max(0, space.lines - frame - head_lines - stages.row_count)
    tables = [stages]
    for make in (_nodes, _links, _rings, _requests):
        tables.append(make(state, rates, now, left, space.columns))
        left = None if left is None else max(0, left - tables[-1].row_count)
    requests = tables[-1]
    parts = [part for table in tables if table.row_count for part in (Text(), table)]
    legend = Text("  ").join(Text(kind, style) for kind, style in BAR_STYLES.items())
    return Group(head, *parts, *([legend] if requests.row_count else []))


def _head(state: LiveState, rates: Rates, url: str, lost: str | None) -> Text:
    status = ("failed", "bold red") if state.errored else ("ready", "green") if state.ready else ("not ready", "yellow")
    head = Text.assemble((state.pipeline, "bold"), f" at {url}  ", status, overflow="fold")
    head.append(f"   requests {state.in_flight}/{state.max_requests}, {state.waiting} waiting")
    if rates.requests_s is not None:
        head.append(f", {rates.requests_s:.1f} ended/s")
    if state.error is not None:
        head.append(f"\n{state.error}", "red")
    if lost is not None:
        head.append(f"\nconnecting again: {lost}", "bold yellow")
    return head


def _fit(columns: Sequence[_Column], rows: Sequence[Sequence[Text]], width: int, rest: int) -> tuple[list[int], int]:
    """Return the numbers of the columns that fit beside ``rest`` cells, and the cells that are left beside them."""
    widths = [
        max([len(column.title), *(row[number].cell_len for row in rows)]) + GAP for number, column in enumerate(columns)
    ]
    shown = [each for each in range(len(columns)) if columns[each].rank == 0 or any(row[each] for row in rows)]
    for number in sorted(shown, key=lambda each: -columns[each].rank):
        if columns[number].rank == 0 or sum(widths[each] for each in shown) + rest <= width:
            break
        shown.remove(number)
    return shown, width - sum(widths[each] for each in shown)


def _table(columns: Sequence[_Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(
            Text(column.title),
            justify="right" if column.is_number else "left",
            style="" if number else "bold",
            no_wrap=True,
        )
    return table


STAGE_COLUMNS = (
    _Column("stage"),
    _Column("node", 2),
    _Column("engine", 5),
    _Column("state"),
    _Column("pid", 2, True),
    _Column("generation", 4, True),
    _Column("restarts", 1, True),
    _Column("requests", 1, True),
    _Column("load", 3, True),
)


def _stages(state: LiveState, now: float, width: int) -> Table:
    rows, notes = list[list[Text]](), list[Text]()
    for name, stage in state.stages.items():
        for number, replica in stage.replicas.items():
            label = f"{name}.{number}" + (" (standby)" if replica.standby else "")
            load = "" if replica.load_s is None else f"{replica.load_s:.1f} s"
            counts = (replica.pid or "–", replica.generation, replica.restarts, replica.requests)
            status = Text(replica.state, STATE_STYLES.get(replica.state, ""))
            names = (label, _short(replica.node or ""), stage.engine)
            rows.append([*map(Text, names), status, *(Text(str(each)) for each in counts), Text(load)])
            notes.append(_note(replica, now))
    widest = max((note.cell_len for note in notes), default=0)
    shown, rest = _fit(STAGE_COLUMNS, rows, width, min(widest, NOTE_WIDTH))
    table = _table([*(STAGE_COLUMNS[each] for each in shown), _Column("note")])
    for row, note in zip(rows, notes, strict=True):
        note.truncate(max(NOTE_WIDTH, rest), overflow="ellipsis")
        table.add_row(*(row[each] for each in shown), note)
    return table


def _short(node: str) -> str:
    return node if len(node) <= NODE_WIDTH else f"{node[: NODE_WIDTH - 1]}…"


def _note(replica: LiveReplica, now: float) -> Text:
    """Return what the worker is doing, or how the last one died."""
    note = Text(replica.note if replica.state != "ready" else "")
    if replica.down_since is not None:
        note.append(f" down for {max(0.0, now - replica.down_since):.1f} s", "red")
    if replica.deaths:
        note.append(f" last death: {replica.deaths[-1].how}", "dim")
    return note


NODE_COLUMNS = (
    _Column("node"),
    _Column("state"),
    _Column("for", 1, True),
    _Column("agent", 2, True),
)


def _nodes(state: LiveState, _: Rates, now: float, most: int | None, width: int) -> Table:
    rows, notes = list[list[Text]](), list[Text]()
    for name, node in list(state.nodes.items())[:most]:
        agent = "parent" if node.parent else str(node.agent_pid or "")
        status = Text(node.state, STATE_STYLES.get(node.state, ""))
        rows.append([Text(name), status, Text(f"{max(0.0, now - node.since):.0f} s"), Text(agent)])
        notes.append(Text(node.why or "", "red"))
    widest = max((note.cell_len for note in notes), default=0)
    shown, rest = _fit(NODE_COLUMNS, rows, width, min(widest, NOTE_WIDTH))
    table = _table([*(NODE_COLUMNS[each] for each in shown), _Column("note" if widest else "")])
    for row, note in zip(rows, notes, strict=True):
        note.truncate(max(NOTE_WIDTH, rest), overflow="ellipsis")
        table.add_row(*(row[each] for each in shown), note)
    return table


LINK_COLUMNS = (
    _Column("link"),
    _Column("nodes", 2),
    _Column("waiting", 1, True),
    _Column("bytes/s", is_number=True),
    _Column("messages/s", is_number=True),
)


def _links(state: LiveState, rates: Rates, _: float, most: int | None, width: int) -> Table:
    rows = list[list[Text]]()
    for name, link in list(state.links.items())[:most]:
        waiting = Text(filesize.decimal(link.waiting_bytes), "" if link.waiting_bytes else "dim")
        names = (name.replace(">", " → "), f"{_short(link.from_node)} → {_short(link.to_node)}")
        rows.append([*map(Text, names), waiting, *_rate(name, rates.link_bytes_s, rates.link_messages_s)])
    return _whole_rows(LINK_COLUMNS, rows, width)


def _rate(name: str, bytes_s: Mapping[str, float], messages_s: Mapping[str, float]) -> tuple[Text, Text]:
    if name not in bytes_s:
        return Text("–"), Text("–")
    return Text(filesize.decimal(int(bytes_s[name]))), Text(f"{messages_s[name]:.1f}")


def _whole_rows(columns: Sequence[_Column], rows: Sequence[Sequence[Text]], width: int) -> Table:
    """Return a table of the columns that fit."""
    shown, _ = _fit(columns, rows, width + GAP, 0)
    table = _table([columns[each] for each in shown])
    for row in rows:
        table.add_row(*(row[each] for each in shown))
    return table


RING_COLUMNS = (
    _Column("ring"),
    _Column("used", 1),
    _Column("", 2),
    _Column("bytes/s", is_number=True),
    _Column("messages/s", is_number=True),
)


def _rings(state: LiveState, rates: Rates, _: float, most: int | None, width: int) -> Table:
    rows = list[list[Text]]()
    on_one_node = {name: ring for name, ring in state.rings.items() if name not in state.links}
    for name, ring in list(on_one_node.items())[:most]:
        full = round(FILL_WIDTH * max(0, min(ring.used, ring.capacity)) / max(1, ring.capacity))
        style = "green" if ring.used < ring.capacity / 2 else "red"
        fill = Text.assemble(("█" * full, style), ("·" * (FILL_WIDTH - full), "dim"))
        used = f"{filesize.decimal(ring.used)} of {filesize.decimal(ring.capacity)}"
        rate = _rate(name, rates.bytes_s, rates.messages_s)
        rows.append([Text(f"{ring.producer} → {ring.consumer}"), fill, Text(used), *rate])
    return _whole_rows(RING_COLUMNS, rows, width)


REQUEST_COLUMNS = (
    _Column("request"),
    _Column("state"),
    _Column("time", is_number=True),
    _Column("TTFT", 2, True),
    _Column("TTFA", 1, True),
    _Column("underruns", 4, True),
    _Column("replays", 3, True),
)


def _requests(state: LiveState, _: Rates, now: float, most: int | None, width: int) -> Table:
    newest = sorted(state.requests.values(), key=lambda each: (each.state in ENDED, -each.submitted))[:most]
    totals = [each.total_s if each.total_s is not None else max(0.0, now - each.submitted) for each in newest]
    rows = [_request(each, total, width) for each, total in zip(newest, totals, strict=True)]
    shown, rest = _fit(REQUEST_COLUMNS, rows, width, SHORTEST_BAR)
    table = _table([*(REQUEST_COLUMNS[each] for each in shown), _Column("life")])
    share = 2 if any(each.failure for each in newest) else 1  # half of the space is for reasons, where there are any
    bar_width = min(BAR_WIDTH, max(SHORTEST_BAR, rest // share))
    for row, request, total in zip(rows, newest, totals, strict=True):
        life = _bar(request, total, bar_width)
        if request.failure is not None:
            life.append(f"  {request.failure.message}", "red")
        life.truncate(max(SHORTEST_BAR, rest), overflow="ellipsis")  # else it takes space from other columns
        table.add_row(*(row[each] for each in shown), life)
    return table


def _request(request: LiveRequest, total: float, width: int) -> list[Text]:
    name = request.name[: NAME_WIDTH if width >= WIDE else SHORT_NAME_WIDTH]
    times = (_seconds(value) for value in (total, request.ttft_s, request.ttfa_s))
    status = Text(request.state, STATE_STYLES.get(request.state, "red"))
    counts = (str(value or "") for value in (request.underruns, request.replays))
    return [Text(name), status, *map(Text, times), *map(Text, counts)]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _bar(request: LiveRequest, total: float, width: int) -> Text:
    """Return the parts of a request's life in ``width`` characters. A later part covers an earlier one."""
    styles = [""] * width
    for bar in request.bars if total else ():
        began, ended = (min(1.0, max(0.0, at / total)) for at in (bar.began, total if bar.ended is None else bar.ended))
        first = min(width - 1, int(width * began))
        last = max(first + 1, round(width * ended))
        styles[first:last] = [BAR_STYLES.get(bar.kind, "")] * (last - first)
    return Text.assemble(*(("█" if style else " ", style) for style in styles))
