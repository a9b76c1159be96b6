"""Which data a preset is trained on."""

from __future__ import annotations

from typing import Any

from minipar.data.images import Digits
from minipar.data.sources import Source
from minipar.data.text import Text, Windows
from minipar.errors import PlanError
from minipar.models.table import GPT, Branchy, Mixture, preset


def for_model(name: str, seed: int = 0, **overrides: Any) -> Source:
    """The data set that fits a preset of `minipar.models`; `overrides` as given to `models.build`.

    Errors: `PlanError` for an unknown preset or number, or a model of a size that its data cannot fill.
    """
    chosen = preset(name, **overrides)
    if isinstance(chosen, (GPT, Mixture)):
        if chosen.vocab < Text.vocab:
            raise PlanError(f"vocab={chosen.vocab}: the text of {name} has {Text.vocab} different bytes")
        return Text(chosen.context, seed=seed)
    if isinstance(chosen, Branchy):
        return Digits(seed=seed)
    inputs, classes = chosen.widths[0], chosen.widths[-1]
    if chosen.data == "digits":
        if inputs != Digits.inputs or classes < Digits.classes:
            raise PlanError(
                f"widths={chosen.widths}: digits go from {Digits.inputs} numbers to {Digits.classes} classes"
            )
        return Digits(seed=seed)
    if classes < Windows.vocab:
        raise PlanError(f"widths={chosen.widths}: the text has {Windows.vocab} different bytes, so as many classes")
    return Windows(inputs, seed=seed)
