"""The data: every reader gets the same rows; splits and shards do not overlap; data sets in files."""

import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from minipar import data, models
from minipar.data import files
from minipar.data import text as text_module
from minipar.data.sources import draw
from minipar.errors import PlanError

SMALL = 200_000  # bytes of text; enough for every test here

SOURCES = [
    pytest.param(data.Text(context=16, limit=SMALL), id="text"),
    pytest.param(data.Windows(window=8, limit=SMALL), id="windows"),
    pytest.param(data.Digits(), id="digits"),
]


def both(batch):
    return [t.tolist() for t in batch]


def test_text_is_the_next_byte_of_the_standard_library():
    source = data.Text(context=16, limit=SMALL)
    assert source.vocab == 256
    x, y = source.batch(0, 12)
    assert x.shape == y.shape == (12, 16)
    assert x.dtype == y.dtype == torch.long
    assert torch.equal(x[:, 1:], y[:, :-1])
    whole = text_module.corpus(SMALL)["train"].tobytes()
    for row, targets in zip(x.tolist(), y.tolist(), strict=True):
        assert bytes([*row, targets[-1]]) in whole
    assert b"def " in whole
    assert b"import " in whole


def test_windows_are_scaled_bytes_and_the_next_one():
    source = data.Windows(window=8, limit=SMALL)
    x, y = source.batch(0, 50)
    assert x.shape == (50, 8)
    assert x.dtype == torch.float32
    assert y.shape == (50,)
    assert y.dtype == torch.long
    assert x.min() >= -1
    assert x.max() <= 1
    whole = text_module.corpus(SMALL)["train"].tobytes()
    for row, target in zip(((x + 1) * 127.5).round().long().tolist(), y.tolist(), strict=True):
        assert bytes([*row, target]) in whole


def test_digits():
    source = data.digits()
    x, y = source.batch(0, 100)
    assert x.shape == (100, 64)
    assert x.dtype == torch.float32
    assert 0 <= x.min() < x.max() == 1
    assert set(y.tolist()) == set(range(10))
    assert source.windows("train") + source.windows("validation") == 1797


