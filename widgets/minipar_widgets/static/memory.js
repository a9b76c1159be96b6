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
const ROW = 46, LEFT = 98;
function bytes(count) {
for (const [unit, whole] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
if (Math.abs(count) >= whole) return `${(count / whole).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })} ${unit}`;
}
return `${Math.round(count).toLocaleString("en")} B`;
}
function lines(ctx, text, width) {
const found = [""];
for (const word of text.split(" ")) {
const longer = found.at(-1) ? `${found.at(-1)} ${word}` : word;
if (found.at(-1) && ctx.measureText(longer).width > width) found.push(word);
else found[found.length - 1] = longer;
}
return found;
}
function sentence(data, group, kind) {
const one = data.groups[group];
if (kind < 0) {
const share = ((100 * one.total) / data.capacity).toFixed(1);
return `${one.label}: ${bytes(one.total)} in all, ${share} % of ${data.device}` + (one.host ? `; ${bytes(one.host)} on the host` : "");
}
const [name, size, formula, filled, note, measured] = one.terms[kind];
return `${one.label}, ${name}: ${bytes(size)} = ${filled} (${formula}). ${note}.` + (measured == null ? "" : ` Measured: ${bytes(measured)}.`);
}
function write(ctx, text, x, y, ink, { size = 12, align = "left", bold = false } = {}) {
ctx.fillStyle = ink;
ctx.font = `${bold ? "bold " : ""}${size}px ${FONT}`;
ctx.textAlign = align;
ctx.textBaseline = "middle";
ctx.fillText(text, x, y);
}
function block(ctx, kind, x, y, width, height) {
const [face, mark] = MEMORY[kind];
ctx.fillStyle = fill(ctx, face, "#333333", mark);
ctx.fillRect(x, y, width, height);
if (width < 2) return;
ctx.strokeStyle = "#444444";
ctx.lineWidth = 0.8;
ctx.strokeRect(x, y, width, height);
}
function diamond(ctx, x, y, look) {
ctx.fillStyle = "#D55E00";
ctx.strokeStyle = look.paper;
ctx.lineWidth = 1.5;
ctx.beginPath();
for (const [dx, dy] of [[0, -7], [7, 0], [0, 7], [-7, 0]]) ctx[dy === -7 ? "moveTo" : "lineTo"](x + dx, y + dy);
ctx.closePath();
ctx.fill();
ctx.stroke();
}
function render({ model, el }) {
let group = 0, kind = -1;
const data = () => model.get("data");
const wide = (width) => width >= 700;
const view = frame(model, el, {
name: "memory",
hint: "Up and down choose ranks, left and right a kind.",
height: (width) => 66 + (wide(width) ? ROW : ROW + 26) * data().groups[group].terms.length,
draw(ctx, width, height, look) {
const now = data(), one = now.groups[group], row = wide(width) ? ROW : ROW + 26;
const bars = (wide(width) ? 0.34 * width : width - 16) - LEFT, right = wide(width) ? LEFT + bars + 84 : LEFT;
const most = Math.max(...one.terms.map((term) => Math.max(term[1], term[5] ?? 0)), 1);
write(ctx, `${one.worst ? "the worst: " : ""}${one.label}`, 6, 12, look.ink, { bold: true });
const whole = Math.max(one.total, Math.min(now.capacity, 3 * one.total), one.measured ?? 0), scale = (width - 20 - LEFT) / whole;
let x = LEFT;
write(ctx, "together", LEFT - 8, 36, look.ink, { align: "right" });
for (const [name, size] of one.terms) { block(ctx, name, x, 27, size * scale, 18); x += size * scale; }
if (now.capacity <= whole) {
ctx.strokeStyle = look.warn;
ctx.lineWidth = 2;
ctx.setLineDash([5, 3]);
ctx.beginPath();
ctx.moveTo(LEFT + now.capacity * scale, 20);
ctx.lineTo(LEFT + now.capacity * scale, 50);
ctx.stroke();
ctx.setLineDash([]);
const text = `${now.device} ${bytes(now.capacity)}`, left = LEFT + now.capacity * scale > width / 2;
write(ctx, text, LEFT + now.capacity * scale + (left ? -4 : 4), 14, look.warn, { size: 11, align: left ? "right" : "left" });
}
const share = `${bytes(one.total)}, ${((100 * one.total) / now.capacity).toFixed(1)} % of ${now.device}`;
if (now.capacity > whole) write(ctx, share, Math.max(x, LEFT + (one.measured ?? 0) * scale) + 12, 36, look.ink);
if (one.measured != null) diamond(ctx, LEFT + one.measured * scale, 36, look);
one.terms.forEach(([name, size, formula, filled, , measured], k) => {
const y = 62 + k * row;
if (k === kind) {
ctx.fillStyle = look.focus;
ctx.globalAlpha = 0.14;
ctx.fillRect(0, y - 4, width, row - 2);
ctx.globalAlpha = 1;
}
write(ctx, name, LEFT - 8, y + 9, look.ink, { align: "right" });
const length = (size / most) * (bars - 84 * !wide(width));
block(ctx, name, LEFT, y, length, 18);
if (measured != null) diamond(ctx, LEFT + (measured / most) * (bars - 84 * !wide(width)), y + 9, look);
write(ctx, bytes(size), LEFT + length + 10, y + 9, look.ink);
ctx.font = `12px ${FONT}`;
const below = wide(width) ? y + 2 : y + 30;
write(ctx, `${formula}`, right, below, look.muted);
const text = lines(ctx, `= ${filled}`, width - right - 8).slice(0, 2);
text.forEach((line, n) => write(ctx, line, right, below + 16 + 15 * n, look.ink));
});
},
keys: {
ArrowDown: () => choose(group + 1, kind), ArrowUp: () => choose(group - 1, kind),
ArrowRight: () => choose(group, kind + 1), ArrowLeft: () => choose(group, kind - 1), Home: () => choose(0, -1),
End: () => choose(data().groups.length - 1, kind),
},
});
const select = make("select", { "aria-label": "ranks", onchange: () => choose(+select.value, kind) });
view.toolbar.prepend(select);
function choose(to, which) {
group = Math.max(0, Math.min(data().groups.length - 1, to));
kind = Math.max(-1, Math.min(data().groups[group].terms.length - 1, which));
select.value = String(group);
view.say(sentence(data(), group, kind));
view.repaint();
}
view.listen(view.canvas, "pointermove", (event) => {
const row = wide(view.canvas.clientWidth) ? ROW : ROW + 26, k = Math.floor((event.offsetY - 58) / row);
const term = event.offsetY > 58 && data().groups[group].terms[k];
view.tip(event.offsetX, event.offsetY, term ? `${term[0]}: ${short(term[1])} bytes\n${term[4]}` : null);
});
view.listen(view.canvas, "pointerleave", () => view.tip(0, 0, null));
view.listen(view.canvas, "click", (event) => {
const row = wide(view.canvas.clientWidth) ? ROW : ROW + 26;
choose(group, event.offsetY > 58 ? Math.floor((event.offsetY - 58) / row) : -1);
});
const changed = () => {
const now = data();
select.replaceChildren(...now.groups.map((one, k) => make("option", { value: k }, `${one.worst ? "worst: " : ""}${one.label}`)));
choose(Math.min(group, now.groups.length - 1), kind);
};
model.on("change:data", changed);
if (!model.get("problem")) changed();
return () => { model.off("change:data", changed); view.dispose(); };
}
export default { render };
