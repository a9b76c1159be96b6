// The plan explorer: controls for a question, the best plans with the memory of a device, what other values of a key would
// cost, and time against memory. A click on a value pins it. Python searches; where there is no kernel, the answers are
// in a table, and what is not in it is said to be missing.
import { drawEdge, drawRect, drawText, fill, fit, frame, make, MEMORY, ticks, wrapped } from "./shared.js";

const LETTER = 6.1, HEAD = 24, EDGE = 6, TIMES = 128, STEP = 38, CELL = 22, LINE = 15, FRONT = 250;

/** Where everything is, in CSS pixels: rows of plans with their cells, the front, and the values of one key. */
export function places(data, more, key, width) {
  const wide = data.columns.map((k) => 11 + LETTER * Math.max(data.heads[k].length, ...data.plans.map((plan) => plan.cells[k].length)));
  const sum = wide.reduce((a, b) => a + b, 0), single = TIMES + sum + 170 <= width;
  const spread = single ? Math.max(1, Math.min(1.35, (width - TIMES - 300) / sum)) : 1;
  const cellsEnd = single ? TIMES + sum * spread : width - EDGE, bar = single ? cellsEnd + 14 : TIMES;
  const barWidth = Math.max(60, Math.min(320, width - bar - 76));
  const rows = [], heads = [];
  let y = single ? HEAD : 4;
  data.plans.forEach((plan, k) => {
    const top = y, cells = [];
    let x = single ? TIMES : EDGE, line = single ? top + 3 : top + 26;
    data.columns.forEach((column, c) => {
      if (!single && plan.cells[column] === "–") return;
      const bold = k > 0 && plan.cells[column] !== data.plans[0].cells[column];
      const w = single ? wide[c] * spread : 14 + (LETTER + 0.7 * bold) * (data.heads[column].length + 1 + plan.cells[column].length);
      if (!single && x > EDGE && x + w > width - EDGE) { x = EDGE; line += CELL + 2; }
      cells.push({ key: column, x, y: line, w: w - 2, h: CELL - 2 });
      x += w;
    });
    const why = single ? [plan.why] : wrapped(plan.why, Math.floor((width - 2 * EDGE) / 5.9));
    const whyAt = single ? top + 32 : line + CELL + 9;
    y = single ? top + STEP + 4 : whyAt + LINE * why.length;
    rows.push({ k, y: top, h: y - top, cells, why, whyAt });
  });
  if (single && rows.length) rows[0].cells.forEach((cell) => heads.push({ key: cell.key, x: cell.x + cell.w / 2 }));
  const problem = data.problem ? wrapped(data.problem, Math.max(24, Math.floor((width - 30) / 6.4))) : [];
  if (problem.length) y += 10 + 17 * problem.length;
  const legend = y + 12;
  const perLine = width < 520 ? 3 : 6;
  y = data.plans.length ? legend + 16 * Math.ceil((data.kinds.length + 1) / perLine) + 14 : y + 8;
  const side = width >= 720, front = { x: 0, y, w: side ? 0.46 * width : width, h: data.plans.length ? FRONT : 0 };
  const panel = { x: side ? 0.46 * width + 24 : EDGE, y: side ? y : y + front.h + 14, w: side ? 0.54 * width - 30 : width - 2 * EDGE };
  const values = (more[key] ?? []).map((row, k) => ({ k, y: panel.y + 26 + 34 * k, h: 34 }));
  const low = panel.y + 26 + 34 * values.length + (values.length ? 4 : 20);
  return { single, bar, barWidth, rows, heads, problem, legend, perLine, front, panel, values, height: data.plans.length ? Math.max(front.y + front.h, low) : y };
}

/** The pins after a click on a value: it is pinned, or free again if it was. */
export function clicked(pins, key, value) {
  const others = pins.filter(([k]) => k !== key);
  return pins.some(([k, v]) => k === key && v === value) ? others : [...others, [key, value]];
}

