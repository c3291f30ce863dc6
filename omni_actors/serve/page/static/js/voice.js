// Talking over /v1/realtime, hands-free (the server finds the turns) or push-to-talk (the key or the button does).

import { call, fromBase64, key, toBase64 } from "./api.js";
import { MAX_MESSAGES, addMessage, addSound, changed, cut, stopAnswer } from "./conversation.js";
import { Microphone, Player, audioContext } from "./sound.js";
import { Store } from "./store.js";

const PIECE_MS = 40; // of the microphone
const SHOWN_MS = 200; // how often the length of a turn is shown
const KEPT_PEAKS = 1200; // of the microphone: more than the waveform shows
const KEPT_SPEECH = 20;
const ANSWER_MS = 5000; // the longest wait for why a session was refused
const SHORTEST_MS = 100; // the server refuses a shorter turn
const NOTHING_TO_CANCEL = "response_cancel_not_active"; // the code of an error
const TO_HANDS_FREE = "hands-free"; // the id of the event that asks the server to find the turns
const EXPIRED = "session_expired"; // the code of the error after which the server closes the session
const GOING_AWAY = 1001; // the code with which a server closes that ends
const MOST_WAITING = 750; // events that wait until the session is configured: 30 s of sound

// mode: "off", "connecting", "hands-free" or "push". isHeld: whether the push-to-talk key is down. hasMicrophone:
// whether the microphone is open. isSpeaking: whether the server hears speech. isResponding: whether it makes an answer.
// sentS: the seconds of sound of this turn.
const OFF = { mode: "off", isHeld: false, hasMicrophone: false, isSpeaking: false, isResponding: false };
export const voice = new Store({ ...OFF, sentS: 0, error: null });
// peaks: [time, peak] of the microphone. speech: [from, to] of each time in which the user spoke. In seconds of the AudioContext.
export const heard = { peaks: [], speech: [] };

function speechBegins() {
  heard.speech.push([audioContext().currentTime, null]);
  heard.speech.splice(0, heard.speech.length - KEPT_SPEECH);
}

function speechEnds() {
  const latest = heard.speech.at(-1);
  if (latest?.[1] === null) latest[1] = audioContext().currentTime;
}

class Session {
  constructor(model, isHandsFree) {
    this.model = model;
    this.isHandsFree = isHandsFree;
    this.items = new Map(); // by the protocol's item id: the message of the conversation
    this.answer = null;
    this.waiting = []; // events to send when the session is configured; null once it is
    const url = new URL(`/v1/realtime?model=${encodeURIComponent(model)}`, location.href);
    url.protocol = url.protocol.replace("http", "ws");
    const subprotocols = ["realtime"];
    if (key.get()) subprotocols.push(key.subprotocol);
    this.socket = new WebSocket(url, subprotocols);
    this.socket.onmessage = ({ data }) => this.receive(JSON.parse(data));
    this.socket.onclose = ({ code, reason }) => this.closed(code, reason);
  }

  // The server or the network has closed the socket.
  async closed(code, reason) {
    const mine = attempts;
    const error = reason || (await this.reasonOf(code));
    if (mine === attempts) close(error);
  }

  async reasonOf(code) {
    if (code === GOING_AWAY) return "the server is shutting down";
    return this.waiting === null ? `the connection to the server was lost (${code})` : this.refusal();
  }

  // Returns why the session did not begin. The browser hides how the server has answered. Another request, which takes
  // no place of the server, tells whether it is there, accepts the key, and has the model.
  async refusal() {
    try {
      await call(`/v1/models/${encodeURIComponent(this.model)}`, { signal: AbortSignal.timeout(ANSWER_MS) });
      return "the server opens no session: it may have no place for another";
    } catch (error) {
      return error.status === 401 ? "the server does not accept the key" : error.message;
    }
  }

  // Sends an event, or keeps it until the session is configured.
  send(type, fields = {}) {
    if (this.waiting === null) this.post(type, fields);
    else if (this.waiting.length < MOST_WAITING) this.waiting.push([type, fields]);
    else close("the server did not configure the session in time");
  }

