// The conversation: its messages, and how a typed question or a picture is asked for.

import { call, events, fromBase64 } from "./api.js";
import { Player } from "./sound.js";
import { Store, pause } from "./store.js";

const TAIL_S = 0.4; // an answer of which less is left counts as heard
const FULL_MS = 200; // between two looks whether a full player has room again
const KEPT = 10; // messages of a question, with the earlier ones that it brings along
const PICTURE_LETTERS = 24e6; // of all pictures of a question: a server takes bodies of 32 MiB by default
const LETTERS_PER_S = 14; // the usual pace of speech
export const MAX_MESSAGES = 100; // that the page keeps; older ones are dropped

// messages: {id, role, text, state, player, marks, heard, pictures, isPrompt, error}. marks: [seconds of sound, how many
// letters have been heard by then]. heard: how many letters of a stopped answer were heard; of others null. isPrompt:
// whether it asks for a picture. lastCall: the latest request, for "the same call".
export const talk = new Store({ messages: [], lastCall: null, isBusy: false, spoken: true });
let running = null; // the AbortController of the answer that is being made
let count = 0;

export function addMessage(fields) {
  const empty = { text: "", state: "open", pictures: [], player: null, marks: [], heard: null, isPrompt: false, error: null };
  const message = { id: ++count, ...empty, ...fields };
  talk.update({ messages: [...talk.value.messages, message].slice(-MAX_MESSAGES) });
  return message;
}

export function changed(message, fields = {}) {
  Object.assign(message, fields);
  talk.update();
}

// Adds sound to a spoken answer. end: how many characters of its text have been heard when all sound up to here has been
// played; undefined: the server does not say. The server counts characters, and this page units of UTF-16.
export function addSound(message, bytes, end) {
  const { player, marks, text } = message;
  player.push(bytes);
  if (end !== undefined) {
    if (marks.at(-1)?.[0] === player.received) marks.pop();
    marks.push([player.received, Array.from(text).slice(0, end).join("").length]);
  }
  changed(message);
}

// Returns how many letters have been heard, from the marks before and after what is heard now. After the last one, the
// usual pace of speech counts.
function lettersAt(played, marks) {
  const before = marks.findLastIndex(([at]) => at <= played);
  const [from, letters] = marks[before] || [0, 0];
  const [until, next] = marks[before + 1] || [from + 1, letters + LETTERS_PER_S];
  return letters + ((next - letters) * (played - from)) / (until - from);
}

// Returns how many letters of a message's text have been heard. Where the server has not said so, this is estimated:
// when all sound is there, from the share of it that was played; before, from the usual pace of speech.
export function heardLetters({ text, player, state, marks, heard }) {
  if (heard !== null) return heard;
  if (!player || (state !== "open" && !player.received)) return text.length; // it is not spoken
  if (!player.received) return 0;
  const { played, received } = player;
  if (state === "done" && played >= received - 0.02) return text.length;
  if (marks.length) return Math.min(text.length, lettersAt(played, marks));
  return Math.min(text.length, state === "open" ? played * LETTERS_PER_S : (text.length * played) / received);
}

// Stops a message on this page. Returns whether it was being made or played.
export function cut(message) {
  const { player, state } = message;
  const isOpen = state === "open";
  if (!isOpen && !player?.isPlaying) return false;
  if (isOpen || player.received - player.played > TAIL_S) {
    changed(message, { heard: heardLetters(message), state: "stopped" });
  }
  player?.stop();
  return true;
}

// Stops typed answers and all sound. The server hears of spoken answers from `interrupt` in voice.js.
export function stopAnswer() {
  for (const each of talk.value.messages) if (each.role === "assistant") cut(each);
  running?.abort();
  talk.update();
}

// Returns the text that later questions bring along. Of a stopped answer it has the words that were heard.
function remembered({ text, heard }) {
  if (heard === null) return text;
  let said = "";
  for (const word of text.split(/(\s+)/)) if (said.length < heard) said += word;
  return said.trimEnd();
}

function parts(message) {
  const pictures = message.role === "user" ? message.pictures : [];
  return [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: remembered(message) }];
}

