// Sound in and out: a queue of PCM that knows what was played, and a microphone that yields PCM. 16 bit, 24 kHz, mono.

export const RATE = 24000;
const LEAD_S = 0.1; // from the arrival of sound at an empty player to its start: BUDGET_S of playback.py
const LATE_S = 0.01; // a piece that is scheduled later than this before its time may start late, and overlap the next one
export const MOST_WAITING_S = 60; // sound that waits to be played: 6 MB
export const PEAKS_S = 12; // for how long the peaks of sound that was heard are kept

function toFloats(pcm) {
  const view = new DataView(pcm.buffer, pcm.byteOffset, pcm.byteLength);
  const floats = new Float32Array(pcm.byteLength >> 1);
  for (let at = 0; at < floats.length; at += 1) floats[at] = view.getInt16(2 * at, true) / 32768;
  return floats;
}

let shared = null;

// Returns the AudioContext in which the page plays. Browsers start it only after a click or a key.
export function audioContext() {
  shared ||= new AudioContext({ sampleRate: RATE, latencyHint: "interactive" });
  if (shared.state === "suspended") shared.resume();
  return shared;
}

// Plays one answer. It keeps the sound that waits, and nothing of what was heard but its length. Whoever pushes sound
// waits while `isFull`.
export class Player {
  constructor() {
    this.context = audioContext();
    this.pieces = []; // {source, start, offset, seconds}, in the order of playing, from the one that is heard now
    this.received = 0; // seconds
    this.next = 0;
    this.carry = new Uint8Array(0);
    this.peaks = []; // [time of the context, peak]
    this.stoppedAt = null;
  }

  push(bytes) {
    if (this.stoppedAt !== null || !bytes.length) return;
    const pcm = new Uint8Array(this.carry.length + bytes.length);
    pcm.set(this.carry);
    pcm.set(bytes, this.carry.length);
    const even = pcm.length & ~1;
    this.carry = pcm.slice(even);
    if (!even) return;
    const floats = toFloats(pcm.subarray(0, even));
    const buffer = this.context.createBuffer(1, floats.length, RATE);
    buffer.copyToChannel(floats, 0);
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.context.destination);
    const now = this.context.currentTime;
    const start = this.next > now + LATE_S ? this.next : now + LEAD_S;
    source.start(start);
    const piece = { source, start, offset: this.received, seconds: buffer.duration };
    source.onended = () => {
      piece.source = null;
      this.forget();
    };
    this.pieces.push(piece);
    this.peaks.push(...peaksOf(floats, start));
    this.next = start + buffer.duration;
    this.received += buffer.duration;
  }

  // The time of the context that leaves the loudspeaker now.
  get heardAt() {
    return this.context.currentTime - (this.context.outputLatency || 0);
  }

  // Drops the pieces before the one that is heard now, and the peaks that no waveform shows any more.
  forget() {
    const now = this.heardAt;
    this.pieces.splice(0, Math.max(0, this.pieces.findLastIndex((each) => each.start <= now)));
    this.peaks.splice(0, this.peaks.findLastIndex(([at]) => at < now - PEAKS_S) + 1);
  }

  // Seconds of the answer that have left the loudspeaker. Gaps between pieces do not count.
  get played() {
    if (this.stoppedAt !== null) return this.stoppedAt;
    const now = this.heardAt;
    const piece = this.pieces.findLast((each) => each.start <= now);
    return piece ? piece.offset + Math.min(now - piece.start, piece.seconds) : 0;
  }

  get isFull() {
    return this.stoppedAt === null && this.received - this.played > MOST_WAITING_S;
  }

  get isPlaying() {
    return this.stoppedAt === null && this.played < this.received - 0.001;
  }

  // Stops at once, and returns the milliseconds that were played.
  stop() {
    if (this.stoppedAt === null) {
      this.stoppedAt = this.played;
      for (const { source } of this.pieces.splice(0)) source?.stop();
      this.peaks = this.peaks.filter(([at]) => at <= this.context.currentTime);
    }
    return Math.floor(1000 * this.stoppedAt);
  }
}

const PEAK_S = 0.03;

export function peaksOf(floats, start) {
  const width = Math.round(PEAK_S * RATE);
  const found = [];
  for (let at = 0; at < floats.length; at += width) {
    let peak = 0;
    for (let i = at; i < Math.min(at + width, floats.length); i += 1) peak = Math.max(peak, Math.abs(floats[i]));
    found.push([start + at / RATE, peak]);
  }
  return found;
}

function stopTracks(stream) {
  for (const track of stream.getTracks()) track.stop();
}

// The microphone. `onPiece` receives {pcm: Uint8Array, peaks}, each 40 ms. `onEnd` is called when the device is
// unplugged, or the user takes the permission back. It has a context of its own, at the device's rate, because older
// Firefoxes connect it to no other; the worklet resamples.
export class Microphone {
  static async open(onPiece, onEnd) {
    audioContext();
    if (!navigator.mediaDevices) throw new Error("browsers give it only to https: pages and to localhost");
    const stream = await navigator.mediaDevices.getUserMedia({
      audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true },
    });
    let context = null;
    try {
      context = new AudioContext({ latencyHint: "interactive" });
      await context.audioWorklet.addModule("/page/js/capture-worklet.js");
      return new Microphone(context, stream, { onPiece, onEnd });
    } catch (error) {
      stopTracks(stream);
      context?.close();
      throw error;
    }
  }

  constructor(context, stream, { onPiece, onEnd }) {
    this.context = context;
    this.stream = stream;
    this.node = new AudioWorkletNode(context, "capture", { numberOfOutputs: 0, channelCount: 1 });
    this.node.port.onmessage = ({ data }) => {
      const pcm = new Uint8Array(data);
      onPiece({ pcm, peaks: peaksOf(toFloats(pcm), audioContext().currentTime) });
    };
    context.createMediaStreamSource(stream).connect(this.node);
    for (const track of stream.getTracks()) track.onended = onEnd; // not called when the page stops the track
  }

  close() {
    this.node.port.onmessage = null;
    this.context.close();
    stopTracks(this.stream);
  }
}
