"""docs/export.md: every block runs; its table has every key that a system has a rule for."""

from __future__ import annotations

import re

from minipar.strategies.exporting import deepspeed, megatron, torchtitan
from tests.pages import DOCS, run


def test_every_block_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("export.md")
    out = capsys.readouterr().out
    assert '"*.mlp.2" = "P on tp"\n' in out
    assert "--pipeline-model-parallel-layout 'Et*24|t*25|t*24|t*23L' \\\n" in out
    assert "env CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes=8 --nproc-per-node=8 pretrain_gpt.py FLAGS\n" in out


def test_the_table_has_every_key_and_every_version():
    page = (DOCS / "export.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    told = {key for row in rows for key in re.findall(r"`(\w+)`", row)} - {"batch"}
    ruled = set(megatron.RULES) | set(deepspeed.RULES) | set(torchtitan.RULES)
    assert told == ruled - {"reduce", "offload_to", "offload_folder"}
    for system in (megatron, deepspeed, torchtitan):
        assert system.VERSION in page
