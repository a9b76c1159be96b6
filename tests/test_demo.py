"""`make demo`, in its short form: what it prints and writes."""

from __future__ import annotations

import re

from minipar import demo


def test_the_demo_does_its_job(capsys, tmp_path, monkeypatch, pytestconfig):
    """With a smaller model and fewer steps, but with --thorough. (.ci/run runs `make demo` as it is.)"""
    if not pytestconfig.getoption("--thorough"):
        monkeypatch.setattr(demo, "MODEL", "gpt-tiny")
        monkeypatch.setattr(demo, "SHAPE_STEPS", 2)
    page, picture = tmp_path / "demo.html", tmp_path / "demo.png"
    words = ["--steps", "2", "--batch", "8", "--out", str(page), "--picture", str(picture)]
    assert demo.main(words) == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^ +(\d) +(\d\.\d{6}) +(\d\.\d{6})  #+$", out, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1"]
    assert all(abs(float(mine) - float(plain)) < 1e-3 for _, mine, plain in rows)
    for text in (
        "step time",
        "bubble of total",
        "bubble of ideal",
        "sent a step",
        "peak measured",
        "cores",
        "emulated",
        "a step, ",
    ):
        assert text in out
    html = page.read_text()
    assert "predicted trace: 4 ranks" in html
    assert "<script src=" not in html
    assert picture.read_bytes().startswith(b"\x89PNG")
