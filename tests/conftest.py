"""Clusters that tests share: starting ranks is cheap, but not free. Nothing survives in their freed memory."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from typing import Any

gc.disable()  # until the tests are collected: imports leave next to nothing behind, and torch's are a fifth longer with

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from minipar.cluster import Cluster  # noqa: E402
from minipar.execution import tails  # noqa: E402

# glibc fills what is freed with this byte, and what it gives out with the opposite one. As floating-point numbers the
# first are tiny and the second huge: who reads either is far off, at any size of a model.
POISON = "glibc.malloc.perturb=128"


def shorten_always() -> None:
    """In a rank: recomputations leave out what is not needed however small it is."""
    tails.WORTH.update(cpu=-1.0)


class Clusters:
    """Clusters by size, started at the first use and kept for all tests. Their freed memory is poisoned."""

    def __init__(self) -> None:
        self._made: dict[int, Cluster] = {}

    def __call__(self, ranks: int) -> Cluster:
        if ranks not in self._made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("GLIBC_TUNABLES", POISON)
                self._made[ranks] = Cluster(ranks, device="cpu")
            self._made[ranks].run(shorten_always)
        return self._made[ranks]

    def close(self) -> None:
        for cluster in self._made.values():
            cluster.close()


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    made = Clusters()
    yield made
    made.close()


@pytest.fixture
def captured_for_all_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train` and `execute` know the graphs of the models that ranks have shared in a test before."""
    from minipar.execution import execution
    from minipar.training import training
    from tests.comparing import captured

    for module in (execution, training):
        monkeypatch.setattr(module, "captured_once", captured)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="all cases of tests marked many(k), not every k-th, and tests marked extra",
    )


def pytest_configure(config: pytest.Config) -> None:
    """How many examples hypothesis tries where a test does not say it; and Ctrl-C works as in a terminal."""
    torch.set_num_threads(1)  # of this process: parts of `make test` run side by side, and threads of torch wait busily
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in its background like this
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("short", deadline=None, derandomize=True, max_examples=30)
    settings.register_profile("thorough", settings.get_profile("short"), max_examples=300)
    settings.load_profile("thorough" if config.getoption("--thorough") else "short")


def pytest_collection_finish() -> None:
    gc.freeze()  # so that no collection looks through all modules and tests again
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that need ranks; leave out those that are marked extra, and some cases of those marked many(k)."""
    for item in items:
        if "clusters" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")
    if config.getoption("--thorough"):
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("many") is not None and hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    left_out = {item for item in items if item.get_closest_marker("extra") is not None}
    for cases in tests.values():
        left_out |= set(cases) - _some(cases)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


SHORT = 3


def _some(cases: list[pytest.Item]) -> set[pytest.Item]:
    """Of the cases of a test marked many(k) every k-th. Where they are a grid, every k-th diagonal of it, and a case
    more for each value that these leave out of a side with at most SHORT values."""
    every = next(cases[0].iter_markers("many")).args[0]
    numbers: dict[tuple[str, ...], dict[Any, int]] = {}
    places = [_place(case, numbers) for case in cases]
    some = {k for k, place in enumerate(places) if sum(place) % every == 0}
    short = [
        side for side, values in enumerate(numbers.values()) if len(values) <= min(every, SHORT) and len(numbers) > 1
    ]
    had = {(side, places[k][side]) for k in some for side in short}
    for k, place in enumerate(places):
        new = {(side, place[side]) for side in short} - had
        some |= {k} if new else set()
        had |= new
    return {cases[k] for k in some}


def _place(case: Any, numbers: dict[tuple[str, ...], dict[Any, int]]) -> tuple[int, ...]:
    """Where a case is in the grid of its test. (pytest itself numbers the cases, not rows and columns.)"""
    place = []
    for mark in case.iter_markers("parametrize"):
        words = mark.args[0]
        names = tuple(word.strip() for word in words.split(",")) if isinstance(words, str) else tuple(words)
        rows = numbers.setdefault(names, {})
        place.append(rows.setdefault(tuple(id(case.callspec.params[each]) for each in names), len(rows)))
    return tuple(place)
