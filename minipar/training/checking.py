"""A run proves itself: some of its steps are compared with plain torch, which begins where the ranks began.

    ranks     step 0 | wait |  steps 1 to 6  | step 7 | wait | steps 8, 9       state and gradients come back
    driver             plain torch                      plain torch             while nothing is timed

Losses and gradients are those of the same parameters. Then plain torch's optimizer takes the gradients of the ranks, so
that what is compared of parameters is the update alone: an optimizer such as Adam makes of a gradient that is nothing
but rounding a whole step. All ranks bring all that they have, so those that disagree are found.

What is beyond rounding? A difference of half the digits may be that: a sum of many terms that nearly cancel. So plain
torch is asked again, with parameters that differ by a few roundings, and what this changes is rounding. Where a model
narrows its numbers (Gemma's norms compute in float32), the roundings are those of the narrower type.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.cluster.failures import said
from minipar.costs.measured import Profile
from minipar.data.batches import batch_of
from minipar.errors import CheckError, SaveError
from minipar.execution.execution import Job
from minipar.execution.lines import Slice
from minipar.execution.saving import keeping
from minipar.execution.saving.keeping import Share
from minipar.execution.updating import plain_schedule
from minipar.models.tensors import map_tensors, tensors
from minipar.program import Program, Synchronous
from minipar.strategies.plan import Plan
from minipar.trace.recorded_order import RecordedOrder
from minipar.training import plainly
from minipar.training.plainly import Start
from minipar.training.reference import Reference
from minipar.wording import several

SECONDS, PART = 2.0, 0.05  # what checks of a run may take: so long, or this part of it
_EACH, _BYTES, _GPU = 0.02, 5e8, 50  # of a check: seconds, bytes a second; how much a GPU is faster than its host
_COLD, _REPLAY = 2, 4  # how many times as long a first step takes as others, and the replay of a log
_SHAKE, _MORE = 32, 30  # so many roundings of each parameter are tried, and a run's may lead so many times as far
TF32 = 2.0**-11  # relative rounding of products on a GPU
_SLACK = 8  # roundings of a parameter in an update of it
_TERMS = 64  # roundings of the largest gradient that may be left where the terms of one cancel entirely
_SMALL = 0.01  # a tensor this much smaller than the largest one may have the error of one of this size
Named = Mapping[str, Tensor]


# when -----------------------------------------------------------------------------------------------------------------


def passes_to_check(count: int, seed: int, cost: float, seconds: float) -> tuple[list[int], str]:
    """The passes of a run that are compared with plain torch: the first one, and one in each power of ten, as far as
    that is worth its time; or why there is none.

    count     how many passes the run has
    cost      of a comparison, in seconds; `seconds`: of the run
    """
    allowed = max(SECONDS, PART * seconds)
    if cost > allowed:
        return [], (
            f"a step of plain torch is estimated to take {cost:.1f} s, which is more than {SECONDS:g} s and than "
            f"{PART:.0%} of the run"
        )
    draw, found, begin = random.Random(seed), [0], 1
    while begin < count and (len(found) + 1) * cost <= allowed:
        found.append(draw.randrange(begin, min(10 * begin, count)))
        begin *= 10
    return found, ""


def cost_of(program: Program, profile: Profile, batch: int, gpu: bool) -> float:
    """Seconds that a comparison of one pass takes, estimated: the whole batch in one process, and what is sent."""
    slices = program.slice_count
    rows = max(profile.forward) // slices
    keys = [rows * slices + j for j in range(slices)] if slices > 1 else [rows]
    layers = sum(sum(profile.forward[key]) + sum(profile.backward[key]) for key in keys)
    compute = program.steps * layers * batch / rows * program.sharing * (_GPU if gpu else 1)
    compute *= _COLD if isinstance(program.contract, Synchronous) and not program.local_steps else _REPLAY
    sent = sum(profile.parameter_bytes) + sum(profile.gradient_bytes) + sum(profile.optimizer_bytes)
    return _EACH + compute + sent * program.sharing * (program.replicas + 3) / _BYTES


def why_different(plan: Plan, sensitive: Sequence[str], cut: bool = False) -> str:
    """Why a plan gives other numbers than one device, although all is right; "" if it does not.

    sensitive   the layers whose results depend on how the batch is split, and why
    cut         the model has a forward of its own, and is cut into layers, each of which draws for itself
    """
    parts = plan.dp * plan.total_microbatches * plan.slice_count
    if sensitive and parts > 1:
        return f"the batch is split into {parts} parts, and the results of some layers depend on how"
    if cut and (drawing := [one for one in sensitive if "draw" in one]):
        return f"the model draws other numbers in layers than in its own forward: {drawing[0]}"
    if plan.compress != "none":
        return f"compress={plan.compress} changes gradients"
    return ""


# comparing ------------------------------------------------------------------------------------------------------------


@dataclass
class Checked:
    """What was compared of a run.

    steps    that were compared
    error    the largest difference, relative to the largest number of its kind: of losses, gradients, and so on
    reason   why nothing was compared, or why a difference is no mistake
    """

    steps: list[int] = field(default_factory=list)
    error: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        if not self.steps:
            return f"nothing was compared with plain torch: {self.reason}"
        row = range(self.steps[0], self.steps[-1] + 1)
        every = len(row) > 3 and self.steps == list(row)
        steps = f"{row[0]} to {row[-1]}" if every else ", ".join(map(str, self.steps))
        note = f" ({self.reason})" if self.reason else ""
        return f"checked: step{'s' * (len(self.steps) > 1)} {steps}: {f'{self.error:.0e}' if self.error else 0}{note}"


@dataclass
class Checker:
    """In the driver: compares stretches of a run with plain torch.

    every     compare every step, in one stretch; else some `passes`
    expected  why other numbers are no mistake; "" if there is no reason
    notes     what an error says of the model under this plan
    eps       the relative rounding of what ranks compute with, where that is larger than that of the parameters
    alone     plain torch trains on its own; else its updates take the gradients of the ranks
    start     where the next stretch begins
    plain     what plain torch has made of the last one
    """

    plan: Plan
    job: Job
    every: bool
    passes: list[int]
    expected: str
    notes: Sequence[str]
    threads: int
    eps: float
    alone: bool
    start: Start
    checked: Checked
    plain: Reference | None = None

    def ahead(self, done: int, total: int, one: bool) -> tuple[int, bool, bool]:
        """How many passes the ranks do next (`one`: not more than one), whether these are compared, and whether those
        after them are."""
        stop = min((k for k in self.passes if k > done), default=total)
        count = 1 if one or done in self.passes else total - done if self.every else stop - done
        return count, self.every or done in self.passes, (self.every or done + count in self.passes)

    def compare(
        self, losses: Sequence[float], gradients: Sequence[Named], ranks: Sequence[Iterable[Slice]], steps: int,
        work: int | RecordedOrder,
    ) -> None:  # fmt: skip
        """Compare what the ranks did in so many steps from `start` on, and what each has of the model then. Raises
        CheckError."""
        own_gradients = isinstance(work, int) or not (work.served or work.local)  # (one for each parameter and update)
        checked, given = self.checked, own_gradients and not (self.alone or self.plan.inference)
        numbers = range(self.start.step, self.start.step + steps)
        split = self.plan.dp * self.plan.total_microbatches > 1
        try:
            data = None if self.every else {step: self._read(step) for step in numbers}
            ask = partial(
                plainly.train_reference, self.job, work, self.threads, clip=self.plan.clip,
                inference=self.plan.inference, start=self.start, data=data, given=gradients if given else (),
            )  # fmt: skip
            self.plain = plain = ask()
        except Exception as error:
            if self.every:
                raise
            return self._stop(f"plain torch could not be asked: {said(error)}")
        there = differences(self.start.step, losses, gradients, ranks, plain, split)
        checked.steps += numbers
        checked.error = max(checked.error, error_of(there))
        checked.reason = self.expected or checked.reason
        suspicious = beyond([] if self.expected else there, self.eps, given)
        if not suspicious:
            return None
        eps = max(self.eps, *(one.eps for one in suspicious))
        shaken = ask(shaken=min(_SHAKE * eps, max(eps, 0.01)))
        if shaken.eps > eps:  # (the model computes in float32, say, whatever the type of its parameters is)
            self.eps = eps = shaken.eps
            suspicious = beyond(there, self.eps, given)
            shaken = ask(shaken=min(_SHAKE * eps, max(eps, 0.01))) if suspicious else shaken
        pieces = [*pieces_of("parameters", shaken.parameters), *pieces_of("buffers", shaken.buffers)]
        rounding = {
            one[:3]: one.apart
            for one in differences(self.start.step, shaken.losses, shaken.gradients, [pieces], plain, split)
        }
        wrong = [one for one in suspicious if not one.apart <= _MORE * rounding.get(one[:3], 0.0)]
        if wrong and (changing := [step for step in numbers if not self._reads_alike(step)]):
            checked.steps, checked.error = [], 0.0
            return self._stop(f"the data give other rows when step {changing[0]} is read again")
        if wrong:
            raise mistake(wrong, len(ranks), self.plan, self.notes)
        return None

    def go_on(self, shares: Sequence[Share], step: int) -> None:
        """The next comparison begins at a step, with what the ranks have before it."""
        if self.plain is not None and self.plain.remembers:
            return self._stop(f"later steps not: {self.plain.remembers[0]} changes from step to step")
        try:
            schedule = plain_schedule(shares[0].header.schedule)
            self.start = Start(step, keeping.whole_of(shares, "check"), schedule)
        except SaveError as error:
            self._stop(f"later steps not: {error.reason.partition(';')[0].removeprefix('check: ')}")
        return None

    def _stop(self, reason: str) -> None:
        """Compare no later steps."""
        self.passes, self.every, self.checked.reason = [], False, reason

    def _read(self, step: int) -> Any:
        data = self.job.data
        found = data if isinstance(data, tuple) else batch_of(data, step, self.job.batch)
        return tuple(map_tensors(part, lambda t: t.as_subclass(Tensor)) for part in found)

    def _reads_alike(self, step: int) -> bool:
        """Whether the data set gives the same rows again. If not, the ranks may have had other ones."""
        one, again = (tensors(self._read(step)) for _ in range(2))
        return len(one) == len(again) and all(map(torch.equal, one, again))


# differences ----------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Two tensors: how far their elements are apart at most.

    step     of a loss or a gradient; of a parameter or buffer, the last one before it
    size     the largest element of plain torch's
    scale    what the difference is to be compared with: the size, or of a parameter how far a step has moved it
    eps      the relative rounding; `slack`: what that of the tensor itself makes
    factor   of plain torch's tensor that the other one is, if it is; else NaN
    rank     that has the tensor; -1: all together
    """

    kind: str
    name: str
    step: int
    apart: float = 0.0
    size: float = 0.0
    scale: float = 0.0
    eps: float = 0.0
    slack: float = 0.0
    factor: float = math.nan
    rank: int = -1

    def __str__(self) -> str:
        what = {"gradient": f"the gradient of {self.name}", "loss": "the loss"}.get(
            self.kind, f"{self.kind} {self.name}"
        )
        where = f" on rank {self.rank}" if self.rank >= 0 else ""
        far = f"{self.apart / (self.scale or 1.0):.1e} of {'its step' if self.kind == 'parameter' else 'its size'}"
        times = "" if math.isnan(self.factor) else f" ({self.factor:.4g} times plain torch's)"
        return f"{what}{where} differs from plain torch's by {far}{times}"


