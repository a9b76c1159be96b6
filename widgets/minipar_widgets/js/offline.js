// Controls on a page without a kernel: a table of results, as offline.py writes it, and what a choice shows.
import { ARRAYS, make } from "./shared.js";

/** The results of a parcel, which has been decompressed: the views' traits, with arrays in place, and the page's parts. */
export function opened(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const { points, columns } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const all = new Uint8Array(buffer);
  let at = 4 + size;
  const found = new Map(columns.map(([trait, about, name, type, count]) => {
    const wide = ARRAYS[type].BYTES_PER_ELEMENT, bytes = new Uint8Array(count * wide);
    for (let byte = 0; byte < wide; byte++) for (let k = 0; k < count; k++) bytes[k * wide + byte] = all[at++];
    return [`${trait} ${about} ${name} ${type}`, { bytes, wide, next: 0 }];
  }));
  for (const { traits } of points) {
    for (const [trait, about] of [["data", "about"], ["details", "more"]]) {
      if (traits[trait] !== null) continue;
      const layout = Object.entries(traits[about].layout ?? {});
      const whole = new Uint8Array(Math.max(0, ...layout.map(([, [type, from, count]]) => from + count * ARRAYS[type].BYTES_PER_ELEMENT)));
      for (const [name, [type, from, count]] of layout) {
        const column = found.get(`${trait} ${about} ${name} ${type}`), size = count * column.wide;
        whole.set(column.bytes.subarray(column.next, (column.next += size)), from);
      }
      traits[trait] = new DataView(whole.buffer);
    }
  }
  return points;
}

/** Where a combination stands among the results of its parcel: the last control changes first. */
export function position(controls, chosen) {
  return controls.slice(1).reduce((at, control, k) => at * control.values.length + chosen[k + 1], 0);
}

async function open(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return opened(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
}

function start({ place, title, controls, parcels }) {
  const form = document.getElementById(`${place}-controls`);
  const chosen = controls.map((control) => control.shown), first = chosen.join(), known = new Map();
  let asked = 0;
  async function show() {
    const mine = ++asked;
    if (!known.has(chosen[0])) known.set(chosen[0], open(parcels[chosen[0]]));
    const { traits, parts, title: other } = (await known.get(chosen[0]))[position(controls, chosen)];
    if (mine !== asked) return; // a newer choice is on its way
    document.getElementById(`${place}-0`).model.update(traits);
    for (const [name, html] of Object.entries(parts)) {
      const part = document.querySelector(`[data-part="${place} ${name}"]`);
      if (part) part.innerHTML = html;
    }
    if (document.title === title) document.title = other;
    title = other;
    for (const part of document.querySelectorAll(`[data-first="${place}"]`)) part.hidden = chosen.join() !== first;
  }
  controls.forEach((control, k) => {
    const said = make("output", {}, String(control.values[chosen[k]]));
    const choose = (event) => {
      chosen[k] = +event.target.value;
      said.textContent = String(control.values[chosen[k]]);
      if (control.slides) event.target.setAttribute("aria-valuetext", said.textContent);
      show();
    };
    const input = control.slides
      ? make("input", { type: "range", "aria-label": control.label, min: 0, max: control.values.length - 1, value: chosen[k], "aria-valuetext": said.textContent, oninput: choose })
      : make("select", { "aria-label": control.label, onchange: choose }, ...control.values.map((value, at) => make("option", { value: at, selected: at === chosen[k] }, String(value))));
    form.append(make("label", {}, make("span", {}, control.label), input, ...(control.slides ? [said] : [])));
  });
  form.addEventListener("submit", (event) => event.preventDefault());
}

export default { start };
