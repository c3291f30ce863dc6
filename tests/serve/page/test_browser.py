"""The page in a headless Chromium: what a viewer does, sees and hears."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import soundfile

from omni_actors.system.live_requests import STDERR_LINES
from tests.support.chromium import EXECUTABLE, Page, open_page
from tests.support.http_server import Server, Start
from tests.support.served_engines import LAST_LINES

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium on this machine")

FIRST_PAINT_MS = 300
PAINT_WATCHDOG_MS = 10_000
"""A generous bound, because other tests run at the same time."""
SLOW = ("fan_out=100", "step_s=0.08", "load_s=0.6")
"""Options of "mind": answers that last for seconds, and a worker that loads for so long that the page shows it."""
LOADED = "[...document.querySelectorAll('.replica [role=progressbar]')].map(each => Number(each.ariaValueNow))"
"""How much of its usual loading time each restarting worker has had, in percent."""


@pytest.fixture(scope="module")
def lively(start: Start) -> Iterator[Server]:
    options = (("-s", f"stages.mind.options.{each}") for each in SLOW)
    with start("--chaos", *itertools.chain.from_iterable(options)) as server:
        yield server


def enter(page: Page, text: str) -> None:
    page.wait("document.querySelector('#question')")
    page.evaluate("document.querySelector('#question').focus()")
    page.type(text)
    page.wait(f"document.querySelector('#question').value === {json.dumps(text)}")
    page.key("Enter", "Enter", "\r")


def said(page: Page, role: str = "assistant") -> str:
    """Return the text of the latest message of a role."""
    text: str = page.evaluate(f"[...document.querySelectorAll('.message.{role} .said')].at(-1)?.innerText || ''")
    return text


def wait_done(page: Page) -> None:
    page.wait("[...document.querySelectorAll('.message.assistant')].at(-1)?.dataset.state === 'done'")


def in_stage(stage: str, selector: str) -> str:
    return f'article[aria-label="stage {stage}"] {selector}'


@pytest.mark.slow
def test_a_typed_question_is_answered_while_a_stage_is_killed(lively: Server, fixture_processes: set[int]) -> None:
    with open_page() as page:
        page.resize(1280, 900)
        page.open(lively.url)
        enter(page, "hello")
        page.wait("document.querySelectorAll('.message.assistant .w').length > 0")
        page.evaluate(f"window.loaded = []; void setInterval(() => loaded.push(...{LOADED}), 20)")
        page.click(in_stage("mind", "[data-fault=kill]"))
        page.wait(f"document.querySelector({json.dumps(in_stage('mind', '.recovered'))})")
        loaded = page.evaluate("loaded")
        assert loaded == sorted(loaded)
        assert 0 < loaded[-1] <= 100
        fixture_processes.add(lively.pid_of("mind"))
        wait_done(page)
        assert said(page) == "hello" * 100
        page.wait("document.querySelector('.deaths').innerText.includes('SIGKILL')")
        page.wait("document.querySelector('.requests [data-kind=resume]')")
        paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        print(f"first contentful paint: {paint_ms:.0f} ms (aim: {FIRST_PAINT_MS} ms)")
        assert paint_ms < PAINT_WATCHDOG_MS
        assert page.errors == []


@pytest.mark.slow
def test_a_new_replica_shows_how_much_of_the_time_of_its_stage_it_has_loaded(start: Start) -> None:
    options = ("--enable-admin", "-s", "stages.mind.options.load_s=0.6")
    with start(*options, api_key="sesame") as server, open_page() as page:
        page.open(server.url)
        page.evaluate("sessionStorage['omni_actors.key'] = 'sesame'")
        page.open(server.url)
        page.wait(f"document.querySelector({json.dumps(in_stage('mind', '.replica'))})")
        page.evaluate(f"window.loaded = []; void setInterval(() => loaded.push(...{LOADED}), 20)")
        server.http.post("/scale", json={"stage": "mind", "replicas": 2}).raise_for_status()
        page.wait("loaded.length > 0")
        ready = json.dumps(in_stage("mind", "[data-state=ready]"))
        page.wait(f"document.querySelectorAll({ready}).length === 2")
        loaded = page.evaluate("loaded")
        assert loaded == sorted(loaded)
        assert 0 < loaded[-1] <= 100
        assert [error for error in page.errors if "401" not in error] == [], "the first visit has no key"


def begin(page: Page, server: Server) -> None:
    """Open the page, and have an answer begin."""
    page.resize(1280, 900)
    page.open(server.url)
    enter(page, "hello")
    page.wait("document.querySelectorAll('.message.assistant .w').length > 0")


SAID = "[...document.querySelectorAll('.message.assistant .said')].at(-1).innerText.length"
"""How long the text of the latest answer is."""
RATES = "[...document.querySelectorAll('.edge[data-flows=true] .label text')].map(each => each.textContent)"
"""What the labels of the rings with bytes say."""
USED = "[...document.querySelectorAll('.edge .label[data-used=true] .fill')].map(each => each.width.baseVal.value)"
"""The gauges of the rings that hold something, in pixels."""
WATCH_GAUGES = f"""
window.filled = [];
window.grew = false;
void setInterval(() => {{
  filled.push(Math.max(0, ...{USED}));
  const second = filled.slice(-50), [first, last] = [second[0], second.at(-1)];
  const empties = second.some((each, n) => n && each < second[n - 1]);
  grew ||= second.length === 50 && first > 0 && last > first && !empties;
}}, 20);
"""
"""Notes in ``grew`` whether the fullest ring was filled for a second without being emptied."""
RECEIVED_S = "(async () => (await import('/page/js/conversation.js')).talk.value.messages.at(-1).player.received)()"
"""How many seconds of sound of the latest answer have come."""


@pytest.mark.slow
def test_a_frozen_stage_leaves_its_ring_unread_and_the_answer_goes_on_when_it_thaws(lively: Server) -> None:
    worker = psutil.Process(lively.pid_of("mouth"))
    buttons = f"[...document.querySelectorAll({json.dumps(in_stage('mouth', '.chaos button'))})]"
    labels = f"{buttons}.map(each => each.innerText).join()"
    with open_page() as page:
        begin(page, lively)
        page.wait(f"{RATES}.length >= 3 && {RATES}.every(each => /^[1-9][0-9.]* K?B[/]s$/.test(each))")
        page.evaluate(WATCH_GAUGES)
        page.click(in_stage("mouth", "[data-fault=freeze]"))
        page.wait(f"{labels} === 'kill,thaw,starve'")
        lively.wait(lambda: worker.status() == psutil.STATUS_STOPPED, "the worker to be frozen")
        assert page.evaluate("document.querySelectorAll('[data-fault=thaw]').length") == 1, "no other stage is frozen"
        page.wait("grew")
        titles = "[...document.querySelectorAll('.edge title')].map(each => each.textContent)"
        page.wait(f"{titles}.some(each => /^[1-9].* of .* used/.test(each))")
        page.wait(f"{RATES}.length === 2")  # of the text, to the stage and to the client
        received_s, written = page.evaluate(RECEIVED_S), page.evaluate(SAID)
        page.wait(f"{SAID} > {written}")
        assert page.evaluate(RECEIVED_S) == received_s, "the text goes on, and the sound waits"
        page.click(in_stage("mouth", "[data-fault=thaw]"))
        page.wait(f"{labels} === 'kill,freeze,starve'")
        page.wait(f"{RECEIVED_S}.then((received) => received > {received_s})")
        wait_done(page)
        page.wait(f"{USED}.length === 0 && {RATES}.length === 0")
        assert said(page) == "hello" * 100
        assert page.evaluate(RECEIVED_S) == pytest.approx(10, abs=0.01), "each of the words lasts 0.1 s"
        assert lively.pid_of("mouth") == worker.pid
        assert page.errors == []


WATCH_CLOCK = """(async () => {
  const {serverTime} = await import('/page/js/live.js');
  window.ahead = [];
  setInterval(() => {
    const [before, time, after] = [performance.now(), serverTime(), performance.now()];
    if (before === after) ahead.push(time - before / 1000);
  }, 5);
})()"""
STALL = "(() => { const until = performance.now() + 200; while (performance.now() < until); })()"


@pytest.mark.slow
def test_the_server_s_time_does_not_go_back_when_states_come_late(lively: Server) -> None:
    with open_page() as page:
        begin(page, lively)
        page.evaluate(WATCH_CLOCK)
        for _ in range(10):
            page.evaluate(STALL)
            page.evaluate("new Promise((done) => setTimeout(done, 20))")
        ahead = page.evaluate("ahead")
        assert ahead
        assert ahead == sorted(ahead)
        assert page.errors == []


@pytest.mark.slow
def test_the_state_is_followed_once_however_often_that_is_asked_for(lively: Server) -> None:
    with open_page() as page:
        page.open(lively.url)
        page.wait("document.querySelector('.stages')")
        opened = page.evaluate(
            "import('/page/js/live.js').then(({follow}) => {"
            "const own = fetch, seen = [];"
            "window.fetch = (url, ...rest) => { seen.push(url); return own(url, ...rest); };"
            "follow(); follow(); return seen.filter((url) => url.startsWith('/v1/state')); })"
        )
        assert opened == []
        assert page.errors == []


STARVED = "performance.getEntriesByType('resource').some(({name}) => name.includes('fault=starve'))"
"""Whether the server has answered that the stage was starved: it does when that is over."""


@pytest.mark.slow
def test_an_answer_goes_on_while_a_stage_is_starved(lively: Server) -> None:
    worker = psutil.Process(lively.pid_of("mind"))
    with open_page() as page:
        begin(page, lively)
        page.click(in_stage("mind", "[data-fault=starve]"))
        lively.wait(lambda: worker.status() == psutil.STATUS_STOPPED, "the worker to be starved")
        written = page.evaluate(SAID)
        went_on = f"{SAID} > {written} + 5 * 'hello'.length"
        assert page.wait(f"({went_on} && 'before') || ({STARVED} && 'after')") == "before"
        wait_done(page)
        assert said(page) == "hello" * 100
        page.wait(STARVED)
        lively.wait(lambda: worker.status() != psutil.STATUS_STOPPED, "the worker to run again")
        assert lively.pid_of("mind") == worker.pid
        assert page.errors == []


@pytest.mark.slow
def test_a_death_is_shown_with_the_last_lines_of_its_stderr(lively: Server, fixture_processes: set[int]) -> None:
    """The request kills its first worker, and the next two, which it is replayed in."""
    body = {"model": "studio", "voice": "any", "input": "a deadly word"}
    generation = lively.replica("mouth")["generation"]
    titles = "[...document.querySelectorAll('.deaths li')].map(each => each.innerText)"
    stderr = ".deaths details"
    with open_page() as page:
        page.resize(1280, 900)
        page.open(lively.url)
        page.wait("document.querySelector('.deaths')")
        assert page.evaluate(f"document.querySelector({json.dumps(stderr)})") is None
        assert lively.http.post("/v1/audio/speech", json=body).status_code == 422
        lively.wait(lambda: lively.status() == "ready", "the last restart")
        fixture_processes.add(lively.pid_of("mouth"))
        page.wait(f"document.querySelectorAll({json.dumps(stderr)}).length === 4")  # that of the request is the last's
        place = next(n for n, text in enumerate(page.evaluate(titles)) if f"mouth.0, generation {generation}\n" in text)
        assert "exit 3" in page.evaluate(titles)[place]
        entry = f".deaths li:nth-child({place + 1})"
        lines = f"document.querySelector({json.dumps(f'{entry} pre')})"
        assert not page.evaluate(f"{lines}.checkVisibility()")
        page.click(f"{entry} summary")
        page.wait(f"{lines}.checkVisibility()")
        assert page.evaluate(f"{lines}.innerText") == "".join(LAST_LINES[-STDERR_LINES:]).strip()
        assert page.errors == []


FIGURES = "[...document.querySelectorAll('.sparks output')].map(each => each.innerText)"
"""The latest time to first sound, and the tokens per second."""
DRAWN = """[...document.querySelectorAll('.spark canvas')].map((canvas) => {
  const {width, height} = canvas, {data} = canvas.getContext('2d').getImageData(0, 0, width, height);
  const rows = [];
  for (let at = 3; at < data.length; at += 4) if (data[at] > 200) rows.push(Math.floor(at / 4 / width) / height);
  return rows.length ? 1 - Math.min(...rows) : 0;
})"""
"""How high the line of each sparkline goes, as a part of its height. The largest value is at 1 / 1.1 of it."""


@pytest.mark.slow
def test_a_request_is_shown_with_its_underruns_and_in_the_sparklines(start: Start) -> None:
    """A word lasts 0.1 s, and each of the three takes 4 s, so that two come apart although the server stands still."""
    body = {"model": "studio", "voice": "any", "input": "la la la", "response_format": "pcm"}
    with start("-s", "stages.mouth.options.step_s=4") as server, open_page() as page:
        page.resize(1280, 900)
        page.open(server.url)
        page.wait(f"{DRAWN}[1] > 0")
        assert page.evaluate(FIGURES) == ["–", "0.0"]
        assert page.evaluate(f"{DRAWN}[0]") == 0
        assert page.evaluate(f"{DRAWN}[1]") < 0.2
        assert server.http.post("/v1/audio/speech", json=body).status_code == 200
        page.wait("document.querySelector('.requests summary')?.innerText.includes('2 underruns')")
        page.wait(f"{FIGURES}[0].match(/^([4-9]|[1-9][0-9])([.][0-9]+)? s$/)")  # the first word takes 4 s at least
        page.wait(f"0.8 < {DRAWN}[0] && {DRAWN}[0] < 1")
        enter(page, "hello")
        page.wait(f"0.8 < {DRAWN}[1] && {DRAWN}[1] < 1")
        page.wait(f"{FIGURES}[1] === '0.0' && {DRAWN}[1] > 0.8")
        assert page.errors == []


LISTENED_S = "parseFloat(document.querySelector('.mic').innerText.replace(/[^0-9.]/g, ''))"
"""For how many seconds the page has listened, as the button says."""


@pytest.mark.slow
def test_push_to_talk_sends_what_the_microphone_hears(studio: Server) -> None:
    with open_page() as page:  # its microphone beeps
        page.open(studio.url)
        page.press(".mic")
        page.wait(f"{LISTENED_S} >= 1")
        page.release(".mic")
        page.wait("document.querySelector('.message.user')")
        page.wait("document.querySelectorAll('.message.assistant .w').length > 0")
        wait_done(page)
        assert said(page) != ""
        assert page.errors == []


SPOKEN = "Why is the sky blue?"
MOST_TOKENS = 60
"""The answer ends after so many tokens. Its first sentence has fewer, and all of it is heard within 20 s."""
SHORTEN = f"""
const {{send}} = WebSocket.prototype;
WebSocket.prototype.send = function (data) {{
  const event = JSON.parse(data);
  if (event.type === "session.update") event.session.max_output_tokens = {MOST_TOKENS};
  return send.call(this, JSON.stringify(event));
}};
"""
"""Spoken answers end after MOST_TOKENS."""


@pytest.mark.voice
@pytest.mark.slow
@pytest.mark.timeout(400)  # the pipeline and the stage load in it
def test_a_spoken_question_is_answered_although_a_stage_dies(start: Start, tmp_path: Path) -> None:
    with start("-s", "stages.llm.threads=1", config="voice") as voice:
        microphone = tmp_path / "question.wav"
        write_question(voice, microphone)
        llm = voice.pid_of("llm")
        with open_page(microphone=microphone) as page:
            page.open(voice.url)
            page.wait("document.querySelector('#hands-free')")
            page.evaluate(f"(() => {{ {SHORTEN} }})()")
            page.click("#hands-free")
            page.wait("document.querySelector('.message.assistant .said')?.innerText.match(/[.] +[A-Za-z]+ +[A-Za-z]/)")
            # The text stands still in the second sentence, unless the browser came too late. So the first one can be
            # heard, and acoustic, which waits for the rest, is not done when it is killed.
            os.kill(llm, signal.SIGSTOP)
            try:
                page.wait("document.querySelector('.message.assistant .w.heard')")
                os.kill(voice.pid_of("acoustic"), signal.SIGKILL)
            finally:
                os.kill(llm, signal.SIGCONT)
            wait_done(page)
            assert "sky" in said(page, "user")
            assert said(page).split() == typed_answer(voice, said(page, "user")).split()
            page.wait("!document.querySelector('.message.assistant .w:not(.heard)')")
            assert page.errors == []
        assert voice.replica("acoustic")["history"][0]["signal"] == "SIGKILL"


def typed_answer(voice: Server, question: str) -> str:
    """Return the text that a question gets when it is typed, and no stage is killed."""
    messages = [{"role": "user", "content": question}]
    body = {"model": "voice", "messages": messages, "max_tokens": MOST_TOKENS}
    answer: str = voice.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    return answer


def write_question(voice: Server, file: Path) -> None:
    """Write a spoken question: a second of silence, the question, and so much silence that the answer ends first."""
    body = {"model": "voice", "voice": "any", "input": SPOKEN, "response_format": "wav"}
    question, rate = soundfile.read(io.BytesIO(voice.http.post("/v1/audio/speech", json=body).content))
    silence = np.zeros(rate)
    soundfile.write(file, np.concatenate([silence, question, *[silence] * 120]), rate, subtype="PCM_16")


@pytest.mark.slow
def test_a_picture_is_drawn(start: Start) -> None:
    with start(config="shapes") as shapes, open_page() as page:
        page.open(shapes.url)
        enter(page, "a red circle")
        page.wait("document.querySelector('.message.assistant img')?.naturalWidth === 64")
        wait_done(page)
        assert page.evaluate("document.querySelectorAll('.mic, .wave').length") == 0, "it neither hears nor speaks"
        assert page.errors == []


def test_the_page_asks_for_the_key_and_keeps_it_for_the_tab(slow: Server) -> None:
    with open_page() as page:
        page.open(slow.url)
        for key, accepted in (("wrong", False), ("sesame", True)):
            page.wait("document.querySelector('input[type=password]')")
            page.click("input[type=password]")
            page.evaluate("document.activeElement.select()")
            page.type(key)
            page.key("Enter", "Enter", "\r")
            if not accepted:
                page.wait("document.querySelector('.key')?.innerText.includes('does not accept')")
        page.wait("document.querySelector('.stages')")
        assert page.evaluate("sessionStorage['omni_actors.key']") == "sesame"
        assert page.evaluate("Object.keys(localStorage)") == []
        page.open(f"{slow.url}/?again")
        page.wait("document.querySelector('.stages')")
        assert [error for error in page.errors if "401" not in error] == []


def test_the_keys_work_and_what_the_pipeline_cannot_do_is_not_shown(lively: Server) -> None:
    with open_page() as page:
        page.resize(390, 844, phone=True)
        page.open(lively.url)
        page.wait("document.querySelector('#question')")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page fits a phone"
        page.key("?", "Slash", "?")
        page.wait("document.querySelector('dialog[open] .keys')")
        page.key("Escape", "Escape")
        page.wait("!document.querySelector('dialog')")
        page.key("C", "KeyC", "C")  # as with Caps Lock
        page.wait("document.querySelector('dialog[open]')?.innerText.includes('from openai import OpenAI')")
        page.key("Escape", "Escape")
        page.wait("!document.querySelector('dialog')")
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.key("t", "KeyT", "t")
        page.wait(f"getComputedStyle(document.body).backgroundColor !== {json.dumps(before)}")
        page.key("/", "Slash", "/")
        page.wait("document.activeElement.id === 'question'")
        assert page.evaluate("document.querySelectorAll('.file').length") == 0, "the pipeline takes no pictures"
        page.key("Escape", "Escape")
        page.wait("document.activeElement.id !== 'question'")
        assert page.errors == []


@pytest.mark.slow
def test_the_page_shows_one_of_several_pipelines_and_changes_to_another(start: Start) -> None:
    chosen = "document.querySelector('.bar select')?.value"
    with start("other=echo") as server, open_page() as page:
        page.open(server.url)
        page.wait(f"{chosen} === 'studio'")
        page.evaluate(
            "(() => { const each = document.querySelector('.bar select'); each.value = 'other';"
            "each.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )
        page.wait(f"location.search === '?pipeline=other' && {chosen} === 'other'")
        page.wait(f"document.querySelector({json.dumps(in_stage('first', '.dot'))})")
        assert page.errors == []


def test_waiting_for_the_page_goes_on_when_the_page_navigates(lively: Server) -> None:
    with open_page() as page:
        page.open(lively.url)
        page.evaluate("void setTimeout(() => { location.search = '?again'; })")
        # Asked before the page navigates, this has no value: the browser refuses it when the page leaves.
        page.wait("location.search === '?again' || new Promise(() => {})")


def test_a_stopped_answer_is_aborted_in_the_server(lively: Server) -> None:
    before = lively.aborted()
    with open_page() as page:
        page.open(lively.url)
        enter(page, "hello")
        page.wait("document.querySelectorAll('.message.assistant .w').length > 0")
        page.evaluate("document.activeElement.blur()")
        page.key("Escape", "Escape")
        page.wait("[...document.querySelectorAll('.message.assistant')].at(-1).dataset.state === 'stopped'")
        lively.wait(lambda: lively.aborted() > before, "the request to be aborted")
        assert page.errors == []
