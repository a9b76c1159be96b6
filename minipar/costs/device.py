"""What a device and the links between devices can do: to emulate one, to limit its memory, or to estimate a plan's
cost.

    DeviceSpec(flops="1TFLOP/s", bandwidth="1GB/s", latency="50us", memory="64MiB")     by rates
    DeviceSpec(costs={"forward": 0.020, "backward": 0.040})                             by times, as in UnitCosts
    DeviceSpec.parse("pcie"), DeviceSpec.parse("forward=20ms backward=40ms latency=1ms")

Rates that are not given are those of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from minipar.costs.links import Line
from minipar.costs.protocol import Costs
from minipar.costs.quantities import quantity
from minipar.errors import PlanError
from minipar.program import Instruction, Program, tier

_TIMES = ("forward", "backward", "input_gradient", "weight_gradient")


@dataclass(frozen=True)
class DeviceSpec:
    """One device, and its links to the others. All ranks have the same.

    flops           floating-point operations a second, of layers; an update takes as long as on this machine
    memory          bytes it can hold
    bandwidth       bytes a second of every link between two devices, and of the collectives over them
    latency         seconds that every message takes in addition to its bytes
    host_bandwidth  bytes a second between the device and its host
    disk_bandwidth  bytes a second between the host and its disk
    costs           times instead of rates: keywords of `UnitCosts` (seconds of one micro-batch on one rank's whole
                    share), or a function from a program to its `Costs`
    name            its name in pictures

    Numbers may be written with units: "64MiB", "1GB/s", "20ms". Errors: PlanError for a number that cannot be read, or
    is negative or zero.
    """

    flops: float | None = None
    memory: int | None = None
    bandwidth: float | None = None
    latency: float | None = None
    host_bandwidth: float | None = None
    disk_bandwidth: float | None = None
    costs: Mapping[str, float] | Callable[[Program], Costs] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for key in ("flops", "memory", "bandwidth", "latency", "host_bandwidth", "disk_bandwidth"):
            given = getattr(self, key)
            if given is not None:
                number = quantity(key, given, zero=key == "latency")
                object.__setattr__(self, key, int(number) if key == "memory" else number)
        if isinstance(self.costs, Mapping):
            unknown = [key for key in self.costs if key not in _TIMES]
            if unknown:
                raise PlanError(f"costs: {unknown[0]!r} is not a time; possible are {', '.join(_TIMES)}")
            object.__setattr__(self, "costs", {k: quantity(k, v, zero=True) for k, v in self.costs.items()})
            if self.flops is not None:
                raise PlanError("costs: times per instruction and flops exclude each other; give one of them")

    def __str__(self) -> str:
        """Its name, or the numbers that it was made from."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("costs", "name")}
        times = dict(self.costs) if isinstance(self.costs, Mapping) else {"costs": self.costs}
        words = [f"{k}={_written(k, v)}" for k, v in {**times, **given}.items() if v]
        return self.name or " ".join(words) or "without limits"

    @property
    def emulates(self) -> bool:
        """Whether it gives times, or rates of computing or of links, that differ from this machine's."""
        rates = (self.flops, self.bandwidth, self.latency, self.host_bandwidth, self.disk_bandwidth, self.costs)
        return any(x is not None for x in rates)

    @property
    def computes(self) -> bool:
        """Whether it gives a speed of computing; otherwise instructions take as long as on this machine."""
        return self.costs is not None or self.flops is not None

    @property
    def links(self) -> bool:
        """Whether it gives a speed of messages; times without rates have infinitely fast links."""
        return self.costs is not None or self.bandwidth is not None or self.latency is not None

    @property
    def messages_by_costs(self) -> bool:
        """Whether messages, too, take the times of a function `costs`."""
        return callable(self.costs) and self.bandwidth is None and self.latency is None

    @property
    def line(self) -> Line:
        """A link between two devices."""
        return Line(self.latency or 0.0, self.bandwidth)

    def copy_bandwidth(self, ins: Instruction) -> float | None:
        """Bytes a second of an OFFLOAD or FETCH; None: as fast as on this machine."""
        to_disk = any(tier(value) == "disk" for value in (ins.reads[0], ins.writes[0]))
        return self.disk_bandwidth if to_disk else self.host_bandwidth

    @staticmethod
    def parse(text: str | DeviceSpec) -> DeviceSpec:
        """The spec that `text` names: one of `link_presets` or `known_hardware`, and `key=value` words that change it.

        Errors: PlanError for an unknown word."""
        if isinstance(text, DeviceSpec):
            return text
        presets = {**link_presets(), **known_hardware()}
        spec = DeviceSpec()
        times: dict[str, float] = {}
        known = [f.name for f in fields(DeviceSpec) if f.name not in ("costs", "name")]
        for word in text.replace(",", " ").split():
            key, equals, value = word.partition("=")
            if not equals and key in presets:
                spec = presets[key]
            elif equals and key in known:
                rate: dict[str, Any] = {key: quantity(key, value, zero=key == "latency")}
                spec = replace(spec, **rate)
            elif equals and key in _TIMES:
                times[key] = quantity(key, value, zero=True)
            else:
                raise PlanError(
                    f"device {text!r}: {word!r} is neither a preset ({', '.join(presets)}) "
                    f"nor one of {', '.join(f'{k}=' for k in (*_TIMES, *known))}"
                )
        return replace(spec, costs=times or None, name=spec.name or text)


