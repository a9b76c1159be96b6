// Drawing lanes: as pixels on a canvas, as bars in an SVG; and the memory curves under them.
import { DIFFERENCES, drawBands, drawEdge, drawRect, drawText, fill, FONT, LOOKS, MEMORY, short, ticks } from "./shared.js";
import { CURVE, LEFT, RIGHT } from "./events.js";
import { blit, cells, inks, peaks, runs, search } from "./lod.js";

const SIZES = [11, 9.5, 8, 7]; // of the words on bars

/**
 * For each bar of a kind [text, size, whether it stands beside the bar], or null: the rule of labels.fitted in Python. A bar
 * has its `texts`, the longest first, and `room` for them; `group`: they may also take the room that is `free` beside it.
 */
export function fitted(bars, sizes, group) {
  const last = Math.max(...bars.map(({ texts }) => texts.length)) - 1, textOf = ({ texts }, k) => texts[k] ?? texts.at(-1);
  const fits = (bar, [k, size], room) => 0.62 * size * textOf(bar, k).length <= room;
  const ways = [...Array(last + 1).keys()].flatMap((k) => sizes.map((size) => [k, size])), able = (one) => bars.filter((bar) => fits(bar, one, bar.room)).length;
  const [from, usual] = ways.find((one) => (one[0] === last || one[1] === sizes[0]) && (group || able(one) >= 0.7 * able(ways.at(-1))));
  const tries = ways.filter(([k, size]) => k >= from && size <= usual);
  return bars.map((bar) => {
    const inside = tries.find((one) => fits(bar, one, bar.room)), one = inside ?? (group && tries.find((one) => fits(bar, one, bar.free)));
    return one ? [textOf(bar, one[0]), one[1], !inside] : null;
  });
}

/** Whether a kind is a collective. */
export const collective = (kind) => LOOKS[kind]?.[4].length > 1 || kind === "collective";

/**
 * What draws all lanes of a timeline between two times: paint(ctx, wide, look, plan, t0, t1, more). `levels` gives for
 * each event of a comparison how long it took against its twin: a position in DIFFERENCES.
 */