/** Round values of a logarithmic axis. */
export function logTicks(low, high) {
  for (const steps of [[1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9]]) {
    const found = [];
    for (let power = -7; power < 8; power++) for (const step of steps) {
      const at = +(step * 10 ** power).toPrecision(3);
      if (low <= at && at <= high) found.push(at);
    }
    if (found.length >= 3) return found.filter((_, k) => k % Math.max(1, Math.floor(found.length / 5)) === 0);
  }
  return ticks(low, high, 4);
}

/** Seconds in words, as plan_model.py says them. */
export const clock = (seconds) => (seconds >= 1 ? `${+seconds.toPrecision(4)} s` : `${+(seconds * 1e3).toPrecision(4)} ms`);

/** A plan in words. */
export function planWords(data, plan, name) {
  const host = plan.host ? `, ${plan.host} on the host` : "";
  return `${name}: ${plan.time}${plan.over === "best" ? "" : ` (${plan.over})`}, ${plan.tflops} TFLOP/s a GPU, ${plan.memory} of ${data.device}${host}\n${plan.words}\n${plan.why}`;
}

/** The bytes of a plan by kind, in words. */
export function bytesWords(data, plan) {
  return data.kinds.map((kind, k) => `${kind} ${(plan.bytes[k] / 1e9).toFixed(2)} GB`).join("\n") + `\ntogether ${plan.memory} of ${data.device}`;
}

/** One value of a key in words. */
export function valueWords(data, key, row) {
  return `${key}=${row.value}: ${row.plan ? `${row.plan.time}, ${row.plan.over}${row.reason ? `; ${row.reason}` : ""}\n${row.plan.words}` : row.reason}`;
}

function drawCell(ctx, data, p, row, cell, look, { chosen }) {
  const plan = data.plans[row.k], value = plan.cells[cell.key], pinned = data.pins.some(([key]) => key === cell.key);
  const differs = row.k > 0 && value !== data.plans[0].cells[cell.key];
  if (value !== "–") drawRect(ctx, differs ? look.focus : look.rule, cell.x + 1, cell.y, cell.w - 2, cell.h, differs ? 0.26 : 0.5);
  if (pinned) drawEdge(ctx, look.ink, cell.x + 1, cell.y, cell.w - 2, cell.h, 2.5);
  if (chosen) drawEdge(ctx, look.focus, cell.x - 1, cell.y - 2, cell.w + 2, cell.h + 4, 2);
  const text = p.single ? value : `${data.heads[cell.key]} ${value}`;
  drawText(ctx, fit(ctx, [text], cell.w - 2, 11), cell.x + cell.w / 2, cell.y + cell.h / 2 + 0.5, row.k && !differs ? look.muted : look.ink, "center", 11, differs ? "bold " : "");
}

function drawBar(ctx, data, p, plan, y, look) {
  let x = p.bar;
  data.kinds.forEach((kind, k) => {
    const [face, mark] = MEMORY[kind], w = (plan.bytes[k] / data.capacity) * p.barWidth;
    if (w <= 0) return;
    drawRect(ctx, fill(ctx, face, "#333333", mark), x, y, w, 15);
    if (w > 2) drawEdge(ctx, "#444444", x, y, w, 15, 0.8);
    x += w;
  });
  drawEdge(ctx, look.muted, p.bar, y, p.barWidth, 15);
  drawText(ctx, plan.memory, p.bar + p.barWidth + 6, y + 8, look.ink, "left", 11);
}

