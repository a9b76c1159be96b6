// Parameter servers: a lane for each server and worker over time; under it the version of the parameters, as the server
// counts it and as each worker holds it. How far a worker's line lies under the server's when its gradient arrives is how
// stale that is.
import { bar, fill, FONT, frame, LOOKS, make, short, ticks } from "./shared.js";

const EDGE = 10, MARGIN = 112, LANE = 26, CHART = 190;
const HUES = ["#0072B2", "#D55E00", "#009E73", "#AA4499", "#999933", "#7A7A7A", "#CC79A7", "#8C6D31"];
const ACTS = { receives: "receive", updates: "optimizer step", answers: "message" };
const OPS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient", R: "recompute" };

/** The first entry whose end is after t, in a list sorted by time (`end` gives an entry's). */
export function firstAfter(list, t, end) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (end(list[middle]) > t) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Those of a lane's entries that show in [from, to], without those inside a column of pixels that is drawn already: at
 * most two for each of `width` columns. */
export function visible(list, from, to, width, start, end) {
  const found = [], column = (t) => Math.floor(((t - from) / (to - from)) * width);
  let drawn = -1;
  for (let k = firstAfter(list, from, end); k < list.length && start(list[k]) < to; k++) {
    if (column(end(list[k])) <= drawn) continue;
    found.push(list[k]);
    drawn = column(end(list[k]));
  }
  return found;
}

/** A worker's step in words. */
export function sentence(data, worker, k) {
  const one = data.workers[worker], step = one.steps[k];
  const [number, pull0, pull1, , , push1, version, update, applied, late] = step;
  const fate = update < 0 ? "its gradient came too late and was dropped"
    : `its gradient went into update ${update}${late ? `, ${late} update${late > 1 ? "s" : ""} late` : ", not late"}, at ${short(applied)}`;
  return `worker ${one.rank}, step ${number}: waited ${short(pull1 - pull0)} ${data.unit} for version ${version}, pushed at ${short(push1)}; ${fate}`;
}

/** The number of updates at time t. */
export function versionAt(data, t) {
  return firstAfter(data.updates, t, (time) => time);
}

function words(ctx, text, x, y, ink, align = "left", px = 11) {
  ctx.fillStyle = ink;
  ctx.font = `${px}px ${FONT}`;
  ctx.textAlign = align;
  ctx.textBaseline = "middle";
  ctx.fillText(text, x, y);
}

