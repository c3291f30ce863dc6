// The text of a spoken answer, whose words light up as they are heard.

import { heardLetters } from "./conversation.js";
import { useClock } from "./store.js";
import { html } from "./view.js";

export function Words({ message }) {
  const isMoving = Boolean(message.player) && (message.state === "open" || message.player.isPlaying);
  useClock(80, isMoving);
  if (!message.player) return html`<span>${message.text}</span>`;
  const heard = heardLetters(message);
  let at = 0;
  return message.text.split(/(\s+)/).map((word) => {
    const isHeard = at < heard;
    at += word.length;
    return word.trim() ? html`<span class=${isHeard ? "w heard" : "w"}>${word}</span>` : word;
  });
}
