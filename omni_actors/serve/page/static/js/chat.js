// The conversation panel: messages, waveforms, and the composer for typed, spoken and drawn requests.

import { ask, draw, talk } from "./conversation.js";
import { useClock, useStore } from "./store.js";
import { html, seconds, useEffect, useRef, useState } from "./view.js";
import { end, hold, interrupt, release, toggleHandsFree, voice } from "./voice.js";
import { Wave } from "./wave.js";
import { Words } from "./words.js";

const PICTURE_BYTES = 8 * 1024 * 1024;
const NEAR_END = 40; // pixels from the end of the messages within which the list follows the answer

function Message({ message }) {
  const { role, state, text, error, pictures, isPreview, firstSound, isSpoken } = message;
  const note = state === "open" && role === "assistant" && !text && !pictures.length;
  const isWordless = role === "user" && isSpoken && state === "done" && !text.trim(); // a cough, for example
  return html`<li class=${`message ${role}`} data-state=${state}>
    <span class="role">${role === "user" ? "you" : "answer"}</span>
    <div class="said">
      ${note ? html`<span class="thinking" aria-label="the answer is being made"><i></i><i></i><i></i></span>` : null}
      <${Words} message=${message} />
      ${isWordless ? html`<span class="minor">(no words)</span>` : null}
      ${pictures.map((url) => html`<img class=${isPreview && state === "open" ? "preview" : ""} src=${url}
        alt=${role === "user" ? "your picture" : "the picture of the answer"} />`)}
      ${error ? html`<p class="error" role="alert">${error}</p>` : null}
    </div>
    <span class="aside">${state === "stopped" ? "stopped" : firstSound ? `first sound ${seconds(firstSound / 1000)}` : ""}</span>
  </li>`;
}

function readPicture(file, done, failed) {
  if (file.size > PICTURE_BYTES) return failed("the picture is larger than 8 MB");
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(`the picture cannot be read: ${reader.error.message}`);
  return reader.readAsDataURL(file);
}

