"""Talking to the page in a headless Chromium, when the user is quicker than the microphone and the session."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.chromium import CTRL, EXECUTABLE, SHOWN, Page, open_page
from tests.support.http_server import Server, Start
from tests.support.served_engines import WORDLESS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium on this machine"),
]

SLOW = ("-s", "stages.mind.options.fan_out=100", "-s", "stages.mind.options.step_s=0.08")
"""Answers that last for seconds."""

WATCH = """
window.seen = {sent: [], events: [], received: [], held: [], sockets: 0, streams: [], prompts: [], pieces: 0};
const {send} = WebSocket.prototype;
WebSocket.prototype.send = function (data) {
  seen.socket = this;
  seen.events.push(JSON.parse(data));
  seen.sent.push(seen.events.at(-1).type);
  return send.call(this, data);
};
window.WebSocket = class extends WebSocket {
  constructor(...args) { super(...args); seen.sockets += 1; }
  set onmessage(take) {
    this.take = take;
    super.onmessage = (event) => {
      seen.received.push(JSON.parse(event.data));
      if (window.holds) seen.held.push(() => this.take?.(event));
      else this.take?.(event);
    };
  }
};
window.AudioWorkletNode = class extends AudioWorkletNode {
  constructor(...args) {
    super(...args);
    this.port.addEventListener("message", () => { seen.pieces += 1; });
  }
};
const devices = navigator.mediaDevices, open = devices.getUserMedia.bind(devices);
devices.getUserMedia = async (wanted) => {
  if (window.asks) await new Promise((resolve, reject) => seen.prompts.push({resolve, reject}));
  const stream = await open(wanted);
  seen.streams.push(stream);
  return stream;
};
"""
"""Notes what the page opens, sends and receives, and counts the pieces of sound that it gets. With ``asks``, the
microphone waits for an answer, as at a browser's prompt. With ``holds``, what the server sends waits in ``held``."""

OPEN_MICROPHONES = "seen.streams.filter((each) => each.getTracks().some((track) => track.readyState === 'live')).length"
BUTTON = "document.querySelector('.mic').innerText"
MODE = "import('/page/js/voice.js').then(({voice}) => voice.value.mode)"


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
    page.wait(f"{MODE}.then((mode) => mode === 'push')")
    page.wait("seen.pieces >= 7")
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
    assert not {"input_audio_buffer.commit", "response.create"} & set(sent(page))


def test_space_talks_while_the_button_has_the_focus(page: Page) -> None:
    asks(page)
    page.click(".mic")
    page.wait(f"{BUTTON} === 'Hold to talk'")
    assert page.evaluate("document.activeElement.className").startswith("mic")
    page.key_down(" ", "Space", " ")
    answer(page, allows=True)
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
    page.wait(f"{MODE}.then((mode) => mode === 'hands-free')")
    page.key("h", "KeyH", "h")
    page.wait("document.querySelector('.message.assistant').dataset.state === 'stopped'")
    page.wait(f"{OPEN_MICROPHONES} === 0")
    assert page.evaluate("document.querySelectorAll('.message[data-state=open]').length") == 0


@pytest.mark.parametrize("width", [1000, 1400, 390])
def test_the_button_is_held_while_its_label_moves_it(page: Page, width: int) -> None:
    """With the label that waits for the microphone, the buttons may need a second row."""
    asks(page)
    page.resize(width, 760, phone=width < 500)
    page.press(".mic")
    page.wait("seen.prompts.length === 1")
    page.evaluate(SHOWN)
    answer(page, allows=True)
    page.wait(f"{BUTTON}.match(/ [1-9]/)")
    page.release(".mic")
    wait_sent(page, "response.create")


