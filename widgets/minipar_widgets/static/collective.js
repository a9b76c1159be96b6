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
const EDGE = 6, HEAD = 22, STRIP = 38;
const PACE = 0.9;
function stateAt(play, t) {
const cells = play.first.map((row) => row.slice());
for (const [time, rank, chunk, cell] of play.changes) {
if (time > t) break;
cells[rank][chunk] = cell;
}
const sent = play.first.map(() => 0), flying = [];
for (const message of play.messages) {
const [source, , start, end, bytes] = message;
if (start > t) break;
if (t < end) flying.push(message);
sent[source] += bytes * (end > start ? Math.min(1, (t - start) / (end - start)) : 1);
}
return { cells, flying, sent };
}
function moment(play, t, step) {
const slack = 1e-9 * play.time, m = play.moments;
const stops = [0, ...m.slice(1).map((time, k) => (m[k] + time) / 2), play.time];
if (step > 0) return stops.find((stop) => stop > t + slack) ?? play.time;
return stops.reverse().find((stop) => stop < t - slack) ?? 0;
}
function sentence(play, t) {
const { cells, flying } = stateAt(play, t);
const at = `${short(t)} of ${short(play.time)} ${play.unit}`;
const adding = addedAt(play, t).map(([, , rank, chunk]) => `rank ${rank} adds to chunk ${chunk}`);
if (!flying.length && !adding.length) {
const whole = cells.filter((row, r) => row.every((cell, c) => (cell?.[1] ?? 0) === (play.last[r][c]?.[1] ?? 0))).length;
return `${at}: nothing is on its way; ${whole} of ${cells.length} ranks hold what they end with`;
}
const said = flying.map(([source, target, , , , chunks, values]) =>
`rank ${source} sends ${chunks.length > 1 ? `${chunks.length} chunks` : `chunk ${chunks[0]}, ${values[0]},`} to rank ${target}`).concat(adding);
const more = said.length > 3 ? `; and ${said.length - 3} more` : "";
return `${at}: ${said.slice(0, 3).join("; ")}${more}`;
}
function addedAt(play, t) {
return play.adds.filter(([start, end]) => start <= t && t < end);
}
function count(parts) {
let n = 0;
for (let x = parts; x; x &= x - 1) n++;
return n;
}
function places(play, width) {
const ranks = play.first.length, chunks = play.sizes.length, wide = width >= 720;
const circle = wide ? Math.min(280, 0.3 * width) : Math.min(220, width - 2 * EDGE);
const left = (wide ? circle + 24 : 0) + 58, least = width >= 480 ? 170 : 90;
const top = (wide ? 0 : circle + 10) + HEAD;
const row = Math.max(18, Math.min(40, 300 / ranks));
const cell = Math.min(64, (width - EDGE - left - least - 14) / chunks);
const barsLeft = left + chunks * cell + 14, bars = Math.min(340, width - EDGE - barsLeft);
const height = Math.max(wide ? circle : 0, top + ranks * row) + 12 + STRIP;
return { wide, circle, left, bars, top, row, cell, chunks, ranks, height, barsLeft, strip: height - STRIP };
}
function onCircle(p, rank) {
const angle = (2 * Math.PI * rank) / p.ranks - Math.PI / 2, radius = p.circle / 2 - 18;
return [p.circle / 2 + radius * Math.cos(angle), p.circle / 2 + radius * Math.sin(angle)];
}
function drawCircle(ctx, play, p, t, flying, look) {
const busiest = Math.max(1, ...play.links.map((link) => link[2]));
for (const [source, target, bytes] of play.links) {
const [a, b] = onCircle(p, source), [c, d] = onCircle(p, target);
ctx.strokeStyle = look.muted;
ctx.globalAlpha = 0.6;
ctx.lineWidth = 0.5 + (1.5 * bytes) / busiest;
ctx.beginPath();
ctx.moveTo(a, b);
ctx.quadraticCurveTo((a + c) / 2 + (d - b) * 0.12, (b + d) / 2 - (c - a) * 0.12, c, d);
ctx.stroke();
ctx.globalAlpha = 1;
}
for (const [source, target, start, end] of flying) {
const [a, b] = onCircle(p, source), [c, d] = onCircle(p, target);
const f = (t - start) / (end - start), g = 1 - f;
const mx = (a + c) / 2 + (d - b) * 0.12, my = (b + d) / 2 - (c - a) * 0.12;
ctx.strokeStyle = look.wire;
ctx.lineWidth = 2.5;
ctx.beginPath();
ctx.moveTo(a, b);
ctx.quadraticCurveTo(mx, my, c, d);
ctx.stroke();
ctx.fillStyle = look.wire;
ctx.beginPath();
ctx.arc(g * g * a + 2 * f * g * mx + f * f * c, g * g * b + 2 * f * g * my + f * f * d, 5, 0, 2 * Math.PI);
ctx.fill();
}
const size = Math.max(8, Math.min(14, 120 / p.ranks));
for (let rank = 0; rank < p.ranks; rank++) {
const [x, y] = onCircle(p, rank);
ctx.fillStyle = look.paper;
ctx.strokeStyle = look.ink;
ctx.lineWidth = 1.2;
ctx.beginPath();
ctx.arc(x, y, size, 0, 2 * Math.PI);
ctx.fill();
ctx.stroke();
words(ctx, String(rank), x, y + 0.5, look.ink, "center", Math.min(12, size + 1));
}
if (play.nodes > 1) words(ctx, `${play.nodes} nodes of ${p.ranks / play.nodes}`, p.circle / 2, p.circle / 2, look.muted, "center", 11);
}
function words(ctx, text, x, y, ink, align = "left", size = 11) {
ctx.fillStyle = ink;
ctx.font = `${size}px ${FONT}`;
ctx.textAlign = align;
ctx.textBaseline = "middle";
ctx.fillText(text, x, y);
}
function drawCell(ctx, play, p, rank, chunk, cell, done, look) {
const x = p.left + chunk * p.cell, y = p.top + rank * p.row, w = p.cell - 2, h = p.row - 3;
const n = cell ? count(cell[1]) : 0;
const [face, edge, ink] = done ? LOOKS["optimizer step"] : n > 1 ? LOOKS["recompute"] : LOOKS["forward"];
if (!cell) {
ctx.strokeStyle = look.rule;
ctx.lineWidth = 1;
ctx.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
return;
}
ctx.fillStyle = face;
ctx.fillRect(x, y, w, h);
ctx.strokeStyle = edge;
ctx.lineWidth = 1;
ctx.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
const text = String(cell[0]);
if (w >= 6 + 6.4 * text.length) words(ctx, text, x + w / 2, y + (h - 4) / 2 + 0.5, ink, "center", Math.min(12, h - 5));
const part = (w - 4) / p.ranks;
ctx.fillStyle = ink;
if (part >= 1) for (let r = 0; r < p.ranks; r++) if (cell[1] & (1 << r)) ctx.fillRect(x + 2 + r * part, y + h - 5, Math.max(0.8, part - 1), 3);
}
function drawMessage(ctx, p, message, t) {
const [source, target, start, end, , chunks, values] = message, f = (t - start) / (end - start);
const [face, edge, ink] = LOOKS.message, h = p.row - 7;
chunks.forEach((chunk, k) => {
const x = p.left + chunk * p.cell + 3, y = p.top + (source + (target - source) * f) * p.row + 2, w = p.cell - 8;
ctx.fillStyle = face;
ctx.globalAlpha = 0.93;
ctx.fillRect(x, y, w, h);
ctx.globalAlpha = 1;
ctx.strokeStyle = edge;
ctx.lineWidth = 1.5;
ctx.strokeRect(x, y, w, h);
const text = `${target > source ? "↓" : "↑"}${values[k]}`;
if (w >= 4 + 6.4 * text.length) words(ctx, text, x + w / 2, y + h / 2 + 0.5, "#201400", "center", Math.min(12, h - 3));
else if (w >= 8) words(ctx, text[0], x + w / 2, y + h / 2, ink, "center", 9);
});
}
function drawBars(ctx, play, p, sent, look) {
const most = Math.max(play.least, ...play.sent) || 1, scale = (p.bars - 4) / most;
words(ctx, p.bars > 110 ? "bytes sent, of all; least" : "sent", p.barsLeft, p.top - 11, look.muted);
for (let rank = 0; rank < p.ranks; rank++) {
const y = p.top + rank * p.row + 1, h = p.row - 5;
ctx.fillStyle = LOOKS.message[0];
ctx.fillRect(p.barsLeft, y, sent[rank] * scale, h);
ctx.strokeStyle = LOOKS.message[1];
ctx.lineWidth = 1;
if (play.sent[rank]) ctx.strokeRect(p.barsLeft + 0.5, y + 0.5, Math.max(0, play.sent[rank] * scale - 1), h - 1);
}
const x = p.barsLeft + play.least * scale;
ctx.strokeStyle = look.ink;
ctx.lineWidth = 1.5;
ctx.setLineDash([4, 3]);
ctx.beginPath();
ctx.moveTo(x, p.top - 3);
ctx.lineTo(x, p.top + p.ranks * p.row);
ctx.stroke();
ctx.setLineDash([]);
}
function drawStrip(ctx, play, p, t, width, look) {
const y = p.strip + 12, left = EDGE + 4, scale = (width - 2 * left) / play.time;
ctx.fillStyle = look.rule;
ctx.fillRect(left, y, width - 2 * left, 6);
ctx.fillStyle = look.focus;
ctx.fillRect(left, y, t * scale, 6);
ctx.fillStyle = look.muted;
for (const m of play.moments) ctx.fillRect(left + m * scale - 0.5, y + 8, 1, 4);
ctx.fillStyle = look.ink;
ctx.beginPath();
ctx.arc(left + t * scale, y + 3, 7, 0, 2 * Math.PI);
ctx.fill();
words(ctx, `0`, left, y + 19, look.muted);
words(ctx, `${short(play.time)} ${play.unit}`, width - left, y + 19, look.muted, "right");
}
function render({ model, el }) {
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
let t = 0, playing = 0, before = 0, speed = 1;
const play = () => model.get("play");
const view = frame(model, el, {
name: "collective",
hint: "Arrow keys step, space plays, Home and End go to the ends, plus and minus change the speed.",
height: (width) => places(play(), width).height,
draw(ctx, width, height, look) {
const now = play(), p = places(now, width), { cells, flying, sent } = stateAt(now, t);
drawCircle(ctx, now, p, t, flying, look);
const every = Math.ceil(24 / p.cell);
for (let c = 0; c < p.chunks; c += every) words(ctx, p.cell > 52 ? `chunk ${c}` : String(c), p.left + (c + 0.5) * p.cell - 1, p.top - 11, look.muted, "center");
for (let rank = 0; rank < p.ranks; rank++) {
words(ctx, `rank ${rank}`, p.left - 8, p.top + (rank + 0.5) * p.row - 1, look.ink, "right");
for (let c = 0; c < p.chunks; c++) {
const cell = cells[rank][c], goal = now.last[rank][c];
drawCell(ctx, now, p, rank, c, cell, cell && goal && cell[1] === goal[1] && (count(goal[1]) > 1 || t >= now.time), look);
}
}
for (const [, , rank, chunk] of addedAt(now, t)) {
ctx.strokeStyle = LOOKS.reduce[0];
ctx.lineWidth = 3;
ctx.strokeRect(p.left + chunk * p.cell + 1, p.top + rank * p.row + 1, p.cell - 4, p.row - 5);
words(ctx, "+", p.left + (chunk + 1) * p.cell - 9, p.top + rank * p.row + 8, "#fefefe", "center", 12);
}
for (const message of flying) drawMessage(ctx, p, message, t);
drawBars(ctx, now, p, sent, look);
drawStrip(ctx, now, p, t, width, look);
},
keys: {
ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => seek(0), End: () => seek(play().time),
" ": () => toggle(), "+": () => faster(2), "-": () => faster(0.5),
},
});
function seek(time, quiet) {
t = Math.max(0, Math.min(play().time, time));
if (!quiet) view.say(sentence(play(), t));
view.repaint();
}
function step(by) { stop(); seek(moment(play(), t, by)); }
function faster(by) {
speed = Math.max(0.25, Math.min(8, speed * by));
view.say(`speed ${speed}`);
}
function stop() {
cancelAnimationFrame(playing);
playing = 0;
button.textContent = "▶ play";
button.setAttribute("aria-label", "play");
}
function tick(now) {
const one = play(), seconds = Math.max(2, PACE * one.moments.length) / speed;
if (still) {
if (now - before > (1000 * PACE) / speed) { before = now; seek(moment(one, t, 1)); }
} else {
seek(t + (one.time * Math.min(100, now - before)) / 1000 / seconds, true);
before = now;
}
if (t >= one.time) { stop(); return view.say(sentence(one, t)); }
playing = requestAnimationFrame(tick);
}
function toggle() {
if (playing) { stop(); return view.say(sentence(play(), t)); }
if (t >= play().time) t = 0;
button.textContent = "❚❚ pause";
button.setAttribute("aria-label", "pause");
before = performance.now();
playing = requestAnimationFrame(tick);
}
const tools = [
["|◀", "to the beginning (Home)", () => { stop(); seek(0); }], ["◁", "one step back (left arrow)", () => step(-1)],
["▶ play", "play", toggle], ["▷", "one step on (right arrow)", () => step(1)], ["▶|", "to the end (End)", () => { stop(); seek(play().time); }],
].map(([label, title, run]) => make("button", { type: "button", title, "aria-label": title, onclick: run }, label));
const button = tools[2];
button.style.minWidth = "6em";
view.toolbar.prepend(...tools);
const inStrip = (event) => event.offsetY >= places(play(), view.canvas.clientWidth).strip;
const drag = (event) => { stop(); seek(((event.offsetX - EDGE - 4) / (view.canvas.clientWidth - 2 * EDGE - 8)) * play().time); };
view.listen(view.canvas, "pointerdown", (event) => {
if (!inStrip(event)) return;
view.canvas.setPointerCapture(event.pointerId);
drag(event);
});
view.listen(view.canvas, "pointermove", (event) => {
if (event.buttons && view.canvas.hasPointerCapture(event.pointerId)) return drag(event);
const p = places(play(), view.canvas.clientWidth), { cells, sent } = stateAt(play(), t);
const rank = Math.floor((event.offsetY - p.top) / p.row), chunk = Math.floor((event.offsetX - p.left) / p.cell);
if (rank < 0 || rank >= p.ranks) return view.tip(0, 0, null);
if (event.offsetX >= p.barsLeft) {
const out = play().links.filter((link) => link[0] === rank).map(([, target, , words]) => `to rank ${target}: ${words}`);
return view.tip(event.offsetX, event.offsetY, [`rank ${rank} sends ${play().words.sent[rank]}; the least: ${play().words.least}`, ...out.slice(0, 6)].join("\n"));
}
const cell = chunk >= 0 && chunk < p.chunks ? cells[rank][chunk] : null;
const parts = cell && [...Array(p.ranks).keys()].filter((r) => cell[1] & (1 << r)).join(", ");
view.tip(event.offsetX, event.offsetY, cell ? `rank ${rank}, chunk ${chunk}: ${cell[0]}\nparts of ranks ${parts}` : null);
});
view.listen(view.canvas, "pointerleave", () => view.tip(0, 0, null));
const changed = () => { stop(); seek(moment(play(), 0, 1)); };
model.on("change:play", changed);
if (!model.get("problem")) changed();
return () => { cancelAnimationFrame(playing); model.off("change:play", changed); view.dispose(); };
}
export default { render };
