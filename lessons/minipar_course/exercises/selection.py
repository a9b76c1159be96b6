"""Lesson 17: which strategy, for which model, on which devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minipar.costs.device import DeviceSpec
from minipar.prediction.plan_numbers import PRECISIONS
from minipar.prediction.rank_memory import states
from minipar_course.exercises.kinds.choice import MIB, Choice
from minipar_course.exercises.kinds.formula import Formula
from minipar_course.exercises.kinds.verdict import Verdict, raised

_G = 10**9


def _states(parameters: float, dp: float, pp: float, zero: float) -> float:
    return states(int(parameters / pp), int(dp), int(zero), PRECISIONS["float32"]).total


STATES = Formula(
    ("parameters", "dp", "pp", "zero"),
    _states,
    ((1e9, 1, 1, 0), (1e9, 8, 1, 0), (1e9, 8, 1, 1), (1e9, 8, 1, 2), (1e9, 8, 1, 3), (2e9, 4, 2, 0), (2e9, 4, 2, 1)),
    (
        (lambda n, dp, pp, zero: 16 * n, "which of these does a plan divide, and by what?"),
        (lambda n, dp, pp, zero: 16 * n / pp, "zero= shares out some of the 16 bytes over the dp replicas: which?"),
        (lambda n, dp, pp, zero: 16 * n / (dp * pp), "without zero= a replica has everything; zero=1 shares one kind"),
        (lambda n, dp, pp, zero: 16 * n / pp / (dp if zero else 1), "only zero=3 shares out all of it"),
        (lambda n, dp, pp, zero: n * (16 - 4 * zero * (1 - 1 / dp)) / pp, "Adam's state is 8 bytes, a gradient 4"),
    ),
    "ZeRO's table",
    "a stage has 1 / pp of the numbers; of each, 4 bytes are the parameter, 4 the gradient, 8 Adam's state",
)  # fmt: skip


@dataclass(frozen=True)
class Choices:
    """A function from the name of a cluster to a plan for it; each plan is judged as in `Choice`."""

    clusters: Mapping[str, Choice]

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", "def choose(cluster): ...")
        for name, choice in self.clusters.items():
            try:
                plan = answer(name)
            except Exception as error:
                return raised(error, f'choose("{name}")')
            verdict = choice.judge(plan)
            if not verdict:
                return Verdict(False, f"{name}: {verdict.reason}", verdict.hint, verdict.evidence)
        return Verdict(True, f"plans for {', '.join(self.clusters)}, each within its targets")


_SLOW_CHIP = "flops=4GFLOP/s host_bandwidth=200MB/s"
CLUSTER = f"{_SLOW_CHIP} bandwidth=50MB/s latency=2ms memory=36MiB"  # of the lesson itself
TASK = Choice("gpt-demo", 16, CLUSTER, ranks=4, time=4.2)
CLUSTERS = Choices(
    {
        "small model": Choice(
            "gpt-tiny", 16, f"{_SLOW_CHIP} bandwidth=50MB/s latency=2ms", ranks=4, time=0.137, memory=8 * MIB
        ),
        "fast links": Choice(
            "gpt-demo", 16, f"{_SLOW_CHIP} bandwidth=2GB/s latency=50us", ranks=4, time=3.2, memory=46 * MIB
        ),
        "slow links": Choice(
            "gpt-demo", 16, f"{_SLOW_CHIP} bandwidth=10MB/s latency=2ms", ranks=4, time=4.1, memory=30 * MIB
        ),
        "two devices": Choice(
            "gpt-demo", 16, "flops=4GFLOP/s bandwidth=50MB/s latency=2ms host_bandwidth=1GB/s", ranks=2, time=7.0,
            memory=30 * MIB,
        ),
    }
)  # fmt: skip

# Eight A100 with 40 GB on PCIe 3, at the speed that Megatron-LM reached on an A100.
NODE = DeviceSpec(140e12, 40 * _G, 12 * _G, 5e-6, 12 * _G, name="a100-40gb at 140 TFLOP/s, pcie")
LARGE = Choice("megatron-7.5b", 64, NODE, ranks=8, time=7.3, memory=36 * _G, precision="bf16")
