// The worker with Python, as one who is asked: `await engine.ask({ do: "open", ... })`.

const START = 60; // seconds for Python to start; a loaded machine takes half of it

/** Whether a browser can run Python at all; otherwise the reason. */
export function missing() {
  if (typeof WebAssembly !== "object") return "This browser has no WebAssembly";
  return typeof Worker === "function" ? "" : "This browser has no workers";
}

/** An engine: `tell(words)` hears what it does while it starts; "" when it is ready. `more` is what it loads beside views. */
export function makeEngine(tell, more = "") {
  let worker, waiting, number = 0, ready;
  function start() {
    waiting = new Map();
    worker = new Worker(new URL(`./worker.js?${more}`, import.meta.url), { type: "module" });
    let began;
    ready = new Promise((done) => { began = done; });
    const failed = (words) => {
      for (const { no } of waiting.values()) no(new Error(words));
      waiting.clear();
      tell(`Python did not start: ${words}`);
    };
    const late = setTimeout(() => failed(`nothing after ${START} seconds`), START * 1000);
    worker.onerror = (event) => { event.preventDefault(); failed(event.message || "its files could not be loaded"); };
    worker.onmessage = ({ data }) => {
      if (data.step !== undefined) {
        if (data.broken) failed(data.broken);
        else tell(data.step);
        if (!data.step) { clearTimeout(late); began(); }
        return;
      }
      const asked = waiting.get(data.number);
      waiting.delete(data.number);
      if (data.broken) asked?.no(new Error(data.broken));
      else asked?.yes(JSON.parse(data.answer, (_, value) => (value && typeof value === "object" && "bytes" in value && Object.keys(value).length === 1 ? view(data.bytes[value.bytes]) : value)));
    };
  }
  start();
  return {
    ask(request) {
      return new Promise((yes, no) => {
        waiting.set(++number, { yes, no });
        worker.postMessage({ number, request });
      });
    },
    /** The same with a limit: a request that takes longer ends the worker, and a new one starts. */
    async within(seconds, request) {
      await ready;
      let timer;
      const limit = new Promise((_, no) => {
        timer = setTimeout(() => {
          worker.terminate();
          start();
          no(new Error(`stopped after ${seconds} seconds: it does not end, or takes very long`));
        }, seconds * 1000);
      });
      return Promise.race([this.ask(request), limit]).finally(() => clearTimeout(timer));
    },
  };
}

/** Bytes as Jupyter hands them to a view. */
export const view = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);

/** The changes that were saved with a page, with base64 in the place of bytes. */
export function saved(text) {
  return JSON.parse(text, (_, value) => (value?.base64 === undefined ? value : view(Uint8Array.from(atob(value.base64), (letter) => letter.charCodeAt(0)))));
}