def differences(
    first: int, losses: Sequence[float], gradients: Sequence[Named], ranks: Sequence[Iterable[Slice]],
    plain: Reference, split: bool,
) -> list[Difference]:  # fmt: skip
    """Everything that there is to compare, tensor by tensor. If the batch was `split`, no statistics of batches."""
    kinds = [t.dtype for t in plain.parameters.values() if t.is_floating_point()] or [torch.float32]
    eps = max(torch.finfo(kind).eps for kind in kinds)
    pairs = zip(losses, plain.losses, strict=True)
    found = [
        _difference("loss", "", first + k, *(torch.tensor([n], dtype=torch.float64) for n in pair))._replace(eps=eps)
        for k, pair in enumerate(pairs)
    ]
    for k, (own, expected) in enumerate(zip(gradients, plain.gradients, strict=True)):
        names = dict.fromkeys((*own, *expected))
        found += [_difference("gradient", name, first + k, own.get(name), expected.get(name)) for name in names]
    whole = {piece.key: piece for piece in pieces_of("parameters", plain.parameters)}
    whole |= {
        piece.key: piece for piece in pieces_of("buffers", plain.buffers)
        if not split or piece.key.partition("/")[2] not in plain.statistics
    }  # fmt: skip
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            kind, _, name = piece.key.partition("/")
            if piece.key not in whole:
                continue
            there = whole[piece.key].values[piece.start : piece.start + piece.values.numel()]
            mine = piece.values if piece.shape == whole[piece.key].shape else None
            one = _difference(kind[:-1], name, first + max(0, len(losses) - 1), mine, there)
            scale = plain.moved.get(name, 0.0) if kind == "parameters" and plain.moved else one.size
            found.append(one._replace(scale=scale, slack=_SLACK * len(losses) * one.eps * one.size, rank=rank))
    return found


