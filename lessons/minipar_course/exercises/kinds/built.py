"""A mechanism that the answer builds with `torch.distributed`, run on real ranks: is it right, and is it cheap?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from minipar.cluster import Cluster
from minipar.errors import Deadlock
from minipar.wording import several
from minipar_course import against
from minipar_course.against import Batch, Comparison, Loss, OnRank, Part, Share
from minipar_course.exercises.kinds.verdict import Verdict, raised

PATIENCE = 5.0  # seconds until ranks that all wait for each other are told of it: nobody wants to wait for a verdict


@dataclass(frozen=True)
class Trial:
    """What a mistake is shown, to train as somebody would who made it: one rank's model and batches, and those of all.

    model     the model with which this rank begins, as it was made
    own       this rank's rows of the batches
    """

    model: nn.Module
    first: nn.Module  # the model with which rank 0 begins
    own: list[Batch]
    batches: Sequence[Batch]
    loss: Loss
    lr: float
    momentum: float
    rank: int
    ranks: int

    def trained(self, model: nn.Module, batches: Sequence[Batch], lr: float | None = None) -> nn.Module:
        """A model that was trained on these batches, in one process."""
        return against.plain_sgd(model, batches, self.loss, self.lr if lr is None else lr, self.momentum)


Mistake = tuple[Callable[[Trial], nn.Module], str]
# Of what was compared: what is more than needed, and a hint; nothing if it is as cheap as it should be.
Cheap = Callable[[Comparison], tuple[str, str] | None]


@dataclass(frozen=True)
class Trained:
    """`signature` trains a model in place on each rank: see `against.against_plain_torch`, which runs it.

    model, batches, loss, lr, momentum, share, part, alike   as there
    ranks      on so many ranks it is tried, one number after the other
    praise     what is said of a right answer
    mistakes   trainings in one process that end as frequent mistakes do, each with the hint that its author needs
    cheap      demands on messages, bytes and memory of an answer that is right
    hint       what to say of a wrong answer that is no known mistake
    """

    signature: str
    model: Callable[[], nn.Module]
    batches: Sequence[Batch]
    ranks: tuple[int, ...]
    praise: str
    loss: Loss = nn.functional.mse_loss
    lr: float = 0.1
    momentum: float = 0.0
    share: Share = against.rows_of_rank
    part: Part = against.whole_model
    alike: bool = True
    mistakes: tuple[Mistake, ...] = ()
    cheap: tuple[Cheap, ...] = ()
    hint: str = ""

    def judge(self, answer: Any, clusters: Callable[[int], Cluster] | None = None) -> Verdict:
        """Run it on ranks. `clusters`: gives ranks that are there already, so many as it is asked for."""
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", f"def {self.signature}: ...")
        for ranks in self.ranks:
            try:
                found = self._compare(answer, ranks, clusters)
            except Exception as error:
                return _failed(error, ranks)
            if not found.right:
                return self._wrong(found, ranks)
            for demand in self.cheap:
                wasteful = demand(found)
                if wasteful is not None:
                    reason = f"plain torch's parameters on {several(ranks, 'rank')}, but {wasteful[0]}"
                    return Verdict(False, reason, wasteful[1], repr(found))
        counts = " and ".join(filter(None, (", ".join(map(str, self.ranks[:-1])), str(self.ranks[-1]))))
        return Verdict(True, f"plain torch's parameters on {counts} ranks; {self.praise}", evidence=found.traffic)

    def _compare(self, answer: Any, ranks: int, clusters: Callable[[int], Cluster] | None) -> Comparison:
        with _ranks(ranks, clusters) as cluster:
            return against.against_plain_torch(
                answer,
                self.model,
                self.batches,
                ranks=ranks,
                loss=self.loss,
                lr=self.lr,
                momentum=self.momentum,
                share=self.share,
                part=self.part,
                alike=self.alike,
                cluster=cluster,
            )

    def _wrong(self, found: Comparison, ranks: int) -> Verdict:
        worst = max(range(ranks), key=lambda rank: found.error[rank])
        what = f"on {several(ranks, 'rank')} the parameters of rank {worst} are not plain torch's"
        untouched = self._ends(lambda trial: trial.model, ranks)
        if all(against.difference(rank.state, end) == 0 for rank, end in zip(found.ranks, untouched, strict=True)):
            return Verdict(False, f"{what}: nothing has changed them", "train the model that you are given, in place")
        for mistake, hint in self.mistakes:
            ends = self._ends(mistake, ranks)
            if all(against.difference(rank.state, end) < 1e-9 for rank, end in zip(found.ranks, ends, strict=True)):
                return Verdict(False, what, hint)
        hint = self.hint
        if not self.alike and found.ranks[0].state and self.part is against.whole_model:
            apart = max(against.difference(rank.state, found.ranks[0].state) for rank in found.ranks)
            hint = (
                hint if apart < 1e-9 else "the ranks end with different parameters: do they begin with the same ones?"
            )
        return Verdict(False, f"{what} (difference {found.error[worst]:.1e})", hint, repr(found))

    def _ends(self, mistake: Callable[[Trial], nn.Module], ranks: int) -> list[dict[str, Tensor]]:
        """The parameters of each rank as this mistake leaves them."""
        torch.manual_seed(0)
        begin = self.model().double()
        ends = []
        for rank in range(ranks):
            model = against.begin_of_rank(deepcopy(begin), rank, self.alike)
            own = [self.share(batch, rank, ranks) for batch in self.batches]
            trial = Trial(model, deepcopy(begin), own, self.batches, self.loss, self.lr, self.momentum, rank, ranks)
            ends.append(against.state(self.part(mistake(trial), rank, ranks)))
        return ends


def _counting(ranks: int, numbers: int) -> list[Tensor]:
    """For each rank a tensor with other numbers."""
    return [torch.arange(numbers, dtype=torch.float64) + 100 * (rank + 1) for rank in range(ranks)]


@dataclass(frozen=True)
class Exchanged:
    """`signature` is a collective: each rank calls it with a tensor, and it returns what this rank must have.

    cases      (ranks, size): tensors of so many numbers, or what `tensors` makes of both
    truth      of the tensors of all ranks and a rank: what this rank must return
    sent       of ranks and the bytes of a tensor: how many bytes a rank may send
    messages   of ranks: in how many messages, where it matters
    allowed    the calls of torch.distributed that may be used, such as {"send", "recv"}
    mistakes   (truth of a frequent mistake, the hint that its author needs)
    """

    signature: str
    cases: tuple[tuple[int, int], ...]
    truth: Callable[[list[Tensor], int], Tensor]
    sent: Callable[[int, int], float]
    allowed: frozenset[str]
    praise: str
    wasteful: str
    mistakes: tuple[tuple[Callable[[list[Tensor], int], Tensor], str], ...] = ()
    hint: str = ""
    messages: Callable[[int], int] | None = None
    tensors: Callable[[int, int], list[Tensor]] = _counting

    def judge(self, answer: Any, clusters: Callable[[int], Cluster] | None = None) -> Verdict:
        """Run it on ranks. `clusters`: gives ranks that are there already, so many as it is asked for."""
        name = self.signature.partition("(")[0]
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", f"def {self.signature}: ...")
        for ranks, size in self.cases:
            given = self.tensors(ranks, size)
            where = f"on {several(ranks, 'rank')}, with tensors of {several(given[0].numel(), 'number')},"
            try:
                with _ranks(ranks, clusters) as cluster:
                    found = against.on_ranks(_exchange, answer, given, ranks=ranks, cluster=cluster)
            except Exception as error:
                return _failed(error, ranks)
            forbidden = sorted({call for one in found for call in one.calls} - self.allowed)
            if forbidden:
                hint = f"write it with {', '.join(sorted(self.allowed))}"
                return Verdict(False, f"{name} calls {', '.join(forbidden)}, which does the work itself", hint)
            for rank, one in enumerate(found):
                if not _same(one.result, self.truth(given, rank)):
                    return Verdict(
                        False, f"{where} rank {rank} has {_short(one.result)}", self._recognised(found, given)
                    )
            most = max(found, key=lambda one: one.sent)
            limit = self.sent(ranks, given[0].nbytes)
            if most.sent > limit:
                reason = f"right {where.rstrip(',')}, but a rank sends {most.sent} bytes; {limit:.0f} are enough"
                return Verdict(False, reason, self.wasteful)
            count = max(one.messages for one in found)
            if self.messages is not None and count > self.messages(ranks):
                reason = (
                    f"right {where.rstrip(',')}, but a rank sends {count} messages; {self.messages(ranks)} are enough"
                )
                return Verdict(False, reason, self.wasteful)
        return Verdict(True, f"{name} is right in all {several(len(self.cases), 'case')}; {self.praise}")

    def _recognised(self, found: list[OnRank], given: list[Tensor]) -> str:
        for mistake, hint in self.mistakes:
            if all(_same(one.result, mistake(given, rank)) for rank, one in enumerate(found)):
                return hint
        return self.hint


def _exchange(answer: Callable[[Tensor], Any], given: list[Tensor]) -> OnRank:
    """On a rank: call the collective once."""
    from minipar.cluster import worker

    x = given[worker.context().rank].clone()
    with against.counted([x]) as count:
        result = answer(x)
    return replace(count.on_rank(None, {}), result=result.detach() if isinstance(result, Tensor) else result)


def _same(found: Any, right: Tensor) -> bool:
    return isinstance(found, Tensor) and found.shape == right.shape and torch.allclose(found, right, rtol=1e-12)


def _short(found: Any) -> str:
    if not isinstance(found, Tensor):
        return "returned None; return the tensor" if found is None else f"returned {type(found).__name__}, not a tensor"
    shown = ", ".join(f"{x:g}" for x in found.flatten()[:4].tolist())
    return f"[{shown}{', ...' if found.numel() > 4 else ''}]"


@contextmanager
def _ranks(ranks: int, clusters: Callable[[int], Cluster] | None) -> Iterator[Cluster]:
    """Ranks for one trial: those of `clusters`, which stay, or some that end afterwards."""
    if clusters is not None:
        yield clusters(ranks)
    else:
        with Cluster(ranks, device="cpu", patience=PATIENCE) as started:
            yield started


def _failed(error: Exception, ranks: int) -> Verdict:
    """A verdict on an answer that raised an exception on a rank."""
    where = f"on {several(ranks, 'rank')} your function"
    said = str(error).splitlines()[0] if isinstance(error, Deadlock) else ""
    if "Timed out waiting" in str(error):  # (words of gloo)
        said = f"a rank waited {against.LONGEST_WAIT:g} seconds for a message"
    elif "Connection closed by peer" in str(error):
        said = "a rank waits for another one, which has ended"
    if said:
        hint = "who waits for whom? Each recv needs its send, and all ranks call a collective in the same order"
        return Verdict(False, f"{where} does not end: {said}", hint)
    return raised(error, where)


@dataclass(frozen=True)
class Saving:
    """`signature` runs layers so that the graph holds less for the backward: answer(layers, x) gives their output.

    The checker does the backward. Output, gradients and random numbers must be those of plain torch, bit by bit.

    layers   makes the layers; x: makes their input
    held     bytes that may live after the forward, the parameters counted in; peak: at any time
    again    how often each layer may run: its forward, and once more in the backward
    """

    signature: str
    layers: Callable[[], nn.Sequential]
    x: Callable[[], Tensor]
    held: int
    peak: int
    praise: str
    again: int = 1
    hint: str = ""

    def judge(self, answer: Any) -> Verdict:
        name = self.signature.partition("(")[0]
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", f"def {self.signature}: ...")
        try:
            found = self._run(answer)
        except Exception as error:
            return raised(error, name)
        right = self._run(lambda layers, x: layers(x))
        for what, hint in (
            ("outputs", "give what the last layer gives"),
            ("random numbers after the forward", "leave the generator as a plain forward would leave it"),
            ("gradients of the input", "the backward must reach x, and draw the same random numbers as the forward"),
            ("gradients of the parameters", self.hint),
            ("random numbers after the backward", "put the state of the generator back after a layer has run again"),
        ):
            if not _equal(found.values[what], right.values[what]):
                return Verdict(False, f"with {name} the {what} differ from plain torch's", hint)
        if max(found.runs) > 1 + self.again:
            return Verdict(
                False, f"a layer runs {max(found.runs)} times", f"{several(1 + self.again, 'run')} of it would do"
            )
        for bytes_, limit, when in ((found.held, self.held, "after the forward"), (found.peak, self.peak, "at worst")):
            if bytes_ > limit:
                reason = f"right, but {bytes_:,} bytes live {when}; {limit:,} are enough (plain torch: {right.peak:,})"
                return Verdict(False, reason, self.hint)
        return Verdict(True, f"plain torch's output and gradients; {self.praise}: {found.peak:,} bytes at worst")

    def _run(self, answer: Callable[[nn.Sequential, Tensor], Tensor]) -> _Ran:
        torch.manual_seed(0)
        layers, x = self.layers(), self.x().requires_grad_()
        runs = [0] * len(layers)

        def ran(k: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                runs[k] += 1

            return hook

        for k, layer in enumerate(layers):
            layer.register_forward_hook(ran(k))
        values: dict[str, list[Tensor | None]] = {}
        with against.counted([x, *layers.parameters()]) as count:
            output = answer(layers, x)
            count.settle()
            held = count.live
            values["outputs"] = [output.detach()]
            values["random numbers after the forward"] = [torch.get_rng_state()]
            output.sum().backward()
        values["gradients of the input"] = [x.grad]
        values["gradients of the parameters"] = [parameter.grad for parameter in layers.parameters()]
        values["random numbers after the backward"] = [torch.get_rng_state()]
        return _Ran(values, runs, held, count.peak)


@dataclass(frozen=True)
class _Ran:
    values: dict[str, list[Tensor | None]]
    runs: list[int]
    held: int
    peak: int


def _equal(found: list[Tensor | None], right: list[Tensor | None]) -> bool:
    return all(
        (one is None) is (other is None) and (one is None or other is None or torch.equal(one, other))
        for one, other in zip(found, right, strict=True)
    )
