// The collective player: chunks with their numbers on a grid (a row for each rank), messages moving between the rows, the
// links lit on a circle, bytes that each rank has sent against the least possible, and a strip of time to play and drag.
import { FONT, frame, LOOKS, make, short } from "./shared.js";

const EDGE = 6, HEAD = 22, STRIP = 38;
const PACE = 0.9; // seconds for which a moment of the program is played

/** What is where at time t: cells[rank][chunk] (null or [value, parts]), messages on their way, bytes sent by rank. */
export function stateAt(play, t) {
  const cells = play.first.map((row) => row.slice());
  for (const [time, rank, chunk, cell] of play.changes) {
    if (time > t) break;
    cells[rank][chunk] = cell;
  }
  const sent = play.first.map(() => 0), flying = [];
  for (const message of play.messages) {
    const [source, , start, end, bytes] = message;
    if (start > t) break;
    if (t < end) flying.push(message);
    sent[source] += bytes * (end > start ? Math.min(1, (t - start) / (end - start)) : 1);
  }
  return { cells, flying, sent };
}

/** Where to stop after t (step 1), or before it (step -1): the ends, and half-way between any two moments, when there is
 * something to see. */
export function moment(play, t, step) {
  const slack = 1e-9 * play.time, m = play.moments;
  const stops = [0, ...m.slice(1).map((time, k) => (m[k] + time) / 2), play.time];
  if (step > 0) return stops.find((stop) => stop > t + slack) ?? play.time;
  return stops.reverse().find((stop) => stop < t - slack) ?? 0;
}

/** Time t in words: what is on its way, or what has been done. */
export function sentence(play, t) {
  const { cells, flying } = stateAt(play, t);
  const at = `${short(t)} of ${short(play.time)} ${play.unit}`;
  const adding = addedAt(play, t).map(([, , rank, chunk]) => `rank ${rank} adds to chunk ${chunk}`);
  if (!flying.length && !adding.length) {
    const whole = cells.filter((row, r) => row.every((cell, c) => (cell?.[1] ?? 0) === (play.last[r][c]?.[1] ?? 0))).length;
    return `${at}: nothing is on its way; ${whole} of ${cells.length} ranks hold what they end with`;
  }
  const said = flying.map(([source, target, , , , chunks, values]) =>
    `rank ${source} sends ${chunks.length > 1 ? `${chunks.length} chunks` : `chunk ${chunks[0]}, ${values[0]},`} to rank ${target}`).concat(adding);
  const more = said.length > 3 ? `; and ${said.length - 3} more` : "";
  return `${at}: ${said.slice(0, 3).join("; ")}${more}`;
}

/** The additions that go on at time t: start, end, rank, chunk. */
export function addedAt(play, t) {
  return play.adds.filter(([start, end]) => start <= t && t < end);
}

/** How many ranks' parts are in a cell. */
export function count(parts) {
  let n = 0;
  for (let x = parts; x; x &= x - 1) n++;
  return n;
}

/** Where everything is, in CSS pixels. */
export function places(play, width) {
  const ranks = play.first.length, chunks = play.sizes.length, wide = width >= 720;
  const circle = wide ? Math.min(280, 0.3 * width) : Math.min(220, width - 2 * EDGE);
  const left = (wide ? circle + 24 : 0) + 58, least = width >= 480 ? 170 : 90;
  const top = (wide ? 0 : circle + 10) + HEAD;
  const row = Math.max(18, Math.min(40, 300 / ranks));
  const cell = Math.min(64, (width - EDGE - left - least - 14) / chunks);
  const barsLeft = left + chunks * cell + 14, bars = Math.min(340, width - EDGE - barsLeft);
  const height = Math.max(wide ? circle : 0, top + ranks * row) + 12 + STRIP;
  return { wide, circle, left, bars, top, row, cell, chunks, ranks, height, barsLeft, strip: height - STRIP };
}

function onCircle(p, rank) {
  const angle = (2 * Math.PI * rank) / p.ranks - Math.PI / 2, radius = p.circle / 2 - 18;
  return [p.circle / 2 + radius * Math.cos(angle), p.circle / 2 + radius * Math.sin(angle)];
}

