// The nodes of a cluster, in one line: each with its state. A system on one machine has none.

import { serverTime } from "./live.js";
import { useClock } from "./store.js";
import { html, seconds } from "./view.js";

export function Nodes({ nodes, hasLinks }) {
  const all = Object.entries(nodes || {});
  const isTroubled = all.some(([, node]) => node.state !== "alive");
  useClock(500, isTroubled);
  if (!all.length) return null;
  return html`<ul class="nodes" aria-label="Nodes">
    ${all.map(([name, node]) => html`<li key=${name} data-state=${node.state}
      title=${[node.parent ? "the parent's node" : `agent: pid ${node.agent_pid || "none"}`, node.why].filter(Boolean).join("; ")}>
      <i class="dot" aria-hidden="true"></i><b>${name}</b>
      ${node.state === "alive" ? null : html`<span>${node.state} for ${seconds(Math.max(0, serverTime() - node.since))}</span>`}
    </li>`)}
    ${hasLinks ? html`<li><i class="link" aria-hidden="true"></i>link between nodes</li>` : null}
  </ul>`;
}
