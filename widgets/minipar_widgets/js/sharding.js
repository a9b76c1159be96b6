// The sharding explorer: a row for each tensor with its form on every axis (one column for each letter), the collectives
// that follow between the rows, a mistake under the operator that it is about, and beside them the chosen tensor's blocks
// on the mesh. Python propagates; where there is no kernel, everything can be read, and nothing can be fixed.
import { drawEdge, drawRect, drawText, fill, fit, frame, LOOKS, make, wrapped } from "./shared.js";

const HEAD = 40, PANEL = 300, EDGE = 6, RAIL = 16;

/** Colours of forms, as in sharding_explorer.py: face, edge, ink on it, hatch in the blocks. */
export const PLACED = {
  R: ["#c4c4c4", "#6a6a6a", "#201400", ""],
  S: ["#0072B2", "#004a75", "#fefefe", ""],
  P: ["#E69F00", "#7a5300", "#201400", "/"],
};

/** Where everything is, in CSS pixels: `items` are the rows, collectives and the mistake from above, with y and h. */
export function places(data, width) {
  const axes = data.axes.length, n = data.letters.length, gap = 12, least = 250 + axes * (18 * n + gap);
  const wide = width >= Math.max(700, least + PANEL + 20);
  const list = wide ? Math.min(width - PANEL - 20, 380 + axes * (28 * n + gap)) : width, stacked = list < least;
  const room = stacked ? list - RAIL - EDGE : 0.56 * list;
  const cell = Math.max(12, Math.min(28, Math.floor((room - (axes - 1) * gap) / (axes * n))));
  const grid = stacked ? RAIL : list - EDGE - axes * n * cell - (axes - 1) * gap;
  const items = [];
  let y = stacked ? HEAD + 2 : HEAD;
  const put = (kind, k, h, more) => { items.push({ kind, k, y, h, ...more }); y += h; };
  const problem = () => {
    const lines = wrapped(`✗ ${data.problem}`, Math.max(24, Math.floor((list - RAIL - 16) / 6.3)));
    put("problem", data.where, 10 + 15 * lines.length, { lines });
  };
  if (data.problem && data.where < 0) problem();
  for (let k = 0; k <= data.rows.length; k++) {
    data.moves.forEach((move, m) => { if (move.at === k) put("move", m, stacked ? 40 : 22); });
    if (k < data.rows.length) put("row", k, stacked ? 44 : 26);
    if (data.problem && data.where === k) problem();
  }
  const axisAt = (a) => grid + a * (n * cell + gap);
  return { wide, list, stacked, cell, grid, gap, items, axisAt, bottom: y, letters: n, panel: wide ? list + 20 : 0, panelWidth: wide ? Math.min(440, width - list - 20) : width };
}

/** The tiles of the ranks: where each one is within the panel, how large, and what of the tensor it shows. */
export function tiles(data, row, width) {
  const lengths = data.axes.map(([, length]) => length), cut = cutDims(row);
  const free = row.shape.map((_, d) => d).filter((d) => !cut.includes(d));
  const dims = [...cut.slice(0, 2), ...free.reverse()].slice(0, 2).sort((a, b) => a - b);
  const columns = lengths.length === 1 ? Math.min(lengths[0], 4) : lengths.slice(1).reduce((a, b) => a * b, 1);
  const label = lengths.length > 1 ? 42 : 0, w = Math.min(112, (width - EDGE - label) / columns - 8);
  const [a, b] = dims.length > 1 ? dims.map((d) => row.shape[d]) : [1, 2.5];
  const h = w * Math.max(0.55, Math.min(1.15, Math.sqrt(a / Math.max(1, b))));
  const step = h + 30 + (w >= 46 ? 4 : 0);
  const at = data.ranks.map((_, rank) => ({ x: label + (rank % columns) * (w + 8), y: Math.floor(rank / columns) * step }));
  return { dims, cut, columns, w, h, step, at, label, height: Math.ceil(data.ranks.length / columns) * step };
}

/** The dimensions of a tensor of which the ranks have different parts. */
export function cutDims(row) {
  return row.shape.map((_, d) => d).filter((d) => row.blocks.some((block) => JSON.stringify(block[d]) !== JSON.stringify([[0, row.shape[d]]])));
}

