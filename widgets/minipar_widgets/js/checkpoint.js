// The tape of a checkpointed step: a row for each layer, time to the right; blocks are layers that run (F forward, R again,
// B backward), bands are what is kept in between, a cross is what is dropped. Under it the memory, and a cursor to step.
import { bar, fill, FONT, frame, LOOKS, make, short, ticks } from "./shared.js";

const LEFT = 64, RIGHT = 12, TOP = 8, TALL = 120;
const KINDS = { F: "forward", R: "recompute", B: "backward" };
const DOES = { F: "forward through", R: "again forward through", B: "backward through" };

/** Time and memory of every move: [start, end, during, after]. */
export function spans(data) {
  let before = 0;
  return data.moves.map(([, , , , , end, during, after]) => {
    const found = [before, end, during, after];
    before = end;
    return found;
  });
}

/** What is kept after move k: numbers of layers whose output, and of those whose saved values are there. */
export function kept(data, k) {
  const of = (kind) => data.lifetimes.filter(([name, , first, last]) => name === kind && first <= k && k < last).map((life) => life[1]);
  return { output: of("output"), saved: of("saved") };
}

/** Move k in words; k = -1 is before the first. */
export function sentence(data, k) {
  if (k < 0) return `before the first of ${data.moves.length} moves; nothing is kept`;
  const [op, layer, saves, hands, drops, , during, after] = data.moves[k], { output, saved } = kept(data, k);
  const does = [`${DOES[op]} layer ${layer}`];
  if (op !== "B") does.push(saves ? "keeps what it saves" : "keeps nothing but its output");
  if (op === "R" && !hands) does[1] = "keeps what it saves, not its output";
  if (drops && op !== "B") does.push(`the output of layer ${layer - 1} is dropped`);
  return `move ${k + 1} of ${data.moves.length}: ${does.join(", ")}; memory ${size(data, during)}, then ${size(data, after)}; ` +
    `${some(output.length, "output")} and what ${some(saved.length, "layer")} saved are there`;
}

/** An amount of memory in words. */
export function size(data, amount) {
  return data.unit === "MiB" ? `${short(amount / 2 ** 20)} MiB` : some(amount, "unit");
}

function some(count, what) {
  return `${count} ${what}${count === 1 ? "" : "s"}`;
}

function row(count) {
  return Math.max(8, Math.min(20, 340 / count));
}

