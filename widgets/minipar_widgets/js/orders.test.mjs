import assert from "node:assert/strict";
import { test } from "node:test";
import { laid, linked, moments, moved, nearest, split, story, target } from "./orders.js";

const block = (word, stage, start, end, takes = 1) => ({ word, stage, microbatch: +word.slice(1).split(".")[0], start, end, takes });
// two stages, two micro-batches, GPipe: forward 1, backward 2
const gpipe = {
  ranks: [
    [block("F0", 0, 0, 1), block("F1", 0, 1, 2), block("B1", 0, 5, 7), block("B0", 0, 7, 9)],
    [block("F0", 1, 1, 2), block("F1", 1, 2, 3), block("B1", 1, 3, 5), block("B0", 1, 5, 7)],
  ],
};

test("a block moves to any place, and nothing is lost", () => {
  const words = ["F0", "F1", "B0", "B1"];
  for (let k = 0; k < 4; k++) {
    for (let to = 0; to < 4; to++) {
      const after = moved(words, k, to);
      assert.equal(after[to], words[k]);
      assert.deepEqual([...after].sort(), [...words].sort());
      assert.deepEqual(after.filter((w) => w !== words[k]), words.filter((w) => w !== words[k]));
    }
  }
});

test("a backward splits into halves and joins again, chunks included", () => {
  assert.deepEqual(split(["F0.1", "B0.1"], 1), ["F0.1", "I0.1", "W0.1"]);
  assert.deepEqual(split(["F0", "I0", "F1", "W0"], 3), ["F0", "B0", "F1"]);
  assert.deepEqual(split(["F0", "I0", "F1", "W0"], 1), ["F0", "B0", "F1"]);
  assert.deepEqual(split(["F0", "B0"], 0), ["F0", "B0"]);
  assert.deepEqual(split(["W0"], 0), ["W0"], "a half without the other stays");
});

test("blocks that never run follow what has run, in order", () => {
  const stuck = { ranks: [[block("F0", 0, 0, 1), block("B0", 0, null, null, 2)], [block("F0", 1, 1, 2), block("B0", 1, null, null, 2)]] };
  const { rows, time, stop } = laid(stuck);
  assert.equal(stop, 2);
  assert.equal(time, 4);
  assert.deepEqual(rows.map((row) => row.map((b) => [b.start, b.end, b.runs])), [
    [[0, 1, true], [2, 4, false]],
    [[1, 2, true], [2, 4, false]],
  ]);
  const nothing = laid({ ranks: [[block("B0", 0, null, null, 2), block("F0", 0, null, null, 1)]] });
  assert.deepEqual(nothing.rows[0].map((b) => [b.start, b.end]), [[0, 2], [2, 3]]);
});

test("a drop lands between the blocks around the pointer", () => {
  const [row] = laid(gpipe).rows;
  assert.equal(target(row, 0, -1), 0);
  assert.equal(target(row, 0, 1.6), 1);
  assert.equal(target(row, 3, 0.1), 0);
  assert.equal(target(row, 3, 5.9), 2);
  assert.equal(target(row, 3, 6.1), 3);
  assert.equal(target(row, 1, 99), 3);
});

test("the nearest block is the one at that moment, or the closest", () => {
  const [row] = laid(gpipe).rows;
  assert.equal(nearest(row, 1.5), 1);
  assert.equal(nearest(row, 3), 1);
  assert.equal(nearest(row, 4.9), 2);
});

test("what a block waits for, and what waits for it", () => {
  const { rows } = laid(gpipe);
  assert.deepEqual(linked(rows, 1, 0), { needs: [[0, 0]], feeds: [[1, 3]] }); // F0 of the last stage feeds its B0
  assert.deepEqual(linked(rows, 0, 3), { needs: [[1, 3]], feeds: [] });
  assert.deepEqual(linked(rows, 1, 3), { needs: [[1, 0]], feeds: [[0, 3]] });
  const halves = laid({ ranks: [[block("F0", 0, 0, 1), block("I0", 0, 1, 2), block("W0", 0, 2, 3)]] }).rows;
  assert.deepEqual(linked(halves, 0, 1), { needs: [[0, 0]], feeds: [[0, 2]] });
  assert.deepEqual(linked(halves, 0, 2), { needs: [[0, 1]], feeds: [] });
});

test("playback tells who does what", () => {
  const { rows, time } = laid(gpipe);
  assert.equal(story(rows, 4, time), "time 4 of 9: rank 0 waits · rank 1 B1");
  assert.equal(story(rows, 8, time), "time 8 of 9: rank 0 B0 · rank 1 is done");
  assert.deepEqual(moments(rows, 9), [0, 1, 2, 3, 5, 7, 9]);
});
