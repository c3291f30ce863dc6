// The dialogs: the key, the shortcuts, and the same call as curl and as Python.

import { key } from "./api.js";
import { talk } from "./conversation.js";
import { html, useLayoutEffect, useRef, useState } from "./view.js";

export const SHORTCUTS = [
  ["?", "this list"],
  ["/", "write a question"],
  ["Enter", "send it; Shift+Enter begins a new line"],
  ["Space", "hold it to talk"],
  ["h", "hands-free on and off"],
  ["Esc", "stop the answer, or close a dialog"],
  ["c", "the same call as curl and Python"],
  ["t", "dark or light"],
  ["Tab", "go through stages, requests and buttons"],
];

// The browser closes the dialog, and gives the focus back to what had it before. Then `onClose` is called.
export function Dialog({ title, onClose, children }) {
  const dialog = useRef();
  useLayoutEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} onClose=${onClose} aria-label=${title}>
    <header><h2>${title}</h2><button type="button" class="quiet" onClick=${() => dialog.current.close()}>Close</button>
    </header>${children}</dialog>`;
}

export function Shortcuts({ onClose }) {
  return html`<${Dialog} title="Keys" onClose=${onClose}><dl class="keys">${SHORTCUTS.map(([name, what]) => html`<div>
    <dt><kbd>${name}</kbd></dt><dd>${what}</dd></div>`)}</dl><//>`;
}

export function KeyPrompt({ onKey }) {
  const [value, setValue] = useState("");
  const isPossible = key.isPossible(value);
  const note = value.trim() && !isPossible ? "A key has printable ASCII characters only."
    : key.get() ? "The server does not accept this key." : "It stays in this tab, and is gone when you close it.";
  const submit = (event) => {
    event.preventDefault();
    if (!isPossible) return;
    key.set(value);
    onKey();
  };
  return html`<section class="panel key"><form onSubmit=${submit}>
    <h2>This server needs an API key</h2>
    <p role="status">${note}</p>
    <input type="password" autocomplete="off" aria-label="API key" value=${value} autofocus
      onInput=${(event) => setValue(event.target.value)} />
    <button class="primary" disabled=${!isPossible}>Continue</button></form></section>`;
}

function shell(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function shortened(body) {
  return JSON.parse(JSON.stringify(body, (_, value) =>
    typeof value === "string" && value.startsWith("data:") ? `${value.slice(0, 32)}…` : value));
}

export function asCurl({ path, body }, needsKey) {
  const header = needsKey ? ' \\\n  -H "Authorization: Bearer $OMNI_ACTORS_API_KEY"' : "";
  const json = shell(JSON.stringify(shortened(body), null, 2));
  return `curl -N ${location.origin}${path}${header} \\\n  -H 'Content-Type: application/json' \\\n  -d ${json}`;
}

function python(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

const METHODS = {
  "/v1/chat/completions": "chat.completions.create",
  "/v1/images/generations": "images.generate",
  "/v1/images/edits": "images.edit",
};
const PICTURE = '    image=open("picture.png", "rb"),'; // the client sends pictures as files

export function asPython({ path, body }, needsKey) {
  const lines = Object.entries(shortened(body)).map(([name, value]) =>
    name === "images" ? PICTURE : `    ${name}=${python(value)},`);
  const apiKey = needsKey ? 'os.environ["OMNI_ACTORS_API_KEY"]' : '"none"';
  const client = `${needsKey ? "import os\n\n" : ""}from openai import OpenAI\n
client = OpenAI(base_url="${location.origin}/v1", api_key=${apiKey})`;
  return `${client}\nfor event in client.${METHODS[path]}(\n${lines.join("\n")}\n):\n    print(event)`;
}

// What is shown before there is a call.
function example(model, can) {
  if (can.draws && !can.chats) {
    return { path: "/v1/images/generations", body: { model, prompt: "a red circle", stream: true, partial_images: 3 } };
  }
  const messages = [{ role: "user", content: "What is the capital of France?" }];
  return { path: "/v1/chat/completions", body: { model, messages, stream: true } };
}

// Only pages from https: and from localhost may write to the clipboard. Others select the text.
async function toClipboard(text, place) {
  try {
    await navigator.clipboard.writeText(text);
    return "Copied";
  } catch {
    getSelection().selectAllChildren(place);
    return "Selected: copy it with Ctrl+C";
  }
}

export function SameCall({ model, can, needsKey, onClose }) {
  const made = talk.value.lastCall || example(model, can);
  const [done, setDone] = useState({});
  const copy = async ({ currentTarget: button }, name, text) =>
    setDone({ [name]: await toClipboard(text, button.parentElement.querySelector("pre")) });
  const found = [["curl", asCurl(made, needsKey)], ["Python", asPython(made, needsKey)]];
  return html`<${Dialog} title="The same call" onClose=${onClose}>${found.map(([name, text]) => html`<div class="code">
    <h3>${name}</h3><button type="button" class="quiet" onClick=${(event) => copy(event, name, text)}>
      ${done[name] || "Copy"}</button><pre tabindex="0">${text}</pre></div>`)}<//>`;
}
