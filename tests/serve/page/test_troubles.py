"""The page in a headless Chromium, when the server refuses, is away, or sends more than can be played."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from omni_actors.playback import Playback
from omni_actors.serve.state_feed import MAX_VIEWERS_PER_ADDRESS
from tests.support.chromium import EXECUTABLE, Page, open_page
from tests.support.http_server import NO_TLS, WATCHDOG_S, Server, Start

pytestmark = [
    pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium on this machine"),
    pytest.mark.slow,
]

PROBLEM = "document.querySelector('.problem')?.innerText || ''"
MOST_WAITING_S = 60
"""As in ``sound.js``."""
LATEST = "(await import('/page/js/conversation.js')).talk.value.messages.at(-1)"
"""The latest message of the conversation, in an async function."""


@pytest.fixture
def page() -> Iterator[Page]:
    with open_page() as page:
        yield page


def _client(server: Server) -> httpx.Client:
    """A client with connections of its own. To be closed."""
    return httpx.Client(base_url=server.url, timeout=WATCHDOG_S, verify=NO_TLS)


def unexpected(page: Page) -> list[str]:
    """Return the console's errors, except the browser's own lines about responses that are no success."""
    return [error for error in page.errors if not error.startswith("Failed to load resource")]


def test_a_pipeline_that_is_not_there_is_named_with_those_that_are(page: Page, studio: Server) -> None:
    page.open(f"{studio.url}/?pipeline=nothing")
    page.wait(f"({PROBLEM}).startsWith('The server refuses')")
    assert "'nothing'" in page.evaluate(PROBLEM)
    assert page.evaluate("document.querySelector('.problem button').innerText") == "Try again"
    page.click(".problem a")
    page.wait("document.querySelector('.stages')")
    assert page.evaluate(PROBLEM) == ""
    assert unexpected(page) == []


def test_a_refused_stream_is_shown_with_the_server_s_reason(page: Page, studio: Server) -> None:
    with ExitStack() as viewers, _client(studio) as client:
        for _ in range(MAX_VIEWERS_PER_ADDRESS):
            viewers.enter_context(client.stream("GET", "/v1/state", params={"stream": "true"}))
        page.open(studio.url)
        page.wait(f"({PROBLEM}).includes('{MAX_VIEWERS_PER_ADDRESS} viewers')")
        assert "tries again" in page.evaluate(PROBLEM)
    assert unexpected(page) == []


IMPATIENT = """
window.patient = window.setTimeout;
window.setTimeout = (run, ms, ...more) => patient(run, ms === 30_000 ? 300 : ms, ...more);
"""
"""The page waits for the server for 0.3 s instead of 30 s."""


def test_a_server_that_is_silent_is_lost_and_found_again(page: Page, studio: Server) -> None:
    page.open(studio.url)
    page.wait("document.querySelector('.status')?.dataset.state === 'ready'")
    page.evaluate(f"(() => {{ {IMPATIENT} }})()")
    body = {"model": "studio", "messages": [{"role": "user", "content": "hello"}]}
    assert studio.http.post("/v1/chat/completions", json=body).status_code == 200
    page.wait(f"({PROBLEM}).includes('has sent nothing for 30 s')")
    page.evaluate("void (window.setTimeout = patient)")
    page.wait(f"({PROBLEM}) === '' && document.querySelector('.status').dataset.state === 'ready'")
    assert unexpected(page) == []


HIDE = """
window.patient ||= window.setTimeout;
window.setTimeout = (run, ms, ...more) => patient(run, ms === 10_000 ? 100 : ms, ...more);
Object.defineProperty(document, 'hidden', {value: HIDDEN, configurable: true});
document.dispatchEvent(new Event('visibilitychange'));
"""
"""Another tab is chosen, or this one again. The page waits for 0.1 s instead of 10 s."""


STATE_AT = "import('/page/js/live.js').then(({live}) => live.value.state.at)"
"""The server's time of the latest state that the page has got."""
DIE = """import('/page/js/live.js').then(({live, replicasOf}) => {
  for (const {replica} of replicasOf(live.value.state)) replica.down_since = live.value.state.at - 300;
})"""
"""The last that the page has seen of the replicas is that they are dead."""
RECOVERIES = "import('/page/js/live.js').then(({live}) => Object.keys(live.value.recoveries))"


def test_a_hidden_page_leaves_its_stream_to_other_viewers(page: Page, studio: Server) -> None:
    def is_full() -> bool:  # it takes a free place for a moment, so no probe may meet the page's return
        with client.stream("GET", "/v1/state", params={"stream": "true"}) as another:
            return another.status_code == 503

    page.open(studio.url)
    page.wait("document.querySelector('.status')?.dataset.state === 'ready'")
    with ExitStack() as viewers, _client(studio) as client:
        for _ in range(MAX_VIEWERS_PER_ADDRESS - 1):
            viewers.enter_context(client.stream("GET", "/v1/state", params={"stream": "true"}))
        assert is_full()
        page.evaluate(f"(() => {{ {HIDE.replace('HIDDEN', 'true')} }})()")
        studio.wait(lambda: not is_full(), "the page to leave")
        left_at = page.evaluate(STATE_AT)
        page.evaluate(DIE)
        page.evaluate(f"(() => {{ {HIDE.replace('HIDDEN', 'false')} }})()")
        page.wait(f"{STATE_AT}.then((at) => at > {left_at!r})")
        page.wait(f"({PROBLEM}) === ''")  # its first try may meet the last probe's stream
        assert is_full(), "the page has taken its place again"
        assert page.evaluate(RECOVERIES) == [], "nobody knows when they came back"
    assert unexpected(page) == []


