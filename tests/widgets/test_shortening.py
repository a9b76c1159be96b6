"""Shortened modules mean the same: their own tests pass on them; and what cannot be renamed is not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from minipar_widgets.inline import SOURCES
from minipar_widgets.shortening import shorten, tokens

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no node (18 or newer) on this machine")
def test_tests_of_the_modules_pass_on_what_is_shortened(tmp_path: Path) -> None:
    assert NODE is not None
    (tmp_path / "package.json").write_text('{ "type": "module" }')
    for path in SOURCES.glob("*.js"):
        (tmp_path / path.name).write_text(shorten(path.read_text(encoding="utf-8")), encoding="utf-8")
    for path in SOURCES.glob("*.test.mjs"):
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run([NODE, "--test", str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "short"),
    [
        ("const word = 1;\nuse(word, other.word2);\n", "let a=1;\nuse(a,other.word2);\n"),
        ("const word = 1;\nuse({ word });\n", "let word=1;\nuse({word});\n"),
        ("function render(first, { model }) { return first + model; }\n", "function b(a,{model}){return a+model}\n"),
        ("export const name = 3; // why\n", "export let name=3;\n"),
        ("const text = `a ${b ? `${text2} c` : {}.d} e`;\n", "let a=`a ${b?`${text2} c`:{}.d} e`;\n"),
        ("const a = 1 / 2, b = /x[/]y/g;\n", "let a=1/2,b=/x[/]y/g;\n"),
        ("let i = 0.5;\nconst j = true;\nf(i - -1);\n", "let i=.5,j=!0;\nf(i- -1);\n"),
        ("for (const item of [1, 2]) g({ \"key\": item, \"two words\": 1, });\n",
         'for(let a of[1,2])g({key:a,"two words":1});\n'),
        ("import { one } from \"./x.js\";\nconst from = 1;\n", "import{one}from\"./x.js\";\nlet from=1;\n"),
        ("const { $one: one } = { $one: 1 };\nf(one);\n", "let{a:one}={a:1};\nf(one);\n"),
    ],
)  # fmt: skip
def test_short_forms(source: str, short: str) -> None:
    assert shorten(source) == short


def test_functions_of_math_get_names() -> None:
    assert shorten("f(Math.max(1, Math.max(2, Math.max(x))), Math.min(1));\n") == (
        "let a=Math.max;f(a(1,a(2,a(x))),Math.min(1));\n"
    )


def test_tokens_are_the_source_again_without_spaces() -> None:
    for path in SOURCES.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert all(token.text in text for token in tokens(text))
