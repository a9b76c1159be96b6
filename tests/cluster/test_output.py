"""What the ranks print: folded, in order, nothing lost; progress of one rank."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from minipar.cluster import Cluster, output
from minipar.cluster.output import Output, Printer

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Capture = pytest.CaptureFixture[str]


class Pipes:
    """Ranks that print what a test writes."""

    def __init__(self, ranks: int) -> None:
        self.output = Output()
        self.output.begin(range(ranks))
        pairs = [os.pipe() for _ in range(ranks)]
        for read, _ in pairs:
            os.set_blocking(read, False)
        self.ends = [write for _, write in pairs]
        self.printers = [Printer(rank, read, self.output) for rank, (read, _) in enumerate(pairs)]

    def write(self, rank: int, text: str) -> None:
        os.write(self.ends[rank], text.encode())
        self.printers[rank].pump()
        self.output.show()

    def finish(self) -> None:
        for printer in self.printers:
            printer.finish()
        self.output.flush()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(4, device="cpu") as made:
        yield made


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are held until the end of the run, however slow this machine is."""
    monkeypatch.setattr(output, "HOLD", 60.0)


def as_seen(text: str) -> list[str]:
    """The lines that a terminal shows at the end."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for state in line.split("\r"):
            shown = state + shown[len(state) :]
        lines.append(shown.rstrip())
    return lines


# Folding


def test_a_line_of_all_ranks_is_shown_once_and_at_once(slow: None, capsys: Capture) -> None:
    pipes = Pipes(3)
    for rank in (2, 0):
        pipes.write(rank, "loaded\n")
    assert capsys.readouterr().out == ""
    pipes.write(1, "loaded\nmore\n")
    assert capsys.readouterr().out == "[ranks 0-2] loaded\n"
    pipes.finish()
    assert capsys.readouterr().out == "[rank 1] more\n"


def test_lines_around_those_of_a_rank_alone_are_folded_too(slow: None, capsys: Capture) -> None:
    pipes = Pipes(3)
    for rank in (1, 2, 0):
        pipes.write(rank, f"begin\nI am {rank}\nend\n")
    pipes.finish()
    own = [f"[rank {rank}] I am {rank}" for rank in range(3)]
    assert capsys.readouterr().out.splitlines() == ["[ranks 0-2] begin", *own, "[ranks 0-2] end"]


def test_a_line_of_some_ranks_names_them(slow: None, capsys: Capture) -> None:
    pipes = Pipes(4)
    for rank in (0, 1, 3):
        pipes.write(rank, "mine\n")
    pipes.finish()
    assert capsys.readouterr().out == "[ranks 0, 1, 3] mine\n"


def test_a_line_is_not_held_for_long(capsys: Capture) -> None:
    pipes = Pipes(2)
    pipes.write(0, "alone\n")
    wait = pipes.output.show()
    assert wait is not None
    assert 0 <= wait <= output.HOLD
    time.sleep(wait)
    pipes.output.show()
    assert capsys.readouterr().out == "[rank 0] alone\n"
    assert pipes.output.show() is None
    pipes.output.begin([1])
    pipes.write(1, "nobody to wait for\n")
    assert capsys.readouterr().out == "[rank 1] nobody to wait for\n"


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_and_each_rank_keeps_its_order(seed: int, slow: None, capsys: Capture) -> None:
    draw = random.Random(seed)
    pipes = Pipes(3)
    sent: list[list[str]] = [[], [], []]
    for _ in range(200):
        rank = draw.randrange(3)
        sent[rank].append(draw.choice(["a", "b", "", "  c", f"own {rank}"]))
        pipes.write(rank, sent[rank][-1] + "\n")
    pipes.finish()
    found: list[list[str]] = [[], [], []]
    names = {"ranks 0-1": (0, 1), "ranks 1-2": (1, 2), "ranks 0-2": (0, 1, 2), "ranks 0, 2": (0, 2)}
    names |= {f"rank {rank}": (rank,) for rank in range(3)}
    lines = capsys.readouterr().out.split("\n")
    for line in lines[:-1]:
        name, _, text = line.removeprefix("[").partition("] ")
        for rank in names[name]:
            found[rank].append(text)
    assert found == sent
    assert len(lines) < 500


def test_a_cluster_folds(cluster: Cluster, slow: None, capsys: Capture) -> None:
    cluster.run(lambda: print("hello\nworld"))
    assert capsys.readouterr().out == "[ranks 0-3] hello\n[ranks 0-3] world\n"
    cluster.run_on([1, 2], lambda: print("hello"))
    assert capsys.readouterr().out == "[ranks 1-2] hello\n"
    cluster.run_on([3], lambda: print("hello"))
    assert capsys.readouterr().out == "[rank 3] hello\n"


def test_nothing_is_lost_at_an_interrupt(cluster: Cluster, slow: None, capsys: Capture) -> None:
    heard: list[int] = []

    def callback(rank: int, value: Any) -> None:
        heard.append(rank)
        if len(heard) == 4:
            raise KeyboardInterrupt

    def f() -> None:
        from minipar.cluster import worker

        print("all of us")
        worker.report(1)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        cluster.run_with(callback, f)
    assert capsys.readouterr().out.splitlines().count("[ranks 0-3] all of us") == 1


# Progress


def test_progress_is_shown_from_the_first_rank(capsys: Capture) -> None:
    pipes = Pipes(2)
    for step in range(3):
        for rank in range(2):
            pipes.write(rank, f"\r{step}0%|## | {step}/3 [00:0{step}<00:01, {rank}.1it/s]")
        time.sleep(0.11)
        pipes.output.show()
    live = capsys.readouterr().out
    assert "[rank 1]" not in live
    assert as_seen(live) == ["[rank 0] 20%|## | 2/3 [00:02<00:01, 0.1it/s]"]
    assert "\n" not in live
    pipes.write(0, "\r100%|###| 3/3 [00:03<00:00, 0.1it/s]\n")
    pipes.write(1, "\r100%|###| 3/3 [00:04<00:00, 1.1it/s]\n")
    pipes.finish()
    assert as_seen(live + capsys.readouterr().out) == ["[rank 0] 100%|###| 3/3 [00:03<00:00, 0.1it/s]", ""]


def test_a_bar_of_another_rank_alone_is_shown_when_all_have_ended(capsys: Capture) -> None:
    pipes = Pipes(2)
    pipes.write(1, "\r 50%|###| 1/2\r100%|###| 2/2\n")
    pipes.finish()
    assert capsys.readouterr().out == "[rank 1] 100%|###| 2/2\n"


def test_a_bar_of_another_rank_that_ends_first_is_not_shown_twice(slow: None, capsys: Capture) -> None:
    for early in ("", "\r 10%|# | 1/9"):
        pipes = Pipes(2)
        pipes.write(0, early)
        pipes.write(1, "\r100%|##| 9/9 [00:01<00:00]\n")
        pipes.write(0, "\r100%|##| 9/9 [00:02<00:00]\n")
        pipes.finish()
        assert as_seen(capsys.readouterr().out) == ["[rank 0] 100%|##| 9/9 [00:02<00:00]", ""]


def test_lines_go_above_a_bar_and_a_wiped_bar_leaves_nothing(capsys: Capture) -> None:
    pipes = Pipes(1)
    pipes.write(0, "\rworking 1")
    pipes.write(0, "\nline\n\rworking 2")
    pipes.write(0, "\r         \r")
    pipes.write(0, "after\n")
    pipes.finish()
    assert as_seen(capsys.readouterr().out) == ["[rank 0] working 1", "[rank 0] line", "[rank 0] after", ""]


def test_tqdm_in_every_rank(cluster: Cluster, capsys: Capture) -> None:
    def f() -> None:
        from tqdm import tqdm

        rank = int(os.environ["RANK"])
        for _ in tqdm(range(20), desc="training"):
            time.sleep(0.01 * (1 + rank / 2))  # the first rank ends first
        for _ in tqdm(range(20), desc="more", leave=False):
            time.sleep(0.001)
        print("done", rank)

    cluster.run(f)
    text = capsys.readouterr().out
    assert text.count("\r[rank 0] training") >= 1
    lines = [line for line in as_seen(text) if line]
    bars = [line for line in lines if "%|" in line]
    assert [line[:28] for line in bars] == ["[rank 0] training: 100%|█████"[:28]]
    assert "20/20" in bars[0]
    assert sorted(set(lines) - set(bars)) == [f"[rank {rank}] done {rank}" for rank in range(4)]
