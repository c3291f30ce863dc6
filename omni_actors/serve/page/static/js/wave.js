// The waveforms: what the microphone hears, what the answer sounds like, and between them when the server hears speech.

import { talk } from "./conversation.js";
import { PEAKS_S, audioContext } from "./sound.js";
import { heard, voice } from "./voice.js";
import { html, useEffect, useRef } from "./view.js";

const SPAN_S = PEAKS_S; // the time that is shown; the right edge is now

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function bars(context, peaks, now, { top, height, width, fill }) {
  context.fillStyle = fill;
  for (const [at, peak] of peaks) {
    const age = now - at;
    if (age > SPAN_S || age < 0) continue;
    const x = width * (1 - age / SPAN_S);
    const size = Math.max(1, Math.sqrt(Math.min(1, peak)) * height);
    context.fillRect(x - 2, top + (height - size) / 2, 1.8, size);
  }
}

function draw(canvas, colours) {
  const scale = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  const now = audioContext().currentTime;
  const lane = (height - 8) / 2;
  bars(context, heard.peaks, now, { top: 0, height: lane, width, fill: colours.input });
  const spoken = talk.value.messages.slice(-3).flatMap(({ player }) => player?.peaks || []);
  bars(context, spoken, now, { top: lane + 8, height: lane, width, fill: colours.output });
  context.fillStyle = colours.line;
  context.fillRect(0, lane + 3, width, 2);
  context.fillStyle = colours.speech;
  for (const [from, to] of heard.speech.slice(-20)) {
    const left = width * (1 - (now - from) / SPAN_S);
    const right = to === null ? width : width * (1 - (now - to) / SPAN_S);
    if (right > 0) context.fillRect(Math.max(0, left), lane + 2, right - Math.max(0, left), 4);
  }
}

// Draws while the microphone is open or an answer is made or played, and later once for each change of the theme.
// isActive: whether one of these is so.
export function Wave({ isActive, theme }) {
  const canvas = useRef();
  const hasDrawn = useRef(false); // before, there is no sound
  useEffect(() => {
    if (!isActive && !hasDrawn.current) return undefined;
    hasDrawn.current = true;
    const names = { input: "--ink-2", output: "--accent", line: "--line", speech: "--amber" };
    const colours = Object.fromEntries(Object.entries(names).map(([name, variable]) => [name, colour(variable)]));
    let last = 0;
    let frame = requestAnimationFrame(function step(now) {
      if (now - last > 30) {
        last = now;
        draw(canvas.current, colours);
      }
      if (isActive) frame = requestAnimationFrame(step);
    });
    return () => cancelAnimationFrame(frame);
  }, [isActive, theme]);
  const says = voice.value.isSpeaking ? "speech is heard" : "";
  return html`<div class="wave" data-active=${isActive}>
    <span class="lane">you</span><span class="lane out">answer</span>
    <canvas ref=${canvas} role="img" aria-label=${`waveforms of the microphone and of the answer ${says}`}></canvas>
  </div>`;
}