  post(type, fields) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify({ type, ...fields }));
  }

  configure() {
    const format = { type: "audio/pcm", rate: 24000 };
    const detection = this.isHandsFree ? { type: "server_vad", create_response: true, interrupt_response: true } : null;
    this.post("session.update", {
      event_id: this.isHandsFree ? TO_HANDS_FREE : undefined,
      session: {
        type: "realtime",
        audio: {
          input: { format, turn_detection: detection, transcription: { model: this.model } },
          output: { format, word_timing: true },
        },
      },
    });
  }

  // Lets the server find the turns from now on.
  setHandsFree() {
    this.isHandsFree = true;
    this.configure();
  }

  // The server refuses to find the turns, for example because it lacks the model: push-to-talk goes on.
  keepPush(error) {
    this.isHandsFree = false;
    goal = "push";
    voice.update({ mode: "push", error });
  }

  // Stops the answer, and tells the server how much of it was heard. A written one is ended by `response.cancel`.
  stopAnswer() {
    const { answer } = this;
    if (!answer || !cut(answer) || !answer.player) return;
    const heardMs = answer.player.stop();
    this.send("conversation.item.truncate", { item_id: answer.itemId, content_index: 0, audio_end_ms: heardMs });
  }

  // Ends the response, which may have begun without this page knowing it yet.
  interrupt() {
    this.send("response.cancel");
    this.stopAnswer();
  }

  // Returns the message of an item, which it adds if it is new.
  message(id, role) {
    if (!this.items.has(id)) {
      this.items.set(id, addMessage({ role, itemId: id, isSpoken: true }));
      if (this.items.size > MAX_MESSAGES) this.items.delete(this.items.keys().next().value);
    }
    return this.items.get(id);
  }

  receive(event) {
    switch (event.type) {
      case "session.created":
        this.configure();
        break;
      case "session.updated":
        voice.update({ mode: this.isHandsFree ? "hands-free" : "push", error: null });
        for (const event of this.waiting || []) this.post(...event);
        this.waiting = null;
        break;
      case "input_audio_buffer.speech_started":
        speechBegins();
        voice.update({ isSpeaking: true });
        this.stopAnswer(); // the server has ended the response
        stopAnswer();
        break;
      case "input_audio_buffer.speech_stopped":
        speechEnds();
        voice.update({ isSpeaking: false });
        break;
      case "conversation.item.added":
        if (event.item.role === "user") this.message(event.item.id, "user");
        break;
      case "conversation.item.input_audio_transcription.delta":
        this.hear(this.message(event.item_id, "user"), event.delta);
        break;
      case "conversation.item.input_audio_transcription.completed":
        changed(this.message(event.item_id, "user"), { text: event.transcript, state: "done", error: null });
        break;
      case "conversation.item.input_audio_transcription.failed":
        changed(this.message(event.item_id, "user"), { state: "failed", error: event.error?.message });
        break;
      case "response.created":
        voice.update({ isResponding: true, error: null });
        break;
      case "response.output_audio.delta":
        addSound(this.speaking(event.item_id), fromBase64(event.delta), event.transcript_end);
        if (this.answer.player.isFull) close("the server sends sound faster than it can be played");
        break;
      case "response.output_audio_transcript.delta":
        this.append(this.speaking(event.item_id), event.delta);
        break;
      case "response.output_text.delta":
        this.append(this.answering(event.item_id), event.delta);
        break;
      case "response.done":
        this.done(event.response);
        break;
      case "error":
        if (this.waiting !== null || event.error.code === EXPIRED) close(event.error.message);
        else if (event.error.event_id === TO_HANDS_FREE) this.keepPush(event.error.message);
        else if (event.error.code !== NOTHING_TO_CANCEL) voice.update({ error: event.error.message });
        break;
      default:
    }
  }

  // Adds words of a turn. Words after a failure are those of another attempt.
  hear(message, text) {
    if (message.state === "failed") changed(message, { text: "", state: "open", error: null });
    this.append(message, text);
  }

  append(message, text) {
    changed(message, { text: message.text + text });
  }

  answering(id) {
    this.answer = this.message(id, "assistant");
    return this.answer;
  }

  speaking(id) {
    this.answering(id).player ||= new Player();
    return this.answer;
  }

  done(response) {
    voice.update({ isResponding: false });
    if (response.status === "cancelled") this.stopAnswer(); // also what was sent before the server took the cancel
    if (response.status === "failed") voice.update({ error: response.status_details?.error?.message || "it failed" });
    if (this.answer?.state === "open") {
      const states = { completed: "done", failed: "failed", incomplete: "done" };
      changed(this.answer, { state: states[response.status] || "done" });
    }
  }

  // Ends the session. What was not finished of its messages is stopped.
  close() {
    this.socket.onclose = null;
    this.socket.onmessage = null; // what is on the way would begin another answer
    this.socket.close(1000);
    for (const message of this.items.values()) cut(message);
  }
}

