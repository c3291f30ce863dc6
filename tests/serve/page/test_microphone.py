"""The microphone in a headless Chromium: its sound, which the page sends with 24 kHz, and speech, which it marks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from bench.turns import RATE, SENTENCES, say
from tests.support.chromium import EXECUTABLE, Page, open_page
from tests.support.http_server import Server

pytestmark = [
    pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium on this machine"),
    pytest.mark.slow,
]

SENT_RATE = 24_000

CAPTURE = """(async () => {
  const context = new OfflineAudioContext(1, RATE, RATE);
  await context.audioWorklet.addModule("/page/js/capture-worklet.js");
  const node = new AudioWorkletNode(context, "capture", {numberOfOutputs: 0, channelCount: 1});
  const found = [];
  const posted = new Promise((resolve) => {
    node.port.onmessage = ({data}) => { found.push(...new Int16Array(data)); if (found.length > 23000) resolve(); };
  });
  const tone = new OscillatorNode(context, {frequency: FREQUENCY});
  tone.connect(node);
  tone.start();
  await context.startRendering();
  await posted;
  return found;
})()"""
"""A second of a tone at RATE, as the worklet posts it."""

RECORD = """(async () => {
  const {Microphone} = await import('/page/js/sound.js');
  const found = [];
  await new Promise(async (resolve, reject) => {
    Microphone.open(({pcm}) => {
      found.push(...new Int16Array(pcm.buffer));
      if (found.length > 24000) resolve();
    }).catch(reject);
  });
  return found;
})()"""
"""The first second that the page's microphone yields."""

FIREFOX = """(() => {
  const device = new AudioContext().sampleRate, {createMediaStreamSource} = AudioContext.prototype;
  AudioContext.prototype.createMediaStreamSource = function (stream) {
    if (this.sampleRate !== device) throw new DOMException("different sample-rate", "NotSupportedError");
    return createMediaStreamSource.call(this, stream);
  };
})()"""
"""The browser refuses what Firefox refused."""


@pytest.fixture(scope="module")
def page(studio: Server) -> Iterator[Page]:
    with open_page() as page:
        page.open(studio.url)
        yield page
        assert page.errors == []


def captured(page: Page, rate: int, frequency: float) -> np.ndarray:
    """Return half a second of what the worklet makes of a tone of amplitude 1: float (12000,)."""
    found = page.evaluate(CAPTURE.replace("RATE", str(rate)).replace("FREQUENCY", str(frequency)))
    return np.array(found[6_000:18_000]) / 32767


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 44_100, 48_000, 96_000])
def test_a_tone_keeps_its_frequency_and_loudness_at_every_rate_of_the_device(page: Page, rate: int) -> None:
    sound = captured(page, rate, 1_000)
    turns = np.exp(-2j * np.pi * 1_000 * np.arange(len(sound)) / SENT_RATE)
    amplitude = 2 * np.mean(turns * sound)  # of the tone of 1 kHz, with its phase
    assert abs(amplitude) == pytest.approx(1, abs=0.01)
    assert np.abs(sound - (amplitude * turns.conj()).real).max() < 0.01, "there is nothing beside the tone"


@pytest.mark.parametrize("rate", [44_100, 48_000, 96_000])
def test_a_tone_that_24_khz_cannot_hold_is_silenced(page: Page, rate: int) -> None:
    assert np.abs(captured(page, rate, 16_000)).max() < 0.01


def test_the_microphone_is_read_at_the_rate_of_the_device(studio: Server) -> None:
    """Firefox connected a microphone only to a context of the device's rate."""
    with open_page() as page:
        page.open(studio.url)
        page.evaluate(FIREFOX)
        sound = np.array(page.evaluate(RECORD))
        assert np.abs(sound).max() > 1_000, "Chromium's own microphone beeps"
        assert page.errors == []


STRIP = """(() => {
  const canvas = document.querySelector('.wave canvas'), {width, height} = canvas, lane = (height - 8) / 2;
  const context = canvas.getContext('2d');
  const painted = (y) => {
    const {data} = context.getImageData(0, y, width, 1);
    return Array.from({length: width}, (_, x) => data[4 * x + 3] > 127);
  };
  return {bold: painted(lane + 2), thin: painted(lane + 4)};
})()"""
"""Where the strip between the waveforms is painted, and where it is bold: a boolean a pixel. Now is at the right."""
WATCH = f"""(() => {{
  window.seen = {{bold: [], labels: []}};
  const note = (list, value) => list.at(-1) === value || list.push(value);
  setInterval(() => {{
    note(seen.bold, {STRIP}.bold.at(-1));
    note(seen.labels, document.querySelector('.wave canvas').ariaLabel.includes('speech is heard'));
  }}, 20);
}})()"""
"""Notes each change of whether the strip is bold at its right end, and of whether its label says so."""
SHOWN_S = 12
"""How long the strip is, as in ``sound.js``."""


@pytest.mark.voice
def test_the_strip_is_bold_where_the_server_has_heard_speech(studio: Server, tmp_path: Path) -> None:
    microphone = tmp_path / "speech.wav"
    silence = np.zeros(RATE)
    soundfile.write(microphone, np.concatenate([silence, say(SENTENCES[5]), *[silence] * 120]), RATE, subtype="PCM_16")
    with open_page(microphone=microphone) as page:
        page.open(studio.url)
        page.wait("document.querySelector('.wave canvas')")
        page.evaluate(WATCH)
        page.click("#hands-free")
        page.wait("seen.bold.length > 2 && seen.labels.length > 2")
        assert page.evaluate("seen") == {"bold": [False, True, False], "labels": [False, True, False]}
        heard = "(await import('/page/js/voice.js')).heard.speech"
        strip, speech = page.evaluate(f"(async () => [{STRIP}, {heard}])()")
        assert all(strip["thin"])
        [(begin, end)] = speech
        pixels = np.flatnonzero(strip["bold"])
        assert pixels[-1] - pixels[0] == len(pixels) - 1, "it is one time"
        assert len(pixels) / len(strip["bold"]) * SHOWN_S == pytest.approx(end - begin, abs=0.1)
        assert page.errors == []
