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
const KINDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
function moved(words, k, to) {
const rest = words.filter((_, at) => at !== k);
rest.splice(to, 0, words[k]);
return rest;
}
function split(words, k) {
const [letter, tail] = [words[k][0], words[k].slice(1)];
if (letter === "B") return words.flatMap((word, at) => (at === k ? [`I${tail}`, `W${tail}`] : [word]));
const other = words.indexOf((letter === "I" ? "W" : "I") + tail);
if (letter === "F" || other < 0) return words;
const [input, weight] = letter === "I" ? [k, other] : [other, k];
return words.map((word, at) => (at === input ? `B${tail}` : word)).filter((_, at) => at !== weight);
}
function laid(board) {
let time = 0;
for (const row of board.ranks) for (const b of row) if (b.end != null) time = Math.max(time, b.end);
const stop = time;
const rows = board.ranks.map((row) => {
let now = row.every((b) => b.end == null) && !stop ? 0 : stop;
return row.map((b) => {
const runs = b.end != null;
const [start, end] = runs ? [b.start, b.end] : [now, now + b.takes];
if (!runs) now = end;
time = Math.max(time, end);
return { ...b, start, end, runs };
});
});
return { rows, time: time || 1, stop };
}
function target(row, k, time) {
return row.filter((b, at) => at !== k && (b.start + b.end) / 2 < time).length;
}
function nearest(row, time) {
let best = 0;
for (let k = 1; k < row.length; k++) {
const far = (b) => Math.max(b.start - time, time - b.end, 0);
if (far(row[k]) < far(row[best])) best = k;
}
return best;
}
function linked(rows, rank, k) {
const me = rows[rank][k], last = Math.max(...rows.flat().map((b) => b.stage));
const find = (letters, stage) => rows.flatMap((row, r) => row.flatMap((b, at) =>
(letters.includes(b.word[0]) && b.stage === stage && b.microbatch === me.microbatch ? [[r, at]] : [])));
const s = me.stage, letter = me.word[0];
if (letter === "F") return { needs: find("F", s - 1), feeds: s === last ? find("BI", s) : find("F", s + 1) };
if (letter === "W") return { needs: find("I", s), feeds: [] };
const whole = { needs: s === last ? find("F", s) : find("BI", s + 1), feeds: find("BI", s - 1) };
return letter === "I" ? { ...whole, feeds: [...whole.feeds, ...find("W", s)] } : whole;
}
function story(rows, time, whole) {
const parts = rows.map((row, rank) => {
const b = row.find((one) => one.runs && one.start <= time + 1e-9 && time < one.end - 1e-9);
return `rank ${rank} ${b ? b.word : row.some((one) => one.runs && one.end > time + 1e-9) ? "waits" : "is done"}`;
});
return `time ${short(time)} of ${short(whole)}: ${parts.join(" · ")}`;
}
function moments(rows, whole) {
const starts = rows.flat().filter((b) => b.runs).map((b) => b.start);
return [...new Set([...starts, whole])].sort((a, b) => a - b);
}
const LANE = 36, LEFT = 58, RIGHT = 14, TOP = 6, AXIS = 34;
const wordsOf = (board) => board.ranks.map((row) => row.map((b) => b.word));
const named = (b, rank) => `${b.word}: ${KINDS[b.word[0]]} of micro-batch ${b.microbatch}, stage ${b.stage}, on rank ${rank}`;
function render({ model, el }) {
let board = model.get("board"), order = wordsOf(board), id = board.id;
let place = laid(board), chosen = null, drag = null, waiting = null, late = 0, clock = null, ticking = 0;
const first = order, past = [], undone = [];
const editable = () => model.get("editable");
const view = frame(model, el, {
name: "schedule editor", draw, hint: "Arrow keys select, Shift and arrow moves, S splits or joins a backward, space plays.",
height: () => TOP + LANE * board.ranks.length + AXIS,
keys: {
ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => climb(-1), ArrowDown: () => climb(1),
Home: () => choose(chosen?.[0] ?? 0, 0), End: () => choose(chosen?.[0] ?? 0, 1e9),
Tab: () => next(1), "Shift+Tab": () => next(-1), Escape: () => view.canvas.blur(),
"Shift+ArrowLeft": () => nudge(-1), "Shift+ArrowRight": () => nudge(1), s: halve, z: undo, y: redo, " ": play,
".": jump,
},
});
const verdict = make("div", { class: "mp-verdict", "aria-live": "polite" });
const [why, code] = ["where", "code"].map((label) => make("pre", { class: "mp-why", tabindex: 0, "aria-label": label }));
const copy = make("button", { type: "button", onclick: () => navigator.clipboard.writeText(code.textContent) }, "copy");
view.readout.before(verdict, why);
view.root.append(make("details", {}, make("summary", {}, "the order as code"), copy, code));
const player = view.button("▶ play", "play (space)", play);
view.button("step", "go to the next start (.)", jump);
const edits = [
view.button("undo", "undo (z)", undo), view.button("redo", "redo (y)", redo),
view.button("split / join", "split a backward into its halves, or join them (s)", halve),
view.button("reset", "back to the first order", () => change(first)),
];
const x = (time, width) => LEFT + (time / place.time) * (width - LEFT - RIGHT);
const at = (px, width) => ((px - LEFT) / (width - LEFT - RIGHT)) * place.time;
const y = (rank) => TOP + rank * LANE;
function draw(ctx, width, height, look) {
const bottom = TOP + LANE * place.rows.length;
ctx.font = `12px ${FONT}`;
ctx.textBaseline = "middle";
ctx.lineWidth = 1;
const until = board.reason ? place.stop : place.time;
for (const t of ticks(0, until, ((width - LEFT) / 60) * (until / place.time))) {
ctx.fillStyle = look.rule;
ctx.fillRect(Math.round(x(t, width)), TOP, 1, bottom - TOP);
ctx.fillStyle = look.muted;
ctx.textAlign = "center";
ctx.fillText(short(t), x(t, width), bottom + 11);
}
ctx.fillStyle = look.muted;
ctx.textAlign = "right";
const axis = until ? `time in units of the forward${until < place.time ? "; dashed: never runs" : ""}` : "in order, without times";
ctx.fillText(axis, width - RIGHT, bottom + 26);
place.rows.forEach((row, rank) => {
ctx.fillStyle = look.ink;
ctx.font = `12px ${FONT}`;
ctx.textAlign = "left";
ctx.textBaseline = "middle";
ctx.fillText(`rank ${rank}`, 4, y(rank) + LANE / 2);
row.forEach((b, k) => block(ctx, b, rank, k, x(b.start, width), x(b.end, width), look));
});
if (board.reason && place.stop) rule(ctx, x(place.stop, width), bottom, look.warn, [4, 3]);
if (chosen) arrows(ctx, width, look);
if (drag?.to != null) {
const others = place.rows[drag.rank].filter((_, k) => k !== drag.k), before = others[drag.to - 1], after = others[drag.to];
const gap = before ? (after ? (before.end + after.start) / 2 : before.end) : after?.start ?? 0;
ctx.fillStyle = look.focus;
ctx.fillRect(x(gap, width) - 2, y(drag.rank) - 1, 4, LANE + 1);
const b = place.rows[drag.rank][drag.k], wide = x(b.end, width) - x(b.start, width);
ctx.globalAlpha = 0.8;
block(ctx, { ...b, guilty: false }, drag.rank, -1, drag.x - wide / 2, drag.x + wide / 2, look);
ctx.globalAlpha = 1;
}
if (clock != null) rule(ctx, x(clock, width), bottom, look.ink, []);
}
function block(ctx, b, rank, k, from, to, look) {
const top = y(rank) + 3, tall = LANE - 6, wide = Math.max(2, to - from - 1), { word } = b;
const lifted = drag?.to != null && drag.rank === rank && drag.k === k;
if (b.runs) {
ctx.globalAlpha = lifted ? 0.25 : clock != null && b.start > clock + 1e-9 ? 0.4 : 1;
bar(ctx, KINDS[word[0]], from, top, wide, tall);
} else {
ctx.globalAlpha = 0.25;
ctx.fillStyle = LOOKS[KINDS[word[0]]][0];
ctx.fillRect(from, top, wide, tall);
ctx.globalAlpha = 1;
ctx.setLineDash([3, 2]);
outline(ctx, from, top, wide, tall, look.muted, 1);
ctx.setLineDash([]);
}
ctx.fillStyle = b.runs ? LOOKS[KINDS[word[0]]][2] : look.ink;
ctx.textAlign = "center";
ctx.textBaseline = "middle";
const middle = from + wide / 2, centre = top + tall / 2;
if (wide >= 4 + 6.5 * word.length) text(ctx, word, middle, centre, 11);
else if (wide >= 2 + 5.2 * (word.length - 1)) {
text(ctx, word[0], middle, centre - 5, 9);
text(ctx, word.slice(1), middle, centre + 6, 9);
}
ctx.globalAlpha = 1;
if (b.guilty) {
outline(ctx, from, top, wide, tall, look.warn, 3);
ctx.fillStyle = look.warn;
text(ctx, "!", from + wide - 6, top + 8, "bold 13");
}
if (clock != null && b.runs && b.start <= clock + 1e-9 && clock < b.end) outline(ctx, from, top, wide, tall, look.ink, 2);
if (chosen?.[0] === rank && chosen[1] === k) {
outline(ctx, from + 3, top + 3, wide - 6, tall - 6, look.paper, 4);
outline(ctx, from + 2, top + 2, wide - 4, tall - 4, look.focus, 2.5);
}
}
function text(ctx, words, left, top, size) {
ctx.font = `${size}px ${FONT}`;
ctx.fillText(words, left, top);
}
function outline(ctx, left, top, wide, tall, colour, width) {
ctx.strokeStyle = colour;
ctx.lineWidth = width;
ctx.strokeRect(left, top, wide, tall);
}
function rule(ctx, left, bottom, colour, dash) {
ctx.strokeStyle = colour;
ctx.lineWidth = 1.5;
ctx.setLineDash(dash);
ctx.beginPath();
ctx.moveTo(left, TOP);
ctx.lineTo(left, bottom);
ctx.stroke();
ctx.setLineDash([]);
}
function arrows(ctx, width, look) {
const [rank, k] = chosen;
if (!place.rows[rank]?.[k]) return;
const { needs, feeds } = linked(place.rows, rank, k);
const point = ([r, at], end) => [x(place.rows[r][at][end], width), y(r) + LANE / 2];
const links = [...needs.map((one) => [one, chosen, []]), ...feeds.map((one) => [chosen, one, [3, 3]])];
ctx.strokeStyle = ctx.fillStyle = look.wire;
ctx.lineWidth = 2;
for (const [a, b, dash] of links) {
const [x0, y0] = point(a, "end"), [x1, y1] = point(b, "start"), angle = Math.atan2(y1 - y0, x1 - x0);
const turned = (by) => [x1 + 9 * Math.cos(angle + by), y1 + 9 * Math.sin(angle + by)];
ctx.setLineDash(dash);
ctx.beginPath();
ctx.moveTo(x0, y0);
ctx.lineTo(x1, y1);
ctx.stroke();
ctx.setLineDash([]);
ctx.beginPath();
ctx.moveTo(x1, y1);
ctx.lineTo(...turned(2.7));
ctx.lineTo(...turned(-2.7));
ctx.fill();
}
}
function choose(rank, k) {
const row = place.rows[rank];
if (!row?.length) return;
chosen = [rank, Math.max(0, Math.min(k, row.length - 1))];
const b = row[chosen[1]];
const when = b.runs ? `${short(b.start)} to ${short(b.end)}` : "never runs";
view.say(`${named(b, rank)}, place ${chosen[1] + 1} of ${row.length}, ${when}${b.guilty ? ", complained of" : ""}`);
view.repaint();
}
const step = (by) => (chosen ? choose(chosen[0], chosen[1] + by) : choose(0, 0));
function climb(by) {
if (!chosen) return choose(0, 0);
const rank = chosen[0] + by, b = place.rows[chosen[0]][chosen[1]];
if (place.rows[rank]) choose(rank, nearest(place.rows[rank], (b.start + b.end) / 2));
}
function next(by) {
if (!chosen) return choose(by > 0 ? 0 : place.rows.length - 1, by > 0 ? 0 : 1e9);
let [rank, k] = [chosen[0], chosen[1] + by];
if (!place.rows[rank][k]) { rank += by; k = by > 0 ? 0 : 1e9; }
if (!place.rows[rank]) { chosen = null; view.repaint(); return false; }
choose(rank, k);
}
function may() {
if (!editable()) view.say("No kernel is here to verify a change: this page can only be played.");
return editable();
}
function send(ranks) {
if (waiting) { waiting = ranks; return; }
waiting = ranks;
model.set("order", { id: ++id, ranks });
model.save_changes();
clearTimeout(late);
late = setTimeout(() => view.say("The kernel has not answered yet."), 3000);
}
function keep(ranks) {
past.push(ranks);
undone.length = 0;
}
function change(ranks, remember = true) {
if (!may() || JSON.stringify(ranks) === JSON.stringify(order)) return;
if (remember) keep(order);
order = ranks;
stop();
send(ranks);
}
const with_ = (ranks, rank, words) => ranks.map((row, r) => (r === rank ? words : row));
function nudge(by) {
if (!chosen) return;
const [rank, k] = chosen, to = k + by;
if (to < 0 || to >= order[rank].length || !editable()) return void may();
chosen = [rank, to];
change(with_(order, rank, moved(order[rank], k, to)));
}
function halve() {
if (!chosen) return view.say("Select a backward first, or one of its halves.");
const [rank, k] = chosen;
change(with_(order, rank, split(order[rank], k)));
}
function again(from, to) {
if (!from.length || !may()) return;
to.push(order);
change(from.pop(), false);
}
function undo() { again(past, undone); }
function redo() { again(undone, past); }
function stop() {
cancelAnimationFrame(ticking);
ticking = 0;
player.textContent = "▶ play";
}
function show(time) {
clock = time;
view.say(story(place.rows, time, place.stop));
view.repaint();
}
function play() {
if (ticking) return stop();
const whole = place.stop, from = clock == null || clock >= whole ? 0 : clock;
if (!whole) return view.say("Nothing runs, so there is nothing to play.");
if (matchMedia("(prefers-reduced-motion: reduce)").matches) return jump();
const begin = performance.now(), speed = whole / Math.max(3000, Math.min(15000, 300 * place.rows.flat().length));
player.textContent = "❚❚ pause";
const tick = (now) => {
const time = Math.min(whole, from + Math.max(0, now - begin) * speed);
show(time);
ticking = time < whole ? requestAnimationFrame(tick) : 0;
if (!ticking) { stop(); clock = null; view.repaint(); }
};
ticking = requestAnimationFrame(tick);
}
function jump() {
stop();
const to = moments(place.rows, place.stop).find((t) => t > (clock ?? -1) + 1e-9);
if (to != null) return show(to);
clock = null;
view.repaint();
}
function hit(event) {
const box = view.canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
const rank = Math.floor((py - TOP) / LANE), time = at(px, box.width);
const k = place.rows[rank]?.findIndex((b) => b.start <= time && time < b.end) ?? -1;
return { px, py, rank, k, time };
}
view.listen(view.canvas, "pointerdown", (event) => {
const { rank, k, px } = hit(event);
if (k < 0) { chosen = null; view.repaint(); return; }
choose(rank, k);
drag = { rank, k, from: px, to: null, base: order };
view.canvas.setPointerCapture(event.pointerId);
});
view.listen(view.canvas, "pointermove", (event) => {
const { px, py, rank, k, time } = hit(event);
view.canvas.style.cursor = drag ? "grabbing" : k >= 0 && editable() ? "grab" : "default";
if (!drag) return view.tip(px, py, k >= 0 ? named(place.rows[rank][k], rank) : null);
if (drag.to == null && Math.abs(px - drag.from) < 4) return;
if (!may()) { drag = null; return; }
view.tip(0, 0, null);
drag.x = px;
const to = target(place.rows[drag.rank], drag.k, time);
if (to !== drag.to) {
drag.to = to;
if (to !== drag.k || drag.asked) {
drag.asked = true;
send(with_(drag.base, drag.rank, moved(drag.base[drag.rank], drag.k, to)));
}
}
view.repaint();
});
const drop = (event) => {
if (!drag) return;
const { rank, k, to, base } = drag;
const taken = event.type === "pointerup" && to != null;
drag = null;
if (taken && to !== k) {
chosen = [rank, to];
keep(base);
order = with_(base, rank, moved(base[rank], k, to));
}
if (to != null) send(order);
view.repaint();
};
view.listen(view.canvas, "pointerup", drop);
view.listen(view.canvas, "pointercancel", drop);
view.listen(view.canvas, "pointerleave", () => view.tip(0, 0, null));
function words() {
verdict.textContent = board.reason ? `✗ cannot run: ${board.reason}` : `✓ ${board.facts}`;
verdict.dataset.wrong = !!board.reason;
why.textContent = board.details;
why.hidden = !board.details;
code.textContent = board.code;
for (const button of edits) button.disabled = !editable();
}
function answered() {
const answer = model.get("board");
clearTimeout(late);
board = answer;
const newest = waiting, found = wordsOf(answer);
waiting = null;
if (answer.id > id) {
[id, order, chosen] = [answer.id, found, null];
past.length = undone.length = 0;
} else if (newest && JSON.stringify(newest) !== JSON.stringify(found)) send(newest);
words();
if (drag) return;
place = laid(board);
clock = null;
if (chosen && place.rows[chosen[0]]?.[chosen[1]]) choose(...chosen);
view.repaint();
}
model.on("change:board", answered);
model.on("change:editable", words);
words();
return () => { stop(); clearTimeout(late); model.off("change:board", answered); model.off("change:editable", words); view.dispose(); };
}
export default { render };
