// The diagram: stages with their replicas as boxes, and the rings between them as lines that move while bytes flow.

import { chaos, inject } from "./chaos.js";
import { live, rateOf, serverTime } from "./live.js";
import { layout } from "./layout.js";
import { Nodes } from "./nodes.js";
import { useClock, useStore } from "./store.js";
import { bytes, html, seconds, useLayoutEffect, useRef, useState } from "./view.js";

const DASHES = 12; // pixels of a dash and the gap after it, as in page.css
const DASH_MS = 58; // for one of them

// usual: the load time of an earlier worker of the stage, seconds.
function Replica({ stage, number, replica, recovered, loading, usual, hasChaos, limit }) {
  useClock(100, Boolean(replica.down_since));
  const label = replica.standby && replica.state === "ready" ? "standby" : replica.state;
  const down = replica.down_since ? Math.max(0, serverTime() - replica.down_since) : null;
  const facts = [`generation ${replica.generation}`, replica.note];
  return html`<div class="replica" data-state=${label} title=${facts.join(", ")}>
    <div class="line"><i class="dot" aria-hidden="true"></i><b>${label}</b>
      ${replica.node ? html`<span class="node" title=${`on node ${replica.node}`}>${replica.node}</span>` : null}
      <span class="figures">${replica.pid ? html`<span class="unit">pid </span>${replica.pid}`
        : "no worker"} · g${replica.generation}</span></div>
    <div class="line minor">${down !== null ? html`<span class="clock" role="timer">down ${seconds(down)}</span>
          ${loading && usual ? html`<${Loading} since=${loading.since} usual=${usual} note=${replica.note} />` : null}`
        : recovered !== undefined ? html`<span class="recovered"
          title="from the latest death until the replica was ready">recovered in ${seconds(recovered)}</span>`
        : replica.state === "ready" ? html`<span>loaded in ${seconds(replica.load_s)}</span>`
        : loading && usual ? html`<${Loading} since=${loading.since} usual=${usual} note=${replica.note} />`
        : html`<span class="load"><i></i><span>${replica.note}</span></span>`}
      <span class="figures">${replica.requests ? `${replica.requests} active` : ""}</span></div>
    ${hasChaos ? html`<${Faults} ...${{ stage, number, replica, limit }} />` : null}
  </div>`;
}

// How much of the usual time a worker has loaded.
function Loading({ since, usual, note }) {
  const percent = Math.round(100 * Math.max(0, Math.min(1, (serverTime() - since) / usual)));
  const background = `linear-gradient(90deg, var(--amber) ${percent}%, var(--line) 0)`;
  return html`<span class="load" title=${`an earlier worker of this stage loaded in ${seconds(usual)}`}>
    <i role="progressbar" aria-label="loading" aria-valuenow=${percent} style=${{ animation: "none", background }} />
    <span>${note}</span></span>`;
}

// Returns how long a worker of the stage took to load, seconds; undefined: none has yet.
function loadTime(stage) {
  return Object.values(stage.replicas).find((each) => each.load_s)?.load_s;
}

const FAULTS = {
  kill: () => "SIGKILL: the worker dies at once",
  freeze: (limit) => `SIGSTOP: the worker makes no progress; after ${limit} s the supervisor replaces it`,
  thaw: () => "SIGCONT: the frozen worker goes on",
  starve: () => "the worker runs a tenth of the time, for 5 s",
};

function Faults({ stage, number, replica, limit }) {
  const { frozen } = useStore(chaos);
  const isFrozen = Boolean(replica.pid) && frozen[`${stage}.${number}`] === replica.pid;
  return html`<div class="chaos" role="group" aria-label=${`faults for ${stage}.${number}`}>
    ${["kill", isFrozen ? "thaw" : "freeze", "starve"].map((fault) => html`<button type="button" key=${fault}
      disabled=${!replica.pid} data-fault=${fault} title=${FAULTS[fault](limit)}
      onClick=${() => inject(stage, number, fault)}>${fault}</button>`)}</div>`;
}

// Returns where the dashes of lines with bytes are now. They move when the page shows a new state, and not in each frame
// of the screen: an animation would paint the diagram 60 times a second, with the CPU on many machines.
function dashOffset() {
  return -((performance.now() / DASH_MS) % DASHES);
}

