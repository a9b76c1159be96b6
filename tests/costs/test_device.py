"""DeviceSpec: numbers with units, presets, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minipar.costs.device import DeviceSpec, hardware, holding, known_hardware, link_presets
from minipar.costs.hardware import PRESETS
from minipar.costs.quantities import quantity
from minipar.errors import PlanError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("64MiB", 64 * 2**20),
        ("1GB/s", 1e9),
        ("20ms", 0.02),
        ("50us", 50e-6),
        ("1.5TFLOP/s", 1.5e12),
        ("2e3", 2000),
        (7, 7),
        ("3 GiB", 3 * 2**30),
    ],
)
def test_numbers_have_units(text: object, number: float) -> None:
    assert quantity("x", text) == pytest.approx(number)


@pytest.mark.parametrize("bad", ["", "fast", "-1", "1.2.3", "3 parsecs", 0, -1, True, None, float("inf"), float("nan")])
def test_what_is_no_positive_number_is_refused(bad: object) -> None:
    with pytest.raises(PlanError, match="bandwidth="):
        quantity("bandwidth", bad)


def test_a_spec_reads_units_and_says_what_it_was_given() -> None:
    spec = DeviceSpec(flops="1TFLOP/s", memory="64MiB", bandwidth="1GB/s", latency="50us")  # type: ignore[arg-type]
    assert (spec.flops, spec.memory, spec.bandwidth, spec.latency) == (1e12, 64 * 2**20, 1e9, pytest.approx(50e-6))
    assert isinstance(spec.memory, int)
    assert str(spec) == "flops=1TFLOP/s memory=64MiB bandwidth=1GB/s latency=50us"
    assert str(DeviceSpec.parse(str(spec))) == str(spec)
    assert str(replace(spec, name="mine")) == "mine"
    assert str(DeviceSpec()) == "without limits"


def test_text_names_presets_and_changes_them() -> None:
    assert DeviceSpec.parse("pcie") == link_presets()["pcie"]
    changed = DeviceSpec.parse("pcie latency=1ms memory=1GiB")
    assert (changed.bandwidth, changed.latency, changed.memory) == (link_presets()["pcie"].bandwidth, 1e-3, 2**30)
    times = DeviceSpec.parse("forward=20ms, backward=40ms")
    assert times.costs == {"forward": 0.02, "backward": 0.04}
    assert times.emulates
    assert not DeviceSpec.parse("memory=1MiB").emulates
    assert link_presets().keys() == {"laptop-link", "pcie", "nvlink-like"}


@pytest.mark.parametrize("text", ["pci", "forwards=1ms", "latency=fast", "memory=0", "pcie=3"])
def test_text_that_is_no_device_is_refused_with_what_is_possible(text: str) -> None:
    with pytest.raises(PlanError, match="laptop-link|must be a positive number"):
        DeviceSpec.parse(text)


def test_times_and_operations_exclude_each_other() -> None:
    with pytest.raises(PlanError, match="exclude each other"):
        DeviceSpec(flops=1e9, costs={"forward": 1.0})
    with pytest.raises(PlanError, match="'forwards' is not a time"):
        DeviceSpec(costs={"forwards": 1.0})


def test_hardware_is_a_complete_device():
    assert list(known_hardware()) == list(PRESETS)
    for name, spec in known_hardware().items():
        assert isinstance(spec, DeviceSpec)
        assert spec.name == name
        assert spec.costs is None
        for rate in (spec.flops, spec.memory, spec.bandwidth, spec.latency, spec.host_bandwidth, spec.disk_bandwidth):
            assert rate is not None
            assert rate > 0


def test_peaks_and_sizes_are_those_of_the_data_sheets():
    sheets = {"v100": (125e12, 32), "a100-40gb": (312e12, 40), "a100-80gb": (312e12, 80), "h100": (989e12, 80)}
    for name, (flops, gigabytes) in (sheets | {"h200": (989e12, 141)}).items():
        assert hardware(name).flops == flops
        assert hardware(name).memory == pytest.approx(gigabytes * 2**30, rel=0.08)  # (the driver takes some of it)


def test_what_holds_so_many_bytes():
    assert holding(0) == tuple(known_hardware())
    assert holding(PRESETS["h200"].memory) == ("h200", "b200", "b300", "gb200", "gb300", "mi300x")
    assert holding(PRESETS["h200"].memory + 1) == ("b200", "b300", "gb200", "gb300", "mi300x")
    assert holding(10**12) == ()


def test_unknown_hardware_is_refused_with_what_there_is():
    with pytest.raises(PlanError, match="hardware 'tpu': no such preset; there are laptop, v100"):
        hardware("tpu")
