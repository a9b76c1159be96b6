// The timeline: lanes per rank and stream, one trace or a measured one under its prediction, the memory below.
//
//   legend     (of the critical path, too, while it is marked; at the bottom where it needs more than a line)
//   overview   how many ranks compute, and which part is seen below
//   rank 0     |F0|F1|..|B0|   compute; a strip under it says why it is idle; thin lanes for the other streams
//   memory     of the chosen rank, stacked by kind; lines of the others
//
// In a comparison of many ranks a rank has one lane, the second trace, and the strip shows how long each instruction took
// against the first one. A click on the rank's name shows both.
import { DIFFERENCES, drawBands, drawEdge, drawRect, drawText, fill, FONT, frame, LOOKS, sample, short, ticks, unpack } from "./shared.js";
import { AROUND, boundary, chain, graded, IDLE, inverse, layout, LEFT, RIGHT, twins } from "./events.js";
import { collective, curveOf, drawMemory, lanePainter } from "./lanes.js";
import { filled, hit, search, totals } from "./lod.js";

const KEYS = [
  ["← →", "the instruction before, the one after"], ["↑ ↓", "the rank above, the rank below"],
  ["Shift ← →", "move the window"], ["+ -", "zoom in, zoom out"], ["Home", "all of the time"], ["Enter", "zoom in on the instruction"],
  ["space", "play or pause"], [", .", "the start before, the next start"], ["i", "the next idle time"],
  ["f", "both traces of a rank, or the difference"],
  ["c m s", "critical path, messages, streams"], ["d", "the largest difference between two traces, then the next one"],
  ["Tab", "the next instruction; after the last one, out"], ["Escape", "let the instruction go; then Tab leaves"],
];
const PATH = "critical path";

