// OpenAI's JavaScript client, unchanged: speaks a question, hands-free, and writes the sound of the answer to a file.
import { readFileSync, writeFileSync } from 'node:fs';
import OpenAI from 'openai';
import { OpenAIRealtimeWS } from 'openai/realtime/ws';

const [baseURL, apiKey, model, question, answer] = process.argv.slice(2);
const BLOCK = 1920; // bytes of 40 ms
const realtime = new OpenAIRealtimeWS({ model }, new OpenAI({ baseURL, apiKey }));
const recording = readFileSync(question);
const turns = [];
const sound = [];

realtime.on('error', (error) => {
  console.error(error);
  process.exit(1);
});
realtime.on('session.created', ({ session }) => {
  turns.push(session.audio.input.turn_detection.type);
  for (let at = 0; at < recording.length; at += BLOCK) {
    const audio = recording.subarray(at, at + BLOCK).toString('base64');
    realtime.send({ type: 'input_audio_buffer.append', audio });
  }
});
for (const name of ['speech_started', 'speech_stopped', 'committed']) {
  realtime.on(`input_audio_buffer.${name}`, () => turns.push(name));
}
realtime.on('response.output_audio.delta', (event) => sound.push(Buffer.from(event.delta, 'base64')));
realtime.on('response.done', ({ response }) => {
  writeFileSync(answer, Buffer.concat(sound));
  const [{ transcript }] = response.output[0].content;
  console.log(JSON.stringify({ status: response.status, turns, transcript }));
  realtime.close();
});
