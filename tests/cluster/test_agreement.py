"""Processes of torchrun agree on their hosts, one backend and one kind of device, or all get one error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from minipar.cluster import agreement
from minipar.cluster.agreement import Agreement, Claim, decide, identity, meet
from minipar.errors import PlanError, RankError

CPU = Claim("a", "a", "a", "auto", (), False, "127.0.0.1")


def claims(*by_rank: tuple[str, Sequence[str]], wants: str = "auto", nccl: bool = True) -> list[Claim]:
    """Of each rank its host and the GPUs that it sees."""
    return [
        replace(CPU, host=host, machine=host, network=host, wants=wants, gpus=tuple(gpus), nccl=nccl)
        for host, gpus in by_rank
    ]


def all_of(count: int, device: str | Sequence[str] = "auto", store: Any = None) -> list[Any]:
    """What `meet` gives or raises in so many processes, which are threads here."""
    store, found = store or dist.HashStore(), [None] * count
    asked = [device] * count if isinstance(device, str) else device

    def run(rank: int) -> None:
        try:
            found[rank] = meet(store, rank, count, asked[rank])  # type: ignore[call-overload]
        except Exception as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_what_an_earlier_attempt_left_in_the_store_is_not_believed() -> None:
    store: Any = dist.HashStore()
    before = all_of(2, store=store)
    late: list[Agreement] = []
    thread = threading.Thread(target=lambda: late.append(meet(store, 1, 2)))  # it reads the name of the part before
    thread.start()
    time.sleep(0.1)
    first = meet(store, 0, 2)
    thread.join(30)
    assert late[0].token == first.token != before[0].token
    late[0].store.set("key", "value")
    assert first.store.get("key") == b"value"


@pytest.mark.parametrize(
    ("given", "devices", "backend"),
    [
        (claims(("a", ()), ("b", ())), ("cpu", "cpu"), "gloo"),
        (claims(("a", "xy"), ("a", "xy")), ("cuda:0", "cuda:1"), "nccl"),  # each sees all of the host
        (claims(("a", "x"), ("a", "y")), ("cuda:0", "cuda:0"), "nccl"),  # each sees its own alone
        (claims(("a", "xy"), ("b", "xy")), ("cuda:0", "cuda:0"), "nccl"),  # the same names on two hosts are two
        (claims(("a", "x"), ("a", "x")), ("cpu", "cpu"), "gloo"),  # too few for both
        (claims(("a", "x"), ("a", "x"), wants="cuda"), ("cuda:0", "cuda:0"), "gloo"),  # they share it
        (claims(("a", "xy"), ("a", "xy"), ("a", "xy"), wants="cuda"), ("cuda:0", "cuda:1", "cuda:0"), "gloo"),
        (claims(("a", "x"), ("a", "y"), wants="cpu"), ("cpu", "cpu"), "gloo"),
        (claims(("a", "x"), ("a", "y"), nccl=False), ("cuda:0", "cuda:0"), "gloo"),
    ],
)
def test_one_device_and_one_backend(given: list[Claim], devices: tuple[str, ...], backend: str) -> None:
    assert decide(given) == (devices, backend)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            claims(("a", "xy"), ("a", "xy"), ("b", ()), ("b", ())),
            r"GPU of their own: one \(ranks 0-1\), none \(ranks 2-3\)",
        ),
        (claims(("a", "x"), ("b", "y"), ("b", "y")), r"one \(ranks 0-1\), none \(rank 2\)"),
        (claims(("a", "x"), ("b", ()), wants="cuda"), "rank 1 of 2: no GPU that torch can use"),
        ([*claims(("a", ()), ("a", ())), *claims(("b", ()), wants="cpu")], r"'auto' \(ranks 0-1\), 'cpu' \(rank 2\)"),
        (claims(("a", ()), wants="tpu"), "device='tpu': must be one of 'auto', 'cpu', 'cuda'"),
    ],
)
def test_ranks_that_differ_are_named(given: list[Claim], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        decide(given)


def test_all_agree_on_hosts_addresses_and_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIPAR_HOST", "left, left, right")
    found: list[Agreement] = all_of(3)
    assert [one.hosts for one in found] == [("left", "left", "right")] * 3
    assert [(one.rank, one.size, one.device, one.backend) for one in found] == [(k, 3, "cpu", "gloo") for k in range(3)]
    assert {one.addresses for one in found} == {("127.0.0.1",) * 3}
    (token,) = {one.token for one in found}
    assert len(token) == 64
    assert all_of(1)[0].token != token


def test_an_error_is_the_same_on_all_ranks() -> None:
    errors = all_of(3, ["cpu", "cpu", "cuda"])
    assert [type(one) for one in errors] == [PlanError] * 3
    assert {str(one) for one in errors} == {
        "ranks ask for different devices: 'cpu' (ranks 0-1), 'cuda' (rank 2)\nAsk for one on all."
    }


def test_the_name_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINIPAR_HOST", raising=False)
    assert identity(0) == identity(5) != ""
    monkeypatch.setenv("MINIPAR_HOST", "mine")
    assert identity(0) == identity(5) == "mine"
    monkeypatch.setenv("MINIPAR_HOST", "a,b")
    assert [identity(0), identity(1)] == ["a", "b"]
    with pytest.raises(PlanError, match="MINIPAR_HOST='a,b': rank 2 has no name"):
        identity(2)


def test_a_loopback_is_no_address_for_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a host whose own name leads to its loopback, the route to another host gives the address."""
    names = {f"rank {rank}": f"machine {rank}" for rank in range(2)}
    monkeypatch.setattr(agreement, "network", lambda: names[threading.current_thread().name])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    real = agreement.reachable

    def route(towards: tuple[str, int] | None = None) -> str:
        if towards is not None:
            return "10.0.0.1" if towards[0] == "10.0.0.2" else real(towards)
        return {"machine 0": "127.0.0.1", "machine 1": other}[agreement.network()]

    monkeypatch.setattr(agreement, "reachable", route)
    monkeypatch.setattr(threading.Thread, "__init__", _named(threading.Thread.__init__))
    other = "10.0.0.2"
    assert [one.addresses for one in all_of(2)] == [("10.0.0.1", "10.0.0.2")] * 2
    other = "127.0.0.1"
    for error in all_of(2):
        assert isinstance(error, RankError)
        assert "ranks 0-1 of 2" in str(error)
        assert "GLOO_SOCKET_IFNAME" in str(error)


def _named(init: Callable[..., None]) -> Callable[..., None]:
    def made(self: threading.Thread, *, target: Any, args: tuple[int]) -> None:
        init(self, target=target, args=args, name=f"rank {args[0]}")

    return made


def test_the_address_of_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert agreement.reachable(("192.0.2.1", 80)) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    assert agreement.reachable(("127.0.0.1", 80)) == "127.0.0.1"


def test_without_torchrun_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert agreement.missing() == ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    with pytest.raises(RankError, match="torchrun did not start this process: RANK, WORLD_SIZE"):
        agreement.agree()
