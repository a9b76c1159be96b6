"""Hardware presets: DeviceSpecs that a user can edit, with what the vendors state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minipar.costs import hardware
from minipar.costs.device import DeviceSpec
from minipar.errors import PlanError


def test_every_preset_is_a_complete_device():
    assert list(hardware.PRESETS) == ["laptop", "v100", "a100-40gb", "a100-80gb", "h100", "h200"]
    for name, spec in hardware.PRESETS.items():
        assert isinstance(spec, DeviceSpec)
        assert spec.name == name
        assert spec.costs is None
        for rate in (spec.flops, spec.memory, spec.bandwidth, spec.latency, spec.host_bandwidth, spec.disk_bandwidth):
            assert rate is not None
            assert rate > 0


def test_peaks_and_sizes_are_those_of_the_data_sheets():
    sheets = {"v100": (125e12, 32), "a100-40gb": (312e12, 40), "a100-80gb": (312e12, 80), "h100": (989e12, 80)}
    for name, (flops, gigabytes) in (sheets | {"h200": (989e12, 141)}).items():
        assert (hardware.find(name).flops, hardware.find(name).memory) == (flops, gigabytes * 10**9)


def test_a_preset_can_be_edited_and_the_table_stays():
    mine = replace(hardware.find("h100"), memory="60GB", name="mine")
    assert (mine.memory, mine.flops) == (60 * 10**9, hardware.find("h100").flops)
    assert hardware.find("h100").memory == 80 * 10**9


def test_what_holds_so_many_bytes():
    assert hardware.holding(0) == tuple(hardware.PRESETS)
    assert hardware.holding(40 * 10**9) == ("a100-40gb", "a100-80gb", "h100", "h200")
    assert hardware.holding(40 * 10**9 + 1) == ("a100-80gb", "h100", "h200")
    assert hardware.holding(10**12) == ()


def test_an_unknown_name_is_refused_with_what_there_is():
    with pytest.raises(PlanError, match="hardware 'tpu': no such preset; there are laptop, v100"):
        hardware.find("tpu")
