"""One file of trace events, for https://ui.perfetto.dev: the hops of requests, and what torch measured in the workers.

Rules
1. All times are microseconds of the wall clock since the profile began. torch gives times of the wall clock; those of
   the hops are CLOCK_MONOTONIC, and are converted with one offset.
2. Each request has a track of its own, and so has each stage of it. They belong to the parent's process. Each worker's
   events keep their threads. A device of a worker counts as a process, with a number that no other has.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omni_actors.system.timeline import Period

FIRST_DEVICE = 2**30
"""Above all process ids of Linux."""

Event = dict[str, Any]


class ProfileFile:
    """Collects the events.

    began_ns: when the profile began, on the wall clock.
    """

    def __init__(self, began_ns: int) -> None:
        self._began_ns = began_ns
        self._events: list[Event] = []
        self._devices = itertools.count(FIRST_DEVICE)
        self._flows = itertools.count(1)

    def add_requests(self, requests: Iterable[tuple[str, Period]], offset_ns: int) -> None:
        """Add the timelines of requests, by name. offset_ns: from CLOCK_MONOTONIC to the wall clock."""
        pid = os.getpid()
        self._name("process_name", pid, 0, "requests")
        tracks = itertools.count(1)
        for name, whole in requests:
            for title, periods in _tracks(name, whole):
                track = next(tracks)
                self._name("thread_name", pid, track, title)
                for period in periods:
                    self._events += self._period(period, pid, track, offset_ns)

    def _period(self, period: Period, pid: int, track: int, offset_ns: int) -> Iterator[Event]:
        def at(seconds: float) -> float:
            return (seconds * 1e9 + offset_ns - self._began_ns) / 1e3

        place = {"cat": "request", "pid": pid, "tid": track}
        error = {} if period.error is None else {"error": str(period.error)}
        duration = at(period.ended) - at(period.began)
        args = {**period.facts, **error}
        yield {"ph": "X", "name": period.name, "ts": at(period.began), "dur": duration, "args": args, **place}
        for died, crash in period.deaths:
            yield {"ph": "i", "s": "t", "name": "worker_died", "ts": at(died), "args": {"error": str(crash)}, **place}

    def add_worker(self, name: str, pid: int, trace: Mapping[str, Any]) -> None:
        """Add what torch wrote in a worker. name: the worker's, such as "llm.0"."""
        shift_us = (int(trace.get("baseTimeNanoseconds", 0)) - self._began_ns) / 1e3
        processes: dict[int, int] = {pid: pid}
        flows: dict[Any, int] = {}
        for event in trace["traceEvents"]:
            own = event.get("pid")
            if not isinstance(own, int) or event.get("name") == "process_name":
                continue  # rows of torch's own, such as "Spans"
            if own not in processes:
                processes[own] = next(self._devices)
                self._name("process_name", processes[own], 0, f"{name}, device {own}")
            moved = {**event, "pid": processes[own], "ts": event.get("ts", 0) + shift_us}
            if "id" in event:
                moved["id"] = flows.setdefault(event["id"], next(self._flows))
            self._events.append(moved)
        self._name("process_name", pid, 0, name)

    def write(self, path: Path) -> None:
        """Write the file. Raises OSError."""
        document = {"traceEvents": self._events, "displayTimeUnit": "ms", "beganUnixNs": self._began_ns}
        path.write_text(json.dumps(document), encoding="utf-8")

    def _name(self, kind: str, pid: int, track: int, name: str) -> None:
        self._events.append({"ph": "M", "name": kind, "pid": pid, "tid": track, "args": {"name": name}})


def _tracks(name: str, whole: Period) -> Iterator[tuple[str, list[Period]]]:
    """Yield the tracks of a request: periods of one track lie within each other or follow each other."""
    waiting = [part for part in whole.parts if not part.parts and "omni_actors.stage" not in part.facts]
    yield name, [whole, *waiting]
    for part in whole.parts:
        if part not in waiting:
            yield f"{name}: {part.name}", [part, *part.parts]
