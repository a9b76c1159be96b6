"""Accelerators as their vendors' data sheets describe them: what a plan fits on, and what it could cost there.

    spec = hardware.find("h100")
    mine = dataclasses.replace(spec, memory="60GB", name="mine")

flops            peak of dense matrix products in bfloat16 with float32 sums (V100: float16; the laptop: float32).
                 Real training reaches a third to a half of it
memory           as sold, in units of 10^9 bytes; devices report a little more, the driver needs a little
bandwidth        one direction of all links of one device inside a machine (data sheets print the sum of both)
latency          an estimate, as are the disk's speed and everything about the laptop: no data sheet states them
host_bandwidth   one direction of PCIe, x16
"""

from __future__ import annotations

from minipar.costs.device import DeviceSpec
from minipar.errors import PlanError

_T, _G = 1e12, 1e9

PRESETS: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        # 8 cores; its "links" are a gigabit network to other laptops, its device is its own memory
        DeviceSpec(0.5 * _T, 16 * 10**9, 0.1 * _G, 1e-3, 20 * _G, 2 * _G, name="laptop"),
        # SXM2; NVLink 2, 300 GB/s; PCIe 3
        DeviceSpec(125 * _T, 32 * 10**9, 150 * _G, 5e-6, 16 * _G, 3 * _G, name="v100"),
        # SXM4; NVLink 3, 600 GB/s; PCIe 4
        DeviceSpec(312 * _T, 40 * 10**9, 300 * _G, 5e-6, 32 * _G, 6 * _G, name="a100-40gb"),
        DeviceSpec(312 * _T, 80 * 10**9, 300 * _G, 5e-6, 32 * _G, 6 * _G, name="a100-80gb"),
        # SXM5; NVLink 4, 900 GB/s; PCIe 5
        DeviceSpec(989 * _T, 80 * 10**9, 450 * _G, 5e-6, 64 * _G, 12 * _G, name="h100"),
        DeviceSpec(989 * _T, 141 * 10**9, 450 * _G, 5e-6, 64 * _G, 12 * _G, name="h200"),
    )
}


def find(name: str) -> DeviceSpec:
    """The preset called `name`. Errors: `PlanError` that lists what there is."""
    if name not in PRESETS:
        raise PlanError(f"hardware {name!r}: no such preset; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def holding(size: int) -> tuple[str, ...]:
    """The presets with at least `size` bytes of memory."""
    return tuple(name for name, spec in PRESETS.items() if spec.memory is not None and spec.memory >= size)