function render({ model, el }) {
  let about, traces, strips, begins, takes, sorts, numbers, indices, lengths, firsts, painter, view, plan, placed;
  let more, twin, after, share, worst, levels, open = new Set(), gap = -1, streams = true, arrows = false, along = false;
  let t0 = 0, t1 = 1, extent = 1, rank = 0, chosen = -1, over = -1, cursor = null, brush = null, drag = null, leaving = false;
  let playing = false, told = 0, asked = false, wait = 0;

  function load() {
    about = model.get("about");
    if (!about.lanes) return;
    const found = unpack(model.get("data"), about.layout);
    [begins, takes, sorts, numbers, indices] = [found.start, found.length, found.kind, found.number, found.index];
    traces = about.traces;
    strips = about.lanes;
    firsts = strips.map((lane) => lane[3]);
    lengths = totals(takes);
    levels = null;
    open = new Set();
    painter = lanePainter(about, begins, takes, sorts, numbers, () => (levels ??= graded(takes, (twin ??= twins(strips, indices)))));
    twin = about.same ? null : new Int32Array(0);
    extent = t1 = about.span || 1;
    t0 = placed = 0;
    rank = about.highest;
    chosen = over = gap = -1;
    cursor = brush = share = worst = null;
    asked = clearTimeout(asked);
    enrich();
  }
  function enrich() {
    const given = model.get("more");
    more = given.names && about.lanes ? { ...given, ...unpack(model.get("details"), given.layout) } : null;
    after = null;
    placed = 0;
    if (more && !rank) rank = more.highest;
    if (view) redraw();
  }

  // events ------------------------------------------------------------------------------------------------------------

  const redraw = () => view.repaint();
  const two = () => traces.length > 1;
  const laneOf = (k) => strips[search(firsts, 0, firsts.length, k + 1) - 1];
  const kindOf = (k) => about.kinds[sorts[k]];
  const endOf = (k) => begins[k] + takes[k];
  const nameOf = (k) => more ? more.names[more.name[k]].replaceAll("#", numbers[k] % about.per[laneOf(k)[0]]) : kindOf(k) + (numbers[k] < 0 ? "" : ` mb${numbers[k]}`);
  const within = (lane, a, b) => filled(begins, lengths, lane[3], lane[4], a, b);
  const time = (t) => short(t) + (about.unit === "ms" ? " ms" : "");
  const rowOf = (k) => plan.rows.find((lane) => lane.first <= k && k < lane.last);
  const twinOf = (k) => (twin ??= twins(strips, indices))[k] ?? -1;
  const idleAt = (lane, t) => {
    const mine = more?.idle.find((one) => one[0] === lane.trace && one[1] === lane.rank);
    return mine ? hit(more.idle_start, more.idle_length, mine[2], mine[3], t, 0) : -1;
  };
  const reason = (k) => IDLE[more.idle_kind[k]];

  /** Why a rank is idle, for what it waits, and which rank holds it up. */
  function why(j, r) {
    const then = more.idle_then[j], awaited = more.idle_awaited[j], by = more.idle_by[j], lines = [`${rankName(r)} idle (${reason(j)}) for ${time(more.idle_length[j])}`];
    const who = by >= 0 ? rankName(laneOf(by)[1]) : "";
    if (then < 0) lines.push(by >= 0 ? `its work is done; ${who} ends last, with ${nameOf(by)}` : "its work is done");
    else if (reason(j) === "overhead") lines.push(`nothing was missing for ${nameOf(then)}: the run itself took this time`);
    else {
      lines.push(awaited >= 0 ? `waits with ${nameOf(then)} for ${nameOf(awaited)}` : `waits with ${nameOf(then)}`);
      if (by >= 0) lines.push(`${who} holds it up, with ${nameOf(by)} until ${time(endOf(by))}`);
    }
    return lines.join("\n");
  }

  /** Pairs (earlier, later): what event k depends on, and what depends on it, through messages to compute. */
  function causes(k) {
    if (!more) return [];
    after ??= inverse(more.before, more.before_of);
    const passes = (j) => AROUND.test(kindOf(j));
    return [...chain(k, more.before, more.before_of, passes).map(([a, b]) => [b, a]), ...chain(k, ...after, passes)];
  }

  function describe(k) {
    const [trace, number, stream] = laneOf(k), arrival = kindOf(k) === "receive", other = twinOf(k), [one, both] = traces;
    const letters = collective(kindOf(k)) ? `${LOOKS[kindOf(k)][4]} · ` : "";
    const lines = [`${rankName(number)} · ${letters}${nameOf(k)}${stream === "compute" ? "" : ` · ${stream}`}`];
    lines.push((both ? `${traces[trace]} ` : "") + (arrival ? `arrived at ${time(begins[k])}` : `${time(begins[k])} to ${time(endOf(k))}: ${time(takes[k])}`));
    if (other >= 0) {
      const [p, m] = trace ? [other, k] : [k, other], from = arrival ? begins : takes, more = from[m] - from[p];
      lines.push(`${one} ${time(from[p])}, ${both} ${time(from[m])}: ${more < 0 ? "−" : "+"}${time(Math.abs(more))}`);
    }
    return lines.join("\n");
  }

  /** A rank: what it is called, and where it is on the mesh if ranks share layers. */
  const rankName = (r) => about.names?.[r] ?? (about.places?.[r] ? `rank ${r} (${about.places[r]})` : `rank ${r}`);

  /** What every rank does at a time. */
  function moment(t) {
    const parts = [];
    for (const lane of plan.rows) {
      if (!lane.main || (lane.rank !== rank && about.ranks > 8)) continue;
      const k = hit(begins, takes, lane.first, lane.last, t, 0), j = idleAt(lane, t);
      parts.push(`${two() ? `${traces[lane.trace]} ` : ""}${about.names?.[lane.rank] ?? `rank ${lane.rank}`} ${k >= 0 ? nameOf(k) : j >= 0 ? `idle (${reason(j)})` : "idle"}`);
    }
    view.say(`at ${time(t)}: ${parts.join(", ")}. ${held(t).replaceAll("\n", ", ")}`);
  }
  /** What the chosen rank holds at a time. */
  function held(t) {
    const last = traces.length - 1, one = curveOf(more, last, rank), k = one ? search(more.memory_time, one[2], one[3], t * (1 + 1e-12)) - 1 : -1;
    if (!one || k < one[2]) return "";
    const lines = [`${rankName(rank)} holds ${short(more.memory_total[k])} ${more.memory_unit}`], live = [];
    for (const kind of more.memory_kinds) if (more[`memory_${kind}`][k] > 0) lines.push(`${kind} ${short(more[`memory_${kind}`][k])}`);
    const mine = more.live?.find((each) => each[0] === last && each[1] === rank);
    for (let j = mine?.[2]; j < mine?.[3]; j++) if (more.live_start[j] <= t && t < more.live_end[j]) live.push(j);
    live.sort((a, b) => more.live_size[b] - more.live_size[a]);
    const rest = live.length > 6 ? ` and ${live.length - 6} more` : "";
    if (live.length) lines.push(`live: ${live.slice(0, 6).map((j) => more.values[more.live_name[j]]).join(", ")}${rest}`);
    return lines.join("\n");
  }
  function bubble(a, b) {
    return traces.map((name, trace) => {
      let busy = 0;
      for (const lane of strips) if (lane[0] === trace && lane[2] === "compute") busy += within(lane, a, b);
      const whole = about.ranks * Math.max(0, Math.min(b, about.spans[trace]) - a), part = (x) => `${(100 * x || 0).toFixed(1)}%`;
      return `${name}: bubble ${part(1 - busy / whole)} of total, ${busy ? part(whole / busy - 1) : "all"} of ideal`;
    }).join("; ");
  }

  const pen = document.createElement("canvas").getContext("2d"), widths = new Map();
  /** The width of a word of the legend. */
  function widthOf(word) {
    pen.font = `11px ${FONT}`;
    if (!widths.has(word)) widths.set(word, pen.measureText(word).width);
    return widths.get(word);
  }

  // drawing -----------------------------------------------------------------------------------------------------------

  const area = (full) => Math.max(50, Math.round(full - LEFT - RIGHT));
  const xOf = (t, full) => LEFT + ((t - t0) / (t1 - t0)) * area(full);

  function legend(ctx, look) {
    for (const [word, x, y] of plan.legend) {
      const shade = about.shades.indexOf(word), known = shade >= 0 ? sample(shade) : LOOKS[word], idle = IDLE.indexOf(word.slice(6));
      const grade = DIFFERENCES.find(([name]) => name === word);
      if (word === PATH) drawEdge(ctx, look.warn, x, y + 2, 14, 11, 2.5);
      else if (grade) drawRect(ctx, grade[1], x, y + 5, 14, 6);
      else if (idle >= 0) drawRect(ctx, [look.rule, look.muted, look.warn][idle], x, y + 6, 14, 4);
      else {
        if (!word.endsWith("(outlined)")) drawRect(ctx, known ? fill(ctx, known[0], known[1], known[3]) : look.muted, x, y + 2, 14, 11);
        if (known) drawBands(ctx, known, x, y + 2, 14, 11);
        drawEdge(ctx, known ? known[1] : look.muted, x, y + 2, 14, 11);
      }
      drawText(ctx, said(word), x + 19, y + 8, look.ink);
    }
  }
  const said = (word) => about.said[word] ?? word;
  /** How many ranks compute, over the whole time. (Of long traces a sample of 16 ranks.) */
  function overview(ctx, full, look) {
    const wide = area(full), y = plan.overview, columns = Math.min(wide, 300);
    if (!share) {
      share = new Float64Array(columns);
      const rows = strips.filter((lane) => lane[2] === "compute" && lane[0] === traces.length - 1);
      const some = rows.filter((_, k) => k % Math.ceil(rows.length / 16) === 0);
      for (const lane of some) {
        for (let x = 0; x < columns; x++) share[x] += within(lane, (x * extent) / columns, ((x + 1) * extent) / columns) / ((extent / columns) * some.length);
      }
    }
    drawRect(ctx, look.rule, LEFT, y, wide, 14, 0.5);
    share.forEach((part, x) => drawRect(ctx, look.muted, LEFT + (x * wide) / share.length, y + 14 * (1 - part), wide / share.length + 0.5, 14 * part));
    drawEdge(ctx, look.focus, LEFT + (t0 / extent) * wide, y - 1, Math.max(3, ((t1 - t0) / extent) * wide), 16, 2);
    drawText(ctx, "overview", 4, y + 7, look.muted);
    drawText(ctx, t1 - t0 >= extent ? "all" : `1/${short(extent / (t1 - t0))}`, full - 2, y + 7, look.muted, "right");
  }
  function axis(ctx, full, look) {
    for (const t of ticks(t0, t1, Math.max(2, Math.floor(area(full) / 90)))) {
      const x = Math.round(xOf(t, full));
      drawRect(ctx, look.rule, x, plan.overview + 18, 1, plan.bottom - plan.overview - 18);
      drawText(ctx, short(t), Math.min(x, full - RIGHT - widthOf(short(t)) / 2), plan.bottom + 9, look.muted, "center"); // (the unit is beside it)
    }
    drawText(ctx, about.unit === "ms" ? "time (ms)" : "time", full - 2, plan.bottom + 9, look.muted, "right");
  }
  function gutters(ctx, full, look) {
    let until = -1;
    for (const lane of plan.rows) {
      if (!lane.main || lane.y < until) continue;
      const y = lane.y + Math.max(6, lane.tall / 2), end = Math.min(t1, about.spans[lane.trace]), busy = filled(begins, lengths, lane.first, lane.last, t0, end) / (end - t0);
      const second = two() && lane.trace && lane.tall >= 10 && !lane.folded, mine = lane.rank === rank;
      const own = (about.names?.[lane.rank] ?? `rank ${lane.rank}`).split(" (")[0], fold = about.folded && lane.tall >= 10 ? (lane.folded ? "▸ " : "▾ ") : "";
      const where = (!lane.trace && lane.tall >= 20 && about.places?.[lane.rank]) || "";
      drawText(ctx, second ? `  ${traces[1]}` : fold + own, 4, y - (where ? 5 : 0), mine ? look.focus : look.ink, "left", 11, mine ? "bold " : "");
      if (where) drawText(ctx, where.length > 12 ? where.replaceAll(" ", "") : where, 4, y + 7, look.muted, "left", 9.5);
      if (lane.folded && lane.tall >= 6) drawText(ctx, busier(lane), full - 2, y, look.muted, "right", 10);
      else if (lane.tall >= 6 && end > t0) drawText(ctx, `${Math.round(100 * Math.max(0, 1 - busy))}% idle`, full - 2, y, look.muted, "right");
      until = lane.y + Math.max(13, lane.tall);
    }
  }
  /** How much more a rank computes in the second trace. */
  function busier(lane) {
    const first = strips.find((one) => one[0] === 0 && one[1] === lane.rank && one[2] === "compute"), sum = (one) => lengths[one[1]] - lengths[one[0]];
    const part = Math.round(100 * (sum([lane.first, lane.last]) / sum([first[3], first[4]]) - 1));
    return isFinite(part) ? `busy ${part < 0 ? "−" : "+"}${Math.abs(part)}%` : "";
  }
  function box(ctx, k, full, colour, thick) {
    const lane = rowOf(k);
    if (!lane || begins[k] > t1 || endOf(k) < t0) return;
    const a = Math.max(LEFT - 1, xOf(begins[k], full)), b = Math.min(full - RIGHT + 1, xOf(endOf(k), full));
    drawEdge(ctx, colour, a - 1, lane.y - 1, Math.max(4, b - a + 2), lane.tall + 2, thick);
  }
  function arrow(ctx, [a, b], full, colour) {
    const one = rowOf(a), other = rowOf(b), x = xOf(endOf(a), full), to = xOf(begins[b], full);
    if (!one || !other || Math.max(x, to) < LEFT || Math.min(x, to) > full - RIGHT) return;
    const y = one.y + one.tall / 2, end = other.y + other.tall / 2, bend = Math.min(30, Math.abs(to - x) / 2 + 6);
    ctx.strokeStyle = ctx.fillStyle = colour;
    ctx.lineWidth = 1.3;
    ctx.beginPath();
    ctx.moveTo(x, y);
    ctx.bezierCurveTo(x + bend, y, to - bend, end, to, end);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(to, end);
    ctx.lineTo(to - 6, end - 3);
    ctx.lineTo(to - 6, end + 3);
    ctx.fill();
  }
  function overlays(ctx, full, look) {
    const wide = area(full), top = plan.overview + 18, shown = over >= 0 ? over : chosen;
    let count = 0, past = -1;
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT - 2, top, wide + 4, plan.height);
    ctx.clip();
    for (const k of along && more ? more.path : []) {
      if (begins[k] <= t1 && endOf(k) >= t0 && count++ < 3000) {
        box(ctx, k, full, look.warn, 2.5);
        if (past >= 0 && laneOf(past)[0] === laneOf(k)[0] && laneOf(past)[1] !== laneOf(k)[1]) arrow(ctx, [past, k], full, look.warn);
      }
      past = k;
    }
    count = 0;
    for (const lane of arrows && more ? plan.rows : []) {
      for (const k of painter.visible(lane, t0, t1, 400)) {
        if (kindOf(k) !== "receive") continue;
        for (let i = more.before[k]; i < more.before[k + 1] && count++ < 400; i++) arrow(ctx, [more.before_of[i], k], full, look.wire);
      }
    }
    if (shown >= 0) {
      for (const pair of causes(shown)) {
        arrow(ctx, pair, full, look.wire);
        for (const k of pair) box(ctx, k, full, look.wire, 1.5);
      }
      box(ctx, twinOf(shown), full, look.focus, 2);
      box(ctx, shown, full, look.ink, 2);
    } else if (gap >= 0 && more) {
      const lane = plan.rows.find((one) => one.main && idleAt(one, more.idle_start[gap]) === gap), by = more.idle_by[gap];
      const [a, b] = [more.idle_start[gap], more.idle_start[gap] + more.idle_length[gap]].map((t) => Math.max(LEFT, Math.min(full - RIGHT, xOf(t, full))));
      if (lane) drawEdge(ctx, look.ink, a, lane.y - 1, Math.max(3, b - a), lane.tall + lane.strip + 1, 2);
      if (by >= 0) box(ctx, by, full, look.wire, 2);
      if (by >= 0 && more.idle_then[gap] >= 0) arrow(ctx, [by, more.idle_then[gap]], full, look.wire);
    }
    if (brush) {
      const [a, b] = brushed().map((t) => xOf(t, full));
      drawRect(ctx, look.focus, a, top, b - a, plan.axis - top, 0.25);
    }
    if (cursor !== null) {
      const x = xOf(cursor, full);
      if (playing) drawRect(ctx, look.paper, x, top, LEFT + wide - x + 2, plan.bottom - top, 0.75);
      drawRect(ctx, look.ink, x - 0.5, top, 1, plan.bottom - top);
    }
    ctx.restore();
  }
  function draw(ctx, full, _, look) {
    if (!about.lanes) return;
    axis(ctx, full, look);
    legend(ctx, look);
    overview(ctx, full, look);
    painter.paint(ctx, area(full), look, plan, t0, t1, more);
    gutters(ctx, full, look);
    if (plan.memory && more?.memory) drawMemory(ctx, area(full), look, plan, t0, t1, more, about, rank);
    overlays(ctx, full, look);
    if (about.later && !more && !asked) {
      asked = setTimeout(() => model.send({ want: "details" }), 250);
    }
  }

  // windows, keys and buttons -------------------------------------------------------------------------------------------

  function show(a, b) {
    const size = Math.min(extent, Math.max(extent * 1e-7, b - a));
    a = Math.max(0, Math.min(extent - size, a));
    [t0, t1] = [a, a + size];
    clearTimeout(wait);
    wait = setTimeout(() => tell("window", [t0, t1]), 150);
    redraw();
  }
  const tell = (trait, value) => {
    model.set(trait, value);
    model.save_changes();
  };
  const brushed = () => [...brush].sort((a, b) => a - b);
  const zoom = (factor, t = cursor ?? (t0 + t1) / 2) => show(t - (t - t0) * factor, t + (t1 - t) * factor);
  const pan = (part) => show(t0 + part * (t1 - t0), t1 + part * (t1 - t0));
  const whole = () => show(0, extent);
  const around = (t) => (t < t0 || t > t1) && show(t - (t1 - t0) / 3, t + (2 * (t1 - t0)) / 3);

  function choose(k) {
    chosen = k;
    gap = -1;
    if (k >= 0) {
      rank = laneOf(k)[1];
      cursor = begins[k];
      around(cursor);
      view.say(describe(k).replaceAll("\n", ", "));
      tell("selected", nameOf(k));
    }
    redraw();
  }
  /** The lane that arrows and Tab walk along, and the place in it after a step. Without a chosen event they begin at the
   * cursor, or where the window begins. */
  function beside(step) {
    const lane = chosen >= 0 ? laneOf(chosen) : strips.find((one) => one[0] === traces.length - 1 && one[1] === rank);
    return [lane, chosen >= 0 ? chosen + step : search(begins, lane[3], lane[4], cursor ?? t0) - (step < 0)];
  }
  function walk(step) {
    const [lane, k] = beside(step);
    leaving = false;
    choose(Math.max(lane[3], Math.min(lane[4] - 1, k)));
  }
  function next(step) {
    const [lane, k] = beside(step), stays = !leaving && (step > 0 || chosen >= 0) && k >= lane[3] && k < lane[4];
    leaving = false;
    choose(stays ? k : -1);
    return stays;
  }
  /** The next idle time of the chosen rank, and why it is idle. */
  function idle() {
    const mine = more?.idle.find((one) => one[0] === traces.length - 1 && one[1] === rank);
    if (!mine || mine[2] === mine[3]) return view.say(`${rankName(rank)} is never idle`);
    const next = gap >= mine[2] && gap < mine[3] - 1 ? gap + 1 : mine[2];
    choose(-1);
    gap = next;
    cursor = more.idle_start[gap];
    around(cursor);
    view.say(why(gap, rank).replaceAll("\n", ", "));
    redraw();
  }
  /** Both traces of a rank of a folded comparison, or the difference. */
  function fold(r = rank) {
    if (!about.folded) return;
    if (!open.delete(r)) open.add(r);
    placed = 0;
    view.say(`${rankName(r)}: ${open.has(r) ? "both traces" : "the difference"}`);
    redraw();
  }
  function turn(step) {
    rank = Math.max(0, Math.min(about.ranks - 1, rank + step));
    chosen = gap = -1;
    moment(cursor ?? t0);
    redraw();
  }
  function step(sign) {
    cursor = boundary(begins, takes, plan.rows.filter((lane) => lane.main), cursor ?? t0, sign);
    around(cursor);
    moment(cursor);
    redraw();
  }
  function play() {
    playing = !playing;
    playButton.textContent = playing ? "pause" : "play";
    playButton.setAttribute("aria-pressed", playing);
    redraw();
    if (!playing) return;
    if (cursor === null || cursor >= t1) cursor = t0;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    let last = performance.now();
    const tick = (now) => {
      if (!playing || !view.root.isConnected) return;
      if (cursor >= t1) return play();
      if (!still) cursor = Math.min(t1, cursor + ((t1 - t0) * (now - last)) / 15000);
      else if (now - last > 700) step(1);
      if (!still || now - last > 700) last = now;
      if (now - told > 400) moment(cursor, (told = now));
      redraw();
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }
  /** The largest differences between the two traces, one after the other. */
  function difference() {
    if (!about.same) return view.say("there is one trace: nothing to compare");
    const by = (k) => Math.abs(takes[k] - takes[twinOf(k)]);
    worst ??= Array.from(begins.keys()).filter((k) => twinOf(k) >= 0 && twinOf(k) < k).sort((a, b) => by(b) - by(a));
    choose(worst[(worst.indexOf(chosen) + 1) % worst.length]);
  }

  load();
  view = frame(model, el, {
    name: "timeline", help: KEYS, draw,
    height(full) {
      if (!about.lanes) return 40;
      const sign = [full, streams, along, rank].join();
      if (placed !== sign) {
        placed = sign;
        const last = two() ? [`${traces[0]} dashed`] : [];
        plan = layout(about, full, {
          streams, memory: about.memory, open, kinds: [...(more?.memory_kinds ?? []), ...last], extra: along ? [PATH] : [],
          key: [`memory of ${rankName(rank)} (${more?.memory_unit ?? "MiB"}):`], measure: (word) => widthOf(said(word)),
        });
      }
      return plan.height;
    },
    keys: {
      ArrowLeft: () => walk(-1), ArrowRight: () => walk(1), "Shift+ArrowLeft": () => pan(-0.15), "Shift+ArrowRight": () => pan(0.15), ArrowUp: () => turn(-1), ArrowDown: () => turn(1),
      "+": () => zoom(0.6), "-": () => zoom(1 / 0.6), Home: whole,
      Tab: () => next(1), "Shift+Tab": () => next(-1),
      Enter: () => chosen >= 0 && show(begins[chosen] - takes[chosen], begins[chosen] + 2 * takes[chosen]),
      Escape() {
        leaving = true;
        brush = cursor = null;
        gap = -1;
        if (playing) play();
        choose(-1);
      },
      " ": play, ".": () => step(1), ",": () => step(-1), d: difference, c: () => critical.click(), m: () => all.click(), i: idle, f: () => fold(), s: () => lanes.click(),
    },
  });
  const toggle = (label, title, set, on) => {
    const made = view.button(label, title, () => {
      made.setAttribute("aria-pressed", set());
      placed = 0;
      redraw();
    }, on);
    return made;
  };
  const playButton = view.button("play", "play (space), step with . and ,", play, false);
  view.button("+", "zoom in (+)", () => zoom(0.6));
  view.button("−", "zoom out (-)", () => zoom(1 / 0.6));
  view.button("all", "show all (Home)", whole);
  const critical = toggle("critical path", "what the time consists of (c)", () => {
    along = !along;
    if (along) view.say(more?.path_words ?? "");
    return along;
  }, false);
  const all = toggle("messages", "arrows from send to receive (m)", () => (arrows = !arrows), false);
  const lanes = toggle("streams", "more lanes (s)", () => (streams = !streams), true);
  if (about.same) view.button("differences", "largest first (d)", difference);

  // pointer -------------------------------------------------------------------------------------------------------------

  const board = view.canvas;
  const at = (event) => {
    const place = board.getBoundingClientRect(), x = event.clientX - place.left, y = event.clientY - place.top, part = (x - LEFT) / area(place.width);
    return [x, y, t0 + part * (t1 - t0), part, plan.rows.find((lane) => y >= lane.y && y < lane.y + lane.tall + lane.strip)];
  };
  view.listen(board, "pointermove", (event) => {
    const [x, y, t, part, lane] = at(event), size = t1 - t0;
    if (drag?.pan) return show(part * extent - size / 2, part * extent + size / 2);
    if (drag) {
      brush = [drag.t, Math.max(t0, Math.min(t1, t))];
      const [a, b] = brushed();
      view.say(`${time(a)} to ${time(b)}: ${bubble(a, b)}`);
      return redraw();
    }
    const inside = part >= 0 && part <= 1;
    if (!playing) cursor = inside ? t : null;
    over = lane && inside ? hit(begins, takes, lane.first, lane.last, t, (3 * size) / area(board.clientWidth)) : -1;
    const idle = lane?.main && inside ? idleAt(lane, t) : -1;
    view.tip(x, y, over >= 0 ? describe(over) : idle >= 0 ? why(idle, lane.rank) : lane && !inside && about.folded ? `${rankName(lane.rank)}: click for ${lane.folded ? "both traces" : "the difference"}` : inside && plan.memory && y > plan.memory && y < plan.bottom ? held(t) : "");
    redraw();
  });
  view.listen(board, "pointerleave", () => {
    over = -1;
    if (!playing) cursor = null;
    view.tip(0, 0, "");
    redraw();
  });
  view.listen(board, "pointerdown", (event) => {
    const [x, y, t] = at(event);
    if (event.button) return;
    if (x < LEFT) {
      const lane = at(event)[4];
      if (lane && about.folded) fold(lane.rank);
      return;
    }
    drag = { x, t, pan: y > plan.overview - 4 && y < plan.overview + 18 };
    board.setPointerCapture(event.pointerId);
  });
  view.listen(board, "pointerup", (event) => {
    const [x, , , , lane] = at(event);
    if (drag && !drag.pan && brush && Math.abs(x - drag.x) > 4) show(...brushed());
    else if (drag && !drag.pan) {
      if (lane) rank = lane.rank;
      const j = over < 0 && lane?.main ? idleAt(lane, at(event)[2]) : -1;
      choose(over);
      if (j >= 0) {
        gap = j;
        view.say(why(j, lane.rank).replaceAll("\n", ", "));
      }
    }
    drag = brush = null;
    redraw();
  });
  view.listen(board, "dblclick", whole);
  view.listen(board, "wheel", (event) => {
    if (!event.ctrlKey && document.activeElement !== board) return; // the page scrolls
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / 800);
    else zoom(1.0015 ** event.deltaY, at(event)[2]);
  }, { passive: false });

  const changed = () => {
    load();
    redraw();
  };
  model.on("change:data", changed);
  model.on("change:details", enrich);
  return () => {
    model.off("change:data", changed);
    model.off("change:details", enrich);
    clearTimeout(wait);
    playing = false;
    view.dispose();
  };
}

export default { render };
