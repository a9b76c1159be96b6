import assert from "node:assert/strict";
import { test } from "node:test";
import { bytes, lines, sentence } from "./memory.js";
import { svgContext } from "./shared.js";

const DATA = {
  capacity: 2 ** 31, device: "a device",
  groups: [{
    label: "ranks 0 to 3", worst: true, total: 2 ** 30, host: 2 ** 20, measured: 5, terms: [
      ["parameters", 2 ** 29, "p × P", "4 B × 134,217,728", "4 bytes for each parameter", null],
      ["activations", 2 ** 29, "f × a", "2 × 256.00 MiB", "f wait", 2 ** 28],
    ],
  }],
};

test("bytes are said as Python says them", () => {
  for (const [count, said] of [[0, "0 B"], [999, "999 B"], [2048, "2.00 KiB"], [3 * 2 ** 20, "3.00 MiB"], [5.5 * 2 ** 30, "5.50 GiB"], [2 ** 50, "1,048,576.00 GiB"]]) {
    assert.equal(bytes(count), said);
  }
});

test("every kind has words, with formula and measurement", () => {
  assert.equal(sentence(DATA, 0, -1), "ranks 0 to 3: 1.00 GiB in all, 50.0 % of a device; 1.00 MiB on the host");
  assert.equal(sentence(DATA, 0, 0), "ranks 0 to 3, parameters: 512.00 MiB = 4 B × 134,217,728 (p × P). 4 bytes for each parameter.");
  assert.match(sentence(DATA, 0, 1), /\. Measured: 256\.00 MiB\.$/);
});

test("long formulas are broken at blanks, and nothing is lost", () => {
  const ctx = svgContext(100, 100), text = "= 12 B × (39,321,600 + 579,236,352 ÷ 8) and so on";
  ctx.font = "12px sans-serif";
  for (const width of [60, 120, 400]) {
    const found = lines(ctx, text, width);
    assert.equal(found.join(" "), text);
    for (const line of found) assert.ok(ctx.measureText(line).width <= width || !line.includes(" "), line);
  }
  assert.equal(lines(ctx, text, 1000).length, 1);
  assert.deepEqual(lines(ctx, "39,321,600 ÷ 8", 10), ["39,321,600", "÷", "8"]);
});