def test_the_page_says_why_it_cannot_start_and_starts_later(page: Page, studio: Server) -> None:
    page.block("*/page/facts")
    page.open(studio.url)
    page.wait("document.querySelector('#app').innerText.includes('cannot start: the server cannot be reached')")
    page.block()
    page.wait("document.querySelector('.stages')")
    assert page.evaluate("document.querySelector('#app').innerText.includes('cannot start')") is False
    assert unexpected(page) == []


def test_labels_are_beside_the_boxes_on_a_phone(page: Page, studio: Server) -> None:
    page.resize(390, 844, phone=True)
    page.open(studio.url)
    page.wait("document.querySelector('.edge .label')")
    boxes = "[...document.querySelectorAll('{}')].map((each) => each.getBoundingClientRect().toJSON())"
    labels, stages = (page.evaluate(boxes.format(name)) for name in (".edge .label", ".diagram article"))
    assert len(labels) == 8, "one for each line: three from the client, two between stages, three to the client"
    [frame] = page.evaluate(boxes.format(".diagram"))
    for label in labels:
        assert frame["top"] < label["top"]
        assert frame["left"] - 16 < label["left"] < label["right"] < frame["right"] + 16, "inside the panel"
        assert not [box for box in stages if _overlap(label, box)]


def _overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    apart = one["right"] < other["left"] or other["right"] < one["left"]
    return not (apart or one["bottom"] < other["top"] or other["bottom"] < one["top"])


def test_a_player_keeps_nothing_of_what_was_heard(page: Page, studio: Server) -> None:
    page.open(studio.url)
    begun = page.evaluate(
        "import('/page/js/sound.js').then(({Player}) => { window.player = new Player();"
        "for (let piece = 0; piece < 100; piece += 1) player.push(new Uint8Array(960).fill(1));"
        "return [player.isPlaying, player.received.toFixed(2)]; })"
    )
    assert begun == [True, "2.00"]
    page.wait("!player.isPlaying")
    page.wait("player.pieces.filter(({source}) => source !== null).length === 0")
    assert page.evaluate("player.pieces.length") <= 2, "the last one, for its times"
    assert page.evaluate("player.played.toFixed(2)") == "2.00"
    assert unexpected(page) == []


ARRIVALS = [1.0, 1.05, 1.3, 2.5, 2.61, 2.89, 3.05, 3.2, 9.0]
"""When pieces of 0.2 s arrive. The player is empty before the fourth and before the last one."""
PLAY = """import('/page/js/sound.js').then(({Player}) => {
  const player = new Player();
  const {context} = player;
  let now = 0;
  player.context = new Proxy(context, {get: (_, name) => {
    if (name === "currentTime") return now;
    return typeof context[name] === "function" ? context[name].bind(context) : context[name];
  }});
  return ARRIVALS.map((at) => {
    now = at;
    player.push(new Uint8Array(9600));
    return player.next;
  });
})"""
"""When the player will have played everything, after each piece."""


def test_a_player_waits_after_a_gap_as_the_server_counts_on(page: Page, studio: Server) -> None:
    page.open(studio.url)
    model, expected = Playback(), []
    for at in ARRIVALS:
        model.feed(at, 0.2)
        expected.append(model.ends)
    assert model.underruns == 2
    assert page.evaluate(PLAY.replace("ARRIVALS", str(ARRIVALS))) == pytest.approx(expected, abs=1e-6)
    assert unexpected(page) == []


def test_reading_waits_while_a_minute_of_sound_is_not_played(page: Page, start: Start) -> None:
    with start("-s", "stages.mind.options.fan_out=15000") as server:  # 1,500 s of sound: no browser buffers that
        page.open(server.url)
        page.wait("document.querySelector('#question')")
        page.evaluate("document.querySelector('#question').focus()")
        page.type("hello")
        page.key("Enter", "Enter", "\r")
        page.wait(f"(async () => ({LATEST}).player?.isFull)()")
        waiting = f"(async () => {{ const {{player}} = {LATEST}; return player.received - player.played; }})()"
        page.evaluate("new Promise((resolve) => setTimeout(resolve, 1000))")  # time for the rest, which must not come
        assert page.evaluate(waiting) < MOST_WAITING_S + 1
        page.click("#stop")
        page.wait(f"(async () => ({LATEST}).state === 'stopped')()")
        server.wait(lambda: server.aborted() > 0, "the request to be aborted")
        assert server.ends_by(signal.SIGTERM)[0] == 0
        page.wait(f"({PROBLEM}).includes('No connection')")
        ages = "import('/page/js/live.js').then(({live, serverTime}) => serverTime() - live.value.state.at)"
        assert page.evaluate(f"{ages}.then((age) => age >= 0)"), "the clock goes on"
        assert page.evaluate("document.querySelector('.stages') !== null"), "the last state stays"
    assert unexpected(page) == []