@pytest.mark.parametrize(("button", "modifiers"), [("right", 0), ("middle", 0), ("left", CTRL)])
def test_a_click_for_a_menu_does_not_open_the_microphone(page: Page, button: str, modifiers: int) -> None:
    """The menu takes its release."""
    page.press(".mic", button, modifiers)
    page.evaluate(SHOWN)
    assert page.evaluate(f"[{BUTTON}, seen.streams.length]") == ["Hold to talk", 0]
    speak(page)
    wait_sent(page, "response.create")


def test_a_button_whose_pointer_is_taken_away_is_released(page: Page) -> None:
    page.press(".mic")
    page.wait(f"{BUTTON}.match(/ [1-9]/)")
    page.evaluate("document.querySelector('.mic').releasePointerCapture(1)")  # of the mouse
    page.wait(f"{BUTTON} === 'Hold to talk'")
    wait_sent(page, "response.create")
    page.release(".mic")
    page.evaluate(SHOWN)
    assert sent(page).count("response.create") == 1


END = "document.querySelector('#end')"


def test_a_conversation_of_the_space_bar_can_be_ended_with_the_keyboard(page: Page) -> None:
    assert page.evaluate(END) is None
    speak(page)
    page.wait("document.querySelector('.message.assistant')?.dataset.state === 'open'")
    page.wait(END)
    page.evaluate("document.querySelector('#hands-free').focus()")
    page.key("Tab", "Tab")
    assert page.evaluate("document.activeElement.innerText") == "End"
    page.key(" ", "Space", " ")
    page.wait(f"{OPEN_MICROPHONES} === 0")
    page.wait("document.querySelector('.message.assistant').dataset.state === 'stopped'")
    page.wait(f"{END} === null")
    assert page.evaluate(MODE) == "off"
    assert page.evaluate("seen.socket.readyState >= WebSocket.CLOSING")
    assert page.evaluate("document.querySelector('.composer .error')") is None


def test_hands_free_mode_has_no_end_button_of_its_own(page: Page) -> None:
    page.key("h", "KeyH", "h")
    page.wait(f"{MODE}.then((mode) => mode === 'hands-free')")
    page.evaluate(SHOWN)
    assert page.evaluate(END) is None


HOLD_EFFECTS = """
const held = [];
window.holds = true;
for (const name of ["setTimeout", "requestAnimationFrame"]) {
  const later = window[name].bind(window);
  window[name] = (call, ...args) => later((...given) => {
    if (holds && document.querySelector(".mic")) held.push(() => call(...given));
    else call(...given);
  }, ...args);
}
window.letGo = () => { holds = false; held.forEach((each) => each()); };
"""
"""Holds what is due later, as effects are, from when the button is shown until `letGo()`."""


@pytest.fixture
def held_page(server: Server) -> Iterator[Page]:
    """The page, whose effects are held since the button is shown."""
    with open_page() as page:
        page.run_first(HOLD_EFFECTS)
        page.open(server.url)
        page.wait("document.querySelector('.mic')")
        yield page
        assert page.errors == []


def test_a_key_works_as_soon_as_the_button_is_shown(held_page: Page) -> None:
    held_page.key("h", "KeyH", "h")
    held_page.evaluate("letGo()")
    held_page.wait(f"{MODE}.then((mode) => mode === 'hands-free')")


def test_a_dialog_is_modal_as_soon_as_it_is_shown(held_page: Page) -> None:
    held_page.key("?", "", "?")
    held_page.wait("document.querySelector('dialog')")
    assert held_page.evaluate("document.querySelector('dialog').open")


TALK = "(await import('/page/js/conversation.js')).talk.value"
"""The conversation, in an async function."""


def speak(page: Page) -> None:
    """Say something of a second."""
    page.press(".mic")
    page.wait(f"{BUTTON}.match(/ [1-9]/)")
    page.release(".mic")


