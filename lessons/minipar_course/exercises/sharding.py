"""Lesson 08: bytes by ZeRO's stage; an optimizer in parallel, on real ranks; ZeRO-3 as an order of instructions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minipar.costs.recomputation import LayerCosts
from minipar.errors import MiniparError
from minipar.prediction.rank_memory import states
from minipar.wording import several
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.order import GATHER, SCATTER, B, Case, Device, F, MiB, Order, ms, program_of
from minipar_course.exercises.kinds.verdict import Verdict, raised

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BYTES", "DEVICE", "GATHER", "SCATTER", "UPDATE", "ZERO_3", "B", "F", "program_of"]


# 1: bytes on each rank ------------------------------------------------------------------------------------------------


def _shared(p: float, g: float, o: float) -> Callable[[int, int, int], float]:
    """A rule that divides parameters, gradients and states from stage p, g and o on."""
    return lambda psi, n, stage: sum(
        size * (-(-psi // n) if stage >= since else psi) for size, since in ((2, p), (2, g), (12, o))
    )


BYTES = Function(
    "bytes_on_a_rank(parameters, ranks, stage)",
    (
        (1000, 4, 0),
        (1000, 4, 1),
        (1000, 4, 2),
        (1000, 4, 3),
        (7_500_000_000, 64, 3),
        (10, 4, 1),
        (10, 4, 3),
        (99, 1, 3),
    ),
    truth=lambda parameters, ranks, stage: states(parameters, ranks, stage).total,
    mistakes=(
        (
            lambda psi, n, stage: 16 * psi if not stage else 16 * -(-psi // n),
            (
                "stage by stage: 1 shares out the optimizer's 12 bytes, 2 the gradients' 2 as well, 3 the "
                "parameters' 2, too"
            ),
        ),
        (_shared(1, 2, 3), "the other way round: stage 1 begins with the largest part, the optimizer's states"),
        (_shared(3, 1, 2), "stage 1 are the optimizer's states, stage 2 the gradients as well"),
        (
            lambda psi, n, stage: (
                (2 / n if stage > 2 else 2) * psi + (2 / n if stage > 1 else 2) * psi + (12 / n if stage else 12) * psi
            ),
            "slices are equal on all ranks: rounded up to whole numbers",
        ),
    ),
    hint="2 bytes of parameters, 2 of gradients, 12 of states; which of them does this stage divide by the ranks?",
)


# 2: an optimizer in parallel ------------------------------------------------------------------------------------------

RATE, MOMENTUM, STEPS = 0.1, 0.9, 3


class Counting:
    """A communicator that counts the numbers that each call sends: `sent`, and the calls' names."""

    def __init__(self, comm: Any) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm, self.sent, self.calls = comm, 0.0, list[str]()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._comm, name)

        def counted(x: Any, *arguments: Any, **options: Any) -> Any:
            found = call(x, *arguments, **options)
            whole = max(_count(x), _count(found))
            hops = 2 if name == "allreduce" else 1
            self.sent += hops * whole * (self.size - 1) / self.size
            self.calls.append(name)
            return found

        return counted


def _count(x: Any) -> int:
    return int(x.numel()) if hasattr(x, "numel") else len(x) if hasattr(x, "__len__") else 1


@dataclass(frozen=True)
class _Alone:
    """A communicator of one rank."""

    rank: int = 0
    size: int = 1

    def __getattr__(self, name: str) -> Any:
        return lambda x, *_, **__: x


def _start(numbers: int) -> Tensor:
    import torch

    return torch.linspace(-1, 1, numbers, dtype=torch.float64)


def _gradient(parameters: Tensor, rank: int, step: int) -> Tensor:
    """A rank's gradient: it depends on the parameters, as gradients do."""
    import torch

    return parameters * (1 + rank) + torch.sin(torch.arange(len(parameters), dtype=torch.float64) + rank + step)


