"""Views in a page without Jupyter: Python runs in a worker, and the page draws what it is told (site/js/live.js).

    shown = Page(ScheduleExplorer())
    shown.changes()                  what the page does not know yet: all at first, then what has changed
    shown.set(3, {"value": 8})       a control was moved; then changes() has what follows

A widget is values by name, and those who observe them. `Widget` and the controls have the names and the behaviour of
traitlets and ipywidgets, so far as the views use them (host.py). What a control shows is
made here; the page only draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, ClassVar

Heard = Callable[[dict[str, Any]], None]


class Trait:
    """A value of a widget that the page is told of."""

    def __init__(self, default: Any = None) -> None:
        self.default = default

    def tag(self, **_: Any) -> Trait:
        return self

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, widget: Widget | None, _: type) -> Any:
        return self if widget is None else widget.values.setdefault(self.name, copy(self.default))

    def __set__(self, widget: Widget, value: Any) -> None:
        old, new = self.__get__(widget, type(widget)), widget.fitted(self.name, value)
        if type(old) is type(new) and old == new:
            return
        widget.values[self.name] = new
        for name, handler in widget.heard:
            if name == self.name:
                handler({"owner": widget, "name": name, "old": old, "new": new})


def Bytes(default: bytes = b"") -> Trait:
    return Trait(default)


def Unicode(default: str = "") -> Trait:
    return Trait(default)


def Bool(default: bool = False) -> Trait:
    return Trait(default)


def Dict() -> Trait:
    return Trait({})


def List() -> Trait:
    return Trait([])


class Layout:
    """Properties of style by name; one that is not set is None."""

    def __init__(self, **given: str) -> None:
        vars(self).update(given)

    def __getattr__(self, name: str) -> None:
        return None


class Widget:
    """Values by name. Subclasses declare them as class attributes."""

    first: ClassVar[tuple[str, ...]] = ()  # names of the arguments that need no name
    layout, style, description, tooltip, icon = Trait(), Trait({}), Trait(""), Trait(""), Trait("")
    disabled, continuous_update = Trait(False), Trait(True)

    def __init__(self, *given: Any, layout: Mapping[str, str] | None = None, **named: Any) -> None:
        self.values: dict[str, Any] = {"layout": Layout(**(layout or {}))}
        self.heard: list[tuple[str, Heard]] = []
        self.messages: list[Callable[[Any, Any, Any], None]] = []
        self.clicks: list[Callable[[Any], None]] = []
        self.classes: list[str] = []
        values = named | dict(zip(self.first, given, strict=False))
        for name in sorted(values, key=_value_last):
            setattr(self, name, values[name])

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, Layout(**value) if name == "layout" and isinstance(value, dict) else value)

    def fitted(self, name: str, value: Any) -> Any:
        """What a value becomes: the nearest one that is possible."""
        return value

    @classmethod
    def class_traits(cls) -> dict[str, Trait]:
        return {name: one for base in cls.__mro__ for name, one in vars(base).items() if isinstance(one, Trait)}

    def has_trait(self, name: str) -> bool:
        return name in self.class_traits()

    def observe(self, handler: Heard, names: str) -> None:
        self.heard.append((names, handler))

    def on_msg(self, handler: Callable[[Any, Any, Any], None]) -> None:
        self.messages.append(handler)

    def on_click(self, handler: Callable[[Any], None]) -> None:
        self.clicks.append(handler)

    def add_class(self, name: str) -> None:
        self.classes.append(name)

    @contextlib.contextmanager
    def hold_sync(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        """(Nothing: the page forgets what it no longer shows.)"""

    def get_state(self) -> dict[str, Any]:
        """What the page is told."""
        return {name: getattr(self, name) for name in self.class_traits()}


class AnyWidget(Widget):
    """A view, which draws itself: js/<name>.js."""

    name: ClassVar[str] = ""


class Box(Widget):
    first = ("children",)
    children = Trait(())


class HBox(Box):
    pass


class VBox(Box):
    pass


class Accordion(Box):
    titles = Trait(())


class HTML(Widget):
    first = ("value",)
    value = Trait("")


class Text(Widget):
    first = ("value",)
    value = Trait("")


class Checkbox(Widget):
    first = ("value",)
    value, indent = Trait(False), Trait(True)


class Button(Widget):
    pass


class Output(Widget):
    outputs = Trait(())


class Number(Widget):
    """A number from `min` to `max`; others become the nearest one."""

    first = ("value", "min", "max", "step")
    value, min, max, step, readout_format = Trait(0), Trait(0), Trait(100), Trait(1), Trait("")
    whole: ClassVar[bool] = False

    def fitted(self, name: str, value: Any) -> Any:
        if name in ("min", "max") and "value" in self.values:
            self.values[name] = value
            self.value = self.value  # (it may be outside now)
        if name != "value":
            return value
        value = min(max(value, self.least), self.most)
        return round(value) if self.whole else float(value)

    @property
    def least(self) -> float:
        return self.min

    @property
    def most(self) -> float:
        return self.max

    def get_state(self) -> dict[str, Any]:
        said = f"{self.value:{self.readout_format}}" if self.readout_format else f"{self.value:g}"
        return {**super().get_state(), "said": said}


class IntSlider(Number):
    whole = True


class IntProgress(Number):
    whole = True


class BoundedIntText(Number):
    whole = True


class BoundedFloatText(Number):
    pass


class FloatSlider(Number):
    step = Trait(0.1)


class FloatLogSlider(Number):
    """A number base ** x, for an x from `min` to `max`."""

    base = Trait(10.0)

    @property
    def least(self) -> float:
        return self.base**self.min

    @property
    def most(self) -> float:
        return self.base**self.max


class Selection(Widget):
    """One of some options; an option is a value, or a pair of a text and a value."""

    options, value = Trait(()), Trait()

    def fitted(self, name: str, value: Any) -> Any:
        if name == "options":
            self.values[name] = value
            if self.choices:
                self.value = self.choices[0]
        elif name == "value" and value not in self.choices:
            raise ValueError(f"{self.description}: {value!r} is none of the options")
        return value

    @property
    def choices(self) -> list[Any]:
        """The values."""
        return [one[1] if isinstance(one, tuple) else one for one in self.options]

    @property
    def labels(self) -> list[str]:
        return [str(one[0] if isinstance(one, tuple) else one) for one in self.options]

    @property
    def index(self) -> Any:
        """Where the value stands among the options."""
        return self.choices.index(self.value)

    @index.setter
    def index(self, at: Any) -> None:
        self.value = self.choices[at]

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "options": self.labels, "index": self.index, "value": None}


class Dropdown(Selection):
    pass


class SelectionSlider(Selection):
    pass


class SelectMultiple(Selection):
    """Some of the options."""

    rows = Trait(3)

    def fitted(self, name: str, value: Any) -> Any:
        return tuple(value) if name == "value" else value

    @property
    def index(self) -> Any:
        return [self.choices.index(one) for one in self.value or ()]

    @index.setter
    def index(self, at: Any) -> None:
        self.value = tuple(self.choices[k] for k in at)


def _value_last(name: str) -> int:
    return name in ("value", "index")


# the page -------------------------------------------------------------------------------------------------------------


class Page:
    """What a page shows of a widget and of all widgets in it, and what it has been told of them."""

    def __init__(self, root: Widget) -> None:
        self.root = root
        self._known: list[Widget] = []
        self._told: list[dict[str, Any]] = []
        self._number(root, [])  # (the numbers of a saved picture, whatever changes before the page is told)
        self._told = [{} for _ in self._known]

    def changes(self) -> list[dict[str, Any]]:
        """For each widget that has changed its number, its kind, and the values that are new; children come first."""
        found: list[dict[str, Any]] = []
        self._number(self.root, found)
        return found

    def _number(self, widget: Widget, found: list[dict[str, Any]]) -> int:
        state = {**widget.get_state(), "layout": dict(vars(widget.layout)), "classes": list(widget.classes)}
        if isinstance(widget, Box):
            state["children"] = [self._number(child, found) for child in widget.children]
        number = next((k for k, one in enumerate(self._known) if one is widget), len(self._known))
        if number == len(self._known):
            self._known.append(widget)
            self._told.append({})
        told = self._told[number]
        fresh = {key: value for key, value in state.items() if key not in told or told[key] != value}
        if fresh:
            told.update(fresh)
            found.append({"id": number, "kind": _kind(widget), "state": fresh})
        return number

    def set(self, number: int, values: Mapping[str, Any]) -> None:
        """The page's reader has moved a control (`value` or `index`), or a view asks by a value of its own."""
        widget = self._known[number]
        known = widget.class_traits() if isinstance(widget, AnyWidget) else ("value", "index")
        for name, value in values.items():
            if name in known and not widget.disabled:
                if isinstance(widget, AnyWidget):
                    self._told[number][name] = value
                setattr(widget, name, value)

    def send(self, number: int, content: Any) -> None:
        """A message of a view."""
        for handler in self._known[number].messages:
            handler(self._known[number], content, ())


def _kind(widget: Widget) -> str:
    """How the page draws it: `view:timeline`, `Dropdown`, `Box`."""
    if isinstance(widget, AnyWidget):
        return f"view:{type(widget).name}"
    return next(base.__name__ for base in type(widget).__mro__ if base.__module__ == __name__)
