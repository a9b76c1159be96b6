"""What travels beside a pickle: all kinds of tensors, independent copies, and nothing left behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from minipar.cluster import Cluster, parcel
from minipar.cluster.parcel import LARGE, pack, unpack
from minipar.errors import RankError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MANY = LARGE  # elements: of any dtype, enough bytes to travel beside the pickle


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(4, device="cpu") as made:
        yield made


@pytest.fixture(autouse=True)
def no_kept_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins without memory files of earlier ones."""
    kept: list[parcel._File] = []
    monkeypatch.setattr(parcel, "_kept", kept)
    yield
    for file in kept:
        file.close()


def there_and_back(value: Any) -> Any:
    packed = pack(value)
    assert packed.segment is not None
    assert len(packed.data) < LARGE
    return unpack(packed)


def descriptors() -> int:
    """How many are open here, besides those of the files that may be filled again (which are open for writing)."""
    gc.collect()
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder itself, closed by now
            ours = os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:minipar")
            count += not (ours and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR)
    return count


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("count", [0, 1, 1000, MANY])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_size(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randint(0, 2, (count,)).to(dtype)
    packed = pack(tensor)
    assert (packed.segment is not None) == (count == MANY)
    found = unpack(packed)
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    assert found.data_ptr() != tensor.data_ptr() or not count
    found.fill_(1)  # it can be written, and the original does not notice
    assert count < 1000 or not tensor.all()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t(),
        lambda x: x[::3, 5:],
        lambda x: x.expand(3, *x.shape),
        lambda x: x.conj() if x.is_complex() else x[None],
    ],
    ids=["transposed", "part", "expanded", "view"],
)
def test_tensors_that_are_not_contiguous(change: Callable[[Any], Any]) -> None:
    tensor = change(torch.randn(512, MANY // 512, dtype=torch.complex64))
    found = there_and_back(tensor)
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()


def test_what_a_tensor_carries_besides_its_numbers() -> None:
    leaf = torch.ones(MANY, requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(MANY), requires_grad=False)
    named = torch.ones(MANY)
    named.note = "mine"  # type: ignore[attr-defined]
    found = there_and_back([leaf, parameter, named])
    assert found[0].requires_grad
    assert found[0].is_leaf
    assert type(found[1]) is torch.nn.Parameter
    assert not found[1].requires_grad
    assert found[2].note == "mine"
    (found[0] * 2).sum().backward()
    assert torch.equal(found[0].grad, torch.full((MANY,), 2.0))


def test_the_same_memory_stays_the_same_memory() -> None:
    base = torch.zeros(2, MANY)
    other = torch.zeros(2, MANY)
    layer = torch.nn.Linear(512, 512)
    tied = torch.nn.Sequential(layer, layer)
    found, again, row, apart, model = there_and_back([base, base, base[1], other, tied])
    assert found is again
    row[3] = 7
    assert found[1, 3] == 7
    assert not apart.any()
    assert model[0].weight is model[1].weight


def test_arrays() -> None:
    array = np.arange(MANY, dtype=np.float64).reshape(-1, 8)
    fixed = array.copy()
    fixed.flags.writeable = False
    found, fortran, still_fixed = there_and_back([array, np.asfortranarray(array), fixed])
    strided = unpack(pack(array[::2]))  # which numpy itself puts into the pickle
    for one, expected in zip((found, fortran, still_fixed, strided), (array, array, array, array[::2]), strict=True):
        np.testing.assert_array_equal(one, expected)
    assert fortran.flags.f_contiguous
    assert not still_fixed.flags.writeable
    found[0, 0] = -1
    assert array[0, 0] == 0
    assert still_fixed[0, 0] == 0


def test_every_rank_has_its_own_copy(cluster: Cluster) -> None:
    def write(x: torch.Tensor, a: Any) -> tuple[float, float, torch.Tensor]:
        rank = int(os.environ["RANK"])
        x[rank] += 10
        a[rank] += 10
        time.sleep(0.1)  # all have written
        return float(x.sum()), float(a.sum()), x

    tensor, array = torch.zeros(MANY), np.zeros(MANY)
    for _ in range(3):  # also in files that are filled again
        results = cluster.run(write, tensor, array)
        assert [result[:2] for result in results] == [(10.0, 10.0)] * 4
        for rank, (_, _, x) in enumerate(results):
            assert x[rank] == 10
        assert not tensor.any()
        assert not array.any()


def test_a_file_is_filled_again_only_when_nobody_has_it() -> None:
    first = pack(np.full(MANY, 1.0))
    second = pack(np.full(MANY, 2.0))
    assert len(parcel._kept) == 2  # the first was still on its way
    one = unpack(first)
    del second
    third = pack(np.full(MANY, 3.0))
    assert len(parcel._kept) == 2
    reader, writer = os.pipe()
    child = os.fork()
    if not child:  # holds what its parent had received
        os.close(writer)
        os.read(reader, 1)
        os._exit(0 if float(one.sum()) == MANY else 1)
    os.close(reader)
    del one
    fourth = pack(np.full(MANY, 4.0))  # would fit both files: the child has one, the third parcel the other
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    assert float(unpack(third)[0]) == 3
    assert float(unpack(fourth)[0]) == 4


def test_a_forked_process_does_not_fill_the_files_of_its_parent() -> None:
    pack(np.zeros(MANY)).close()
    mine = parcel._kept[0]
    child = os.fork()
    if not child:
        pack(np.ones(MANY))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert mine.free()
    assert not any(os.pread(mine._descriptor, MANY, 0))


def test_nothing_is_left_behind(cluster: Cluster) -> None:
    def use(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    tensor = torch.zeros(MANY)
    for _ in range(3):
        cluster.run(use, tensor)
    shared = set(os.listdir("/dev/shm"))
    before, in_ranks = descriptors(), cluster.run(descriptors)
    kept = [cluster.run(use, tensor) for _ in range(5)]
    assert descriptors() == before  # what arrived holds memory, but no descriptors
    del kept
    for _ in range(20):
        cluster.run(use, tensor)
    with pytest.raises(RankError, match="cannot be loaded"):
        cluster.run(use, [tensor, _OnlyHere()])
    assert descriptors() == before
    assert cluster.run(descriptors) == in_ranks
    assert set(os.listdir("/dev/shm")) == shared


class _OnlyHere:
    def __reduce__(self) -> Any:
        return (__import__, ("a_module_of_the_driver_alone",))


def test_without_memory_files_all_is_in_the_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(MANY)

    def refuse(*_: object) -> int:
        raise OSError("no more")

    monkeypatch.setattr(os, "memfd_create", refuse)
    packed = pack([tensor, tensor[5:]])
    assert packed.segment is None
    found, part = unpack(packed)
    part[0] = -1
    assert found[5] == -1
    monkeypatch.delattr(os, "memfd_create")
    assert torch.equal(unpack(pack(tensor)), tensor)


def test_threads_may_pack_at_once() -> None:
    found: list[bool] = []

    def work(k: int) -> None:
        for _ in range(20):
            found.append(bool((unpack(pack(np.full(MANY, k))) == k).all()))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


def test_what_belongs_to_a_process_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("hello")
    way_out = "give its path, and open it in the function"
    for mode in ("r", "rb", "w", "r+b"):
        with open(path, mode) as file, pytest.raises(RankError, match=f"open file .*text.*; {way_out}"):
            cluster.run(print, file)
    with pytest.raises(RankError, match="generator '<genexpr>'; give a list, or make it in the function"):
        cluster.run(print, (i for i in range(3)))

    def stream() -> Iterator[int]:
        yield 1

    with pytest.raises(RankError, match="the result of rank 0, a generator, cannot be .*'stream'; give a list"):
        cluster.run(stream)
    assert cluster.run(lambda f: list(f()), stream) == [[1]] * 4  # the function itself may travel
    cluster.run(lambda: print("to", file=sys.stderr))


def test_other_pickles_are_as_ever() -> None:
    meta = torch.empty(3, device="meta")
    assert unpack(pack(meta)).device.type == "meta"
    storage = torch.ones(4).untyped_storage()
    assert unpack(pack(storage)).tolist() == storage.tolist()
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(unpack(pack(sparse)).to_dense(), torch.eye(3))
    with pytest.raises((pickle.PicklingError, TypeError)):
        pack(threading.Lock())
