"""The sound of the microphone, which the page sends with 24 kHz, in a headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

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
