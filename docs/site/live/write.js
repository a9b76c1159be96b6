// The page on which readers write a schedule, a collective or a pass: executed in a worker, judged by the engine.
// The address carries the text: `#stages=4&microbatches=8&code=...`.
import { make } from "../views/shared.js";
import { makeEditor } from "./editor.js";
import { makeEngine, missing } from "./engine.js";
import { copyButton, treeOf } from "./widgets.js";

const LIMIT = 10; // seconds that a text may run

function open(place) {
  const examples = JSON.parse(place.querySelector("script").textContent);
  const words = new URLSearchParams(location.hash.slice(1));
  const number = (name, label, most, other) => {
    const given = Number(words.get(name)), value = Number.isInteger(given) && given >= 1 && given <= most ? given : other;
    return make("input", { type: "number", min: 1, max: most, value, "aria-label": label });
  };
  const stages = number("stages", "ranks", 16, 4), microbatches = number("microbatches", "micro-batches", 64, 8);
  const example = make("select", { "aria-label": "begin with", onchange: () => { editor.set(examples[example.selectedIndex][1]); judge(); } },
    ...examples.map(([name]) => make("option", {}, name)));
  const start = make("button", { type: "button", onclick: judge }, "run (Ctrl-Enter)");
  const copy = copyButton((link) => { status.textContent = link; });
  const status = make("p", { class: "mp-status", role: "status" });
  const verdict = make("p", { class: "mp-verdict", role: "alert", hidden: true }), details = make("pre", { class: "mp-details", tabindex: 0, hidden: true });
  const box = make("div", { class: "mp-editor" }), stage = make("div", { class: "mp-stage-live" });
  const labelled = (text, input) => make("label", {}, text, input);
  place.replaceChildren(make("div", { class: "mp-asked" }, labelled("begin with", example), labelled("ranks", stages), labelled("micro-batches", microbatches), start, copy),
    box, status, verdict, details, stage);
  const editor = makeEditor(box, words.get("code") ?? examples[0][1], "your schedule, collective or pass", judge);
  const why = missing();
  if (why) { status.textContent = `${why}, so nothing can run here. It does after pip install minipar.`; start.disabled = true; return; }
  const engine = makeEngine((text) => { status.textContent = text && `${text} …`; });
  let busy = false, again = false;

  function say(found) {
    place.dataset.judged = +(place.dataset.judged ?? 0) + 1;
    verdict.hidden = false;
    verdict.dataset.wrong = !!found.reason;
    verdict.textContent = found.reason ? `✗ ${found.line ? `line ${found.line}: ` : ""}${found.reason}` : `✓ ${found.facts}`;
    details.hidden = !found.details;
    details.textContent = found.details ?? "";
    editor.mark(found.line ?? 0, found.reason ?? "");
    stage.replaceChildren();
    if (found.changes?.length) treeOf(stage, () => {}).draw(found.changes);
  }
  async function judge() {
    if (busy) { again = true; return; }
    busy = true;
    place.setAttribute("aria-busy", "true");
    const code = editor.text(), request = { do: "write", code, stages: +stages.value, microbatches: +microbatches.value };
    history.replaceState(null, "", `${location.pathname}${location.search}#${new URLSearchParams({ stages: stages.value, microbatches: microbatches.value, code })}`);
    await engine.within(+(place.dataset.limit ?? LIMIT), request).then(say, (error) => say({ reason: error.message }));
    busy = false;
    place.setAttribute("aria-busy", "false");
    if (again) { again = false; judge(); }
  }
  for (const input of [stages, microbatches]) input.addEventListener("change", judge);
  addEventListener("hashchange", () => {
    const now = new URLSearchParams(location.hash.slice(1));
    if (now.has("code")) { editor.set(now.get("code")); judge(); }
  });
  judge();
}

for (const place of document.querySelectorAll(".mp-write")) open(place);