export function lanePainter(about, begins, takes, sorts, numbers, levels) {
  const words = about.kinds, two = about.traces.length > 1;
  const marks = words.map((kind) => [LOOKS[kind][3], LOOKS[kind][5] ?? 0]);
  let surface, brush, picture, pixels, line, sign, ground, full, rim, pale, paleRim, tone, paleTone, reasons, grades;

  /** The events of a lane in sight, if there are at most so many. */
  function visible(lane, t0, t1, most) {
    const k = Math.max(lane.first, search(begins, lane.first, lane.last, t0) - 1), end = search(begins, lane.first, lane.last, t1);
    return end - k > most ? [] : Array.from({ length: end - k }, (_, i) => k + i);
  }
  const idleFaces = (look) => [look.rule, look.muted, look.warn];
  const idleOf = (lane, more) => (lane.strip && more ? more.idle.find((one) => one[0] === lane.trace && one[1] === lane.rank) : null);

  function raster(wide, look, plan, t0, t1, more, ratio) {
    const now = [t0, t1, wide, ratio, look.paper, plan.axis, plan.rows.length, plan.open, !!more].join();
    if (sign === now) return;
    sign = now;
    const columns = Math.round(wide * ratio), top = plan.rows[0].y - 2, lines = Math.ceil((plan.axis - top) * ratio);
    if (picture?.width !== columns || picture.height !== lines) {
      surface = new OffscreenCanvas(columns, lines);
      brush = surface.getContext("2d");
      picture = brush.createImageData(columns, lines);
      pixels = new Uint32Array(picture.data.buffer);
      line = new Uint16Array(columns);
    }
    pixels.fill(0);
    if (ground !== look.paper) {
      ground = look.paper;
      const table = (k, other) => [1, 0.4].map((most) => inks(words.map((kind) => LOOKS[kind][k] || LOOKS[kind][other]), ground, most));
      [full, pale] = table(0);
      [rim, paleRim] = table(1);
      [tone, paleTone] = table(6, 1);
      reasons = inks(idleFaces(look), ground);
      grades = inks(DIFFERENCES.map(([, colour]) => colour), ground);
    }
    for (const lane of plan.rows) {
      const y = Math.round((lane.y - top) * ratio), tall = Math.max(1, Math.round(lane.tall * ratio)), outlined = two && !lane.trace;
      cells(begins, takes, sorts, lane.first, lane.last, t0, t1, columns, line);
      blit(pixels, columns, line, y, tall, outlined ? pale : full, outlined ? paleTone : tone, marks, ratio);
      if (lane.tall > 5) border(lane, y, tall, outlined ? full : rim, outlined ? Math.round(1.3 * ratio) : 1, columns, t0, t1, ratio);
      const mine = idleOf(lane, more), under = Math.round((lane.strip - 1) * ratio);
      if (lane.folded) {
        cells(begins, takes, levels(), lane.first, lane.last, t0, t1, columns, line);
        blit(pixels, columns, line, y + tall, under, grades, grades, []);
      } else if (mine) {
        cells(more.idle_start, more.idle_length, more.idle_kind, mine[2], mine[3], t0, t1, columns, line);
        blit(pixels, columns, line, y + tall, under, reasons, reasons, []);
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
    const row = new Uint16Array(wide);
    const strip = (starts, lengths, codes, first, end, y, tall, pale, faces) => {
      cells(starts, lengths, codes, first, end, t0, t1, wide, row);
      for (const [a, b, cell] of runs(row)) {
        const code = (cell >> 4) - 1, known = !faces && LOOKS[words[code]];
        drawRect(ctx, known ? fill(ctx, known[0], known[1], known[3]) : faces[code], LEFT + a, y, b - a, tall, ((cell & 15) / 15) * pale);
        if (known) drawBands(ctx, known, LEFT + a, y, b - a, tall);
      }
    };
    for (const lane of plan.rows) {
      const outlined = two && !lane.trace, mine = idleOf(lane, more), under = lane.y + lane.tall;
      strip(begins, takes, sorts, lane.first, lane.last, lane.y, lane.tall, outlined ? 0.4 : 1);
      if (lane.folded) strip(begins, takes, levels(), lane.first, lane.last, under, lane.strip - 1, 1, DIFFERENCES.map(([, colour]) => colour));
      else if (mine) strip(more.idle_start, more.idle_length, more.idle_kind, mine[2], mine[3], under, 3, 1, idleFaces(look));
      for (const k of visible(lane, t0, t1, wide / 3)) {
        const [a, b] = ends(k, wide, t0, t1);
        if (b - a >= 4 && lane.tall > 8) drawEdge(ctx, LOOKS[words[sorts[k]]][outlined ? 0 : 1], a, lane.y, b - a, lane.tall);
      }
    }
  }

  const ends = (k, wide, t0, t1) => [begins[k], begins[k] + takes[k]].map((t) => LEFT + Math.max(0, Math.min(1, (t - t0) / (t1 - t0))) * wide);

  /** The words for a bar, the longest first, as minipar/trace/labels.py gives them; a number gets a letter where it has room. */
  function wordsOf(k, more) {
    const given = more?.labels[more.name[k]] ?? (numbers[k] < 0 ? [] : ["#"]), letter = LOOKS[words[sorts[k]]][4];
    return given.flatMap((text) => (text === "#" ? [letter + text, text] : text)).map((text) => text.replaceAll("#", numbers[k]));
  }

  /** Words on bars, each in the largest size that has room. A collective's may stand on the paper to its right. */
  function labels(ctx, wide, look, plan, t0, t1, more) {
    let left = 4000;
    for (const lane of plan.rows) {
      if (lane.tall < 11) continue;
      const kinds = new Map(), seen = visible(lane, t0, t1, wide / 5), all = seen.map((k) => ends(k, wide, t0, t1));
      seen.forEach((k, n) => {
        const texts = wordsOf(k, more), [a, b] = all[n], kind = kinds.get(sorts[k]) ?? [];
        if (texts.length && begins[k] + takes[k] >= t0) kinds.set(sorts[k], [...kind, { a, b, texts, room: b - a - 2, free: (all[n + 1]?.[0] ?? LEFT + wide) - b - 5 }]);
      });
      for (const [sort, bars] of kinds) {
        const [, , own, , , bands] = LOOKS[words[sort]], group = collective(words[sort]), y = lane.y + lane.tall / 2 + 0.5 - 2 * (bands ?? 0);
        const ink = group ? "#1a1a1a" : two && !lane.trace ? look.ink : own;
        fitted(bars, SIZES.filter((size) => size < lane.tall), group).forEach((one, n) => {
          if (!one || left-- < 0) return;
          const { a, b } = bars[n], [text, size, beside] = one, x = (a + b) / 2;
          if (beside) return drawText(ctx, text, b + 4, y, look.ink, "left", size);
          drawText(ctx, text, x, y, ink, "center", size, "", group && "#ffffff");
        });
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
    labels(ctx, wide, look, plan, t0, t1, more);
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
    ctx.beginPath(); // (one path: parts that are filled one by one have seams on screens of 1.5 pixels a pixel)
    for (let x = 0, end = 0; x < wide; x = end) {
      const k = at[x], amount = k < 0 ? 0 : Math.max(0, column[k]), under = below[x];
      while (end < wide && at[end] === k) below[end++] += amount;
      if (amount) ctx.rect(LEFT + x, yOf(under + amount), end - x, yOf(under) - yOf(under + amount));
    }
    ctx.fillStyle = colour;
    ctx.fill();
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
  for (const [word, x, y] of plan.key) {
    const mark = MEMORY[word];
    if (mark) drawRect(ctx, fill(ctx, mark[0], look.paper, mark[1]), x, bottom + 22 + y, 11, 9);
    drawText(ctx, word, x + (mark ? 15 : 0), bottom + 27 + y, look.ink);
  }
  drawText(ctx, `peak ${short((mine[4] ??= total.subarray(mine[2], mine[3]).reduce((a, b) => Math.max(a, b), 0)))}`, LEFT + wide + RIGHT - 2, top + 6, look.muted, "right");
}
