// The conversation: its messages, and how a typed question or a picture is asked for.

import { call, events, fromBase64 } from "./api.js";
import { Player } from "./sound.js";
import { Store, pause } from "./store.js";

const TAIL_S = 0.4; // an answer of which less is left counts as heard
const FULL_MS = 200; // between two looks whether a full player has room again
const KEPT = 10; // earlier messages that a question brings along
export const MAX_MESSAGES = 100; // that the page keeps; older ones are dropped

// messages: {id, role, text, state, player, pictures, error}. lastCall: the latest request, for "the same call".
export const talk = new Store({ messages: [], lastCall: null, isBusy: false, spoken: true });
let running = null; // the AbortController of the answer that is being made
let count = 0;

export function addMessage(fields) {
  const message = { id: ++count, text: "", state: "open", pictures: [], player: null, error: null, ...fields };
  talk.update({ messages: [...talk.value.messages, message].slice(-MAX_MESSAGES) });
  return message;
}

export function changed(message, fields = {}) {
  Object.assign(message, fields);
  talk.update();
}

// Stops the answer that is being made, and all sound.
export function stopAnswer() {
  const playing = talk.value.messages.filter((each) => each.player?.isPlaying);
  for (const each of playing) {
    if (each.player.received - each.player.played > TAIL_S) each.state = "stopped";
    each.player.stop();
  }
  running?.abort();
  talk.update();
}

function parts(message) {
  if (!message.pictures.length || message.role !== "user") return message.text;
  const pictures = message.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...pictures, { type: "text", text: message.text }];
}

export function chatBody(model, messages, isSpoken) {
  const body = { model, messages: messages.map((each) => ({ role: each.role, content: parts(each) })), stream: true };
  if (isSpoken) Object.assign(body, { modalities: ["text", "audio"], audio: { format: "pcm16", voice: "any" } });
  return body;
}

// Runs `work` as the only answer in progress; `answer` gets its error.
async function exclusively(answer, work) {
  stopAnswer();
  const mine = new AbortController();
  running = mine;
  talk.update({ isBusy: true });
  try {
    await work(mine.signal);
    if (answer.state === "open") changed(answer, { state: "done" });
  } catch (error) {
    if (error.name === "AbortError") changed(answer, { state: "stopped" });
    else changed(answer, { state: "failed", error: error.message });
  } finally {
    if (running === mine) {
      running = null;
      talk.update({ isBusy: false });
    }
  }
}

// Asks a typed question, and streams the answer's text and, if the pipeline speaks, its sound.
export async function ask(model, text, { isSpoken, pictures = [] }) {
  addMessage({ role: "user", text, pictures, state: "done" });
  const earlier = talk.value.messages.filter((each) => each.text && each.state !== "failed").slice(-KEPT);
  const body = chatBody(model, earlier, isSpoken);
  const answer = addMessage({ role: "assistant", asked: performance.now() });
  if (isSpoken) answer.player = new Player();
  talk.update({ lastCall: { path: "/v1/chat/completions", body } });
  await exclusively(answer, async (signal) => {
    for await (const [, chunk] of events(await call("/v1/chat/completions", { body, signal }))) {
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices?.[0]?.delta || {};
      const said = typeof delta.content === "string" ? delta.content : delta.audio?.transcript;
      if (said) changed(answer, { text: answer.text + said });
      if (delta.audio?.data) {
        answer.firstSound ||= performance.now() - answer.asked;
        answer.player.push(fromBase64(delta.audio.data));
        changed(answer);
        while (answer.player.isFull) await pause(FULL_MS); // the server waits, too
      }
    }
  });
}

// Asks for a picture of a prompt, or for a change of the given one, and shows the previews on the way.
export async function draw(model, prompt, picture) {
  addMessage({ role: "user", text: prompt, pictures: picture ? [picture] : [], state: "done" });
  const answer = addMessage({ role: "assistant" });
  const path = picture ? "/v1/images/edits" : "/v1/images/generations";
  const body = { model, prompt, stream: true, partial_images: 3 };
  if (picture) body.images = [{ image_url: picture }];
  talk.update({ lastCall: { path, body } });
  await exclusively(answer, async (signal) => {
    for await (const [, event] of events(await call(path, { body, signal }))) {
      if (event.error) throw new Error(event.error.message);
      if (!event.b64_json) continue;
      const isPreview = event.type?.endsWith("partial_image");
      changed(answer, { pictures: [`data:image/png;base64,${event.b64_json}`], isPreview });
    }
  });
}
