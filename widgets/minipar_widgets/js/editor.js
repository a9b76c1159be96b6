// The schedule editor: blocks of a small schedule that pointer and keyboard move along their rank.
//
//   board   from Python: what the engine says of an order, blocks with their times (editor.py)
//   order   to Python: {id, ranks: words per rank}; the answer is a board with the same id
//
// The functions above `render` are pure, and tested by editor.test.mjs.

import { FONT, bar, frame, make, short, ticks } from "./shared.js";

export const KINDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
const LANE = 36, LEFT = 58, RIGHT = 14, TOP = 6, AXIS = 34;

/** The words of one rank with the k-th moved to another place. */
export function moved(words, k, to) {
  const rest = words.filter((_, at) => at !== k);
  rest.splice(to, 0, words[k]);
  return rest;
}

/** The words with a whole backward split into its halves, or two halves joined where the input half stands. */
export function split(words, k) {
  const [letter, tail] = [words[k][0], words[k].slice(1)];
  if (letter === "B") return words.flatMap((word, at) => (at === k ? [`I${tail}`, `W${tail}`] : [word]));
  const other = words.indexOf((letter === "I" ? "W" : "I") + tail);
  if (letter === "F" || other < 0) return words;
  const [input, weight] = letter === "I" ? [k, other] : [other, k];
  return words.map((word, at) => (at === input ? `B${tail}` : word)).filter((_, at) => at !== weight);
}

/** Where every block stands: its own times; those that never run follow what has run, in order, with `runs: false`. */
export function laid(board) {
  let time = 0;
  for (const row of board.ranks) for (const b of row) if (b.end != null) time = Math.max(time, b.end);
  const stop = time;
  const rows = board.ranks.map((row) => {
    let now = row.every((b) => b.end == null) && !stop ? 0 : stop;
    return row.map((b) => {
      const runs = b.end != null;
      const [start, end] = runs ? [b.start, b.end] : [now, now + b.takes];
      if (!runs) now = end;
      time = Math.max(time, end);
      return { ...b, start, end, runs };
    });
  });
  return { rows, time: time || 1, stop };
}

/** The place at which a block dropped at `time` stands among the others of its rank. */
export function target(row, k, time) {
  return row.filter((b, at) => at !== k && (b.start + b.end) / 2 < time).length;
}

/** The block of a rank that is nearest in time. */
export function nearest(row, time) {
  let best = 0;
  for (let k = 1; k < row.length; k++) {
    const far = (b) => Math.max(b.start - time, time - b.end, 0);
    if (far(row[k]) < far(row[best])) best = k;
  }
  return best;
}

/** What a block waits for, and what waits for it: [rank, place] of both. */
export function linked(rows, rank, k) {
  const me = rows[rank][k], last = Math.max(...rows.flat().map((b) => b.stage));
  const find = (letters, stage) => rows.flatMap((row, r) => row.flatMap((b, at) =>
    (letters.includes(b.word[0]) && b.stage === stage && b.microbatch === me.microbatch ? [[r, at]] : [])));
  const s = me.stage, letter = me.word[0];
  if (letter === "F") return { needs: find("F", s - 1), feeds: s === last ? find("BI", s) : find("F", s + 1) };
  if (letter === "W") return { needs: find("I", s), feeds: [] };
  const whole = { needs: s === last ? find("F", s) : find("BI", s + 1), feeds: find("BI", s - 1) };
  return letter === "I" ? { ...whole, feeds: [...whole.feeds, ...find("W", s)] } : whole;
}

/** Who does what at a moment, in words. */
export function story(rows, time, whole) {
  const parts = rows.map((row, rank) => {
    const b = row.find((one) => one.runs && one.start <= time + 1e-9 && time < one.end - 1e-9);
    return `rank ${rank} ${b ? b.word : row.some((one) => one.runs && one.end > time + 1e-9) ? "waits" : "is done"}`;
  });
  return `time ${short(time)} of ${short(whole)}: ${parts.join(" · ")}`;
}

/** The moments at which something starts, in order, and the end. */
export function moments(rows, whole) {
  const starts = rows.flat().filter((b) => b.runs).map((b) => b.start);
  return [...new Set([...starts, whole])].sort((a, b) => a - b);
}

