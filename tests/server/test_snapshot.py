"""Snapshots of a parameter server: reading gives what was written, and the two newest are kept."""

import torch

from minipar.server import snapshot


def test_what_is_written_is_read(tmp_path):
    tensors = {
        "flat": torch.arange(7, dtype=torch.uint8),  # so that what follows lies at no round place
        "momentum": torch.randn(3, 5, dtype=torch.complex128).mT,
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "order": torch.zeros(0, 4, dtype=torch.int64),
    }
    for number in range(4):
        snapshot.write(str(tmp_path), 0, number, tensors, {"number": number})
    assert snapshot.numbers(str(tmp_path), 0) == [2, 3]
    found, facts = snapshot.read(str(tmp_path), 0, 3)
    assert facts == {"number": 3}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
