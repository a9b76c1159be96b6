// The timeline: lanes per rank and stream. First form: all bars, no zoom.
import { bar, FONT, frame, ticks } from "./shared.js";

function column(model, key, Type) {
  const view = model.get(key);
  const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
  return new Type(bytes.slice().buffer);
}

function render({ model, el }) {
  const view = frame(model, el, {
    name: "timeline",
    height: () => 40 + 24 * model.get("about").lanes.length,
    draw(ctx, width, height, look) {
      const about = model.get("about");
      const start = column(model, "start", Float64Array), length = column(model, "length", Float32Array);
      const kind = column(model, "kind", Uint8Array), number = column(model, "number", Int32Array);
      const left = 90, scale = (width - left - 10) / about.span;
      ctx.font = `11px ${FONT}`;
      about.lanes.forEach(([, rank, stream, first, last], row) => {
        const y = 4 + 24 * row;
        ctx.fillStyle = look.ink;
        ctx.font = `11px ${FONT}`;
        ctx.textAlign = "left";
        ctx.textBaseline = "middle";
        ctx.fillText(`${rank} ${stream}`, 2, y + 10);
        for (let k = first; k < last; k++) {
          const text = number[k] >= 0 ? String(number[k]) : "";
          bar(ctx, about.kinds[kind[k]], left + start[k] * scale, y, Math.max(1, length[k] * scale), 20, text);
        }
      });
      ctx.fillStyle = look.muted;
      for (const t of ticks(0, about.span, 8)) ctx.fillText(String(t), left + t * scale, height - 10);
    },
  });
  model.on("change:start", view.repaint);
  return () => { model.off("change:start", view.repaint); view.dispose(); };
}

export default { render };