def test_a_turn_without_words_is_shown_as_one_and_not_brought_along(start: Start) -> None:
    with start("-s", f"stages.ear.defaults.initial_prompt={WORDLESS}") as server, open_page() as page:
        page.open(server.url)
        page.wait("document.querySelector('.mic')")
        speak(page)
        page.wait("document.querySelector('.message.user .minor')?.innerText === '(no words)'")
        page.wait("document.querySelector('.message.user').dataset.state === 'done'")
        page.click("#end")
        enter(page, "next")
        [question] = page.evaluate(f"(async () => {TALK}.lastCall.body.messages)()")[-1:]
        assert question == {"role": "user", "content": "next"}
        assert page.evaluate("document.querySelectorAll('.message.user .minor').length") == 1
        assert page.errors == []


def enter(page: Page, text: str) -> None:
    """Type a question, and send it."""
    before = page.evaluate("document.querySelectorAll('.message.user').length")
    page.evaluate("document.querySelector('#question').focus()")
    page.type(text)
    page.wait(f"document.querySelector('#question').value === {json.dumps(text)}")
    page.key("Enter", "Enter", "\r")
    page.wait(f"document.querySelectorAll('.message.user').length > {before}")


def wait_heard(page: Page, seconds: float) -> None:
    """Wait until so much of the latest answer was heard."""
    page.wait(f"(async () => {TALK}.messages.at(-1)?.player?.played >= {seconds})()")


def received(page: Page, type: str) -> list[dict[str, Any]]:
    """Return the events of a type that have come."""
    page.wait(f"seen.received.some((each) => each.type === {json.dumps(type)})")
    found: list[dict[str, Any]] = page.evaluate(f"seen.received.filter((each) => each.type === {json.dumps(type)})")
    return found


def test_a_typed_question_interrupts_the_spoken_answer_at_the_server(page: Page) -> None:
    speak(page)
    wait_heard(page, 0.5)
    enter(page, "next")
    [cancel, truncate] = page.evaluate("seen.events.slice(-2)")
    assert (cancel["type"], truncate["type"]) == ("response.cancel", "conversation.item.truncate")
    assert received(page, "response.done")[0]["response"]["status"] == "cancelled"
    [truncated] = received(page, "conversation.item.truncated")
    assert truncated["audio_end_ms"] == truncate["audio_end_ms"] >= 500
    id = truncate["item_id"]
    page.evaluate(f"seen.socket.send(JSON.stringify({{type: 'conversation.item.retrieve', item_id: '{id}'}}))")
    [part] = received(page, "conversation.item.retrieved")[0]["item"]["content"]
    text = page.evaluate(f"(async () => {TALK}.messages.find((each) => each.itemId === '{id}').text)()")
    assert 0 < len(part["transcript"]) < len(text)
    assert text.startswith(part["transcript"])
    [_, answer, question] = page.evaluate(f"(async () => {TALK}.lastCall.body.messages)()")
    assert (answer["role"], question["content"]) == ("assistant", "next")
    assert 0 < len(answer["content"]) < len(text) / 2
    assert text.startswith(answer["content"])
    assert page.evaluate("document.querySelector('.composer .error')") is None


def test_a_typed_question_cancels_a_response_whose_begin_the_page_does_not_know_yet(page: Page) -> None:
    page.press(".mic")
    page.wait(f"{BUTTON}.match(/ [1-9]/)")
    page.evaluate("window.holds = true")
    page.release(".mic")
    received(page, "response.created")
    enter(page, "next")
    assert received(page, "response.done")[0]["response"]["status"] == "cancelled"
    page.evaluate("(() => { window.holds = false; seen.held.splice(0).forEach((take) => take()); })()")
    spoken = f"{TALK}.messages.filter((each) => each.itemId && each.role === 'assistant')"
    assert page.evaluate(
        f"(async () => ({spoken}).every((each) => each.state === 'stopped' && !each.player.isPlaying))()"
    )
    assert page.evaluate("document.querySelector('.composer .error')") is None


