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
const LEFT = 64, RIGHT = 12, TOP = 8, TALL = 120;
const KINDS = { F: "forward", R: "recompute", B: "backward" };
const DOES = { F: "forward through", R: "again forward through", B: "backward through" };
function spans(data) {
let before = 0;
return data.moves.map(([, , , , , end, during, after]) => {
const found = [before, end, during, after];
before = end;
return found;
});
}
function kept(data, k) {
const of = (kind) => data.lives.filter(([name, , first, last]) => name === kind && first <= k && k < last).map((life) => life[1]);
return { output: of("output"), saved: of("saved") };
}
function sentence(data, k) {
if (k < 0) return `before the first of ${data.moves.length} moves; nothing is kept`;
const [op, layer, saves, hands, drops, , during, after] = data.moves[k], { output, saved } = kept(data, k);
const does = [`${DOES[op]} layer ${layer}`];
if (op !== "B") does.push(saves ? "keeps what it saves" : "keeps nothing but its output");
if (op === "R" && !hands) does[1] = "keeps what it saves, not its output";
if (drops && op !== "B") does.push(`the output of layer ${layer - 1} is dropped`);
return `move ${k + 1} of ${data.moves.length}: ${does.join(", ")}; memory ${size(data, during)}, then ${size(data, after)}; ` +
`${some(output.length, "output")} and what ${some(saved.length, "layer")} saved are there`;
}
function size(data, amount) {
return data.unit === "MiB" ? `${short(amount / 2 ** 20)} MiB` : some(amount, "unit");
}
function some(count, what) {
return `${count} ${what}${count === 1 ? "" : "s"}`;
}
function row(count) {
return Math.max(8, Math.min(20, 340 / count));
}
function line(ctx, ink, width, dash, ...points) {
ctx.strokeStyle = ink;
ctx.lineWidth = width;
ctx.setLineDash(dash);
ctx.beginPath();
points.forEach(([x, y], k) => (k ? ctx.lineTo(x, y) : ctx.moveTo(x, y)));
ctx.stroke();
ctx.setLineDash([]);
}
function words(ctx, text, x, y, ink, align = "left", px = 11) {
ctx.fillStyle = ink;
ctx.font = `${px}px ${FONT}`;
ctx.textAlign = align;
ctx.textBaseline = "middle";
ctx.fillText(text, x, y);
}
function drawTape(ctx, data, at, h, look) {
const time = spans(data), dark = look.dark;
for (const [kind, layer, first, last] of data.lives) {
const x = at(time[first][1]), width = at(time[last][1]) - x, y = TOP + layer * h;
if (kind === "saved") {
ctx.fillStyle = fill(ctx, dark ? "#4d3a12" : "#fbe6b5", dark ? "#8a6a20" : "#c99a2e", "\\");
ctx.fillRect(x, y + 1, width, h - 2);
}
}
for (const [kind, layer, first, last] of data.lives) {
if (kind !== "output") continue;
const x = at(time[first][1]), end = at(time[last][1]), y = TOP + (layer + 0.5) * h;
line(ctx, dark ? "#7cc7f0" : "#0072B2", Math.max(2, h / 5), [], [x, y], [end, y]);
if (data.moves[last][0] === "B") continue;
const s = Math.min(4, h / 3);
line(ctx, look.warn, 1.5, [], [end - s, y - s], [end + s, y + s]);
line(ctx, look.warn, 1.5, [], [end - s, y + s], [end + s, y - s]);
}
data.moves.forEach(([op, layer, saves], k) => {
const [start, end] = time[k], x = at(start), width = Math.max(1, at(end) - x);
bar(ctx, KINDS[op], x, TOP + layer * h + 1, width, h - 2, width >= 12 && h >= 11 ? op : "");
if (op !== "B" && saves && width >= 4) {
ctx.fillStyle = LOOKS[KINDS[op]][2];
ctx.fillRect(x + 1, TOP + layer * h + h - 4, width - 2, 2);
}
});
}
function drawMemory(ctx, data, at, top, right, look) {
const time = spans(data), most = data.peak || 1, tall = TALL - 40, y = (amount) => top + tall - (amount / most) * (tall - 14);
const points = [[at(0), y(0)]];
for (const [start, end, during, after] of time) points.push([at(start), y(during)], [at(end), y(during)], [at(end), y(after)]);
ctx.fillStyle = look.dark ? "#1d3b4d" : "#d3e9f7";
ctx.beginPath();
points.forEach(([a, b], k) => (k ? ctx.lineTo(a, b) : ctx.moveTo(a, b)));
ctx.lineTo(points.at(-1)[0], y(0));
ctx.closePath();
ctx.fill();
line(ctx, look.dark ? "#7cc7f0" : "#0072B2", 1.5, [], ...points);
line(ctx, look.warn, 1, [5, 3], [LEFT, y(most)], [right, y(most)]);
words(ctx, `peak ${size(data, most)}`, right, y(most) - 8, look.warn, "right");
words(ctx, "memory", LEFT - 8, top + tall / 2, look.ink, "right");
for (const t of ticks(0, time.at(-1)[1], Math.max(2, (right - LEFT) / 90))) {
words(ctx, short(t), at(t), top + tall + 11, look.muted, "center");
}
words(ctx, data.clock, right, top + tall + 24, look.muted, "right");
}
function render({ model, el }) {
let k = -1, timer = 0, speed = 1;
const data = () => model.get("tape");
const right = (width) => width - RIGHT;
const scale = (width) => {
const end = data().moves.at(-1)[5];
return (t) => LEFT + ((right(width) - LEFT) * t) / end;
};
const view = frame(model, el, {
name: "checkpoint",
hint: "Arrow keys step, space plays, Home and End go to the ends, plus and minus change the speed.",
height: () => TOP + data().layers * row(data().layers) + TALL,
draw(ctx, width, height, look) {
const now = data(), h = row(now.layers), at = scale(width), bottom = TOP + now.layers * h;
const every = Math.ceil(12 / h);
for (let layer = 0; layer < now.layers; layer += every) words(ctx, `layer ${layer}`, LEFT - 8, TOP + (layer + 0.5) * h, look.muted, "right", 10);
for (let layer = 0; layer <= now.layers; layer++) line(ctx, look.rule, 0.5, [], [LEFT, TOP + layer * h], [right(width), TOP + layer * h]);
drawTape(ctx, now, at, h, look);
drawMemory(ctx, now, at, bottom + 6, right(width), look);
if (k < 0) return;
const [start, end] = spans(now)[k];
ctx.fillStyle = look.focus;
ctx.globalAlpha = 0.18;
ctx.fillRect(at(start), TOP, at(end) - at(start), height - TOP - 32);
ctx.globalAlpha = 1;
line(ctx, look.focus, 1.5, [], [at(end), TOP], [at(end), height - 34]);
},
keys: {
ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => go(-1), End: () => go(data().moves.length - 1), " ": () => toggle(),
"+": () => faster(2), "-": () => faster(0.5),
},
});
function seek(to) {
k = Math.max(-1, Math.min(data().moves.length - 1, to));
view.say(sentence(data(), k));
view.repaint();
}
function go(to) { stop(); seek(to); }
function step(by) { go(k + by); }
function stop() {
clearInterval(timer);
timer = 0;
button.textContent = "▶ play";
button.setAttribute("aria-label", "play");
}
function toggle() {
if (timer) return stop();
if (k >= data().moves.length - 1) k = -1;
button.textContent = "❚❚ pause";
button.setAttribute("aria-label", "pause");
timer = setInterval(() => { seek(k + 1); if (k >= data().moves.length - 1) stop(); }, Math.max(60, Math.min(500, 12000 / data().moves.length)) / speed);
}
function faster(by) {
speed = Math.max(0.25, Math.min(8, speed * by));
if (timer) { stop(); toggle(); }
view.say(`speed ${speed}`);
}
const tools = [
["|◀", "to the beginning (Home)", () => go(-1)], ["◁", "one move back (left arrow)", () => step(-1)], ["▶ play", "play", toggle],
["▷", "one move on (right arrow)", () => step(1)], ["▶|", "to the end (End)", () => go(data().moves.length - 1)],
].map(([label, title, run]) => make("button", { type: "button", title, "aria-label": title, onclick: run }, label));
const button = tools[2];
button.style.minWidth = "6em";
view.toolbar.prepend(...tools);
const moveAt = (event) => {
const end = data().moves.at(-1)[5], width = view.canvas.clientWidth;
const t = ((event.offsetX - LEFT) / (right(width) - LEFT)) * end;
return t < 0 || t > end ? -1 : data().moves.findIndex((move) => move[5] > t);
};
view.listen(view.canvas, "pointermove", (event) => {
const at = moveAt(event);
if (event.buttons) go(at);
view.tip(event.offsetX, event.offsetY, at >= 0 ? sentence(data(), at).replace(/; /g, "\n") : null);
});
view.listen(view.canvas, "pointerdown", (event) => go(moveAt(event)));
view.listen(view.canvas, "pointerleave", () => view.tip(0, 0, null));
const changed = () => { stop(); k = -1; view.say(""); view.repaint(); };
model.on("change:tape", changed);
return () => { clearInterval(timer); model.off("change:tape", changed); view.dispose(); };
}
export default { render };