function Composer({ model, can, hasRealtime, isPlaying }) {
  const { isBusy, spoken } = useStore(talk);
  const { mode, isHeld, hasMicrophone, isSpeaking, isResponding, sentS, error } = useStore(voice);
  const [text, setText] = useState("");
  const field = useRef();
  const [draws, setDraws] = useState(false);
  const [picture, setPicture] = useState(null);
  const [problem, setProblem] = useState(null);
  const isDrawing = can.draws && (draws || !can.chats);
  const send = (event) => {
    event.preventDefault();
    const request = field.current.value.trim(); // newer than `text`, if the last letter was typed just now
    if (!request) return;
    setText("");
    setPicture(null);
    setProblem(null);
    interrupt();
    if (isDrawing) draw(model, request, picture);
    else ask(model, request, { isSpoken: can.speaks && talk.value.spoken, pictures: picture ? [picture] : [] });
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  const press = ({ currentTarget: button, pointerId, button: which, ctrlKey }) => {
    // Another button, or Ctrl and a click on a Mac, opens a menu, and the page never sees the button go up.
    if (which !== 0 || ctrlKey) return;
    button.setPointerCapture(pointerId); // the button moves when its label becomes longer
    hold(model);
  };
  const listens = mode === "hands-free" || mode === "connecting";
  const talks = hasRealtime && can.hears;
  const prompt = isDrawing ? "Describe a picture" : "Ask something";
  return html`<form class="composer" onSubmit=${send}>
    ${picture ? html`<p class="attached"><img src=${picture} alt="attached picture" />
      <button type="button" class="quiet" onClick=${() => setPicture(null)}>Remove picture</button></p>` : null}
    <textarea id="question" ref=${field} rows="2" placeholder=${`${prompt} …`} aria-label=${prompt} value=${text}
      onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey}></textarea>
    <div class="tools">
      ${talks ? html`<button type="button" class=${`mic ${isHeld ? "on" : ""}`} aria-pressed=${isHeld} disabled=${mode === "hands-free"}
          onPointerDown=${press} onPointerUp=${release} onPointerCancel=${release} onlostpointercapture=${release}
          title="Hold to talk (hold space)">${!isHeld ? "Hold to talk"
            : hasMicrophone ? `Listening … ${sentS.toFixed(1)} s` : "Wait for the microphone …"}</button>
        <button type="button" id="hands-free" class=${listens ? "on" : ""} aria-pressed=${listens}
          onClick=${() => toggleHandsFree(model)} title="Hands-free (h)">
          ${mode === "connecting" ? "Connecting …" : isSpeaking ? "Hears you" : listens ? "Hands-free on" : "Hands-free"}
        </button>
        ${mode === "push" ? html`<button type="button" id="end" onClick=${end}
          title="End the spoken conversation, and close the microphone">End</button>` : null}` : null}
      ${can.speaks && can.chats ? html`<label class="check"><input type="checkbox" checked=${spoken}
        onChange=${(event) => talk.update({ spoken: event.target.checked })} /> Speak answers</label>` : null}
      ${can.draws && can.chats ? html`<label class="check"><input type="checkbox" checked=${draws}
        onChange=${(event) => setDraws(event.target.checked)} /> Draw</label>` : null}
      ${can.sees ? html`<label class="file">Picture<input type="file" accept="image/*" onChange=${(event) => {
        const [file] = event.target.files;
        setProblem(null);
        if (file) readPicture(file, setPicture, setProblem);
        event.target.value = "";
      }} /></label>` : null}
      <span class="space"></span>
      ${isBusy || isResponding || isPlaying ? html`<button type="button" id="stop" onClick=${interrupt}
        title="Stop the answer (Esc)">Stop</button>` : null}
      <button class="primary" id="send" disabled=${!text.trim()}>${isDrawing ? "Draw" : "Ask"}</button>
    </div>
    ${error || problem ? html`<p class="error" role="alert">${error || problem}</p>` : null}
  </form>`;
}

export function Chat({ model, can, hasRealtime, theme }) {
  const { messages } = useStore(talk);
  const { mode } = useStore(voice);
  const list = useRef();
  const isAtEnd = useRef(true); // a viewer who has scrolled back to read stays there
  const onScroll = ({ currentTarget: each }) => {
    isAtEnd.current = each.scrollHeight - each.scrollTop - each.clientHeight < NEAR_END;
  };
  const followEnd = () => isAtEnd.current && list.current.scrollTo({ top: list.current.scrollHeight });
  const last = messages.at(-1);
  useEffect(() => {
    isAtEnd.current = true; // a new message is shown
    followEnd();
  }, [last?.id]);
  useEffect(() => void followEnd(), [last?.text.length, last?.error]);
  const isPlaying = messages.some((each) => each.player?.isPlaying);
  useClock(250, isPlaying);
  const isActive = mode !== "off" || isPlaying || last?.state === "open";
  const hasSound = can.speaks || can.hears;
  return html`<section class="panel chat" aria-label="Conversation">
    <h2>Conversation</h2>
    <ol class="messages" ref=${list} aria-label="Messages" aria-live="polite" aria-busy=${last?.state === "open"}
      tabindex="0" onScroll=${onScroll} onLoadCapture=${followEnd}>
      ${messages.length ? messages.map((each) => html`<${Message} key=${each.id} message=${each} />`)
        : html`<li class="hint">${can.chats ? "Type a question" : "Describe a picture"}${can.hears && hasRealtime
          ? ", or hold the space bar and say it." : "."} Press <kbd>?</kbd> for the keys.</li>`}
    </ol>
    ${hasSound ? html`<${Wave} isActive=${isActive} theme=${theme} />` : null}
    <${Composer} model=${model} can=${can} hasRealtime=${hasRealtime} isPlaying=${isPlaying} />
  </section>`;
}
