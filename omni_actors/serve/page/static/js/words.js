// The text of a spoken answer, whose words light up as they are heard.
//
// The server sends text and sound apart, without the times of words. So the time of a word is estimated: when all sound
// is there, from the word's place in the text; before, from the usual pace of speech.

import { useClock } from "./store.js";
import { html } from "./view.js";

const LETTERS_PER_S = 14;

// Returns how many letters of a message's text have been heard.
export function heardLetters({ text, player, state }) {
  if (!player || !player.received) return player ? 0 : text.length;
  const { played, received } = player;
  if (state === "done" && played >= received - 0.02) return text.length;
  const letters = state === "open" ? played * LETTERS_PER_S : (text.length * played) / received;
  return Math.min(text.length, letters);
}

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
