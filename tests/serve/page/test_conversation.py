"""The conversation of the page in a headless Chromium: what a question brings along, and what a reader sees of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.conftest import Gallery
from tests.serve.page.test_browser import enter
from tests.support.chromium import EXECUTABLE, SHOWN, Page, open_page
from tests.support.http_server import Server

pytestmark = [
    pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium on this machine"),
    pytest.mark.slow,
]

TALK = "(await import('/page/js/conversation.js'))"
"""The module, in an async function."""
LIST = "document.querySelector('.messages')"


@pytest.fixture
def page(studio: Server) -> Iterator[Page]:
    with open_page() as page:
        page.resize(1280, 900)
        page.open(studio.url)
        page.wait("document.querySelector('#question')")
        yield page
        assert [error for error in page.errors if not error.startswith("Failed to load resource")] == []


def in_module(page: Page, expression: str) -> Any:
    """Return the value of an expression, in which ``talk`` is the module of the conversation."""
    return page.evaluate(f"(async () => {{ const talk = {TALK}; return {expression}; }})()")


def body(page: Page, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that a question after these ones sends."""
    empty = {"text": "", "state": "done", "pictures": [], "player": None, "heard": None, "isPrompt": False}
    found = json.dumps([{**empty, **each} for each in messages])
    sent: list[dict[str, Any]] = in_module(page, f"talk.chatBody('studio', {found}, false).messages")
    return sent


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "text": text, **more}


def test_a_question_that_failed_is_not_sent_again_with_the_next_one(page: Page) -> None:
    page.block("*/v1/chat/completions")
    enter(page, "first")
    page.wait("document.querySelector('.message.assistant')?.dataset.state === 'failed'")
    assert "cannot be reached" in page.evaluate("document.querySelector('.message .error').innerText")
    page.block()
    enter(page, "second")
    page.wait("[...document.querySelectorAll('.message.assistant')].at(-1).dataset.state === 'done'")
    assert in_module(page, "talk.talk.value.lastCall.body.messages") == [{"role": "user", "content": "second"}]


def test_the_roles_of_a_question_alternate_and_the_user_is_first(page: Page) -> None:
    unheard = said("assistant", "nothing of this was heard", state="stopped", heard=0)
    found = body(page, said("assistant", "old"), said("user", "one"), unheard, said("user", "two"))
    assert found == [{"role": "user", "content": "one\ntwo"}]
    found = body(page, said("user", "one"), said("assistant", "yes"), said("user", "two"))
    assert [each["content"] for each in found] == ["one", "yes", "two"]


def test_a_question_brings_along_no_drawings_and_not_more_pictures_than_a_server_takes(page: Page) -> None:
    large = [f"data:image/png;base64,{'A' * 13_000_000}"]
    drawing = [said("user", "a red circle", isPrompt=True), said("assistant", "", pictures=["data:,"])]
    seen = [said("user", "what is it?", pictures=large), said("assistant", "a fox")]
    found = body(page, *seen, *drawing, said("user", "and this?", pictures=large))
    assert [each["role"] for each in found] == ["user", "assistant", "user"]
    assert found[0]["content"] == "what is it?"
    assert [part["type"] for part in found[2]["content"]] == ["image_url", "text"]


BROKEN = """
window.fetch = async () => new Response(new ReadableStream({
  start(controller) {
    controller.enqueue(new TextEncoder().encode('event: EVENT\\ndata: DATA\\n\\n'));
    controller.close();
  }
}));
"""
"""The server's answer ends after its first event, as a proxy ends it whose server has died."""


@pytest.mark.parametrize(
    ("call", "event", "data", "reason"),
    [
        (
            "talk.draw('studio', 'a circle', null)",
            "image_generation.partial_image",
            {"type": "image_generation.partial_image", "b64_json": "AAAA"},
            "before the picture was finished",
        ),
        (
            "talk.ask('studio', 'hello', {isSpoken: false})",
            "message",
            {"choices": [{"index": 0, "delta": {"content": "hel"}, "finish_reason": None}]},
            "before the answer did",
        ),
    ],
    ids=["picture", "text"],
)
def test_an_answer_without_its_end_has_failed(
    page: Page, call: str, event: str, data: dict[str, Any], reason: str
) -> None:
    page.evaluate(f"(() => {{ {BROKEN.replace('EVENT', event).replace('DATA', json.dumps(data))} }})()")
    in_module(page, call)
    latest = in_module(page, "(({state, error}) => ({state, error}))(talk.talk.value.messages.at(-1))")
    assert latest["state"] == "failed"
    assert reason in latest["error"]


