"""Talking to the page in a headless Chromium, when the user is quicker than the microphone and the session."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.chromium import EXECUTABLE, Page, open_page
from tests.support.http_server import Server, Start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium on this machine"),
]

SLOW = ("-s", "stages.mind.options.fan_out=100", "-s", "stages.mind.options.step_s=0.08")
"""Answers that last for seconds."""

WATCH = """
window.seen = {sent: [], sockets: 0, streams: [], prompts: []};
const {send} = WebSocket.prototype;
WebSocket.prototype.send = function (data) { seen.sent.push(JSON.parse(data).type); return send.call(this, data); };
window.WebSocket = class extends WebSocket { constructor(...args) { super(...args); seen.sockets += 1; } };
const devices = navigator.mediaDevices, open = devices.getUserMedia.bind(devices);
devices.getUserMedia = async (wanted) => {
  if (window.asks) await new Promise((resolve, reject) => seen.prompts.push({resolve, reject}));
  const stream = await open(wanted);
  seen.streams.push(stream);
  return stream;
};
"""
"""Notes what the page opens and sends. With ``asks``, the microphone waits for an answer, as at a browser's prompt."""

OPEN_MICROPHONES = "seen.streams.filter((each) => each.getTracks().some((track) => track.readyState === 'live')).length"
BUTTON = "document.querySelector('.mic').innerText"


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[Server]:
    with start(*SLOW) as server:
        yield server


@pytest.fixture
def page(server: Server) -> Iterator[Page]:
    """The page, watched."""
    with open_page() as page:
        page.open(server.url)
        page.wait("document.querySelector('.mic')")
        page.evaluate(f"(() => {{ {WATCH} }})()")
        yield page
        assert page.errors == []


def asks(page: Page) -> None:
    """Let the browser ask for the microphone from now on."""
    page.evaluate("window.asks = true")


def answer(page: Page, *, allows: bool) -> None:
    """Answer all prompts for the microphone."""
    reply = "resolve()" if allows else "reject(new Error('Permission denied'))"
    page.evaluate(f"seen.prompts.splice(0).forEach((each) => each.{reply})")


def sent(page: Page) -> list[str]:
    """Return the types of the events that were sent."""
    types: list[str] = page.evaluate("seen.sent")
    return types


def wait_sent(page: Page, event: str) -> None:
    page.wait(f"seen.sent.includes({json.dumps(event)})")


def test_a_key_released_during_the_prompt_sends_no_sound_afterwards(page: Page) -> None:
    asks(page)
    page.key_down(" ", "Space", " ")
    page.wait("seen.prompts.length === 1")
    page.key_up(" ", "Space")
    answer(page, allows=True)
    wait_sent(page, "session.update")
    page.evaluate("new Promise((resolve) => setTimeout(resolve, 300))")  # time for seven pieces of sound
    assert page.evaluate(BUTTON) == "Hold to talk"
    assert sent(page) == ["session.update"]


def test_a_refused_microphone_ends_listening(page: Page) -> None:
    asks(page)
    page.key_down(" ", "Space", " ")
    page.wait(f"{BUTTON}.startsWith('Wait for')")
    answer(page, allows=False)
    page.wait("document.querySelector('.composer .error')?.innerText.includes('Permission denied')")
    page.wait(f"{BUTTON} === 'Hold to talk'")
    page.key_up(" ", "Space")
    assert page.evaluate("seen.sockets") == 0


def test_a_start_cancelled_during_the_prompt_leaves_no_microphone_open(page: Page) -> None:
    asks(page)
    page.key("h", "KeyH", "h")
    page.wait("seen.prompts.length === 1")
    page.key("h", "KeyH", "h")
    answer(page, allows=True)
    page.wait("seen.streams.length === 1")
    page.wait(f"{OPEN_MICROPHONES} === 0")
    assert page.evaluate("seen.sockets") == 0


def test_two_holds_during_the_prompt_open_one_microphone_and_one_session(page: Page) -> None:
    asks(page)
    page.key_down(" ", "Space", " ")
    page.key_up(" ", "Space")
    page.key_down(" ", "Space", " ")
    page.wait("seen.prompts.length > 0")
    answer(page, allows=True)
    wait_sent(page, "input_audio_buffer.append")
    assert page.evaluate(f"[seen.sockets, seen.streams.length, {OPEN_MICROPHONES}]") == [1, 1, 1]
    page.evaluate("dispatchEvent(new Event('blur'))")
    page.wait(f"{BUTTON} === 'Hold to talk'")
    page.key_up(" ", "Space")


def test_a_tap_asks_for_no_answer(page: Page) -> None:
    page.key_down(" ", "Space", " ")
    wait_sent(page, "input_audio_buffer.append")
    page.key_up(" ", "Space")
    page.evaluate("seen.sent.length = 0")
    page.evaluate(
        "(dispatchEvent(new KeyboardEvent('keydown', {code: 'Space', key: ' '})),"
        "dispatchEvent(new KeyboardEvent('keyup', {code: 'Space', key: ' '})))"
    )
    assert set(sent(page)) <= {"input_audio_buffer.clear", "response.cancel"}


def test_space_talks_while_the_button_has_the_focus(page: Page) -> None:
    page.click(".mic")
    page.wait(f"{BUTTON} === 'Hold to talk'")
    assert page.evaluate("document.activeElement.className").startswith("mic")
    page.key_down(" ", "Space", " ")
    page.wait(f"{BUTTON}.match(/ [1-9]/)")
    page.key_up(" ", "Space")
    page.wait(f"{BUTTON} === 'Hold to talk'")
    wait_sent(page, "response.create")
    assert [sent(page).count(each) for each in ("input_audio_buffer.commit", "response.create")] == [1, 1]


def test_the_end_of_a_session_stops_the_answer_that_is_open(page: Page) -> None:
    page.press(".mic")
    page.wait(f"{BUTTON}.match(/ [1-9]/)")
    page.release(".mic")
    page.wait("document.querySelector('.message.assistant')?.dataset.state === 'open'")
    page.key("h", "KeyH", "h")
    page.wait("document.querySelector('.message.assistant').dataset.state === 'stopped'")
    page.wait(f"{OPEN_MICROPHONES} === 0")
    assert page.evaluate("document.querySelectorAll('.message[data-state=open]').length") == 0


MODE = "import('/page/js/voice.js').then(({voice}) => voice.value.mode)"


def test_space_in_hands_free_mode_keeps_the_session(page: Page) -> None:
    page.key("h", "KeyH", "h")
    page.wait(f"{MODE}.then((mode) => mode === 'hands-free')")
    page.key_down(" ", "Space", " ")
    page.key_up(" ", "Space")
    assert page.evaluate(MODE) == "hands-free"
    page.evaluate("seen.sent.length = 0")
    wait_sent(page, "input_audio_buffer.append")
    assert page.evaluate(f"[seen.sockets, seen.streams.length, {OPEN_MICROPHONES}]") == [1, 1, 1]
    assert not {"input_audio_buffer.clear", "input_audio_buffer.commit", "session.update"} & set(sent(page))


def test_space_while_hands_free_waits_for_the_microphone_keeps_the_mode(page: Page) -> None:
    asks(page)
    page.key("h", "KeyH", "h")
    page.wait("seen.prompts.length === 1")
    page.key_down(" ", "Space", " ")
    page.key_up(" ", "Space")
    answer(page, allows=True)
    page.wait(f"{MODE}.then((mode) => mode !== 'connecting')")
    assert page.evaluate(MODE) == "hands-free"
    assert page.evaluate(f"[seen.sockets, seen.streams.length, {OPEN_MICROPHONES}]") == [1, 1, 1]
