"""The presets: every ready-made model as a few numbers. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from minipar.errors import PlanError
from minipar.wording import did_you_mean


@dataclass(frozen=True)
class GPT:
    """The numbers of `models.gpt`: `layers` transformer blocks between an embedding and a head."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    context: int = 64
    vocab: int = 256
    tied: bool = False
    dropout: float = 0.0
    data = "text"

    def numbers(self) -> dict[str, Any]:
        """The keyword arguments of `models.gpt`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class MLP:
    """The numbers of `models.mlp`: layer l maps `widths[l]` numbers to `widths[l + 1]`.

    `data` names the data that it is trained on: `windows` of the text, or `digits`.
    """

    widths: tuple[int, ...] = (32, 64, 64, 256)
    data: str = "windows"

    def numbers(self) -> dict[str, Any]:
        """The keyword arguments of `models.mlp`."""
        return {"widths": self.widths}


@dataclass(frozen=True)
class Branchy:
    """The numbers of `models.branchy`: `blocks` of four branches of `width` channels, for images of 64 grey values."""

    blocks: int = 2
    width: int = 16
    data = "digits"
    inputs = 64
    classes = 10

    def numbers(self) -> dict[str, Any]:
        """The keyword arguments of `models.branchy`."""
        return {"blocks": self.blocks, "width": self.width}


@dataclass(frozen=True)
class Mixture:
    """The numbers of `models.mixture`: a GPT whose blocks have `experts` perceptrons, of which a token goes to `top`.

    capacity   how many tokens of a row an expert takes, as a multiple of what it gets if all are equally busy; None:
               all that choose it, so that no token is dropped
    balance    whether there is a balance loss of each row
    """

    layers: int = 4
    width: int = 64
    heads: int = 4
    context: int = 64
    vocab: int = 256
    experts: int = 8
    top: int = 2
    capacity: float | None = 1.25
    balance: bool = True
    data = "text"

    @property
    def room(self) -> int:
        """How many tokens of a row of `context` tokens an expert takes."""
        return room_of(self.capacity, self.context, self.top, self.experts)

    @property
    def places(self) -> int:
        """How many places for tokens of a row all experts have together; without a capacity one for each choice."""
        return self.context * self.top if self.capacity is None else self.experts * self.room

    def numbers(self) -> dict[str, Any]:
        """The keyword arguments of `models.mixture`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


Preset = GPT | MLP | Branchy | Mixture

PRESETS: dict[str, Preset] = {
    # Small enough that two steps take seconds, on any machine.
    "gpt-tiny": GPT(),
    "gpt-tiny-tied": GPT(tied=True),
    "gpt-tiny-dropout": GPT(dropout=0.1),
    # Large enough that a stage's forward takes longer than a message: several ms for one micro-batch on one core.
    "gpt-demo": GPT(layers=8, width=192, heads=6, context=128),
    "mlp-tiny": MLP(),
    "mlp-digits": MLP(widths=(64, 128, 128, 10), data="digits"),
    # Inception-like: layers with edges, four branches in each of two blocks.
    "branchy": Branchy(),
    # A mixture of experts in each block, for expert parallelism.
    "gpt-moe-tiny": Mixture(),
    # The model of the benchmarks: 16 layers of Linear(512, 512) and GELU.
    "mlp-wide": MLP(widths=(512,) * 17),
}

# Published models, for plans and formulas: too large to be built here. Numbers of GPT-2 (Radford et al. 2019), GPT-3
# (Brown et al. 2020), Megatron-LM (Narayanan et al. 2021, table 1), and Korthikanti et al. 2022 (table 3).
PUBLISHED: dict[str, GPT] = {
    name: GPT(layers, width, heads, context, vocab, tied=True, dropout=0.1)
    for name, layers, width, heads, context, vocab in (
        ("gpt2-small", 12, 768, 12, 1024, 50257),
        ("gpt2-medium", 24, 1024, 16, 1024, 50257),
        ("gpt2-large", 36, 1280, 20, 1024, 50257),
        ("gpt2-xl", 48, 1600, 25, 1024, 50257),
        ("gpt3-175b", 96, 12288, 96, 2048, 50257),
        ("megatron-1.7b", 24, 2304, 24, 2048, 51200),
        ("megatron-3.6b", 30, 3072, 32, 2048, 51200),
        ("megatron-7.5b", 36, 4096, 32, 2048, 51200),
        ("megatron-18b", 40, 6144, 48, 2048, 51200),
        ("megatron-39b", 48, 8192, 64, 2048, 51200),
        ("megatron-76b", 60, 10240, 80, 2048, 51200),
        ("megatron-145b", 80, 12288, 96, 2048, 51200),
        ("megatron-310b", 96, 16384, 128, 2048, 51200),
        ("megatron-530b", 105, 20480, 128, 2048, 51200),
        ("megatron-1t", 128, 25600, 160, 2048, 51200),
        ("korthikanti-22b", 48, 6144, 64, 2048, 51200),
        ("korthikanti-175b", 96, 12288, 96, 2048, 51200),
        ("korthikanti-530b", 105, 20480, 128, 2048, 51200),
        ("korthikanti-1t", 128, 25600, 160, 2048, 51200),
    )
}


def presets() -> tuple[str, ...]:
    """The names that `build`, `shape` and `data.for_model` know."""
    return tuple(PRESETS)


def names() -> tuple[str, ...]:
    """All names: first of the models that can be built, then of those of which only numbers are known."""
    return (*PRESETS, *PUBLISHED)


