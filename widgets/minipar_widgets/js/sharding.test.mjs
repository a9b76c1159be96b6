import assert from "node:assert/strict";
import { test } from "node:test";
import { clicked, cutDims, holding, inColumn, moveWords, places, prospect, rowWords, slices, tiles } from "./sharding.js";
import { wrapped } from "./shared.js";

const row = (name, forms, blocks, more = {}) => ({
  name, own: name, made: "linear(x, w)", stored: false, shape: [8, 16], local: [4, 16], whole: "512 B", part: "256 B", forms,
  offered: { dp: ["R", "S0", "S1", "P"], tp: ["R", "S0", "S1", "P"] }, blocks, ...more,
});
const top = [[[0, 4]], [[0, 16]]], below = [[[4, 8]], [[0, 16]]];
const data = (more = {}) => ({
  axes: [["dp", 2], ["tp", 2]], ranks: [[0, 0], [0, 1], [1, 0], [1, 1]], letters: ["R", "S0", "S1", "P"],
  rows: [
    row("x", { dp: "S0", tp: "R" }, [top, top, below, below]),
    row("w", { dp: "R", tp: "R" }, Array(4).fill([[[0, 8]], [[0, 16]]]), { stored: true, made: "parameter", offered: { dp: ["R", "S0", "S1"], tp: ["R", "S0", "S1"] } }),
    row("y", { dp: "S0", tp: "P" }, [top, top, below, below]),
  ],
  moves: [
    { at: 2, phase: "backward", op: "all_reduce", axis: "dp", value: "w", before: "P", after: "R", bytes: "512 B", time: "3 µs", why: "x is cut", once: true },
    { at: 3, phase: "forward", op: "all_reduce", axis: "tp", value: "y", before: "P", after: "R", bytes: "256 B", time: "2 µs", why: "it is handed on as R", once: false },
  ],
  picks: [["x", "dp", "S0"], ["y", "tp", "P"]], fixed: { x: { dp: "S0" }, y: { tp: "P" } }, problem: "", where: -1, bad: null, totals: ["a", "b"], edges: [], ...more,
});

test("rows, collectives and the mistake lie under each other without gaps, at every width", () => {
  for (const width of [240, 420, 860, 1000, 1400]) {
    const p = places(data({ problem: "y (aten::linear) cannot be so; ".repeat(5), where: 2 }), width);
    assert.deepEqual(p.items.map((item) => item.kind), ["row", "row", "move", "row", "problem", "move"]);
    for (let k = 1; k < p.items.length; k++) assert.equal(p.items[k].y, p.items[k - 1].y + p.items[k - 1].h);
    assert.ok(p.axisAt(1) + p.letters * p.cell <= p.list, `${width}: the columns end inside of the list`);
    assert.ok(p.axisAt(0) + p.letters * p.cell <= p.axisAt(1));
    assert.equal(p.wide, width >= 860); // at 738, the list has no room for less
  }
  assert.equal(places(data({ problem: "a mesh", where: -1 }), 900).items[0].kind, "problem");
});

test("words break between words", () => {
  assert.deepEqual(wrapped("one two three four", 9), ["one two", "three", "four"]);
  assert.deepEqual(wrapped("a\nb c", 9), ["a", "b c"]);
  for (const line of wrapped("the nearest choice is S0 or S1 or R ".repeat(6).trim(), 30)) assert.ok(line.length <= 30);
});

test("tiles show the dimensions that are cut, a row for each place on the first axis, inside of the panel", () => {
  const now = data(), t = tiles(now, now.rows[0], 300);
  assert.deepEqual(cutDims(now.rows[0]), [0]);
  assert.deepEqual(cutDims(now.rows[1]), []);
  assert.deepEqual(t.dims, [0, 1]);
  assert.equal(t.at[0].y, t.at[1].y);
  assert.ok(t.at[2].y > t.at[0].y + t.h);
  for (const one of t.at) assert.ok(one.x + t.w <= 300);
  const four = { ...now.rows[0], shape: [8, 4, 6, 16], blocks: Array(4).fill([[[0, 8]], [[0, 2]], [[0, 6]], [[0, 16]]]) };
  assert.deepEqual(tiles(now, four, 300).dims, [1, 3]);
});

test("who holds what, in words", () => {
  const now = data();
  assert.equal(slices(now.rows[0], 2), "[4:8, :]");
  assert.equal(slices(now.rows[0], 2, [0]), "4:8");
  assert.equal(holding(now, now.rows[0], 3), "rank 3 (dp 1, tp 1) has [4:8, :] of x: 256 B\nthe same as rank 2");
  assert.equal(holding(now, now.rows[2], 0), "rank 0 (dp 0, tp 0) has [0:4, :] of y: 256 B\na part of a sum: with those of rank 1 it is the value");
  assert.match(holding(now, now.rows[1], 1), /the same as rank 0, 2, 3$/);
  assert.equal(slices({ ...now.rows[0], blocks: [[[[0, 2], [4, 6]], [[0, 16]]]] }, 0), "[0:2+4:6, :]");
});

test("tensors and collectives have sentences", () => {
  const now = data();
  assert.match(rowWords(now, now.rows[0]), /^x, linear\(x, w\), 8 × 16, 512 B: S0 on dp \(fixed by you\), R on tp; a rank has 4 × 16/);
  assert.match(moveWords(now.moves[0]), /^backward: all_reduce over dp of gradient of w, P to R; 512 B on each rank, 3 µs, once a step; x is cut$/);
  assert.match(moveWords(now.moves[1]), /^forward: all_reduce over tp of y, P to R; 256 B on each rank, 2 µs; it is/);
});

test("a click fixes, a second one frees, and the newest pick is the last", () => {
  const now = data();
  assert.deepEqual(clicked(now, 1, "tp", "S0"), [...now.picks, ["w", "tp", "S0"]]);
  assert.deepEqual(clicked(now, 0, "dp", "S1"), [["y", "tp", "P"], ["x", "dp", "S1"]]);
  assert.deepEqual(clicked(now, 0, "dp", "S0"), [["y", "tp", "P"]]);
  assert.deepEqual(clicked(now, 2, "tp", null), [["x", "dp", "S0"]]);
  assert.deepEqual(clicked(data({ bad: ["w", "tp", "S0"] }), 1, "tp", "S0"), now.picks); // one that was refused is free
});

test("what a letter would give", () => {
  const now = data(), told = { w: { tp: { S0: [true, "forward 1 collective"], S1: [false, "w cannot"] } } };
  assert.equal(prospect(now, told, 1, "tp", "S0"), "w as S0 on tp: forward 1 collective");
  assert.equal(prospect(now, told, 1, "tp", "S1"), "w as S1 on tp: cannot be: w cannot");
  assert.match(prospect(now, told, 1, "tp", "P"), /stored, so it is no part of a sum/);
  assert.match(prospect(now, told, 0, "dp", "S0"), /again: it is free/);
  assert.equal(inColumn(["R", "S0:3", "S1"], "S0"), "S0:3");
  assert.equal(inColumn(["R"], "P"), undefined);
});
