import assert from "node:assert/strict";
import { test } from "node:test";
import { addedAt, count, moment, places, sentence, stateAt } from "./collective.js";

// Two ranks, one chunk: rank 1 sends its 20 from 0 to 4, rank 0 adds it until 6.
const PLAY = {
  unit: "ms", time: 6, nodes: 1, sizes: [8], moments: [0, 4, 6], least: 8, sent: [0, 8],
  first: [[[10, 1]], [[20, 2]]], last: [[[30, 3]], [[20, 2]]], links: [[1, 0, 8, "8 B"]],
  messages: [[1, 0, 0, 4, 8, [0], [20]]], adds: [[4, 6, 0, 0]], changes: [[6, 0, 0, [30, 3]]],
};

test("cells, messages and bytes are those of the moment", () => {
  const half = stateAt(PLAY, 2);
  assert.deepEqual(half.cells, [[[10, 1]], [[20, 2]]]);
  assert.deepEqual(half.flying, PLAY.messages);
  assert.deepEqual(half.sent, [0, 4]);
  const later = stateAt(PLAY, 5);
  assert.deepEqual([later.flying, later.sent, later.cells[0][0]], [[], [0, 8], [10, 1]]);
  assert.deepEqual(stateAt(PLAY, 6).cells[0][0], [30, 3]);
  assert.deepEqual(PLAY.first[0][0], [10, 1], "the beginning stays as it is");
});

test("steps go to the middle between moments, and stop at the ends", () => {
  const stops = [];
  for (let t = 0; t < 6;) stops.push((t = moment(PLAY, t, 1)));
  assert.deepEqual(stops, [2, 5, 6]);
  assert.equal(moment(PLAY, 6, 1), 6);
  assert.deepEqual([6, 5, 2, 0].map((t) => moment(PLAY, t, -1)), [5, 2, 0, 0]);
});

test("every moment has words", () => {
  assert.equal(sentence(PLAY, 2), "2 of 6 ms: rank 1 sends chunk 0, 20, to rank 0");
  assert.equal(sentence(PLAY, 5), "5 of 6 ms: rank 0 adds to chunk 0");
  assert.equal(sentence(PLAY, 6), "6 of 6 ms: nothing is on its way; 2 of 2 ranks hold what they end with");
  assert.deepEqual(addedAt(PLAY, 6), []);
});

test("parts are counted", () => {
  for (const [mask, n] of [[0, 0], [1, 1], [0b1011, 3], [0xffff, 16]]) assert.equal(count(mask), n);
});

test("everything has its place at any width, and nothing overlaps", () => {
  for (const ranks of [2, 5, 16]) for (const chunks of [1, 4, 16, 64]) for (const width of [240, 420, 719, 720, 1400]) {
    const play = { ...PLAY, first: Array(ranks).fill(Array(chunks).fill(null)), sizes: Array(chunks).fill(1) };
    const p = places(play, width);
    assert.ok(p.left + chunks * p.cell <= p.barsLeft, "cells before bars");
    assert.ok(p.barsLeft + p.bars <= width, `bars inside: ${p.barsLeft} + ${p.bars} of ${width}`);
    assert.ok(p.top + ranks * p.row <= p.strip, "rows above the strip");
    assert.ok(p.cell > 0 && p.row >= 18 && p.bars > 40);
    if (p.wide) assert.ok(p.circle + 24 < p.left);
    else assert.ok(p.circle < p.top);
  }
});
