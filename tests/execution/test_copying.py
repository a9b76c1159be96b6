"""How long a copy to a slower tier takes, measured with the stores themselves."""

from __future__ import annotations

import pytest
import torch

from minipar.costs.rates import Copies
from minipar.errors import StoreError
from minipar.execution.measuring.calibration import measure_copies


def test_lines_of_both_tiers(tmp_path):
    found = measure_copies(torch.device("cpu"), True, str(tmp_path))
    assert all(line.at(1 << 20) > 0 for line in found)
    assert found.to_disk != Copies().to_disk  # measured
    assert list(tmp_path.iterdir()) == []  # nothing is left


def test_the_disk_is_left_alone_unless_it_is_asked_for():
    found = measure_copies(torch.device("cpu"), False)
    assert found[2:] == Copies()[2:]
    assert found.to_host != Copies().to_host


def test_a_folder_that_cannot_be_is_named():
    with pytest.raises(StoreError, match="no/such/folder"):
        measure_copies(torch.device("cpu"), True, "/no/such/folder")
