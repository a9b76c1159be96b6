// Exercises of lessons in their pages: the cell that a reader fills in, checked by its own task in a worker.
// One worker serves all of a page; it starts at the first check.
import { makeEditor } from "./editor.js";
import { makeEngine, missing } from "./engine.js";
import { make } from "../views/shared.js";

const LIMIT = 30; // seconds that an answer may run
let engine = null, tell = () => {};

for (const place of document.querySelectorAll(".mp-exercise")) {
  const { code, imports } = place.dataset;
  const box = make("div", { class: "mp-editor" }), verdict = make("pre", { class: "mp-verdict", role: "status", tabindex: 0, hidden: true });
  const say = (passed, text) => { verdict.hidden = !text; verdict.dataset.wrong = !passed; verdict.textContent = text; };
  const button = make("button", { type: "button", onclick: check }, "check (Ctrl-Enter)");
  place.replaceChildren(box, button, verdict);
  const editor = makeEditor(box, code, "your answer", check);
  async function check() {
    const why = missing();
    if (why) return say(false, `${why}: run the lesson after pip install minipar.`);
    tell = (text) => { if (text) say(true, `${text} …`); };
    engine ??= makeEngine((text) => tell(text), "exercises");
    button.disabled = true;
    await engine.within(LIMIT, { do: "exercise", imports, code: editor.text() }).then(
      (found) => { say(found.passed, found.verdict); editor.mark(found.passed ? 0 : found.line, found.verdict); },
      (error) => say(false, `not yet: ${error.message}`));
    button.disabled = false;
  }
}
