// The live state: reads the stream of /v1/state, applies its changes, and derives rates and recoveries from it.

import { ApiError, call, events } from "./api.js";
import { Store, pause } from "./store.js";

const WINDOW_MS = 1000; // rates are means over this time
const RETRY_MS = 1000;
const HIDDEN_MS = 10_000; // a page that is hidden for so long leaves its stream: a browser opens six connections to a
// server, for all of its tabs together
const SILENCE_MS = 30_000; // a server that sends nothing for so long is lost: it sends a comment every ten seconds

// state: the document of /v1/state. isConnected: whether its stream is open. needsKey: whether the server wants a key.
// problem: why the stream is not open. retries: whether it is tried again by itself.
// recoveries: by "stage.replica", the seconds from the latest death until the replica was ready again. loading: by the
// same, {pid, since}: the worker that loads there, and when the page first saw it, in the server's time.
export const live = new Store(
  { state: null, isConnected: false, needsKey: false, problem: null, retries: true, recoveries: {}, loading: {} });
let ahead = -Infinity; // the server's Unix time less performance.now(), in seconds, by the state that came the quickest
let isFollowing = false;
const samples = []; // the rings' counters of the last seconds: [ms, {ring: [messages, bytes]}]

function merge(document, patch) {
  const merged = { ...document };
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete merged[name];
    else if (typeof value === "object" && !Array.isArray(value)) merged[name] = merge(merged[name] || {}, value);
    else merged[name] = value;
  }
  return merged;
}

export function replicasOf(state) {
  return Object.entries(state?.stages || {}).flatMap(([stage, each]) =>
    Object.entries(each.replicas).map(([number, replica]) => ({ stage, number, name: `${stage}.${number}`, replica })));
}

// Returns the server's Unix time in seconds. The browser's own clock may be set differently.
export function serverTime() {
  return ahead + performance.now() / 1000;
}

// before: the state before it in the same connection, if there was one. What happened between two connections is unknown.
function take(state, before) {
  if (!before) ahead = -Infinity; // another server, maybe
  ahead = Math.max(ahead, state.at - performance.now() / 1000); // else the time would go back when a state comes late
  const [found, loading] = [{ ...live.value.recoveries }, {}];
  const earlier = Object.fromEntries(replicasOf(before).map((each) => [each.name, each.replica]));
  for (const { name, replica } of replicasOf(state)) {
    const since = earlier[name]?.down_since;
    if (since && !replica.down_since) found[name] = Math.max(0, state.at - since);
  }
  for (const { name, replica: { pid, state: is } } of replicasOf(state)) {
    if (!pid || !["loading", "restarting"].includes(is)) continue;
    const [known, last] = [live.value.loading[name], earlier[name]];
    if (known?.pid === pid) loading[name] = known;
    else if (last?.pid !== pid) loading[name] = { pid, since: state.at }; // else the worker is ending
  }
  const counters = {};
  for (const [name, ring] of Object.entries(state.rings)) counters[name] = [ring.messages, ring.payload_bytes];
  samples.push([performance.now(), counters]);
  while (samples.length > 2 && samples[1][0] < performance.now() - WINDOW_MS) samples.shift();
  live.update({ state, recoveries: found, loading, isConnected: true, needsKey: false, problem: null });
}

// Returns the messages and the bytes per second of a ring now.
export function rateOf(ring) {
  const last = samples.at(-1)?.[1][ring];
  const since = performance.now() - WINDOW_MS;
  const first = (samples.findLast(([at]) => at <= since) || samples[0])?.[1][ring] || [0, 0];
  if (!last || last[0] < first[0]) return { messages: 0, bytes: 0 };
  const seconds = WINDOW_MS / 1000;
  return { messages: (last[0] - first[0]) / seconds, bytes: (last[1] - first[1]) / seconds };
}

// The pipeline that the page's address names, of several; empty: the server's first.
export const chosen = new URLSearchParams(location.search).get("pipeline") || "";

// Returns after how many ms a request that failed is worth another try; null: it would fail again.
export function retryMs(error) {
  if (!(error instanceof ApiError)) return null;
  const isPassing = error.status === 0 || error.status === 429 || error.status >= 500;
  return isPassing ? Math.max(RETRY_MS, 1000 * error.retryAfterS) : null;
}

// Watches whether the page is hidden. Returns a signal that aborts when it has been for HIDDEN_MS, and how to end that.
function untilHidden() {
  const ending = new AbortController();
  let timer;
  const watch = () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(() => ending.abort(), HIDDEN_MS);
  };
  document.addEventListener("visibilitychange", watch);
  watch();
  const unwatch = () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", watch);
  };
  return { signal: ending.signal, unwatch };
}

async function untilShown() {
  while (document.hidden) {
    await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  }
}

// Follows the stream, unless it is followed already.
export async function follow() {
  if (isFollowing) return;
  isFollowing = true;
  try {
    await followAlone();
  } finally {
    isFollowing = false;
  }
}

// After a failure it connects again, unless the server refuses for a reason that stays.
async function followAlone() {
  live.update({ retries: true });
  for (;;) {
    let [problem, wait] = ["the server has ended the connection", RETRY_MS];
    const { signal, unwatch } = untilHidden();
    try {
      let state = null;
      samples.length = 0;
      const query = new URLSearchParams({ stream: "true", ...(chosen && { pipeline: chosen }) });
      for await (const [name, data] of events(await call(`/v1/state?${query}`, { signal }), SILENCE_MS)) {
        const before = state;
        if (name === "state") state = data;
        else if (name === "change") state = merge(state, data);
        else continue;
        take(state, before);
      }
    } catch (error) {
      if (error.name === "AbortError") {
        await untilShown();
        continue;
      }
      if (error.status === 401) {
        live.update({ isConnected: false, needsKey: true });
        return;
      }
      [problem, wait] = [error.message, retryMs(error)];
    } finally {
      unwatch();
    }
    live.update({ isConnected: false, problem, retries: wait !== null });
    if (wait === null) return;
    await pause(wait);
  }
}

// What the pipeline can do, from the kinds of input that its stages accept and the modalities that they emit.
export function abilities(state) {
  const stages = Object.values(state?.stages || {});
  const accepts = new Set(stages.flatMap((stage) => stage.accepts));
  const emits = new Set(stages.map((stage) => stage.emits));
  const chats = accepts.has("messages") && emits.has("text");
  return {
    chats,
    hears: chats && accepts.has("audio"),
    speaks: emits.has("audio"),
    sees: accepts.has("image"),
    draws: accepts.has("messages") && emits.has("image"),
  };
}
