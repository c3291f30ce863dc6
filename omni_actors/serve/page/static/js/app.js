// The page: its header, its panels, and its keys.

import { Chat } from "./chat.js";
import { call } from "./api.js";
import { watchFrozen } from "./chaos.js";
import { Deaths } from "./deaths.js";
import { Diagram } from "./diagram.js";
import { KeyPrompt, SameCall, Shortcuts } from "./dialogs.js";
import { abilities, chosen, follow, live, replicasOf, retryMs } from "./live.js";
import { RequestList } from "./requests.js";
import { Sparks } from "./sparks.js";
import { pause, useStore } from "./store.js";
import { html, render, useEffect, useLayoutEffect, useState } from "./view.js";
import { hold, interrupt, release, toggleHandsFree } from "./voice.js";

function currentTheme() {
  const { theme } = document.documentElement.dataset;
  return theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function isTyping(event) {
  return event.target.closest?.("input, textarea, select, dialog");
}

function useKeys({ model, can, hasRealtime, setDialog, toggleTheme }) {
  useLayoutEffect(() => {
    const talks = hasRealtime && can.hears;
    const actions = {
      "?": () => setDialog("keys"),
      "/": () => document.querySelector("#question")?.focus(),
      c: () => setDialog("call"),
      t: toggleTheme,
      h: () => talks && toggleHandsFree(model),
    };
    const down = (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog")) {
        interrupt();
        event.target.blur?.();
      }
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event)) return;
      if (event.code === "Space" && talks && !event.target.closest?.("button:not(.mic), summary, a")) {
        event.preventDefault();
        if (!event.repeat) hold(model);
      } else if (actions[event.key.toLowerCase()]) { // Caps Lock may be on
        event.preventDefault();
        if (!event.repeat) actions[event.key.toLowerCase()]();
      }
    };
    const up = (event) => event.code === "Space" && release();
    addEventListener("keydown", down);
    addEventListener("keyup", up);
    addEventListener("blur", release); // the key that goes up elsewhere is not seen here
    return () => {
      removeEventListener("blur", release);
      removeEventListener("keydown", down);
      removeEventListener("keyup", up);
    };
  });
}

function choose(event) {
  location.search = new URLSearchParams({ pipeline: event.target.value });
}

function Header({ state, isConnected, theme, toggleTheme, setDialog, pipelines }) {
  const isRestarting = replicasOf(state).some(({ replica }) => replica.state === "restarting");
  const status = !isConnected ? "no connection" : state.ready ? "ready" : state.errored ? "failed"
    : isRestarting ? "restarting" : "loading";
  return html`<header class="bar">
    <span class="brand"><span class="mark" aria-hidden="true"></span>omni_actors</span>
    ${pipelines.length > 1 ? html`<select aria-label="pipeline" value=${state.pipeline} onChange=${choose}>
      ${pipelines.map((name) => html`<option value=${name}>${name}</option>`)}</select>`
      : html`<span class="model">${state.pipeline}</span>`}
    <span class="status" data-state=${status} role="status"><i class="dot" aria-hidden="true"></i>${status}</span>
    <span class="space"></span>
    <button type="button" class="quiet" onClick=${() => setDialog("call")}>
      <span class="long">The same call</span><span class="short">Call</span></button>
    <button type="button" class="quiet" onClick=${toggleTheme} aria-label="dark or light">
      ${theme === "dark" ? "Light" : "Dark"}</button>
    <button type="button" class="quiet" onClick=${() => setDialog("keys")} aria-label="keys">?</button>
  </header>`;
}

// Why there is no stream of states, and what follows from it. Without a state there is nothing else to show.
function Problem({ problem, retries, state, pipelines }) {
  return html`<section class=${state ? "problem" : "problem panel alone"} role="alert">
    <p><b>${retries ? "No connection to the server" : "The server refuses"}:</b> ${problem}</p>
    ${retries ? html`<p class="hint">${state ? "What you see is old. " : ""}The page tries again …</p>`
      : html`<button type="button" onClick=${follow}>Try again</button>`}
    ${!state && chosen && !retries ? html`<p class="hint">or open
      ${pipelines.map((name) => html` <a href=${`/?${new URLSearchParams({ pipeline: name })}`}>${name}</a>`)}</p>` : null}
  </section>`;
}

function App({ facts }) {
  const { state, isConnected, needsKey, problem, retries } = useStore(live);
  const [dialog, setDialog] = useState(null);
  const [theme, setTheme] = useState(currentTheme());
  const toggleTheme = () => {
    const next = currentTheme() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem("omni_actors.theme", next);
    setTheme(next);
  };
  useEffect(() => {
    const preference = matchMedia("(prefers-color-scheme: dark)");
    const follows = () => setTheme(currentTheme());
    preference.addEventListener("change", follows);
    return () => preference.removeEventListener("change", follows);
  }, []);
  const can = abilities(state);
  const shared = { model: state?.pipeline, can, hasRealtime: facts.has_realtime, theme };
  useKeys({ ...shared, setDialog, toggleTheme });
  const close = () => setDialog(null);
  if (needsKey) return html`<${KeyPrompt} onKey=${() => { live.update({ needsKey: false }); follow(); }} />`;
  const trouble = problem ? html`<${Problem} ...${{ problem, retries, state, pipelines: facts.pipelines }} />` : null;
  if (!state) return trouble || html`<p class="hint boot">Waiting for the server …</p>`;
  return html`<${Header} ...${{ state, isConnected, theme, toggleTheme, setDialog, pipelines: facts.pipelines }} />
    ${trouble}
    <div class="grid">
      <${Diagram} hasChaos=${facts.has_chaos} />
      ${can.chats || can.draws ? html`<${Chat} ...${shared} />` : null}
      <div class="side"><${Sparks} ...${shared} /><${RequestList} /><${Deaths} /></div>
    </div>
    ${dialog === "keys" ? html`<${Shortcuts} onClose=${close} />` : null}
    ${dialog === "call" ? html`<${SameCall} model=${state.pipeline} can=${can} needsKey=${facts.needs_key} onClose=${close} />` : null}`;
}

// Returns what the page must know of the server. While that fails, the page says why, or asks for the key.
async function loadFacts(place) {
  for (;;) {
    try {
      return await (await call("/page/facts")).json();
    } catch (error) {
      if (error.status === 401) {
        place.removeAttribute("aria-busy");
        await new Promise((onKey) => render(html`<${KeyPrompt} onKey=${onKey} />`, place));
        continue;
      }
      const wait = retryMs(error);
      const next = wait === null ? "Reload the page to try again." : "The page tries again …";
      render(html`<p class="boot error" role="alert">The page cannot start: ${error.message}. ${next}</p>`, place);
      if (wait === null) return null;
      await pause(wait);
    }
  }
}

async function main() {
  const place = document.querySelector("#app");
  const facts = await loadFacts(place);
  if (facts === null) return;
  render(null, place);
  place.replaceChildren();
  place.removeAttribute("aria-busy");
  document.body.querySelector(":scope > header").remove();
  render(html`<${App} facts=${facts} />`, place);
  follow();
  if (facts.has_chaos) watchFrozen();
}

main();