function line(ctx, ink, width, dash, ...points) {
  ctx.strokeStyle = ink;
  ctx.lineWidth = width;
  ctx.setLineDash(dash);
  ctx.beginPath();
  points.forEach(([x, y], k) => (k ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
  ctx.stroke();
  ctx.setLineDash([]);
}

function words(ctx, text, x, y, ink, align = "left", px = 11) {
  ctx.fillStyle = ink;
  ctx.font = `${px}px ${FONT}`;
  ctx.textAlign = align;
  ctx.textBaseline = "middle";
  ctx.fillText(text, x, y);
}

function drawTape(ctx, data, at, h, look) {
  const time = spans(data), dark = look.dark;
  for (const [kind, layer, first, last] of data.lifetimes) {
    const x = at(time[first][1]), width = at(time[last][1]) - x, y = TOP + layer * h;
    if (kind === "saved") {
      ctx.fillStyle = fill(ctx, dark ? "#4d3a12" : "#fbe6b5", dark ? "#8a6a20" : "#c99a2e", "\\");
      ctx.fillRect(x, y + 1, width, h - 2);
    }
  }
  for (const [kind, layer, first, last] of data.lifetimes) {
    if (kind !== "output") continue;
    const x = at(time[first][1]), end = at(time[last][1]), y = TOP + (layer + 0.5) * h;
    line(ctx, dark ? "#7cc7f0" : "#0072B2", Math.max(2, h / 5), [], [x, y], [end, y]);
    if (data.moves[last][0] === "B") continue;
    const s = Math.min(4, h / 3); // dropped, not used up
    line(ctx, look.warn, 1.5, [], [end - s, y - s], [end + s, y + s]);
    line(ctx, look.warn, 1.5, [], [end - s, y + s], [end + s, y - s]);
  }
  data.moves.forEach(([op, layer, saves], k) => {
    const [start, end] = time[k], x = at(start), width = Math.max(1, at(end) - x);
    bar(ctx, KINDS[op], x, TOP + layer * h + 1, width, h - 2, width >= 12 && h >= 11 ? op : "");
    if (op !== "B" && saves && width >= 4) {
      ctx.fillStyle = LOOKS[KINDS[op]][2];
      ctx.fillRect(x + 1, TOP + layer * h + h - 4, width - 2, 2);
    }
  });
}

function drawMemory(ctx, data, at, top, right, look) {
  const time = spans(data), most = data.peak || 1, tall = TALL - 40, y = (amount) => top + tall - (amount / most) * (tall - 14);
  const points = [[at(0), y(0)]];
  for (const [start, end, during, after] of time) points.push([at(start), y(during)], [at(end), y(during)], [at(end), y(after)]);
  ctx.fillStyle = look.dark ? "#1d3b4d" : "#d3e9f7";
  ctx.beginPath();
  points.forEach(([a, b], k) => (k ? ctx.lineTo(a, b) : ctx.moveTo(a, b)));
  ctx.lineTo(points.at(-1)[0], y(0));
  ctx.closePath();
  ctx.fill();
  line(ctx, look.dark ? "#7cc7f0" : "#0072B2", 1.5, [], ...points);
  line(ctx, look.warn, 1, [5, 3], [LEFT, y(most)], [right, y(most)]);
  words(ctx, `peak ${size(data, most)}`, right, y(most) - 8, look.warn, "right");
  words(ctx, "memory", LEFT - 8, top + tall / 2, look.ink, "right");
  for (const t of ticks(0, time.at(-1)[1], Math.max(2, (right - LEFT) / 90))) {
    words(ctx, short(t), at(t), top + tall + 11, look.muted, "center");
  }
  words(ctx, data.clock, right, top + tall + 24, look.muted, "right");
}

function render({ model, el }) {
  let k = -1, timer = 0, speed = 1;
  const data = () => model.get("tape");
  const right = (width) => width - RIGHT;
  const scale = (width) => {
    const end = data().moves.at(-1)[5];
    return (t) => LEFT + ((right(width) - LEFT) * t) / end;
  };

  const view = frame(model, el, {
    name: "checkpoint",
    help: [
      ["← →", "one move back, one move on (also , and .)"], ["Home End", "to the beginning, to the end"],
      ["space", "play or pause"], ["< >", "slower, faster"],
    ],
    height: () => TOP + data().layers * row(data().layers) + TALL,
    draw(ctx, width, height, look) {
      const now = data(), h = row(now.layers), at = scale(width), bottom = TOP + now.layers * h;
      const every = Math.ceil(12 / h);
      for (let layer = 0; layer < now.layers; layer += every) words(ctx, `layer ${layer}`, LEFT - 8, TOP + (layer + 0.5) * h, look.muted, "right", 10);
      for (let layer = 0; layer <= now.layers; layer++) line(ctx, look.rule, 0.5, [], [LEFT, TOP + layer * h], [right(width), TOP + layer * h]);
      drawTape(ctx, now, at, h, look);
      drawMemory(ctx, now, at, bottom + 6, right(width), look);
      if (k < 0) return;
      const [start, end] = spans(now)[k];
      ctx.fillStyle = look.focus;
      ctx.globalAlpha = 0.18;
      ctx.fillRect(at(start), TOP, at(end) - at(start), height - TOP - 32);
      ctx.globalAlpha = 1;
      line(ctx, look.focus, 1.5, [], [at(end), TOP], [at(end), height - 34]);
    },
    keys: {
      ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => go(-1), End: () => go(data().moves.length - 1), " ": () => toggle(),
      ",": () => step(-1), ".": () => step(1), ">": () => faster(2), "<": () => faster(0.5),
    },
  });

  function seek(to) {
    k = Math.max(-1, Math.min(data().moves.length - 1, to));
    view.say(sentence(data(), k));
    view.repaint();
  }
  function go(to) { stop(); seek(to); }
  function step(by) { go(k + by); }
  function stop() {
    clearInterval(timer);
    timer = 0;
    button.textContent = "▶ play";
    button.setAttribute("aria-label", "play");
  }
  function toggle() {
    if (timer) return stop();
    if (k >= data().moves.length - 1) k = -1;
    button.textContent = "❚❚ pause";
    button.setAttribute("aria-label", "pause");
    timer = setInterval(() => { seek(k + 1); if (k >= data().moves.length - 1) stop(); }, Math.max(60, Math.min(500, 12000 / data().moves.length)) / speed);
  }
  function faster(by) {
    speed = Math.max(0.25, Math.min(8, speed * by));
    if (timer) { stop(); toggle(); }
    view.say(`speed ${speed}`);
  }
  const tools = [
    ["|◀", "to the beginning (Home)", () => go(-1)], ["◁", "one move back (left arrow)", () => step(-1)], ["▶ play", "play", toggle],
    ["▷", "one move on (right arrow)", () => step(1)], ["▶|", "to the end (End)", () => go(data().moves.length - 1)],
  ].map(([label, title, run]) => make("button", { type: "button", title, "aria-label": title, onclick: run }, label));
  const button = tools[2];
  button.style.minWidth = "6em";
  view.toolbar.prepend(...tools);

  const moveAt = (event) => {
    const end = data().moves.at(-1)[5], width = view.canvas.clientWidth;
    const t = ((event.offsetX - LEFT) / (right(width) - LEFT)) * end;
    return t < 0 || t > end ? -1 : data().moves.findIndex((move) => move[5] > t);
  };
  view.listen(view.canvas, "pointermove", (event) => {
    const at = moveAt(event);
    if (event.buttons) go(at);
    view.tip(event.offsetX, event.offsetY, at >= 0 ? sentence(data(), at).replace(/; /g, "\n") : null);
  });
  view.listen(view.canvas, "pointerdown", (event) => go(moveAt(event)));
  view.listen(view.canvas, "pointerleave", () => view.tip(0, 0, null));
  const changed = () => { stop(); k = -1; view.say(""); view.repaint(); };
  model.on("change:tape", changed);
  return () => { clearInterval(timer); model.off("change:tape", changed); view.dispose(); };
}

export default { render };
