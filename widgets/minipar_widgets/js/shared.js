// What all widgets share: colours and theme, the frame around a drawing (toolbar, readout, table, saving), SVG output.
//
//   import { frame, LOOKS, bar } from "./shared.js";
//   function render({ model, el }) {
//     const view = frame(model, el, {
//       name: "ring",                                 // of saved files
//       height: (width) => 200,                       // CSS pixels
//       draw(ctx, width, height, look) { ... },       // a 2d context, or one that writes SVG: look.ink, look.paper, ...
//       keys: { ArrowRight() { ... }, "+"() { ... } },   // return false to leave a key to the notebook
//       help: [["← →", "the step before, or after"]],    // what ? shows, beside the keys of all views
//     });
//     model.on("change:data", view.repaint);
//     return view.dispose;                            // (the frame shows model's problem, caption, label and table)
//   }
//   export default { render };
//
// A key means the same in all views:
//
//   ← →   the one before, the one after       Shift ← →   move: the block, or the window
//   ↑ ↓   the row above, the row below        Home End    the first (or all), the last
//   + -   zoom in, zoom out                   space       play or pause; , and . one step; < and > slower, faster
//   Tab   the next one; Escape lets go        Enter z y   choose, take back, do again
//   t     the same as a table                 ?           the keys of this view
//
// The functions without a document are pure, and tested by shared.test.mjs.

const wire = (hatch, letter) => ["#CC79A7", "#8f3f6c", "#fefefe", hatch, letter];
const PLAIN = {
  "forward": ["#0072B2", "#004a75", "#fefefe", "", "F"],
  "backward": ["#E69F00", "#7a5300", "#201400", "", "B"],
  "input gradient": ["#F6CF78", "#7a5300", "#201400", "", "I"],
  "weight gradient": ["#8F5F00", "#5c3d00", "#fefefe", "", "W"],
  "recompute": ["#56B4E9", "#1f6d9c", "#201400", "", "R"],
  "optimizer step": ["#009E73", "#00664a", "#fefefe", "", "S"],
  "reduce": ["#009E73", "#00664a", "#fefefe", "", "+"],
  "message": wire("/", "M"),
  "receive": ["#8f3f6d", "#8f3f6d", "#fefefe", "", "r"],
  "collective": wire("+", "C"),
  "all-reduce": wire("x", "AR"),
  "reduce-scatter": wire("\\", "RS"),
  "all-gather": wire("|", "AG"),
  "all-to-all": wire("-", "AA"),
  "copy": ["#9a9a9a", "#6a6a6a", "#fefefe", "", "c"],
};

/** A look in the shade of a chunk: dark for even chunks, light for odd ones; from chunk 1 on with bands of the other tone. */
export function shaded([face, edge, ink, hatch, letter], shade) {
  const light = `#${[1, 3, 5].map((k) => mixed(parseInt(face.slice(k, k + 2), 16))).join("")}`, bands = (shade + 1) >> 1;
  return shade % 2 ? [light, edge, "#201400", hatch, letter, bands, face] : [face, edge, ink, hatch, letter, bands, light];
}
const mixed = (c) => Math.floor(c + (255 - c) * 0.55 + 0.5).toString(16).padStart(2, "0").toUpperCase();

const CHUNKS = [1, 2, 3].flatMap((shade) => Object.keys(PLAIN).slice(0, 5).map((kind) => [`${kind} ${shade}`, shaded(PLAIN[kind], shade)]));

/**
 * Colours by kind, as in minipar/trace/figure.py: face, edge, ink on it, hatch, letter; of the kinds with a shade
 * (`forward 1` is a forward of chunk 1) also how many bands, and their colour. A test holds the two equal.
 */
export const LOOKS = { ...PLAIN, ...Object.fromEntries(CHUNKS) };

/** What a chunk or direction looks like in a legend. After the fourth chunk the last two looks repeat. */
export const sample = (k) => shaded(["#7a7a7a", "#4d4d4d", "#fefefe", "", ""], k < 4 ? k : 2 + (k % 2));

/** A comparison: how long an instruction took against the other trace. As in figure.py. */
export const DIFFERENCES = [["much shorter", "#332288"], ["shorter", "#9F98CF"], ["alike", "#C8C8C8"], ["longer", "#F0B58A"], ["much longer", "#D55E00"]];

/** Colours of memory by kind; the hatch is the second channel. */
export const MEMORY = {
  "parameters": ["#0072B2", ""],
  "gradients": ["#E69F00", "/"],
  "optimizer": ["#009E73", "\\"],
  "activations": ["#56B4E9", ""],
  "buffers": ["#CC79A7", "x"],
  "data": ["#999933", ""],
  "temporary": ["#9a9a9a", "/"],
};

export const FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";

