import assert from "node:assert/strict";
import { test } from "node:test";
import { graded, layout, placed } from "./events.js";

test("words of a legend go on in the next line where one has no room, and none meets another", () => {
  const words = ["forward", "backward", "temporary", "predicted dashed", "critical path"], measure = (word) => 6 * word.length;
  for (const width of [90, 150, 300, 1000]) {
    const [found, last] = placed(words, width, measure, 20);
    assert.deepEqual(found.map(([word]) => word), words);
    found.forEach(([word, x, y], k) => {
      assert.ok(x === 0 || x + 20 + measure(word) <= width, `${word} at ${x} of ${width}`);
      const [before, from, line] = found[k - 1] ?? ["", 0, -17];
      assert.ok(y > line || x >= from + 20 + measure(before), `${word} meets ${before}`);
    });
    assert.equal(last, Math.max(...found.map(([, , y]) => y)));
  }
});

test("a legend of one line is above the lanes; a longer one is under everything, and meets nothing", () => {
  const about = { lanes: [[0, 0, "compute", 0, 1, false]], ranks: 1, shown: ["forward", "backward", "optimizer step"], traces: ["predicted"], span: 1 };
  for (const memory of [false, true]) {
    const wide = layout(about, 1000, { memory, key: ["memory:"] }), narrow = layout(about, 300, { memory, key: ["memory:"] });
    assert.ok(wide.legend.every(([, , y]) => y === 0) && wide.overview >= 17);
    const lines = [...new Set(narrow.legend.map(([, , y]) => y))];
    assert.ok(lines.length > 1 && narrow.overview < 17);
    assert.ok(Math.min(...lines) >= narrow.bottom + 18 && Math.max(...lines) + 14 <= narrow.height);
    for (const [, , y] of narrow.key) assert.ok(narrow.bottom + 22 + y >= Math.max(...lines) + 17 && narrow.bottom + 22 + y + 11 <= narrow.height);
  }
});

test("an instruction is as long as its twin, or shorter or longer by more than 5 or 25 percent", () => {
  const takes = Float32Array.from([10, 10, 10, 10, 10, 0, 0, 7, 9, 10.2, 11, 13, 0, 1]);
  const twin = Int32Array.from([7, 8, 9, 10, 11, 12, 13, 0, 1, 2, 3, 4, 5, 6]);
  assert.deepEqual([...graded(takes, twin)], [2, 2, 2, 2, 2, 2, 2, 0, 1, 2, 3, 4, 2, 4]);
});

test("a folded comparison has a lane a rank, and those that are open have all lanes", () => {
  const streams = ["compute", "send 1"], lanes = [];
  for (const trace of [0, 1]) for (const rank of [0, 1]) for (const stream of streams) lanes.push([trace, rank, stream, 0, 1, false]);
  const about = { lanes, ranks: 2, folded: true, shades: [], shown: ["forward", "message"], traces: ["predicted", "measured"], span: 1 };
  const closed = layout(about, 800), open = layout(about, 800, { open: new Set([1]) });
  assert.deepEqual(closed.rows.map((row) => [row.trace, row.rank, row.main, row.folded]), [[1, 0, true, true], [1, 1, true, true]]);
  assert.deepEqual(open.rows.map((row) => [row.trace, row.rank, row.main]), [[1, 0, true], [0, 1, true], [0, 1, false], [1, 1, true], [1, 1, false]]);
  assert.ok(!closed.legend.some(([word]) => word === "message") && open.legend.some(([word]) => word === "message"));
  assert.ok(open.height > closed.height);
});
