// Python in a worker of a page: Pyodide, and of minipar what needs nothing else. It answers requests, one after the other.
//
//   in   { number, request }         request is plain data: see minipar_widgets/live.py
//   out  { step }                    while it starts: what it is doing, in words
//        { number, answer, bytes }   answer is JSON, in which { "bytes": k } stands for bytes[k]
//        { number, broken }          Python itself has failed
//
// It loads minipar.zip, and the further parts that its address names: worker.js?exercises
//
// Python sees nothing of this worker but what it needs to run: no network, no storage, no messages of its own.
import { loadPyodide } from "../pyodide/pyodide.mjs";

const post = self.postMessage.bind(self);
const NEVER = ["fetch", "XMLHttpRequest", "WebSocket", "WebTransport", "EventSource", "indexedDB", "caches", "BroadcastChannel", "Worker", "importScripts", "postMessage"];

async function start() {
  post({ step: "loading Python" });
  const names = ["minipar", ...new URLSearchParams(self.location.search).keys()];
  const parts = names.map((name) => fetch(new URL(`../${name}.zip`, import.meta.url)).then((found) => found.arrayBuffer()));
  const py = await loadPyodide({ indexURL: new URL("../pyodide/", import.meta.url).href, jsglobals: Object.create(null) });
  post({ step: "loading minipar" });
  for (const part of parts) py.unpackArchive(await part, "zip", { extractDir: "/minipar" });
  const answer = py.runPython("import sys\nsys.path.insert(0, '/minipar')\nfrom minipar_widgets.live import answer\nanswer");
  for (const name of NEVER) for (let at = self; at; at = Object.getPrototypeOf(at)) {
    if (Object.hasOwn(at, name)) Object.defineProperty(at, name, { value: undefined });
  }
  return answer;
}

const ready = start();
ready.then(() => post({ step: "" }), (error) => post({ step: "", broken: String(error) }));

let turn = ready;
self.onmessage = ({ data: { number, request } }) => {
  turn = ready.then((answer) => {
    const both = answer(JSON.stringify(request));
    const [text, bytes] = both.toJs();
    both.destroy();
    post({ number, answer: text, bytes });
  }).catch((error) => post({ number, broken: String(error) }));
};
