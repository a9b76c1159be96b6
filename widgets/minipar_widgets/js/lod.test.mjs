import assert from "node:assert/strict";
import { test } from "node:test";
import { cells, FAINT, filled, hit, peaks, runs, search, STRONG, totals } from "./lod.js";

function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/** Events with gaps, of lengths from nothing to several pixels, on multiples of `grain` (0: any time). */
function lane(random, count, grain, kinds) {
  const start = new Float64Array(count), length = new Float32Array(count), kind = new Uint8Array(count);
  let t = random() * 3;
  const snap = (x) => (grain ? Math.round(x / grain) * grain : x);
  for (let k = 0; k < count; k++) {
    start[k] = t = snap(t + (random() < 0.5 ? 0 : 10 ** (4 * random() - 3)));
    length[k] = random() < 0.15 ? 0 : snap(10 ** (4 * random() - 3));
    t += length[k];
    kind[k] = Math.floor(random() * kinds);
  }
  return { start, length, kind, count, end: t };
}

/** The rule of the module by brute force: every pixel asks every event. */
function brute(e, from, to, width) {
  const rows = [], step = (to - from) / width;
  for (let x = 0; x < width; x++) {
    const a = from + x * step, b = a + step, sums = new Map();
    for (let k = 0; k < e.count; k++) {
      const s = e.start[k], f = s + e.length[k], part = (Math.min(b, f) - Math.max(a, s)) / step;
      if (part > 0 || (e.length[k] === 0 && s >= a && s < b)) sums.set(e.kind[k], (sums.get(e.kind[k]) ?? 0) + Math.max(0, part));
    }
    rows.push(sums);
  }
  return rows;
}

test("cells follow the rule, pixel by pixel", () => {
  const random = generator(7);
  let several = 0, seen = 0;
  for (let round = 0; round < 400; round++) {
    const e = lane(random, 1 + Math.floor(300 * random()), round % 3 ? 0 : 0.25, 1 + Math.floor(5 * random()));
    const whole = round % 4 === 0;
    const from = whole ? 0 : e.end * random() * 0.8, to = whole ? e.end + 0.5 : from + Math.max(0.01, e.end * random() * 0.5);
    const width = 1 + Math.floor(random() * 200);
    const row = cells(e.start, e.length, e.kind, 0, e.count, from, to, width);
    brute(e, from, to, width).forEach((sums, x) => {
      const where = `round ${round} pixel ${x} of ${width}`, slack = 1e-6;
      const sum = [...sums.values()].reduce((a, b) => a + b, 0), most = Math.max(0, ...sums.values());
      if (row[x] === 0) return assert.ok(sum < slack, `${where} is empty, but ${sum} of it is filled`);
      const code = (row[x] >> 4) - 1, strength = row[x] & 15;
      // An event on a pixel's very edge may, by rounding, count for the pixel beside it.
      if (sum < slack) return assert.equal(strength, FAINT, where);
      assert.ok((sums.get(code) ?? 0) >= most - slack, `${where} shows ${code}, but not most of it`);
      const exact = sum * STRONG;
      assert.ok(strength >= Math.max(FAINT, Math.min(STRONG, exact - 0.01)) - 1e-3 || strength === STRONG, where);
      assert.ok(strength <= Math.max(FAINT, exact + 1.01), `${where}: ${strength} for ${exact}`);
      several += sums.size > 1;
      seen += 1;
    });
  }
  assert.ok(several > 1000 && seen > 10_000, `${several} mixed pixels of ${seen}`);
});

test("no event is lost, however small", () => {
  const random = generator(3);
  for (let round = 0; round < 200; round++) {
    const e = lane(random, 200, 0, 3), to = e.end + 1, width = 50;
    const row = cells(e.start, e.length, e.kind, 0, e.count, 0, to, width);
    for (let k = 0; k < e.count; k++) {
      const x = (e.start[k] / to) * width, near = [Math.floor(x - 1e-9), Math.floor(x + 1e-9)];
      assert.ok(near.some((j) => row[j]), `event ${k} at pixel ${x}`);
    }
  }
});

test("runs are the row again", () => {
  const random = generator(5);
  for (let round = 0; round < 100; round++) {
    const row = Uint8Array.from({ length: 80 }, () => Math.floor(random() * 3) * 20), back = new Uint8Array(80);
    for (const [from, to, cell] of runs(row)) back.fill(cell, from, to);
    assert.deepEqual(back, row);
  }
});

test("hit finds the event under the pointer, or the nearest one", () => {
  const random = generator(11);
  for (let round = 0; round < 2000; round++) {
    const e = lane(random, 1 + Math.floor(20 * random()), round % 2 ? 0.5 : 0, 2), t = random() * (e.end + 1), reach = random();
    const away = (k) => Math.max(0, e.start[k] - t, t - e.start[k] - e.length[k]);
    const least = Math.min(...Array.from({ length: e.count }, (_, k) => away(k)));
    const k = hit(e.start, e.length, 0, e.count, t, reach);
    if (least > reach) assert.equal(k, -1);
    else assert.equal(away(k), least);
  }
});

test("filled is the time covered, and search the first at or after", () => {
  const random = generator(13);
  for (let round = 0; round < 500; round++) {
    const e = lane(random, 30, 0, 2), from = random() * e.end, to = from + random() * 5;
    let sum = 0;
    for (let k = 0; k < e.count; k++) sum += Math.max(0, Math.min(to, e.start[k] + e.length[k]) - Math.max(from, e.start[k]));
    assert.ok(Math.abs(filled(e.start, totals(e.length), 0, e.count, from, to) - sum) < 1e-9);
    const k = search(e.start, 0, e.count, from);
    assert.ok((k === 0 || e.start[k - 1] < from) && (k === e.count || e.start[k] >= from));
  }
});

test("no peak of a curve is lost", () => {
  const random = generator(17);
  for (let round = 0; round < 300; round++) {
    const n = 1 + Math.floor(60 * random()), time = new Float64Array(n), value = new Float64Array(n);
    for (let k = 1; k < n; k++) time[k] = time[k - 1] + random();
    for (let k = 0; k < n; k++) value[k] = Math.floor(random() * 6);
    const from = random() * time[n - 1] - 0.5, to = from + 0.1 + random() * time[n - 1], width = 1 + Math.floor(random() * 40);
    const found = peaks(time, value, 0, n, from, to, width), step = (to - from) / width;
    for (let x = 0; x < width; x++) {
      const a = from + x * step, b = from + (x + 1) * step;
      let most = -1;
      for (let k = 0; k < n; k++) {
        const until = k + 1 < n ? time[k + 1] : Infinity;
        if ((time[k] < b || (x === width - 1 && time[k] <= b)) && until > a) most = Math.max(most, value[k]);
      }
      assert.equal(found[x] < 0 ? -1 : value[found[x]], most, `pixel ${x} of ${width}`);
    }
  }
});