function drawCircle(ctx, play, p, t, flying, look) {
  const busiest = Math.max(1, ...play.links.map((link) => link[2]));
  for (const [source, target, bytes] of play.links) {
    const [a, b] = onCircle(p, source), [c, d] = onCircle(p, target);
    ctx.strokeStyle = look.muted;
    ctx.globalAlpha = 0.6;
    ctx.lineWidth = 0.5 + (1.5 * bytes) / busiest;
    ctx.beginPath();
    ctx.moveTo(a, b);
    ctx.quadraticCurveTo((a + c) / 2 + (d - b) * 0.12, (b + d) / 2 - (c - a) * 0.12, c, d);
    ctx.stroke();
    ctx.globalAlpha = 1;
  }
  for (const [source, target, start, end] of flying) {
    const [a, b] = onCircle(p, source), [c, d] = onCircle(p, target);
    const f = (t - start) / (end - start), g = 1 - f;
    const mx = (a + c) / 2 + (d - b) * 0.12, my = (b + d) / 2 - (c - a) * 0.12;
    ctx.strokeStyle = look.wire;
    ctx.lineWidth = 2.5;
    ctx.beginPath();
    ctx.moveTo(a, b);
    ctx.quadraticCurveTo(mx, my, c, d);
    ctx.stroke();
    ctx.fillStyle = look.wire;
    ctx.beginPath();
    ctx.arc(g * g * a + 2 * f * g * mx + f * f * c, g * g * b + 2 * f * g * my + f * f * d, 5, 0, 2 * Math.PI);
    ctx.fill();
  }
  const size = Math.max(8, Math.min(14, 120 / p.ranks));
  for (let rank = 0; rank < p.ranks; rank++) {
    const [x, y] = onCircle(p, rank);
    ctx.fillStyle = look.paper;
    ctx.strokeStyle = look.ink;
    ctx.lineWidth = 1.2;
    ctx.beginPath();
    ctx.arc(x, y, size, 0, 2 * Math.PI);
    ctx.fill();
    ctx.stroke();
    words(ctx, String(rank), x, y + 0.5, look.ink, "center", Math.min(12, size + 1));
  }
  if (play.nodes > 1) words(ctx, `${play.nodes} nodes of ${p.ranks / play.nodes}`, p.circle / 2, p.circle / 2, look.muted, "center", 11);
}

function words(ctx, text, x, y, ink, align = "left", size = 11) {
  ctx.fillStyle = ink;
  ctx.font = `${size}px ${FONT}`;
  ctx.textAlign = align;
  ctx.textBaseline = "middle";
  ctx.fillText(text, x, y);
}

function drawCell(ctx, play, p, rank, chunk, cell, done, look) {
  const x = p.left + chunk * p.cell, y = p.top + rank * p.row, w = p.cell - 2, h = p.row - 3;
  const n = cell ? count(cell[1]) : 0;
  const [face, edge, ink] = done ? LOOKS["optimizer step"] : n > 1 ? LOOKS["recompute"] : LOOKS["forward"];
  if (!cell) {
    ctx.strokeStyle = look.rule;
    ctx.lineWidth = 1;
    ctx.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    return;
  }
  ctx.fillStyle = face;
  ctx.fillRect(x, y, w, h);
  ctx.strokeStyle = edge;
  ctx.lineWidth = 1;
  ctx.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
  const text = String(cell[0]);
  if (w >= 6 + 6.4 * text.length) words(ctx, text, x + w / 2, y + (h - 4) / 2 + 0.5, ink, "center", Math.min(12, h - 5));
  const part = (w - 4) / p.ranks; // a mark for each rank whose part is in it
  ctx.fillStyle = ink;
  if (part >= 1) for (let r = 0; r < p.ranks; r++) if (cell[1] & (1 << r)) ctx.fillRect(x + 2 + r * part, y + h - 5, Math.max(0.8, part - 1), 3);
}

function drawMessage(ctx, p, message, t) {
  const [source, target, start, end, , chunks, values] = message, f = (t - start) / (end - start);
  const [face, edge, ink] = LOOKS.message, h = p.row - 7;
  chunks.forEach((chunk, k) => {
    const x = p.left + chunk * p.cell + 3, y = p.top + (source + (target - source) * f) * p.row + 2, w = p.cell - 8;
    ctx.fillStyle = face;
    ctx.globalAlpha = 0.93;
    ctx.fillRect(x, y, w, h);
    ctx.globalAlpha = 1;
    ctx.strokeStyle = edge;
    ctx.lineWidth = 1.5;
    ctx.strokeRect(x, y, w, h);
    const text = `${target > source ? "↓" : "↑"}${values[k]}`;
    if (w >= 4 + 6.4 * text.length) words(ctx, text, x + w / 2, y + h / 2 + 0.5, "#201400", "center", Math.min(12, h - 3));
    else if (w >= 8) words(ctx, text[0], x + w / 2, y + h / 2, ink, "center", 9);
  });
}

