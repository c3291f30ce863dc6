"""What the page costs: its first paint, its bytes, and the CPU time of viewers (`python -m bench.page`).

It needs Chromium. At the end it prints whether the bounds are met, and exits with 1 when one is not.

Paint: ``--loads`` new browsers, each with an empty cache, open the page of a server on this machine, one after the
other. The figure is the browser's own "first-contentful-paint", from the start of the navigation.

Viewers: two answers are in progress, so that the live state changes all the time. The cost of the stream of states is
the server's CPU time with viewers less that without, each over ``--seconds``; no browser runs then. The cost of the
page is the CPU time of its scripts, styles and layouts while it shows the same. No bound covers what painting costs the
browser beside that: without a GPU, the CPU draws it.

``--screenshots DIR`` takes the pictures of docs/page.md instead, on the pipeline ``voice``. Times on them are the
machine's, so nothing else should run. The report has the load average at the start and at the end.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np
import psutil
import soundfile
from rich.console import Console

from bench.bounds import Bound, show_bounds
from omni_actors.serve.page.files import read_files
from tests.support.chromium import Page, open_page

SLOW_ANSWERS = ("-s", "stages.first.options.fan_out=100000", "-s", "stages.first.options.step_s=0.05")
ANSWERS = 2
VIEWERS = (1, 4)
FIRST_PAINT_MS = 300
"""On loopback, of each browser."""
PAGE_KB = 300
"""All files of the page."""
CPU_PERCENT = 2
"""The most CPU time, of one core, at ten changes a second. It holds for the server, and for the page's own work."""
START_S = 300.0
DESKTOP, PHONE = (1360, 980), (390, 1000)
SPOKEN = "What is the capital of France?"
TYPED = "Tell me a story about a fox."


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run a server until the block ends, and give its URL and its process when its stages are ready."""
    command = [sys.executable, "-u", "-m", "omni_actors.serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while not (lines and lines[-1].startswith("ready: ")):
                lines.append(process.stdout.readline())
                assert lines[-1], "the server has ended"
            url = re.search(r"http://[\w.:]+", lines[0])
            assert url is not None, lines
            yield url[0], psutil.Process(process.pid)
        finally:
            process.terminate()


def first_paint_ms(url: str) -> float:
    """Open the page in a new browser, and return the time to its first paint."""
    with open_page() as page:
        page.resize(*DESKTOP)
        page.open(url)
        page.wait("document.querySelector('.stages')")
        entry = "performance.getEntriesByName('first-contentful-paint')[0]"
        page.wait(entry)
        return float(page.evaluate(f"{entry}.startTime"))


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of a process, without its children's."""
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def answers(url: str) -> Iterator[None]:
    """Keep ``ANSWERS`` answers in progress for the block."""
    body = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    ended = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=None) as response:
            for _ in response.iter_lines():
                if ended.is_set():
                    return

    readers = [threading.Thread(target=read) for _ in range(ANSWERS)]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        ended.set()
        for reader in readers:
            reader.join()


