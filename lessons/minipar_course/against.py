"""Mechanisms that students write themselves with `torch.distributed`, compared with plain torch, and what they cost.

    against_plain_torch(my_ddp, model, batches, ranks=2)

runs `my_ddp(model, batches, loss, lr)` on real ranks (gloo). Each rank gets its rows of each batch and a model in
float64, trains it in place by SGD, and returns nothing. Afterwards its parameters must be those of one process that
trained the user's model on whole batches with nothing but torch. Beside that it is counted what every rank has sent
and held, because a mechanism that is right may still be wasteful.

The counting follows what `torch.distributed` hands to its process groups (torch's public dispatch hooks), so that it
does not matter by which name a function was called.

    call                        bytes that a rank sends, of p ranks (the ring's, for collectives)
    send, isend                 the tensor's
    all_reduce                  2 (p - 1)/p of the tensor's
    reduce, reduce_scatter      (p - 1)/p of the whole tensor's
    all_gather, all_to_all      (p - 1)/p of the whole tensor's
    broadcast                   (p - 1)/p of the tensor's, the mean of the ranks of a ring
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from minipar.cluster import Cluster, worker
from minipar.execution.memory.storages import FollowedStorage, Storages

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Train = Callable[[nn.Module, list[Batch], Loss, float], object]
# Of the model, a rank and the number of ranks: what this rank trains.
Part = Callable[[nn.Module, int, int], nn.Module]
# Of a batch, a rank and the number of ranks: what this rank gets of it.
Share = Callable[[Batch, int, int], Batch]

# Seconds that a rank waits for a message: where ranks wait for each other, torch.distributed raises an error then.
LONGEST_WAIT = 20.0

# How the names of torch's operators begin -> how we call them. (Functional collectives, as DTensor's, have names of
# their own.)
_KNOWN = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "reduce_scatter": "reduce_scatter",
    "isend": "send",
    "irecv": "recv",
}
_SEND_NOTHING = ("barrier", "wait_tensor", "wrap_tensor_autograd")


@dataclass(frozen=True)
class OnRank:
    """What a function did on one rank.

    result   what it returned
    state    the parameters of its model at the end, by name
    sent     bytes that it sent
    calls    how often it called what: "send", "all_reduce", ...
    early    calls of a collective or of send that were made inside a backward: only these can overlap with it
    waited   waits for a collective or a message inside a backward, which computes nothing meanwhile
    ahead    calls of send that were made before the first backward
    peak     the most bytes of tensors that lived at one time: the model, its gradients, activations, and its own;
             from the first time that a loss was computed until the last backward ended
    """

    result: Any
    state: dict[str, Tensor]
    sent: int
    calls: Counter[str]
    early: int
    waited: int
    ahead: int
    peak: int

    @property
    def messages(self) -> int:
        """Calls that send something."""
        return sum(count for name, count in self.calls.items() if name != "recv")


@dataclass(frozen=True)
class Comparison:
    """What a function did on all ranks, beside plain torch. `error`: the largest difference of a parameter, by rank."""

    ranks: tuple[OnRank, ...]
    expected: tuple[dict[str, Tensor], ...]
    error: tuple[float, ...]

    @property
    def right(self) -> bool:
        """Whether all parameters of all ranks are plain torch's, but for the rounding of float64."""
        return max(self.error) < 1e-9

    @property
    def sent(self) -> int:
        """Bytes sent by the rank that sends the most."""
        return max(rank.sent for rank in self.ranks)

    @property
    def peak(self) -> int:
        """Bytes of tensors on the rank that holds the most."""
        return max(rank.peak for rank in self.ranks)

    @property
    def traffic(self) -> str:
        """What each rank sent, in words; equal ranks in one line."""
        said: dict[str, list[int]] = {}
        for number, rank in enumerate(self.ranks):
            calls = ", ".join(f"{count} {name}" for name, count in sorted(rank.calls.items())) or "no messages"
            early = f", {rank.early} of them inside a backward" if rank.early else ""
            said.setdefault(f"sent {rank.sent:,} bytes: {calls}{early}", []).append(number)
        return "\n".join(
            f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))} {what}"
            for what, numbers in said.items()
        )

    def __repr__(self) -> str:
        beside = (
            "equal to plain torch" if self.right else f"not equal to plain torch: up to {max(self.error):.1e} apart"
        )
        held = ", ".join(f"{rank.peak:,}" for rank in self.ranks)
        return f"{beside}\n{self.traffic}\nbytes of tensors held at most, by rank: {held}"