@pytest.mark.parametrize("stop", [lambda page: page.click("#stop"), lambda page: page.key("Escape", "Escape")])
def test_a_spoken_answer_can_be_stopped_while_it_is_made(page: Page, stop: Callable[[Page], None]) -> None:
    speak(page)
    wait_heard(page, 0.3)
    page.wait("document.querySelector('#stop')")
    stop(page)
    wait_sent(page, "conversation.item.truncate")
    assert received(page, "response.done")[0]["response"]["status"] == "cancelled"
    page.wait("!document.querySelector('#stop')")
    page.wait("document.querySelector('.message.assistant').dataset.state === 'stopped'")


def test_an_answer_can_be_stopped_while_its_sound_is_played(studio: Server) -> None:
    with open_page() as page:
        page.open(studio.url)
        page.wait("document.querySelector('#question')")
        enter(page, " ".join(["word"] * 100))
        page.wait(f"(async () => !{TALK}.isBusy && {TALK}.messages.at(-1).player?.isPlaying)()")
        wait_heard(page, 0.5)
        page.wait("document.querySelector('#stop')")
        page.click("#stop")
        page.wait("document.querySelector('.message.assistant').dataset.state === 'stopped'")
        page.wait("!document.querySelector('#stop')")
        enter(page, "next")
        [_, answer, _] = page.evaluate(f"(async () => {TALK}.lastCall.body.messages)()")
        words = answer["content"].split()
        assert words == ["word"] * len(words)
        assert 3 <= len(words) < 100
        assert page.errors == []


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


def test_a_key_that_is_held_changes_to_hands_free_once(page: Page) -> None:
    page.evaluate("for (const repeat of [false, true]) dispatchEvent(new KeyboardEvent('keydown', {key: 'H', repeat}))")
    page.wait(f"{MODE}.then((mode) => mode === 'hands-free')")


def test_hands_free_goes_on_with_the_session_of_push_to_talk(page: Page) -> None:
    speak(page)
    wait_sent(page, "response.create")
    page.key("h", "KeyH", "h")
    page.wait(f"{MODE}.then((mode) => mode === 'hands-free')")
    updates = page.evaluate("seen.events.filter((each) => each.type === 'session.update')")
    detections = [each["session"]["audio"]["input"]["turn_detection"] for each in updates]
    assert [None if each is None else each["type"] for each in detections] == [None, "server_vad"]
    assert page.evaluate(f"[seen.sockets, seen.streams.length, {OPEN_MICROPHONES}]") == [1, 1, 1]


UNDETECTED = """
const {send} = WebSocket.prototype;
WebSocket.prototype.send = function (data) {
  return send.call(this, data.replace('"type":"server_vad"', '"type":"server_vad","threshold":2'));
};
"""
"""The server refuses to find turns, as one without a detector does."""


def test_push_to_talk_goes_on_where_the_server_refuses_to_find_the_turns(page: Page) -> None:
    speak(page)
    wait_sent(page, "response.create")
    page.evaluate(f"(() => {{ {UNDETECTED} }})()")
    page.key("h", "KeyH", "h")
    page.wait("document.querySelector('.composer .error')?.innerText.includes('threshold')")
    assert page.evaluate(MODE) == "push"
    page.evaluate("void (seen.sent.length = seen.pieces = 0)")
    page.wait("seen.pieces >= 7")
    assert "input_audio_buffer.append" not in sent(page)
    speak(page)
    wait_sent(page, "response.create")
    assert page.evaluate(f"[seen.sockets, seen.streams.length, {OPEN_MICROPHONES}]") == [1, 1, 1]


LISTENER = """\
name: listener
stages:
  mind: {engine: echo, accepts: [audio, messages], emits: text}
"""


def test_a_pipeline_that_hears_and_does_not_speak_answers_in_text(start: Start) -> None:
    with start(config=LISTENER) as server, open_page() as page:
        page.open(server.url)
        page.wait("document.querySelector('.mic')")
        speak(page)
        page.wait("document.querySelector('.message.assistant')?.dataset.state === 'done'")
        assert page.evaluate(MODE) == "push"
        assert page.evaluate("document.querySelectorAll('.message.assistant .w:not(.heard)').length") == 0
        assert page.evaluate("document.querySelector('.composer .error')") is None
        assert page.errors == []


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


