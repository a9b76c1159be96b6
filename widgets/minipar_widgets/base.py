"""What all widgets share: a view that the browser draws, and the text, table and picture that replace it elsewhere.

    class Ring(View):
        name = "ring"                         # js/ring.js (joined with what it imports), js/ring.css
        data = traitlets.Bytes(b"").tag(sync=True)

        def summary(self): ...                # four methods: the same content as text, as a table, as a picture
        ...

One output holds a widget in three forms: live (with a kernel), a PNG (without one: GitHub, nbconvert), and one
deterministic line of text (nbval). If a widget cannot show something, it sets `problem`, and shows that text instead.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from minipar_widgets import addresses, words
from minipar_widgets.arguments import one_of
from minipar_widgets.host import PAGE, anywidget, traitlets, ui
from minipar_widgets.inline import SOURCES, inline
from minipar_widgets.naming import EXPLORER, Names, page_head

_VIEW = "application/vnd.jupyter.widget-view+json"


class Shown:
    """The forms of a widget besides the live one. Subclasses implement the first four methods."""

    problem: str = ""  # the reason why there is nothing to see; empty if there is something
    titled: ClassVar[bool] = False  # whether its part of a page has a heading of its own

    def summary(self) -> str:
        """One line, the same on every run. It is the text/plain output, and the label for screen readers."""
        raise NotImplementedError

    def caption(self) -> str:
        """What the picture shows, in a sentence or two."""
        raise NotImplementedError

    def picture(self, dark: bool | None = False) -> bytes:
        """The widget as a PNG, twice as fine as a page; None: for light and dark pages (see `words.ANY`)."""
        raise NotImplementedError

    def rows(self) -> list[list[str]]:
        """The numbers as a table, the header first."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self._line()

    def _line(self) -> str:
        return f"{type(self).__name__}: {self.problem}" if self.problem else self.summary()

    def _png(self, dark: bool | None = False) -> bytes:
        return words.picture(self.problem, dark) if self.problem else self.picture(dark)

    def static(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The output without the live widget: PNG with its alternative text, and the line. Where nothing can draw a
        PNG, as in JupyterLite without NumPy, the line alone."""
        line = self._line()
        try:
            png = self._png(None)
        except ImportError:
            return {"text/plain": line}, {}
        data = {"image/png": base64.b64encode(png).decode(), "text/plain": line}
        return data, {"image/png": {"alt": line, "width": int.from_bytes(png[16:20], "big") // words.FINE}}

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data, about = self.static()
        if live():
            data[_VIEW] = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}  # type: ignore[attr-defined]
        return data, about

    def address(self) -> dict[str, str]:
        """What a link to this state says: names and texts."""
        return {}

    def follow(self, words: Mapping[str, str]) -> None:
        """Show the state of a link. Errors: PlanError for what cannot be."""
        one_of("address", next(iter(words), ""), ("",))

    def show(self, static: bool | None = None) -> None:
        """Display the widget. `static=True`, or MINIPAR_STATIC=1, shows only the picture, as without a kernel."""
        from IPython.display import display

        data, about = self._repr_mimebundle_()
        if static:
            data.pop(_VIEW, None)
        display(data, metadata=about, raw=True)

    def section(self, place: str = "widget") -> str:
        """The widget's part of an HTML page; `place` is an id that nothing else on the page has."""
        raise NotImplementedError

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One self-contained page that works without network and kernel; or, if `path` is given, the path that it was
        written to."""
        line = escape(self._line())
        head = "" if self.titled else page_head(f"<h1>{line}</h1>", "head")
        text = _PAGE.format(title=line, body=head + self.section())
        if path is None:
            return text
        Path(path).write_text(text, encoding="utf-8")
        return os.fspath(path)


class View(Shown, anywidget.AnyWidget):
    """A widget that the browser draws. It gets the data as traits; it sends no zoom and no pointer to the kernel.

    Subclasses set `name`, add traits, and call `refresh()` when their data have changed.
    """

    name: ClassVar[str]
    problem: Any = traitlets.Unicode("").tag(sync=True)
    label = traitlets.Unicode("").tag(sync=True)  # = summary(), for screen readers
    caption_text = traitlets.Unicode("").tag(sync=True)
    table: Any = traitlets.List().tag(sync=True)

    def __init_subclass__(cls, **options: Any) -> None:
        if "name" in cls.__dict__ and not PAGE:  # (a page has the files themselves)
            cls._esm = inline(SOURCES / f"{cls.name}.js")
            styles = (SOURCES / f"{name}.css" for name in ("shared", cls.name))
            cls._css = "".join(path.read_text(encoding="utf-8") for path in styles if path.exists())
        super().__init_subclass__(**options)

    def refresh(self) -> None:
        """Send the texts that belong to the data: label, caption and table."""
        with self.hold_sync():
            self.label = self._line()
            self.caption_text = "" if self.problem else self.caption()
            self.table = [] if self.problem else self.rows()

    def state(self) -> dict[str, Any]:
        """What the browser receives from this widget: the widget's own traits, by name."""
        inherited = set(anywidget.AnyWidget.class_traits())
        return {key: value for key, value in self.get_state().items() if key not in inherited and key[0] != "_"}

    def section(self, place: str = "widget") -> str:
        plain = {key: _plain(value) for key, value in self.state().items()}
        text = json.dumps(plain, separators=(",", ":"))
        data = text.replace("<", "\\u003c")  # (also <!--, after which </script> would not end the script)
        module = self._esm.replace("export default {", "const widget = {").replace("</script", "<\\/script")
        script = module + _MODEL.replace("PLACE", place).replace("STATE", data)
        words = f"<noscript><p>{escape(self._line())}</p></noscript>"
        return (
            f'<style>{self._css}</style>\n<div id="{place}">{words}</div>\n<script type="module">\n{script}</script>\n'
        )


class Explorer(Shown, ui.VBox):
    """Controls and views together: sliders change settings, Python computes, views redraw.

    Subclasses fill `children`. `view` is the first view among them: unless a subclass overrides them, its texts and
    picture are the explorer's own. `views` are those that a page without a kernel can show; `settings` gives the
    values of the controls, by name.
    """

    titled = True
    view: View
    controls: Mapping[str, Any] = {}

    def __init__(self, children: Sequence[ui.Widget] = (), **options: Any) -> None:
        names = [] if PAGE else [Names(layout={"margin": "0"})]
        super().__init__([*children, *names], **options)
        self.add_class(EXPLORER)

    @property
    def views(self) -> Sequence[View]:
        """The views among the children, in order."""
        return [child for child in _descendants(self) if isinstance(child, View)]

    def address(self) -> dict[str, str]:
        return {
            name: addresses.said(control)
            for name, control in self.controls.items()
            if not control.disabled and control.layout.display != "none"
        }

    def follow(self, words: Mapping[str, str]) -> None:
        for name in words:
            one_of("address", name, tuple(self.controls))
        for name, control in self.controls.items():
            if name in words:
                control.value = addresses.heard(control, name, words[name])

    def settings(self) -> dict[str, str]:
        """The values of the controls as text, for a page where they cannot be moved."""
        return {}

    def parts(self) -> dict[str, str]:
        """What a page says beside the views, by name, as HTML."""
        return {"line": escape(self._line()), "settings": facts(self.settings())}

    def summary(self) -> str:
        return self.view.summary()

    def caption(self) -> str:
        return self.view.caption()

    def picture(self, dark: bool | None = False) -> bytes:
        return self.view.picture(dark)

    def rows(self) -> list[list[str]]:
        return self.view.rows()

    def section(self, place: str = "widget") -> str:
        head = ""
        for name, html in self.parts().items():
            tag = "h1" if name == "line" else "div"
            head += f'<{tag} data-part="{place} {name}">{html}</{tag}>\n'
        views = "".join(view.section(f"{place}-{k}") for k, view in enumerate(self.views))
        return page_head(head, f"{place}-head") + views


NOTE = "minipar-note"  # the CSS class of a text of several lines


def beside(button: ui.Button, note: ui.HTML) -> ui.Box:
    """A button with a text of some lines beside it, or below it where there is little room."""
    note.layout = {"flex": "1 1 240px", "min_width": "0"}
    note.add_class(NOTE)
    return ui.Box(
        [ui.HTML(f"<style>.{NOTE} .widget-html-content {{ line-height: 1.4; }}</style>"), button, note],
        layout={"flex_flow": "row wrap", "align_items": "center", "width": "100%"},
    )


def real(code: str, *parts: ui.Widget) -> tuple[ui.Widget, ...]:
    """Parts of an explorer that need real ranks; in a page, in their place, how to get these."""
    if not PAGE:
        return parts
    how = "On real ranks: <code>pip install minipar</code>, and in a notebook"
    return (ui.HTML(f"<p>{how} <code>from minipar_widgets import *; {escape(code)}</code></p>"),)


def facts(values: Mapping[str, str]) -> str:
    """Names and values as HTML; nothing if there are none."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    return f"<dl>{items}</dl>" if items else ""


def live() -> bool:
    """Whether a notebook's page may draw the widget: true in a kernel, unless MINIPAR_STATIC=1."""
    if os.environ.get("MINIPAR_STATIC", "") not in ("", "0"):
        return False
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def _descendants(widget: ui.Widget) -> list[ui.Widget]:
    found = []
    for child in getattr(widget, "children", ()):
        found += [child, *([] if isinstance(child, View) else _descendants(child))]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": base64.b64encode(value).decode()}
    return value


# The part of Jupyter's widget model that a view's module uses. The braces keep its names out of the page's scope.
_MODEL = """{
const state = STATE, heard = {};
for (const [key, value] of Object.entries(state)) {
  if (value?.base64 === undefined) continue;
  const text = atob(value.base64), bytes = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);
  state[key] = new DataView(bytes.buffer);
}
const model = {
  get: (key) => state[key],
  set(key, value) { this.update({ [key]: value }); },
  update(values) {
    Object.assign(state, values);
    for (const key of Object.keys(values)) for (const run of heard["change:" + key] ?? []) run();
  },
  on(event, run) { (heard[event] ??= []).push(run); },
  off(event, run) { heard[event] = (heard[event] ?? []).filter((other) => other !== run); },
  save_changes() {}, send() {},
};
const el = document.getElementById("PLACE");
el.model = model; // for the controls of the page
widget.render({ model, el });
}
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0 auto; max-width: 1200px; padding: 1rem; background: #fff; color: #1a1a1a;
  font: 15px/1.5 system-ui, sans-serif; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #161616; color: #ececec; }} }}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
