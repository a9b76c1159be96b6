"""Questions that engineers ask before they buy time on a cluster, answered by the planner: `python -m docs.questions`.

It writes docs/questions.md, in about a minute. Each answer stands beside a published run that is like it, with
operations counted in the same way: those that are computed, without what runs again.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from minipar.costs.hardware import hardware
from minipar.errors import PlanError
from minipar.models.sizes import Sizes, Transformer, sizes
from minipar.planner.exhaustive import search
from minipar.planner.planned import Planned
from minipar.planner.space import Space
from minipar.prediction.estimating import estimate
from minipar.prediction.published import like, rows

PAGE = Path(__file__).with_name("questions.md")
MIXTURE = "llama layers=80 hidden=8192 heads=64 kv_heads=8 ffn=4096 experts=128 top=8 sequence=4096 vocabulary=128256"


class Question(NamedTuple):
    """What is asked, in the words of `minipar plan`, and the id of a published run that is like it (published.csv)."""

    title: str
    model: str
    devices: str
    nodes: int
    per_node: int
    batch: int
    published: str = ""
    pins: str = ""


QUESTIONS = (
    Question("7B on 8 A100", "llama2-7b", "a100-80gb", 1, 8, 256, "mosaic-a100-80gb-7b-s2048-g8-b6-B96"),
    Question("8B on 64 H100", "llama3-8b", "h100", 8, 8, 512, "mosaic-h100-7b-s2048-g8-b6-B48"),
    Question("70B on 64 H100", "llama3-70b", "h100", 8, 8, 512, "mosaic-h100-70b-s2048-g128-b8-B1024"),
    Question("70B on 16 GPUs of 24 GB", "llama3-70b", "4090", 2, 8, 64),
    Question("70B on 32 GPUs of 24 GB", "llama3-70b", "4090", 4, 8, 64),
    Question("405B on 1,024 H100, in fp8", "llama3-405b", "h100", 128, 8, 1536,
             "nemo-26.06-LLAMA3.1_405B-H100-1024-FP8-s8192-B1536-t8p8c2v8en/a", "precision=fp8"),
    Question("DeepSeek V3 on 256 GB200, 64 of each rack", "deepseek-v3", "gb200", 4, 64, 4096,
             "nemo-26.04-DeepSeekV3-GB300-256-MXFP8-s4096-B4096-t1p2c1v8e32", "precision=mxfp8"),
    Question("A mixture of 1T parameters on 1,024 H100", MIXTURE, "h100", 128, 8, 4096,
             "more-20-Qwen3-235B-DeepEP-tp4-ep8-pp8"),
    Question("70B with rows of 128k tokens on 256 H100", "llama3-70b sequence=131072", "h100", 32, 8, 64,
             "more-10-405B-16384-GPUs-tp8-cp16-pp16-s131072"),
    Question("70B on 64 H100, InfiniBand 4 times slower", "llama3-70b", "h100 far=12.5GB/s", 8, 8, 512),
)  # fmt: skip


def rates(model: Sizes, flops: float, seconds: float, ranks: int, batch: float) -> str:
    """What each device does in a second."""
    tokens = batch * (model.sequence if isinstance(model, Transformer) else 1) / seconds / ranks
    return f"{tokens:,.0f} tokens/s and {flops / seconds / ranks / 1e12:,.0f} TFLOP/s"


def described(plan: Planned, where: Space) -> list[str]:
    """A plan that was found."""
    cost, machine, n = plan.cost, where.machine, plan.numbers
    peak = {"fp8": machine.flops8, "mxfp8": machine.flops8, "nvfp4": machine.flops4}.get(where.precision, machine.flops)
    done = rates(where.model, cost.model_flops, plan.time, n.ranks, n.batch)
    return [
        f"`{plan.words}`", "",
        (
            f"A step takes {plan.time:.4g} s ({like(plan.time, n, where.model, machine)}). Each GPU does {done}, "
            f"{cost.model_flops / plan.time / n.ranks / peak:.0%} of its peak, and holds {plan.memory / 1e9:.1f} GB."
        ),
        *plan.reasons,
    ]  # fmt: skip


def beside(name: str) -> str:
    """A published run, and what it is estimated to take."""
    row = next(one for one in rows() if one.id == name)
    found = estimate(row.plan, row.model, row.gpu, row.batch, stack=row.stack)
    done = rates(found.model, found.cost.model_flops, row.seconds, found.numbers.ranks, row.batch)
    return (
        f"Published: {row.model} on {found.numbers.ranks:,} {row.gpu}, `{row.plan}`: {done} "
        f"({row.source}). Estimated, this run takes {found.time / row.seconds:.2f} times as long as it did."
    )


def page() -> str:
    """The page."""
    lines = [
        "# Questions of engineers", "",
        (
            "What the [planner](planner.md) answers, made by `python -m docs.questions`. TFLOP/s are operations that "
            "are computed, without what runs again; a causal kernel of attention computes half of the pairs of tokens."
        ),
    ]  # fmt: skip
    for one in QUESTIONS:
        lines += ["", f"## {one.title}", ""]
        machine = hardware(one.devices)
        command = f"--nodes {one.nodes} --gpus-per-node {one.per_node} --batch {one.batch}"
        pinned = f' --pin "{one.pins}"' if one.pins else ""
        lines += [f'    minipar plan --model "{one.model}" --hardware "{one.devices}" {command}{pinned}', ""]
        try:
            found = search(sizes(one.model), machine, one.nodes, one.per_node, one.batch, pins=one.pins, most=5)
            lines += described(found.plan, found.space)
        except PlanError as error:
            lines.append(f"{error}.")
        lines += ["", beside(one.published)] if one.published else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
