"""Machines as plain numbers: what a device, its memory and its two levels of links can do, and how much of that is
reached.

    hardware("a100-80gb")                                      a preset
    hardware("a100-80gb nodes=16 far=50GB/s")                  with other numbers
    hardware("my_machine.toml")                                a table of the same keys; `like` names a preset
    dataclasses.replace(PRESETS["h100"], name="mine", far=25e9)   your own, in Python
    Hardware("mine", flops=50e12, ...)                         or from nothing

Peaks are those of the vendors' data sheets, and memory is what the driver lets a program have. Which part of the peaks
is reached depends on the software: costs/stacks.py has it, for each device and stack.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from minipar.costs.quantities import quantity
from minipar.costs.rates import Calibration
from minipar.costs.stacks import PERFECT, Efficiency, reached
from minipar.errors import PlanError
from minipar.models.sizes import read_toml
from minipar.wording import did_you_mean

MOST_DEVICES = 1_048_576  # that formulas and searches take; the largest clusters have a tenth


@dataclass(frozen=True)
class Hardware:
    """One device, of which all nodes have the same, and the links between them.

    flops                  operations a second of dense matrix products of 16-bit numbers with float32 sums
    flops32                the same for float32 numbers, as torch multiplies them (TF32 where there is such a unit)
    flops8, flops4         the same for 8-bit and 4-bit numbers; 0: there is no such unit
    memory                 bytes of one device
    memory_bandwidth       bytes a second between a device and its memory
    near, near_latency     bytes a second, in one direction, of all links of one device inside its node; seconds of a
                           message
    far, far_latency       the same between nodes: of one device's share of the node's network
    per_node               devices of a node
    nodes                  how many nodes there are; 0: as many as the plan needs
    host_bandwidth         bytes a second, in one direction, between a device and its host
    disk_bandwidth         bytes a second between a host and its disk
    host_memory            bytes of a node's host, which its devices share
    host_memory_bandwidth  bytes a second of that memory, which its devices' copies share
    mixed                  whether plans that name no precision train in 16-bit numbers
    flash                  whether attention is one kernel that keeps no matrix of sequence x sequence
    like                   the device whose efficiency it has; "": its own name's
    efficiency             which part of these numbers is reached, whatever the stack; None: as costs/stacks.py has it
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
    host_memory: int = 0
    host_memory_bandwidth: float = 160e9
    mixed: bool = True
    flash: bool = True
    flops8: float = 0.0
    flops4: float = 0.0
    like: str = ""
    efficiency: Efficiency | None = None

    def __post_init__(self) -> None:
        for key in _RATES:
            zero = key.endswith("latency") or key in ("flops8", "flops4")
            object.__setattr__(self, key, quantity(key, getattr(self, key), zero=zero))
        object.__setattr__(self, "memory", int(quantity("memory", self.memory)))
        host = self.host_memory or 250 * 10**9 * self.per_node  # (2 TB for 8 devices, 1 TB for 4)
        object.__setattr__(self, "host_memory", int(quantity("host_memory", host)))
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

    @property
    def rates(self) -> Efficiency:
        """Which part of the peaks is reached; by Megatron Core, if nothing else was said."""
        return self.efficiency or reached(self.like or self.name, "megatron-core")

    @property
    def copies(self) -> float:
        """Bytes a second of one device's copies to its host or back, while all devices of its node copy."""
        return min(self.host_bandwidth, self.host_memory_bandwidth / self.per_node)

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
            per_node=max(1, rates.ranks), nodes=1, host_memory=memory, host_memory_bandwidth=sums,
            mixed=rates.device == "cuda", efficiency=PERFECT,
        )  # fmt: skip


_NEEDED = ("flops", "flops32", "memory", "memory_bandwidth", "near", "near_latency", "far", "far_latency")
_RATES = (
    "flops", "flops32", "memory_bandwidth", "near", "near_latency", "far", "far_latency", "host_bandwidth",
    "disk_bandwidth", "host_memory_bandwidth", "flops8", "flops4",
)  # fmt: skip
_T, _G, _MICRO = 1e12, 1e9, 1e-6

