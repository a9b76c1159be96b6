// Drawing lanes: as pixels on a canvas, as bars in an SVG; and the memory curves under them.
import { drawEdge, drawRect, drawText, fill, LOOKS, MEMORY, short, ticks } from "./shared.js";
import { CURVE, LEFT, RIGHT } from "./events.js";
import { blit, cells, inks, peaks, runs, search } from "./lod.js";

const HATCH = Object.values(LOOKS).map((one) => ({ "/": 1, "x": 2 })[one[3]] ?? 0);

/** What draws all lanes of a timeline between two times: paint(ctx, wide, look, plan, t0, t1, more). */
export function lanePainter(about, begins, takes, sorts, numbers) {
  const words = about.kinds, two = about.traces.length > 1;
  let surface, brush, picture, pixels, line, sign, ground, full, rim, pale, paleRim;

  /** The events of a lane in sight, if there are at most so many. */
  function visible(lane, t0, t1, most) {
    const k = Math.max(lane.first, search(begins, lane.first, lane.last, t0) - 1), end = search(begins, lane.first, lane.last, t1);
    return end - k > most ? [] : Array.from({ length: end - k }, (_, i) => k + i);
  }
  const facesOf = (look) => [...words.map((kind) => LOOKS[kind][0]), look.rule, look.muted, look.warn];
  const idleOf = (lane, more) => (lane.strip && more ? more.idle.find((one) => one[0] === lane.trace && one[1] === lane.rank) : null);

  function raster(wide, look, plan, t0, t1, more, ratio) {
    const now = [t0, t1, wide, ratio, look.paper, plan.axis, plan.rows.length, !!more].join();
    if (sign === now) return;
    sign = now;
    const columns = Math.round(wide * ratio), top = plan.rows[0].y - 2, lines = Math.ceil((plan.axis - top) * ratio);
    if (picture?.width !== columns || picture.height !== lines) {
      surface = new OffscreenCanvas(columns, lines);
      brush = surface.getContext("2d");
      picture = brush.createImageData(columns, lines);
      pixels = new Uint32Array(picture.data.buffer);
      line = new Uint8Array(columns);
    }
    pixels.fill(0);
    if (ground !== look.paper) {
      ground = look.paper;
      [full, pale] = [1, 0.4].map((most) => inks(facesOf(look), ground, most));
      [rim, paleRim] = [1, 0.4].map((most) => inks(words.map((kind) => LOOKS[kind][1]), ground, most));
    }
    for (const lane of plan.rows) {
      const y = Math.round((lane.y - top) * ratio), tall = Math.max(1, Math.round(lane.tall * ratio)), outlined = two && !lane.trace;
      cells(begins, takes, sorts, lane.first, lane.last, t0, t1, columns, line);
      blit(pixels, columns, line, y, tall, outlined ? pale : full, outlined ? paleRim : rim, HATCH);
      if (lane.tall > 5) border(lane, y, tall, outlined ? full : rim, outlined ? Math.round(1.3 * ratio) : 1, columns, t0, t1, ratio);
      const mine = idleOf(lane, more);
      if (mine) {
        cells(more.idle_start, more.idle_length, more.idle_kind, mine[2], mine[3], t0, t1, columns, line);
        blit(pixels, columns, line, y + tall, Math.round((lane.strip - 1) * ratio), full, full, HATCH);
      }
    }
    brush.putImageData(picture, 0, 0);
  }

  /** Edges of events that are wide enough to have one; a full line for what takes no time, if it stands alone. */
  function border(lane, top, tall, ink, thick, columns, t0, t1, ratio) {
    const scale = columns / (t1 - t0);
    for (const k of visible(lane, t0, t1, columns / 3)) {
      let a = Math.round((begins[k] - t0) * scale), b = Math.round((begins[k] + takes[k] - t0) * scale);
      const tick = b - a < 1.5 * ratio;
      if (b - a < 4 * ratio && !tick) continue;
      if (tick) b = a + Math.ceil(1.5 * ratio);
      const colour = ink[16 * (sorts[k] + 1) + 15], from = Math.max(0, a), to = Math.min(columns, b);
      for (let y = 0; y < tall; y++) {
        const base = (top + y) * columns, whole = tick || y < thick || y >= tall - thick;
        for (let x = from; x < to; x++) if (whole || x < a + thick || x >= b - thick) pixels[base + x] = colour;
      }
    }
  }

  /** The same with rectangles, for SVG. */
  function vector(ctx, wide, look, plan, t0, t1, more) {
    const cell8 = new Uint8Array(wide), faces = facesOf(look);
    const strip = (starts, lengths, codes, first, end, y, tall, pale) => {
      cells(starts, lengths, codes, first, end, t0, t1, wide, cell8);
      for (const [a, b, cell] of runs(cell8)) {
        const code = (cell >> 4) - 1, known = LOOKS[words[code]];
        drawRect(ctx, known ? fill(ctx, known[0], known[1], known[3]) : faces[code], LEFT + a, y, b - a, tall, ((cell & 15) / 15) * pale);
      }
    };
    for (const lane of plan.rows) {
      const outlined = two && !lane.trace, mine = idleOf(lane, more);
      strip(begins, takes, sorts, lane.first, lane.last, lane.y, lane.tall, outlined ? 0.4 : 1);
      if (mine) strip(more.idle_start, more.idle_length, more.idle_kind, mine[2], mine[3], lane.y + lane.tall, 3, 1);
      for (const k of visible(lane, t0, t1, wide / 3)) {
        const [a, b] = ends(k, wide, t0, t1);
        if (b - a >= 4 && lane.tall > 8) drawEdge(ctx, LOOKS[words[sorts[k]]][outlined ? 0 : 1], a, lane.y, b - a, lane.tall);
      }
    }
  }

  const ends = (k, wide, t0, t1) => [begins[k], begins[k] + takes[k]].map((t) => LEFT + Math.max(0, Math.min(1, (t - t0) / (t1 - t0))) * wide);

  /** Letter and micro-batch, or the number alone, in the lanes where most events have room for it. */
  function labels(ctx, wide, look, plan, t0, t1) {
    let left = 2500;
    for (const lane of plan.rows) {
      if (lane.tall < 11) continue;
      const size = Math.min(11, lane.tall - 2);
      const seen = visible(lane, t0, t1, wide / 8).filter((k) => numbers[k] >= 0).map((k) => [k, ...ends(k, wide, t0, t1)]);
      const fitting = (text) => seen.filter(([k, a, b]) => b - a >= 0.62 * size * text(k).length + 3);
      const long = (k) => LOOKS[words[sorts[k]]][4] + numbers[k], brief = (k) => `${numbers[k]}`;
      const text = fitting(long).length >= 0.7 * seen.length ? long : brief, chosen = fitting(text);
      left -= chosen.length;
      if (chosen.length < 0.4 * seen.length || left < 0) continue;
      for (const [k, a, b] of chosen) {
        drawText(ctx, text(k), (a + b) / 2, lane.y + lane.tall / 2 + 0.5, two && !lane.trace ? look.ink : LOOKS[words[sorts[k]]][2], "center", size);
      }
    }
  }

  function paint(ctx, wide, look, plan, t0, t1, more) {
    if (!plan.rows.length) return;
    if (ctx.hatch) vector(ctx, wide, look, plan, t0, t1, more);
    else {
      const ratio = ctx.getTransform().a;
      raster(wide, look, plan, t0, t1, more, ratio);
      ctx.imageSmoothingEnabled = false;
      ctx.drawImage(surface, LEFT, plan.rows[0].y - 2, wide, picture.height / ratio);
    }
    labels(ctx, wide, look, plan, t0, t1);
  }
  return { paint, visible };
}