THIS_MACHINE = DeviceSpec()


def _written(key: str, number: Any) -> str:
    """A number as text with its unit: "20ms", "1GB/s", "64MiB"."""
    if not isinstance(number, (int, float)):
        return str(number)
    if key == "latency" or key in _TIMES:
        scale, ending = {"s": 1.0, "ms": 1e-3, "us": 1e-6}, ""
    elif key == "memory":
        scale, ending = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}, ""
    else:
        unit = "FLOP" if key == "flops" else "B"
        scale, ending = {f"T{unit}": 1e12, f"G{unit}": 1e9, f"M{unit}": 1e6, unit: 1.0}, "/s"
    name = next((name for name, size in scale.items() if number >= size), list(scale)[-1])
    return f"{number / scale[name]:g}{name}{ending}"


# Rounded numbers, of the order that such links reach in practice. Change them with dataclasses.replace.
@cache
def link_presets() -> dict[str, DeviceSpec]:
    """Devices of this machine's speed with other links, by name."""
    return {
        "laptop-link": DeviceSpec(bandwidth=100e6, latency=1e-3, name="laptop-link"),  # gigabit network between laptops
        "pcie": DeviceSpec(bandwidth=12e9, latency=20e-6, host_bandwidth=12e9, name="pcie"),
        "nvlink-like": DeviceSpec(bandwidth=200e9, latency=5e-6, host_bandwidth=25e9, name="nvlink-like"),
    }


@cache
def known_hardware() -> dict[str, DeviceSpec]:
    """The presets of costs/hardware.py as devices, by name: peaks, without the efficiency that is reached."""
    from minipar.costs.hardware import PRESETS as machines  # (tables that a run on this machine does not need)

    return {
        name: DeviceSpec(
            one.flops, one.memory, one.near, one.near_latency, one.host_bandwidth, one.disk_bandwidth, name=name
        )
        for name, one in machines.items()
    }


def hardware(name: str) -> DeviceSpec:
    """The spec of `known_hardware` called `name`. Errors: `PlanError`, which lists all names."""
    known = known_hardware()
    if name not in known:
        raise PlanError(f"hardware {name!r}: no such preset; there are {', '.join(known)}")
    return known[name]


def holding(size: int) -> tuple[str, ...]:
    """The names in `known_hardware` of devices with at least `size` bytes of memory."""
    return tuple(name for name, spec in known_hardware().items() if spec.memory is not None and spec.memory >= size)