let goal = "off"; // the mode that the user has asked for; voice.mode follows when the server has configured the session
let attempts = 0; // each start and each end of a session begins a new one
let session = null;
let microphone = null;
let sentMs = 0; // since the push-to-talk key went down

function piece({ pcm, peaks }) {
  heard.peaks.push(...peaks);
  heard.peaks.splice(0, heard.peaks.length - KEPT_PEAKS);
  const { isHeld } = voice.value;
  if (goal === "push" && !isHeld) return;
  session?.send("input_audio_buffer.append", { audio: toBase64(pcm) });
  sentMs += PIECE_MS;
  if (isHeld && sentMs % SHOWN_MS === 0) voice.update({ sentS: sentMs / 1000 });
}

function close(error) {
  goal = "off";
  attempts += 1;
  session?.close();
  session = null;
  microphone?.close();
  microphone = null;
  speechEnds();
  voice.update({ ...OFF, error });
}

// Opens the microphone and a session. mode: "hands-free" or "push". Another start or a stop meanwhile cancels it.
async function start(model, mode) {
  close(null);
  stopAnswer();
  goal = mode;
  const mine = attempts;
  voice.update({ mode: "connecting" });
  let opened;
  try {
    opened = await Microphone.open(piece, () => close("the microphone was unplugged, or the browser has closed it"));
  } catch (error) {
    if (mine === attempts) close(`the microphone cannot be used: ${error.message}`);
    return;
  }
  if (mine !== attempts) {
    opened.close();
    return;
  }
  microphone = opened;
  session = new Session(model, goal === "hands-free");
  voice.update({ hasMicrophone: true });
}

// Ends the spoken conversation, and closes the microphone.
export function end() {
  close(null);
}

// Turns hands-free on or off. A push-to-talk session goes on as a hands-free one: it knows the conversation.
export function toggleHandsFree(model) {
  if (goal === "hands-free") close(null);
  else if (goal === "off") start(model, "hands-free");
  else {
    release();
    goal = "hands-free";
    session?.setHandsFree();
  }
}

// Push-to-talk: the key goes down. It may go up again before the microphone is open: then no sound is sent. Hands-free
// stays as it is: another session would not know its conversation.
export function hold(model) {
  if (voice.value.isHeld || goal === "hands-free") return;
  if (goal === "off") start(model, "push");
  sentMs = 0;
  voice.update({ isHeld: true, sentS: 0, error: null });
  interrupt();
  session?.send("input_audio_buffer.clear");
  speechBegins();
}

// Push-to-talk: the key goes up. What was said is answered, unless it is too short.
export function release() {
  if (!voice.value.isHeld) return;
  voice.update({ isHeld: false });
  speechEnds();
  if (sentMs < SHORTEST_MS) {
    session?.send("input_audio_buffer.clear");
    return;
  }
  session?.send("input_audio_buffer.commit");
  session?.send("response.create");
}

// Stops the answer that is made or played, at the server and here.
export function interrupt() {
  session?.interrupt();
  stopAnswer();
}