def test_a_microphone_that_is_unplugged_ends_hands_free_mode_with_the_reason(page: Page) -> None:
    page.key("h", "KeyH", "h")
    page.wait(f"{MODE}.then((mode) => mode === 'hands-free')")
    page.evaluate("void seen.streams[0].getTracks()[0].dispatchEvent(new Event('ended'))")
    page.wait("document.querySelector('.composer .error')?.innerText.includes('unplugged')")
    assert page.evaluate(f"{MODE}") == "off"
    assert page.evaluate("seen.socket.readyState >= WebSocket.CLOSING")


def test_a_page_that_may_not_use_the_microphone_says_why(page: Page) -> None:
    page.evaluate("void Object.defineProperty(navigator, 'mediaDevices', {value: undefined})")  # as on http: pages
    page.key("h", "KeyH", "h")
    page.wait("document.querySelector('.composer .error')?.innerText.includes('only to https: pages')")


def test_a_microphone_that_cannot_be_read_does_not_stay_open(page: Page) -> None:
    """Browsers allow few contexts at once, for example."""
    page.evaluate(
        "(() => { window.AudioContext = class extends AudioContext { constructor(options) {"
        "if (!options.sampleRate) throw new DOMException('no more contexts', 'NotSupportedError');"
        "super(options); } }; })()"
    )
    page.key("h", "KeyH", "h")
    page.wait("document.querySelector('.composer .error')?.innerText.includes('no more contexts')")
    assert page.evaluate(f"[seen.sockets, seen.streams.length, {OPEN_MICROPHONES}]") == [0, 1, 0]


def test_a_transcription_that_fails_and_succeeds_at_last_is_shown_without_the_failure(page: Page) -> None:
    page.key_down(" ", "Space", " ")
    page.key_up(" ", "Space")
    page.wait(f"{MODE}.then((mode) => mode === 'push')")
    page.wait("seen.socket")
    transcription = "conversation.item.input_audio_transcription"

    def shown_after(kind: str, **fields: Any) -> list[str | None]:
        event = json.dumps({"type": f"{transcription}.{kind}", "item_id": "item", **fields})
        page.evaluate(f"seen.socket.take({{data: JSON.stringify({event})}})")
        message = f"{TALK}.messages.find((each) => each.itemId === 'item')"
        found: list[str | None] = page.evaluate(
            f"(async () => (({{text, state, error}}) => [text, state, error])({message}))()"
        )
        return found

    failure = {"error": {"message": "the worker died"}}
    assert shown_after("delta", delta="Hello wor") == ["Hello wor", "open", None]
    assert shown_after("failed", **failure) == ["Hello wor", "failed", "the worker died"]
    assert shown_after("delta", delta="Hello") == ["Hello", "open", None]
    assert shown_after("delta", delta=" world") == ["Hello world", "open", None]
    assert shown_after("failed", **failure) == ["Hello world", "failed", "the worker died"]
    assert shown_after("completed", transcript="Hello world.") == ["Hello world.", "done", None]


def test_what_arrives_after_the_end_of_a_session_begins_no_answer(page: Page) -> None:
    speak(page)
    received(page, "response.created")
    page.evaluate("window.holds = true")
    page.wait("seen.held.length > 3")
    page.key("h", "KeyH", "h")
    page.key("h", "KeyH", "h")
    page.wait(f"{MODE}.then((mode) => mode === 'off')")
    before = page.evaluate("document.querySelectorAll('.message').length")
    page.evaluate("seen.held.splice(0).forEach((take) => take())")
    page.evaluate(SHOWN)
    assert page.evaluate("document.querySelectorAll('.message').length") == before
    assert page.evaluate("document.querySelectorAll('.message[data-state=open]').length") == 0
    assert page.evaluate("document.querySelector('#stop')") is None