const wordsOf = (board) => board.ranks.map((row) => row.map((b) => b.word));

const named = (b, rank) => `${b.word}: ${KINDS[b.word[0]]} of micro-batch ${b.microbatch}, stage ${b.stage}, on rank ${rank}`;

function render({ model, el }) {
  let board = model.get("board"), order = wordsOf(board), id = board.id;
  let place = laid(board), chosen = null, drag = null, waiting = null, late = 0, clock = null, ticking = 0;
  const first = order, undone = [];
  let past = [];
  const editable = () => model.get("editable");

  const view = frame(model, el, {
    name: "schedule editor", draw, hint: "Arrow keys select, Shift and arrow moves, S splits or joins a backward, space plays.",
    height: () => TOP + LANE * board.ranks.length + AXIS,
    keys: {
      ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => climb(-1), ArrowDown: () => climb(1),
      Home: () => choose(chosen?.[0] ?? 0, 0), End: () => choose(chosen?.[0] ?? 0, 1e9),
      Tab: () => next(1), "Shift+Tab": () => next(-1), Escape: () => view.canvas.blur(),
      "Shift+ArrowLeft": () => nudge(-1), "Shift+ArrowRight": () => nudge(1), s: halve, z: undo, y: redo, " ": play,
      ",": () => jump(-1), ".": () => jump(1),
    },
  });
  const verdict = make("div", { class: "mp-verdict", "aria-live": "polite" });
  const why = make("pre", { class: "mp-why", tabindex: 0, "aria-label": "the lines of the program that show it" });
  const code = make("pre", { class: "mp-why", tabindex: 0, "aria-label": "the order as Python" });
  const copied = make("button", { type: "button", onclick: copy }, "copy");
  view.readout.before(verdict, why);
  view.root.append(make("details", {}, make("summary", {}, "the order as code"), copied, code));
  const player = view.button("▶ play", "play (space)", play);
  view.button("step", "go to the next start (.)", () => jump(1));
  const edits = [
    view.button("undo", "undo (z)", undo), view.button("redo", "redo (y)", redo),
    view.button("split / join", "split a backward into its halves, or join them (s)", halve),
    view.button("reset", "back to the first order", () => change(first)),
  ];

  const x = (time, width) => LEFT + (time / place.time) * (width - LEFT - RIGHT);
  const at = (px, width) => ((px - LEFT) / (width - LEFT - RIGHT)) * place.time;
  const y = (rank) => TOP + rank * LANE;

  function draw(ctx, width, height, look) {
    const bottom = TOP + LANE * place.rows.length;
    ctx.font = `12px ${FONT}`;
    ctx.textBaseline = "middle";
    ctx.lineWidth = 1;
    for (const t of ticks(0, place.time, (width - LEFT) / 60)) {
      ctx.fillStyle = look.rule;
      ctx.fillRect(Math.round(x(t, width)), TOP, 1, bottom - TOP);
      ctx.fillStyle = look.muted;
      ctx.textAlign = "center";
      ctx.fillText(short(t), x(t, width), bottom + 11);
    }
    ctx.textAlign = "right";
    ctx.fillText("units of the forward", width - RIGHT, bottom + 26);
    place.rows.forEach((row, rank) => {
      ctx.fillStyle = look.ink;
      ctx.font = `12px ${FONT}`;
      ctx.textAlign = "left";
      ctx.textBaseline = "middle";
      ctx.fillText(`rank ${rank}`, 4, y(rank) + LANE / 2);
      row.forEach((b, k) => block(ctx, b, rank, k, x(b.start, width), x(b.end, width), look));
    });
    if (board.reason && place.stop) rule(ctx, x(place.stop, width), bottom, look.warn, [4, 3]);
    if (chosen) arrows(ctx, width, look);
    if (drag?.to != null) {
      const others = place.rows[drag.rank].filter((_, k) => k !== drag.k), before = others[drag.to - 1], after = others[drag.to];
      const gap = before ? (after ? (before.end + after.start) / 2 : before.end) : after?.start ?? 0;
      ctx.fillStyle = look.focus;
      ctx.fillRect(x(gap, width) - 2, y(drag.rank) - 1, 4, LANE + 1);
      const b = place.rows[drag.rank][drag.k], wide = x(b.end, width) - x(b.start, width);
      ctx.globalAlpha = 0.8;
      block(ctx, { ...b, guilty: false }, drag.rank, -1, drag.x - wide / 2, drag.x + wide / 2, look);
      ctx.globalAlpha = 1;
    }
    if (clock != null) rule(ctx, x(clock, width), bottom, look.ink, []);
  }

  function block(ctx, b, rank, k, from, to, look) {
    const top = y(rank) + 3, tall = LANE - 6, mine = chosen && chosen[0] === rank && chosen[1] === k;
    const wide = Math.max(2, to - from - 1), lifted = drag?.to != null && drag.rank === rank && drag.k === k;
    const faint = !b.runs || (clock != null && b.start > clock + 1e-9);
    ctx.globalAlpha = lifted ? 0.25 : faint ? 0.4 : 1;
    const roomy = wide >= 4 + 6.2 * b.word.length;
    bar(ctx, KINDS[b.word[0]], from, top, wide, tall, roomy ? b.word : "");
    if (!roomy && wide >= 7) stacked(ctx, b.word, from + wide / 2, top + tall / 2);
    ctx.globalAlpha = 1;
    if (clock != null && b.runs && b.start <= clock + 1e-9 && clock < b.end) outline(ctx, from, top, wide, tall, look.ink, 2);
    if (b.guilty) {
      outline(ctx, from, top, wide, tall, look.warn, 3);
      ctx.fillStyle = look.warn;
      ctx.font = `bold 13px ${FONT}`;
      ctx.textAlign = "center";
      ctx.textBaseline = "middle";
      ctx.fillText("!", from + wide / 2, top + tall - 5);
    }
    if (mine) {
      outline(ctx, from, top, wide, tall, look.paper, 4);
      outline(ctx, from, top, wide, tall, look.focus, 2.5);
    }
  }

  /** A word in two lines, where one line has no room. */
  function stacked(ctx, word, middle, centre) {
    ctx.fillStyle = { F: "#fefefe", W: "#fefefe" }[word[0]] || "#201400";
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.font = `9px ${FONT}`;
    ctx.fillText(word[0], middle, centre - 5);
    ctx.fillText(word.slice(1), middle, centre + 6);
  }

  function outline(ctx, left, top, wide, tall, colour, width) {
    ctx.strokeStyle = colour;
    ctx.lineWidth = width;
    ctx.strokeRect(left, top, wide, tall);
  }

  function rule(ctx, left, bottom, colour, dash) {
    ctx.strokeStyle = colour;
    ctx.lineWidth = 1.5;
    ctx.setLineDash(dash);
    ctx.beginPath();
    ctx.moveTo(left, TOP);
    ctx.lineTo(left, bottom);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  /** From what the chosen block waits for, and to what waits for it. */
  function arrows(ctx, width, look) {
    const [rank, k] = chosen, me = place.rows[rank]?.[k];
    if (!me) return;
    const { needs, feeds } = linked(place.rows, rank, k);
    const point = ([r, at], end) => [x(place.rows[r][at][end], width), y(r) + LANE / 2];
    for (const [pairs, dash] of [[needs.map((one) => [one, [rank, k]]), []], [feeds.map((one) => [[rank, k], one]), [3, 3]]]) {
      for (const [a, b] of pairs) {
        const [[x0, y0], [x1, y1]] = [point(a, "end"), point(b, "start")];
        ctx.strokeStyle = ctx.fillStyle = look.wire;
        ctx.lineWidth = 2;
        ctx.setLineDash(dash);
        ctx.beginPath();
        ctx.moveTo(x0, y0);
        ctx.lineTo(x1, y1);
        ctx.stroke();
        ctx.setLineDash([]);
        const angle = Math.atan2(y1 - y0, x1 - x0);
        ctx.beginPath();
        for (const turn of [0, 2.7, -2.7]) {
          const [px, py] = [x1 + (turn ? 9 : 0) * Math.cos(angle + turn), y1 + (turn ? 9 : 0) * Math.sin(angle + turn)];
          if (turn) ctx.lineTo(px, py);
          else ctx.moveTo(px, py);
        }
        ctx.closePath();
        ctx.fill();
      }
    }
  }

  // choosing ---------------------------------------------------------------------------------------------------------

  function choose(rank, k) {
    const row = place.rows[rank];
    if (!row?.length) return;
    chosen = [rank, Math.max(0, Math.min(k, row.length - 1))];
    const b = row[chosen[1]];
    const when = b.runs ? `${short(b.start)} to ${short(b.end)}` : "never runs";
    view.say(`${named(b, rank)}, place ${chosen[1] + 1} of ${row.length}, ${when}${b.guilty ? "; the complaint names it" : ""}`);
    view.repaint();
  }
  const step = (by) => (chosen ? choose(chosen[0], chosen[1] + by) : choose(0, 0));
  function climb(by) {
    if (!chosen) return choose(0, 0);
    const rank = chosen[0] + by, b = place.rows[chosen[0]][chosen[1]];
    if (place.rows[rank]) choose(rank, nearest(place.rows[rank], (b.start + b.end) / 2));
  }
  function next(by) {
    if (!chosen) return choose(by > 0 ? 0 : place.rows.length - 1, by > 0 ? 0 : 1e9);
    let [rank, k] = [chosen[0], chosen[1] + by];
    if (!place.rows[rank][k]) { rank += by; k = by > 0 ? 0 : 1e9; }
    if (!place.rows[rank]) { chosen = null; view.repaint(); return false; }
    choose(rank, k);
  }

  // changing ---------------------------------------------------------------------------------------------------------

  function may() {
    if (!editable()) view.say("There is no kernel here to verify a change: this page can be played, not changed.");
    return editable();
  }
  function send(ranks) {
    if (waiting) { waiting = ranks; return; } // only the newest waits for its turn
    waiting = ranks;
    model.set("order", { id: ++id, ranks });
    model.save_changes();
    clearTimeout(late);
    late = setTimeout(() => view.say("The kernel has not answered yet."), 3000);
  }
  function change(ranks, remember = true) {
    if (!may() || JSON.stringify(ranks) === JSON.stringify(order)) return;
    if (remember) { past = [...past.slice(-199), order]; undone.length = 0; }
    order = ranks;
    stop();
    send(ranks);
  }
  const with_ = (rank, words) => order.map((row, r) => (r === rank ? words : row));
  function nudge(by) {
    if (!chosen) return;
    const [rank, k] = chosen, to = k + by;
    if (to < 0 || to >= order[rank].length || !editable()) return void may();
    chosen = [rank, to];
    change(with_(rank, moved(order[rank], k, to)));
  }
  function halve() {
    if (!chosen) return view.say("Select a backward first, or one of its halves.");
    const [rank, k] = chosen;
    change(with_(rank, split(order[rank], k)));
  }
  function undo() {
    if (!past.length || !may()) return;
    undone.push(order);
    change(past.pop(), false);
  }
  function redo() {
    if (!undone.length || !may()) return;
    past.push(order);
    change(undone.pop(), false);
  }
  async function copy() {
    try {
      await navigator.clipboard.writeText(code.textContent);
      copied.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code); // no permission: mark it, so that Ctrl+C takes it
      copied.textContent = "marked: press Ctrl+C";
    }
    setTimeout(() => (copied.textContent = "copy"), 2500);
  }

  // playing ----------------------------------------------------------------------------------------------------------

  function stop() {
    cancelAnimationFrame(ticking);
    ticking = 0;
    player.textContent = "▶ play";
  }
  function show(time) {
    clock = time;
    view.say(story(place.rows, time, place.stop));
    view.repaint();
  }
  function play() {
    if (ticking) return stop();
    const whole = place.stop, from = clock == null || clock >= whole ? 0 : clock;
    if (!whole) return view.say("Nothing runs, so there is nothing to play.");
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return jump(1);
    const begin = performance.now(), speed = whole / Math.max(3000, Math.min(15000, 300 * place.rows.flat().length));
    player.textContent = "❚❚ pause";
    const tick = (now) => {
      const time = Math.min(whole, from + Math.max(0, now - begin) * speed);
      show(time);
      ticking = time < whole ? requestAnimationFrame(tick) : 0;
      if (!ticking) { stop(); clock = null; view.repaint(); }
    };
    ticking = requestAnimationFrame(tick);
  }
  function jump(by) {
    stop();
    const all = moments(place.rows, place.stop), now = clock ?? -1;
    const to = by > 0 ? all.find((t) => t > now + 1e-9) : all.findLast((t) => t < now - 1e-9);
    if (to == null) { clock = null; view.say("The end."); view.repaint(); } else show(to);
  }

  // pointer ----------------------------------------------------------------------------------------------------------

  function hit(event) {
    const box = view.canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const rank = Math.floor((py - TOP) / LANE), time = at(px, box.width);
    const k = place.rows[rank]?.findIndex((b) => b.start <= time && time < b.end) ?? -1;
    return { px, py, rank, k, time };
  }
  view.listen(view.canvas, "pointerdown", (event) => {
    const { rank, k, px } = hit(event);
    if (k < 0) { chosen = null; view.repaint(); return; }
    choose(rank, k);
    drag = { rank, k, from: px, to: null, base: order };
    view.canvas.setPointerCapture(event.pointerId);
  });
  view.listen(view.canvas, "pointermove", (event) => {
    const { px, py, rank, k, time } = hit(event);
    view.canvas.style.cursor = drag ? "grabbing" : k >= 0 && editable() ? "grab" : "default";
    if (!drag) return view.tip(px, py, k >= 0 ? named(place.rows[rank][k], rank) : null);
    if (drag.to == null && Math.abs(px - drag.from) < 4) return;
    if (!may()) { drag = null; return; }
    view.tip(0, 0, null);
    drag.x = px;
    const to = target(place.rows[drag.rank], drag.k, time);
    if (to !== drag.to) {
      drag.to = to;
      if (to !== drag.k || drag.asked) { // the verdict on where it is now, before it is dropped
        drag.asked = true;
        send(drag.base.map((row, r) => (r === drag.rank ? moved(row, drag.k, to) : row)));
      }
    }
    view.repaint();
  });
  const drop = (event) => {
    if (!drag) return;
    const { rank, k, to, base } = drag;
    const taken = event.type === "pointerup" && to != null;
    drag = null;
    if (taken && to !== k) {
      chosen = [rank, to];
      past = [...past.slice(-199), base];
      undone.length = 0;
      order = base.map((row, r) => (r === rank ? moved(row, k, to) : row));
    }
    if (to != null) send(order);
    view.repaint();
  };
  view.listen(view.canvas, "pointerup", drop);
  view.listen(view.canvas, "pointercancel", drop);
  view.listen(view.canvas, "pointerleave", () => view.tip(0, 0, null));

  // what the engine says ---------------------------------------------------------------------------------------------

  function words() {
    verdict.textContent = board.reason ? `✗ cannot run: ${board.reason}` : `✓ ${board.facts}`;
    verdict.dataset.wrong = !!board.reason;
    why.textContent = board.details;
    why.hidden = !board.details;
    code.textContent = board.code;
    for (const button of edits) button.disabled = !editable();
  }
  function answered() {
    const answer = model.get("board");
    clearTimeout(late);
    board = answer;
    const newest = waiting, found = wordsOf(answer);
    waiting = null;
    if (answer.id > id) { // Python has put another order here
      [id, order, chosen, past] = [answer.id, found, null, []];
      undone.length = 0;
    } else if (newest && JSON.stringify(newest) !== JSON.stringify(found)) send(newest);
    words();
    if (drag) return; // the picture stays as it is while a block is in the hand
    place = laid(board);
    clock = null;
    if (chosen && place.rows[chosen[0]]?.[chosen[1]]) choose(...chosen);
    view.repaint();
  }
  model.on("change:board", answered);
  model.on("change:editable", words);
  words();
  return () => { stop(); clearTimeout(late); model.off("change:board", answered); model.off("change:editable", words); view.dispose(); };
}

export default { render };