def preset(name: str, **overrides: Any) -> Preset:
    """The numbers of a preset, with some of them replaced.

    Errors: `PlanError` for a name that is no preset, or a number that this kind of model does not have.
    """
    if name in PUBLISHED:
        raise PlanError(f"model {name!r}: only its numbers are known here; models to build are {', '.join(PRESETS)}")
    if name not in PRESETS:
        raise PlanError(f"model {name!r}: no such preset; there are {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}")
    return _replaced(name, PRESETS[name], overrides)


def numbers(name: str, **overrides: Any) -> Preset:
    """As `preset`, but it also knows published models. Shapes and formulas need only the numbers."""
    if name in PUBLISHED:
        return _replaced(name, PUBLISHED[name], overrides)
    if name not in PRESETS:
        raise PlanError(f"model {name!r}: no such preset; there are {', '.join(names())}{did_you_mean(name, names())}")
    return preset(name, **overrides)


def _replaced(name: str, chosen: Preset, overrides: dict[str, Any]) -> Preset:
    possible = [field.name for field in fields(chosen)]
    for key in overrides:
        if key not in possible:
            raise PlanError(f"{key}={overrides[key]!r}: {name} has no such number; it has {', '.join(possible)}")
    if "widths" in overrides:
        overrides["widths"] = tuple(overrides["widths"])
    return replace(chosen, **overrides)


def title(name: str, chosen: Preset, overrides: Iterable[str]) -> str:
    """A preset's name with the numbers that were replaced, such as `gpt-tiny layers=6`."""
    return " ".join([name, *(f"{key}={getattr(chosen, key)}" for key in overrides)])


def check_gpt(numbers: GPT) -> None:
    """Errors: `PlanError` for sizes that make no model."""
    for key in ("layers", "width", "heads", "context", "vocab"):
        value = getattr(numbers, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{key}={value!r}: must be a whole number of at least 1")
    if numbers.width % numbers.heads:
        raise PlanError(f"heads={numbers.heads}: must divide width={numbers.width}")
    if not 0.0 <= numbers.dropout < 1.0:
        raise PlanError(f"dropout={numbers.dropout!r}: must be at least 0 and less than 1")


def room_of(capacity: float | None, tokens: int, top: int, experts: int) -> int:
    """How many tokens an expert takes of a row of so many; all of them if there is no capacity."""
    return tokens if capacity is None else math.ceil(capacity * tokens * top / experts)


def of_whole_rows(capacity: float | None, balance: bool) -> str:
    """What of a mixture's numbers is about all tokens of a row, so that it takes no slices of them, and the way out."""
    found = [f"capacity={capacity}"] if capacity is not None else []
    found += ["balance=True"] if balance else []
    if not found:
        return ""
    text = f"{' and '.join(found)} {'is' if len(found) == 1 else 'are'} about all tokens of a row"
    return f"{text}; without them, capacity=None balance=False, it takes slices"


def check_mixture(numbers: Mixture) -> None:
    """Errors: `PlanError` for sizes that make no model."""
    check_gpt(GPT(numbers.layers, numbers.width, numbers.heads, numbers.context, numbers.vocab))
    for key, most in (("experts", None), ("top", numbers.experts)):
        value = getattr(numbers, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
            raise PlanError(
                f"{key}={value!r}: must be a whole number of at least 1"
                + (f" and at most experts={most}" if most is not None else "")
            )
    known = numbers.capacity is None or isinstance(numbers.capacity, (int, float))
    if not known or (numbers.capacity is not None and not 0 < numbers.capacity < float("inf")):
        raise PlanError(
            f"capacity={numbers.capacity!r}: must be a number above 0, or None, with which nothing is dropped"
        )
    if not isinstance(numbers.balance, bool):
        raise PlanError(f"balance={numbers.balance!r}: must be True or False; its weight is that of `mixture_loss`")


def check_mlp(numbers: MLP) -> None:
    """Errors: `PlanError` for widths that make no model."""
    widths = numbers.widths
    if len(widths) < 2 or any(not isinstance(w, int) or isinstance(w, bool) or w < 1 for w in widths):
        raise PlanError(f"widths={widths!r}: must be 2 or more whole numbers of at least 1")


def check_branchy(numbers: Branchy) -> None:
    """Errors: `PlanError` for sizes that make no model."""
    for key, value in numbers.numbers().items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 + (key == "width"):
            raise PlanError(f"{key}={value!r}: must be a whole number of at least {1 + (key == 'width')}")


def edges_of_blocks(blocks: int) -> list[tuple[int, int]]:
    """The edges between the layers of `models.branchy`."""
    edges = []
    for first in range(1, 7 * blocks, 7):
        edges += [(first - 1, first + k) for k in (0, 1, 3, 5)]
        edges += [(first + 1, first + 2), (first + 3, first + 4)]
        edges += [(first + k, first + 6) for k in (0, 2, 4, 5)]
    return [*edges, (7 * blocks, 7 * blocks + 1)]


def convolutions(numbers: Branchy) -> list[tuple[int, int, int]]:
    """For each layer of `models.branchy`: input channels, output channels, and the side of its kernel. A join has no
    kernel and counts 0 output channels. The head counts as a kernel of side 1."""
    found, width = [(1, numbers.width, 3)], numbers.width
    for block in range(numbers.blocks):
        given = 4 * width if block else width
        found += [(given, width, 1), (given, width // 2, 1), (width // 2, width, 3), (given, width // 2, 1)]
        found += [(width // 2, width, 5), (given, width, 1), (4 * width, 0, 0)]
    return [*found, (4 * width, numbers.classes, 1)]