def _difference(kind: str, name: str, step: int, mine: Tensor | None, plain: Tensor | None) -> Difference:
    if mine is None or plain is None or mine.numel() != plain.numel():
        return Difference(kind, name, step, math.inf)
    kinds = [t.real.dtype if t.is_complex() else t.dtype for t in (mine, plain)]
    eps = max(torch.finfo(each).eps if each.is_floating_point else 0.0 for each in kinds)
    if not plain.numel():
        return Difference(kind, name, step, eps=eps)
    wide = torch.complex128 if plain.is_complex() or mine.is_complex() else torch.float64
    one, other = (t.detach().cpu().reshape(-1).to(wide) for t in (mine, plain))
    apart, size = (one - other).abs().max().item(), other.abs().max().item()
    if not math.isfinite(apart):
        return Difference(kind, name, step, math.inf, eps=eps)
    square = (other.conj() * other).sum().real.item()
    factor = (other.conj() * one).sum().real.item() / square if square and apart else math.nan
    close = (one - factor * other).abs().max().item() <= 1e-3 * size
    return Difference(kind, name, step, apart, size, size, eps, factor=factor if close else math.nan)


def pieces_of(kind: str, named: Named) -> Iterator[Slice]:
    """Whole tensors as ranks bring them."""
    for name, values in named.items():
        if values.layout is torch.strided:  # (a sparse buffer is no state)
            yield Slice(f"{kind}/{name}", tuple(values.shape), 0, values.reshape(-1))