def _on_rank(answer: Callable[..., Any], numbers: int, comm: Any = None) -> tuple[list[float], int, float, list[str]]:
    """In a rank: do some steps. Returns the parameters, and for a step how many numbers the momentum has, how many were
    sent, and by which calls."""
    import torch

    from minipar.comm import communicator

    counting = Counting(comm or communicator.create())
    parameters = _start(numbers)
    rows = numbers // counting.size + (counting.rank < numbers % counting.size)
    momentum = torch.zeros(rows, dtype=torch.float64)
    for step in range(STEPS):
        gradient = _gradient(parameters, counting.rank, step)
        parameters = answer(counting, parameters, gradient, momentum)
        if not isinstance(parameters, torch.Tensor) or parameters.shape != (numbers,):
            shape = tuple(parameters.shape) if hasattr(parameters, "shape") else type(parameters).__name__
            raise MiniparError(f"it gives {shape}; the new parameters are one tensor of {numbers} numbers")
    return parameters.tolist(), momentum.numel(), counting.sent / STEPS, counting.calls[: len(counting.calls) // STEPS]


def _expected(numbers: int, ranks: int) -> list[float]:
    import torch

    parameters, momentum = _start(numbers), torch.zeros(numbers, dtype=torch.float64)
    for step in range(STEPS):
        momentum = MOMENTUM * momentum + sum(_gradient(parameters, rank, step) for rank in range(ranks))
        parameters = parameters - RATE * momentum
    return [float(x) for x in parameters]


@dataclass(frozen=True)
class OptimizerParallel:
    """update(comm, parameters, gradient, momentum), run on real ranks: it must give plain SGD's parameters, and send
    few bytes."""

    cases: tuple[tuple[int, int], ...] = ((2, 12), (3, 10))  # ranks, numbers

    def judge(self, answer: Any) -> Verdict:
        from minipar.cluster import Cluster

        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", "def update(comm, parameters, gradient, momentum): ...")
        try:  # (on one rank nothing has to be sent)
            alone = _on_rank(answer, 6, _Alone())[0]
        except Exception as error:
            return raised(error, "on a single rank your function")
        if not _near(alone, _expected(6, 1)):
            hint = f"momentum = {MOMENTUM} momentum + gradient, in place; parameters - {RATE} momentum"
            return Verdict(False, "on a single rank, without any sum, the parameters are not those of SGD", hint)
        for ranks, numbers in self.cases:
            try:
                with Cluster(ranks) as cluster:
                    found = cluster.run(_on_rank, answer, numbers)
            except MiniparError as error:
                reason = str(getattr(error, "reason", error)).splitlines()[0]
                return Verdict(False, f"on {several(ranks, 'rank')}: {reason}", "what has which size on which rank?")
            verdict = self._compare(found, ranks, numbers)
            if verdict is not None:
                return verdict
        return Verdict(True, "plain SGD's parameters on 2 and on 3 ranks, 2 Ψ (N-1)/N numbers sent by each")

    def _compare(self, found: list[Any], ranks: int, numbers: int) -> Verdict | None:
        right = _expected(numbers, ranks)
        if not all(_near(one[0], found[0][0]) for one in found):
            hint = "each must have summed the gradients of all, and got the updated slices of all"
            return Verdict(False, f"on {several(ranks, 'rank')} the parameters differ from rank to rank", hint)
        if not _near(found[0][0], right):
            hint = "the gradient of the whole batch is the sum over the ranks (not their mean, and not one's own)"
            return Verdict(
                False,
                f"on {several(ranks, 'rank')} the parameters are not those of plain SGD after {several(STEPS, 'step')}",
                hint,
            )
        most = 2 * numbers * (ranks - 1) / ranks
        if max(one[2] for one in found) > most * 1.25:  # (slices are not all equal)
            psi = max(one[2] for one in found) * ranks / (ranks - 1) / numbers
            calls = ", ".join(found[0][3])
            reason = (
                f"right on {several(ranks, 'rank')}, but it sends {psi:.1f} Ψ (N-1)/N numbers in a step; 2 are enough"
            )
            return Verdict(False, reason, f"the calls are {calls}: which of them brings more than this rank uses?")
        return None


def _near(given: list[float], right: list[float]) -> bool:
    return all(abs(x - y) < 1e-9 for x, y in zip(given, right, strict=True))


UPDATE = OptimizerParallel()


# 3: ZeRO-3 ------------------------------------------------------------------------------------------------------------


def _device(layers: int) -> Device:
    """8 MiB of parameters a layer on 4 ranks: gathering one, or scattering its gradient, takes 8 ms."""
    costs = LayerCosts.equal(layers, MiB, 0, 10 * ms, 20 * ms)
    return Device(costs, (8 * MiB,) * layers, 2.0, ranks=4, network=8 * MiB * 3 / 4 / (8 * ms))


DEVICE = _device(8)
ZERO_3 = Order(
    "mine(layers)",
    (Case((8,), DEVICE, 256 * ms, 96 * MiB), *(Case((layers,), _device(layers)) for layers in (1, 2, 5))),
    hint="while a layer computes, the network can bring the next one",
)