function drawBars(ctx, play, p, sent, look) {
  const most = Math.max(play.least, ...play.sent) || 1, scale = (p.bars - 4) / most;
  words(ctx, p.bars > 110 ? "bytes sent, of all; least" : "sent", p.barsLeft, p.top - 11, look.muted);
  for (let rank = 0; rank < p.ranks; rank++) {
    const y = p.top + rank * p.row + 1, h = p.row - 5;
    ctx.fillStyle = LOOKS.message[0];
    ctx.fillRect(p.barsLeft, y, sent[rank] * scale, h);
    ctx.strokeStyle = LOOKS.message[1];
    ctx.lineWidth = 1;
    if (play.sent[rank]) ctx.strokeRect(p.barsLeft + 0.5, y + 0.5, Math.max(0, play.sent[rank] * scale - 1), h - 1);
  }
  const x = p.barsLeft + play.least * scale;
  ctx.strokeStyle = look.ink;
  ctx.lineWidth = 1.5;
  ctx.setLineDash([4, 3]);
  ctx.beginPath();
  ctx.moveTo(x, p.top - 3);
  ctx.lineTo(x, p.top + p.ranks * p.row);
  ctx.stroke();
  ctx.setLineDash([]);
}

function drawStrip(ctx, play, p, t, width, look) {
  const y = p.strip + 12, left = EDGE + 4, scale = (width - 2 * left) / play.time;
  ctx.fillStyle = look.rule;
  ctx.fillRect(left, y, width - 2 * left, 6);
  ctx.fillStyle = look.focus;
  ctx.fillRect(left, y, t * scale, 6);
  ctx.fillStyle = look.muted;
  for (const m of play.moments) ctx.fillRect(left + m * scale - 0.5, y + 8, 1, 4);
  ctx.fillStyle = look.ink;
  ctx.beginPath();
  ctx.arc(left + t * scale, y + 3, 7, 0, 2 * Math.PI);
  ctx.fill();
  words(ctx, `0`, left, y + 19, look.muted);
  words(ctx, `${short(play.time)} ${play.unit}`, width - left, y + 19, look.muted, "right");
}

