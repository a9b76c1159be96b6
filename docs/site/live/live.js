// Live views in a page: <div class="mp-live" data-view="ScheduleExplorer"></div>, with the first picture beside it as JSON.
// The address carries the state: `#schedule=zb-v&stages=4`.
import { folded } from "../views/folding.js";
import { make } from "../views/shared.js";
import { makeEngine, missing, saved } from "./engine.js";
import { copyButton, treeOf } from "./widgets.js";

function open(place) {
  const status = make("p", { class: "mp-status", role: "status" }), said = make("p", { class: "mp-said", role: "alert", hidden: true });
  const copy = copyButton((link) => { said.hidden = false; said.textContent = link; });
  const stage = make("div", { class: "mp-stage-live", inert: true });
  const first = place.querySelector("script[type='application/json']");
  place.replaceChildren(make("div", { class: "mp-bar" }, status, copy), said, stage);
  const tree = treeOf(stage, ask);
  if (first) tree.draw(saved(first.textContent));
  folded(stage);
  const why = missing();
  if (why) {
    status.textContent = `${why}, so this picture stays as it is. Everything works after pip install minipar.`;
    return;
  }
  const began = performance.now();
  const engine = makeEngine((words) => { status.textContent = words && `${words} …`; });
  let busy = true, next = [], own = location.hash;

  async function run(request) {
    busy = true;
    place.setAttribute("aria-busy", "true");
    try {
      const { changes, address, problem } = await engine.ask(request);
      tree.draw(changes);
      said.hidden = !problem;
      said.textContent = problem;
      if (address !== undefined) {
        own = address ? `#${address}` : "";
        history.replaceState(null, "", location.pathname + location.search + own);
      }
    } catch (error) {
      said.hidden = false;
      said.textContent = error.message;
    }
    if (next.length) return run(next.shift());
    busy = false;
    place.setAttribute("aria-busy", "false");
  }
  function ask(request) {
    if (stage.inert) return;
    if (!busy) return void run(request);
    const same = next.findIndex((one) => one.do === request.do && one.id === request.id && request.do === "set"); // only the newest
    if (same >= 0) next[same] = { ...request, values: { ...next[same].values, ...request.values } };
    else next.push(request);
  }
  const show = () => run({ do: "open", view: place.dataset.view, address: location.hash.slice(1) });
  show().then(() => {
    stage.inert = false;
    place.dataset.live = Math.round(performance.now() - began);
  });
  addEventListener("hashchange", () => { if (location.hash !== own) show(); });
}

for (const place of document.querySelectorAll(".mp-live")) open(place);
