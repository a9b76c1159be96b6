"""The page on estimates: its Python runs. (tests/prediction/test_validation.py holds its tables to the command.)"""

from __future__ import annotations

import re
from pathlib import Path

import torch

import minipar
from minipar.models.sizes import Chain, Transformer

PAGE = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text("utf-8")


def test_the_blocks_run() -> None:
    first, second = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(first, names)
    assert isinstance(names["found"], minipar.Estimate)
    given = {"my_torch_model": torch.nn.Linear(4, 2), "example": torch.zeros(3, 4)}
    lines = [line.partition("#")[0] for line in second.splitlines()]
    exec("\n".join(line for line in lines if "import" in line), given)
    values = [eval(line, given) for line in lines if line.strip() and "import" not in line]
    made = [minipar.models.sizes.sizes(value) for value in values]
    assert [type(one) for one in made] == [Transformer, Transformer, Transformer, Chain]