def test_a_reader_who_has_scrolled_back_stays_there_until_a_new_message(page: Page) -> None:
    line = "a line of a long answer "
    in_module(page, f"void (window.answer = talk.addMessage({{role: 'assistant', text: '{line}'.repeat(400)}}))")
    page.wait(f"{LIST}.scrollTop > 100")
    page.evaluate(f"void ({LIST}.scrollTop = 0)")
    page.evaluate(SHOWN)
    in_module(page, f"talk.changed(answer, {{text: answer.text + '{line}'.repeat(40)}})")
    page.evaluate(SHOWN)
    assert page.evaluate(f"{LIST}.scrollTop") == 0
    in_module(page, "void talk.addMessage({role: 'user', text: 'next', state: 'done'})")
    page.wait(f"{LIST}.scrollTop > 100")
    in_module(page, f"talk.changed(answer, {{text: answer.text + '{line}'.repeat(40)}})")
    in_module(page, f"void talk.addMessage({{role: 'assistant', text: '{line}'.repeat(40)}})")
    page.wait(f"{LIST}.scrollHeight - {LIST}.scrollTop - {LIST}.clientHeight < 2")


def test_the_error_of_a_long_answer_is_in_view(page: Page) -> None:
    in_module(
        page, "void (window.answer = talk.addMessage({role: 'assistant', text: 'a line of an answer '.repeat(400)}))"
    )
    page.wait(f"{LIST}.scrollTop > 100")
    in_module(page, "talk.changed(answer, {state: 'failed', error: 'the stage has died '.repeat(20)})")
    page.wait("document.querySelector('.message .error')")
    page.wait(f"{LIST}.scrollHeight - {LIST}.scrollTop - {LIST}.clientHeight < 2")


LINE_COLOUR = "getComputedStyle(document.documentElement).getPropertyValue('--line').trim()"
DRAWN_COLOUR = """(() => {
  const canvas = document.querySelector('.wave canvas');
  const {width, height} = canvas;
  const pixel = [...canvas.getContext('2d').getImageData(width / 2, height / 2, 1, 1).data].slice(0, 3);
  return '#' + pixel.map((each) => each.toString(16).padStart(2, '0')).join('');
})()"""
"""The colour of the line in the middle of the waveforms."""


def test_the_waveforms_of_an_answer_that_is_over_follow_the_theme(page: Page) -> None:
    in_module(page, "void (window.answer = talk.addMessage({role: 'assistant', text: 'hello'}))")
    page.wait(f"{DRAWN_COLOUR} === {LINE_COLOUR}")
    in_module(page, "talk.changed(answer, {state: 'done'})")
    page.evaluate(SHOWN)
    before = page.evaluate(LINE_COLOUR)
    page.key("t", "KeyT", "t")
    page.wait(f"{LINE_COLOUR} !== '{before}'")
    page.wait(f"{DRAWN_COLOUR} === {LINE_COLOUR}")


PLAYED = "{received: 100, played: 50, isPlaying: true, peaks: [], stop() {}}"
"""A player that has played half of an answer."""


def test_a_long_spoken_answer_has_few_elements(page: Page) -> None:
    text = " ".join(f"word{number}" for number in range(5000))
    message = f"{{role: 'assistant', state: 'done', text: {json.dumps(text)}, player: {PLAYED}}}"
    in_module(page, f"void talk.addMessage({message})")
    page.wait("document.querySelector('.message.assistant .w')")
    assert page.evaluate("document.querySelector('.message.assistant .said').innerText") == text
    assert page.evaluate("document.querySelectorAll('.message.assistant .w').length") < 30
    heard = page.evaluate(
        "[...document.querySelectorAll('.message.assistant .w.heard')].map((w) => w.innerText).join('')"
    )
    assert text.startswith(heard)
    assert abs(len(heard) - len(text) / 2) < 10