def against_plain_torch(
    train: Train,
    model: Callable[[], nn.Module],
    batches: Sequence[Batch],
    *,
    ranks: int = 2,
    loss: Loss = nn.functional.mse_loss,
    lr: float = 0.1,
    momentum: float = 0.0,
    share: Share | None = None,
    part: Part | None = None,
    alike: bool = True,
    cluster: Cluster | None = None,
) -> Comparison:
    """Run `train(model, batches, loss, lr)` on each rank, and compare the parameters with plain torch's.

    model     makes the user's model; its parameters become float64
    batches   of whole rows, one for each step: (x, y), the first dimension are the rows
    loss      of a model's output and y: the mean over rows
    momentum  of the SGD that plain torch does
    share     what a rank gets of a batch; as a rule its rows, the same number on each rank
    part      what a rank gets of the model; as a rule a copy of all of it
    alike     False: only rank 0 begins with the model's parameters, the others with some of their own
    cluster   ranks that are there already (as many as `ranks`); else some are started for this call

    What `train` raises on a rank is raised here; so is a message that does not come within LONGEST_WAIT.
    """
    share, part = share or rows_of_rank, part or whole_model
    torch.manual_seed(0)
    begin = model().double()
    given = [[share(batch, rank, ranks) for batch in batches] for rank in range(ranks)]
    results = on_ranks(_train, train, begin, given, loss, lr, part, alike, ranks=ranks, cluster=cluster)
    end = plain_sgd(deepcopy(begin), batches, loss, lr, momentum)
    expected = tuple(state(part(deepcopy(end), rank, ranks)) for rank in range(ranks))
    errors = tuple(difference(one.state, right) for one, right in zip(results, expected, strict=True))
    return Comparison(tuple(results), expected, errors)


