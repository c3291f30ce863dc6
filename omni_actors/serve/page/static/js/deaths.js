// What went wrong: deaths of workers with signal and last lines of stderr, and requests that failed.

import { chaos } from "./chaos.js";
import { live, replicasOf } from "./live.js";
import { useStore } from "./store.js";
import { clockTime, html } from "./view.js";

const SHOWN = 8;

function entriesOf(state) {
  const deaths = replicasOf(state).flatMap(({ name, replica }) => (replica.deaths || []).map((death) => ({
    key: `${name}/${death.generation}`,
    at: death.at,
    title: `${name}, generation ${death.generation}`,
    mark: death.signal || (death.pid ? `exit ${death.exit_code ?? "unknown"}` : "not started"),
    text: death.how,
    stderr: death.stderr,
  })));
  const failed = Object.values(state.requests).filter((each) => each.failure && each.state === "failed").map((each) => ({
    key: each.name,
    at: each.submitted + (each.total_s || 0),
    title: `request ${each.name.slice(0, 17)}`,
    mark: each.failure.type,
    text: each.failure.message,
    stderr: each.failure.stderr,
  }));
  return [...deaths, ...failed].sort((a, b) => b.at - a.at).slice(0, SHOWN);
}

export function Deaths() {
  const { state } = useStore(live);
  const { error } = useStore(chaos);
  const entries = entriesOf(state);
  return html`<section class="panel deaths" aria-label="Errors">
    <h2>Errors</h2>
    ${state.error ? html`<p class="error" role="alert">${state.error}</p>` : null}
    ${error ? html`<p class="error" role="alert">${error}</p>` : null}
    ${entries.length ? html`<ul>${entries.map((each) => html`<li key=${each.key}>
      <time>${clockTime(each.at)}</time><b>${each.title}</b><span class="how">${each.mark}</span>
      <p>${each.text}</p>
      ${each.stderr?.length ? html`<details><summary>last lines of stderr</summary><pre>${each.stderr.join("\n")}</pre>
        </details>` : null}</li>`)}</ul>` : html`<p class="hint">No worker has died, and no request has failed.</p>`}
  </section>`;
}
