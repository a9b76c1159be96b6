import assert from "node:assert/strict";
import { test } from "node:test";
import { kept, sentence, size, spans } from "./checkpoint.js";

// Two layers in one segment: F0 F1, B1, R0, B0. op, layer, saves, hands, drops, end, during, after
const TAPE = {
  layers: 2, unit: "units", clock: "time", peak: 3,
  moves: [
    ["F", 0, false, true, true, 1, 1, 1], ["F", 1, true, true, false, 2, 3, 3], ["B", 1, false, true, true, 4, 3, 1],
    ["R", 0, true, false, false, 5, 2, 2], ["B", 0, false, true, true, 7, 2, 0],
  ],
  lifetimes: [["output", 0, 0, 2], ["saved", 1, 1, 2], ["saved", 0, 3, 4]],
};

test("moves follow each other in time", () => {
  assert.deepEqual(spans(TAPE).map(([start, end]) => [start, end]), [[0, 1], [1, 2], [2, 4], [4, 5], [5, 7]]);
  assert.deepEqual(spans(TAPE)[2].slice(2), [3, 1]);
});

test("what is kept is there from the move that makes it to the one that frees it", () => {
  assert.deepEqual(kept(TAPE, 0), { output: [0], saved: [] });
  assert.deepEqual(kept(TAPE, 1), { output: [0], saved: [1] });
  assert.deepEqual(kept(TAPE, 2), { output: [], saved: [] });
  assert.deepEqual(kept(TAPE, 3), { output: [], saved: [0] });
});

test("every move has words", () => {
  assert.match(sentence(TAPE, -1), /before the first of 5 moves/);
  assert.match(sentence(TAPE, 1), /^move 2 of 5: forward through layer 1, keeps what it saves; memory 3 units, then 3 units; 1 output and what 1 layer saved are there$/);
  assert.match(sentence(TAPE, 3), /again forward through layer 0/);
  assert.match(sentence(TAPE, 3), /keeps what it saves, not its output/);
  assert.match(sentence(TAPE, 4), /backward through layer 0; memory 2 units, then 0 units; 0 outputs and what 0 layers saved/);
});

test("amounts are in the unit of the layers", () => {
  assert.equal(size(TAPE, 1), "1 unit");
  assert.equal(size({ unit: "MiB" }, 3 * 2 ** 20), "3 MiB");
});