# Data sheets give both directions of links together; here is one of them. Latencies are estimates, and so are all
# numbers of the laptop. `far` is the usual network of such nodes: EDR for V100, HDR for A100, NDR for Hopper, one
# adapter a device (DGX-1 has one for two of them), and XDR-ready NDR for Blackwell. GB200 and GB300 stand in racks of
# 72 that share their links. 4090 and 5090 have no links but PCIe. Memory is in GiB, as torch reports it.
_GIB = 2**30
_AMPERE: dict[str, Any] = {"host_bandwidth": 32 * _G, "disk_bandwidth": 6 * _G}
_HOPPER: dict[str, Any] = {"host_bandwidth": 64 * _G, "disk_bandwidth": 12 * _G, "host_memory_bandwidth": 400 * _G}
_PEAK = {  # of 16-bit, TF32, 8-bit and 4-bit numbers: TFLOP/s
    "ampere": (312, 156, 0, 0), "hopper": (989, 494, 1979, 0), "b200": (2250, 1125, 4500, 9000),
    "gb200": (2500, 1250, 5000, 10000), "b300": (2250, 1125, 4500, 13500), "gb300": (2500, 1250, 5000, 15000),
    "mi300x": (1307, 654, 2615, 0), "4090": (165, 83, 330, 0), "5090": (210, 105, 419, 1676),
}  # fmt: skip


def _preset(name: str, peak: str, memory: float, bandwidth: float, near: float, far: float, **more: Any) -> Hardware:
    """A device by its peaks: memory in GiB, its bandwidth in TB/s, links in GB/s."""
    wide, single, narrow, four = (x * _T for x in _PEAK[peak])
    return Hardware(name, wide, single, int(memory * _GIB), bandwidth * _T, near * _G, 5 * _MICRO, far * _G,
                    10 * _MICRO, flops8=narrow, flops4=four, **more)  # fmt: skip


PRESETS: dict[str, Hardware] = {
    one.name: one
    for one in (
        Hardware(
            "laptop", 0.5 * _T, 0.5 * _T, 16 * 10**9, 50 * _G, 0.1 * _G, 1e-3, 0.1 * _G, 1e-3, 1,
            host_bandwidth=20 * _G, disk_bandwidth=2 * _G, host_memory=16 * 10**9, mixed=False,
        ),
        Hardware("v100", 125 * _T, 15.7 * _T, int(31.74 * _GIB), 0.9e12, 150 * _G, 5 * _MICRO, 6.25 * _G, 10 * _MICRO,
                 host_bandwidth=16 * _G, flash=False),
        _preset("a100-40gb", "ampere", 39.39, 1.555, 300, 25, **_AMPERE),
        _preset("a100-80gb", "ampere", 79.15, 2.039, 300, 25, **_AMPERE),
        _preset("h100", "hopper", 79.11, 3.35, 450, 50, **_HOPPER),
        _preset("h100-500w", "hopper", 95.04, 2.4, 450, 50, **_HOPPER),
        _preset("h800", "hopper", 79.11, 3.35, 200, 50, like="h100", **_HOPPER),
        _preset("h200", "hopper", 139.8, 4.8, 450, 50, **_HOPPER),
        _preset("b200", "b200", 178.3, 7.7, 900, 50, **_HOPPER),
        _preset("b300", "b300", 267.7, 7.7, 900, 100, **_HOPPER),
        _preset("gb200", "gb200", 184.3, 7.7, 900, 50, per_node=72, **{**_HOPPER, "host_bandwidth": 225 * _G,
                "host_memory_bandwidth": 18 * 400 * _G, "host_memory": 36 * 480 * 10**9}),
        _preset("gb300", "gb300", 276.6, 7.7, 900, 100, per_node=72, **{**_HOPPER, "host_bandwidth": 225 * _G,
                "host_memory_bandwidth": 18 * 400 * _G, "host_memory": 36 * 480 * 10**9}),
        _preset("mi300x", "mi300x", 191.9, 5.3, 448, 50, like="h100", **_HOPPER),
        _preset("4090", "4090", 23.6, 1.008, 25, 12.5, like="a100-80gb", **_AMPERE),
        _preset("5090", "5090", 31.4, 1.792, 50, 12.5, like="a100-80gb", **_HOPPER),
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
        built = replace(built, like=built.like or built.name)
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
        if key in ("per_node", "nodes", "host_memory"):
            parts[key] = int(quantity(key, value, zero=True))
        elif key in ("name", "like"):
            parts[key] = value
        elif key in ("mixed", "flash"):
            parts[key] = value in (True, "true")
        else:
            parts[key] = quantity(key, value, zero=key.endswith("latency") or key in ("flops8", "flops4"))
    for key, value in nested.items() if isinstance(nested, dict) else ():
        if key not in inner:
            raise PlanError(f"efficiency {key}={value}: unknown; possible are {', '.join(inner)}")
        shares[key] = quantity(key, value, zero=True)
    if shares:
        parts["efficiency"] = replace(reached(built.like or built.name, "megatron-core"), **shares)
    return replace(built, **parts)