/** The curve of a rank in a trace: [trace, rank, first, last]. */
export const curveOf = (more, trace, rank) => more?.memory?.find((one) => one[0] === trace && one[1] === rank);

/** The memory of a rank, stacked by kind; the other ranks and the prediction as lines; the limit. */
export function drawMemory(ctx, wide, look, plan, t0, t1, more, about, rank) {
  const top = plan.memory, bottom = top + CURVE, last = about.traces.length - 1, time = more.memory_time, total = more.memory_total;
  const mine = curveOf(more, last, rank), limit = about.capacity;
  let most = more.memory_most;
  if (limit && limit < 4 * most) most = Math.max(most, limit);
  const yOf = (amount) => bottom - (amount / (1.08 * most || 1)) * CURVE;
  const at = peaks(time, total, mine[2], mine[3], t0, t1, wide), below = new Float64Array(wide);
  for (const kind of more.memory_kinds) {
    const column = more[`memory_${kind}`], colour = fill(ctx, MEMORY[kind][0], look.paper, MEMORY[kind][1]);
    for (let x = 0, end = 0; x < wide; x = end) {
      const k = at[x], amount = k < 0 ? 0 : Math.max(0, column[k]), under = below[x];
      while (end < wide && at[end] === k) below[end++] += amount;
      if (amount) drawRect(ctx, colour, LEFT + x, yOf(under + amount), end - x, yOf(under) - yOf(under + amount));
    }
  }
  const line = (one, colour, thick, dash) => {
    const levelAt = (k) => yOf(total[k] ?? 0);
    let past;
    ctx.strokeStyle = colour;
    ctx.lineWidth = thick;
    ctx.setLineDash(dash);
    ctx.beginPath();
    peaks(time, total, one[2], one[3], t0, t1, wide).forEach((k, x) => {
      if (k === past) return;
      if (x) ctx.lineTo(LEFT + x, levelAt(past));
      ctx.lineTo(LEFT + x, levelAt((past = k)));
    });
    ctx.lineTo(LEFT + wide, levelAt(past));
    ctx.stroke();
    ctx.setLineDash([]);
  };
  if (about.ranks <= 8) for (const one of more.memory) if (one[0] === last && one[1] !== rank) line(one, look.muted, 0.6, [1, 2]);
  if (last) line(curveOf(more, 0, rank), look.ink, 1.2, [4, 3]);
  line(mine, look.ink, 1.4, []);
  if (limit && limit <= 1.08 * most) {
    drawRect(ctx, look.warn, LEFT, yOf(limit), wide, 1.5);
    drawText(ctx, `capacity ${short(limit)} ${more.memory_unit}`, LEFT + wide - 2, yOf(limit) - 7, look.warn, "right");
  }
  for (const amount of ticks(0, most, 4)) drawText(ctx, short(amount), LEFT - 4, yOf(amount), look.muted, "right");
  const words = [`memory of rank ${rank} (${more.memory_unit}):`, ...more.memory_kinds, ...(last ? [`${about.traces[0]} dashed`] : [])];
  let x = 4;
  for (const word of words) {
    if (MEMORY[word]) drawRect(ctx, fill(ctx, MEMORY[word][0], look.paper, MEMORY[word][1]), (x += 6), bottom + 22, 11, 9);
    drawText(ctx, word, (x += MEMORY[word] ? 14 : 0), bottom + 27, look.ink);
    x += 6.1 * word.length;
  }
  drawText(ctx, `peak ${short((mine[4] ??= total.subarray(mine[2], mine[3]).reduce((a, b) => Math.max(a, b), 0)))}`, LEFT + wide + RIGHT - 2, top + 6, look.muted, "right");
}
