import assert from "node:assert/strict";
import { test } from "node:test";
import { firstAfter, sentence, versionAt, visible } from "./server.js";

const start = (one) => one[0], end = (one) => one[1];

test("binary search finds the first that ends after a time", () => {
  for (let trial = 0; trial < 200; trial++) {
    const list = Array.from({ length: trial % 30 }, () => Math.random()).sort((a, b) => a - b), t = Math.random();
    const slow = list.findIndex((x) => x > t);
    assert.equal(firstAfter(list, t, (x) => x), slow < 0 ? list.length : slow);
  }
});

test("what shows of a lane covers what a brute-force raster covers, in few pieces", () => {
  for (let trial = 0; trial < 60; trial++) {
    const list = [], width = 100;
    for (let t = 0; t < 50;) {
      const length = Math.random() < 0.5 ? Math.random() * 0.02 : Math.random();
      list.push([t, t + length]);
      t += length + (Math.random() < 0.7 ? Math.random() * 0.01 : Math.random());
    }
    const from = 10 * Math.random(), to = from + 1 + 30 * Math.random(), pixel = (to - from) / width;
    const found = visible(list, from, to, width, start, end);
    assert.ok(found.length <= 2 * width + 4, `${found.length} pieces`);
    const columns = (entries) => {
      const there = new Set();
      for (const [a, b] of entries) {
        for (let k = Math.max(0, Math.floor((a - from) / pixel)); k < width && k * pixel + from <= b; k++) if (b > from) there.add(k);
      }
      return [...there].sort((x, y) => x - y);
    };
    assert.deepEqual(columns(found), columns(list));
    for (const one of list) if (one[1] - one[0] >= pixel && one[1] > from && one[0] < to) assert.ok(found.includes(one));
  }
});

test("a hundred thousand steps are few pieces, quickly", () => {
  const list = Array.from({ length: 100_000 }, (_, k) => [k, k + 0.9]);
  const begin = performance.now(), found = visible(list, 0, 100_000, 1000, start, end);
  assert.ok(found.length <= 2004);
  assert.ok(performance.now() - begin < 1000);
});

test("steps have words", () => {
  const data = {
    unit: "ms", updates: [3, 6, 9], workers: [{ rank: 2, steps: [
      [0, 0, 1, [], 2, 2.5, 0, 1, 6, 1], [1, 3, 4, [], 5, 5.5, 1, -1, 5.5, 0], [2, 6, 7, [], 8, 8.5, 2, 2, 9, 0],
    ] }],
  };
  assert.equal(sentence(data, 0, 0), "worker 2, step 0: waited 1 ms for version 0, pushed at 2.5; its gradient went into update 1, 1 update late, at 6");
  assert.match(sentence(data, 0, 1), /too late and was dropped$/);
  assert.match(sentence(data, 0, 2), /update 2, not late, at 9$/);
  assert.deepEqual([0, 3, 5, 6, 100].map((t) => versionAt(data, t)), [0, 1, 1, 2, 3]);
});
