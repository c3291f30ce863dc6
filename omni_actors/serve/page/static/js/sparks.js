// The sparklines: the time to the first sound (text, picture) of the latest requests, and the rate of text.

import { live, rateOf } from "./live.js";
import { useClock, useStore } from "./store.js";
import { html, seconds, useEffect, useMemo, useRef } from "./view.js";

const POINTS = 120;
const STEP_MS = 500;

function Spark({ xs, ys, theme, hasPoints }) {
  const place = useRef();
  const plot = useRef();
  useEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const stroke = style.getPropertyValue("--accent").trim();
    const options = {
      width: place.current.clientWidth || 160,
      height: 44,
      padding: [4, 2, 4, 2],
      cursor: { show: false },
      legend: { show: false },
      axes: [{ show: false }, { show: false }],
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1e-9)] } },
      series: [{}, { stroke, width: 1.6, fill: `${stroke}22`, points: { show: hasPoints, size: 6, fill: stroke } }],
    };
    plot.current = new window.uPlot(options, [xs, ys], place.current);
    const observer = new ResizeObserver(([entry]) =>
      plot.current.setSize({ width: Math.floor(entry.contentRect.width), height: 44 }));
    observer.observe(place.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
    };
  }, [theme]);
  useEffect(() => plot.current?.setData([xs, ys]), [xs, ys]);
  return html`<div class="spark" ref=${place} aria-hidden="true"></div>`;
}

// Returns how many chunks of text the stages send per second: a token each, but those that complete no character.
function textRate(state) {
  const best = {};
  for (const [name, ring] of Object.entries(state.rings)) {
    const stage = ring.producer.slice(0, ring.producer.lastIndexOf("."));
    if (state.stages[stage]?.emits !== "text") continue;
    best[ring.producer] = Math.max(best[ring.producer] || 0, rateOf(name).messages);
  }
  return Object.values(best).reduce((sum, rate) => sum + rate, 0);
}

export function Sparks({ theme, can }) {
  const { state } = useStore(live);
  useClock(STEP_MS);
  const history = useMemo(() => ({ at: -Infinity, tokens: [] }), []);
  if (performance.now() - history.at > STEP_MS * 0.9) {
    history.at = performance.now();
    history.tokens = [...history.tokens, textRate(state)].slice(-POINTS);
  }
  const requests = Object.values(state.requests).sort((a, b) => a.submitted - b.submitted);
  const first = can.speaks ? "ttfa_s" : "ttft_s";
  const firsts = requests.map((each) => each[first] ?? (can.draws && !can.chats ? each.total_s : undefined))
    .filter((value) => value !== undefined);
  const title = can.speaks ? "Time to first sound" : can.chats ? "Time to first text" : "Time to a picture";
  const rows = [[title, firsts.length ? seconds(firsts.at(-1)) : "–", firsts, true]];
  if (can.chats) rows.push(["Tokens per second", history.tokens.at(-1).toFixed(1), history.tokens, false]);
  return html`<section class="panel sparks" aria-label="Latency and rate">
    ${rows.map(([name, value, ys, hasPoints]) => html`<div key=${name}><h2>${name}</h2><output>${value}</output>
      <${Spark} xs=${ys.map((_, index) => index)} ys=${ys} theme=${theme}
        hasPoints=${hasPoints} /></div>`)}
  </section>`;
}
