// Widgets of minipar_widgets/page.py in a page: controls as HTML, views by their own modules. What they show is said by
// Python; here it is only drawn.

import { make } from "../views/shared.js";

const TAGS = new Set("DIV SPAN P B I EM STRONG UL OL LI DL DT DD PRE CODE BR BUTTON".split(" "));
const ATTRIBUTES = /^(class|role|tabindex|title|hidden|type|aria-[a-z]+|data-[a-z]+)$/;

/** HTML as elements of a few kinds, with a few attributes: nothing in it can run, load or lead elsewhere. */
export function elements(html) {
  const copy = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    if (node.nodeType !== Node.ELEMENT_NODE || !TAGS.has(node.tagName)) return "";
    const made = document.createElement(node.tagName);
    for (const { name, value } of node.attributes) if (ATTRIBUTES.test(name)) made.setAttribute(name, value);
    made.append(...[...node.childNodes].map(copy));
    return made;
  };
  return [...new DOMParser().parseFromString(html, "text/html").body.childNodes].map(copy);
}

const STYLES = ["display", "visibility", "width", "min_width", "max_width", "height", "min_height", "flex", "flex_flow", "align_items", "margin"];

/** The part of Jupyter's model that views use; `ask(request)` brings what is set or sent to Python. */
function modelOf(id, ask) {
  const state = {}, heard = {};
  let fresh = {};
  return {
    get: (key) => state[key],
    set(key, value) { state[key] = value; fresh[key] = value; },
    save_changes() {
      ask({ do: "set", id, values: fresh });
      fresh = {};
    },
    send: (content) => ask({ do: "send", id, content }),
    on(event, run) { (heard[event] ??= []).push(run); },
    off(event, run) { heard[event] = (heard[event] ?? []).filter((other) => other !== run); },
    update(values) {
      Object.assign(state, values);
      for (const key of Object.keys(values)) for (const run of heard[`change:${key}`] ?? []) run();
    },
  };
}

function viewOf(id, kind, ask) {
  const name = kind.slice(5).replace(/[^a-z]/g, ""), model = modelOf(id, ask), el = make("div", { class: "mp-view" });
  for (const sheet of ["shared", name]) style(new URL(`../views/${sheet}.css`, import.meta.url).href);
  let drawn = null;
  return { el, update(state) {
    model.update(state);
    drawn ??= import(`../views/${name}.js`).then((module) => module.default.render({ model, el }));
  } };
}

const sheets = new Set();
function style(href) {
  if (sheets.has(href)) return;
  sheets.add(href);
  document.head.append(make("link", { rel: "stylesheet", href }));
}

/** A control with a label: `input` shows a state by `show(state)`, and says what it was set to by `values()`. */
function controlOf(id, ask, input, show, values, event = "input", after = []) {
  const name = make("span", { class: "mp-name" }), el = make("label", { class: "mp-control" }, name, input, ...after), all = {};
  input.addEventListener(event, () => ask({ do: "set", id, values: values() }));
  return { el, update(state) {
    Object.assign(all, state);
    name.textContent = all.description ?? "";
    input.setAttribute("aria-label", name.textContent);
    input.disabled = !!all.disabled;
    if (all.tooltip) input.title = all.tooltip;
    show(all, state);
  } };
}

/** A slider: `place` is where a value stands on it, `value` the other way round. */
function sliderOf(id, ask, ends, place, values) {
  const input = make("input", { type: "range" }), said = make("output");
  return controlOf(id, ask, input, (all) => {
    [input.min, input.max, input.step] = ends(all);
    if (document.activeElement !== input || !input.matches(":active")) input.value = place(all);
    said.textContent = all.said ?? all.options?.[all.index];
    input.setAttribute("aria-valuetext", said.textContent);
  }, () => values(+input.value), "input", [said]);
}

function selectOf(id, ask, several) {
  const input = make("select", { multiple: several });
  return controlOf(id, ask, input, (all, now) => {
    if (now.options) input.replaceChildren(...all.options.map((words) => make("option", {}, words)));
    const chosen = [all.index].flat();
    [...input.options].forEach((option, k) => { option.selected = chosen.includes(k); });
    if (several) input.size = all.rows;
  }, () => ({ index: several ? [...input.selectedOptions].map((one) => one.index) : input.selectedIndex }), "change");
}