const LIGHT = { ink: "#1a1a1a", muted: "#5c5c5c", rule: "#dcdcdc", paper: "#ffffff", wire: "#8f3f6d", focus: "#0072B2", warn: "#b04a00" };
const DARK = { ink: "#ececec", muted: "#aaaaaa", rule: "#3a3a3a", paper: "#161616", wire: "#e3b1cd", focus: "#56B4E9", warn: "#ff9d5c" };

/** Whether a colour of the form #rrggbb is dark. */
export function isDark(hex) {
  const [r, g, b] = [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b < 128;
}

/** Colours for the page around an element: on JupyterLab's paper or VS Code's, or light or dark as the system says. */
export function theme(el) {
  const style = getComputedStyle(el), ctx = document.createElement("canvas").getContext("2d");
  const named = style.getPropertyValue("--jp-layout-color0") || style.getPropertyValue("--vscode-editor-background");
  ctx.fillStyle = named.trim(); // a canvas gives any colour back as #rrggbb, if nothing shines through
  const known = named && ctx.fillStyle[0] === "#";
  const dark = known ? isDark(ctx.fillStyle) : matchMedia("(prefers-color-scheme: dark)").matches;
  const look = { ...(dark ? DARK : LIGHT), dark };
  if (known) look.paper = ctx.fillStyle;
  return look;
}

// Kept, since making one takes far longer than writing a number with it.
const FORMS = [3, 2, 1].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }));

/** Numbers with about four digits, never in powers of ten. */
export function short(x) {
  const size = Math.abs(x);
  if (!size) return "0";
  if (size < 0.001) return x.toFixed(6);
  return FORMS[size < 10 ? 0 : size < 100 ? 1 : 2].format(x);
}

/** Round steps for an axis: at most `most` multiples of 1, 2 or 5 times a power of ten within [from, to]. */
export function ticks(from, to, most) {
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
const MARKS = { "/": UP, "\\": DOWN, "x": UP + DOWN, "|": "M3 0V6", "-": "M0 1.5H6M0 4.5H6", "+": "M3 0V6M0 3H6" };

/** A context with the calls of canvas that widgets use, which writes SVG. `toString()` gives the picture. */
export function svgContext(width, height, title = "") {
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
    clip() {
      const id = `clip${++clips}-${width}x${height}`;
      parts.push(`<clipPath id="${id}"><path d="${path.join("")}"/></clipPath>`);
      parts.push(`<g clip-path="url(#${id})">`);
      open.push((open.pop() ?? 0) + 1);
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
  const alpha = () => (ctx.globalAlpha < 1 ? ` opacity="${n2(ctx.globalAlpha)}"` : "");
  const lines = () => ` stroke="${ctx.strokeStyle}" stroke-width="${n2(ctx.lineWidth)}"${dash ? ` stroke-dasharray="${dash}"` : ""}${alpha()}`;
  return ctx;
}

const patterns = new Map();

/** A fill style: the face, hatched if a mark is given. Its tile is as fine as the canvas. */
export function fill(ctx, face, edge, mark) {
  if (!mark) return face;
  if (ctx.hatch) return ctx.hatch(mark, face, edge);
  const fine = Math.max(1, Math.ceil(ctx.getTransform().a)), key = face + edge + mark + fine;
  if (!patterns.has(key)) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6 * fine;
    const c = tile.getContext("2d");
    c.scale(fine, fine);
    c.fillStyle = face;
    c.fillRect(0, 0, 6, 6);
    c.strokeStyle = edge;
    c.lineWidth = 0.8;
    c.stroke(new Path2D(MARKS[mark]));
    patterns.set(key, tile);
  }
  const pattern = ctx.createPattern(patterns.get(key), "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / fine));
  return pattern;
}

/** A filled rectangle. */
export function drawRect(ctx, colour, x, y, width, height, alpha = 1) {
  ctx.globalAlpha = alpha;
  ctx.fillStyle = colour;
  ctx.fillRect(x, y, width, height);
  ctx.globalAlpha = 1;
}

/** The edge of a rectangle, inside it. */
export function drawEdge(ctx, colour, x, y, width, height, thick = 1) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = thick;
  ctx.strokeRect(x + thick / 2, y + thick / 2, Math.max(0, width - thick), Math.max(0, height - thick));
}

/** Words at a point: `align` left, center or right of it, their middle at y; `weight` is "bold " or nothing; `halo` a colour around them. */
export function drawText(ctx, words, x, y, colour, align = "left", size = 11, weight = "", halo = "") {
  ctx.fillStyle = colour;
  ctx.font = `${weight}${size}px ${FONT}`;
  ctx.textAlign = align;
  ctx.textBaseline = "middle";
  if (halo && ctx.strokeText) {
    ctx.strokeStyle = halo;
    ctx.lineJoin = "round";
    ctx.lineWidth = 3;
    ctx.strokeText(words, x, y);
  }
  ctx.fillText(words, x, y);
}

/** The bands at the lower edge of a later chunk's bar. */
export function drawBands(ctx, [, , , , , bands, tone], x, y, width, height) {
  for (let k = 0; k < (bands ?? 0) && height >= 9; k++) drawRect(ctx, tone, x + 1, y + height - 4 - 4 * k, Math.max(0, width - 2), 2);
}

/** A bar of a kind with its edge, and its text where there is room for it. */
export function bar(ctx, kind, x, y, width, height, text = "") {
  const [face, rim, ink, hatch] = LOOKS[kind];
  drawRect(ctx, fill(ctx, face, rim, hatch), x, y, width, height);
  drawBands(ctx, LOOKS[kind], x, y, width, height);
  if (width >= 3) drawEdge(ctx, rim, x, y, width, height);
  if (text && height >= 9 && width >= 4 + 6.2 * text.length) drawText(ctx, text, x + width / 2, y + height / 2 + 0.5, ink, "center", Math.min(11, height - 1));
}

/** Words in lines of at most so many letters. */
export function wrapped(text, most) {
  const lines = [];
  for (const part of text.split("\n")) {
    let line = "";
    for (const word of part.split(" ")) {
      if (line && line.length + 1 + word.length > most) { lines.push(line); line = word; }
      else line = line ? `${line} ${word}` : word;
    }
    lines.push(line);
  }
  return lines;
}

/** The first of some texts that is not wider than `width` pixels; or the last one, cut. */
export function fit(ctx, texts, width, size) {
  ctx.font = `${size}px system-ui`;
  const found = texts.find((text) => ctx.measureText(text).width <= width);
  let text = found ?? texts.at(-1);
  if (found != null || !text) return text;
  while (text.length > 2 && ctx.measureText(`${text}…`).width > width) text = text.slice(0, -1);
  return `${text}…`;
}

/** An element with attributes and children; `on...` are listeners. */
export function make(tag, attributes = {}, ...children) {
  const el = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) el.setAttribute(name, value === true ? "" : value);
  }
  el.append(...children);
  return el;
}

