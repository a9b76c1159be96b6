// What a timeline knows of its events, without a document: where their lanes are, which event is whose cause or twin.
import { search } from "./lod.js";

export const IDLE = ["fill", "wait", "overhead"];
export const LEFT = 74;
export const RIGHT = 62;
export const CURVE = 92; // height of the memory curves

/** Where everything is, in CSS pixels, for a width: rows of lanes, overview, memory, legend. Many ranks get thin rows. */
export function layout(about, width, streams, memory) {
  const stride = Math.ceil(about.ranks / 640);
  const lanes = about.lanes.map(([trace, rank, stream, first, last]) => ({ trace, rank, first, last, main: stream === "compute" }));
  const shown = lanes.filter((lane) => lane.rank % stride === 0).sort((a, b) => a.rank - b.rank || a.trace - b.trace);
  const mains = shown.filter((lane) => lane.main).length, thin = shown.length - mains;
  const height = (room) => Math.min(22, Math.max(1, Math.floor(room / Math.max(1, mains))) - 4);
  let tall = height(620 - 7 * thin);
  const all = streams && tall >= 9;
  if (!all) tall = Math.max(1, height(620));
  const legend = [], rows = [];
  let x = 0, y = 0;
  const words = [...about.shown, ...IDLE.map((word) => `idle: ${word}`)];
  if (about.traces.length > 1) words.push(`${about.traces[0]} (outlined)`, `${about.traces[1]} (filled)`);
  for (const word of words) {
    const size = 32 + 6.1 * word.length;
    if (x + size > width && x) {
      x = 0;
      y += 17;
    }
    legend.push([word, x, y]);
    x += size;
  }
  const overview = y + 24, strip = tall >= 10 ? 4 : 0;
  y = overview + 22;
  let before = shown[0]?.rank;
  for (const lane of shown) {
    if (!lane.main && !all) continue;
    if (lane.rank !== before) y += strip;
    before = lane.rank;
    const own = lane.main ? strip : 0;
    rows.push({ ...lane, y, tall: lane.main ? tall : 6, strip: own });
    y += (lane.main ? tall : 6) + own + (strip ? 1 : 0);
  }
  const axis = y + 3, below = memory ? axis + 8 : 0;
  return { legend, overview, rows, axis, memory: below, bottom: memory ? below + CURVE : axis, height: (memory ? below + CURVE + 18 : axis) + 20 };
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
