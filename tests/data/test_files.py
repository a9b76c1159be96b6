"""Data sets in files: the right rows, only those, and in little memory."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from minipar import data
from minipar.data import files
from minipar.errors import PlanError


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.bin"
    (np.arange(1000) * 7 % 65536).astype("<u2").tofile(path)
    return str(path)


@pytest.fixture
def records(tmp_path):
    x, y = np.arange(60, dtype=np.float32).reshape(20, 3), np.arange(20, dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    return str(tmp_path / "x.npy"), str(tmp_path / "y.npy")


def test_tokens(tokens, tmp_path):
    source = data.Tokens(tokens, 8, held_out=100)
    assert (source.windows("train"), source.windows("validation")) == (112, 12)  # (900 - 8) / 8, (100 - 8) / 8
    x, y = source.batch(0, 5)
    assert x.dtype == y.dtype == torch.int64
    assert x.shape == y.shape == (5, 8)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(y - x, torch.full_like(x, 7))
    assert max(source.batch(0, 500)[1].max(), source.batch(1, 500)[1].max()) <= 899 * 7
    assert source.batch(0, 50, split="validation")[0].min() >= 900 * 7
    rows = data.Epochs(source, shuffle=False)
    seen = torch.cat([rows.batch(step, 9)[0] for step in range(rows.steps(9))]).flatten()
    assert torch.equal(seen, torch.arange(len(seen)) * 7)
    np.save(tmp_path / "tokens.npy", np.fromfile(tokens, dtype="<u2").astype(">i4"))
    same = data.Tokens(path=str(tmp_path / "tokens.npy"), context=8, held_out=100)
    assert torch.equal(same.batch(0, 5)[0], x), "a .npy file says its own dtype and byte order"


def test_records(records):
    source = data.Records(*records, held_out=5)
    rows = data.Epochs(source)
    x, y = (torch.cat(part) for part in zip(*(rows.batch(step, 4) for step in range(4)), strict=True))
    assert y.dtype == torch.int64
    assert sorted(y.tolist()) == list(range(15))
    assert torch.equal(x[:, 0], y * 3.0)
    assert sorted(data.Epochs(source, split="validation").batch(0, 5)[1].tolist()) == [15, 16, 17, 18, 19]
    assert len(pickle.dumps(rows)) < 1000


def test_a_changed_file_is_opened_anew(records):
    source = data.Records(x=records[0], y=records[1])
    assert source.places("train") == 20
    for path in records:
        np.save(path, np.load(path)[:7].copy())
    assert source.places("train") == 7


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_last_place_is_the_last_whole_row(tokens, records, split):
    for source in (data.Tokens(path=tokens, held_out=200), data.Records(x=records[0], y=records[1], held_out=5)):
        last = source.places(split) - 1
        assert len(source.examples(np.array([last]), split)[0]) == 1
        for place in (last + 1, -1):
            with pytest.raises(IndexError):
                source.examples(np.array([place]), split)


def test_a_part_of_a_batch_touches_only_its_rows(tmp_path, monkeypatch):
    """Counted at the file: bytes that a rank copies out of it are those of its own rows."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.random((64, 1000)))
    np.save(tmp_path / "y.npy", np.arange(64))
    source = data.Epochs(data.Records(x=str(tmp_path / "x.npy"), y=str(tmp_path / "y.npy")), seed=2)
    read = []
    plain = files.Opened.read

    def counting(self, places):
        found = plain(self, places)
        read.append((places, found.nbytes))
        return found

    monkeypatch.setattr(files.Opened, "read", counting)
    rows = {}
    for rank in range(4):
        read.clear()
        stream = data.stream(source, 32, rank, {"dp": 4})
        for _ in range(2):
            _, (x, y) = next(stream)
            assert x.shape == (8, 1000)
            rows.setdefault(rank, []).extend(y.tolist())
        assert sum(size for _, size in read) == 16 * 8 * (1000 + 1)
    assert sorted(row for mine in rows.values() for row in mine) == list(range(64))


BIG = """
import resource, sys
import numpy as np
import torch
from minipar import data

def resident():
    text = open("/proc/self/status").read()
    return {key: int(text.split(key + ":")[1].split()[0]) << 10 for key in ("VmRSS", "VmHWM", "RssAnon")}

rows = data.Epochs(data.Records(x=sys.argv[1], y=sys.argv[2]), seed=3)
rows.batch(0, 2)
before = resident()
# From here on: at most 64 MiB more of memory of its own, though the file has 512.
limit = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024 + (64 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
seen = set()
for step in range(rows.steps(32)):
    x, y = rows.batch(step, 32)
    assert torch.equal(x[:, 0], y.float())
    seen.update(y.tolist())
assert seen == set(range(len(seen)))
after = resident()
print(len(seen), after["VmHWM"] - before["VmHWM"], after["RssAnon"] - before["RssAnon"])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_file_larger_than_the_memory_allowed(tmp_path):
    """256 MiB are read whole, an epoch in random order, by a process that may have 64 MiB more and grows by less."""
    count, width = 512, 131072  # a row has 512 KiB
    x = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(count, width))
    x[:, 0] = np.arange(count)  # the rest is a hole in the file
    x.flush()
    del x
    np.save(tmp_path / "y.npy", np.arange(count))
    assert (tmp_path / "x.npy").stat().st_size > 256 << 20
    command = [sys.executable, "-c", BIG, str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    seen, peak, own = map(int, done.stdout.split())
    assert seen == count
    assert peak < 160 << 20
    assert own < 64 << 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: data.Tokens(path=str(p / "none")).places("train"), "none': No such file"),
        (lambda p: data.Tokens(path=str(p / "t.bin"), context=0), "context=0"),
        (
            lambda p: data.Tokens(path=str(p / "t.bin"), context=10).places("train"),
            "rows of 10 tokens: the train part.*has 10",
        ),
        (lambda p: data.Tokens(path=str(p / "t.bin"), context=2).places("validation"), "validation part.*has 0"),
        (lambda p: data.Tokens(path=str(p / "t.bin"), dtype="u7").places("train"), "data type"),
        (
            lambda p: data.Records(x=str(p / "a.npy"), y=str(p / "b.npy")).places("train"),
            "b.npy: has 3 rows, but.*has 4",
        ),
        (
            lambda p: data.Records(x=str(p / "a.npy"), y=str(p / "a.npy")).places("validation"),
            "held_out=0: leaves no rows",
        ),
        (lambda p: data.Records(x=str(p / "a.npy"), y=str(p / "a.npy"), held_out=4).places("train"), "held_out=4"),
        (lambda p: data.Records(x=str(p / "f.npy"), y=str(p / "a.npy")).places("train"), "stored by columns"),
        (lambda p: data.Records(x=str(p / "t.npy"), y=str(p / "a.npy")).places("train"), "t.npy"),
    ],
)
def test_refusals(make, message, tmp_path):
    np.arange(10, dtype="u2").tofile(tmp_path / "t.bin")
    (tmp_path / "t.npy").write_text("no numbers")
    np.save(tmp_path / "a.npy", np.zeros((4, 2)))
    np.save(tmp_path / "b.npy", np.zeros((3, 2)))
    np.save(tmp_path / "f.npy", np.asfortranarray(np.zeros((4, 2))))
    with pytest.raises(PlanError, match=message):
        make(tmp_path)