def error_of(some: Iterable[Difference]) -> float:
    """The largest difference, relative to the largest element that plain torch has of its kind."""
    apart: dict[str, float] = {}
    size: dict[str, float] = {}
    for one in some:
        apart[one.kind], size[one.kind] = (
            max(apart.get(one.kind, 0.0), one.apart),
            max(size.get(one.kind, 0.0), one.size),
        )
    return max((apart[kind] / (size[kind] or 1.0) for kind in apart), default=0.0)


def beyond(some: Sequence[Difference], eps: float, given: bool = True) -> list[Difference]:
    """Those that are beyond rounding, if it takes half of the digits. Terms of a gradient may be as large as the
    largest gradient, and cancel; where they do so entirely, as before a norm, their rounding is all that is left. An
    update makes of that what it likes: it is compared only if plain torch was given the gradients of the ranks."""
    scale: dict[str, float] = {}
    for one in some:
        scale[one.kind] = max(scale.get(one.kind, 0.0), one.scale)

    def cancels(one: Difference) -> bool:
        return one.kind == "gradient" and one.size <= min(_TERMS * one.eps, _SMALL) * scale[one.kind]

    def bound(one: Difference) -> float:
        largest, rounding = scale[one.kind], max(eps * (one.kind in ("loss", "gradient")), one.eps)
        left = (_TERMS if cancels(one) else 1) * rounding * largest if one.kind == "gradient" else 0.0
        return float(rounding**0.5 * max(one.scale, _SMALL * largest) + left + one.slack)

    nothing = set() if given else {one.name for one in some if cancels(one)}
    return [one for one in some if one.apart > bound(one) and not (one.kind == "parameter" and one.name in nothing)]


def mistake(wrong: Sequence[Difference], ranks: int, plan: Plan, notes: Sequence[str]) -> CheckError:
    """The error of a run that is not what plain torch makes of the same model, data and optimizer."""
    step, kinds = min(one.step for one in wrong), ["gradient", "parameter", "buffer", "loss"]
    first = [one for one in wrong if one.step == step]
    first.sort(key=lambda one: (kinds.index(one.kind), -one.apart / (one.scale or 1.0)))
    worst, known = first[0], [f"plan {str(plan)!r}"]
    others = sorted({one.kind for one in first} - {worst.kind})
    off = sorted({one.rank for one in first if one[:2] == worst[:2]})
    if others:
        known.append(f"so {'do' if len(others) > 1 else 'does'} the {' and the '.join(others)}")
    elif worst.kind == "parameter":
        known.append(f"its gradient is right, so its update is wrong on {several(len(off), 'rank')} of {ranks}")
    error = CheckError(
        f"check: step {step}: {worst}; with {', '.join([*known, *notes])}. Possible are another plan, and check=False "
        "to train all the same",
        "\n".join(map(str, first[:8])),
    )
    error.step, error.parameter = step, worst.name
    return error