def test_the_end_of_a_session_s_time_is_told(start: Start) -> None:
    with start("--session-s", "1") as server, open_page() as page:
        page.open(server.url)
        page.wait("document.querySelector('#hands-free')")
        page.click("#hands-free")
        page.wait("document.querySelector('.composer .error')?.innerText.includes('are over')")
        assert page.evaluate(MODE) == "off"
        assert page.errors == []


def test_a_session_that_the_server_refuses_and_one_that_it_ends_are_told(start: Start) -> None:
    error = "document.querySelector('.composer .error')?.innerText || ''"
    with start("--max-sessions", "1") as server, open_page() as first, open_page() as second:
        for page in (first, second):
            page.open(server.url)
            page.wait("document.querySelector('#hands-free')")
        first.click("#hands-free")
        first.wait(f"{MODE}.then((mode) => mode === 'hands-free')")
        second.click("#hands-free")
        second.wait(f"({error}).includes('may have no place for another')")
        second.block("*/v1/models/*")
        second.click("#hands-free")
        second.wait(f"({error}) === 'the server cannot be reached'")
        server.ends_by(signal.SIGTERM)
        first.wait(f"({error}).includes('shutting down')")


KEY = "a/b+c=d, e"
"""Of characters that a subprotocol of a WebSocket cannot have."""


def test_a_key_of_any_characters_opens_a_session(start: Start) -> None:
    with start(api_key=KEY) as server, open_page() as page:
        page.open(server.url)
        page.wait("document.querySelector('input[type=password]')")
        page.click("input[type=password]")
        page.type("schlüssel")
        page.wait("document.querySelector('.key')?.innerText.includes('printable ASCII')")
        assert page.evaluate("document.querySelector('.key button').disabled")
        page.key("Enter", "Enter", "\r")
        page.evaluate("document.activeElement.select()")
        page.type(KEY)
        page.wait("!document.querySelector('.key button').disabled")
        page.key("Enter", "Enter", "\r")
        page.wait("document.querySelector('#hands-free')")
        page.click("#hands-free")
        page.wait(f"{MODE}.then((mode) => mode === 'hands-free')")
        assert [error for error in page.errors if "401" not in error] == []


def test_a_session_with_a_refused_key_or_an_unknown_model_is_told(slow: Server) -> None:
    error = "document.querySelector('.composer .error')?.innerText || ''"
    with open_page() as page:
        page.open(slow.url)
        page.wait("document.querySelector('input[type=password]')")
        page.click("input[type=password]")
        page.type("sesame")
        page.key("Enter", "Enter", "\r")
        page.wait("document.querySelector('#hands-free')")
        page.evaluate("import('/page/js/voice.js').then(({toggleHandsFree}) => toggleHandsFree('nothing'))")
        page.wait(f"({error}).includes(\"'nothing'\")")
        page.evaluate("import('/page/js/api.js').then(({key}) => key.set('wrong'))")
        page.click("#hands-free")
        page.wait(f"({error}) === 'the server does not accept the key'")
        assert page.evaluate(MODE) == "off"


LONG = """new Promise((resolve, reject) => {
  const socket = new WebSocket(`${location.origin.replace('http', 'ws')}/v1/realtime`, ['realtime']);
  const text = 'é'.repeat(150_000) + 'x'.repeat(150_000);
  const item = {type: 'message', role: 'user', content: [{type: 'input_text', text}]};
  socket.onerror = socket.onclose = reject;
  socket.onmessage = ({data}) => {
    const event = JSON.parse(data);
    if (event.type === 'session.created') socket.send(JSON.stringify({type: 'conversation.item.create', item}));
    if (event.type === 'conversation.item.done') resolve(event.item.content[0].text === text);
  };
})"""


def test_a_browser_takes_a_long_event_that_the_server_sends_in_fragments(studio: Server) -> None:
    with open_page() as page:
        page.open(studio.url)
        assert page.evaluate(LONG) is True
