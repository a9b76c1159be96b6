"""Lesson 12: how late gradients are; which version to use; late gradients by hand; a rank without a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from minipar import strategies
from minipar.errors import MiniparError
from minipar.prediction.simulator import simulate
from minipar.program import Action, Backward, Forward, Program, Staleness
from minipar.program.verify.staleness import alive, stalest
from minipar.program.verify.verifier import verify
from minipar.strategies.passes.versions import as_it_happened
from minipar.strategies.plan import Plan
from minipar.strategies.schedules.ampnet import choose, decide
from minipar.wording import several
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.verdict import Verdict, raised

if TYPE_CHECKING:
    from torch import Tensor

# how late, how many versions ----------------------------------------------------------------------------------------


def _late(schedule: str, rank: int, ranks: int) -> tuple[int, int]:
    row = Plan(pp=ranks, microbatches=ranks, schedule=schedule).compile(layers=ranks, steps=4).ranks[rank]
    return stalest(row), alive(row)


LATE = Function(
    "late(schedule, rank, ranks)",
    tuple(
        (schedule, rank, ranks)
        for schedule, (rank, ranks) in product(
            ("pipedream", "pipedream-vertical", "pipedream-2bw"), ((0, 4), (1, 4), (3, 4), (0, 2), (4, 6))
        )
    ),
    truth=_late,
    mistakes=(
        (lambda schedule, rank, ranks: (rank, rank + 1), "the first rank has the longest way to the end and back"),
        (
            lambda schedule, rank, ranks: (ranks - 1 - rank, ranks - rank),
            "right for pipedream; with vertical sync all ranks use the version of rank 0, and 2BW updates once a step",
        ),
    ),
    hint="print three_steps(schedule, ranks).program.text(rank=...): which version does F use, which does STEP make?",
)  # fmt: skip


# the version of a forward -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VersionRule:
    """Which version of its weights a rank uses for a micro-batch: PipeDream-2BW's rule, judged by `verify`.

    rule(rank, ranks, microbatch, microbatches, newest) -> version      micro-batches are counted over the whole run
    """

    sizes: tuple[tuple[int, int, int], ...] = ((4, 4, 4), (2, 3, 3), (3, 2, 4), (4, 6, 3))  # ranks, of a step, steps

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", "def version(rank, ranks, microbatch, ...): ...")
        for ranks, microbatches, steps in self.sizes:
            sizes = f"with {several(ranks, 'rank')} and steps of {several(microbatches, 'micro-batch')}"
            verdict = _judge_rule(answer, ranks, microbatches, steps, sizes)
            if verdict is not None:
                return verdict
        return Verdict(True, "every gradient is one update late, with two versions on each rank, in all sizes")


def _judge_rule(rule: Callable[..., Any], ranks: int, microbatches: int, steps: int, sizes: str) -> Verdict | None:
    plan = Plan(pp=ranks, microbatches=microbatches, schedule="pipedream-2bw")
    right = plan.compile(layers=ranks, steps=steps)
    orders = [plan.actions(rank, steps) for rank in range(ranks)]
    used: dict[tuple[int, int], tuple[int, int]] = {}

    def asked(rank: int, count: int, i: int, m: int, newest: int) -> int:
        given = rule(rank, count, i, m, newest)
        used[rank, i] = given, newest
        return int(given)

    try:
        program = as_it_happened(right, orders, asked)
    except Exception as error:
        return raised(error, f"{sizes}, your rule")
    for (rank, i), (given, newest) in used.items():
        if isinstance(given, bool) or given != int(given) or given < 0:
            return Verdict(False, f"{sizes}, your rule gives {given!r}", "a version counts updates: 0, 1, 2, ...")
        if given > newest:
            reason = (
                f"{sizes}, micro-batch {i} on rank {rank} asks for version {given}; there are "
                f"{several(newest, 'update')}"
            )
            return Verdict(False, reason, "a forward cannot wait for an update that comes after it in the list")
    if program == right:
        return None
    wrong = ((key, found[0]) for key, found in used.items() if found[0] != _of_2bw(key[1], microbatches))
    (rank, i), given = next(wrong)
    asks = f"micro-batch {i} of step {i // microbatches} uses version {given} on rank {rank}"
    late, held = (max(map(count, program.ranks)) for count in (stalest, alive))
    what = (
        f"{sizes}, {asks}; gradients are up to {several(late, 'update')} late, and {several(held, 'version')} are held"
    )
    try:
        verify(program)
    except MiniparError as error:
        return Verdict(False, what, "2BW: one update late, two versions", f"{error.reason}\n{error.details}".strip())
    return Verdict(False, what, "all micro-batches of a step use the same version, which is an update old by then")


def _of_2bw(microbatch: int, microbatches: int) -> int:
    return strategies.find("pipedream-2bw").asynchronous.version(0, 1, microbatch, microbatches, 0)  # type: ignore[union-attr]


VERSION_OF_2BW = VersionRule()


# late gradients, by hand --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LateGradients:
    """Training with late gradients in one process, judged by the replay of a pipeline with vertical sync.

    late_sgd(gradient, w, lr, late, updates) -> w      gradient(w, i): of mini-batch i with the weights w
    """

    sizes: tuple[tuple[int, int], ...] = ((3, 8), (2, 5), (1, 4))  # ranks of the pipeline, updates
    lr: float = 0.2

    def judge(self, answer: Any) -> Verdict:
        import torch

        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", "def late_sgd(gradient, w, lr, late, updates): ...")
        for ranks, updates in self.sizes:
            start, gradient, right, asked = _pipeline(ranks, updates, self.lr)
            sizes = f"with {several(ranks, 'rank')}, so gradients {ranks - 1} late, and {several(updates, 'update')}"
            try:
                given = answer(gradient, start.clone(), self.lr, ranks - 1, updates)
            except Exception as error:
                return raised(error, f"{sizes}, your function")
            if not isinstance(given, torch.Tensor) or given.shape != right.shape:
                return Verdict(False, f"{sizes}, your function gives no weights", "return w, as it is in the end")
            if not bool((given - right).abs().max() <= 1e-9):  # (this is also true for nan)
                return Verdict(
                    False, f"{sizes}, your weights are not the pipeline's", _late_hint(asked, ranks, updates)
                )
        return Verdict(True, "your weights are those of a pipeline with vertical sync, to rounding, in all sizes")


def _late_hint(asked: list[tuple[int, bool]], ranks: int, updates: int) -> str:
    """The hint that follows from the gradients that were asked for."""
    if [i for i, _ in asked] != list(range(updates)):
        return f"ask for the gradient of mini-batches 0, 1, ..., {updates - 1}, each once and in this order"
    if len(asked) > 1 and ranks > 1 and not asked[1][1]:
        return "mini-batch 1 uses the initial weights, too: no update has come back to rank 0 by then"
    return "mini-batch i uses the weights after max(0, i - late) updates, but its update is applied to the newest ones"


class _PlainSGD:
    """w - lr * gradient. (The first optimizer of torch's own imports torch's compiler, which takes seconds.)"""

    def __init__(self, lr: float, parameters: list[Any]) -> None:
        self.lr, self.parameters = lr, parameters

    def step(self) -> None:
        for p in self.parameters:
            if p.grad is not None:
                p.data.sub_(p.grad, alpha=self.lr)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


def _pipeline(
    ranks: int, updates: int, lr: float
) -> tuple[Tensor, Callable[[Tensor, int], Tensor], Tensor, list[tuple[int, bool]]]:
    """Initial weights in one row, the function of their gradients, the weights after a run, and a list that the
    function fills with the gradients that were asked for."""
    import torch

    from minipar.execution.execution import Job
    from minipar.models import mlp
    from minipar.models.parameter_groups import shape_of
    from minipar.models.tensors import layers_of
    from minipar.trace.recorded_order import order_of
    from minipar.training import reference

    generator = torch.Generator().manual_seed(ranks)
    rows = torch.randn(updates, 3, generator=generator), torch.randn(updates, 2, generator=generator)
    build = partial(mlp, (3, *(4,) * (ranks - 1), 2), torch.nn.Tanh)
    sgd, mse = partial(_PlainSGD, lr), torch.nn.functional.mse_loss
    job = Job(build, rows, loss=mse, optimizer=sgd, dtype=torch.float64)  # type: ignore[arg-type]
    model = job.build()
    plan = Plan(pp=ranks, microbatches=updates, schedule="pipedream-vertical")
    order = order_of(plan.compile(shape_of(layers_of(model))))
    done = reference.Replay(reference.Job(job.build(), job.batches, mse, sgd), order).train()
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    right = torch.cat([p.flatten() for p in done.parameters.values()])
    asked: list[tuple[int, bool]] = []
    x, y = job.batches(0)

    def gradient(w: Tensor, i: int) -> Tensor:
        asked.append((i, bool(torch.equal(w, start))))
        torch.nn.utils.vector_to_parameters(w.detach(), model.parameters())
        found = torch.autograd.grad(mse(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        return torch.cat([part.flatten() for part in found])

    return start, gradient, right, asked


LATE_SGD = LateGradients()


# no schedule --------------------------------------------------------------------------------------------------------


class _Impossible(Exception):
    """A rule chose something impossible: the reason, and a hint."""


@dataclass(frozen=True)
class LocalRule:
    """What a rank does next, decided by what has arrived: AMPNet's `choose`, judged by following the rule.

    rule(rank, ranks, total, in_flight, forwards, backwards, outputs, gradients) -> Forward(i), Backward(i) or None

    ranks, total, in_flight   of the run: ranks, micro-batches in all, and how many may be under way
    time                      at most so many units; a forward takes 1 and a backward 2
    activations               at most so many micro-batches kept on every rank
    late                      at most so many updates between a forward and its gradient, on every rank
    """

    ranks: int
    total: int
    in_flight: int
    time: float
    activations: int
    late: int

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", "def rule(rank, ranks, total, in_flight, ...): ...")
        if answer is choose:
            return Verdict(False, "that is minipar's own rule", "write it yourself, then compare")
        for ranks, total, in_flight in ((self.ranks, self.total, self.in_flight), (2, 5, 1), (3, 7, 9), (1, 3, 2)):
            try:
                orders = _followed(answer, ranks, total, in_flight)
            except _Impossible as problem:
                return Verdict(False, str(problem.args[0]), str(problem.args[1]))
            except Exception as error:
                return raised(error, f"with {several(ranks, 'rank')} your rule")
            if ranks == self.ranks:
                verdict = self._targets(orders)
                if verdict is not None:
                    return verdict
        met = (
            f"at most {self.time:g} units, {several(self.activations, 'activation')} on a rank, "
            f"{several(self.late, 'update')} late"
        )
        return Verdict(True, f"your rule ends in all sizes, and meets the targets: {met}")

    def _targets(self, orders: list[list[Action]]) -> Verdict | None:
        plan = Plan(pp=self.ranks, microbatches=self.total, schedule="ampnet", in_flight=self.in_flight)
        program: Program = as_it_happened(plan.compile(layers=self.ranks), orders)
        verify(program)
        assert isinstance(program.contract, Staleness)
        trace = simulate(program, forward=1.0, backward=2.0)
        if trace.time > self.time + 1e-9:
            idle = f"it takes {trace.time:g} units, of which ranks idle {trace.bubble_of_total():.0%}"
            return Verdict(False, f"{idle}; the target is {self.time:g}", "who waits although something is there?")
        kept, late = trace.in_flight(), trace.staleness()
        found = f"the ranks keep up to {kept} activations and are up to {late} updates late"
        if max(kept) > self.activations or max(late) > self.late:
            hint = "if an output and a gradient have both arrived, which of the two frees memory and makes an update?"
            if kept[-1] <= 1:  # (the last rank does its backwards first)
                hint = "in_flight is what rank 0 *may* have under way; how many does a pipeline of so many ranks need?"
            return Verdict(False, f"{found}; the targets are {self.activations} and {self.late}", hint)
        return None


def _followed(rule: Callable[..., Any], ranks: int, total: int, in_flight: int) -> list[list[Action]]:
    """The order of every rank that follows a rule. Raises _Impossible if the rule cannot be followed."""
    size = f"with {several(ranks, 'rank')}, {several(total, 'micro-batch')} and in_flight={in_flight}"

    def checked(
        rank: int, ranks: int, total: int, in_flight: int, forwards: int, backwards: int, outputs: int, gradients: int
    ) -> Action | None:
        chosen = rule(rank, ranks, total, in_flight, forwards, backwards, outputs, gradients)
        where = f"{size}, rank {rank} has done {forwards} forwards and {backwards} backwards"
        there = f"outputs={outputs}, gradients={gradients}"
        if chosen is None:
            return None
        if not isinstance(chosen, (Forward, Backward)):
            raise _Impossible(f"{where}; your rule gives {chosen!r}", "give Forward(i), Backward(i), or None to wait")
        forward = isinstance(chosen, Forward)
        due, name = (forwards, "forward") if forward else (backwards, "backward")
        if chosen.microbatch != due:
            raise _Impossible(f"{where}; its next {name} is {due}, not {chosen.microbatch}", "links keep their order")
        if forward and forwards >= total:
            raise _Impossible(f"{where}; there is no micro-batch {forwards}", f"there are {total} in all")
        if forward and rank and forwards >= outputs:
            raise _Impossible(f"{where}; Forward({due}) needs an output that has not arrived ({there})", "wait: None")
        if forward and not rank and forwards - backwards >= in_flight:
            raise _Impossible(f"{where}; {in_flight} are under way already", "rank 0 starts one if fewer are")
        if not forward and backwards >= forwards:
            raise _Impossible(f"{where}; Backward({due}) before its forward", "compare backwards with forwards first")
        if not forward and rank < ranks - 1 and backwards >= gradients:
            raise _Impossible(f"{where}; the gradient for Backward({due}) has not arrived ({there})", "wait: None")
        return chosen

    def run(rank: int, action: Action, now: float) -> tuple[float, float]:
        end = now + (1.0 if isinstance(action, Forward) else 2.0)
        return end, end

    orders = decide(ranks, total, in_flight, run, checked)
    for rank, row in enumerate(orders):
        if len(row) < 2 * total:
            reason = f"{size}, everybody waits: rank {rank} has done {len(row)} of {2 * total} pieces of work"
            raise _Impossible(reason, "for each rank, first and last too: what must it do when something is there?")
    return orders


NO_SCHEDULE = LocalRule(ranks=4, total=30, in_flight=8, time=99, activations=4, late=3)
