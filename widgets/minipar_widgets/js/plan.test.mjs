import assert from "node:assert/strict";
import { test } from "node:test";
import { axes, bytesWords, clicked, clock, logTicks, places, planWords, valueWords } from "./plan.js";

const plan = (tp, seconds, over = "+1 %", more = {}) => ({
  time: `${seconds} s`, seconds, over, memory: "40 GB", total: 4e10, bytes: [1e10, 2e10, 1e10, 0, 0], host: "", tflops: "300",
  cells: { tp: String(tp), pp: "2", schedule: tp > 4 ? "–" : "interleaved" }, words: `tp=${tp} pp=2`, why: "collectives of shared layers +0.1 s, ".repeat(3), ...more,
});
const data = (more = {}) => ({
  model: "m", machine: "a", gpus: 8, batch: 64, pins: [], heads: { tp: "tp", pp: "pp", schedule: "schedule" }, columns: ["tp", "pp", "schedule"],
  searched: ["tp", "schedule"], kinds: ["parameters", "gradients", "optimizer", "activations", "buffers"], budgets: 6, capacity: 8e10, device: "a, 80 GB",
  plans: [plan(1, 3, "best"), plan(2, 3.1), plan(8, 3.4)], problem: "", price: "", count: "", ...more,
});
const extra = { tp: [{ value: "1", plan: plan(1, 3, "best"), reason: "", price: "costs nothing" }, { value: "8", plan: plan(8, 3.4, "+13 %"), reason: "messages", price: "costs +13 %" }, { value: "16", plan: null, reason: "does not fit: at least 90 GB" }], front: [plan(4, 9, "", { total: 1e10 }), plan(1, 3, "best")], budgets: 6 };

test("rows lie under each other without gaps, with all cells inside, at every width", () => {
  for (const width of [240, 420, 700, 1000, 1400]) {
    const p = places(data(), extra, "tp", width);
    assert.equal(p.single, width >= 700, String(width));
    for (const [k, row] of p.rows.entries()) {
      if (k) assert.equal(row.y, p.rows[k - 1].y + p.rows[k - 1].h);
      for (const cell of row.cells) {
        assert.ok(cell.x >= 0 && cell.x + cell.w <= (p.single ? p.bar : width), `${width}: ${cell.key}`);
        assert.ok(cell.y >= row.y && cell.y + cell.h <= row.y + row.h);
      }
    }
    assert.ok(p.bar + p.barWidth < width, "the bar has room, and its number beside it");
    assert.ok(p.front.y > p.legend && p.height >= p.values.at(-1).y + p.values.at(-1).h);
    assert.ok(p.panel.x + p.panel.w <= width);
  }
  const none = places(data({ plans: [], columns: [], problem: "no plan fits ".repeat(20) }), {}, "tp", 420);
  assert.ok(none.problem.length > 3 && none.height > 17 * none.problem.length);
});

test("a click pins a value, replaces another one of its key, and frees it again", () => {
  assert.deepEqual(clicked([], "tp", "8"), [["tp", "8"]]);
  assert.deepEqual(clicked([["tp", "4"], ["pp", "2"]], "tp", "8"), [["pp", "2"], ["tp", "8"]]);
  assert.deepEqual(clicked([["tp", "8"], ["pp", "2"]], "tp", "8"), [["pp", "2"]]);
});

test("axes hold all points, and their marks are round", () => {
  const a = axes(data(), extra, { x: 0, y: 100, w: 400, h: 250 });
  for (const one of [...extra.front, ...data().plans]) {
    assert.ok(a.left <= a.x(one.total) && a.x(one.total) <= a.right);
    assert.ok(a.top <= a.y(one.seconds) && a.y(one.seconds) <= a.bottom);
  }
  assert.ok(a.y(3) > a.y(9), "faster is lower");
  for (const [low, high] of [[3, 8], [18, 90], [0.9, 1.1], [5.85, 5.86]]) {
    const found = logTicks(low, high);
    assert.ok(found.length >= 1 && found.length <= 9 && found.every((at) => low <= at && at <= high), `${low} ${high} ${found}`);
  }
  assert.deepEqual([18.4338, 0.25, 20].map(clock), ["18.43 s", "250 ms", "20 s"]);
});

test("plans, bytes and values have words", () => {
  assert.match(planWords(data(), plan(2, 3.1, "+3 %", { host: "5 GB" }), "plan 2"), /^plan 2: 3\.1 s \(\+3 %\), 300 TFLOP\/s a GPU, 40 GB of a, 80 GB, 5 GB on the host\ntp=2 pp=2\n/);
  assert.match(bytesWords(data(), plan(1, 3)), /^parameters 10\.00 GB\ngradients 20\.00 GB\n[^]*together 40 GB of a, 80 GB$/);
  assert.equal(valueWords(data(), "tp", extra.tp[1]), "tp=8: 3.4 s, +13 %; messages\ntp=8 pp=2");
  assert.equal(valueWords(data(), "tp", extra.tp[2]), "tp=16: does not fit: at least 90 GB");
});
