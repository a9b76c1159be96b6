// What a timeline knows of its events, without a document: where their lanes are, which event is whose cause or twin.
import { DIFFERENCES } from "./shared.js";
import { search } from "./lod.js";

export const IDLE = ["fill", "wait", "overhead"];
export const LEFT = 74;
export const RIGHT = 62;
export const CURVE = 92; // height of the memory curves

/** Words in lines of at most `width` pixels: [word, x, y], and the y of the last line. `measure` gives a word's width. */
export function placed(words, width, measure, gap) {
  const found = [];
  let x = 0, y = 0;
  for (const word of words) {
    const size = gap + measure(word);
    if (x + size > width && x) {
      x = 0;
      y += 17;
    }
    found.push([word, x, y]);
    x += size;
  }
  return [found, y];
}

/**
 * Where everything is, in CSS pixels, for a width: rows of lanes, overview, memory, legends. Many ranks get thin rows.
 *
 * open     the ranks of a folded comparison that show both traces; the others show the second one and the difference
 * kinds    of memory, and `extra` words of the legend
 *
 * The legend is above the lanes where one line has room for it; a longer one is under everything, before the memory's.
 */
export function layout(about, width, { streams = true, memory = false, open = new Set(), kinds = [], extra = [], measure = (word) => 6.1 * word.length, key = [] } = {}) {
  const stride = Math.ceil(about.ranks / 640), folds = (rank) => !!about.folded && !open.has(rank);
  const lanes = about.lanes.map(([trace, rank, stream, first, last, group]) => ({ trace, rank, first, last, group, main: stream === "compute", folded: folds(rank) }));
  const shown = lanes.filter((lane) => lane.rank % stride === 0 && (!lane.folded || (lane.trace && lane.main))).sort((a, b) => a.rank - b.rank || a.trace - b.trace);
  const mains = shown.filter((lane) => lane.main).length, thin = shown.length - mains + shown.filter((lane) => lane.group).length;
  const height = (room) => Math.min(22, Math.max(1, Math.floor(room / Math.max(1, mains))) - 4);
  let tall = height(620 - 7 * thin);
  const all = streams && tall >= 9;
  if (!all) tall = Math.max(1, height(620));
  const rows = [], closed = shown.every((lane) => lane.folded);
  const words = [...(closed ? about.shown.filter((word) => !AROUND.test(word)) : about.shown), ...(about.shades ?? [])];
  if (!closed) words.push(...IDLE.map((word) => `idle: ${word}`));
  if (about.folded) words.push(...DIFFERENCES.map(([word]) => word));
  if (about.traces.length > 1 && !closed) words.push(`${about.traces[0]} (outlined)`, `${about.traces[1]} (filled)`);
  const [legend, last] = placed([...words, ...extra], width, measure, 32);
  const above = !last, overview = above ? 24 : 4, strip = tall >= 10 ? (about.folded ? 6 : 4) : 0;
  let y = overview + 22, before = shown[0]?.rank;
  for (const lane of shown) {
    if (!lane.main && !all) continue;
    if (lane.rank !== before) y += strip;
    before = lane.rank;
    const own = lane.main ? strip : 0, high = lane.main ? tall : lane.group ? 13 : 6;
    rows.push({ ...lane, y, tall: high, strip: own });
    y += high + own + (strip ? 1 : 0);
  }
  const axis = y + 3, below = memory ? axis + 8 : 0, [names, lines] = memory ? placed([...key, ...kinds], width - 4, measure, 22) : [[], 0];
  const bottom = memory ? below + CURVE : axis, under = above ? 0 : last + 26;
  return {
    legend: legend.map(([word, x, line]) => [word, x, line + (above ? 0 : bottom + 22)]), overview, rows, axis, memory: below, bottom, open: [...open].join(),
    key: names.map(([word, x, line]) => [word, x + 4, line + under]), height: (memory ? bottom + 18 + lines : axis) + 20 + under,
  };
}

export const AROUND = /^(message|receive|copy|collective|all-.*|reduce-scatter)$/; // what is no compute

/** How long each event of a comparison took against its twin: a position in DIFFERENCES, as in minipar/trace/comparison.py. */
export function graded(takes, twin) {
  const most = [0.75, 0.95, 1.05, 1.25], found = new Uint8Array(takes.length).fill(2);
  for (let k = 0; k < takes.length; k++) {
    const other = twin[k] < 0 || twin[k] > k ? -1 : takes[twin[k]]; // (the first trace has the lower numbers)
    if (other > 0) found[k] = 4 - most.filter((part) => takes[k] / other <= part).length;
    else if (!other && takes[k] > 0) found[k] = 4;
  }
  return found;
}

/** The smallest time after t (with sign -1 the largest before it) at which an event of these rows starts or ends. */
export function boundary(begins, takes, rows, t, sign) {
  let best = sign * Infinity;
  for (const { first, last } of rows) {
    const k = search(begins, first, last, t);
    for (let j = Math.max(first, k - 3); j < Math.min(last, k + 3); j++) {
      for (const time of [begins[j], begins[j] + takes[j]]) {
        if (sign * (time - t) > 1e-7 * Math.max(1, Math.abs(t)) && sign * (best - time) > 0) best = time;
      }
    }
  }
  return isFinite(best) ? best : t;
}

/** For each event the same instruction of the other trace; -1 where there is none. */
export function twins(lanes, indices) {
  const found = new Int32Array(indices.length).fill(-1), seen = new Map();
  for (const [trace, rank, , first, last] of lanes) {
    for (let k = first; k < last; k++) {
      const key = rank * 4194304 + indices[k], other = seen.get(key);
      if (!trace) seen.set(key, k);
      else if (other !== undefined) {
        found[k] = other;
        found[other] = k;
      }
    }
  }
  return found;
}

/** The arrows of `before` turned round: the events that read what event k gives are targets[ends[k]] to [ends[k + 1]]. */
export function inverse(before, sources) {
  const count = before.length - 1, ends = new Uint32Array(count + 2), targets = new Uint32Array(sources.length);
  for (const k of sources) ends[k + 2]++;
  for (let k = 2; k < ends.length; k++) ends[k] += ends[k - 1];
  for (let k = 0; k < count; k++) for (let i = before[k]; i < before[k + 1]; i++) targets[ends[sources[i] + 1]++] = k;
  return [ends, targets];
}

/** Pairs (k, other) that lead from event k along arrows, on through events that are no compute (`passes`). */
export function chain(k, ends, targets, passes) {
  const found = [], ahead = [k], seen = new Set(ahead);
  while (ahead.length && found.length < 200) {
    const j = ahead.pop();
    for (let i = ends[j]; i < ends[j + 1]; i++) {
      const other = targets[i];
      found.push([j, other]);
      if (!seen.has(other) && passes(other)) ahead.push(other);
      seen.add(other);
    }
  }
  return found;
}