def test_words_light_up_when_the_server_says_that_they_are_heard(page: Page) -> None:
    """At 50 s of 100, six words of ten: the server has said that the last four take half of the time."""
    text = "one two six ten two six one ten six two"
    marks = "[[10, 7], [50, 23], [100, 39]]"
    message = f"{{role: 'assistant', state: 'STATE', text: '{text}', player: {PLAYED}, marks: {marks}}}"
    for number, state in enumerate(("open", "done")):
        in_module(page, f"void talk.addMessage({message.replace('STATE', state)})")
        shown = f"document.querySelectorAll('.message.assistant')[{number}]"
        page.wait(f"{shown}?.querySelector('.w')")
        heard = page.evaluate(f"[...{shown}.querySelectorAll('.w.heard')].map((w) => w.innerText).join('')")
        assert heard.split() == text.split()[:6], state


def test_the_end_of_what_was_heard_is_counted_in_characters_and_corrected_at_the_end(page: Page) -> None:
    """JavaScript has two units of text for an emoji."""
    player = "{received: 0, push(bytes) { this.received += bytes.length }}"
    sent = "[new Uint8Array(2), 3], [new Uint8Array(2), 5], [new Uint8Array(0), 6]"
    marks = in_module(
        page,
        f"((message) => {{ for (const [bytes, end] of [{sent}]) talk.addSound(message, bytes, end);"
        f" return message.marks; }})({{marks: [], player: {player}, text: '😀😀 abc'}})",
    )
    assert marks == [[2, 5], [4, 8]]


DRAWN = """(() => {
  const canvas = Object.assign(document.createElement('canvas'), {width: WIDTH, height: HEIGHT});
  return canvas.toDataURL('image/png');
})()"""
"""A picture, as a URL."""


@pytest.mark.parametrize(("width", "height"), [(4000, 2), (2, 4000), (1, 1)])
def test_a_picture_of_an_odd_size_fits_the_conversation(page: Page, width: int, height: int) -> None:
    url = DRAWN.replace("WIDTH", str(width)).replace("HEIGHT", str(height))
    in_module(page, f"void talk.addMessage({{role: 'assistant', state: 'done', pictures: [{url}]}})")
    page.wait("document.querySelector('.message img')?.complete")
    found = page.evaluate(
        "(({offsetWidth, offsetHeight}) => [offsetWidth, offsetHeight])(document.querySelector('img'))"
    )
    assert 100 < found[0] <= 320
    assert found[1] <= 420
    assert page.evaluate(f"{LIST}.scrollWidth <= {LIST}.clientWidth")


CHOOSE = """(() => {
  const input = document.querySelector('.file input'), files = new DataTransfer();
  files.items.add(new File([new Uint8Array(SIZE)], 'picture.png', {type: 'image/png'}));
  input.files = files.files;
  input.dispatchEvent(new Event('change', {bubbles: true}));
})()"""


CHOOSE_WIDE = """(async () => {
  const canvas = Object.assign(document.createElement('canvas'), {width: 8000, height: 4});
  const blob = await new Promise((done) => canvas.toBlob(done));
  const input = document.querySelector('.file input'), files = new DataTransfer();
  files.items.add(new File([blob], 'wide.png', {type: 'image/png'}));
  input.files = files.files;
  input.dispatchEvent(new Event('change', {bubbles: true}));
})()"""


def test_an_attached_picture_that_is_very_wide_fits_the_page(gallery: Gallery) -> None:
    with open_page() as page:
        page.resize(390, 844, phone=True)
        page.open(gallery.server.url)
        page.wait("document.querySelector('.file input')")
        page.evaluate(CHOOSE_WIDE)
        page.wait("document.querySelector('.attached img')?.naturalWidth === 8000")
        assert page.evaluate("document.querySelector('.attached img').offsetWidth") <= 120
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_error_of_a_picture_goes_with_the_next_picture(gallery: Gallery) -> None:
    with open_page() as page:
        page.open(gallery.server.url)
        page.wait("document.querySelector('.file input')")
        page.evaluate(CHOOSE.replace("SIZE", str(8 * 2**20 + 1)))
        page.wait("document.querySelector('.composer .error')?.innerText.includes('larger than 8 MB')")
        page.evaluate(CHOOSE.replace("SIZE", "100"))
        page.wait("document.querySelector('.attached img')")
        page.wait("!document.querySelector('.composer .error')")