function drawTable(ctx, data, p, width, look, stop, focused) {
  for (const head of p.heads) {
    const pinned = data.pins.some(([key]) => key === head.key);
    drawText(ctx, data.heads[head.key], head.x, 13, pinned ? look.ink : look.muted, "center", 11, pinned ? "bold " : "");
  }
  if (p.single && p.rows.length) {
    drawText(ctx, "a step", EDGE, 13, look.muted);
    drawText(ctx, fit(ctx, [`memory of ${data.device}`, "memory"], width - p.bar, 11), p.bar, 13, look.muted);
  }
  for (const row of p.rows) {
    const plan = data.plans[row.k], here = stop.kind === "plan" && stop.k === row.k;
    if (here) drawRect(ctx, look.focus, 0, row.y, width, row.h, look.dark ? 0.2 : 0.1);
    drawRect(ctx, look.rule, 0, row.y, width, 1);
    drawText(ctx, plan.time, EDGE, row.y + 14, look.ink, "left", 13, row.k ? "" : "bold ");
    drawText(ctx, plan.over, TIMES - 12, row.y + 14, look.muted, "right", 11);
    for (const cell of row.cells) drawCell(ctx, data, p, row, cell, look, { chosen: here && focused && cell.key === stop.key });
    drawBar(ctx, data, p, plan, row.y + 6, look);
    row.why.forEach((line, k) => drawText(ctx, p.single ? fit(ctx, [line], p.bar - TIMES - 10, 11) : line, p.single ? TIMES + 2 : EDGE, row.whyAt + LINE * k, look.muted, "left", 11));
  }
  p.problem.forEach((line, k) => {
    if (!k) drawRect(ctx, look.warn, 2, 6, 4, 17 * p.problem.length + 4);
    drawText(ctx, line, 14, 17 + 17 * k, look.ink, "left", 12);
  });
  if (!data.plans.length) return;
  const step = p.perLine === 3 ? width / 3 : 112;
  data.kinds.forEach((kind, k) => {
    const [face, mark] = MEMORY[kind], x = EDGE + (k % p.perLine) * step, y = p.legend + 16 * Math.floor(k / p.perLine);
    drawRect(ctx, fill(ctx, face, "#333333", mark), x, y - 6, 14, 12);
    drawEdge(ctx, "#444444", x, y - 6, 14, 12, 0.8);
    drawText(ctx, kind, x + 19, y, look.muted);
  });
  const n = data.kinds.length, x = EDGE + (n % p.perLine) * step, y = p.legend + 16 * Math.floor(n / p.perLine);
  drawEdge(ctx, look.muted, x, y - 6, 14, 12);
  drawText(ctx, "the device", x + 19, y, look.muted);
}

/** Where points of time and memory are on the front's axes. */
export function axes(data, more, front) {
  const points = [...(more.front ?? []), ...data.plans];
  const low = Math.min(...points.map((one) => one.seconds)) * 0.96, high = Math.max(...points.map((one) => one.seconds)) * 1.04;
  const most = Math.max(data.capacity, ...points.map((one) => one.total)) * 1.06;
  const left = front.x + 60, right = front.x + front.w - 12, top = front.y + 40, bottom = front.y + front.h - 40;
  return {
    low, high, most, left, right, top, bottom,
    x: (bytes) => left + (bytes / most) * (right - left), y: (seconds) => bottom - (Math.log(seconds / low) / Math.log(high / low)) * (bottom - top),
  };
}

