// Runs in the audio thread: collects the microphone's samples, and posts them as 16 bit PCM each 40 ms.

const SAMPLES = 960; // 40 ms at 24 kHz, which is the rate of the context

registerProcessor("capture", class extends AudioWorkletProcessor {
  constructor() {
    super();
    this.pcm = new Int16Array(SAMPLES);
    this.filled = 0;
  }

  process([[channel]]) {
    if (!channel) return true;
    for (const sample of channel) {
      this.pcm[this.filled] = Math.max(-32768, Math.min(32767, Math.round(sample * 32767)));
      this.filled += 1;
      if (this.filled === SAMPLES) {
        this.port.postMessage(this.pcm.buffer, [this.pcm.buffer]);
        this.pcm = new Int16Array(SAMPLES);
        this.filled = 0;
      }
    }
    return true;
  }
});