/** What a rank has, as slices: "[0:4, :, 128:256]". */
export function slices(row, rank, only = null) {
  const said = row.blocks[rank].map((held, d) => (held.length === 1 && held[0][0] === 0 && held[0][1] === row.shape[d] ? ":" : held.map(([a, b]) => `${a}:${b}`).join("+")));
  return only ? only.map((d) => said[d]).join(", ") : `[${said.join(", ")}]`;
}

/** Rank r in words: where it is, what it has, and with whom. */
export function holding(data, row, rank) {
  const name = (r) => `rank ${r} (${data.axes.map(([axis], a) => `${axis} ${data.ranks[r][a]}`).join(", ")})`;
  const same = (r) => JSON.stringify(row.blocks[r]) === JSON.stringify(row.blocks[rank]);
  const sums = data.axes.map((_, a) => a).filter((a) => row.forms[data.axes[a][0]] === "P");
  const rest = (r, parts) => data.axes.every((_, a) => sums.includes(a) === !parts || data.ranks[r][a] === data.ranks[rank][a]);
  const alike = data.ranks.map((_, r) => r).filter((r) => r !== rank && same(r) && rest(r, true));
  const parts = data.ranks.map((_, r) => r).filter((r) => rest(r, false));
  const lines = [`${name(rank)} has ${slices(row, rank)} of ${row.own}: ${row.part}`];
  if (sums.length) lines.push(`a part of a sum: with those of rank ${parts.filter((r) => r !== rank).join(", ")} it is the value`);
  const copies = sums.length ? alike.filter((r) => sums.every((a) => data.ranks[r][a] === data.ranks[rank][a])) : alike;
  if (copies.length) lines.push(`the same as rank ${copies.join(", ")}`);
  return lines.join("\n");
}

/** A tensor in words. */
export function rowWords(data, row) {
  const fixed = data.fixed[row.name] ?? {};
  const forms = data.axes.map(([axis]) => `${row.forms[axis]} on ${axis}${fixed[axis] ? " (fixed by you)" : ""}`).join(", ");
  return `${row.own}, ${row.made}, ${row.shape.join(" × ")}, ${row.whole}: ${forms}; a rank has ${row.local.join(" × ")}, ${row.part}`;
}

/** A collective in words. */
export function moveWords(move) {
  const what = move.phase === "backward" && move.before ? `gradient of ${move.value}` : move.value;
  const from = move.before ? `, ${move.before} to ${move.after}` : ", inside of the operator";
  return `${move.phase}: ${move.op} over ${move.axis} of ${what}${from}; ${move.bytes} on each rank, ${move.time}${move.once ? ", once a step" : ""}; ${move.why}`;
}

/** The picks after a click on a letter: it is fixed, or free again if it was. Also what to say of it. */
export function clicked(data, k, axis, letter) {
  const row = data.rows[k], others = data.picks.filter(([tensor, a]) => tensor !== row.name || a !== axis);
  const again = data.fixed[row.name]?.[axis] === letter || data.bad?.join(" ") === [row.name, axis, letter].join(" ");
  return again || letter == null ? others : [...others, [row.name, axis, letter]];
}

/** What a letter would give, as far as it is known. */
export function prospect(data, told, k, axis, letter) {
  const row = data.rows[k];
  if (!letter) return "";
  if (!row.offered[axis].includes(letter)) return letter === "P" ? `${row.own} is stored, so it is no part of a sum` : "";
  const known = told?.[row.name]?.[axis]?.[letter];
  if (data.fixed[row.name]?.[axis] === letter) return `${row.own} is fixed as ${letter} on ${axis}; again: it is free`;
  const head = row.forms[axis] === letter ? `${row.own} is ${letter} on ${axis}` : `${row.own} as ${letter} on ${axis}`;
  return known ? `${head}: ${known[0] ? known[1] : `cannot be: ${known[1]}`}` : head;
}

/** The letters of a tensor in a column: S2:3 stands in that of S2. */
export const inColumn = (offered, column) => offered.find((letters) => letters.split(":")[0] === column);

const lookOf = (letter) => PLACED[letter[0]];

