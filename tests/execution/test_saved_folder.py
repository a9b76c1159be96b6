"""A folder contains one complete saved run at every moment; errors name what is wrong; reading does not unpickle."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from minipar import SaveError
from minipar.execution.lines import Slice
from minipar.execution.saving import keeping
from minipar.execution.saving.folder import INDEX, Header, SavedParameter, _checksum, alone, open_folder
from minipar.execution.saving.keeping import Share
from minipar.execution.saving.storage import Reading

SIZE = 5000


def save(folder, step: int, size: int = SIZE) -> None:
    """A run whose every element is its step."""
    header = Header(step, 0, 8, "float32", "dp=1 pp=1", "", (SavedParameter("0.weight", (size,), "float32", True),))
    values = torch.full((size,), float(step))
    keeping.save([Share(header, tuple(Slice(f"{kind}/0.weight", (size,), 0, values) for kind in
                                      ("parameters", "optimizer/exp_avg")))], folder)  # fmt: skip


def step_of(folder) -> int:
    """The step that is saved there, every element checked."""
    saved = open_folder(folder)
    for key, entry in saved.entries.items():
        values = torch.zeros(entry.shape)
        Reading(saved).fill({(key, 0): values})
        assert (values == saved.header.step).all()
    assert len(saved.entries) == 2
    return saved.header.step


def test_a_save_replaces_what_was_there(tmp_path):
    (tmp_path / "step-mine").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for step in (1, 2, 2, 3):
        save(tmp_path, step)
        assert step_of(tmp_path) == step
        found = sorted(path.name for path in tmp_path.iterdir())
        assert found == [INDEX, "notes.txt", os.path.basename(open_folder(tmp_path).files), "step-mine"]


# What a process has changed on the disk up to a certain call is there when it ends in that call.
STOPS = textwrap.dedent("""
    import os, shutil, sys
    from minipar.execution.saving import folder, storage
    from tests.execution.test_saved_folder import save, step_of

    def stopping(function, left):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os._exit(7)
            return function(*args, **kwargs)
        return call

    where = sys.argv[1]
    save(where, 1)
    ends = []
    for stop in range(100):
        before = step_of(where)
        child = os.fork()
        if child == 0:
            left = [stop]
            for module, name in [(os, "fsync"), (os, "replace"), (os, "makedirs"), (os, "unlink"), (os, "rmdir"),
                                 (shutil, "rmtree"), (storage, "save_file"), (folder, "_write")]:
                setattr(module, name, stopping(getattr(module, name), left))
            save(where, before + 1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ends.append((status, step_of(where) - before))
        if status == 0:
            break
    print(ends)
""")


def test_a_save_that_stops_anywhere_leaves_the_one_before(tmp_path):
    """The process ends at each of the calls that change something on the disk, one after the other."""
    done = subprocess.run(
        [sys.executable, "-c", STOPS, tmp_path], capture_output=True, text=True, cwd=root(), timeout=120
    )
    assert done.returncode == 0, done.stderr
    ends = eval(done.stdout)
    assert len(ends) > 12
    assert ends[-1] == (0, 1)
    stopped = [gain for _, gain in ends[:-1]]
    assert stopped == sorted(stopped), "once the new one counts, it stays"
    assert set(stopped) == {0, 1}
    assert all(status == 7 for status, _ in ends[:-1])
    assert len(list(tmp_path.iterdir())) == 2  # what the others left was taken away


def root() -> Path:
    return Path(__file__).parent.parent.parent


def test_two_drivers_do_not_save_to_one_folder_at_once(tmp_path):
    save(tmp_path, 1)
    for act in (partial(save, tmp_path, 2), partial(keeping.storing, None, tmp_path, 0, None)):
        with alone(str(tmp_path)), pytest.raises(SaveError, match="another run saves there now; possible"):
            act()
    assert step_of(tmp_path) == 1
    save(tmp_path, 3)
    assert step_of(tmp_path) == 3


def test_a_folder_has_a_name_and_may_lie_in_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save("~/run", 4)
    assert step_of("~/run") == step_of(tmp_path / "run") == 4
    for act in (partial(save, step=1), open_folder):
        with pytest.raises(SaveError, match="'': names no folder; possible is a path"):
            act("")


IMPORTING = textwrap.dedent("""
    import signal, sys

    class Pressed:
        def find_spec(self, name, path=None, target=None):
            if name == "safetensors.torch" and self in sys.meta_path:
                sys.meta_path.remove(self)
                signal.raise_signal(signal.SIGINT)

    import minipar.errors
    sys.meta_path.insert(0, Pressed())
    try:
        import minipar.execution.saving.storage
        print("nothing came")
    except KeyboardInterrupt:
        assert "safetensors.torch" in sys.modules
        import minipar.execution.saving.storage
        import torch.distributed.checkpoint
        print("whole")
""")


def test_an_interrupt_does_not_leave_half_an_import():
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, cwd=root(), timeout=120)
    assert done.stdout == "whole\n", done.stderr


def test_damage_is_found_and_named(tmp_path):
    save(tmp_path, 4)
    (file,) = Path(open_folder(tmp_path).files).glob("*.safetensors")
    sound = file.read_bytes()
    for name, damaged, message in [
        ("a bit", sound[:-100] + bytes([sound[-100] ^ 1]) + sound[-99:], "damaged: the checksum of"),
        ("cut short", sound[:-100], "cannot be read"),
        ("empty", b"", "cannot be read"),
        ("another file", b"x" * len(sound), "cannot be read"),
    ]:
        file.write_bytes(damaged)
        with pytest.raises(SaveError, match=f"{file.name}: {message}") as caught:
            step_of(tmp_path)
        assert "\n" not in str(caught.value), name
    file.unlink()
    with pytest.raises(SaveError, match="is not there; go on from another folder"):
        step_of(tmp_path)


def test_a_damaged_index_is_found(tmp_path):
    save(tmp_path, 4)
    index = tmp_path / INDEX
    sound = index.read_text()
    for damaged in ["", "{}", "[1]", sound[:-5], sound.replace('"step": 4', '"step": 5'), "\x00" * 10]:
        index.write_text(damaged)
        with pytest.raises(SaveError, match=f"{INDEX}: damaged"):
            open_folder(tmp_path)
    index.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SaveError, match=f"{INDEX}: damaged"):
        open_folder(tmp_path)
    index.unlink()
    with pytest.raises(SaveError, match="no saved run there"):
        open_folder(tmp_path)


def forged(folder: Path, **changes) -> None:
    """An index that says something else, with the right checksum."""
    index = json.loads((folder / INDEX).read_text())["index"] | changes
    (folder / INDEX).write_text(json.dumps({"index": index, "checksum": _checksum(index)}))


def test_an_index_cannot_name_files_outside_of_its_folder(tmp_path):
    save(tmp_path, 4)
    index = json.loads((tmp_path / INDEX).read_text())["index"]
    forged(tmp_path, files="../elsewhere")
    with pytest.raises(SaveError, match="its files lie in '../elsewhere'"):
        open_folder(tmp_path)
    tensors = json.loads(json.dumps(index["tensors"]))
    tensors["parameters/0.weight"]["chunks"][0][2] = "../../secret.safetensors"
    forged(tmp_path, files=index["files"], tensors=tensors)
    with pytest.raises(SaveError, match="outside of the folder"):
        open_folder(tmp_path)
    forged(tmp_path, tensors=index["tensors"], format=2)
    with pytest.raises(SaveError, match="of format 2, but this version of minipar reads format 1"):
        open_folder(tmp_path)
    forged(tmp_path, tensors=index["tensors"], format="\n" + 100 * "1")
    with pytest.raises(SaveError, match=r"^[^\n]{1,200}reads format 1$"):
        open_folder(tmp_path)


def test_an_index_has_every_element_once_and_its_files_are_files(tmp_path):
    save(tmp_path, 4)
    tensors = json.loads((tmp_path / INDEX).read_text())["index"]["tensors"]
    for chunks, why in (
        ([], "every element"),
        ([[0, SIZE - 1]], "every element"),
        ([[0, SIZE], [5, 1]], "every element"),
        ([[-1, SIZE + 1]], "is no size"),
        ([[0, 1e9]], "is no size"),
    ):
        crafted = json.loads(json.dumps(tensors))
        entry = crafted["parameters/0.weight"]
        entry["chunks"] = [[*each, *entry["chunks"][0][2:]] for each in chunks]
        forged(tmp_path, tensors=crafted)
        with pytest.raises(SaveError, match=f"damaged: .*{why}"):
            open_folder(tmp_path)
    crafted = json.loads(json.dumps(tensors))
    crafted["parameters/0.weight"]["shape"] = [10**9]
    crafted["parameters/0.weight"]["chunks"][0][:2] = [0, 10**9]
    forged(tmp_path, tensors=crafted)
    with pytest.raises(SaveError, match="part-0.safetensors: cannot be read: it is too short for parameters/0.weight"):
        open_folder(tmp_path)
    forged(tmp_path, tensors=tensors)
    file = next(tmp_path.glob("step-*/part-0.safetensors"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(SaveError, match="is no file"):
        Reading(open_folder(tmp_path)).fill({("parameters/0.weight", 0): torch.zeros(SIZE)})
    (tmp_path / INDEX).unlink()
    os.mkfifo(tmp_path / INDEX)  # to open it would wait for who writes
    with pytest.raises(SaveError, match="is no file"):
        open_folder(tmp_path)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    save(tmp_path, 4)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]:
        monkeypatch.setattr(module, name, refuse)
    with pytest.raises(AssertionError):
        torch.load(tmp_path)
    assert step_of(tmp_path) == 4


@contextmanager
def files_of_at_most(count: int):
    """Writing more than this into a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [10, 30_000])
def test_a_disk_without_room(tmp_path, room):
    """At different places of a save: in the files, in the index."""
    save(tmp_path, 1)
    with files_of_at_most(room), pytest.raises(SaveError, match="what was saved there before still counts.*free some"):
        save(tmp_path, 2)
    assert step_of(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [INDEX, os.path.basename(open_folder(tmp_path).files)]
    save(tmp_path, 3)
    assert step_of(tmp_path) == 3


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run", "/proc/run"):
        with pytest.raises(SaveError, match=f"{folder}: cannot save there: ") as caught:
            save(folder, 1)
        assert "\n" not in str(caught.value)