function stroke(ctx, ink, width, dash, ...points) {
  ctx.strokeStyle = ink;
  ctx.lineWidth = width;
  ctx.setLineDash(dash);
  ctx.beginPath();
  points.forEach(([x, y], k) => (k ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
  ctx.stroke();
  ctx.setLineDash([]);
}

function drawServer(ctx, acts, at, y, from, to, width, look) {
  for (const what of ["receives", "answers", "updates"]) {
    const mine = acts.filter((act) => act[0] === what);
    for (const [, start, end, , , version] of visible(mine, from, to, width, (a) => a[1], (a) => a[2])) {
      const x = at(start), w = Math.max(what === "updates" ? 2 : 1, at(end) - x);
      const [top, tall] = what === "updates" ? [y + 1, LANE - 4] : [y + 5, LANE - 12];
      bar(ctx, ACTS[what], x, top, w, tall, what === "updates" ? String(version) : "");
    }
  }
}

function drawWorker(ctx, one, at, y, from, to, width, look, chosen) {
  for (const [start, end] of one.away) {
    if (end < from || start > to) continue;
    ctx.fillStyle = fill(ctx, look.dark ? "#4a2410" : "#ffe1cc", look.warn, "x");
    ctx.fillRect(at(start), y + 1, at(end) - at(start), LANE - 4);
    const text = "away";
    if (at(end) - at(start) > 44) {
      ctx.fillStyle = look.paper;
      ctx.fillRect(at((start + end) / 2) - 18, y + 5, 36, LANE - 12);
      words(ctx, text, at((start + end) / 2), y + LANE / 2 - 1, look.warn, "center");
    }
  }
  for (const step of visible(one.steps, from, to, width, (s) => s[1], (s) => s[5])) {
    const [number, pull0, pull1, work, push0, push1, version, update] = step;
    ctx.fillStyle = look.rule; // waiting
    ctx.fillRect(at(pull0), y + LANE / 2 - 3, at(pull1) - at(pull0), 4);
    const whole = at(push1) - at(pull1);
    if (whole < 3) {
      ctx.fillStyle = LOOKS.forward[0];
      ctx.fillRect(at(pull1), y + 3, Math.max(1, whole), LANE - 8);
      continue;
    }
    for (const [op, start, end] of work) bar(ctx, OPS[op] ?? "copy", at(start), y + 1, at(end) - at(start), LANE - 4);
    bar(ctx, "message", at(push0), y + 6, Math.max(1, at(push1) - at(push0)), LANE - 14);
    const text = update < 0 ? `v${version} dropped` : `v${version}`;
    if (whole > 10 + 6.2 * text.length) {
      ctx.fillStyle = look.paper;
      ctx.globalAlpha = 0.85;
      ctx.fillRect(at(pull1) + 3, y + 5, 4 + 6.2 * text.length, LANE - 12);
      ctx.globalAlpha = 1;
      words(ctx, text, at(pull1) + 5, y + LANE / 2 - 1, update < 0 ? look.warn : look.ink);
    }
    if (chosen === number) {
      ctx.strokeStyle = look.focus;
      ctx.lineWidth = 2.5;
      ctx.strokeRect(at(pull0), y, at(push1) - at(pull0), LANE - 2);
    }
  }
}

function render({ model, el }) {
  let window_ = null, worker = 0, chosen = -1, leaving = false;
  const data = () => model.get("data");
  const range = () => window_ ?? [0, data().time];
  const lanes = () => data().servers.length + data().workers.length;
  const right = (width) => width - EDGE;
  const hue = (k) => HUES[k % HUES.length];

  const view = frame(model, el, {
    name: "servers",
    help: [
      ["← →", "the worker's step before, the step after"], ["↑ ↓", "the worker above, the worker below"],
      ["Shift ← →", "move the window"], ["+ -", "zoom in, zoom out"], ["Home", "all of the time"],
      ["Tab", "the next step; after the last one, out"], ["Escape", "let the step go; then Tab leaves"],
    ],
    height: () => lanes() * LANE + CHART + 34,
    draw(ctx, width, height, look) {
      const now = data(), [from, to] = range(), inside = right(width) - MARGIN, at = (t) => MARGIN + ((t - from) / (to - from)) * inside;
      now.workers.forEach((one, k) => {
        if (k !== worker) return;
        ctx.fillStyle = look.focus;
        ctx.globalAlpha = 0.1;
        ctx.fillRect(0, (now.servers.length + k) * LANE - 1, width, LANE);
        ctx.globalAlpha = 1;
      });
      now.servers.forEach((_, k) => words(ctx, `server ${k}`, MARGIN - 8, (k + 0.5) * LANE - 1, look.ink, "right"));
      now.workers.forEach((one, k) => {
        const y = (now.servers.length + k + 0.5) * LANE - 1;
        words(ctx, `${one.slow ? "slow: " : ""}worker ${one.rank}`, MARGIN - 8, y, look.ink, "right");
        ctx.fillStyle = hue(k);
        ctx.fillRect(1, y - 6, 5, 12);
      });
      ctx.save();
      ctx.beginPath();
      ctx.rect(MARGIN, 0, inside, height);
      ctx.clip();
      now.servers.forEach((acts, k) => drawServer(ctx, acts, at, k * LANE, from, to, inside, look));
      now.workers.forEach((one, k) => {
        const step = k === worker && chosen >= 0 ? one.steps[chosen]?.[0] : null;
        drawWorker(ctx, one, at, (now.servers.length + k) * LANE, from, to, inside, look, step);
      });
      const top = lanes() * LANE + 8, bottom = top + CHART, scale = scaleOfVersions(now, top, from, to, inside);
      drawVersions(ctx, now, at, scale, from, to, inside, look);
      ctx.restore();
      for (const v of scale.marks) words(ctx, `v${v}`, MARGIN - 8, scale.y(v), look.muted, "right", 10);
      words(ctx, "version", MARGIN - 40, top + CHART / 2, look.ink, "right");
      for (const t of ticks(from, to, inside / 90)) { // (the last one may stand at the edge)
        const last = at(t) > right(width) - 12;
        words(ctx, short(t), last ? right(width) : at(t), bottom + 9, look.muted, last ? "right" : "center");
      }
      words(ctx, `time (${now.unit})`, right(width), bottom + 20, look.muted, "right");
    },
    keys: {
      ArrowLeft: () => walk(-1), ArrowRight: () => walk(1), "Shift+ArrowLeft": () => pan(-0.2), "Shift+ArrowRight": () => pan(0.2),
      "+": () => zoom(0.5), "-": () => zoom(2),
      Home() { window_ = null; view.say(`all of ${short(data().time)} ${data().unit}`); view.repaint(); },
      ArrowUp: () => choose(worker - 1, -1), ArrowDown: () => choose(worker + 1, -1),
      Tab: () => next(1), "Shift+Tab": () => next(-1),
      Escape() { leaving = true; choose(worker, -1); },
    },
  });

  function scaleOfVersions(now, top, from, to, inside) {
    const low = versionAt(now, from), high = Math.max(low + 1, versionAt(now, to));
    const least = Math.min(low, ...now.workers.flatMap((one) => visible(one.steps, from, to, inside, (s) => s[1], (s) => s[8]).map((s) => s[6])));
    const y = (version) => top + CHART - 14 - ((version - least) / (high - least)) * (CHART - 30);
    return { low, y, marks: ticks(least, high, 6).filter((v) => v === Math.round(v)) };
  }

  function drawVersions(ctx, now, at, { low, y, marks }, from, to, inside, look) {
    for (const v of marks) stroke(ctx, look.rule, 0.7, [], [at(from), y(v)], [at(to), y(v)]);
    now.workers.forEach((one, k) => {
      const shown = visible(one.steps, from, to, inside, (s) => s[1], (s) => Math.max(s[5], s[8]));
      for (const [, , pull1, , , push1, version, update, applied, late] of shown) {
        const shift = (k - (now.workers.length - 1) / 2) * Math.min(3, 24 / now.workers.length);
        const end = update < 0 ? push1 : applied, line = y(version) + shift;
        stroke(ctx, hue(k), k === worker ? 3 : 1.6, k % 2 ? [7, 2] : [], [at(pull1), line], [at(end), line]);
        if (update < 0) words(ctx, "✕", at(end), line, look.warn, "center", 10);
        else if (late) stroke(ctx, hue(k), 1, [2, 2], [at(end), line], [at(end), y(update)]);
        if (late && at(end) - at(pull1) > 30) words(ctx, String(late), at(end) - 3, (line + y(update)) / 2, hue(k), "right", 10);
      }
    });
    const points = [[at(from), y(low)]];
    for (let k = low; k < now.updates.length && now.updates[k] <= to; k++) points.push([at(now.updates[k]), y(k)], [at(now.updates[k]), y(k + 1)]);
    points.push([at(to), points.at(-1)[1]]);
    stroke(ctx, look.ink, 1.8, [], ...points);
  }

  function clampTo(from, to) {
    const all = data().time, length = Math.min(all, Math.max(all * 1e-6, to - from));
    const begin = Math.max(0, Math.min(all - length, from));
    window_ = length >= all * 0.999999 ? null : [begin, begin + length];
    view.repaint();
  }
  function zoom(by, centre) {
    const [from, to] = range(), c = centre ?? (from + to) / 2;
    clampTo(c - (c - from) * by, c + (to - c) * by);
    view.say(`${short(range()[0])} to ${short(range()[1])} ${data().unit}`);
  }
  function pan(by) {
    const [from, to] = range(), shift = (to - from) * by;
    clampTo(from + shift, to + shift);
    view.say(`${short(range()[0])} to ${short(range()[1])} ${data().unit}`);
  }
  function choose(to, step) {
    worker = Math.max(0, Math.min(data().workers.length - 1, to));
    const one = data().workers[worker];
    chosen = step;
    view.say(chosen >= 0 ? sentence(data(), worker, chosen) : data().words[worker]);
    if (chosen >= 0) {
      const [from, to_] = range(), [, pull0, , , , push1] = one.steps[chosen];
      if (pull0 < from || push1 > to_) clampTo(pull0 - (to_ - from) / 3, pull0 + ((to_ - from) * 2) / 3);
    }
    view.repaint();
  }
  function walk(by) {
    leaving = false;
    choose(worker, Math.max(0, Math.min(data().workers[worker].steps.length - 1, chosen + by)));
  }
  function next(by) {
    const to = leaving ? -1 : chosen + by;
    leaving = false;
    if (to < 0 || to >= data().workers[worker].steps.length) { chosen = -1; view.repaint(); return false; }
    choose(worker, to);
    return true;
  }
  view.toolbar.prepend(
    ...[["−", "zoom out (minus)", () => zoom(2)], ["+", "zoom in (plus)", () => zoom(0.5)], ["all", "show all (Home)", () => { window_ = null; view.repaint(); }]].map(
      ([label, title, run]) => make("button", { type: "button", title, "aria-label": title, onclick: run }, label)),
  );
  const timeAt = (event) => {
    const [from, to] = range();
    return from + ((event.offsetX - MARGIN) / (right(view.canvas.clientWidth) - MARGIN)) * (to - from);
  };
  const under = (event) => {
    const t = timeAt(event), lane = Math.floor(event.offsetY / LANE), k = lane - data().servers.length;
    if (lane >= lanes() || lane < 0 || event.offsetX < MARGIN) return {};
    if (k < 0) return { server: lane, act: data().servers[lane].find((act) => act[1] <= t && t <= act[2]) };
    return { worker: k, step: data().workers[k].steps.findIndex((step) => step[1] <= t && t <= step[5]), away: data().workers[k].away.find(([a, b]) => a <= t && t <= b) };
  };
  let drag = null;
  view.listen(view.canvas, "pointermove", (event) => {
    if (drag && event.buttons) {
      const [from, to] = drag.range, per = (to - from) / (right(view.canvas.clientWidth) - MARGIN);
      return clampTo(from - (event.offsetX - drag.x) * per, to - (event.offsetX - drag.x) * per);
    }
    const { act, server, worker: k, step, away } = under(event), unit = data().unit;
    let text = null;
    if (act) text = `server ${server} ${act[0]}${act[3] >= 0 ? ` (worker ${act[3]}, step ${act[4]})` : ""}\nversion ${act[5]} after it, ${short(act[2] - act[1])} ${unit}`;
    else if (away) text = `worker ${data().workers[k].rank} was away from ${short(away[0])} to ${short(away[1])} ${unit}`;
    else if (step >= 0) text = sentence(data(), k, step);
    else if (event.offsetY > lanes() * LANE && event.offsetX > MARGIN) text = `${short(timeAt(event))} ${unit}: version ${versionAt(data(), timeAt(event))}`;
    view.tip(event.offsetX, event.offsetY, text);
  });
  view.listen(view.canvas, "pointerdown", (event) => {
    drag = { x: event.offsetX, range: range() };
    const { worker: k, step } = under(event);
    if (k != null) choose(k, step ?? -1);
  });
  view.listen(window, "pointerup", () => { drag = null; });
  view.listen(view.canvas, "pointerleave", () => view.tip(0, 0, null));
  view.listen(view.canvas, "wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event));
  }, { passive: false });
  const changed = () => { window_ = null; worker = 0; chosen = -1; view.repaint(); };
  model.on("change:data", changed);
  return () => { model.off("change:data", changed); view.dispose(); };
}

export default { render };
