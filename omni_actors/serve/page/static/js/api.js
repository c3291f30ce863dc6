// Requests to the server: the key, errors, and streams of server-sent events.

const KEY = "omni_actors.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => sessionStorage.setItem(KEY, value.trim()),
  // Whether a header can carry it. The server accepts no other key.
  isPossible: (value) => /^[\x20-\x7e]+$/.test(value.trim()),
  // The key as a subprotocol of a WebSocket, which cannot hold every character of a key: in base64url.
  get subprotocol() {
    const encoded = btoa(key.get()).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
    return `omni-actors-base64url-api-key.${encoded}`;
  },
};

// What the server or the network did not do. status: 0 without an answer. retryAfterS: what the server asks for, or null.
export class ApiError extends Error {
  constructor(status, message, retryAfterS = null) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

// Throws what a fetch, or reading its response, has failed with. An abort stays what it is.
function refuse(error, message) {
  throw error.name === "AbortError" ? error : new ApiError(0, message);
}

// Sends a request with the key, and returns the response. Throws ApiError unless its status is a success.
export async function call(path, { body, method, signal } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: method || (body === undefined ? "GET" : "POST"),
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
  }).catch((error) => refuse(error, "the server cannot be reached"));
  if (response.ok) return response;
  const error = await response.json().then((found) => found.error, () => null);
  const retryAfterS = parseInt(response.headers.get("retry-after"), 10) || null;
  throw new ApiError(response.status, error?.message || `the server answered ${response.status}`, retryAfterS);
}

// Returns what `reader` reads next. Throws ApiError if the connection breaks, or sends nothing for `silenceMs`.
async function read(reader, silenceMs) {
  let timer;
  const silence = new Promise((_, reject) => {
    const message = `the server has sent nothing for ${silenceMs / 1000} s`;
    if (silenceMs !== null) timer = setTimeout(() => reject(new ApiError(0, message)), silenceMs);
  });
  const data = reader.read().catch((error) => refuse(error, "the connection to the server was lost"));
  return Promise.race([data, silence]).finally(() => clearTimeout(timer));
}

// Yields [name, data] of each server-sent event of a response, until its end or the event [DONE]. silenceMs: the
// longest time without a byte, for a stream that is never silent for so long; null: no limit.
export async function* events(response, silenceMs = null) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await read(reader, silenceMs);
      if (done) return;
      const parts = (pending + value).split("\n\n");
      pending = parts.pop();
      for (const part of parts) {
        let name = "message";
        const data = [];
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (!data.length) continue;
        const text = data.join("\n");
        if (text === "[DONE]") return;
        yield [name, JSON.parse(text)];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function toBase64(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) {
    text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  }
  return btoa(text);
}

export function fromBase64(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}
