// Runs in the audio thread: brings the microphone's samples from the rate of the context to 24 kHz, and posts them as
// 16 bit PCM each 40 ms. A sinc in a Hann window interpolates, and is the low-pass that keeps aliases out.

const RATE = 24000;
const SAMPLES = 960; // 40 ms
const CROSSINGS = 8; // zero crossings of the sinc on each side
const CUTOFF = Math.min(1, (0.9 * RATE) / sampleRate); // of half the context's rate, which is `sampleRate`
const HALF = Math.ceil(CROSSINGS / CUTOFF);
const WIDTH = 2 * HALF; // input samples of which an output sample is made

// Returns the weights of WIDTH input samples for an output sample, which is `phase` / RATE after the sample HALF - 1.
function weights(phase) {
  const found = Float32Array.from({ length: WIDTH }, (_, at) => {
    const distance = at - (HALF - 1) - phase / RATE;
    const angle = Math.PI * CUTOFF * distance;
    return (angle ? Math.sin(angle) / angle : 1) * Math.cos((Math.PI * distance) / WIDTH) ** 2;
  });
  const sum = found.reduce((total, each) => total + each);
  return found.map((each) => each / sum);
}

registerProcessor("capture", class extends AudioWorkletProcessor {
  constructor() {
    super();
    this.recent = new Float32Array(WIDTH); // a ring
    this.at = 0; // in the ring: the oldest sample, which the next one replaces
    this.missing = HALF + 1; // input samples before the next output sample can be made
    this.phase = 0; // of the next output sample
    this.weights = new Map(); // by phase: one for 48 kHz, 80 for 44.1 kHz
    this.pcm = new Int16Array(SAMPLES);
    this.filled = 0;
  }

  process([[channel]]) {
    for (const sample of channel || []) {
      this.recent[this.at] = sample;
      this.at = (this.at + 1) % WIDTH;
      this.missing -= 1;
      while (this.missing === 0) {
        this.post(this.made());
        this.phase += sampleRate;
        this.missing = Math.floor(this.phase / RATE);
        this.phase %= RATE;
      }
    }
    return true;
  }

  made() {
    if (!this.weights.has(this.phase)) this.weights.set(this.phase, weights(this.phase));
    const found = this.weights.get(this.phase);
    let sum = 0;
    for (let each = 0; each < WIDTH; each += 1) sum += found[each] * this.recent[(this.at + each) % WIDTH];
    return sum;
  }

  post(sample) {
    this.pcm[this.filled] = Math.max(-32768, Math.min(32767, Math.round(sample * 32767)));
    this.filled += 1;
    if (this.filled < SAMPLES) return;
    this.port.postMessage(this.pcm.buffer, [this.pcm.buffer]);
    this.pcm = new Int16Array(SAMPLES);
    this.filled = 0;
  }
});