def plain_sgd(model: nn.Module, batches: Iterable[Batch], loss: Loss, lr: float, momentum: float = 0.0) -> nn.Module:
    """The same training in one process: whole batches, autograd, v = momentum * v + gradient, p -= lr * v."""
    velocity: dict[nn.Parameter, Tensor] = {}
    for x, y in batches:
        model.zero_grad()
        loss(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    velocity[parameter] = momentum * velocity.get(parameter, 0.0) + parameter.grad
                    parameter.sub_(lr * velocity[parameter])
    return model


def descend(parameters: Iterable[nn.Parameter], lr: float) -> None:
    """One update of SGD, by the gradients that are there."""
    with torch.no_grad():
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.sub_(lr * parameter.grad)


def rows_of_rank(batch: Batch, rank: int, ranks: int) -> Batch:
    """A rank's rows of a batch: one block after another."""
    x, y = batch
    first, last = len(x) * rank // ranks, len(x) * (rank + 1) // ranks
    return x[first:last].clone(), y[first:last].clone()


def whole_batch(batch: Batch, rank: int, ranks: int) -> Batch:
    """The same rows on each rank, as for the stages of a pipeline."""
    return batch


def whole_model(model: nn.Module, rank: int, ranks: int) -> nn.Module:
    """The same model on each rank."""
    return model


def stage_of_rank(model: nn.Module, rank: int, ranks: int) -> nn.Module:
    """A rank's layers of an `nn.Sequential`: one block after another."""
    layers = list(model.children())
    return nn.Sequential(*layers[len(layers) * rank // ranks : len(layers) * (rank + 1) // ranks])


def begin_of_rank(begin: nn.Module, rank: int, alike: bool) -> nn.Module:
    """The model with which a rank begins: `begin`, or, if ranks are not alike, with parameters of its own."""
    if not alike and rank:
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for parameter in begin.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return begin


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's parameters, by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def difference(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference between parameters of the same names; infinite for another shape, or a NaN."""
    worst = 0.0
    for name, value in right.items():
        if name not in found or found[name].shape != value.shape:
            return float("inf")
        if value.numel():
            apart = float((found[name] - value).abs().max())
            worst = max(worst, apart if apart == apart else float("inf"))
    return worst


def on_ranks(
    function: Callable[..., OnRank], *arguments: Any, ranks: int, cluster: Cluster | None = None
) -> list[OnRank]:
    """Call `function(*arguments)` on real ranks, between `init_process_group` and `destroy_process_group`."""
    if cluster is not None:
        return cluster.run(_in_group, function, arguments, LONGEST_WAIT)
    with Cluster(ranks, device="cpu") as started:
        return started.run(_in_group, function, arguments, LONGEST_WAIT)


# On a rank ------------------------------------------------------------------------------------------------------------


def _in_group(function: Callable[..., OnRank], arguments: tuple[Any, ...], seconds: float) -> OnRank:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    try:
        dist.barrier()  # a rank that fails at once would end while others still connect, and these would print that
        return function(*arguments)
    finally:
        dist.destroy_process_group()


def _train(
    train: Train, begin: nn.Module, given: list[list[Batch]], loss: Loss, lr: float, part: Part, alike: bool
) -> OnRank:
    rank, ranks = worker.context().rank, worker.context().size
    begin = begin_of_rank(begin, rank, alike)
    model = part(begin, rank, ranks)
    del begin
    with counted(model.parameters()) as count:

        def noticed(output: Tensor, target: Tensor) -> Tensor:
            count.begin()
            return loss(output, target)

        result = train(model, given[rank], noticed, lr)
    return count.on_rank(result if isinstance(result, int | float | str | None) else None, state(model))


class Count(Storages):
    """Counts what `torch.distributed` is asked to send, and the bytes of all tensors that live."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.early, self.waited, self.backwards = 0.0, 0, 0, 0
        self.ahead: int | None = None  # until the first backward begins
        self.calls: Counter[str] = Counter()
        self.begun = False
        self.highest = self.peak = 0  # so far, and at the end of the last backward

    def begin(self) -> None:
        """A loss is computed. What was held before the first one does not count: a model may be shared out there."""
        if not self.begun:
            self.settle()
            self.begun, self.highest = True, self.live

    def changed(self, held: FollowedStorage, delta: int) -> None:
        self.highest = max(self.highest, self.live)

    def backward_begins(self) -> None:
        """From here on, a collective or a send that is called may overlap with a backward."""
        self.backwards += 1
        if self.ahead is None:
            self.ahead = self.calls["send"]

    def backward_ended(self) -> None:
        """Everything until here counts; what is gathered at the end, to be compared, does not."""
        self.backwards -= 1
        self.settle()
        self.peak = self.highest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.__name__.split(".")[0].strip("_"), args, result)
        return result

    def _count(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name in _SEND_NOTHING:
            return
        name = next((known for begin, known in _KNOWN.items() if name.startswith(begin)), name)
        self.calls[name] += 1
        if name.startswith("recv"):
            return
        self.early += self.backwards > 0
        whole = max(map(_bytes, (*args, result)))  # (a functional gather makes its largest tensor)
        ranks = _ranks_of(args)
        share = 1.0 if name == "send" else (2.0 if name == "all_reduce" else 1.0) * (ranks - 1) / ranks
        self.sent += share * whole

    def on_rank(self, result: Any, state: dict[str, Tensor]) -> OnRank:
        """What was counted, with what the function returned and its parameters."""
        ahead = self.calls["send"] if self.ahead is None else self.ahead
        return OnRank(result, state, round(self.sent), self.calls, self.early, self.waited, ahead, self.peak)


@contextmanager
def counted(held: Iterable[Tensor] = ()) -> Iterator[Count]:
    """Count what a block of code sends, and holds beside the tensors `held`, which are counted in."""
    count, backward = Count(), torch.autograd.backward
    work: Any = torch.distributed.Work
    wait = work.wait

    def waits(*arguments: Any, **options: Any) -> Any:
        count.waited += count.backwards > 0
        return wait(*arguments, **options)

    def noticed(*arguments: Any, **options: Any) -> Any:
        count.backward_begins()
        try:
            return backward(*arguments, **options)
        finally:
            count.backward_ended()

    for tensor in held:
        count.register(tensor.detach())
    torch.autograd.backward, work.wait = noticed, waits
    try:
        with count:
            yield count
    finally:
        torch.autograd.backward, work.wait = backward, wait


def _ranks_of(args: tuple[Any, ...]) -> int:
    """The number of ranks of a call's group. Functional collectives have its name, as their last argument."""
    for argument in args:
        if not isinstance(argument, Tensor | list | tuple) and hasattr(argument, "_type"):
            return int(torch.distributed.ProcessGroup.unbox(argument).size())
    if args and isinstance(args[-1], str):
        name: Any = args[-1]
        return int(torch.distributed.distributed_c10d._resolve_process_group(name).size())
    return torch.distributed.get_world_size()


def _bytes(argument: Any) -> int:
    """Bytes of the tensors of an argument of a call: a tensor, or lists of tensors."""
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    if isinstance(argument, (list, tuple)):
        return sum(_bytes(each) for each in argument)
    return 0
