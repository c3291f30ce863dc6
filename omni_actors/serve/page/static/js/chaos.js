// The faults that the page injects, on a server that was started with --chaos.

import { call } from "./api.js";
import { chosen, live } from "./live.js";
import { Store, pause } from "./store.js";

const LOOK_MS = 1000; // how often the page looks which workers are frozen: another page may have done it

// error: why the latest fault failed. frozen: the pid of each frozen worker, by "stage.replica".
export const chaos = new Store({ error: null, frozen: {} });

function request(fields, method) {
  const query = new URLSearchParams({ ...fields, ...(chosen && { pipeline: chosen }) });
  return call(`/v1/chaos?${query}`, { method });
}

async function look() {
  const { frozen } = await (await request({}, "GET")).json();
  if (JSON.stringify(frozen) !== JSON.stringify(chaos.value.frozen)) chaos.update({ frozen });
}

// Learns which workers are frozen, as long as the page is shown. Why the server cannot be reached is said by `live`.
export async function watchFrozen() {
  for (;;) {
    if (live.value.isConnected && !document.hidden) await look().catch(() => {});
    await pause(LOOK_MS);
  }
}

export async function inject(stage, replica, fault) {
  chaos.update({ error: null });
  try {
    await request({ stage, replica, fault }, "POST");
    await look();
  } catch (error) {
    chaos.update({ error: error.message });
  }
}
