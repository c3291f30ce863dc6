// What every component imports, and how figures are written.

export { html, render, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/htm-preact-3.1.1.js";

const UNITS = ["B", "KB", "MB", "GB", "TB"];

export function bytes(count) {
  const power = Math.min(UNITS.length - 1, count < 1 ? 0 : Math.floor(Math.log10(count) / 3));
  const value = count / 1000 ** power;
  return `${value >= 100 || power === 0 ? value.toFixed(0) : value.toPrecision(3)} ${UNITS[power]}`;
}

export function seconds(value) {
  if (value === undefined || value === null) return "–";
  if (value < 0.9995) return `${Math.round(1000 * value)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.round(value)} s`;
}

export function clockTime(unix) {
  return new Date(1000 * unix).toLocaleTimeString([], { hour12: false });
}
