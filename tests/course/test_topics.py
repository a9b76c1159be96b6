"""lessons/README.md says where each topic is taught: a lesson and a section, which exist; no topic is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path

LESSONS = Path(__file__).parents[2] / "lessons"
ROW = re.compile(r"^\| (.+?) \| \[(\d\d\w?)\]\((\S+\.ipynb)\) \| (.+?) \|$", re.MULTILINE)
# What MindSpore's pages, the lecture on large models and the tutorial on big models name, each by a word of its row.
TOPICS = """
choosing a strategy | data parallel | operator-level | semi-automatic | automatic parallel | sharding technique
multi-copy | pipeline parallel | bubbles | optimizer parallel | gradient accumulation | recompute
dataset sharding | dataset sharding with model parallel | host and device | heterogeneous storage | fusion | subgraphs
sources of memory | inference | sqrt | allreduce | parameter server | push and pull | overlap | priority | late or die
dataflow | intra-operator | inter-operator | point-to-point | all-to-all | gather | scatter | branches | gpipe | 1f1b
interleaved | terapipe | chimera | ampnet | pipedream | 2bw | imbalanced stages: dynamic | imbalanced stages: linear
reinforcement learning | repartition cost | experts | alpa | flexflow | gspmd | auto-parallelization: linear
auto-parallelization: dynamic
"""


def headings(name: str) -> list[str]:
    cells = json.loads((LESSONS / name).read_text())["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "markdown" for line in "".join(cell["source"]).splitlines()]
    return [line for line in lines if line.startswith("## ")]


def test_every_topic_has_a_lesson_and_a_section_that_exist() -> None:
    rows = ROW.findall((LESSONS / "README.md").read_text())
    assert len(rows) > 45
    for topic, number, name, section in rows:
        assert name.startswith(number), topic
        assert any(section in line for line in headings(name)), f"{topic}: {name} has no section {section!r}"


def test_no_topic_is_left_out() -> None:
    named = [row[0].lower() for row in ROW.findall((LESSONS / "README.md").read_text())]
    for topic in re.split(r"[|\n]", TOPICS):
        assert not topic.strip() or any(topic.strip() in name for name in named), topic
