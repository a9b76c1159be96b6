"""Machines as plain numbers: what a device, its memory and its two levels of links can do, and how much of that is
reached.

    hardware("a100-80gb")                                      a preset
    hardware("a100-80gb nodes=16 far=50GB/s")                  with other numbers
    hardware("my_machine.toml")                                a table of the same keys; `like` names a preset
    dataclasses.replace(PRESETS["h100"], name="mine", far=25e9)   your own, in Python
    Hardware("mine", flops=50e12, ...)                         or from nothing

Peaks are those of the vendors' data sheets. `Efficiency` says which part of them a program reaches; its numbers were
fitted on A100s (benchmarks/fit_efficiency.py), and the other accelerators have the same. `minipar validate` shows how
good that is on A100s. For the other presets there is no such check.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from minipar.costs.quantities import quantity
from minipar.costs.rates import Calibration
from minipar.errors import PlanError
from minipar.models.sizes import read_toml
from minipar.wording import did_you_mean

MOST_DEVICES = 1_048_576  # that formulas and searches take; the largest clusters have a tenth


@dataclass(frozen=True)
class Efficiency:
    """The part of each peak that programs reach.

    matmul   of the peak FLOP/s, by a matrix product that is very large in all three dimensions
    half     the smallest dimension of a matrix product that reaches half of that: a product whose smallest dimension
             is q reaches matmul * q / (q + half)
    memory   of the memory's bandwidth, by elementwise operators and optimizers
    near     of the bandwidth of the links inside a node
    far      of the bandwidth of the links between nodes
    beside   of the time in which collectives of parameters and gradients could go on beside computing
    lanes    how many of a node's links to other nodes a gather of one layer's parameters uses (ZeRO's stage 3); sums of
             all gradients use them all
    kernel   seconds that the smallest operator takes
    """

    matmul: float = 0.771
    half: float = 178.0
    memory: float = 0.85
    near: float = 0.843
    far: float = 0.75
    beside: float = 0.58
    lanes: int = 1
    kernel: float = 5e-6


FITTED = Efficiency()
PERFECT = Efficiency(1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 8, 0.0)


@dataclass(frozen=True)
class Hardware:
    """One device, of which all nodes have the same, and the links between them.

    flops                  operations a second of dense matrix products of 16-bit numbers with float32 sums
    flops32                the same for float32 numbers, as torch multiplies them (TF32 where there is such a unit)
    memory                 bytes of one device
    memory_bandwidth       bytes a second between a device and its memory
    near, near_latency     bytes a second, in one direction, of all links of one device inside its node; seconds of a
                           message
    far, far_latency       the same between nodes: of one device's share of the node's network
    per_node               devices of a node
    nodes                  how many nodes there are; 0: as many as the plan needs
    host_bandwidth         bytes a second, in one direction, between a device and its host
    disk_bandwidth         bytes a second between a host and its disk
    host_memory_bandwidth  bytes a second between the host's processor and its memory, for each device
    mixed                  whether plans that name no precision train in 16-bit numbers
    efficiency             which part of these numbers is reached
    """

    name: str
    flops: float
    flops32: float
    memory: int
    memory_bandwidth: float
    near: float
    near_latency: float
    far: float
    far_latency: float
    per_node: int = 8
    nodes: int = 0
    host_bandwidth: float = 25e9
    disk_bandwidth: float = 3e9
    host_memory_bandwidth: float = 20e9
    mixed: bool = True
    efficiency: Efficiency = FITTED

    def __post_init__(self) -> None:
        for key in _RATES:
            object.__setattr__(self, key, quantity(key, getattr(self, key), zero=key.endswith("latency")))
        object.__setattr__(self, "memory", int(quantity("memory", self.memory)))
        for key, least in (("per_node", 1), ("nodes", 0)):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PlanError(f"{key}={value!r}: must be a whole number of at least {least}")
        if self.per_node > MOST_DEVICES:
            raise PlanError(f"per_node={self.per_node}: too many devices for a node; possible are 1 to {MOST_DEVICES}")
        if self.nodes * self.per_node > MOST_DEVICES:
            raise PlanError(
                f"nodes={self.nodes}: with {self.per_node} devices each these are too many; possible are 1 to "
                f"{MOST_DEVICES // self.per_node}"
            )

    @staticmethod
    def measured(rates: Calibration, memory: int = 16 * 10**9, name: str = "this-machine") -> Hardware:
        """The machine that was calibrated, as `minipar.calibrate(cluster)` measured it. All its ranks are one node.

        The memory's bandwidth is that at which ranks add what they receive: of each byte two are read, one is written.
        """
        sums = 3 / rates.add.per_byte if rates.add.per_byte else 10e9
        if rates.links:
            link = rates.message(*rates.links[0][:2])
            near, latency = min(link.bandwidth, 1e15), link.fixed
        else:
            near, latency = 1e9, 1e-4
        return Hardware(
            name, rates.flops_of_each, rates.flops_of_each, memory, sums, near, latency, near, latency,
            per_node=max(1, rates.ranks), nodes=1, mixed=rates.device == "cuda", efficiency=PERFECT,
        )  # fmt: skip


_NEEDED = ("flops", "flops32", "memory", "memory_bandwidth", "near", "near_latency", "far", "far_latency")
_RATES = (
    "flops", "flops32", "memory_bandwidth", "near", "near_latency", "far", "far_latency", "host_bandwidth",
    "disk_bandwidth", "host_memory_bandwidth",
)  # fmt: skip
_T, _G, _MICRO = 1e12, 1e9, 1e-6

# Data sheets give both directions of links together; here is one of them. Latencies are estimates, and so are all
# numbers of the laptop. `far` is the usual network of such nodes: EDR for V100, HDR for A100, NDR for H100 and H200,
# one adapter a device (DGX-1 has one for two of them), and XDR-ready NDR for B200.
PRESETS: dict[str, Hardware] = {
    one.name: one
    for one in (
        Hardware(
            "laptop", 0.5 * _T, 0.5 * _T, 16 * 10**9, 50 * _G, 0.1 * _G, 1e-3, 0.1 * _G, 1e-3, 1,
            host_bandwidth=20 * _G, disk_bandwidth=2 * _G, mixed=False,
        ),
        Hardware("v100", 125 * _T, 15.7 * _T, 32 * 10**9, 0.9e12, 150 * _G, 5 * _MICRO, 6.25 * _G, 10 * _MICRO,
                 host_bandwidth=16 * _G),
        Hardware("a100-40gb", 312 * _T, 156 * _T, 40 * 10**9, 1.555e12, 300 * _G, 5 * _MICRO, 25 * _G, 10 * _MICRO,
                 host_bandwidth=32 * _G, disk_bandwidth=6 * _G),
        Hardware("a100-80gb", 312 * _T, 156 * _T, 80 * 10**9, 2.039e12, 300 * _G, 5 * _MICRO, 25 * _G, 10 * _MICRO,
                 host_bandwidth=32 * _G, disk_bandwidth=6 * _G),
        Hardware("h100", 989 * _T, 494 * _T, 80 * 10**9, 3.35e12, 450 * _G, 5 * _MICRO, 50 * _G, 10 * _MICRO,
                 host_bandwidth=64 * _G, disk_bandwidth=12 * _G),
        Hardware("h200", 989 * _T, 494 * _T, 141 * 10**9, 4.8e12, 450 * _G, 5 * _MICRO, 50 * _G, 10 * _MICRO,
                 host_bandwidth=64 * _G, disk_bandwidth=12 * _G),
        Hardware("b200", 2250 * _T, 1125 * _T, 180 * 10**9, 7.7e12, 900 * _G, 5 * _MICRO, 50 * _G, 10 * _MICRO,
                 host_bandwidth=64 * _G, disk_bandwidth=12 * _G),
    )
}  # fmt: skip


def hardware(given: str | Path | Hardware | Calibration) -> Hardware:
    """A machine, from a preset's name with `key=value` words, a TOML file, a calibration; or as it is.

    Errors: PlanError for an unknown name, which lists the presets, or an unknown key, which lists the keys.
    """
    if isinstance(given, Hardware):
        return given
    if isinstance(given, Calibration):
        return Hardware.measured(given)
    if isinstance(given, Path):
        given = str(given)
    if not isinstance(given, str):
        raise PlanError(
            f"hardware {given!r}: must be a name or words, a Hardware or a Calibration; there are {', '.join(PRESETS)}"
        )
    name, *words = given.split() or [""]
    if name.endswith(".toml"):
        built = _from_table(name, read_toml(name))
    elif name in PRESETS:
        built = PRESETS[name]
    else:
        wrong = "no such preset" if name else "none is named"
        raise PlanError(
            f"hardware {name!r}: {wrong}; there are {', '.join(PRESETS)}, this-machine, or a TOML file"
            f"{did_you_mean(name, PRESETS)}"
        )
    changed = dict(word.partition("=")[::2] for word in words)
    return _changed(built, changed) if changed else built


def _from_table(path: str, table: dict[str, Any]) -> Hardware:
    """A machine from the keys of a TOML file."""
    given = dict(table.get("hardware", table))
    like = given.pop("like", None)
    if like is not None:
        built = hardware(str(like))
    elif missing := [key for key in _NEEDED if key not in given]:
        raise PlanError(f"{path}: {', '.join(missing)} missing; give them, or like = one of {', '.join(PRESETS)}")
    else:
        built = PRESETS["laptop"]
    return _changed(built, {"name": Path(path).stem, **given})


def _changed(built: Hardware, changed: dict[str, Any]) -> Hardware:
    known = [f.name for f in fields(Hardware) if f.name != "efficiency"]
    inner = [f.name for f in fields(Efficiency)]
    parts: dict[str, Any] = {}
    shares: dict[str, Any] = {}
    given = dict(changed)
    nested = given.pop("efficiency", {})
    for key, value in given.items():
        if key not in known:
            raise PlanError(f"hardware {key}={value}: unknown; possible are {', '.join(known)}, efficiency")
        if key in ("per_node", "nodes"):
            parts[key] = int(quantity(key, value, zero=True))
        else:
            parts[key] = value if key in ("name", "mixed") else quantity(key, value, zero=key.endswith("latency"))
    for key, value in nested.items() if isinstance(nested, dict) else ():
        if key not in inner:
            raise PlanError(f"efficiency {key}={value}: unknown; possible are {', '.join(inner)}")
        shares[key] = quantity(key, value, zero=True)
    if shares:
        parts["efficiency"] = replace(built.efficiency, **shares)
    return replace(built, **parts)
