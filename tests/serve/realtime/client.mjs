// OpenAI's JavaScript client, unchanged: asks a written question, and prints the events of the spoken answer.
import OpenAI from 'openai';
import { OpenAIRealtimeWS } from 'openai/realtime/ws';

const [baseURL, apiKey, model] = process.argv.slice(2);
const realtime = new OpenAIRealtimeWS({ model }, new OpenAI({ baseURL, apiKey }));
let samples = 0;

realtime.on('error', (error) => {
  console.error(error);
  process.exit(1);
});
realtime.on('session.created', () => {
  const content = [{ type: 'input_text', text: 'hello' }];
  realtime.send({ type: 'session.update', session: { type: 'realtime', output_modalities: ['audio'] } });
  realtime.send({ type: 'conversation.item.create', item: { type: 'message', role: 'user', content } });
  realtime.send({ type: 'response.create' });
});
realtime.on('response.output_audio.delta', (event) => {
  samples += Buffer.from(event.delta, 'base64').length / 2;
});
realtime.on('response.done', ({ response }) => {
  const [{ transcript }] = response.output[0].content;
  console.log(JSON.stringify({ status: response.status, transcript, samples }));
  realtime.close();
});