/** An HTML table of rows of text, the header first. */
export function table(rows, label) {
  const number = (k) => rows.slice(1).every((row) => /^[-+\d.,\s%x]*$/.test(row[k] ?? ""));
  const right = (rows[0] || []).map((_, k) => (number(k) ? "mp-n" : null));
  const line = (cells, tag) => make("tr", {}, ...cells.map((c, k) => make(tag, { class: right[k], scope: tag === "th" && "col" }, String(c))));
  return make("table", { "aria-label": label }, make("thead", {}, ...rows.slice(0, 1).map((r) => line(r, "th"))),
    make("tbody", {}, ...rows.slice(1).map((r) => line(r, "td"))));
}

/** A key as a screen reader says it. */
export function spoken(key) {
  const names = { "←": "left", "→": "right", "↑": "up", "↓": "down", "+": "plus", "-": "minus", ",": "comma", ".": "dot", "<": "less than", ">": "greater than", "?": "question mark" };
  return key.split(" ").map((part) => names[part] ?? part).join(" ");
}

/** Tools that the toolbar's one line has no room for wait behind its last button. */
function oneLine(toolbar, more) {
  const tools = [...toolbar.children].slice(0, -1), below = (one) => one.offsetTop >= toolbar.offsetTop + 20; // (a tool is 24 pixels high)
  for (const one of tools) one.style.display = "";
  more.hidden = true;
  more.hidden = !tools.some(below);
  if (more.ariaExpanded === "true") return;
  for (const one of tools.reverse()) if (below(more)) one.style.display = "none";
}

function download(content, type, name) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/**
 * The frame of a widget in `el`: toolbar, drawing, readout for screen readers, caption, table. See the top of the file.
 *
 * It reads the traits `problem` (shown in the drawing's place), `label`, `caption` and `table` of the model, and follows
 * them. `canvas: false` gives an empty `stage` for other content. What comes back:
 * root, stage, canvas, toolbar (one line: what has no room waits behind its last button), repaint() in the next frame, paint() at once, say(text) in the readout,
 * tip(x, y, text or null) beside the pointer, button(label, title, run), listen(target, event, run), dispose().
 */