def test_digits_are_those_of_scikit_learn_which_is_not_imported() -> None:
    script = """
        import sys
        import numpy as np
        from minipar.data.images import images
        found = images()
        print("sklearn" in sys.modules)
        from sklearn.datasets import load_digits
        x, y = load_digits(return_X_y=True)
        split = ["validation" if k % 10 == 9 else "train" for k in range(len(x))]
        print(all(np.array_equal(found[s][0] * 16, x[[each == s for each in split]])
                  and np.array_equal(found[s][1], y[[each == s for each in split]]) for s in found))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\nTrue\n", "")


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr("minipar.data.images.find_spec", lambda name: None)
    with pytest.raises(PlanError, match="pip install scikit-learn"):
        data.digits()


@pytest.mark.parametrize("source", SOURCES)
def test_a_row_is_the_same_whoever_reads_it(source):
    whole = source.batch(3, 10)
    for rows in (slice(2, 7), slice(None, None, 3), range(7, 10), range(9, -1, -2), slice(4, 4)):
        part = source.batch(3, 10, rows=rows)
        chosen = list(range(10)[rows] if isinstance(rows, slice) else rows)
        assert both(part) == [t[chosen].tolist() for t in whole]
    assert both(source.batch(3, 4)) == [t[:4].tolist() for t in whole], "a row does not depend on the batch's size"
    again = pickle.loads(pickle.dumps(source))
    assert both(again.batch(3, 10)) == both(whole)


@pytest.mark.parametrize("source", SOURCES)
def test_steps_seeds_and_splits_draw_different_rows(source):
    other_seed = type(source)(**{**source.__dict__, "seed": 1})
    batches = [
        source.batch(0, 8),
        source.batch(1, 8),
        other_seed.batch(0, 8),
        source.batch(0, 8, split="validation"),
    ]
    seen = [b[0].tolist() for b in batches]
    assert all(a != b for k, a in enumerate(seen) for b in seen[:k])
    assert len({tuple(row) for row in batches[0][0].tolist()}) > 4, "rows of a batch differ"


@pytest.mark.parametrize("source", SOURCES)
def test_an_epoch_has_the_whole_split_once(source):
    """Its rows follow each other; what is left over at the end of a text is too short for one more row."""
    places = []

    class Seen(type(source)):
        def examples(self, where, split):
            places.extend(where.tolist())
            return super().examples(where, split)

    seen = Seen(**source.__dict__)
    rows = data.Epochs(seen, shuffle=False, split="validation")
    assert sum(len(rows.batch(step, 7)[0]) for step in range(rows.steps(7))) == seen.windows("validation")
    assert places == [k * seen.stride for k in range(seen.windows("validation"))]
    assert places[-1] + seen.stride >= seen.places("validation") > places[-1]


@pytest.mark.parametrize("source", SOURCES)
def test_the_last_place_is_the_last_whole_row(source):
    last = source.places("train") - 1
    x, y = source.examples(np.array([last]), "train")
    assert len(x) == len(y) == 1
    with pytest.raises(IndexError):
        source.examples(np.array([last + 1]), "train")


def test_train_and_validation_are_different_files():
    corpus = text_module.corpus(SMALL)
    names = text_module.files()
    assert not any("test" in name.split("/") or "site-packages" in name for name in names)
    assert len(corpus["train"]) + len(corpus["validation"]) == SMALL
    assert len(corpus["validation"]) > 0
    assert names == text_module.files()


def test_draws_are_even_and_depend_on_key_and_row_only():
    counts = np.bincount(draw("key", range(100_000), 10), minlength=10)
    assert abs(counts - 10_000).max() < 500
    assert draw("key", range(100), 1000).tolist()[40:] == draw("key", range(40, 100), 1000).tolist()
    assert draw("key", range(100), 1000).tolist() != draw("other", range(100), 1000).tolist()
    assert draw("key", range(3), 1 << 40).tolist() == [draw("key", range(r, r + 1), 1 << 40)[0] for r in range(3)]


@pytest.mark.parametrize("name", models.presets())
def test_every_preset_has_data_that_fits(name):
    model = models.build(name)
    x, y = data.for_model(name).batch(0, 2)
    loss = models.loss_of(name)(model(x), y)
    assert 1.0 < loss.item() < 10.0


def test_data_follows_the_models_numbers():
    assert data.for_model("gpt-tiny", context=10).batch(0, 1)[0].shape == (1, 10)
    assert data.for_model("mlp-tiny", seed=5, widths=(7, 256)) == data.Windows(seed=5, window=7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: data.stdlib_text(context=0), "context=0"),
        (lambda: data.Text(limit=2000).batch(0, 1, split="validation"), "validation text has"),
        (lambda: data.Text(limit=SMALL).batch(0, 4, split="test"), "'test'.*train or validation"),
        (lambda: data.Text(limit=SMALL).batch(0, 0), "size=0"),
        (lambda: data.Text(limit=SMALL).batch(-1, 1), "step=-1"),
        (lambda: data.Text(limit=SMALL).batch(0, 4, rows=range(2, 5)), "rows 0 to 3"),
        (lambda: data.for_model("bert"), "'bert'.*gpt-tiny"),
        (lambda: data.for_model("gpt-tiny", vocab=100), "vocab=100.*256"),
        (lambda: data.for_model("mlp-tiny", widths=(32, 10)), "256 different bytes"),
        (lambda: data.for_model("mlp-digits", widths=(32, 10)), "64 numbers to 10 classes"),
    ],
)
def test_refusals_name_the_value_and_what_is_possible(call, message):
    with pytest.raises(PlanError, match=message):
        call()


# Data sets in files ---------------------------------------------------------------------------------------------------


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
def test_the_last_place_of_a_file_is_its_last_whole_row(tokens, records, split):
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
def test_files_that_are_refused(make, message, tmp_path):
    np.arange(10, dtype="u2").tofile(tmp_path / "t.bin")
    (tmp_path / "t.npy").write_text("no numbers")
    np.save(tmp_path / "a.npy", np.zeros((4, 2)))
    np.save(tmp_path / "b.npy", np.zeros((3, 2)))
    np.save(tmp_path / "f.npy", np.asfortranarray(np.zeros((4, 2))))
    with pytest.raises(PlanError, match=message):
        make(tmp_path)