function arrow(ctx, x0, x1, y, ink, dashed) {
  const side = Math.sign(x1 - x0) || 1;
  ctx.strokeStyle = ctx.fillStyle = ink;
  ctx.lineWidth = 2;
  ctx.setLineDash(dashed ? [4, 3] : []);
  ctx.beginPath();
  ctx.moveTo(x0, y);
  ctx.lineTo(x1 - 6 * side, y);
  ctx.stroke();
  ctx.setLineDash([]);
  ctx.beginPath();
  ctx.arc(x0, y, 3, 0, 2 * Math.PI);
  ctx.fill();
  ctx.beginPath();
  ctx.moveTo(x1, y);
  ctx.lineTo(x1 - 7 * side, y - 4);
  ctx.lineTo(x1 - 7 * side, y + 4);
  ctx.closePath();
  ctx.fill();
}

function drawHead(ctx, data, p, look) {
  data.axes.forEach(([axis, length], a) => {
    const x = p.axisAt(a), w = p.letters * p.cell;
    drawText(ctx, `on ${axis} (${length} ranks)`, x + w / 2, 11, look.ink, "center", 12, "bold ");
    data.letters.forEach((letter, c) => drawText(ctx, letter, x + (c + 0.5) * p.cell, 28, look.muted, "center", p.cell < 20 ? 9 : 11));
    drawRect(ctx, look.rule, x, 36, w, 1);
  });
}