export function frame(model, el, { name, height, draw, keys = {}, canvas = true, hint = "", help = [] }) {
  const ends = [];
  const get = (trait, other) => model.get(trait) ?? other;
  const toolbar = make("div", { class: "mp-toolbar", role: "toolbar", "aria-label": `${name} tools` });
  const stage = make("div", { class: "mp-stage" });
  const readout = make("div", { class: "mp-readout", "aria-live": "polite" });
  const caption = make("div", { class: "mp-caption" });
  const holder = make("div", { class: "mp-table", hidden: true, tabindex: 0, role: "region", "aria-label": "the same as a table" });
  const problem = make("div", { class: "mp-problem", role: "alert", hidden: true });
  const tipbox = make("div", { class: "mp-tip", hidden: true });
  const lines = help.length ? [...help, ["t", "the same as a table"], ["?", "these keys"]] : [];
  const card = make("dl", { class: "mp-keys", hidden: true, tabindex: -1, "aria-label": "keys" },
    ...lines.map(([key, what]) => make("div", {}, make("dt", {}, make("kbd", {}, key)), make("dd", {}, what))));
  hint ||= lines.length ? `${lines.map(([key, what]) => `${spoken(key)}: ${what}`).join("; ")}.` : "";
  const root = make("div", { class: "minipar" }, toolbar, card, problem, stage, readout, caption, holder);
  const surface = canvas ? make("canvas", { tabindex: 0, role: "application" }) : null;
  if (surface) stage.append(surface);
  stage.append(tipbox);
  el.append(root);

  const listen = (target, event, run, options) => {
    target.addEventListener(event, run, options);
    ends.push(() => target.removeEventListener(event, run, options));
  };
  let general = null; // the first tool that all views have: those of this view stand before it
  const button = (label, title, run, pressed, before = general) => {
    const made = make("button", { type: "button", title, "aria-label": title, "aria-pressed": pressed?.toString(), onclick: run }, label);
    toolbar.insertBefore(made, before);
    return made;
  };
  const more = button("⋯", "more tools", () => {
    more.ariaExpanded = more.ariaExpanded === "false";
    oneLine(toolbar, more);
  });
  more.ariaExpanded = false;

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
  const restyle = () => { // (what is in no page yet has none of its colours)
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
    root.dataset.wrong = !!wrong; // nothing of what was shown before stands beside the reason why there is nothing now
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
    general = button("PNG", "save PNG", () => picture("png"), undefined, more);
    button("SVG", "save SVG", () => picture("svg"), undefined, more);
  }
  const asTable = button("table", "show as table", () => {
    holder.hidden = !holder.hidden;
    asTable.setAttribute("aria-pressed", !holder.hidden);
    if (!holder.hidden) fillTable();
  }, "false", more);
  general ??= asTable;
  const asKeys = lines.length ? button("?", "show the keys (?)", () => {
    card.hidden = !card.hidden;
    asKeys.setAttribute("aria-pressed", !card.hidden);
  }, "false", more) : null;

  // in the next frame, since a size that changes while sizes are told is an error of the page
  const arrange = () => requestAnimationFrame(() => oneLine(toolbar, more));
  new MutationObserver(arrange).observe(toolbar, { childList: true, characterData: true, subtree: true });

  listen(root, "keydown", (event) => { // of sliders, lists and buttons, which a notebook would take for its commands
    if (event.target !== surface && !event.ctrlKey && !event.metaKey && !event.altKey && !(event.shiftKey && event.key === "Enter")) event.stopPropagation();
  });
  if (surface) {
    if (asKeys) keys = { t: () => asTable.click(), "?": () => asKeys.click(), ...keys };
    listen(surface, "keydown", (event) => {
      const run = keys[(event.shiftKey && event.key.length > 1 ? "Shift+" : "") + event.key];
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (run && run(event) !== false) event.preventDefault();
      if (run || event.key.length === 1) event.stopPropagation(); // or the notebook would take letters for commands
    });
  }
  for (const trait of ["problem", "label", "caption_text", "table"]) {
    const event = `change:${trait}`;
    model.on(event, words);
    ends.push(() => model.off(event, words));
  }
  const sizes = new ResizeObserver(() => {
    arrange();
    if (look) repaint();
    else restyle();
  });
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
      const wide = stage.clientWidth; // asked before anything changes: no layout for the pointer to wait for
      if (tipbox.textContent !== text) tipbox.textContent = text;
      tipbox.style = `top:${y + 14}px;${x > wide / 2 ? `right:${wide - x + 4}` : `left:${x + 12}`}px`;
    },
    dispose() { for (const end of ends) end(); root.remove(); },
  };
}

/** The arrays of packing.py, by the name of their numbers' type in a layout. */
export const ARRAYS = { f8: Float64Array, f4: Float32Array, u4: Uint32Array, u2: Uint16Array, i4: Int32Array, u1: Uint8Array };

/** The arrays that packing.py put into one binary trait; without a copy, unless the bytes are not aligned. */
export function unpack(view, layout) {
  const { buffer, byteOffset } = view.byteOffset % 8 ? new Uint8Array(view.buffer, view.byteOffset, view.byteLength).slice() : view;
  const found = {};
  for (const [name, [type, at, count]] of Object.entries(layout)) found[name] = new ARRAYS[type](buffer, byteOffset + at, count);
  return found;
}