function entryOf(id, ask, type) {
  const input = make("input", { type });
  return controlOf(id, ask, input, (all) => {
    if (type === "checkbox") input.checked = all.value;
    else if (type === "number") [input.min, input.max, input.step, input.value] = [all.min, all.max, "any", all.value];
    else input.value = all.value;
  }, () => ({ value: type === "checkbox" ? input.checked : type === "number" ? +input.value : input.value }), "change");
}

function chartOf() {
  const place = make("div", { role: "img" }), el = make("div", { class: "mp-chart" }, place);
  let waiting = null;
  const loaded = () => waiting ??= new Promise((done, failed) => document.head.append(make("script", {
    src: new URL("../plotly/plotly-basic.min.js", import.meta.url).href, onload: () => done(window.Plotly), onerror: failed })));
  return { el, async update({ outputs }) {
    const data = outputs?.[0]?.data, figure = data?.["application/vnd.plotly.v1+json"];
    el.hidden = !figure;
    if (!figure) return;
    place.setAttribute("aria-label", data["text/plain"]);
    const plotly = await loaded();
    plotly.react(place, figure.data, { ...figure.layout, font: { ...figure.layout.font, color: getComputedStyle(el).color } }, { displayModeBar: false, responsive: true });
  } };
}

function boxOf(kind, nodes) {
  const folds = kind === "Accordion", title = make("summary"), inside = folds ? make("div") : null;
  const el = folds ? make("details", { class: "mp-fold" }, title, inside) : make("div", { class: `mp-box mp-${kind.toLowerCase()}` });
  return { el, update({ children, titles }) {
    if (titles) title.textContent = titles.join(", ");
    if (children) (inside ?? el).replaceChildren(...children.map((id) => nodes.get(id).el));
  } };
}

function htmlOf() {
  const el = make("div", { class: "mp-html" });
  return { el, update({ value }) { if (value !== undefined) el.replaceChildren(...elements(value)); } };
}

function nodeOf(id, kind, ask, nodes) {
  if (kind.startsWith("view:")) return viewOf(id, kind, ask);
  const plain = (value) => ({ value });
  switch (kind) {
    case "IntSlider": case "FloatSlider": return sliderOf(id, ask, (all) => [all.min, all.max, all.step], (all) => all.value, plain);
    case "FloatLogSlider": {
      let base = 10;
      return sliderOf(id, ask, (all) => { base = all.base; return [all.min, all.max, all.step]; }, (all) => Math.log(all.value) / Math.log(all.base), (at) => ({ value: base ** at }));
    }
    case "SelectionSlider": return sliderOf(id, ask, (all) => [0, all.options.length - 1, 1], (all) => all.index, (index) => ({ index }));
    case "Dropdown": return selectOf(id, ask, false);
    case "SelectMultiple": return selectOf(id, ask, true);
    case "BoundedIntText": case "BoundedFloatText": return entryOf(id, ask, "number");
    case "Checkbox": return entryOf(id, ask, "checkbox");
    case "Text": return entryOf(id, ask, "text");
    case "HTML": return htmlOf();
    case "Output": return chartOf();
    case "Box": case "HBox": case "VBox": case "Accordion": return boxOf(kind, nodes);
    default: throw new Error(`no widget ${kind}`);
  }
}

/** A tree of widgets in `place`; `draw(changes)` as Page.changes() gives them, the root last. */
export function treeOf(place, ask) {
  style(new URL("../views/folding.css", import.meta.url).href);
  const nodes = new Map();
  return { draw(changes) {
    for (const { id, kind, state } of changes) {
      if (!nodes.has(id)) nodes.set(id, nodeOf(id, kind, ask, nodes));
      const node = nodes.get(id);
      node.update(state);
      for (const name of STYLES) if (name in (state.layout ?? {})) node.el.style.setProperty(name.replaceAll("_", "-"), state.layout[name]);
      if (state.classes) node.el.classList.add(...state.classes);
      if (id === changes.at(-1).id && !node.el.parentElement) place.replaceChildren(node.el);
    }
  } };
}

/** A button that copies the page's address; where that is not allowed, `say` gets the address. */
export function copyButton(say) {
  const words = "copy the link to this", button = make("button", { type: "button", class: "mp-copy", onclick: copy }, words);
  const done = () => { button.textContent = "copied"; setTimeout(() => { button.textContent = words; }, 1500); };
  function copy() { (navigator.clipboard?.writeText(location.href) ?? Promise.reject()).then(done, () => say(location.href)); }
  return button;
}