// Returns the messages of a question: those before it, without prompts for pictures and without what failed. The oldest
// pictures are left out if they are too large together. Neighbours of one role become one message, and the first one is
// the user's: chat templates may refuse anything else.
function remembering(messages) {
  const kept = messages.filter((each) => remembered(each) && each.state !== "failed" && !each.isPrompt).slice(-KEPT);
  let room = PICTURE_LETTERS;
  const fits = ({ image_url: picture }) => !picture || (room -= picture.url.length) >= 0;
  const found = [];
  for (const each of kept.reverse()) {
    const fitting = parts(each).filter(fits);
    if (found[0]?.role === each.role) found[0].content.unshift(...fitting);
    else found.unshift({ role: each.role, content: fitting });
  }
  return found[0]?.role === "assistant" ? found.slice(1) : found;
}

// Returns parts as the API writes them: text alone is a string.
function content(found) {
  return found.every((each) => each.type === "text") ? found.map((each) => each.text).join("\n") : found;
}

export function chatBody(model, messages, isSpoken) {
  const sent = remembering(messages).map((each) => ({ role: each.role, content: content(each.content) }));
  const body = { model, messages: sent, stream: true };
  if (isSpoken) Object.assign(body, { modalities: ["text", "audio"], audio: { format: "pcm16", voice: "any", word_timing: true } });
  return body;
}

// Runs `work`, which `stopAnswer` aborts; `answer` gets its error. Later questions do not bring a failed one along.
async function abortably({ question, answer }, work) {
  const mine = new AbortController();
  running = mine;
  talk.update({ isBusy: true });
  try {
    await work(mine.signal);
    if (answer.state === "open") changed(answer, { state: "done" });
  } catch (error) {
    if (error.name === "AbortError") changed(answer, { state: "stopped" });
    else {
      changed(question, { state: "failed" });
      changed(answer, { state: "failed", error: error.message });
    }
  } finally {
    if (running === mine) {
      running = null;
      talk.update({ isBusy: false });
    }
  }
}

// Asks a typed question, and streams the answer's text and, if the pipeline speaks, its sound. The caller has called
// `interrupt`.
export async function ask(model, text, { isSpoken, pictures = [] }) {
  const question = addMessage({ role: "user", text, pictures, state: "done" });
  const body = chatBody(model, talk.value.messages, isSpoken);
  const answer = addMessage({ role: "assistant", asked: performance.now() });
  if (isSpoken) answer.player = new Player();
  talk.update({ lastCall: { path: "/v1/chat/completions", body } });
  await abortably({ question, answer }, async (signal) => {
    let isComplete = false;
    for await (const [, chunk] of events(await call("/v1/chat/completions", { body, signal }))) {
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices?.[0]?.delta || {};
      isComplete ||= Boolean(chunk.choices?.[0]?.finish_reason);
      const said = typeof delta.content === "string" ? delta.content : delta.audio?.transcript;
      if (said) changed(answer, { text: answer.text + said });
      if (delta.audio?.transcript_end) addSound(answer, new Uint8Array(0), delta.audio.transcript_end);
      if (delta.audio?.data) {
        answer.firstSound ||= performance.now() - answer.asked;
        addSound(answer, fromBase64(delta.audio.data));
        while (answer.player.isFull) await pause(FULL_MS); // the server waits, too
      }
    }
    if (!isComplete) throw new Error("the connection ended before the answer did");
  });
}

// Asks for a picture of a prompt, or for a change of the given one, and shows the previews on the way. The caller has
// called `interrupt`.
export async function draw(model, prompt, picture) {
  const pictures = picture ? [picture] : [];
  const question = addMessage({ role: "user", text: prompt, pictures, isPrompt: true, state: "done" });
  const answer = addMessage({ role: "assistant" });
  const path = picture ? "/v1/images/edits" : "/v1/images/generations";
  const body = { model, prompt, stream: true, partial_images: 3 };
  if (picture) body.images = [{ image_url: picture }];
  talk.update({ lastCall: { path, body } });
  await abortably({ question, answer }, async (signal) => {
    for await (const [, event] of events(await call(path, { body, signal }))) {
      if (event.error) throw new Error(event.error.message);
      if (!event.b64_json) continue;
      const isPreview = event.type?.endsWith("partial_image");
      changed(answer, { pictures: [`data:image/png;base64,${event.b64_json}`], isPreview });
    }
    if (answer.isPreview !== false) throw new Error("the connection ended before the picture was finished");
  });
}
