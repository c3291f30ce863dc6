// A value that components subscribe to. A change is shown in the next frame, however many changes there are in between.

import { useEffect, useState } from "../vendor/htm-preact-3.1.1.js";

export class Store {
  constructor(value) {
    this.value = value;
    this.listeners = new Set();
    this.isScheduled = false;
  }

  // Merges fields into the value, or only announces that something inside it has changed.
  update(fields = {}) {
    this.value = { ...this.value, ...fields };
    if (this.isScheduled) return;
    this.isScheduled = true;
    setTimeout(() => {
      this.isScheduled = false;
      for (const listener of [...this.listeners]) listener(this.value);
    }, 16);
  }
}

export function pause(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

export function useStore(store) {
  const [value, setValue] = useState(store.value);
  useEffect(() => {
    setValue(store.value);
    store.listeners.add(setValue);
    return () => store.listeners.delete(setValue);
  }, [store]);
  return value;
}

// Renders the component again each `ms` while `isActive`.
export function useClock(ms, isActive = true) {
  const [, tick] = useState(0);
  useEffect(() => {
    if (!isActive) return undefined;
    const timer = setInterval(() => tick((count) => count + 1), ms);
    return () => clearInterval(timer);
  }, [ms, isActive]);
}