function drawFront(ctx, data, more, p, look, stop, alive) {
  const { x: left0, y: top0, w } = p.front, a = axes(data, more, p.front);
  drawText(ctx, fit(ctx, ["Time of a step against memory of a device", "Time against memory"], w, 13), left0 + EDGE, top0 + 9, look.ink, "left", 13, "bold ");
  for (const tick of logTicks(a.low, a.high)) {
    drawRect(ctx, look.rule, a.left, a.y(tick), a.right - a.left, 1);
    drawText(ctx, clock(tick), a.left - 6, a.y(tick), look.muted, "right");
  }
  for (const tick of ticks(0, a.most / 1e9, w / 80)) {
    drawRect(ctx, look.rule, a.x(tick * 1e9), a.bottom, 1, 4);
    drawText(ctx, `${tick}${tick ? " GB" : ""}`, a.x(tick * 1e9), a.bottom + 13, look.muted, "center");
  }
  ctx.strokeStyle = look.warn;
  ctx.lineWidth = 1.5;
  ctx.setLineDash([5, 3]);
  ctx.beginPath();
  ctx.moveTo(a.x(data.capacity), a.top - 10);
  ctx.lineTo(a.x(data.capacity), a.bottom);
  ctx.stroke();
  ctx.setLineDash([]);
  drawText(ctx, data.device, a.x(data.capacity) - 5, a.top - 8, look.warn, "right");
  const front = more.front ?? [];
  ctx.strokeStyle = look.focus;
  ctx.lineWidth = 2;
  ctx.beginPath();
  front.forEach((one, k) => {
    const x = a.x(one.total), y = a.y(one.seconds);
    if (k) { ctx.lineTo(x, a.y(front[k - 1].seconds)); ctx.lineTo(x, y); }
    else ctx.moveTo(x, y);
  });
  if (front.length) { ctx.lineTo(a.x(data.capacity), a.y(front.at(-1).seconds)); ctx.stroke(); }
  for (const [many, filled] of [[data.plans, false], [front, true]]) for (const [k, one] of many.entries()) {
    ctx.fillStyle = filled ? look.focus : look.paper;
    ctx.strokeStyle = filled ? look.paper : look.ink;
    ctx.lineWidth = 1.4;
    ctx.beginPath();
    ctx.arc(a.x(one.total), a.y(one.seconds), 4.5, 0, 2 * Math.PI);
    ctx.fill();
    ctx.stroke();
    if (stop.kind !== (filled ? "front" : "plan") || stop.k !== k) continue;
    ctx.strokeStyle = look.focus;
    ctx.beginPath();
    ctx.arc(a.x(one.total), a.y(one.seconds), 8, 0, 2 * Math.PI);
    ctx.stroke();
  }
  const done = more.budgets ?? 0, y = top0 + p.front.h - 10;
  const words = done >= data.budgets ? "blue: the fastest plan for each size of memory; rings: the plans above" : alive ? `searching with less memory: ${done} of ${data.budgets} ...` : "rings: the plans above; the front was not computed for this page";
  const brief = done >= data.budgets ? ["blue: the front; rings: the plans above"] : alive ? [] : ["the front was not computed for this page"];
  drawText(ctx, fit(ctx, [words, ...brief], w - 2 * EDGE, 11), left0 + EDGE, y, look.muted);
}

function drawValues(ctx, data, more, p, key, look, stop, alive) {
  const { x, y, w } = p.panel, rows = more[key];
  drawText(ctx, fit(ctx, [`What another ${key} would cost, all else free`, `Another ${key}`], w, 13), x, y + 9, look.ink, "left", 13, "bold ");
  if (!rows) {
    const words = !data.searched.includes(key) ? `${key} follows from the others here; a value in the table can be pinned` : alive ? "searching ..." : "not computed for this page";
    return drawText(ctx, fit(ctx, [words], w, 11), x, y + 32, look.muted);
  }
  const most = Math.max(...rows.map((row) => row.plan?.seconds ?? 0)), label = Math.min(0.3 * w, 14 + LETTER * Math.max(...rows.map((row) => row.value.length)));
  for (const place of p.values) {
    const row = rows[place.k], here = stop.kind === "value" && stop.k === place.k, top = place.y;
    const pinned = data.pins.some(([k, v]) => k === key && v === row.value);
    if (here) drawRect(ctx, look.focus, x - 4, top, w + 4, 33, look.dark ? 0.22 : 0.12);
    drawRect(ctx, look.rule, x, top + 3, label - 6, 18, 0.5);
    if (pinned) drawEdge(ctx, look.ink, x, top + 3, label - 6, 18, 2.5);
    drawText(ctx, fit(ctx, [row.value], label - 8, 11), x + label / 2 - 3, top + 12.5, look.ink, "center", 11);
    const room = w - label - 118;
    if (row.plan) {
      const length = (row.plan.seconds / most) * room, best = place.k === 0;
      drawRect(ctx, best ? look.focus : look.muted, x + label, top + 5, Math.max(2, length), 14, best ? 1 : 0.55);
      drawText(ctx, `${row.plan.time}  ${row.plan.over === "best" ? "+0 %" : row.plan.over}`, x + label + length + 6, top + 12.5, look.ink, "left", 11);
      drawText(ctx, fit(ctx, [row.reason || (best ? "the fastest" : "")], w - label, 10.5), x + label, top + 27, look.muted, "left", 10.5);
    } else drawText(ctx, fit(ctx, [`✗ ${row.reason}`], w - label, 11), x + label, top + 12.5, look.warn, "left", 11);
  }
}

