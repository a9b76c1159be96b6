"""The disk store: tensors return bit by bit, the capacity is kept, damage and full disks are reported."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import pytest
import torch

from minipar.errors import StoreError
from minipar.execution.memory.disk import STAGE, DiskStore, Ledger

MAKERS: dict[str, Callable[[Path], DiskStore]] = {
    "disk": lambda folder: DiskStore(str(folder)),
    "disk through the page cache": lambda folder: DiskStore(str(folder), direct=False),
}


@pytest.fixture(params=MAKERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskStore]:
    made = MAKERS[request.param](tmp_path)
    yield made
    made.close()
    assert not list(tmp_path.iterdir())


TENSORS = [
    torch.randn(3, 5),
    torch.randn(0, 4),
    torch.tensor(3.5, dtype=torch.float64),
    torch.randint(0, 9, (1025,)),
    torch.randn(7, 9).to(torch.bfloat16),
    torch.rand(11) > 0.5,
    torch.randn(4, 6, dtype=torch.complex64),
    torch.randn(6, 8).t(),
    torch.randn(STAGE // 4 + 1),  # more than the staging buffer
]


def got(store: DiskStore, key: Hashable, like: torch.Tensor) -> torch.Tensor:
    """What a store brings into a tensor of this form."""
    into = torch.empty_like(like)
    store.fetch(key, into).result()
    return into


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_what_is_put_comes_back_as_often_as_it_is_asked_for(store: DiskStore) -> None:
    for k, tensor in enumerate(TENSORS):
        store.put(("saved", k), tensor)
    for _ in range(2):
        for k, tensor in reversed(list(enumerate(TENSORS))):
            assert same(got(store, ("saved", k), tensor), tensor)
    assert store.ledger.bytes == sum(t.numel() * t.element_size() for t in TENSORS)


def test_what_comes_back_is_memory_of_its_own(store: DiskStore) -> None:
    store.put("x", torch.ones(10)).result()
    got(store, "x", torch.ones(10)).zero_()
    assert got(store, "x", torch.ones(10)).sum() == 10


def test_putting_again_replaces(store: DiskStore) -> None:
    store.put("x", torch.zeros(10))
    store.put("x", torch.ones(5))
    assert same(got(store, "x", torch.ones(5)), torch.ones(5))
    assert store.ledger.bytes == 20


def test_what_was_dropped_or_never_put_is_unknown(store: DiskStore) -> None:
    store.put("x", torch.ones(3))
    store.drop("x")
    store.drop("y")
    assert store.ledger.bytes == 0
    for key in ("x", "y"):
        with pytest.raises(StoreError, match=f"nothing was put under {key}"):
            got(store, key, torch.ones(3))


def test_a_capacity_holds(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path), 100)
    store.put("x", torch.zeros(20))
    with pytest.raises(StoreError, match=r"disk: y needs 80 bytes, but 80 of 100 are taken"):
        store.put("y", torch.zeros(20))
    store.put("x", torch.zeros(25))  # its own place counts as free
    assert same(got(store, "x", torch.zeros(25)), torch.zeros(25))
    store.close()


def file_of(store: DiskStore) -> Path:
    return Path(f"/proc/self/fd/{store.file}")


def test_damage_is_found(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path))
    store.put("x", torch.arange(5000)).result()
    with open(file_of(store), "r+b") as file:
        file.seek(123)
        file.write(b"!")
    with pytest.raises(StoreError, match="damaged"):
        got(store, "x", torch.arange(5000))
    for size in (512, 0):
        os.truncate(file_of(store), size)
        with pytest.raises(StoreError, match="cut short|damaged"):
            got(store, "x", torch.arange(5000))
    store.close()


def test_a_full_disk_is_told_and_the_last_state_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(str(tmp_path))
    store.put("x", torch.ones(5000)).result()

    def full(file: int, data: object, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match=r"could not be written .* No space left"):
            store.put("x", torch.zeros(5000)).result()
    assert same(got(store, "x", torch.ones(5000)), torch.ones(5000))
    store.put("x", torch.zeros(5000)).result()
    assert same(got(store, "x", torch.zeros(5000)), torch.zeros(5000))
    store.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="possible is one that can be written"):
        DiskStore(str(tmp_path / "missing"))


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path))
    store.put("x", torch.ones(5000)).result()
    assert not list(tmp_path.iterdir())  # a file without a name is freed by the system when its process has ended
    assert file_of(store).stat().st_nlink == 0
    store.close()


def test_a_place_is_used_again_only_after_the_reads_of_it(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path))
    store.put("x", torch.zeros(300_000)).result()
    for k in range(1, 20):
        into = torch.empty(300_000)
        read = store.fetch("x", into)  # of the one before
        store.put("x", torch.full((300_000,), float(k)))
        store.put("y", torch.full((300_000,), -1.0)).result()
        read.result()
        assert into.unique().item() in (k - 1, k)
    assert file_of(store).stat().st_size < 8 * 300_000 * 4
    store.close()


def test_into_a_tensor_that_is_there(store: DiskStore) -> None:
    tensor = torch.randn(STAGE // 4 + 1)
    store.put("x", tensor)
    into = torch.zeros_like(tensor)
    store.fetch("x", into).result()  # after the put, though on another thread
    assert torch.equal(into, tensor)
    with pytest.raises(StoreError, match="nothing was put under y"):
        store.fetch("y", into)


def test_what_others_hold_counts() -> None:
    ledger = Ledger("host", 100)
    ledger.take("elsewhere", 90)
    with pytest.raises(StoreError, match="90 of 100 are taken"):
        ledger.take("x", 16)
    assert ledger.drop("elsewhere")
    ledger.take("x", 16)
    assert ledger.bytes == 16
