import assert from "node:assert/strict";
import { test } from "node:test";
import { bar, isDark, LOOKS, short, svgContext, ticks } from "./shared.js";

test("dark colours are told from light ones", () => {
  for (const dark of ["#111111", "#161616", "#0072B2"]) assert.equal(isDark(dark), true, dark);
  for (const light of ["#ffffff", "#fafafa", "#E69F00"]) assert.equal(isDark(light), false, light);
});

test("ticks are round, inside, and not too many", () => {
  assert.deepEqual(ticks(0, 33, 8), [0, 5, 10, 15, 20, 25, 30]);
  assert.deepEqual(ticks(0.1, 0.35, 5), [0.1, 0.15, 0.2, 0.25, 0.3, 0.35]);
  assert.deepEqual(ticks(1, 1, 5), []);
  for (let k = 0; k < 300; k++) {
    const from = Math.random() * 1e3, to = from + 10 ** (6 * Math.random() - 3), most = 2 + Math.floor(9 * Math.random());
    const found = ticks(from, to, most), slack = 1e-6 * (to - from);
    assert.ok(found.length <= most + 1, `${found.length} of ${most}`);
    for (const t of found) assert.ok(t >= from - slack && t <= to + slack, `${t} in ${from} ... ${to}`);
  }
});

test("numbers are short and never in powers of ten", () => {
  assert.equal(short(0), "0");
  assert.equal(short(0.00004), "0.000040");
  assert.equal(short(1234.567), "1,234.6");
  assert.equal(short(12.3456), "12.35");
});

test("an SVG context draws what a canvas would, and is balanced", () => {
  const ctx = svgContext(100, 50, 'a "title" & more');
  ctx.save();
  ctx.beginPath();
  ctx.rect(0, 0, 50, 50);
  ctx.clip();
  for (const kind of Object.keys(LOOKS)) bar(ctx, kind, 0, 0, 40, 12, "7");
  ctx.restore();
  ctx.font = "bold 12px sans-serif";
  ctx.textAlign = "center";
  ctx.fillText("<b>", 50, 10);
  const text = ctx.toString();
  assert.equal(text.match(/<g /g).length, text.match(/<\/g>/g).length);
  assert.match(text, /<title>a &quot;title&quot; &amp; more<\/title>/);
  assert.match(text, /font-weight="bold" text-anchor="middle" fill="[^"]+">&lt;b&gt;<\/text>/);
  assert.match(text, /url\(#h47CC79A78f3f6c\)/);
  assert.match(text, /<pattern id="h47CC79A78f3f6c"/);
});