function render({ model, el }) {
  const data = () => model.get("data"), more = () => model.get("more") ?? {}, alive = () => model.get("alive");
  let stop = { kind: "plan", k: 0, key: "tp" }, key = "tp", id = data().id ?? 0, waiting = null, next = null, timer = 0, asking = 0, late = 0;
  const past = [];
  const shape = (width) => places(data(), more(), key, width);

  const view = frame(model, el, {
    name: "plan",
    help: [
      ["↑ ↓", "the plan, value or point of the front above, or below"], ["← →", "the key before, the key after"],
      ["Enter", "pin this value, or free it"], ["z", "take the last pin back"], ["Delete", "free this key"],
      ["Home End", "to the first, to the last"],
    ],
    height: (width) => shape(width).height + 6,
    draw(ctx, width, height, look) {
      const p = shape(width), focused = document.activeElement === view.canvas;
      ctx.save();
      drawTable(ctx, data(), p, width, look, stop, focused);
      if (data().plans.length) {
        drawFront(ctx, data(), more(), p, look, stop, alive());
        drawValues(ctx, data(), more(), p, key, look, stop, alive());
      }
      ctx.restore();
    },
    keys: {
      ArrowDown: () => walk(1), ArrowUp: () => walk(-1), ArrowRight: () => aside(1), ArrowLeft: () => aside(-1),
      Home: () => walk(-1e6), End: () => walk(1e6), Enter: () => pick(), " ": () => pick(), z: () => undo(),
      Delete: () => free(key), Backspace: () => free(key),
    },
  });

  // the question ----------------------------------------------------------------------------------------------------

  const now = () => waiting ?? { model: data().model, machine: data().machine, gpus: data().gpus, batch: data().batch, pins: data().pins };
  const busy = (on) => view.root.setAttribute("aria-busy", on); // then the plans of before are pale
  const options = model.get("options");
  const chooser = (name, label, values) => {
    const select = make("select", { "aria-label": label, onchange: () => send({ ...now(), [name]: select.value }) }, ...values.map((value) => make("option", { value }, value)));
    return [make("label", {}, label, select), (value) => {
      if (![...select.options].some((one) => one.value === value)) select.append(make("option", { value }, value));
      select.value = value;
    }];
  };
  const slider = (name, label, values) => {
    const input = make("input", { type: "range", min: 0, max: values.length - 1, step: 1, "aria-label": label }), said = make("output");
    const show = () => { said.textContent = values[input.value].toLocaleString("en"); input.setAttribute("aria-valuetext", said.textContent); };
    view.listen(input, "input", () => {
      show();
      busy(true);
      clearTimeout(timer);
      timer = setTimeout(() => send({ ...now(), [name]: values[input.value] }), 150);
    });
    return [make("label", {}, label, input, said), (value) => {
      if (!values.includes(value)) { values.push(value); values.sort((a, b) => a - b); input.max = values.length - 1; }
      input.value = values.indexOf(value);
      show();
    }];
  };
  const controls = {
    model: chooser("model", "model", options.model), machine: chooser("machine", "hardware", options.machine),
    gpus: slider("gpus", "GPUs", [...options.gpus]), batch: slider("batch", "batch", [...options.batch]),
  };
  const chips = make("div", { class: "mp-pins", role: "group", "aria-label": "pins" });
  view.stage.before(make("div", { class: "mp-ask", role: "group", "aria-label": "the question" }, ...Object.values(controls).map(([element]) => element)), chips);
  for (const one of view.root.querySelectorAll(".mp-ask select, .mp-ask input")) one.disabled = !alive();
  function tell() {
    for (const [name, [, set]] of Object.entries(controls)) set(now()[name]);
    const held = chips.contains(document.activeElement), pins = now().pins;
    chips.replaceChildren(...(pins.length ? [] : ["nothing is pinned: click a value to pin it"]), ...pins.map((pin) => make("button",
      { type: "button", title: `free ${pin[0]}`, "aria-label": `free ${pin.join("=")}`, onclick: () => free(pin[0]) }, `${pin.join("=")} ✕`)),
    make("span", {}, waiting ? "searching ..." : data().price));
    if (held) (chips.querySelector("button") ?? view.canvas).focus();
  }

  function send(asked, remember = true) {
    clearTimeout(timer);
    if (remember && JSON.stringify(asked.pins) !== JSON.stringify(now().pins)) past.push(now().pins);
    if (!alive()) return void view.say("This page has one saved answer, and nobody who could find another one.");
    clearTimeout(asking);
    if (waiting) next = asked; // one question at a time: the newest one is asked when there is an answer
    else post(asked);
    waiting = asked;
    busy(true);
    tell();
  }
  function post(asked) {
    model.set("asked", { ...asked, id: ++id });
    model.save_changes();
    clearTimeout(late);
    late = setTimeout(() => view.say("The kernel has not answered yet."), 6000);
  }
  function free(name) {
    const pins = now().pins.filter(([k]) => k !== name);
    if (pins.length < now().pins.length) send({ ...now(), pins });
    else view.say(`${name} is not pinned.`);
  }
  function undo() {
    if (past.length) send({ ...now(), pins: past.pop() }, false);
    else view.say("There is nothing to take back.");
  }
  view.toolbar.prepend(...[["undo", "take the last pin back (z)", undo], ["free all", "pin nothing", () => send({ ...now(), pins: [] })]].map(
    ([label, title, run]) => make("button", { type: "button", title, "aria-label": title, onclick: run }, label)));

  // the cursor ------------------------------------------------------------------------------------------------------

  const stops = () => [
    ...data().plans.map((_, k) => ({ kind: "plan", k })), ...(more()[key] ?? []).map((_, k) => ({ kind: "value", k })),
    ...(more().front ?? []).map((_, k) => ({ kind: "front", k })),
  ];
  const named = (kind, k) => (kind === "front" ? `point ${k + 1} of the front` : k ? `plan ${k + 1}` : "the best plan");
  function say() {
    if (data().problem) return view.say(data().problem);
    if (stop.kind === "value") return view.say(valueWords(data(), key, more()[key][stop.k]));
    const plan = (stop.kind === "front" ? more().front : data().plans)[stop.k];
    view.say(`${stop.kind === "plan" ? `${key}=${plan.cells[key]} in ` : ""}${planWords(data(), plan, named(stop.kind, stop.k))}`);
  }
  function go(to) {
    stop = { key, ...to };
    say();
    ask();
    view.repaint();
  }
  function walk(by) {
    const all = stops(), at = all.findIndex((one) => one.kind === stop.kind && one.k === stop.k);
    if (all.length) go(all[Math.max(0, Math.min(all.length - 1, at + by))]);
    else say();
  }
  function aside(by) {
    const columns = data().columns, at = columns.indexOf(key);
    if (columns.length) key = columns[Math.max(0, Math.min(columns.length - 1, at + by))];
    go(stop.kind === "value" ? { kind: "plan", k: 0 } : { kind: stop.kind, k: stop.k });
  }
  function pick() {
    if (!data().plans.length || stop.kind === "front") return say();
    const value = stop.kind === "value" ? more()[key][stop.k].value : data().plans[stop.k].cells[key];
    if (value === "–") return view.say(`${key} means nothing in this plan.`);
    send({ ...now(), pins: clicked(now().pins, key, value) });
  }

  // the pointer -----------------------------------------------------------------------------------------------------

  function under(event) {
    const p = shape(view.canvas.clientWidth), x = event.offsetX, y = event.offsetY;
    const row = p.rows.find((one) => one.y <= y && y < one.y + one.h);
    if (row) return { kind: "plan", k: row.k, cell: row.cells.find((c) => c.x <= x && x < c.x + c.w && c.y <= y && y < c.y + c.h), bar: x >= p.bar && y < row.y + 24 };
    const value = p.values.find((one) => one.y <= y && y < one.y + one.h && x >= p.panel.x);
    if (value) return { kind: "value", k: value.k };
    if (!data().plans.length || y < p.front.y || y > p.front.y + p.front.h) return null;
    const a = axes(data(), more(), p.front);
    for (const [kind, many] of [["front", more().front ?? []], ["plan", data().plans]]) {
      const k = many.findIndex((one) => Math.hypot(a.x(one.total) - x, a.y(one.seconds) - y) < 8);
      if (k >= 0) return { kind, k };
    }
    return null;
  }
  view.listen(view.canvas, "pointermove", (event) => {
    const found = under(event);
    let text = null;
    if (found?.kind === "value") text = valueWords(data(), key, more()[key][found.k]);
    else if (found) {
      const plan = (found.kind === "front" ? more().front : data().plans)[found.k], pinned = found.cell && data().pins.some(([k]) => k === found.cell.key);
      if (found.cell && plan.cells[found.cell.key] !== "–") text = `${pinned ? "free" : "pin"} ${found.cell.key}=${plan.cells[found.cell.key]}`;
      else text = found.bar ? bytesWords(data(), plan) : planWords(data(), plan, named(found.kind, found.k));
    }
    view.canvas.style.cursor = found?.cell || found?.kind === "value" ? "pointer" : "default";
    view.tip(event.offsetX, event.offsetY, text);
  });
  for (const event of ["focus", "blur"]) view.listen(view.canvas, event, view.repaint);
  view.listen(view.canvas, "pointerleave", () => view.tip(0, 0, null));
  view.listen(view.canvas, "pointerdown", (event) => {
    const found = under(event);
    if (!found) return;
    if (found.cell) key = found.cell.key;
    go({ kind: found.kind, k: found.k });
    if (found.cell || found.kind === "value") pick();
  });

  // what Python says ------------------------------------------------------------------------------------------------

  function ask() { // what takes longer is asked for one by one, when nothing else is
    clearTimeout(asking);
    if (!alive() || waiting || !data().plans.length) return;
    const want = data().searched.includes(key) && !more()[key] ? key : (more().budgets ?? 0) < data().budgets ? "front" : null;
    if (want) asking = setTimeout(() => model.send({ want, id: data().id }), 250);
  }
  function answered() {
    if (alive() && data().id < id) return; // an answer to what was asked before
    clearTimeout(late);
    id = Math.max(id, data().id);
    waiting = null;
    if (next) {
      const asked = next;
      next = null;
      return send(asked, false);
    }
    busy(false);
    if (!data().columns.includes(key) && data().columns.length) key = data().columns[0];
    stop = { kind: "plan", k: Math.min(stop.kind === "plan" ? stop.k : 0, Math.max(0, data().plans.length - 1)), key };
    tell();
    say();
    view.repaint();
    ask();
  }
  const found = () => {
    if (stop.kind !== "plan" && !stops().some((one) => one.kind === stop.kind && one.k === stop.k)) stop = { kind: "plan", k: 0, key };
    view.repaint();
    ask();
  };
  model.on("change:data", answered);
  model.on("change:more", found);
  tell();
  ask();
  return () => { for (const one of [timer, asking, late]) clearTimeout(one); model.off("change:data", answered); model.off("change:more", found); view.dispose(); };
}

export default { render };
