"""docs/schedules.md: its code is run block by block, and its outputs are compared."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from minipar import PlanError, ProgramError
from minipar.cli import main
from minipar.strategies.schedules import registry

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_every_block_gives_what_stands_under_it(monkeypatch):
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "text"] * 4
    names: dict[str, object] = {}
    for (_, code), (_, expected) in zip(blocks[::2], blocks[1::2], strict=True):
        with redirect_stdout(io.StringIO()) as out:
            try:
                exec(code, names)
            except (PlanError, ProgramError) as error:
                print(error)
        assert out.getvalue() == expected


def test_the_page_has_the_table_of_schedules(capsys):
    assert main(["schedules", "--markdown"]) == 0
    table = capsys.readouterr().out.strip()
    found = re.search(r"<!-- made by: minipar schedules --markdown -->\n(.*?)\n<!-- end", PAGE.read_text(), re.DOTALL)
    assert found, "docs/schedules.md has no table of schedules"
    assert found[1] == table, "put the output of `minipar schedules --markdown` into docs/schedules.md"


def test_the_plain_table_lists_constraints(capsys):
    assert main(["schedules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if line.startswith("zb-h2"))
    assert "m >= 2p-1" in row
    with pytest.raises(SystemExit):
        main(["schedules", "--help"])