function render({ model, el }) {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  let t = 0, playing = 0, before = 0, speed = 1;
  const play = () => model.get("play");

  const view = frame(model, el, {
    name: "collective",
    help: [
      ["← →", "one step back, one step on (also , and .)"], ["Home End", "to the beginning, to the end"],
      ["space", "play or pause"], ["< >", "slower, faster"],
    ],
    height: (width) => places(play(), width).height,
    draw(ctx, width, height, look) {
      const now = play(), p = places(now, width), { cells, flying, sent } = stateAt(now, t);
      drawCircle(ctx, now, p, t, flying, look);
      const every = Math.ceil(24 / p.cell);
      for (let c = 0; c < p.chunks; c += every) words(ctx, p.cell > 52 ? `chunk ${c}` : String(c), p.left + (c + 0.5) * p.cell - 1, p.top - 11, look.muted, "center");
      for (let rank = 0; rank < p.ranks; rank++) {
        words(ctx, `rank ${rank}`, p.left - 8, p.top + (rank + 0.5) * p.row - 1, look.ink, "right");
        for (let c = 0; c < p.chunks; c++) {
          const cell = cells[rank][c], goal = now.last[rank][c];
          drawCell(ctx, now, p, rank, c, cell, cell && goal && cell[1] === goal[1] && (count(goal[1]) > 1 || t >= now.time), look);
        }
      }
      for (const [, , rank, chunk] of addedAt(now, t)) {
        ctx.strokeStyle = LOOKS.reduce[0];
        ctx.lineWidth = 3;
        ctx.strokeRect(p.left + chunk * p.cell + 1, p.top + rank * p.row + 1, p.cell - 4, p.row - 5);
        words(ctx, "+", p.left + (chunk + 1) * p.cell - 9, p.top + rank * p.row + 8, "#fefefe", "center", 12);
      }
      for (const message of flying) drawMessage(ctx, p, message, t);
      drawBars(ctx, now, p, sent, look);
      drawStrip(ctx, now, p, t, width, look);
    },
    keys: {
      ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => seek(0), End: () => seek(play().time),
      ",": () => step(-1), ".": () => step(1), " ": () => toggle(), ">": () => faster(2), "<": () => faster(0.5),
    },
  });

  function seek(time, quiet) {
    t = Math.max(0, Math.min(play().time, time));
    if (!quiet) view.say(sentence(play(), t));
    view.repaint();
  }
  function step(by) { stop(); seek(moment(play(), t, by)); }
  function faster(by) {
    speed = Math.max(0.25, Math.min(8, speed * by));
    view.say(`speed ${speed}`);
  }
  function stop() {
    cancelAnimationFrame(playing);
    playing = 0;
    button.textContent = "▶ play";
    button.setAttribute("aria-label", "play");
  }
  function tick(now) {
    const one = play(), seconds = Math.max(2, PACE * one.moments.length) / speed;
    if (still) {
      if (now - before > (1000 * PACE) / speed) { before = now; seek(moment(one, t, 1)); }
    } else {
      seek(t + (one.time * Math.min(100, now - before)) / 1000 / seconds, true);
      before = now;
    }
    if (t >= one.time) { stop(); return view.say(sentence(one, t)); }
    playing = requestAnimationFrame(tick);
  }
  function toggle() {
    if (playing) { stop(); return view.say(sentence(play(), t)); }
    if (t >= play().time) t = 0;
    button.textContent = "❚❚ pause";
    button.setAttribute("aria-label", "pause");
    before = performance.now();
    playing = requestAnimationFrame(tick);
  }
  const tools = [
    ["|◀", "to the beginning (Home)", () => { stop(); seek(0); }], ["◁", "one step back (left arrow)", () => step(-1)],
    ["▶ play", "play", toggle], ["▷", "one step on (right arrow)", () => step(1)], ["▶|", "to the end (End)", () => { stop(); seek(play().time); }],
  ].map(([label, title, run]) => make("button", { type: "button", title, "aria-label": title, onclick: run }, label));
  const button = tools[2];
  button.style.minWidth = "6em";
  view.toolbar.prepend(...tools);

  const inStrip = (event) => event.offsetY >= places(play(), view.canvas.clientWidth).strip;
  const drag = (event) => { stop(); seek(((event.offsetX - EDGE - 4) / (view.canvas.clientWidth - 2 * EDGE - 8)) * play().time); };
  view.listen(view.canvas, "pointerdown", (event) => {
    if (!inStrip(event)) return;
    view.canvas.setPointerCapture(event.pointerId);
    drag(event);
  });
  view.listen(view.canvas, "pointermove", (event) => {
    if (event.buttons && view.canvas.hasPointerCapture(event.pointerId)) return drag(event);
    const p = places(play(), view.canvas.clientWidth), { cells, sent } = stateAt(play(), t);
    const rank = Math.floor((event.offsetY - p.top) / p.row), chunk = Math.floor((event.offsetX - p.left) / p.cell);
    if (rank < 0 || rank >= p.ranks) return view.tip(0, 0, null);
    if (event.offsetX >= p.barsLeft) {
      const out = play().links.filter((link) => link[0] === rank).map(([, target, , words]) => `to rank ${target}: ${words}`);
      return view.tip(event.offsetX, event.offsetY, [`rank ${rank} sends ${play().words.sent[rank]}; the least: ${play().words.least}`, ...out.slice(0, 6)].join("\n"));
    }
    const cell = chunk >= 0 && chunk < p.chunks ? cells[rank][chunk] : null;
    const parts = cell && [...Array(p.ranks).keys()].filter((r) => cell[1] & (1 << r)).join(", ");
    view.tip(event.offsetX, event.offsetY, cell ? `rank ${rank}, chunk ${chunk}: ${cell[0]}\nparts of ranks ${parts}` : null);
  });
  view.listen(view.canvas, "pointerleave", () => view.tip(0, 0, null));

  const changed = () => { stop(); seek(moment(play(), 0, 1)); };
  model.on("change:play", changed);
  if (!model.get("problem")) changed();
  return () => { cancelAnimationFrame(playing); model.off("change:play", changed); view.dispose(); };
}

export default { render };