function Edge({ path, label, rate, used, capacity, links }) {
  const isFlowing = rate.bytes > 0;
  const share = capacity ? used / capacity : 0;
  const width = 1.5 + (isFlowing ? Math.min(3, Math.log10(1 + rate.bytes / 100) * 0.7) : 0);
  return html`<g class="edge" data-flows=${isFlowing} data-links=${links.length > 0}>
    <title>${[`${bytes(used)} of ${bytes(capacity)} used`, ...new Set(links)].join("\n")}</title>
    <path d=${path} stroke-width=${width} marker-end="url(#arrow)" />
    ${isFlowing ? html`<path class="flow" d=${path} stroke-width=${width}
      style=${{ strokeDashoffset: dashOffset() }} />` : null}
    <g class="label" data-used=${used > 0} transform=${`translate(${label.x} ${label.y}) rotate(${label.turn || 0})`}>
      <rect class="gauge" x="-17" y="5" width="34" height="3" rx="1.5" />
      <rect class="fill" x="-17" y="5" width=${34 * Math.min(1, share)} height="3" rx="1.5" />
      ${isFlowing ? html`<text y="0" text-anchor="middle">${bytes(rate.bytes)}/s</text>` : null}
    </g></g>`;
}

const NO_RINGS = { used: 0, capacity: 0, rate: { messages: 0, bytes: 0 }, links: [] };

// Sums the rings of all replicas of two stages.
function edgesOf(state) {
  const edges = new Map();
  for (const [name, ring] of Object.entries(state.rings)) {
    const [from, to] = [ring.producer, ring.consumer].map((each) => each.slice(0, each.lastIndexOf(".")));
    const found = edges.get(`${from}>${to}`) || { ...NO_RINGS, from, to, links: [] };
    const rate = rateOf(name);
    found.used += ring.used;
    found.capacity += ring.capacity;
    const link = state.links?.[name];
    if (link) found.links.push(`link ${link.from_node} → ${link.to_node}`);
    found.rate = { messages: found.rate.messages + rate.messages, bytes: found.rate.bytes + rate.bytes };
    edges.set(`${from}>${to}`, found);
  }
  return edges;
}

export function Diagram({ hasChaos }) {
  const { state, recoveries, loading } = useStore(live);
  useClock(500);
  const box = useRef();
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    setWidth(box.current.clientWidth); // before the first paint, so that nothing below moves
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const plan = width ? layout(state.stages, width, hasChaos) : null;
  const rings = edgesOf(state);
  return html`<section class="panel stages" aria-label="Stages and rings">
    <h2>Stages <small>${state.in_flight} of ${state.max_requests} requests in flight${
      state.waiting ? `, ${state.waiting} waiting` : ""}</small></h2>
    <${Nodes} nodes=${state.nodes} hasLinks=${Object.keys(state.links || {}).length > 0} />
    <div class="diagram" ref=${box} style=${{ height: plan ? `${plan.height}px` : "180px" }}>
      ${plan ? html`<svg width=${width} height=${plan.height} aria-hidden="true">
        <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
          markerUnits="userSpaceOnUse" orient="auto"><path d="M0 .8 7 4 0 7.2z" /></marker></defs>
        ${plan.edges.map((edge) => html`<${Edge} key=${edge.name} ...${edge} ...${rings.get(edge.name)
          || NO_RINGS} />`)}</svg>` : null}
      ${plan ? plan.clients.map((each) => html`<div class="client" style=${each.style}>${each.text}</div>`) : null}
      ${plan ? Object.entries(state.stages).map(([name, stage]) => html`<article key=${name} class="stage" tabindex="0"
        style=${plan.boxes[name].style} aria-label=${`stage ${name}`}>
        <header><b title=${name}>${name}</b><span>${stage.engine.split(":").pop()}</span></header>
        ${Object.entries(stage.replicas).map(([number, replica]) => html`<${Replica} key=${number} stage=${name}
          number=${number} replica=${replica} recovered=${recoveries[`${name}.${number}`]}
          loading=${loading[`${name}.${number}`]} usual=${replica.load_s || loadTime(stage)} hasChaos=${hasChaos}
          limit=${stage.step_timeout_s} />`)}
        ${Object.keys(stage.replicas).length ? null : html`<p class="minor">no replica</p>`}
      </article>`) : null}
    </div>
  </section>`;
}
