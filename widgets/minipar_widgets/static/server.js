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
function bar(ctx, kind, x, y, width, height, text = "") {
const [face, rim, ink, hatch] = LOOKS[kind];
drawRect(ctx, fill(ctx, face, rim, hatch), x, y, width, height);
if (width >= 3) drawEdge(ctx, rim, x, y, width, height);
if (text && height >= 9 && width >= 4 + 6.2 * text.length) drawText(ctx, text, x + width / 2, y + height / 2 + 0.5, ink, "center", Math.min(11, height - 1));
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
const EDGE = 10, MARGIN = 112, LANE = 26, CHART = 190;
const HUES = ["#0072B2", "#D55E00", "#009E73", "#AA4499", "#999933", "#7A7A7A", "#CC79A7", "#8C6D31"];
const ACTS = { receives: "receive", updates: "optimizer step", answers: "message" };
const OPS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient", R: "recompute" };
function firstAfter(list, t, end) {
let low = 0, high = list.length;
while (low < high) {
const middle = (low + high) >> 1;
if (end(list[middle]) > t) high = middle;
else low = middle + 1;
}
return low;
}
function visible(list, from, to, width, start, end) {
const found = [], column = (t) => Math.floor(((t - from) / (to - from)) * width);
let drawn = -1;
for (let k = firstAfter(list, from, end); k < list.length && start(list[k]) < to; k++) {
if (column(end(list[k])) <= drawn) continue;
found.push(list[k]);
drawn = column(end(list[k]));
}
return found;
}
function sentence(data, worker, k) {
const one = data.workers[worker], step = one.steps[k];
const [number, pull0, pull1, , , push1, version, update, applied, late] = step;
const fate = update < 0 ? "its gradient came too late and was dropped"
: `its gradient went into update ${update}${late ? `, ${late} update${late > 1 ? "s" : ""} late` : ", not late"}, at ${short(applied)}`;
return `worker ${one.rank}, step ${number}: waited ${short(pull1 - pull0)} ${data.unit} for version ${version}, pushed at ${short(push1)}; ${fate}`;
}
function versionAt(data, t) {
return firstAfter(data.updates, t, (time) => time);
}
function words(ctx, text, x, y, ink, align = "left", px = 11) {
ctx.fillStyle = ink;
ctx.font = `${px}px ${FONT}`;
ctx.textAlign = align;
ctx.textBaseline = "middle";
ctx.fillText(text, x, y);
}
function stroke(ctx, ink, width, dash, ...points) {
ctx.strokeStyle = ink;
ctx.lineWidth = width;
ctx.setLineDash(dash);
ctx.beginPath();
points.forEach(([x, y], k) => (k ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
ctx.stroke();
ctx.setLineDash([]);
}
function drawServer(ctx, acts, at, y, from, to, width, look) {
for (const what of ["receives", "answers", "updates"]) {
const mine = acts.filter((act) => act[0] === what);
for (const [, start, end, , , version] of visible(mine, from, to, width, (a) => a[1], (a) => a[2])) {
const x = at(start), w = Math.max(what === "updates" ? 2 : 1, at(end) - x);
const [top, tall] = what === "updates" ? [y + 1, LANE - 4] : [y + 5, LANE - 12];
bar(ctx, ACTS[what], x, top, w, tall, what === "updates" ? String(version) : "");
}
}
}
function drawWorker(ctx, one, at, y, from, to, width, look, chosen) {
for (const [start, end] of one.away) {
if (end < from || start > to) continue;
ctx.fillStyle = fill(ctx, look.dark ? "#4a2410" : "#ffe1cc", look.warn, "x");
ctx.fillRect(at(start), y + 1, at(end) - at(start), LANE - 4);
const text = "away";
if (at(end) - at(start) > 44) {
ctx.fillStyle = look.paper;
ctx.fillRect(at((start + end) / 2) - 18, y + 5, 36, LANE - 12);
words(ctx, text, at((start + end) / 2), y + LANE / 2 - 1, look.warn, "center");
}
}
for (const step of visible(one.steps, from, to, width, (s) => s[1], (s) => s[5])) {
const [number, pull0, pull1, work, push0, push1, version, update] = step;
ctx.fillStyle = look.rule;
ctx.fillRect(at(pull0), y + LANE / 2 - 3, at(pull1) - at(pull0), 4);
const whole = at(push1) - at(pull1);
if (whole < 3) {
ctx.fillStyle = LOOKS.forward[0];
ctx.fillRect(at(pull1), y + 3, Math.max(1, whole), LANE - 8);
continue;
}
for (const [op, start, end] of work) bar(ctx, OPS[op] ?? "copy", at(start), y + 1, at(end) - at(start), LANE - 4);
bar(ctx, "message", at(push0), y + 6, Math.max(1, at(push1) - at(push0)), LANE - 14);
const text = update < 0 ? `v${version} dropped` : `v${version}`;
if (whole > 10 + 6.2 * text.length) {
ctx.fillStyle = look.paper;
ctx.globalAlpha = 0.85;
ctx.fillRect(at(pull1) + 3, y + 5, 4 + 6.2 * text.length, LANE - 12);
ctx.globalAlpha = 1;
words(ctx, text, at(pull1) + 5, y + LANE / 2 - 1, update < 0 ? look.warn : look.ink);
}
if (chosen === number) {
ctx.strokeStyle = look.focus;
ctx.lineWidth = 2.5;
ctx.strokeRect(at(pull0), y, at(push1) - at(pull0), LANE - 2);
}
}
}
function render({ model, el }) {
let window_ = null, worker = 0, chosen = -1, leaving = false;
const data = () => model.get("data");
const range = () => window_ ?? [0, data().time];
const lanes = () => data().servers.length + data().workers.length;
const right = (width) => width - EDGE;
const hue = (k) => HUES[k % HUES.length];
const view = frame(model, el, {
name: "servers",
hint: "Up and down choose a worker, Tab goes to its next step, left and right move, plus and minus zoom, Home shows all; Escape, then Tab: leave.",
height: () => lanes() * LANE + CHART + 34,
draw(ctx, width, height, look) {
const now = data(), [from, to] = range(), inside = right(width) - MARGIN, at = (t) => MARGIN + ((t - from) / (to - from)) * inside;
now.workers.forEach((one, k) => {
if (k !== worker) return;
ctx.fillStyle = look.focus;
ctx.globalAlpha = 0.1;
ctx.fillRect(0, (now.servers.length + k) * LANE - 1, width, LANE);
ctx.globalAlpha = 1;
});
now.servers.forEach((_, k) => words(ctx, `server ${k}`, MARGIN - 8, (k + 0.5) * LANE - 1, look.ink, "right"));
now.workers.forEach((one, k) => {
const y = (now.servers.length + k + 0.5) * LANE - 1;
words(ctx, `${one.slow ? "slow: " : ""}worker ${one.rank}`, MARGIN - 8, y, look.ink, "right");
ctx.fillStyle = hue(k);
ctx.fillRect(1, y - 6, 5, 12);
});
ctx.save();
ctx.beginPath();
ctx.rect(MARGIN, 0, inside, height);
ctx.clip();
now.servers.forEach((acts, k) => drawServer(ctx, acts, at, k * LANE, from, to, inside, look));
now.workers.forEach((one, k) => {
const step = k === worker && chosen >= 0 ? one.steps[chosen]?.[0] : null;
drawWorker(ctx, one, at, (now.servers.length + k) * LANE, from, to, inside, look, step);
});
const top = lanes() * LANE + 8, bottom = top + CHART, scale = scaleOfVersions(now, top, from, to, inside);
drawVersions(ctx, now, at, scale, from, to, inside, look);
ctx.restore();
for (const v of scale.marks) words(ctx, `v${v}`, MARGIN - 8, scale.y(v), look.muted, "right", 10);
words(ctx, "version", MARGIN - 40, top + CHART / 2, look.ink, "right");
for (const t of ticks(from, to, inside / 90)) {
const last = at(t) > right(width) - 12;
words(ctx, short(t), last ? right(width) : at(t), bottom + 9, look.muted, last ? "right" : "center");
}
words(ctx, `time (${now.unit})`, right(width), bottom + 20, look.muted, "right");
},
keys: {
ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "-": () => zoom(2),
Home() { window_ = null; view.say(`all of ${short(data().time)} ${data().unit}`); view.repaint(); },
ArrowUp: () => choose(worker - 1, -1), ArrowDown: () => choose(worker + 1, -1),
Tab: () => next(1), "Shift+Tab": () => next(-1),
Escape() { leaving = true; choose(worker, -1); },
},
});
function scaleOfVersions(now, top, from, to, inside) {
const low = versionAt(now, from), high = Math.max(low + 1, versionAt(now, to));
const least = Math.min(low, ...now.workers.flatMap((one) => visible(one.steps, from, to, inside, (s) => s[1], (s) => s[8]).map((s) => s[6])));
const y = (version) => top + CHART - 14 - ((version - least) / (high - least)) * (CHART - 30);
return { low, y, marks: ticks(least, high, 6).filter((v) => v === Math.round(v)) };
}
function drawVersions(ctx, now, at, { low, y, marks }, from, to, inside, look) {
for (const v of marks) stroke(ctx, look.rule, 0.7, [], [at(from), y(v)], [at(to), y(v)]);
now.workers.forEach((one, k) => {
const shown = visible(one.steps, from, to, inside, (s) => s[1], (s) => Math.max(s[5], s[8]));
for (const [, , pull1, , , push1, version, update, applied, late] of shown) {
const shift = (k - (now.workers.length - 1) / 2) * Math.min(3, 24 / now.workers.length);
const end = update < 0 ? push1 : applied, line = y(version) + shift;
stroke(ctx, hue(k), k === worker ? 3 : 1.6, k % 2 ? [7, 2] : [], [at(pull1), line], [at(end), line]);
if (update < 0) words(ctx, "✕", at(end), line, look.warn, "center", 10);
else if (late) stroke(ctx, hue(k), 1, [2, 2], [at(end), line], [at(end), y(update)]);
if (late && at(end) - at(pull1) > 30) words(ctx, String(late), at(end) - 3, (line + y(update)) / 2, hue(k), "right", 10);
}
});
const points = [[at(from), y(low)]];
for (let k = low; k < now.updates.length && now.updates[k] <= to; k++) points.push([at(now.updates[k]), y(k)], [at(now.updates[k]), y(k + 1)]);
points.push([at(to), points.at(-1)[1]]);
stroke(ctx, look.ink, 1.8, [], ...points);
}
function clampTo(from, to) {
const all = data().time, length = Math.min(all, Math.max(all * 1e-6, to - from));
const begin = Math.max(0, Math.min(all - length, from));
window_ = length >= all * 0.999999 ? null : [begin, begin + length];
view.repaint();
}
function zoom(by, centre) {
const [from, to] = range(), c = centre ?? (from + to) / 2;
clampTo(c - (c - from) * by, c + (to - c) * by);
view.say(`${short(range()[0])} to ${short(range()[1])} ${data().unit}`);
}
function pan(by) {
const [from, to] = range(), shift = (to - from) * by;
clampTo(from + shift, to + shift);
view.say(`${short(range()[0])} to ${short(range()[1])} ${data().unit}`);
}
function choose(to, step) {
worker = Math.max(0, Math.min(data().workers.length - 1, to));
const one = data().workers[worker];
chosen = step;
view.say(chosen >= 0 ? sentence(data(), worker, chosen) : data().words[worker]);
if (chosen >= 0) {
const [from, to_] = range(), [, pull0, , , , push1] = one.steps[chosen];
if (pull0 < from || push1 > to_) clampTo(pull0 - (to_ - from) / 3, pull0 + ((to_ - from) * 2) / 3);
}
view.repaint();
}
function next(by) {
const to = leaving ? -1 : chosen + by;
leaving = false;
if (to < 0 || to >= data().workers[worker].steps.length) { chosen = -1; view.repaint(); return false; }
choose(worker, to);
return true;
}
view.toolbar.prepend(
...[["−", "zoom out (minus)", () => zoom(2)], ["+", "zoom in (plus)", () => zoom(0.5)], ["all", "show all (Home)", () => { window_ = null; view.repaint(); }]].map(
([label, title, run]) => make("button", { type: "button", title, "aria-label": title, onclick: run }, label)),
);
const timeAt = (event) => {
const [from, to] = range();
return from + ((event.offsetX - MARGIN) / (right(view.canvas.clientWidth) - MARGIN)) * (to - from);
};
const under = (event) => {
const t = timeAt(event), lane = Math.floor(event.offsetY / LANE), k = lane - data().servers.length;
if (lane >= lanes() || lane < 0 || event.offsetX < MARGIN) return {};
if (k < 0) return { server: lane, act: data().servers[lane].find((act) => act[1] <= t && t <= act[2]) };
return { worker: k, step: data().workers[k].steps.findIndex((step) => step[1] <= t && t <= step[5]), away: data().workers[k].away.find(([a, b]) => a <= t && t <= b) };
};
let drag = null;
view.listen(view.canvas, "pointermove", (event) => {
if (drag && event.buttons) {
const [from, to] = drag.range, per = (to - from) / (right(view.canvas.clientWidth) - MARGIN);
return clampTo(from - (event.offsetX - drag.x) * per, to - (event.offsetX - drag.x) * per);
}
const { act, server, worker: k, step, away } = under(event), unit = data().unit;
let text = null;
if (act) text = `server ${server} ${act[0]}${act[3] >= 0 ? ` (worker ${act[3]}, step ${act[4]})` : ""}\nversion ${act[5]} after it, ${short(act[2] - act[1])} ${unit}`;
else if (away) text = `worker ${data().workers[k].rank} was away from ${short(away[0])} to ${short(away[1])} ${unit}`;
else if (step >= 0) text = sentence(data(), k, step);
else if (event.offsetY > lanes() * LANE && event.offsetX > MARGIN) text = `${short(timeAt(event))} ${unit}: version ${versionAt(data(), timeAt(event))}`;
view.tip(event.offsetX, event.offsetY, text);
});
view.listen(view.canvas, "pointerdown", (event) => {
drag = { x: event.offsetX, range: range() };
const { worker: k, step } = under(event);
if (k != null) choose(k, step ?? -1);
});
view.listen(window, "pointerup", () => { drag = null; });
view.listen(view.canvas, "pointerleave", () => view.tip(0, 0, null));
view.listen(view.canvas, "wheel", (event) => {
if (!event.ctrlKey) return;
event.preventDefault();
zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event));
}, { passive: false });
const changed = () => { window_ = null; worker = 0; chosen = -1; view.repaint(); };
model.on("change:data", changed);
return () => { model.off("change:data", changed); view.dispose(); };
}
export default { render };
