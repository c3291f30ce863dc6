// OpenAI's JavaScript client, unchanged: speaks into an answer, and cuts the next answer itself. Prints what it got.
import { readFileSync } from 'node:fs';
import OpenAI from 'openai';
import { OpenAIRealtimeWS } from 'openai/realtime/ws';

const [baseURL, apiKey, model, question, speech, cutAtMs] = process.argv.slice(2);
const BLOCK = 1920; // bytes of 40 ms
const BLOCK_MS = 40;
const realtime = new OpenAIRealtimeWS({ model }, new OpenAI({ baseURL, apiKey }));
const microphone = readFileSync(speech);
const turns = [];
const items = []; // those of the answers, in order
const retrieved = [];
const truncated = [];

// Sends the sound as a microphone yields it: each block when its time has come.
function speak() {
  const began = performance.now();
  let at = 0;
  const timer = setInterval(() => {
    for (; at < microphone.length && (at / BLOCK) * BLOCK_MS < performance.now() - began; at += BLOCK) {
      const audio = microphone.subarray(at, at + BLOCK).toString('base64');
      realtime.send({ type: 'input_audio_buffer.append', audio });
    }
    if (at >= microphone.length) clearInterval(timer);
  }, BLOCK_MS);
}

realtime.on('error', (error) => {
  console.error(error);
  process.exit(1);
});
realtime.on('session.created', () => {
  const content = [{ type: 'input_text', text: question }];
  realtime.send({ type: 'conversation.item.create', item: { type: 'message', role: 'user', content } });
  realtime.send({ type: 'response.create' });
});
realtime.on('response.output_audio.delta', ({ item_id }) => {
  if (items.at(-1) === item_id) return;
  items.push(item_id);
  if (items.length === 1) speak(); // the first answer is played from now on
});
for (const name of ['speech_started', 'speech_stopped', 'committed']) {
  realtime.on(`input_audio_buffer.${name}`, () => turns.push(name));
}
realtime.on('response.done', ({ response }) => {
  turns.push(`${response.status} ${response.status_details?.reason ?? ''}`.trim());
  if (response.status !== 'completed') return;
  const audio_end_ms = Number(cutAtMs);
  realtime.send({ type: 'conversation.item.truncate', item_id: items.at(-1), content_index: 0, audio_end_ms });
});
realtime.on('conversation.item.truncated', ({ item_id, audio_end_ms }) => {
  turns.push('truncated');
  truncated.push({ answer: items.indexOf(item_id), audio_end_ms });
  realtime.send({ type: 'conversation.item.retrieve', item_id });
});
realtime.on('conversation.item.retrieved', ({ item }) => {
  retrieved.push({ answer: items.indexOf(item.id), transcript: item.content[0].transcript });
  if (retrieved.length < 2) return;
  console.log(JSON.stringify({ turns, truncated, retrieved }));
  realtime.close();
});
