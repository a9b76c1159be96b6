// Level of detail: what a lane with any number of events looks like, pixel by pixel. Pure functions on typed arrays.
//
//   events    |F|F|B..|  |F|    sorted by start, none begins before the one before it has ended
//   pixels    [F][B][B][B][ ][F]
//
// A pixel shows the kind that fills most of it (of equals the lower code), as strongly as all kinds together fill it. An
// event that takes no time, or far less than a pixel, is still seen: it gives its pixel at least the strength FAINT.
// The static picture (raster.py) follows the same rule, and both are tested against a raster by brute force.

export const STRONG = 15;
export const FAINT = 4;

/** The first k in [first, last) with start[k] >= t; last if there is none. */
export function search(start, first, last, t) {
  while (first < last) {
    const middle = (first + last) >>> 1;
    if (start[middle] < t) first = middle + 1;
    else last = middle;
  }
  return first;
}

/**
 * A number for each pixel of [from, to): 0 where nothing is, or 16 * (kind + 1) + strength. Pixel x is the time from
 * from + x / scale to from + (x + 1) / scale.
 */
export function cells(start, length, kind, first, last, from, to, width, out = new Uint16Array(width)) {
  out.fill(0, 0, width);
  const scale = width / (to - from);
  let k = search(start, first, last, from);
  if (k > first && start[k - 1] + length[k - 1] > from) k--;
  let now = -1, seen = 0, edge = -1 / 0; // the pixel under way, a bit for each kind in it, and when it ends
  for (; k < last; k++) {
    const code = kind[k], size = length[k] * scale;
    if (start[k] + length[k] < edge) {
      seen |= 1 << code;
      sums[code] += size; // most events of a long trace are done here
      continue;
    }
    let a = (start[k] - from) * scale, b = a + size;
    if (a >= width) break;
    if (a < 0) a = 0;
    if (b > width) b = width;
    const x = a | 0, end = b | 0;
    if (x !== now) {
      if (seen) out[now] = cell(seen);
      now = x;
      seen = 0;
    }
    seen |= 1 << code;
    if (x === end) {
      sums[code] += b - a;
      edge = from + (x + 1) / scale;
      continue;
    }
    sums[code] += x + 1 - a;
    out[x] = cell(seen);
    out.fill(16 * (code + 1) + STRONG, x + 1, end);
    now = end;
    seen = b > end ? 1 << code : 0;
    sums[code] = b - end;
  }
  if (seen) out[now] = cell(seen);
  return out;
}

const sums = new Float64Array(32); // how much of the pixel under way each kind fills; zeros between two pixels

/** The cell of a pixel with these kinds. */
function cell(seen) {
  let sum = 0, most = -1, best = 0;
  for (let code = 0; seen; code++, seen >>>= 1) {
    if (!(seen & 1)) continue;
    const part = sums[code];
    sums[code] = 0;
    sum += part;
    if (part > most) {
      most = part;
      best = code;
    }
  }
  const strength = Math.ceil(sum * STRONG - 1e-6);
  return 16 * (best + 1) + (strength < FAINT ? FAINT : strength > STRONG ? STRONG : strength);
}

/** Runs of equal pixels as [from, to, cell], for drawings made of rectangles; empty pixels are left out. */
export function runs(row) {
  const found = [];
  for (let x = 0; x < row.length; ) {
    let end = x + 1;
    while (end < row.length && row[end] === row[x]) end++;
    if (row[x]) found.push([x, end, row[x]]);
    x = end;
  }
  return found;
}

/** The event of a lane at time t, or the nearest one that is at most `reach` away; -1 if there is none. */
export function hit(start, length, first, last, t, reach) {
  const k = search(start, first, last, t);
  let best = -1, distance = reach;
  for (const j of [k - 1, k]) {
    if (j < first || j >= last) continue;
    const away = Math.max(0, start[j] - t, t - start[j] - length[j]);
    if (away < distance || (away === distance && best < 0) || (away === 0 && start[j] <= t)) {
      best = j;
      distance = away;
    }
  }
  return best;
}

/** The lengths of all events before event k, for each k. */
export function totals(length) {
  const found = new Float64Array(length.length + 1);
  for (let k = 0; k < length.length; k++) found[k + 1] = found[k] + length[k];
  return found;
}

/** Time that the events of a lane fill within [from, to]; `total` is totals(length). */
export function filled(start, total, first, last, from, to) {
  const until = (t) => {
    const k = search(start, first, last, t);
    return k > first ? total[k] - Math.max(0, start[k - 1] + total[k] - total[k - 1] - t) : total[first];
  };
  return until(to) - until(from);
}

/**
 * A step curve (value[k] from time[k] on) in pixels: for each the index of its highest moment, so that no peak is lost;
 * -1 before the first time. Among equals the earliest counts.
 */
export function peaks(time, value, first, last, from, to, width, out = new Int32Array(width)) {
  const step = (to - from) / width;
  let k = search(time, first, last, from);
  for (let x = 0; x < width; x++) {
    const end = from + (x + 1) * step;
    let best = k > first ? k - 1 : -1; // what holds when the pixel begins
    for (; k < last && (time[k] < end || (x === width - 1 && time[k] <= end)); k++) {
      if (best < 0 || value[k] > value[best]) best = k;
    }
    out[x] = best;
  }
  return out;
}

const rgb = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));

/** Pixels (ABGR, as in ImageData on all machines that browsers run on) of every cell: `face` over `paper`, by strength. */
export function inks(faces, paper, most = 1) {
  const found = new Uint32Array(16 * (faces.length + 1)), under = rgb(paper);
  faces.forEach((face, code) => {
    const over = rgb(face);
    for (let strength = 0; strength <= STRONG; strength++) {
      const [r, g, b] = over.map((c, k) => Math.round(under[k] + ((c - under[k]) * most * strength) / STRONG));
      found[16 * (code + 1) + strength] = (255 << 24) | (b << 16) | (g << 8) | r;
    }
  });
  return found;
}

/** The marks of hatches: whether one is at column x and row y, in pixels of the page. */
const HATCHES = {
  "/": (x, y) => (x + y) % 6 === 0,
  "\\": (x, y) => (x - y + 6000) % 6 === 0,
  "x": (x, y) => (x + y) % 6 === 0 || (x - y + 6000) % 6 === 0,
  "|": (x) => x % 6 === 0,
  "-": (x, y) => y % 3 === 1,
  "+": (x, y) => x % 6 === 0 || y % 6 === 3,
};

/**
 * Write a lane's cells into pixels, from row `top` for `height` rows. looks[code] is [hatch, bands] of a kind: a hatch
 * and the bands at the lower edge of later chunks have the colours of `line`. `ratio` pixels are one of the page.
 */
export function blit(pixels, width, row, top, height, ink, line, looks, ratio = 1) {
  const first = top * width, fine = Math.max(1, Math.round(ratio)), page = (c) => Math.floor(c / fine);
  for (let x = 0; x < width; x++) pixels[first + x] = ink[row[x]];
  for (let y = 1; y < height; y++) pixels.copyWithin(first + y * width, first, first + width);
  for (let x = 0; x < width; x++) {
    const [hatch, bands] = (row[x] && looks[(row[x] >> 4) - 1]) || ["", 0], mark = HATCHES[hatch];
    for (let y = 0; mark && y < height; y++) if (mark(page(x), page(y))) pixels[first + y * width + x] = line[row[x]];
    for (let k = 0; k < bands && height >= 9 * fine; k++) {
      for (let y = height - (4 + 4 * k) * fine; y < height - (2 + 4 * k) * fine; y++) pixels[first + y * width + x] = line[row[x]];
    }
  }
}
