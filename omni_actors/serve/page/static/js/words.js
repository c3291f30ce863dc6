// The text of a spoken answer, whose words light up as they are heard. Only the words that light up now have elements of
// their own: a long answer is shown at the cost of a short one.

import { heardLetters } from "./conversation.js";
import { useClock } from "./store.js";
import { html } from "./view.js";

const NEAR = 12; // words, and spaces between them, on each side of the one that is heard now

export function Words({ message }) {
  const isMoving = Boolean(message.player) && (message.state === "open" || message.player.isPlaying);
  useClock(80, isMoving);
  if (!message.player) return html`<span>${message.text}</span>`;
  const heard = heardLetters(message);
  const words = message.text.split(/(\s+)/).filter(Boolean);
  let next = 0; // the number of the first word that was not heard
  for (let at = 0; next < words.length && at < heard; next += 1) at += words[next].length;
  const [from, to] = [Math.max(0, next - NEAR), next + NEAR];
  const before = words.slice(0, from).join("");
  const after = words.slice(to).join("");
  return html`${before && html`<span class="w heard">${before}</span>`}
    ${words.slice(from, to).map((word, index) => html`<span key=${from + index}
      class=${from + index < next ? "w heard" : "w"}>${word}</span>`)}
    ${after && html`<span class="w">${after}</span>`}`;
}