function drawRow(ctx, data, told, p, item, look, state) {
  const row = data.rows[item.k], fixed = data.fixed[row.name] ?? {}, { y, h } = item;
  const line = p.stacked ? y + 11 : y + h / 2, cells = p.stacked ? y + 19 : y + 2, tall = 22;
  const guilty = data.problem && data.where === item.k;
  if (state.here) drawRect(ctx, look.focus, 0, y, p.list, h, look.dark ? 0.22 : 0.12);
  if (guilty) drawRect(ctx, look.warn, 0, y + 1, 4, h - 2);
  const room = (p.stacked ? p.list : p.grid) - RAIL - 10, shape = row.shape.join("×");
  ctx.font = "11px system-ui";
  const name = fit(ctx, [row.own], room - ctx.measureText(shape).width - 8, 12.8); // (bold letters are wider)
  drawText(ctx, name, RAIL, line, look.ink, "left", 12, "bold ");
  const taken = ctx.measureText(name).width + 8;
  drawText(ctx, shape, (p.stacked ? p.list : p.grid) - 12, line, look.muted, "right", 11);
  const left = room - taken - ctx.measureText(shape).width - 12;
  const short = row.made.replace(/\(.*/, "");
  drawText(ctx, fit(ctx, [row.stored ? row.made : `= ${row.made}`, row.stored ? row.made : `= ${short}`, ""], left, 11), RAIL + taken, line, look.muted, "left", 11);
  data.axes.forEach(([axis], a) => data.letters.forEach((column, c) => {
    const letter = inColumn(row.offered[axis], column);
    if (!letter) return;
    const x = p.axisAt(a) + c * p.cell, now = row.forms[axis] === letter;
    const waits = state.pending?.[row.name]?.[axis] === letter, bad = data.bad?.join(" ") === [row.name, axis, letter].join(" ");
    const size = letter.length > 2 ? 8 : p.cell < 20 ? 10 : 11;
    if (now) {
      const [face, edge, ink] = lookOf(letter), mine = fixed[axis] === letter;
      drawRect(ctx, face, x + 1, cells, p.cell - 2, tall);
      drawEdge(ctx, mine ? look.ink : edge, x + 1, cells, p.cell - 2, tall, mine ? 2.5 : 1);
      drawText(ctx, letter, x + p.cell / 2, cells + tall / 2 + 0.5, ink, "center", size, mine ? "bold " : "");
    } else {
      const cannot = told?.[row.name]?.[axis]?.[letter]?.[0] === false;
      drawText(ctx, cannot ? "×" : letter, x + p.cell / 2, cells + tall / 2 + 0.5, bad ? look.warn : look.muted, "center", size);
    }
    if (bad) drawEdge(ctx, look.warn, x + 1, cells, p.cell - 2, tall, 2.5);
    if (waits) { ctx.setLineDash([3, 2]); drawEdge(ctx, look.ink, x + 1, cells, p.cell - 2, tall, 2); ctx.setLineDash([]); }
    if (state.here && state.axis === a && state.letter === c) drawEdge(ctx, look.focus, x - 1, cells - 2, p.cell + 2, tall + 4, 2);
  }));
}

function drawMove(ctx, data, p, item, look, here) {
  const move = data.moves[item.k], { y, h } = item, back = move.phase === "backward";
  if (here) drawRect(ctx, look.focus, 0, y, p.list, h, look.dark ? 0.22 : 0.12);
  const line = p.stacked ? y + 11 : y + h / 2;
  const [face, edge, , hatch] = LOOKS.collective;
  drawRect(ctx, fill(ctx, face, edge, hatch), RAIL, line - 8, 20, 16);
  drawEdge(ctx, edge, RAIL, line - 8, 20, 16);
  drawRect(ctx, look.paper, RAIL + 4, line - 7, 12, 14);
  drawText(ctx, back ? "↑" : "↓", RAIL + 10, line + 0.5, look.wire, "center", 13, "bold ");
  const what = back && move.before ? `gradient of ${move.value}` : move.value;
  const room = (p.stacked ? p.list : p.grid) - RAIL - 36;
  const over = move.before ? "" : ` over ${move.axis}, inside`;
  const text = fit(ctx, [`${move.op}${over} of ${what}: ${move.bytes}, ${move.time}`, `${move.op}${over}: ${move.bytes}, ${move.time}`, `${move.op}${over}, ${move.time}`], room, 11);
  drawText(ctx, text, RAIL + 26, line, look.wire, "left", 11);
  const a = data.axes.findIndex(([axis]) => axis === move.axis), column = (letters) => p.axisAt(a) + (data.letters.indexOf(letters.split(":")[0]) + 0.5) * p.cell;
  if (move.before && move.after) arrow(ctx, column(move.before), column(move.after), p.stacked ? y + 29 : line, look.wire, back);
}

function drawProblem(ctx, p, item, look) {
  drawRect(ctx, look.warn, RAIL - 6, item.y + 3, p.list - RAIL, item.h - 6, 0.14);
  drawRect(ctx, look.warn, RAIL - 6, item.y + 3, 3, item.h - 6);
  item.lines.forEach((line, k) => drawText(ctx, line, RAIL + 4, item.y + 12 + 15 * k, look.ink, "left", 11.5));
}

/** Lines on the left from what the chosen tensor is made of, and to what is made of it. */
function drawRail(ctx, data, p, k, look) {
  const at = (row) => { const item = p.items.find((one) => one.kind === "row" && one.k === row); return p.stacked ? item.y + 11 : item.y + item.h / 2; };
  for (const [from, to] of data.edges) {
    if (from !== k && to !== k) continue;
    const other = from === k ? to : from, a = at(k), b = at(other);
    ctx.strokeStyle = ctx.fillStyle = look.focus;
    ctx.lineWidth = 1.6;
    ctx.setLineDash(from === k ? [3, 2] : []);
    ctx.beginPath();
    ctx.moveTo(RAIL - 3, a);
    ctx.bezierCurveTo(-2, a, -2, b, RAIL - 3, b);
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.arc(RAIL - 4, b, 2.5, 0, 2 * Math.PI);
    ctx.fill();
  }
}

function drawPanel(ctx, data, p, row, left, top, look, over) {
  const t = tiles(data, row, p.panelWidth), width = p.panelWidth - EDGE;
  drawText(ctx, fit(ctx, [`Who holds what of ${row.own}`, row.own], width, 13), left, top + 9, look.ink, "left", 13, "bold ");
  const dims = t.dims.length > 1 ? `a tile is dimensions ${t.dims[0]} (down) and ${t.dims[1]} (across)` : "a tile is all of it";
  drawText(ctx, fit(ctx, [`${row.shape.join("×") || "a number"}, ${row.whole}; a rank has ${row.local.join("×") || "it"}, ${row.part}`, `a rank has ${row.local.join("×")}, ${row.part}`], width, 11), left, top + 27, look.muted, "left", 11);
  drawText(ctx, fit(ctx, [dims, ""], width, 11), left, top + 42, look.muted, "left", 11);
  const y0 = top + 64, axes = data.axes;
  const letters = axes.map(([axis]) => row.forms[axis]), kind = letters.includes("P") ? "P" : letters.some((l) => l[0] === "S") ? "S" : "R";
  const [face, edge, , hatch] = PLACED[kind];
  t.at.forEach(({ x, y }, rank) => {
    const px = left + x, py = y0 + y + 14, place = data.ranks[rank];
    if (axes.length > 1 && x === t.label) drawText(ctx, `${axes[0][0]} ${place[0]}`, left, py + t.h / 2, look.muted, "left", 11);
    const across = axes.length > 1 ? axes.slice(1) : axes;
    const title = t.w >= 84 ? `rank ${rank} · ${across.map(([axis], k) => `${axis} ${place[k + axes.length - across.length]}`).join(", ")}` : t.w >= 40 ? `rank ${rank}` : String(rank);
    drawText(ctx, fit(ctx, [title, `rank ${rank}`, String(rank)], t.w + 6, 11), px, y0 + y + 5, over === rank ? look.focus : look.ink, "left", 11);
    drawRect(ctx, look.rule, px, py, t.w, t.h, 0.55);
    const [down, across_] = t.dims.length > 1 ? t.dims : [null, t.dims[0] ?? null];
    const held = (d) => (d == null ? [[0, 1]] : row.blocks[rank][d]), whole = (d) => (d == null ? 1 : row.shape[d] || 1);
    for (const [a, b] of held(down)) for (const [c, d] of held(across_)) {
      const bx = px + (c / whole(across_)) * t.w, by = py + (a / whole(down)) * t.h, bw = ((d - c) / whole(across_)) * t.w, bh = ((b - a) / whole(down)) * t.h;
      drawRect(ctx, fill(ctx, face, edge, hatch), bx, by, bw, bh);
      drawEdge(ctx, edge, bx, by, bw, bh);
      if (kind === "P" && bw >= 22 && bh >= 18) {
        drawRect(ctx, face, bx + bw / 2 - 8, by + bh / 2 - 8, 16, 16);
        drawText(ctx, "Σ", bx + bw / 2, by + bh / 2 + 0.5, "#201400", "center", 13);
      }
    }
    drawEdge(ctx, over === rank ? look.focus : look.muted, px, py, t.w, t.h, over === rank ? 2 : 1);
    const text = t.cut.length ? slices(row, rank, t.cut) : "all of it";
    ctx.font = "10px system-ui";
    if (t.w >= 46 && ctx.measureText(text).width <= t.w + 6) drawText(ctx, text, px, py + t.h + 9, look.muted, "left", 10);
  });
  let y = y0 + t.height + 8;
  for (const [letter, words] of [["R", "whole: every rank has all of it"], ["S", "S0, S1, ...: a block of dimension 0, 1, ..."], ["P", "part of a sum: Σ over the ranks is the value"]]) {
    const [colour, rim, , mark] = PLACED[letter];
    drawRect(ctx, fill(ctx, colour, rim, mark), left, y - 6, 14, 12);
    drawEdge(ctx, rim, left, y - 6, 14, 12);
    drawText(ctx, fit(ctx, [words, words.split(":")[0]], width - 22, 11), left + 20, y, look.muted, "left", 11);
    y += 17;
  }
  drawEdge(ctx, look.ink, left, y - 6, 14, 12, 2.5);
  drawText(ctx, "thick edge: fixed by you", left + 20, y, look.muted, "left", 11);
  y += 22;
  for (const text of data.totals) { drawText(ctx, fit(ctx, [text], width, 11.5), left, y, look.wire, "left", 11.5); y += 16; }
}

const panelHeight = (data, p, row) => 64 + tiles(data, row, p.panelWidth).height + 8 + 4 * 17 + 22 + 16 * data.totals.length;

function render({ model, el }) {
  const data = () => model.get("data"), told = () => model.get("outlook");
  const may = () => model.get("editable");
  let stop = { kind: "row", k: 0 }, axis = 0, letter = 0, over = null, id = data().id ?? 0, pending = null, late = 0, asked = 0;
  const past = [];
  const begin = () => { // at the newest pick
    const now = data(), newest = now.bad ?? now.picks?.at(-1);
    stop = { kind: "row", k: now.chosen ?? 0 };
    axis = Math.max(0, newest ? now.axes.findIndex(([name]) => name === newest[1]) : 0);
    letter = Math.max(0, newest ? now.letters.indexOf(newest[2].split(":")[0]) : 0);
  };
  begin();

  const chosenRow = () => {
    const now = data();
    if (stop.kind === "row") return Math.min(stop.k, now.rows.length - 1);
    const move = now.moves[stop.k];
    return Math.max(0, now.rows.findIndex((row) => row.own === move?.value));
  };
  const shape = (width) => {
    const p = places(data(), width), row = data().rows[chosenRow()], tall = panelHeight(data(), p, row);
    if (!p.wide) return { p, row, top: p.bottom + 16, height: p.bottom + 20 + tall };
    const item = p.items.find((one) => one.kind === "row" && one.k === chosenRow());
    const height = Math.max(p.bottom + 4, tall + 8), top = Math.max(4, Math.min(item.y - tall / 3, height - tall - 4));
    return { p, row, top: p.bottom <= 700 ? 4 : top, height };
  };

  const view = frame(model, el, {
    name: "sharding",
    help: [
      ["↑ ↓", "the tensor or collective above, or below"], ["← →", "the form before, the form after"],
      ["Enter", "fix this form, or free it"], ["z", "take the last one back"], ["Delete", "free this tensor"],
      ["Home End", "to the first, to the last"],
    ],
    height: (width) => shape(width).height,
    draw(ctx, width, height, look) {
      const now = data(), { p, row, top } = shape(width);
      const focused = view.root.contains(document.activeElement) && document.activeElement.tagName === "CANVAS";
      drawHead(ctx, now, p, look);
      for (const item of p.items) {
        const here = item.kind === stop.kind && item.k === stop.k;
        if (item.kind === "row") drawRow(ctx, now, told(), p, item, look, { here, axis, letter: focused ? letter : -1, pending });
        else if (item.kind === "move") drawMove(ctx, now, p, item, look, here);
        else drawProblem(ctx, p, item, look);
      }
      drawRail(ctx, now, p, chosenRow(), look);
      drawPanel(ctx, now, p, row, p.panel, top, look, over);
    },
    keys: {
      ArrowDown: () => walk(1), ArrowUp: () => walk(-1), ArrowRight: () => aside(1), ArrowLeft: () => aside(-1),
      Home: () => walk(-1e6), End: () => walk(1e6), Enter: () => pick(), " ": () => pick(), z: () => undo(),
      Delete: () => free(), Backspace: () => free(),
    },
  });

  // the cursor -------------------------------------------------------------------------------------------------------

  const stops = () => places(data(), 1000).items.filter((item) => item.kind !== "problem");
  function say() {
    const now = data();
    view.say(stop.kind === "move" ? moveWords(now.moves[stop.k]) : rowWords(now, now.rows[stop.k]));
  }
  function walk(by) {
    const all = stops(), now = all.findIndex((item) => item.kind === stop.kind && item.k === stop.k);
    const to = all[Math.max(0, Math.min(all.length - 1, now + by))];
    stop = { kind: to.kind, k: to.k };
    say();
    ask();
    view.repaint();
  }
  const lettersAt = (k, a, c) => inColumn(data().rows[k].offered[data().axes[a][0]], data().letters[c]) ?? data().letters[c];
  const there = () => [data().axes[axis][0], lettersAt(stop.k, axis, letter)];
  function aside(by) {
    if (stop.kind !== "row") return say();
    const n = data().letters.length, all = data().axes.length * n, row = data().rows[stop.k];
    for (let k = axis * n + letter + by; k >= 0 && k < all; k += by) {
      const [a, c] = [Math.floor(k / n), k % n];
      if (!inColumn(row.offered[data().axes[a][0]], data().letters[c])) continue;
      [axis, letter] = [a, c];
      break;
    }
    view.say(prospect(data(), told(), stop.k, ...there()));
    view.repaint();
  }

  // fixing -----------------------------------------------------------------------------------------------------------

  function send(picks, remember = true) {
    if (!may()) return void view.say("No kernel is here to propagate: on this page forms can be read, and not fixed.");
    if (remember) past.push(data().picks);
    pending = {};
    for (const [tensor, a, one] of picks) (pending[tensor] ??= {})[a] = one;
    model.set("asked", { id: ++id, picks });
    model.save_changes();
    clearTimeout(late);
    late = setTimeout(() => view.say("The kernel has not answered yet."), 3000);
    view.repaint();
  }
  function pick() {
    if (stop.kind !== "row") return say();
    const [name, one] = there();
    if (!data().rows[stop.k].offered[name].includes(one)) return void view.say(prospect(data(), told(), stop.k, name, one));
    send(clicked(data(), stop.k, name, one));
  }
  function free() {
    if (stop.kind === "row") send(clicked(data(), stop.k, there()[0], null));
  }
  function undo() {
    if (past.length) send(past.pop(), false);
    else view.say("There is nothing to take back.");
  }
  view.toolbar.prepend(...[["undo", "take the last form back (z)", undo], ["free all", "fix nothing", () => send([])]].map(
    ([label, title, run]) => make("button", { type: "button", title, "aria-label": title, onclick: run }, label)));

  // the pointer ------------------------------------------------------------------------------------------------------

  function under(event) {
    const now = data(), { p, row, top } = shape(view.canvas.clientWidth), x = event.offsetX, y = event.offsetY;
    if (p.wide ? x >= p.panel : y >= top) {
      const t = tiles(now, row, p.panelWidth);
      const rank = t.at.findIndex((tile) => x >= p.panel + tile.x && x <= p.panel + tile.x + t.w && y >= top + 64 + tile.y && y <= top + 64 + tile.y + 14 + t.h);
      return { row, rank };
    }
    const item = p.items.find((one) => one.y <= y && y < one.y + one.h);
    if (!item || item.kind === "problem") return {};
    if (item.kind === "row" && (!p.stacked || y >= item.y + 17)) {
      for (let a = 0; a < now.axes.length; a++) {
        const c = Math.floor((x - p.axisAt(a)) / p.cell);
        if (c >= 0 && c < p.letters) return { item, a, c };
      }
    }
    return { item };
  }
  view.listen(view.canvas, "pointermove", (event) => {
    const found = under(event), now = data(), before = over;
    over = found.rank >= 0 ? found.rank : null;
    if (over !== before) view.repaint();
    let text = null;
    if (over != null) text = holding(now, found.row, over);
    else if (found.item?.kind === "move") text = moveWords(now.moves[found.item.k]);
    else if (found.item) text = (found.a != null && prospect(now, told(), found.item.k, now.axes[found.a][0], lettersAt(found.item.k, found.a, found.c))) || rowWords(now, now.rows[found.item.k]);
    view.canvas.style.cursor = found.a != null && may() ? "pointer" : "default";
    view.tip(event.offsetX, event.offsetY, text);
  });
  for (const event of ["focus", "blur"]) view.listen(view.canvas, event, view.repaint);
  view.listen(view.canvas, "pointerleave", () => { over = null; view.tip(0, 0, null); view.repaint(); });
  view.listen(view.canvas, "pointerdown", (event) => {
    const { item, a, c } = under(event);
    if (!item) return;
    stop = { kind: item.kind, k: item.k };
    ask();
    if (a == null) say();
    else {
      [axis, letter] = [a, c];
      pick();
    }
    view.repaint();
  });

  // what Python says -------------------------------------------------------------------------------------------------

  function ask() { // what each form would give takes longer than the forms: it is asked for when there is time
    clearTimeout(asked);
    const tensor = data().rows?.[chosenRow()]?.name;
    if (may() && tensor && !told()?.[tensor]) asked = setTimeout(() => model.send({ want: "outlook", tensor }), 400);
  }
  function answered() {
    const now = data();
    clearTimeout(late);
    if (now.id < id) return; // an answer to what was asked before
    if (now.id > id) { // Python has put another layer or other picks here
      id = now.id;
      past.length = 0;
      begin();
    }
    pending = null;
    if (stop.kind === "move" || stop.k >= now.rows.length) stop = { kind: "row", k: chosenRow() };
    view.say(now.problem ? `cannot be: ${now.problem}` : rowWords(now, now.rows[stop.k]));
    view.repaint();
    ask();
  }
  model.on("change:data", answered);
  model.on("change:outlook", view.repaint);
  if (!model.get("problem")) ask();
  return () => { clearTimeout(late); clearTimeout(asked); model.off("change:data", answered); model.off("change:outlook", view.repaint); view.dispose(); };
}

export default { render };
