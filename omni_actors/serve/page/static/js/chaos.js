// The faults that the page injects, on a server that was started with --chaos.

import { call } from "./api.js";
import { chosen } from "./live.js";
import { Store } from "./store.js";

// error: why the latest fault failed. frozen: the pid of each frozen worker, by "stage.replica".
export const chaos = new Store({ error: null, frozen: {} });

export async function inject(stage, replica, fault) {
  chaos.update({ error: null });
  const query = new URLSearchParams({ stage, replica, fault, ...(chosen && { pipeline: chosen }) });
  try {
    const done = await (await call(`/v1/chaos?${query}`, { method: "POST" })).json();
    const pid = { freeze: done.pid, thaw: null }[fault];
    if (pid !== undefined) chaos.update({ frozen: { ...chaos.value.frozen, [`${stage}.${replica}`]: pid } });
  } catch (error) {
    chaos.update({ error: error.message });
  }
}
