// Each request as a bar chart: when it waited, when each stage computed, and what a death cost.

import { live, serverTime } from "./live.js";
import { useClock, useStore } from "./store.js";
import { html, seconds } from "./view.js";

const SHOWN = 8;
const KINDS = ["queue", "transfer", "step", "run", "lost", "resume"];
const MEANINGS = {
  queue: "waits for a replica, or for the stage's engine loop",
  transfer: "the first chunk is on its way",
  step: "the engine has input",
  run: "the stage has not finished yet",
  lost: "the work of a worker that died",
  resume: "from a death until the stage's next new output",
};

function Bars({ request, now }) {
  const age = now - request.submitted;
  const total = Math.max(request.total_s ?? age, 0.001);
  const rows = [...(request.bars.some((bar) => !bar.stage) ? [undefined] : []), ...request.stages];
  return html`<div class="bars">${rows.map((stage) => html`<div class="row"><span>${stage || "waits"}</span>
    <div class="track">${request.bars.filter((bar) => bar.stage === stage).map((bar) => {
      const ended = bar.ended ?? total;
      const left = (100 * bar.began) / total;
      const width = Math.max(0.4, (100 * (ended - bar.began)) / total);
      return html`<i data-kind=${bar.kind} style=${{ left: `${Math.min(left, 99.6)}%`, width: `${Math.min(width, 100 - left)}%` }}
        title=${`${stage || "request"}: ${bar.kind} ${seconds(ended - bar.began)}`}></i>`;
    })}</div></div>`)}</div>`;
}

function RequestRow({ request, isOpen }) {
  useClock(100, request.total_s === undefined);
  const facts = [
    request.ttft_s !== undefined && `text ${seconds(request.ttft_s)}`,
    request.ttfa_s !== undefined && `sound ${seconds(request.ttfa_s)}`,
    request.underruns > 0 && `${request.underruns} ${request.underruns > 1 ? "underruns" : "underrun"}`,
    request.replays > 0 && `${request.replays} ${request.replays > 1 ? "resumes" : "resume"}`,
  ].filter(Boolean);
  return html`<details class="request" data-state=${request.state} open=${isOpen}>
    <summary><i class="dot" aria-hidden="true"></i><code>${request.name.slice(0, 17)}</code><span>${facts.join(" · ")}</span>
      <b>${request.total_s === undefined ? request.state : seconds(request.total_s)}</b></summary>
    <${Bars} request=${request} now=${serverTime()} />
    ${request.failure && request.state === "failed" ? html`<p class="error">${request.failure.type}: ${request.failure.message}</p>` : null}
  </details>`;
}

export function RequestList() {
  const { state } = useStore(live);
  const requests = Object.values(state.requests).sort((a, b) => b.submitted - a.submitted).slice(0, SHOWN);
  return html`<section class="panel requests" aria-label="Requests">
    <h2>Requests <small class="legend">${KINDS.map((kind) => html`<span title=${MEANINGS[kind]}><i data-kind=${kind}></i>
      ${kind}</span>`)}</small></h2>
    ${requests.length ? requests.map((each, index) => html`<${RequestRow} key=${each.name} request=${each}
      isOpen=${index < 2} />`) : html`<p class="hint">No request yet.</p>`}
  </section>`;
}
