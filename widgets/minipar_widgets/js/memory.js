// The formulas of memory, for one group of ranks that are alike: a bar of each kind, beside it the formula in letters and
// with numbers, and all of them together against the capacity. Up and down go through the groups, Tab-like left and right
// through the kinds.
import { fill, FONT, frame, make, MEMORY, short } from "./shared.js";

const ROW = 46, LEFT = 98;

/** Bytes in words, as minipar.prediction.memory_terms.size says them. */
export function bytes(count) {
  for (const [unit, whole] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(count) >= whole) return `${(count / whole).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })} ${unit}`;
  }
  return `${Math.round(count).toLocaleString("en")} B`;
}

/** A text in lines of at most `width` pixels, broken at blanks. */
export function lines(ctx, text, width) {
  const found = [""];
  for (const word of text.split(" ")) {
    const longer = found.at(-1) ? `${found.at(-1)} ${word}` : word;
    if (found.at(-1) && ctx.measureText(longer).width > width) found.push(word);
    else found[found.length - 1] = longer;
  }
  return found;
}

/** The chosen kind of a group in words; kind -1 is all of them together. */
export function sentence(data, group, kind) {
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
    help: [["← →", "the kind before, the kind after"], ["↑ ↓", "the ranks above, the ranks below"], ["Home End", "the fullest ranks, the last ranks"]],
    height: (width) => 66 + (wide(width) ? ROW : ROW + 26) * data().groups[group].terms.length,
    draw(ctx, width, height, look) {
      const now = data(), one = now.groups[group], row = wide(width) ? ROW : ROW + 26;
      const bars = (wide(width) ? 0.34 * width : width - 16) - LEFT, right = wide(width) ? LEFT + bars + 84 : LEFT;
      const most = Math.max(...one.terms.map((term) => Math.max(term[1], term[5] ?? 0)), 1);
      const title = `${one.worst ? "the worst: " : ""}${one.label}`;
      write(ctx, title, 6, 12, look.ink, { bold: true });
      // all together against the capacity
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
        ctx.lineTo(LEFT + now.capacity * scale, 48);
        ctx.stroke();
        ctx.setLineDash([]);
        const text = `${now.device} ${bytes(now.capacity)}`, at = LEFT + now.capacity * scale, left = at > width / 2;
        ctx.font = `bold 12px ${FONT}`;
        const beside = 6 + ctx.measureText(title).width + 12 < at - (left ? 4 + 6.4 * text.length : 0);
        write(ctx, text, at + (left ? -4 : 4), beside ? 14 : 53, look.warn, { size: 11, align: left ? "right" : "left" });
      }
      const percent = `${((100 * one.total) / now.capacity).toFixed(1)} %`, end = Math.max(x, LEFT + (one.measured ?? 0) * scale) + 12;
      ctx.font = `12px ${FONT}`;
      const share = [`${bytes(one.total)}, ${percent} of ${now.device}`, `${bytes(one.total)}, ${percent}`, percent].find((text) => end + ctx.measureText(text).width < width);
      if (now.capacity > whole && share) write(ctx, share, end, 36, look.ink);
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
        const end = Math.max(length, measured == null ? 0 : (measured / most) * (bars - 84 * !wide(width)));
        write(ctx, bytes(size), LEFT + end + 10, y + 9, look.ink);
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
