// The schedule editor: blocks of a small schedule that pointer and keyboard move along their rank.
//
//   board   from Python: what the engine says of an order, blocks with their times (editor.py)
//   order   to Python: {id, ranks: words per rank}; the answer is a board with the same id

import { KINDS, laid, linked, moments, moved, nearest, split, story, target } from "./orders.js";
import { FONT, LOOKS, bar, frame, make, short, ticks } from "./shared.js";

const LANE = 36, LEFT = 58, RIGHT = 14, TOP = 6, AXIS = 34;

const wordsOf = (board) => board.ranks.map((row) => row.map((b) => b.word));

const named = (b, rank) => `${b.word}: ${KINDS[b.word[0]]} of micro-batch ${b.microbatch}, stage ${b.stage}, on rank ${rank}`;

function render({ model, el }) {
  let board = model.get("board"), order = wordsOf(board), id = board.id;
  let place = laid(board), chosen = null, drag = null, waiting = null, late = 0, clock = null, ticking = 0;
  let first = order;
  const past = [], undone = [];
  const editable = () => model.get("editable");

  const view = frame(model, el, {
    name: "schedule editor", draw,
    help: [
      ["← →", "the block before, the block after"], ["↑ ↓", "the rank above, the rank below"],
      ["Shift ← →", "move the block"], ["s", "split a backward into its halves, or join them"],
      ["z y", "undo, redo"], ["space", "play or pause"], [", .", "the start before, the next start"],
      ["Home End", "the rank's first block, its last"], ["Tab", "the next block; after the last one, out"],
      ["Escape", "out"],
    ],
    height: () => TOP + LANE * board.ranks.length + AXIS,
    keys: {
      ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => climb(-1), ArrowDown: () => climb(1),
      Home: () => choose(chosen?.[0] ?? 0, 0), End: () => choose(chosen?.[0] ?? 0, 1e9),
      Tab: () => next(1), "Shift+Tab": () => next(-1), Escape: () => view.canvas.blur(),
      "Shift+ArrowLeft": () => nudge(-1), "Shift+ArrowRight": () => nudge(1), s: halve, z: undo, y: redo, " ": play,
      ".": () => jump(1), ",": () => jump(-1),
    },
  });
  const verdict = make("div", { class: "mp-verdict", "aria-live": "polite" });
  const [why, code] = ["where", "code"].map((label) => make("pre", { class: "mp-why", tabindex: 0, "aria-label": label }));
  const copy = make("button", { type: "button", onclick: () => navigator.clipboard.writeText(code.textContent) }, "copy");
  view.readout.before(verdict, why);
  view.root.append(make("details", {}, make("summary", {}, "the order as code"), copy, code));
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
    const until = board.reason ? place.stop : place.time; // what never runs has no time
    for (const t of ticks(0, until, ((width - LEFT) / 60) * (until / place.time))) {
      ctx.fillStyle = look.rule;
      ctx.fillRect(Math.round(x(t, width)), TOP, 1, bottom - TOP);
      ctx.fillStyle = look.muted;
      ctx.textAlign = "center";
      ctx.fillText(short(t), x(t, width), bottom + 11);
    }
    ctx.fillStyle = look.muted;
    ctx.textAlign = "right";
    const axis = until ? `time in units of the forward${until < place.time ? "; dashed: never runs" : ""}` : "in order, without times";
    ctx.fillText(axis, width - RIGHT, bottom + 26);
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
    const top = y(rank) + 3, tall = LANE - 6, wide = Math.max(2, to - from - 1), { word } = b;
    const lifted = drag?.to != null && drag.rank === rank && drag.k === k;
    if (b.runs) {
      ctx.globalAlpha = lifted ? 0.25 : clock != null && b.start > clock + 1e-9 ? 0.4 : 1;
      bar(ctx, b.kind ?? KINDS[word[0]], from, top, wide, tall);
    } else {
      ctx.globalAlpha = 0.25;
      ctx.fillStyle = LOOKS[b.kind ?? KINDS[word[0]]][0];
      ctx.fillRect(from, top, wide, tall);
      ctx.globalAlpha = 1;
      ctx.setLineDash([3, 2]);
      outline(ctx, from, top, wide, tall, look.muted, 1);
      ctx.setLineDash([]);
    }
    ctx.fillStyle = b.runs ? LOOKS[b.kind ?? KINDS[word[0]]][2] : look.ink;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    const middle = from + wide / 2, centre = top + tall / 2;
    if (wide >= 4 + 6.5 * word.length) text(ctx, word, middle, centre, 11);
    else if (wide >= 2 + 5.2 * (word.length - 1)) {
      text(ctx, word[0], middle, centre - 5, 9);
      text(ctx, word.slice(1), middle, centre + 6, 9);
    }
    ctx.globalAlpha = 1;
    if (b.guilty) {
      outline(ctx, from, top, wide, tall, look.warn, 3);
      ctx.fillStyle = look.warn;
      text(ctx, "!", from + wide - 6, top + 8, "bold 13");
    }
    if (clock != null && b.runs && b.start <= clock + 1e-9 && clock < b.end) outline(ctx, from, top, wide, tall, look.ink, 2);
    if (chosen?.[0] === rank && chosen[1] === k) {
      outline(ctx, from + 3, top + 3, wide - 6, tall - 6, look.paper, 4);
      outline(ctx, from + 2, top + 2, wide - 4, tall - 4, look.focus, 2.5);
    }
  }

  function text(ctx, words, left, top, size) {
    ctx.font = `${size}px ${FONT}`;
    ctx.fillText(words, left, top);
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
    const [rank, k] = chosen;
    if (!place.rows[rank]?.[k]) return;
    const { needs, feeds } = linked(place.rows, rank, k);
    const point = ([r, at], end) => [x(place.rows[r][at][end], width), y(r) + LANE / 2];
    const links = [...needs.map((one) => [one, chosen, []]), ...feeds.map((one) => [chosen, one, [3, 3]])];
    ctx.strokeStyle = ctx.fillStyle = look.wire;
    ctx.lineWidth = 2;
    for (const [a, b, dash] of links) {
      const [x0, y0] = point(a, "end"), [x1, y1] = point(b, "start"), angle = Math.atan2(y1 - y0, x1 - x0);
      const turned = (by) => [x1 + 9 * Math.cos(angle + by), y1 + 9 * Math.sin(angle + by)];
      ctx.setLineDash(dash);
      ctx.beginPath();
      ctx.moveTo(x0, y0);
      ctx.lineTo(x1, y1);
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.beginPath();
      ctx.moveTo(x1, y1);
      ctx.lineTo(...turned(2.7));
      ctx.lineTo(...turned(-2.7));
      ctx.fill();
    }
  }

  // choosing ---------------------------------------------------------------------------------------------------------

  function choose(rank, k) {
    const row = place.rows[rank];
    if (!row?.length) return;
    chosen = [rank, Math.max(0, Math.min(k, row.length - 1))];
    const b = row[chosen[1]];
    const when = b.runs ? `${short(b.start)} to ${short(b.end)}` : "never runs";
    view.say(`${named(b, rank)}, place ${chosen[1] + 1} of ${row.length}, ${when}${b.guilty ? ", complained of" : ""}`);
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
    if (!editable()) view.say("No kernel is here to verify a change: this page can only be played.");
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
  function keep(ranks) {
    past.push(ranks);
    undone.length = 0;
  }
  function change(ranks, remember = true) {
    if (!may() || JSON.stringify(ranks) === JSON.stringify(order)) return;
    if (remember) keep(order);
    order = ranks;
    stop();
    send(ranks);
  }
  const with_ = (ranks, rank, words) => ranks.map((row, r) => (r === rank ? words : row));
  function nudge(by) {
    if (!chosen) return;
    const [rank, k] = chosen, to = k + by;
    if (to < 0 || to >= order[rank].length || !editable()) return void may();
    chosen = [rank, to];
    change(with_(order, rank, moved(order[rank], k, to)));
  }
  function halve() {
    if (!chosen) return view.say("Select a backward first, or one of its halves.");
    const [rank, k] = chosen;
    change(with_(order, rank, split(order[rank], k)));
  }
  function again(from, to) {
    if (!from.length || !may()) return;
    to.push(order);
    change(from.pop(), false);
  }
  function undo() { again(past, undone); }
  function redo() { again(undone, past); }
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
    if (to != null) return show(to);
    clock = null;
    view.repaint();
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
        send(with_(drag.base, drag.rank, moved(drag.base[drag.rank], drag.k, to)));
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
      keep(base);
      order = with_(base, rank, moved(base[rank], k, to));
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
    const idle = [!past.length, !undone.length];
    edits.forEach((button, k) => { button.disabled = !editable() || !!idle[k]; });
  }
  function answered() {
    const answer = model.get("board");
    clearTimeout(late);
    board = answer;
    const newest = waiting, found = wordsOf(answer);
    waiting = null;
    if (answer.id > id) { // Python has put another order here
      [id, order, first, chosen] = [answer.id, found, found, null];
      past.length = undone.length = 0;
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
