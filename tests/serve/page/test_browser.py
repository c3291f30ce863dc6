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
import pytest
import soundfile

from tests.support.chromium import EXECUTABLE, Page, open_page
from tests.support.http_server import Server, Start

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
def test_a_request_is_shown_with_its_underruns(start: Start) -> None:
    """A word lasts 0.1 s, and each of the three takes 0.7 s."""
    body = {"model": "studio", "voice": "any", "input": "la la la", "response_format": "pcm"}
    with start("-s", "stages.mouth.options.step_s=0.7") as server, open_page() as page:
        page.open(server.url)
        assert server.http.post("/v1/audio/speech", json=body).status_code == 200
        page.wait("document.querySelector('.requests summary')?.innerText.includes('2 underruns')")
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
        page.key("c", "KeyC", "c")
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
