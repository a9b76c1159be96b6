const LOOKS = {
"forward": ["#0072B2", "#004a75", "#fefefe", "", "F"],
"backward": ["#E69F00", "#7a5300", "#201400", "", "B"],
"input gradient": ["#F6CF78", "#7a5300", "#201400", "", "I"],
"weight gradient": ["#8F5F00", "#5c3d00", "#fefefe", "", "W"],
"recompute": ["#56B4E9", "#1f6d9c", "#201400", "", "R"],
"optimizer step": ["#009E73", "#00664a", "#fefefe", "", "S"],
"reduce": ["#009E73", "#00664a", "#fefefe", "", "+"],
"message": ["#CC79A7", "#8f3f6c", "#fefefe", "/", "M"],
"receive": ["#8f3f6d", "#8f3f6d", "#fefefe", "", "r"],
"collective": ["#CC79A7", "#8f3f6c", "#fefefe", "x", "C"],
"copy": ["#9a9a9a", "#6a6a6a", "#fefefe", "", "c"],
};
const MEMORY = {
"parameters": ["#0072B2", ""],
"gradients": ["#E69F00", "/"],
"optimizer": ["#009E73", "\\"],
"activations": ["#56B4E9", ""],
"buffers": ["#CC79A7", "x"],
"data": ["#999933", ""],
"temporary": ["#9a9a9a", "/"],
};
const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
const LIGHT = { ink: "#1a1a1a", muted: "#5c5c5c", rule: "#dcdcdc", paper: "#ffffff", wire: "#8f3f6d", focus: "#0072B2", warn: "#b04a00" };
const DARK = { ink: "#ececec", muted: "#aaaaaa", rule: "#3a3a3a", paper: "#161616", wire: "#e3b1cd", focus: "#56B4E9", warn: "#ff9d5c" };
function isDark(hex) {
const [r, g, b] = [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
return 0.299 * r + 0.587 * g + 0.114 * b < 128;
}
function theme(el) {
const style = getComputedStyle(el), ctx = document.createElement("canvas").getContext("2d");
const named = style.getPropertyValue("--jp-layout-color0") || style.getPropertyValue("--vscode-editor-background");
ctx.fillStyle = named.trim();
const known = named && ctx.fillStyle[0] === "#";
const dark = known ? isDark(ctx.fillStyle) : matchMedia("(prefers-color-scheme: dark)").matches;
const look = { ...(dark ? DARK : LIGHT), dark };
if (known) look.paper = ctx.fillStyle;
return look;
}
const FORMS = [3, 2, 1].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }));
function short(x) {
const size = Math.abs(x);
if (!size) return "0";
if (size < 0.001) return x.toFixed(6);
return FORMS[size < 10 ? 0 : size < 100 ? 1 : 2].format(x);
}
function ticks(from, to, most) {
const rough = (to - from) / Math.max(1, most);
if (!(rough > 0) || !isFinite(rough)) return [];
const power = 10 ** Math.floor(Math.log10(rough));
const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough * 0.999999);
const found = [];
for (let k = Math.ceil(from / step - 1e-9); k * step <= to + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
return found;
}
const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const n2 = (x) => +x.toFixed(2);
const PEN = ["fillStyle", "strokeStyle", "lineWidth", "globalAlpha", "font", "textAlign", "textBaseline"];
const UP = "M0 6L6 0M-1 1L1 -1M5 7L7 5";
const DOWN = "M0 0L6 6M-1 5L1 7M5 -1L7 1";
const MARKS = { "/": UP, "\\": DOWN, "x": UP + DOWN };
function svgContext(width, height, title = "") {
const parts = [], defs = new Map(), stack = [];
let path = [], clips = 0, dash = "";
const open = [];
const ctx = {
fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, globalAlpha: 1, font: "10px sans-serif", textAlign: "start",
textBaseline: "alphabetic",
save() {
stack.push({ dash, pen: Object.fromEntries(PEN.map((key) => [key, ctx[key]])) });
open.push(0);
},
restore() {
const last = stack.pop();
dash = last.dash;
Object.assign(ctx, last.pen);
parts.push("</g>".repeat(open.pop()));
},
translate(x, y) { group(`transform="translate(${n2(x)} ${n2(y)})"`); },
rotate(angle) { group(`transform="rotate(${n2((angle * 180) / Math.PI)})"`); },
clip() {
const id = `clip${++clips}-${width}x${height}`;
parts.push(`<clipPath id="${id}"><path d="${path.join("")}"/></clipPath>`);
group(`clip-path="url(#${id})"`);
},
beginPath() { path = []; },
moveTo(x, y) { path.push(`M${n2(x)} ${n2(y)}`); },
lineTo(x, y) { path.push(`L${n2(x)} ${n2(y)}`); },
bezierCurveTo(...c) { path.push(`C${c.map(n2).join(" ")}`); },
quadraticCurveTo(...c) { path.push(`Q${c.map(n2).join(" ")}`); },
rect(x, y, w, h) { path.push(`M${n2(x)} ${n2(y)}h${n2(w)}v${n2(h)}h${n2(-w)}Z`); },
arc(x, y, r, from, to) {
const at = (a) => `${n2(x + r * Math.cos(a))} ${n2(y + r * Math.sin(a))}`;
const arc = (a, b) => `A${n2(r)} ${n2(r)} 0 ${b - a > Math.PI ? 1 : 0} 1 ${at(b)}`;
const half = to - from > 6.283 ? from + Math.PI : to;
path.push(`${path.length ? "L" : "M"}${at(from)}${arc(from, half)}${half < to ? arc(half, to) : ""}`);
},
closePath() { path.push("Z"); },
setLineDash(list) { dash = list.join(" "); },
fill() { parts.push(`<path d="${path.join("")}" fill="${ctx.fillStyle}"${alpha()}/>`); },
stroke() { parts.push(`<path d="${path.join("")}" fill="none"${lines()}/>`); },
fillRect(x, y, w, h) {
parts.push(`<rect x="${n2(x)}" y="${n2(y)}" width="${n2(w)}" height="${n2(h)}" fill="${ctx.fillStyle}"${alpha()}/>`);
},
strokeRect(x, y, w, h) {
parts.push(`<rect x="${n2(x)}" y="${n2(y)}" width="${n2(w)}" height="${n2(h)}" fill="none"${lines()}/>`);
},
clearRect() {},
fillText(text, x, y) {
const [, weight, size] = /^(.*?)([\d.]+)px/.exec(ctx.font);
const anchor = { center: "middle", right: "end", end: "end" }[ctx.textAlign] || "start";
const shift = { middle: 0.35, top: 0.8, hanging: 0.8, bottom: -0.2 }[ctx.textBaseline] || 0;
parts.push(
`<text x="${n2(x)}" y="${n2(y + shift * size)}" font-size="${size}"${weight.includes("bold") ? ' font-weight="bold"' : ""}` +
`${anchor === "start" ? "" : ` text-anchor="${anchor}"`} fill="${ctx.fillStyle}"${alpha()}>${escape(text)}</text>`,
);
},
measureText(text) { return { width: String(text).length * 0.56 * /([\d.]+)px/.exec(ctx.font)[1] }; },
hatch(mark, face, edge) {
const id = `h${mark.charCodeAt(0)}${face}${edge}`.replace(/[^\w]/g, "");
defs.set(id, `<pattern id="${id}" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" ` +
`fill="${face}"/><path d="${MARKS[mark]}" stroke="${edge}" stroke-width=".8"/></pattern>`);
return `url(#${id})`;
},
toString() {
return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" ` +
`font-family="${escape(FONT)}" role="img"><title>${escape(title)}</title><defs>${[...defs.values()].join("")}</defs>` +
`${parts.join("")}${"</g>".repeat(open.reduce((a, b) => a + b, 0))}</svg>`;
},
};
function group(attributes) {
parts.push(`<g ${attributes}>`);
if (open.length) open[open.length - 1]++;
else open.push(1);
}
const alpha = () => (ctx.globalAlpha < 1 ? ` opacity="${n2(ctx.globalAlpha)}"` : "");
const lines = () => ` stroke="${ctx.strokeStyle}" stroke-width="${n2(ctx.lineWidth)}"${dash ? ` stroke-dasharray="${dash}"` : ""}${alpha()}`;
return ctx;
}
const patterns = new Map();
function fill(ctx, face, edge, mark) {
if (!mark) return face;
if (ctx.hatch) return ctx.hatch(mark, face, edge);
const key = face + edge + mark;
if (!patterns.has(key)) {
const tile = document.createElement("canvas");
tile.width = tile.height = 6;
const c = tile.getContext("2d");
c.fillStyle = face;
c.fillRect(0, 0, 6, 6);
c.strokeStyle = edge;
c.lineWidth = 0.8;
c.stroke(new Path2D(MARKS[mark]));
patterns.set(key, tile);
}
return ctx.createPattern(patterns.get(key), "repeat");
}
function drawRect(ctx, colour, x, y, width, height, alpha = 1) {
ctx.globalAlpha = alpha;
ctx.fillStyle = colour;
ctx.fillRect(x, y, width, height);
ctx.globalAlpha = 1;
}
function drawEdge(ctx, colour, x, y, width, height, thick = 1) {
ctx.strokeStyle = colour;
ctx.lineWidth = thick;
ctx.strokeRect(x + thick / 2, y + thick / 2, Math.max(0, width - thick), Math.max(0, height - thick));
}
function drawText(ctx, words, x, y, colour, align = "left", size = 11, weight = "") {
ctx.fillStyle = colour;
ctx.font = `${weight}${size}px ${FONT}`;
ctx.textAlign = align;
ctx.textBaseline = "middle";
ctx.fillText(words, x, y);
}
function make(tag, attributes = {}, ...children) {
const el = document.createElement(tag);
for (const [name, value] of Object.entries(attributes)) {
if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
else if (value !== false && value != null) el.setAttribute(name, value === true ? "" : value);
}
el.append(...children);
return el;
}
function table(rows, label) {
const number = (k) => rows.slice(1).every((row) => /^[-+\d.,\s%x]*$/.test(row[k] ?? ""));
const right = (rows[0] || []).map((_, k) => (number(k) ? "mp-n" : null));
const line = (cells, tag) => make("tr", {}, ...cells.map((c, k) => make(tag, { class: right[k], scope: tag === "th" && "col" }, String(c))));
return make("table", { "aria-label": label }, make("thead", {}, ...rows.slice(0, 1).map((r) => line(r, "th"))),
make("tbody", {}, ...rows.slice(1).map((r) => line(r, "td"))));
}
function download(content, type, name) {
const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
make("a", { href: url, download: name }).click();
setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
function frame(model, el, { name, height, draw, keys = {}, canvas = true, hint = "" }) {
const ends = [];
const get = (trait, other) => model.get(trait) ?? other;
const toolbar = make("div", { class: "mp-toolbar", role: "toolbar", "aria-label": `${name} tools` });
const stage = make("div", { class: "mp-stage" });
const readout = make("div", { class: "mp-readout", "aria-live": "polite" });
const caption = make("div", { class: "mp-caption" });
const holder = make("div", { class: "mp-table", hidden: true, tabindex: 0, role: "region", "aria-label": "the same as a table" });
const problem = make("div", { class: "mp-problem", role: "alert", hidden: true });
const tipbox = make("div", { class: "mp-tip", hidden: true });
const root = make("div", { class: "minipar", "data-lm-suppress-shortcuts": "true" }, toolbar, problem, stage, readout, caption, holder);
const surface = canvas ? make("canvas", { tabindex: 0, role: "application" }) : null;
if (surface) stage.append(surface);
stage.append(tipbox);
el.append(root);
const listen = (target, event, run, options) => {
target.addEventListener(event, run, options);
ends.push(() => target.removeEventListener(event, run, options));
};
const button = (label, title, run, pressed) => {
const made = make("button", { type: "button", title, "aria-label": title, "aria-pressed": pressed?.toString(), onclick: run }, label);
toolbar.append(made);
return made;
};
let look = null, waiting = 0;
const size = () => {
const wide = Math.max(240, Math.floor(stage.clientWidth || 800));
return [wide, Math.round(height(wide))];
};
function paint() {
if (waiting) cancelAnimationFrame(waiting);
waiting = 0;
if (!surface || !look || get("problem", "")) return;
const [wide, tall] = size(), ratio = window.devicePixelRatio || 1;
if (surface.width !== Math.round(wide * ratio) || surface.height !== Math.round(tall * ratio)) {
surface.width = Math.round(wide * ratio);
surface.height = Math.round(tall * ratio);
surface.style.width = `${wide}px`;
surface.style.height = `${tall}px`;
}
const ctx = surface.getContext("2d");
ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
ctx.clearRect(0, 0, wide, tall);
draw(ctx, wide, tall, look);
}
const repaint = () => { if (!waiting) waiting = requestAnimationFrame(paint); };
const restyle = () => {
if (!root.isConnected) return;
look = theme(root);
root.dataset.dark = look.dark;
for (const key of ["ink", "muted", "rule", "paper", "focus", "warn"]) root.style.setProperty(`--mp-${key}`, look[key]);
repaint();
};
const words = () => {
const wrong = get("problem", "");
problem.hidden = !wrong;
problem.textContent = wrong;
stage.hidden = toolbar.hidden = !!wrong;
caption.textContent = get("caption_text", "");
surface?.setAttribute("aria-label", `${get("label", name)} ${hint}`.trim());
if (!holder.hidden) fillTable();
repaint();
};
const fillTable = () => holder.replaceChildren(table(get("table", []), get("label", name)));
if (surface && draw) {
const picture = (type) => {
const [wide, tall] = size(), background = (ctx) => { ctx.fillStyle = look.paper; ctx.fillRect(0, 0, wide, tall); };
if (type === "svg") {
const ctx = svgContext(wide, tall, get("label", name));
background(ctx);
draw(ctx, wide, tall, look);
return download(ctx.toString(), "image/svg+xml", `${name}.svg`);
}
const copy = make("canvas", { width: 2 * wide, height: 2 * tall }), ctx = copy.getContext("2d");
ctx.scale(2, 2);
background(ctx);
draw(ctx, wide, tall, look);
copy.toBlob((blob) => download(blob, "image/png", `${name}.png`));
};
button("PNG", "save PNG", () => picture("png"));
button("SVG", "save SVG", () => picture("svg"));
}
const asTable = button("table", "show as table", () => {
holder.hidden = !holder.hidden;
asTable.setAttribute("aria-pressed", !holder.hidden);
if (!holder.hidden) fillTable();
}, "false");
if (surface) {
listen(surface, "keydown", (event) => {
const run = keys[(event.shiftKey && event.key.length > 1 ? "Shift+" : "") + event.key];
if (event.ctrlKey || event.metaKey || event.altKey) return;
if (run && run(event) !== false) event.preventDefault();
if (run || event.key.length === 1) event.stopPropagation();
});
}
for (const trait of ["problem", "label", "caption_text", "table"]) {
const event = `change:${trait}`;
model.on(event, words);
ends.push(() => model.off(event, words));
}
const sizes = new ResizeObserver(() => look ? repaint() : restyle());
sizes.observe(root);
const themes = new MutationObserver(restyle);
themes.observe(document.body, { attributes: true });
listen(matchMedia("(prefers-color-scheme: dark)"), "change", restyle);
ends.push(() => sizes.disconnect(), () => themes.disconnect(), () => cancelAnimationFrame(waiting));
restyle();
words();
return {
root, stage, canvas: surface, toolbar, readout, button, listen, paint, repaint,
say(text) { if (readout.textContent !== text) readout.textContent = text; },
tip(x, y, text) {
tipbox.hidden = !text;
if (!text) return;
const wide = stage.clientWidth;
if (tipbox.textContent !== text) tipbox.textContent = text;
tipbox.style = `top:${y + 14}px;${x > wide / 2 ? `right:${wide - x + 4}` : `left:${x + 12}`}px`;
},
dispose() { for (const end of ends) end(); root.remove(); },
};
}
const ARRAYS = { f8: Float64Array, f4: Float32Array, u4: Uint32Array, i4: Int32Array, u1: Uint8Array };
function unpack(view, layout) {
const aligned = view.byteOffset % 8 === 0;
const buffer = aligned ? view.buffer : new Uint8Array(view.buffer, view.byteOffset, view.byteLength).slice().buffer;
const found = {};
for (const [name, [type, at, count]] of Object.entries(layout)) found[name] = new ARRAYS[type](buffer, (aligned ? view.byteOffset : 0) + at, count);
return found;
}
const STRONG = 15;
const FAINT = 4;
function search(start, first, last, t) {
while (first < last) {
const middle = (first + last) >>> 1;
if (start[middle] < t) first = middle + 1;
else last = middle;
}
return first;
}
function cells(start, length, kind, first, last, from, to, width, out = new Uint8Array(width)) {
out.fill(0, 0, width);
const scale = width / (to - from);
let k = search(start, first, last, from);
if (k > first && start[k - 1] + length[k - 1] > from) k--;
let now = -1, seen = 0, edge = -1 / 0;
for (; k < last; k++) {
const code = kind[k], size = length[k] * scale;
if (start[k] + length[k] < edge) {
seen |= 1 << code;
sums[code] += size;
continue;
}
let a = (start[k] - from) * scale, b = a + size;
if (a >= width) break;
if (a < 0) a = 0;
if (b > width) b = width;
const x = a | 0, end = b | 0;
if (x !== now) {
if (seen) out[now] = cell(seen);
now = x;
seen = 0;
}
seen |= 1 << code;
if (x === end) {
sums[code] += b - a;
edge = from + (x + 1) / scale;
continue;
}
sums[code] += x + 1 - a;
out[x] = cell(seen);
out.fill(16 * (code + 1) + STRONG, x + 1, end);
now = end;
seen = b > end ? 1 << code : 0;
sums[code] = b - end;
}
if (seen) out[now] = cell(seen);
return out;
}
const sums = new Float64Array(16);
function cell(seen) {
let sum = 0, most = -1, best = 0;
for (let code = 0; seen; code++, seen >>= 1) {
if (!(seen & 1)) continue;
const part = sums[code];
sums[code] = 0;
sum += part;
if (part > most) {
most = part;
best = code;
}
}
const strength = Math.ceil(sum * STRONG - 1e-6);
return 16 * (best + 1) + (strength < FAINT ? FAINT : strength > STRONG ? STRONG : strength);
}
function runs(row) {
const found = [];
for (let x = 0; x < row.length; ) {
let end = x + 1;
while (end < row.length && row[end] === row[x]) end++;
if (row[x]) found.push([x, end, row[x]]);
x = end;
}
return found;
}
function hit(start, length, first, last, t, reach) {
const k = search(start, first, last, t);
let best = -1, distance = reach;
for (const j of [k - 1, k]) {
if (j < first || j >= last) continue;
const away = Math.max(0, start[j] - t, t - start[j] - length[j]);
if (away < distance || (away === distance && best < 0) || (away === 0 && start[j] <= t)) {
best = j;
distance = away;
}
}
return best;
}
function totals(length) {
const found = new Float64Array(length.length + 1);
for (let k = 0; k < length.length; k++) found[k + 1] = found[k] + length[k];
return found;
}
function filled(start, total, first, last, from, to) {
const until = (t) => {
const k = search(start, first, last, t);
return k > first ? total[k] - Math.max(0, start[k - 1] + total[k] - total[k - 1] - t) : total[first];
};
return until(to) - until(from);
}
function peaks(time, value, first, last, from, to, width, out = new Int32Array(width)) {
const step = (to - from) / width;
let k = search(time, first, last, from);
for (let x = 0; x < width; x++) {
const end = from + (x + 1) * step;
let best = k > first ? k - 1 : -1;
for (; k < last && (time[k] < end || (x === width - 1 && time[k] <= end)); k++) {
if (best < 0 || value[k] > value[best]) best = k;
}
out[x] = best;
}
return out;
}
const rgb = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
function inks(faces, paper, most = 1) {
const found = new Uint32Array(256), under = rgb(paper);
faces.forEach((face, code) => {
const over = rgb(face);
for (let strength = 0; strength <= STRONG; strength++) {
const [r, g, b] = over.map((c, k) => Math.round(under[k] + ((c - under[k]) * most * strength) / STRONG));
found[16 * (code + 1) + strength] = (255 << 24) | (b << 16) | (g << 8) | r;
}
});
return found;
}
function blit(pixels, width, row, top, height, ink, line, hatch) {
const first = top * width;
for (let x = 0; x < width; x++) pixels[first + x] = ink[row[x]];
for (let y = 1; y < height; y++) pixels.copyWithin(first + y * width, first, first + width);
for (let x = 0; x < width; x++) {
const mark = row[x] && hatch[(row[x] >> 4) - 1];
for (let y = 0; mark && y < height; y++) {
const place = (x + top + y) % 6;
if (place === 0 || (mark === 2 && (x - y + 6000) % 6 === 0)) pixels[first + y * width + x] = line[row[x]];
}
}
}
const IDLE = ["fill", "wait", "overhead"];
const LEFT = 74;
const RIGHT = 62;
const CURVE = 92;
function layout(about, width, streams, memory) {
const stride = Math.ceil(about.ranks / 640);
const lanes = about.lanes.map(([trace, rank, stream, first, last]) => ({ trace, rank, first, last, main: stream === "compute" }));
const shown = lanes.filter((lane) => lane.rank % stride === 0).sort((a, b) => a.rank - b.rank || a.trace - b.trace);
const mains = shown.filter((lane) => lane.main).length, thin = shown.length - mains;
const height = (room) => Math.min(22, Math.max(1, Math.floor(room / Math.max(1, mains))) - 4);
let tall = height(620 - 7 * thin);
const all = streams && tall >= 9;
if (!all) tall = Math.max(1, height(620));
const legend = [], rows = [];
let x = 0, y = 0;
const words = [...about.shown, ...IDLE.map((word) => `idle: ${word}`)];
if (about.traces.length > 1) words.push(`${about.traces[0]} (outlined)`, `${about.traces[1]} (filled)`);
for (const word of words) {
const size = 32 + 6.1 * word.length;
if (x + size > width && x) {
x = 0;
y += 17;
}
legend.push([word, x, y]);
x += size;
}
const overview = y + 24, strip = tall >= 10 ? 4 : 0;
y = overview + 22;
let before = shown[0]?.rank;
for (const lane of shown) {
if (!lane.main && !all) continue;
if (lane.rank !== before) y += strip;
before = lane.rank;
const own = lane.main ? strip : 0;
rows.push({ ...lane, y, tall: lane.main ? tall : 6, strip: own });
y += (lane.main ? tall : 6) + own + (strip ? 1 : 0);
}
const axis = y + 3, below = memory ? axis + 8 : 0;
return { legend, overview, rows, axis, memory: below, bottom: memory ? below + CURVE : axis, height: (memory ? below + CURVE + 18 : axis) + 20 };
}
function boundary(begins, takes, rows, t, sign) {
let best = sign * Infinity;
for (const { first, last } of rows) {
const k = search(begins, first, last, t);
for (let j = Math.max(first, k - 3); j < Math.min(last, k + 3); j++) {
for (const time of [begins[j], begins[j] + takes[j]]) {
if (sign * (time - t) > 1e-7 * Math.max(1, Math.abs(t)) && sign * (best - time) > 0) best = time;
}
}
}
return isFinite(best) ? best : t;
}
function twins(lanes, indices) {
const found = new Int32Array(indices.length).fill(-1), seen = new Map();
for (const [trace, rank, , first, last] of lanes) {
for (let k = first; k < last; k++) {
const key = rank * 4194304 + indices[k], other = seen.get(key);
if (!trace) seen.set(key, k);
else if (other !== undefined) {
found[k] = other;
found[other] = k;
}
}
}
return found;
}
function inverse(before, sources) {
const count = before.length - 1, ends = new Uint32Array(count + 2), targets = new Uint32Array(sources.length);
for (const k of sources) ends[k + 2]++;
for (let k = 2; k < ends.length; k++) ends[k] += ends[k - 1];
for (let k = 0; k < count; k++) for (let i = before[k]; i < before[k + 1]; i++) targets[ends[sources[i] + 1]++] = k;
return [ends, targets];
}
function chain(k, ends, targets, passes) {
const found = [], ahead = [k], seen = new Set(ahead);
while (ahead.length && found.length < 200) {
const j = ahead.pop();
for (let i = ends[j]; i < ends[j + 1]; i++) {
const other = targets[i];
found.push([j, other]);
if (!seen.has(other) && passes(other)) ahead.push(other);
seen.add(other);
}
}
return found;
}
const HATCH = Object.values(LOOKS).map((one) => ({ "/": 1, "x": 2 })[one[3]] ?? 0);
function lanePainter(about, begins, takes, sorts, numbers) {
const words = about.kinds, two = about.traces.length > 1;
let surface, brush, picture, pixels, line, sign, ground, full, rim, pale, paleRim;
function visible(lane, t0, t1, most) {
const k = Math.max(lane.first, search(begins, lane.first, lane.last, t0) - 1), end = search(begins, lane.first, lane.last, t1);
return end - k > most ? [] : Array.from({ length: end - k }, (_, i) => k + i);
}
const facesOf = (look) => [...words.map((kind) => LOOKS[kind][0]), look.rule, look.muted, look.warn];
const idleOf = (lane, more) => (lane.strip && more ? more.idle.find((one) => one[0] === lane.trace && one[1] === lane.rank) : null);
function raster(wide, look, plan, t0, t1, more, ratio) {
const now = [t0, t1, wide, ratio, look.paper, plan.axis, plan.rows.length, !!more].join();
if (sign === now) return;
sign = now;
const columns = Math.round(wide * ratio), top = plan.rows[0].y - 2, lines = Math.ceil((plan.axis - top) * ratio);
if (picture?.width !== columns || picture.height !== lines) {
surface = new OffscreenCanvas(columns, lines);
brush = surface.getContext("2d");
picture = brush.createImageData(columns, lines);
pixels = new Uint32Array(picture.data.buffer);
line = new Uint8Array(columns);
}
pixels.fill(0);
if (ground !== look.paper) {
ground = look.paper;
[full, pale] = [1, 0.4].map((most) => inks(facesOf(look), ground, most));
[rim, paleRim] = [1, 0.4].map((most) => inks(words.map((kind) => LOOKS[kind][1]), ground, most));
}
for (const lane of plan.rows) {
const y = Math.round((lane.y - top) * ratio), tall = Math.max(1, Math.round(lane.tall * ratio)), outlined = two && !lane.trace;
cells(begins, takes, sorts, lane.first, lane.last, t0, t1, columns, line);
blit(pixels, columns, line, y, tall, outlined ? pale : full, outlined ? paleRim : rim, HATCH);
if (lane.tall > 5) border(lane, y, tall, outlined ? full : rim, outlined ? Math.round(1.3 * ratio) : 1, columns, t0, t1, ratio);
const mine = idleOf(lane, more);
if (mine) {
cells(more.idle_start, more.idle_length, more.idle_kind, mine[2], mine[3], t0, t1, columns, line);
blit(pixels, columns, line, y + tall, Math.round((lane.strip - 1) * ratio), full, full, HATCH);
}
}
brush.putImageData(picture, 0, 0);
}
function border(lane, top, tall, ink, thick, columns, t0, t1, ratio) {
const scale = columns / (t1 - t0);
for (const k of visible(lane, t0, t1, columns / 3)) {
let a = Math.round((begins[k] - t0) * scale), b = Math.round((begins[k] + takes[k] - t0) * scale);
const tick = b - a < 1.5 * ratio;
if (b - a < 4 * ratio && !tick) continue;
if (tick) b = a + Math.ceil(1.5 * ratio);
const colour = ink[16 * (sorts[k] + 1) + 15], from = Math.max(0, a), to = Math.min(columns, b);
for (let y = 0; y < tall; y++) {
const base = (top + y) * columns, whole = tick || y < thick || y >= tall - thick;
for (let x = from; x < to; x++) if (whole || x < a + thick || x >= b - thick) pixels[base + x] = colour;
}
}
}
function vector(ctx, wide, look, plan, t0, t1, more) {
const cell8 = new Uint8Array(wide), faces = facesOf(look);
const strip = (starts, lengths, codes, first, end, y, tall, pale) => {
cells(starts, lengths, codes, first, end, t0, t1, wide, cell8);
for (const [a, b, cell] of runs(cell8)) {
const code = (cell >> 4) - 1, known = LOOKS[words[code]];
drawRect(ctx, known ? fill(ctx, known[0], known[1], known[3]) : faces[code], LEFT + a, y, b - a, tall, ((cell & 15) / 15) * pale);
}
};
for (const lane of plan.rows) {
const outlined = two && !lane.trace, mine = idleOf(lane, more);
strip(begins, takes, sorts, lane.first, lane.last, lane.y, lane.tall, outlined ? 0.4 : 1);
if (mine) strip(more.idle_start, more.idle_length, more.idle_kind, mine[2], mine[3], lane.y + lane.tall, 3, 1);
for (const k of visible(lane, t0, t1, wide / 3)) {
const [a, b] = ends(k, wide, t0, t1);
if (b - a >= 4 && lane.tall > 8) drawEdge(ctx, LOOKS[words[sorts[k]]][outlined ? 0 : 1], a, lane.y, b - a, lane.tall);
}
}
}
const ends = (k, wide, t0, t1) => [begins[k], begins[k] + takes[k]].map((t) => LEFT + Math.max(0, Math.min(1, (t - t0) / (t1 - t0))) * wide);
function labels(ctx, wide, look, plan, t0, t1) {
let left = 2500;
for (const lane of plan.rows) {
if (lane.tall < 11) continue;
const size = Math.min(11, lane.tall - 2);
const seen = visible(lane, t0, t1, wide / 8).filter((k) => numbers[k] >= 0).map((k) => [k, ...ends(k, wide, t0, t1)]);
const fitting = (text) => seen.filter(([k, a, b]) => b - a >= 0.62 * size * text(k).length + 3);
const long = (k) => LOOKS[words[sorts[k]]][4] + numbers[k], brief = (k) => `${numbers[k]}`;
const text = fitting(long).length >= 0.7 * seen.length ? long : brief, chosen = fitting(text);
left -= chosen.length;
if (chosen.length < 0.4 * seen.length || left < 0) continue;
for (const [k, a, b] of chosen) {
drawText(ctx, text(k), (a + b) / 2, lane.y + lane.tall / 2 + 0.5, two && !lane.trace ? look.ink : LOOKS[words[sorts[k]]][2], "center", size);
}
}
}
function paint(ctx, wide, look, plan, t0, t1, more) {
if (!plan.rows.length) return;
if (ctx.hatch) vector(ctx, wide, look, plan, t0, t1, more);
else {
const ratio = ctx.getTransform().a;
raster(wide, look, plan, t0, t1, more, ratio);
ctx.imageSmoothingEnabled = false;
ctx.drawImage(surface, LEFT, plan.rows[0].y - 2, wide, picture.height / ratio);
}
labels(ctx, wide, look, plan, t0, t1);
}
return { paint, visible };
}
const curveOf = (more, trace, rank) => more?.memory?.find((one) => one[0] === trace && one[1] === rank);
function drawMemory(ctx, wide, look, plan, t0, t1, more, about, rank) {
const top = plan.memory, bottom = top + CURVE, last = about.traces.length - 1, time = more.memory_time, total = more.memory_total;
const mine = curveOf(more, last, rank), limit = about.capacity;
let most = more.memory_most;
if (limit && limit < 4 * most) most = Math.max(most, limit);
const yOf = (amount) => bottom - (amount / (1.08 * most || 1)) * CURVE;
const at = peaks(time, total, mine[2], mine[3], t0, t1, wide), below = new Float64Array(wide);
for (const kind of more.memory_kinds) {
const column = more[`memory_${kind}`], colour = fill(ctx, MEMORY[kind][0], look.paper, MEMORY[kind][1]);
for (let x = 0, end = 0; x < wide; x = end) {
const k = at[x], amount = k < 0 ? 0 : Math.max(0, column[k]), under = below[x];
while (end < wide && at[end] === k) below[end++] += amount;
if (amount) drawRect(ctx, colour, LEFT + x, yOf(under + amount), end - x, yOf(under) - yOf(under + amount));
}
}
const line = (one, colour, thick, dash) => {
const levelAt = (k) => yOf(total[k] ?? 0);
let past;
ctx.strokeStyle = colour;
ctx.lineWidth = thick;
ctx.setLineDash(dash);
ctx.beginPath();
peaks(time, total, one[2], one[3], t0, t1, wide).forEach((k, x) => {
if (k === past) return;
if (x) ctx.lineTo(LEFT + x, levelAt(past));
ctx.lineTo(LEFT + x, levelAt((past = k)));
});
ctx.lineTo(LEFT + wide, levelAt(past));
ctx.stroke();
ctx.setLineDash([]);
};
if (about.ranks <= 8) for (const one of more.memory) if (one[0] === last && one[1] !== rank) line(one, look.muted, 0.6, [1, 2]);
if (last) line(curveOf(more, 0, rank), look.ink, 1.2, [4, 3]);
line(mine, look.ink, 1.4, []);
if (limit && limit <= 1.08 * most) {
drawRect(ctx, look.warn, LEFT, yOf(limit), wide, 1.5);
drawText(ctx, `capacity ${short(limit)} ${more.memory_unit}`, LEFT + wide - 2, yOf(limit) - 7, look.warn, "right");
}
for (const amount of ticks(0, most, 4)) drawText(ctx, short(amount), LEFT - 4, yOf(amount), look.muted, "right");
const words = [`memory of rank ${rank} (${more.memory_unit}):`, ...more.memory_kinds, ...(last ? [`${about.traces[0]} dashed`] : [])];
let x = 4;
for (const word of words) {
if (MEMORY[word]) drawRect(ctx, fill(ctx, MEMORY[word][0], look.paper, MEMORY[word][1]), (x += 6), bottom + 22, 11, 9);
drawText(ctx, word, (x += MEMORY[word] ? 14 : 0), bottom + 27, look.ink);
x += 6.1 * word.length;
}
drawText(ctx, `peak ${short((mine[4] ??= total.subarray(mine[2], mine[3]).reduce((a, b) => Math.max(a, b), 0)))}`, LEFT + wide + RIGHT - 2, top + 6, look.muted, "right");
}
const KEYS = "Arrows: time and rank; + and -: zoom; Home: all; Tab: next event; Escape, then Tab: leave.";
function render({ model, el }) {
let about, traces, strips, begins, takes, sorts, numbers, indices, lengths, firsts, painter, view, plan, placed;
let more, twin, after, share, worst, streams = true, arrows = false, along = false;
let t0 = 0, t1 = 1, extent = 1, rank = 0, chosen = -1, over = -1, cursor = null, brush = null, drag = null, leaving = false;
let playing = false, told = 0, asked = false, wait = 0;
function load() {
about = model.get("about");
if (!about.lanes) return;
const found = unpack(model.get("data"), about.layout);
[begins, takes, sorts, numbers, indices] = [found.start, found.length, found.kind, found.number, found.index];
traces = about.traces;
strips = about.lanes;
firsts = strips.map((lane) => lane[3]);
lengths = totals(takes);
painter = lanePainter(about, begins, takes, sorts, numbers);
twin = about.same ? null : new Int32Array(0);
extent = t1 = about.span || 1;
t0 = placed = 0;
rank = about.highest;
chosen = over = -1;
cursor = brush = share = worst = null;
asked = clearTimeout(asked);
enrich();
}
function enrich() {
const given = model.get("more");
more = given.names && about.lanes ? { ...given, ...unpack(model.get("details"), given.layout) } : null;
after = null;
if (more && !rank) rank = more.highest;
if (view) redraw();
}
const redraw = () => view.repaint();
const two = () => traces.length > 1;
const laneOf = (k) => strips[search(firsts, 0, firsts.length, k + 1) - 1];
const kindOf = (k) => about.kinds[sorts[k]];
const endOf = (k) => begins[k] + takes[k];
const nameOf = (k) => more ? more.names[more.name[k]].replaceAll("#", numbers[k]) : kindOf(k) + (numbers[k] < 0 ? "" : ` mb${numbers[k]}`);
const within = (lane, a, b) => filled(begins, lengths, lane[3], lane[4], a, b);
const time = (t) => short(t) + (about.unit === "ms" ? " ms" : "");
const rowOf = (k) => plan.rows.find((lane) => lane.first <= k && k < lane.last);
const twinOf = (k) => (twin ??= twins(strips, indices))[k] ?? -1;
const idleAt = (lane, t) => {
const mine = more?.idle.find((one) => one[0] === lane.trace && one[1] === lane.rank);
return mine ? hit(more.idle_start, more.idle_length, mine[2], mine[3], t, 0) : -1;
};
const reason = (k) => IDLE[more.idle_kind[k] - about.kinds.length];
function causes(k) {
if (!more) return [];
after ??= inverse(more.before, more.before_of);
const passes = (j) => sorts[j] > 6;
return [...chain(k, more.before, more.before_of, passes).map(([a, b]) => [b, a]), ...chain(k, ...after, passes)];
}
function describe(k) {
const [trace, number, stream] = laneOf(k), arrival = kindOf(k) === "receive", other = twinOf(k), [one, both] = traces;
const lines = [`rank ${number} · ${nameOf(k)}${stream === "compute" ? "" : ` · ${stream}`}`];
lines.push((both ? `${traces[trace]} ` : "") + (arrival ? `arrived at ${time(begins[k])}` : `${time(begins[k])} to ${time(endOf(k))}: ${time(takes[k])}`));
if (other >= 0) {
const [p, m] = trace ? [other, k] : [k, other], from = arrival ? begins : takes, more = from[m] - from[p];
lines.push(`${one} ${time(from[p])}, ${both} ${time(from[m])}: ${more < 0 ? "−" : "+"}${time(Math.abs(more))}`);
}
return lines.join("\n");
}
function moment(t) {
const parts = [];
for (const lane of plan.rows) {
if (!lane.main || (lane.rank !== rank && about.ranks > 8)) continue;
const k = hit(begins, takes, lane.first, lane.last, t, 0), j = idleAt(lane, t);
parts.push(`${two() ? `${traces[lane.trace]} ` : ""}rank ${lane.rank} ${k >= 0 ? nameOf(k) : j >= 0 ? `idle (${reason(j)})` : "idle"}`);
}
view.say(`at ${time(t)}: ${parts.join(", ")}. ${held(t).replaceAll("\n", ", ")}`);
}
function held(t) {
const last = traces.length - 1, one = curveOf(more, last, rank), k = one ? search(more.memory_time, one[2], one[3], t * (1 + 1e-12)) - 1 : -1;
if (!one || k < one[2]) return "";
const lines = [`rank ${rank} holds ${short(more.memory_total[k])} ${more.memory_unit}`], live = [];
for (const kind of more.memory_kinds) if (more[`memory_${kind}`][k] > 0) lines.push(`${kind} ${short(more[`memory_${kind}`][k])}`);
const mine = more.live?.find((each) => each[0] === last && each[1] === rank);
for (let j = mine?.[2]; j < mine?.[3]; j++) if (more.live_start[j] <= t && t < more.live_end[j]) live.push(j);
live.sort((a, b) => more.live_size[b] - more.live_size[a]);
const rest = live.length > 6 ? ` and ${live.length - 6} more` : "";
if (live.length) lines.push(`live: ${live.slice(0, 6).map((j) => more.values[more.live_name[j]]).join(", ")}${rest}`);
return lines.join("\n");
}
function bubble(a, b) {
return traces.map((name, trace) => {
let busy = 0;
for (const lane of strips) if (lane[0] === trace && lane[2] === "compute") busy += within(lane, a, b);
const whole = about.ranks * Math.max(0, Math.min(b, about.spans[trace]) - a), part = (x) => `${(100 * x || 0).toFixed(1)}%`;
return `${name}: bubble ${part(1 - busy / whole)} of total, ${busy ? part(whole / busy - 1) : "all"} of ideal`;
}).join("; ");
}
const area = (full) => Math.max(50, Math.round(full - LEFT - RIGHT));
const xOf = (t, full) => LEFT + ((t - t0) / (t1 - t0)) * area(full);
function legend(ctx, look) {
for (const [word, x, y] of plan.legend) {
const known = LOOKS[word], idle = IDLE.indexOf(word.slice(6));
if (idle >= 0) drawRect(ctx, [look.rule, look.muted, look.warn][idle], x, y + 6, 14, 4);
else {
if (!word.endsWith("(outlined)")) drawRect(ctx, known ? fill(ctx, known[0], known[1], known[3]) : look.muted, x, y + 2, 14, 11);
drawEdge(ctx, known ? known[1] : look.muted, x, y + 2, 14, 11);
}
drawText(ctx, word, x + 19, y + 8, look.ink);
}
}
function overview(ctx, full, look) {
const wide = area(full), y = plan.overview, columns = Math.min(wide, 300);
if (!share) {
share = new Float64Array(columns);
const rows = strips.filter((lane) => lane[2] === "compute" && lane[0] === traces.length - 1);
const some = rows.filter((_, k) => k % Math.ceil(rows.length / 16) === 0);
for (const lane of some) {
for (let x = 0; x < columns; x++) share[x] += within(lane, (x * extent) / columns, ((x + 1) * extent) / columns) / ((extent / columns) * some.length);
}
}
drawRect(ctx, look.rule, LEFT, y, wide, 14, 0.5);
share.forEach((part, x) => drawRect(ctx, look.muted, LEFT + (x * wide) / share.length, y + 14 * (1 - part), wide / share.length + 0.5, 14 * part));
drawEdge(ctx, look.focus, LEFT + (t0 / extent) * wide, y - 1, Math.max(3, ((t1 - t0) / extent) * wide), 16, 2);
drawText(ctx, "overview", 4, y + 7, look.muted);
drawText(ctx, t1 - t0 >= extent ? "all" : `1/${short(extent / (t1 - t0))}`, full - 2, y + 7, look.muted, "right");
}
function axis(ctx, full, look) {
for (const t of ticks(t0, t1, Math.max(2, Math.floor(area(full) / 90)))) {
const x = Math.round(xOf(t, full));
drawRect(ctx, look.rule, x, plan.overview + 18, 1, plan.bottom - plan.overview - 18);
drawText(ctx, short(t), x, plan.bottom + 9, look.muted, "center");
}
drawText(ctx, about.unit === "ms" ? "time (ms)" : "time", full - 2, plan.bottom + 9, look.muted, "right");
}
function gutters(ctx, full, look) {
let until = -1;
for (const lane of plan.rows) {
if (!lane.main || lane.y < until) continue;
const y = lane.y + Math.max(6, lane.tall / 2), end = Math.min(t1, about.spans[lane.trace]), busy = filled(begins, lengths, lane.first, lane.last, t0, end) / (end - t0);
const second = two() && lane.trace && lane.tall >= 10, mine = lane.rank === rank;
drawText(ctx, second ? `  ${traces[1]}` : `rank ${lane.rank}`, 4, y, mine ? look.focus : look.ink, "left", 11, mine ? "bold " : "");
if (lane.tall >= 6 && end > t0) drawText(ctx, `${Math.round(100 * Math.max(0, 1 - busy))}% idle`, full - 2, y, look.muted, "right");
until = lane.y + Math.max(13, lane.tall);
}
}
function box(ctx, k, full, colour, thick) {
const lane = rowOf(k);
if (!lane || begins[k] > t1 || endOf(k) < t0) return;
const a = Math.max(LEFT - 1, xOf(begins[k], full)), b = Math.min(full - RIGHT + 1, xOf(endOf(k), full));
drawEdge(ctx, colour, a - 1, lane.y - 1, Math.max(4, b - a + 2), lane.tall + 2, thick);
}
function arrow(ctx, [a, b], full, colour) {
const one = rowOf(a), other = rowOf(b), x = xOf(endOf(a), full), to = xOf(begins[b], full);
if (!one || !other || Math.max(x, to) < LEFT || Math.min(x, to) > full - RIGHT) return;
const y = one.y + one.tall / 2, end = other.y + other.tall / 2, bend = Math.min(30, Math.abs(to - x) / 2 + 6);
ctx.strokeStyle = ctx.fillStyle = colour;
ctx.lineWidth = 1.3;
ctx.beginPath();
ctx.moveTo(x, y);
ctx.bezierCurveTo(x + bend, y, to - bend, end, to, end);
ctx.stroke();
ctx.beginPath();
ctx.moveTo(to, end);
ctx.lineTo(to - 6, end - 3);
ctx.lineTo(to - 6, end + 3);
ctx.fill();
}
function overlays(ctx, full, look) {
const wide = area(full), top = plan.overview + 18, shown = over >= 0 ? over : chosen;
let count = 0, past = -1;
ctx.save();
ctx.beginPath();
ctx.rect(LEFT - 2, top, wide + 4, plan.height);
ctx.clip();
for (const k of along && more ? more.path : []) {
if (begins[k] <= t1 && endOf(k) >= t0 && count++ < 3000) {
box(ctx, k, full, look.warn, 2.5);
if (past >= 0 && laneOf(past)[0] === laneOf(k)[0] && laneOf(past)[1] !== laneOf(k)[1]) arrow(ctx, [past, k], full, look.warn);
}
past = k;
}
count = 0;
for (const lane of arrows && more ? plan.rows : []) {
for (const k of painter.visible(lane, t0, t1, 400)) {
if (kindOf(k) !== "receive") continue;
for (let i = more.before[k]; i < more.before[k + 1] && count++ < 400; i++) arrow(ctx, [more.before_of[i], k], full, look.wire);
}
}
if (shown >= 0) {
for (const pair of causes(shown)) {
arrow(ctx, pair, full, look.wire);
for (const k of pair) box(ctx, k, full, look.wire, 1.5);
}
box(ctx, twinOf(shown), full, look.focus, 2);
box(ctx, shown, full, look.ink, 2);
}
if (brush) {
const [a, b] = brushed().map((t) => xOf(t, full));
drawRect(ctx, look.focus, a, top, b - a, plan.axis - top, 0.25);
}
if (cursor !== null) {
const x = xOf(cursor, full);
if (playing) drawRect(ctx, look.paper, x, top, LEFT + wide - x + 2, plan.bottom - top, 0.75);
drawRect(ctx, look.ink, x - 0.5, top, 1, plan.bottom - top);
}
ctx.restore();
}
function draw(ctx, full, _, look) {
if (!about.lanes) return;
axis(ctx, full, look);
legend(ctx, look);
overview(ctx, full, look);
painter.paint(ctx, area(full), look, plan, t0, t1, more);
gutters(ctx, full, look);
if (plan.memory && more?.memory) drawMemory(ctx, area(full), look, plan, t0, t1, more, about, rank);
overlays(ctx, full, look);
if (about.later && !more && !asked) {
asked = setTimeout(() => model.send({ want: "details" }), 250);
}
}
function show(a, b) {
const size = Math.min(extent, Math.max(extent * 1e-7, b - a));
a = Math.max(0, Math.min(extent - size, a));
[t0, t1] = [a, a + size];
clearTimeout(wait);
wait = setTimeout(() => tell("window", [t0, t1]), 150);
redraw();
}
const tell = (trait, value) => {
model.set(trait, value);
model.save_changes();
};
const brushed = () => [...brush].sort((a, b) => a - b);
const zoom = (factor, t = cursor ?? (t0 + t1) / 2) => show(t - (t - t0) * factor, t + (t1 - t) * factor);
const pan = (part) => show(t0 + part * (t1 - t0), t1 + part * (t1 - t0));
const whole = () => show(0, extent);
const around = (t) => (t < t0 || t > t1) && show(t - (t1 - t0) / 3, t + (2 * (t1 - t0)) / 3);
function choose(k) {
chosen = k;
if (k >= 0) {
rank = laneOf(k)[1];
cursor = begins[k];
around(cursor);
view.say(describe(k).replaceAll("\n", ", "));
tell("selected", nameOf(k));
}
redraw();
}
function next(step) {
const lane = chosen >= 0 ? laneOf(chosen) : strips.find((one) => one[0] === traces.length - 1 && one[1] === rank);
const k = chosen >= 0 ? chosen + step : step > 0 ? search(begins, lane[3], lane[4], t0) : -1;
const stays = !leaving && k >= lane[3] && k < lane[4];
leaving = false;
choose(stays ? k : -1);
return stays;
}
function turn(step) {
rank = Math.max(0, Math.min(about.ranks - 1, rank + step));
chosen = -1;
moment(cursor ?? t0);
redraw();
}
function step(sign) {
cursor = boundary(begins, takes, plan.rows.filter((lane) => lane.main), cursor ?? t0, sign);
around(cursor);
moment(cursor);
redraw();
}
function play() {
playing = !playing;
playButton.textContent = playing ? "pause" : "play";
playButton.setAttribute("aria-pressed", playing);
redraw();
if (!playing) return;
if (cursor === null || cursor >= t1) cursor = t0;
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
let last = performance.now();
const tick = (now) => {
if (!playing || !view.root.isConnected) return;
if (cursor >= t1) return play();
if (!still) cursor = Math.min(t1, cursor + ((t1 - t0) * (now - last)) / 15000);
else if (now - last > 700) step(1);
if (!still || now - last > 700) last = now;
if (now - told > 400) moment(cursor, (told = now));
redraw();
requestAnimationFrame(tick);
};
requestAnimationFrame(tick);
}
function difference() {
if (!about.same) return view.say("there is one trace: nothing to compare");
const by = (k) => Math.abs(takes[k] - takes[twinOf(k)]);
worst ??= Array.from(begins.keys()).filter((k) => twinOf(k) >= 0 && twinOf(k) < k).sort((a, b) => by(b) - by(a));
choose(worst[(worst.indexOf(chosen) + 1) % worst.length]);
}
load();
view = frame(model, el, {
name: "timeline", hint: KEYS, draw,
height(full) {
if (!about.lanes) return 40;
if (placed !== (placed = streams ? full : -full)) plan = layout(about, full, streams, about.memory);
return plan.height;
},
keys: {
"ArrowLeft": () => pan(-0.15), "ArrowRight": () => pan(0.15), "ArrowUp": () => turn(-1), "ArrowDown": () => turn(1),
"+": () => zoom(0.6), "-": () => zoom(1 / 0.6), "Home": whole,
"Tab": () => next(1), "Shift+Tab": () => next(-1),
"Enter": () => chosen >= 0 && show(begins[chosen] - takes[chosen], begins[chosen] + 2 * takes[chosen]),
"Escape"() {
leaving = true;
brush = cursor = null;
if (playing) play();
choose(-1);
},
" ": play, ".": () => step(1), ",": () => step(-1), "d": difference, "c": () => critical.click(), "m": () => all.click(), "s": () => lanes.click(),
},
});
const toggle = (label, title, set, on) => {
const made = view.button(label, title, () => {
made.setAttribute("aria-pressed", set());
redraw();
}, on);
return made;
};
const playButton = view.button("play", "play (space), step with . and ,", play, false);
view.button("+", "zoom in (+)", () => zoom(0.6));
view.button("−", "zoom out (-)", () => zoom(1 / 0.6));
view.button("all", "show all (Home)", whole);
const critical = toggle("critical path", "what the time consists of (c)", () => (along = !along), false);
const all = toggle("messages", "arrows from send to receive (m)", () => (arrows = !arrows), false);
const lanes = toggle("streams", "more lanes (s)", () => (streams = !streams), true);
if (about.same) view.button("differences", "largest first (d)", difference);
const board = view.canvas;
const at = (event) => {
const place = board.getBoundingClientRect(), x = event.clientX - place.left, y = event.clientY - place.top, part = (x - LEFT) / area(place.width);
return [x, y, t0 + part * (t1 - t0), part, plan.rows.find((lane) => y >= lane.y && y < lane.y + lane.tall + lane.strip)];
};
view.listen(board, "pointermove", (event) => {
const [x, y, t, part, lane] = at(event), size = t1 - t0;
if (drag?.pan) return show(part * extent - size / 2, part * extent + size / 2);
if (drag) {
brush = [drag.t, Math.max(t0, Math.min(t1, t))];
const [a, b] = brushed();
view.say(`${time(a)} to ${time(b)}: ${bubble(a, b)}`);
return redraw();
}
const inside = part >= 0 && part <= 1;
if (!playing) cursor = inside ? t : null;
over = lane && inside ? hit(begins, takes, lane.first, lane.last, t, (3 * size) / area(board.clientWidth)) : -1;
const idle = lane?.main && inside ? idleAt(lane, t) : -1;
view.tip(x, y, over >= 0 ? describe(over) : idle >= 0 ? `rank ${lane.rank} idle (${reason(idle)})\n${time(more.idle_length[idle])}` : inside && plan.memory && y > plan.memory ? held(t) : "");
redraw();
});
view.listen(board, "pointerleave", () => {
over = -1;
if (!playing) cursor = null;
view.tip(0, 0, "");
redraw();
});
view.listen(board, "pointerdown", (event) => {
const [x, y, t] = at(event);
if (event.button || x < LEFT) return;
drag = { x, t, pan: y > plan.overview - 4 && y < plan.overview + 18 };
board.setPointerCapture(event.pointerId);
});
view.listen(board, "pointerup", (event) => {
const [x, , , , lane] = at(event);
if (drag && !drag.pan && brush && Math.abs(x - drag.x) > 4) show(...brushed());
else if (drag && !drag.pan) {
if (lane) rank = lane.rank;
choose(over);
}
drag = brush = null;
redraw();
});
view.listen(board, "dblclick", whole);
view.listen(board, "wheel", (event) => {
if (!event.ctrlKey && document.activeElement !== board) return;
event.preventDefault();
if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / 800);
else zoom(1.0015 ** event.deltaY, at(event)[2]);
}, { passive: false });
const changed = () => {
load();
redraw();
};
model.on("change:data", changed);
model.on("change:details", enrich);
return () => {
model.off("change:data", changed);
model.off("change:details", enrich);
clearTimeout(wait);
playing = false;
view.dispose();
};
}
export default { render };
