// Orders made by hand, without a page: moving, splitting, where blocks stand, what waits for what. All of it is pure, and
// tested by orders.test.mjs.

import { short } from "./shared.js";

export const KINDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };

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