def watch(url: str, viewers: int, server: psutil.Process, seconds: float) -> tuple[float, float]:
    """Return the share of a core that the server uses with so many viewers, and the changes per second of one."""
    counts = [0] * viewers
    ended = threading.Event()

    def view(number: int) -> None:
        with httpx.stream("GET", f"{url}/v1/state", params={"stream": "true"}, timeout=None) as response:
            for line in response.iter_lines():
                counts[number] += line == "event: change"
                if ended.is_set():
                    return

    threads = [threading.Thread(target=view, args=(number,)) for number in range(viewers)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    before, began, used = list(counts), time.monotonic(), cpu_s(server)
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    share = (cpu_s(server) - used) / elapsed
    changes = (counts[0] - before[0]) / elapsed if viewers else 0.0
    ended.set()
    for thread in threads:
        thread.join()
    return share, changes


def browser_shares(url: str, seconds: float) -> dict[str, float]:
    """Return the shares of a core that a browser uses while it shows the page.

    all: in all its processes. main_thread: of the page, paints included. updates: of that, scripts, styles and layouts.
    """
    with open_page() as page:
        page.resize(*DESKTOP)
        page.open(url)
        page.wait("document.querySelector('.edge[data-flows=true]')")
        browser = [each for each in psutil.Process().children(recursive=True) if "chrom" in each.name()]
        used, before, began = sum(map(cpu_s, browser)), page.metrics(), time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        after = page.metrics()
        spent = {name: (after[name] - before[name]) / elapsed for name in after}
        updates = sum(spent[name] for name in ("ScriptDuration", "RecalcStyleDuration", "LayoutDuration"))
        everything = (sum(map(cpu_s, browser)) - used) / elapsed
        return {"all": everything, "main_thread": spent["TaskDuration"], "updates": updates}


def measure(loads: int, seconds: float) -> dict[str, Any]:
    """Return the figures of both parts."""
    with serving("echo", *SLOW_ANSWERS) as (url, server):
        paints = [first_paint_ms(url) for _ in range(loads)]
        with answers(url):
            idle, _ = watch(url, 0, server, seconds)
            shares = {viewers: watch(url, viewers, server, seconds) for viewers in VIEWERS}
            browser = browser_shares(url, seconds)
    return {
        "first_paint_ms": paints,
        "first_paint_median_ms": statistics.median(paints),
        "page_bytes": sum(len(content) for content, _ in read_files().values()),
        "server_share_without_viewers": idle,
        "server_share_of_viewers": {viewers: share - idle for viewers, (share, _) in shares.items()},
        "changes_per_s": {viewers: changes for viewers, (_, changes) in shares.items()},
        "browser_shares": browser,
    }


def bounds(figures: Mapping[str, Any]) -> list[Bound]:
    """Return the bounds of what ``measure`` returned."""
    shares = {f"server, viewers: {viewers}": share for viewers, share in figures["server_share_of_viewers"].items()}
    shares["scripts, styles and layouts of the page"] = figures["browser_shares"]["updates"]
    return [
        Bound("first paint, most", max(figures["first_paint_ms"]), FIRST_PAINT_MS, "ms"),
        Bound("files of the page", figures["page_bytes"] / 1000, PAGE_KB, "KB"),
        *(Bound(f"CPU time: {what}", 100 * share, CPU_PERCENT, "% of a core") for what, share in shares.items()),
    ]


def write_question(url: str, file: Path) -> None:
    """Write what the microphone plays: silence, the question as the pipeline speaks it, and silence."""
    body = {"model": "voice", "voice": "any", "input": SPOKEN, "response_format": "wav"}
    answer = httpx.post(f"{url}/v1/audio/speech", json=body, timeout=START_S)
    spoken = file.with_suffix(".spoken.wav")
    spoken.write_bytes(answer.raise_for_status().content)
    question, rate = soundfile.read(spoken)
    silence = np.zeros(rate)
    soundfile.write(file, np.concatenate([silence, question, *[silence] * 120]), rate, subtype="PCM_16")


def heard(page: Page, words: int) -> None:
    """Wait until so many words of the latest answer were heard."""
    latest = "[...document.querySelectorAll('.message.assistant')].at(-1)"
    text = f"[...({latest}?.querySelectorAll('.w.heard') || [])].map((each) => each.textContent).join('')"
    page.wait(f"{text}.split(/\\s+/).filter(Boolean).length >= {words}")


def screenshots(folder: Path) -> None:
    """Take the pictures of a conversation in which a stage is killed while it speaks."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, _ = stack.enter_context(serving("voice", "--chaos"))
        write_question(url, scratch / "question.wav")
        page = stack.enter_context(open_page(microphone=scratch / "question.wav"))
        page.resize(*DESKTOP)
        page.open(url)
        page.click("#hands-free")
        heard(page, 4)
        page.wait("[...document.querySelectorAll('.message.assistant')].at(-1).dataset.state === 'done'")
        page.wait("!document.querySelector('.message.assistant .w:not(.heard)')")
        page.wait("!document.querySelector('#stop')")  # the sound has ended, too
        page.click("#question")
        page.type(TYPED)
        page.key("Enter", "Enter", "\r")
        page.wait("document.querySelectorAll('.message.assistant').length === 2")
        heard(page, 3)
        page.click('article[aria-label="stage acoustic"] [data-fault=kill]')
        page.evaluate("document.activeElement.blur()")
        page.resize(*DESKTOP, dark=True)
        page.wait("parseFloat(document.querySelector('.clock')?.innerText.replace('down', '')) > 0")
        time.sleep(0.7)
        page.screenshot(folder / "page-dark.png")
        page.resize(*DESKTOP)
        page.wait("document.querySelector('.recovered')")
        heard(page, 8)
        page.screenshot(folder / "page-light.png")
        page.resize(*PHONE, phone=True)
        page.evaluate("scrollTo(0, 0)")
        time.sleep(0.3)
        page.screenshot(folder / "page-phone.png")
        assert page.errors == [], page.errors


@click.command()
@click.option("--loads", type=click.IntRange(min=1), default=9, show_default=True, help="Browsers that open the page.")
@click.option("--seconds", type=float, default=15.0, show_default=True, help="Length of each measurement of CPU time.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures to this file.")
@click.option(
    "--screenshots", "folder", type=click.Path(exists=True, path_type=Path), help="Take the pictures, to this folder."
)
def main(loads: int, seconds: float, json_file: Path | None, folder: Path | None) -> None:
    """Measure what the page costs, or take its pictures."""
    before = os.getloadavg()
    figures: dict[str, Any] = {}
    if folder is None:
        figures = measure(loads, seconds)
    else:
        screenshots(folder)
    found = json.dumps({"load_before": before, "load_after": os.getloadavg(), **figures}, indent=1)
    print(found)
    if json_file is not None:
        json_file.write_text(found + "\n")
    if figures:
        found_bounds = bounds(figures)
        show_bounds(Console(), found_bounds)
        sys.exit(0 if all(each.is_met for each in found_bounds) else 1)


if __name__ == "__main__":
    main()
