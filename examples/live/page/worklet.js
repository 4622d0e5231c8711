// Cuts the microphone's sound into blocks of 512 samples at 16 kHz.
const RATE = 16000;
const BLOCK = 512;

class Blocks extends AudioWorkletProcessor {
  constructor() {
    super();
    this.block = new Float32Array(BLOCK);
    this.filled = 0;
    this.sum = 0;      // of the samples that make the next one
    this.weight = 0;   // how many of them there are, with parts of one
  }

  // Each output sample is the mean of the input between two moments: enough of a filter for speech.
  process(inputs) {
    const channel = inputs[0][0];
    if (!channel) return true;
    const step = sampleRate / RATE;
    for (const sample of channel) {
      let left = 1;
      while (left > 0) {
        const part = Math.min(left, step - this.weight);
        this.sum += sample * part;
        this.weight += part;
        left -= part;
        if (this.weight >= step - 1e-9) {
          this.block[this.filled++] = this.sum / step;
          this.sum = this.weight = 0;
          if (this.filled === BLOCK) {
            this.port.postMessage(this.block, [this.block.buffer]);
            this.block = new Float32Array(BLOCK);
            this.filled = 0;
          }
        }
        if (left < 1e-9) left = 0;
      }
    }
    return true;
  }
}

registerProcessor("blocks", Blocks);
