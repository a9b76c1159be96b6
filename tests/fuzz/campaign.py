"""Random models under random plans: `python -m tests.fuzz.campaign [--count N] [--seed S] [--only SEED]`.

One number determines a pair. The engine and the plain torch of `oracle.py` train it. The result is one of

    equal     losses, gradients of every step, and parameters and buffers after the last one, within 1e-12
    ran       it cannot be equal (compressed gradients, bfloat16), and gave finite numbers
    refused   PlanError: its messages are counted, so that wrong refusals are found
    warned    it differs, and `train` said that layers feel how the batch is split, and which
    invalid   plain torch cannot train the model either (an in-place operation on a tensor that autograd has saved)
    rounding  it differs no more than plain torch does when the last bit of its parameters is changed
    WRONG     a number differs
    CRASH     anything else: another error, a rank that died, no end within `LIMIT` seconds

The last two are failures, and are printed with seed, plan and model. Pairs of odd seeds are of the kind of
`outside.py`, and go through `train`, as some others do; the rest are compiled and executed directly.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minipar import Plan
from minipar.cluster import Cluster
from minipar.costs.rates import Calibration
from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError
from minipar.execution.execution import Job, execute
from minipar.execution.measuring.calibration import calibrate
from minipar.execution.saving import keeping
from minipar.models.network import edges_of
from minipar.models.parameter_groups import shape_of
from minipar.models.tensors import layers_of
from minipar.server.serving import execute_served
from minipar.training.training import train
from tests.fuzz import models, oracle, outside, plans

BOUND = 1e-12
NUDGE = 2.0**-50  # by how much of itself a parameter is changed at most, to see what rounding does
LIMIT = 60  # seconds for a pair
REFUSED = (  # by ranks: by torch itself, of a norm of one row; the last two over gloo only
    "Expected more than 1 value per channel",
    "has another form than before",
    "gradients of several dtypes are not compressed together",
    "ranks that decide as they run look for messages",
)
LOSSY = ("compress", "precision")
SPLIT_SEEN = "the results of some layers depend on how"  # what `train` warns of where rows see each other


@dataclass(frozen=True)
class Pair:
    """A model, a plan, and how long it is trained; `later`: another plan that goes on after `cut` steps."""

    seed: int
    spec: models.Spec
    words: tuple[tuple[str, str], ...]
    steps: int
    lr: float
    momentum: float
    cut: int = 0
    later: tuple[tuple[str, str], ...] = ()
    through_train: bool = False
    optimizer: str = ""
    scheduler: str = ""
    check: bool | None = True  # of `train`; None: its default

    @property
    def outside(self) -> bool:
        """Whether it is of the kind that `outside.py` draws."""
        return bool(self.optimizer)

    @property
    def make(self) -> oracle.Make:
        """What makes its optimizer."""
        if self.outside:
            return outside.OPTIMIZERS[self.optimizer](self.lr)
        return partial(torch.optim.SGD, lr=self.lr, momentum=self.momentum)

    @property
    def plan(self) -> dict[str, str]:
        return {key: value.lower() if value in ("True", "False") else value for key, value in self.words}

    def __str__(self) -> str:
        more = f", after {self.cut} of them: {plans.text(dict(self.later))}" if self.cut else ""
        how = " through train" if self.through_train else ""
        name = (
            f"{self.optimizer} {self.scheduler} check={self.check}"
            if self.outside
            else f"SGD, momentum={self.momentum}"
        )
        steps = f"{self.steps} steps of {name}, lr={self.lr}{how}{more}"
        return f"{plans.text(self.plan)}\n{steps}\n{self.spec}"


@dataclass(frozen=True)
class Outcome:
    kind: str
    text: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in ("WRONG", "CRASH")


class TookTooLong(BaseException):
    """A pair did not end."""


def draw(seed: int) -> Pair:
    """The pair of a seed: of an odd one of the kind that `outside.py` draws."""
    dice = random.Random(seed)
    if seed % 2:
        return _draw_outside(seed, dice)
    sliced = dice.random() < 0.06
    unsplit = not sliced and dice.random() < 0.2
    spec = models.draw(dice, unsplit, sliced)
    tokens = spec.entries[0].shape[0] if sliced else 0
    core = any(e.kind == "core" for e in spec.entries)
    branches = any(e.sources for e in spec.entries)
    narrow = all(
        e.dtype is not torch.complex128 and "complex" not in e.kind and e.kind not in ("fft-abs", "rotary")
        for e in spec.entries
    )
    facts = plans.Facts(len(spec.entries), branches, tokens if tokens > 1 else 0, unsplit, core, narrow)
    words = plans.draw(dice, facts)
    steps, cut, later = dice.randint(1, 4), 0, {}
    if dice.random() < 0.08 and words.get("sync") != "ps" and not {"inference", *LOSSY} & words.keys():
        later = plans.draw(dice, facts)
        if exact(later) and exact(words):
            steps = max(2, steps)
            cut = dice.randint(1, steps - 1)
    momentum = 0.9 if "local_steps" not in words and dice.random() < 0.15 else 0.0
    through = dice.random() < 0.08
    return Pair(seed, spec, tuple(words.items()), steps, dice.choice([0.1, 0.1, 0.5]), momentum, cut,
                tuple(later.items()) if cut else (), through)  # fmt: skip


def _draw_outside(seed: int, dice: random.Random) -> Pair:
    """Through `train`, as a user's own model, loss and optimizer under any plan."""
    kinds = dice.sample(models.OUTSIDE, 8)
    if dice.random() < 0.85:
        kinds = [name for name in kinds if name not in outside.ACROSS_ROWS]
    spec = models.draw(dice, odd_ones=kinds)
    narrow = all("complex" not in e.kind and e.kind not in ("fft-abs", "rotary", "polar") for e in spec.entries)
    core = any(e.kind == "core" for e in spec.entries)
    facts = plans.Facts(len(spec.entries), any(e.sources for e in spec.entries), core=core, narrow=narrow)
    words, later, steps, cut = outside.words(dice, facts), {}, dice.randint(2, 5), 0
    if dice.random() < 0.08 and exact(words):
        later = outside.words(dice, facts)
        cut = dice.randint(1, steps - 1) if exact(later) else 0
    scheduler = dice.choice([*outside.SCHEDULERS]) if dice.random() < 0.3 else ""
    optimizer = dice.choice([*outside.OPTIMIZERS]) if dice.random() < 0.8 else "sgd"
    rate, check = dice.choice([0.1, 0.1, 0.3]), dice.choice([True, False, None])
    return Pair(
        seed, spec, tuple(words.items()), steps, rate, 0.0, cut, tuple(later.items()) if cut else (), True, optimizer,
        scheduler, check,
    )  # fmt: skip


def exact(words: dict[str, str]) -> bool:
    """Whether a plan gives what one device gives, and may be a part of a run."""
    forbidden = {"inference", "local_steps", "clip", *LOSSY} & words.keys()
    return not forbidden and words.get("sync") != "ps" and words.get("schedule") not in plans.STALE


class Found:
    """What the engine gave."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.parameters: dict[str, Tensor] | None = None
        self.buffers: dict[str, Tensor] | None = None
        self.order: Any = None
        self.program: Any = None
        self.warned = ""


class Ranks:
    """Clusters by size, kept from pair to pair."""

    def __init__(self, transport: str = "local") -> None:
        self.transport = transport
        self.made: dict[int, Cluster] = {}
        self.measured: dict[int, Calibration] = {}

    def __call__(self, ranks: int) -> Cluster:
        if ranks not in self.made:
            self.made[ranks] = Cluster(ranks, device="cpu", patience=15.0, transport=self.transport)
        return self.made[ranks]

    def calibration(self, ranks: int) -> Calibration:
        """What messages cost, measured once for each size."""
        if ranks not in self.measured:
            self.measured[ranks] = calibrate(self(ranks), seconds=0.1, progress=False, algorithms=False)
        return self.measured[ranks]

    def renew(self) -> None:
        """End all of them, after a pair that did not end or that killed a rank."""
        for cluster in self.made.values():
            cluster.close()
        self.made = {}

    close = renew


def job_of(pair: Pair) -> Job:
    loss, data = models.loss_of(pair.spec.loss), models.data_of(pair.spec)
    quiet = (
        True if pair.plan.get("inference") == "true" else None
    )  # (as `train` says, also of a model without parameters)
    return Job(
        partial(outside.build, pair.spec), data, pair.spec.rows, loss, pair.make, 5, torch.float64, evaluate=quiet
    )


def run(pair: Pair, ranks: Any) -> Found:
    """What the engine makes of a pair."""
    found = Found()
    if not pair.cut:
        _run(pair, pair.plan, pair.steps, ranks, None, None, found)
        return found
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        _run(pair, pair.plan, pair.cut, ranks, None, folder, found)
        _run(pair, dict(pair.later), pair.steps - pair.cut, ranks, folder, None, found)
    return found


def _run(
    pair: Pair, words: dict[str, str], steps: int, ranks: Any, resume: str | None, save: str | None, found: Found
) -> None:
    plan, job = Plan.parse(plans.text(words)), job_of(pair)
    found.parameters = found.buffers = None
    if pair.through_train:
        done = train(
            job.model, job.data, plan, cluster=ranks(plan.ranks), steps=steps, batch=job.batch, loss=job.loss,
            optimizer=job.optimizer, seed=job.seed, dtype=job.dtype, progress=False,
            calibration=ranks.calibration(plan.ranks) if plan.algorithm == "default" else None, resume=resume,
            save=save, scheduler=outside.SCHEDULERS[pair.scheduler],
            **({} if pair.check is None else {"check": pair.check and not resume}),
        )  # fmt: skip
        found.losses += done.losses
        found.gradients += done.gradients
        found.program = done.program
        if done.service is not None:
            found.order, found.parameters = done.service.order, done.service.parameters
        else:
            _keep(done.shares, found)
        return
    model = job.build()
    layers = layers_of(model)
    shape = replace(shape_of(layers), names=tuple(model._modules), edges=edges_of(model))
    unit = (1.0,) * len(layers)
    costs = LayerCosts(unit, unit, (1000,) * len(layers), (2000,) * len(layers), (1000,) * len(layers))
    compiled = partial(plan.compile, shape, costs=costs)
    if plan.sync == "ps":
        execution, service = execute_served(
            compiled(steps=steps), job, ranks(plan.ranks), on_death=plan.on_death, keep_gradients=True
        )
        found.losses, found.gradients = execution.losses, execution.gradients
        found.order, found.parameters = service.order, service.parameters
        return
    block = steps if plan.asynchronous else plan.block(steps)
    program, rest = compiled(steps=block), compiled(steps=steps % block) if steps % block else None
    storing = keeping.storing(resume, save, 0, True)
    execution = execute(
        program, job, cluster=ranks(plan.ranks), passes=steps // block, rest=rest, check=False, storing=storing
    )
    found.losses += execution.losses
    found.gradients += execution.gradients
    found.program = execution.program
    _keep(execution.shares, found)


def _keep(shares: list[keeping.Share], found: Found) -> None:
    """Parameters and buffers by name, if the ranks brought them back."""
    if not shares or any(share.reason for share in shares):
        return
    held: dict[str, Tensor] = {}
    for share in shares:
        for piece in share.pieces:
            whole = held.setdefault(piece.key, torch.empty(piece.shape, dtype=piece.values.dtype))
            whole.view(-1)[piece.start : piece.start + piece.values.numel()] = piece.values
    found.parameters = {key.partition("/")[2]: t for key, t in held.items() if key.startswith("parameters/")}
    found.buffers = {key.partition("/")[2]: t for key, t in held.items() if key.startswith("buffers/")}


def expect(pair: Pair, nudge: float = 0.0) -> oracle.Result:
    """What plain torch makes of it."""
    rows, plan = models.Rows(pair.spec), pair.plan
    batches = rows.whole
    clip = None if plan.get("clip", "none") == "none" else float(plan["clip"])
    inference = plan.get("inference") == "true"
    if "local_steps" in plan and not inference:
        m = int(plan.get("microbatches", 1)) * int(plan.get("accumulate", 1))
        return oracle.locally(
            pair.spec, batches, pair.steps, 5, pair.make, int(plan.get("dp", 1)), m, int(plan["local_steps"]), nudge,
            outside.SCHEDULERS[pair.scheduler],
        )  # fmt: skip
    plain = oracle.plain_of(pair.spec, 5, pair.make, nudge, outside.SCHEDULERS[pair.scheduler])
    return oracle.whole(plain, batches, pair.steps, clip, inference)


def far(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference, relative to the largest number of all; and whose it is."""
    if found.keys() != expected.keys():
        return math.inf, f"has {sorted(found.keys() - expected.keys())}, lacks {sorted(expected.keys() - found.keys())}"
    largest = max((t.abs().max().item() for t in expected.values() if t.numel()), default=0.0) or 1.0
    worst, name = 0.0, ""
    for key, t in expected.items():
        if found[key].shape != t.shape:
            return math.inf, f"{key} of shape {tuple(found[key].shape)}, not {tuple(t.shape)}"
        if t.numel():
            error = (found[key].to(t.dtype) - t).abs().max().item() / largest
            if not error <= worst:
                worst, name = error, key
    return worst, name


def compare(pair: Pair, found: Found, expected: oracle.Result) -> list[tuple[float, str]]:
    """What differs, and by how much."""
    told = []
    if len(found.losses) != len(expected.losses):
        return [(math.inf, f"{len(found.losses)} losses, not {len(expected.losses)}")]
    for s, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True)):
        told.append((abs(a - b) / max(1.0, abs(b)), f"loss of step {s}: {a}, not {b}"))
    inference = pair.plan.get("inference") == "true"
    trained = any(expected.gradients)  # (of nothing there may be no list)
    if trained and not inference and not (pair.through_train and (pair.cut or not pair.check)):
        if len(found.gradients) != len(expected.gradients):
            return [*told, (math.inf, f"gradients of {len(found.gradients)} steps, not {len(expected.gradients)}")]
        for s, (mine, plain) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
            error, name = far(mine, plain)
            told.append((error, f"gradient of step {s}: {name}"))
    if found.parameters is not None:
        wanted = {
            k: v for k, v in expected.parameters.items() if k in found.parameters or pair.plan.get("sync") != "ps"
        }
        error, name = far(found.parameters, wanted)
        told.append((error, f"parameters at the end: {name}"))
    if found.buffers is not None and not inference:
        error, name = far(
            {k: v.double() if not v.is_complex() else v for k, v in found.buffers.items()},
            {k: v.double() if not v.is_complex() else v for k, v in expected.buffers.items()},
        )
        told.append((error, f"buffers at the end: {name}"))
    return told


def _dies_in_torch(pair: Pair) -> bool:
    """Whether a backward of torch ends the process: that of a GroupNorm in channels_last whose input has no gradient
    (torch 2.13)."""
    seen, model = [], outside.build(pair.spec)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.GroupNorm)]
    for norm in norms:
        norm.register_forward_pre_hook(lambda _, x: seen.append(not (x[0].requires_grad or x[0].is_contiguous())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if norms:
            model(models.Rows(pair.spec).whole(0)[0].clone())
    return any(seen)


def judge(pair: Pair, ranks: Any) -> Outcome:
    """Run a pair both ways."""
    plan = pair.plan
    if _dies_in_torch(pair):
        return Outcome("invalid", "torch's backward of this GroupNorm ends the process")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = expect(pair)
    except Exception as error:
        return Outcome("invalid", str(error).split("\n")[0])
    if not (all(map(math.isfinite, expected.losses)) and all(p.isfinite().all() for p in expected.parameters.values())):
        return Outcome("invalid", "not finite")
    if any(g.numel() and g.abs().max() > 1e30 for one in expected.gradients for g in one.values()):
        return Outcome("invalid", "diverges")

    def late(*_: object) -> None:
        raise TookTooLong(f"no end within {LIMIT} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = run(pair, ranks)
        found.warned = " ".join(str(each.message) for each in warned)
    except PlanError as error:
        return Outcome("refused", str(error).split("\n")[0])
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        signal.alarm(0)
        kind = type(error).__name__
        if kind == "StoreError" and "offload_limit" in {**plan, **dict(pair.later)}:  # (no room, as was asked for)
            return Outcome("refused", str(error).split("\n")[0])
        if kind == "RankError":
            for said in REFUSED:
                if said in str(error):
                    return Outcome("refused", said)
            if "; possible " in (text := str(error).split("\n")[0]):  # (only a rank can know that)
                return Outcome("refused", text)
        still = all(not g.abs().sum() for g in expected.gradients[0].values()) if expected.gradients else False
        if kind == "NotFinite" and (plan.get("schedule") in plans.STALE or plan.get("mode", "sync") != "sync"):
            return Outcome("invalid", "late gradients diverge")
        if "precision" in plan and ("dtype" in str(error) or "BFloat16" in str(error)):
            return Outcome("invalid", "the model cannot compute in bfloat16")
        if any(key in plan for key in LOSSY) and kind in ("CheckError", "NotFinite"):
            largest = max((g.abs().max() for one in expected.gradients for g in one.values() if g.numel()), default=0.0)
            if largest > torch.finfo(torch.bfloat16).max:
                return Outcome("invalid", "the numbers are too large for bfloat16")
        jumps = any(entry.kind in outside.JUMPS for entry in pair.spec.entries)
        if "precision" in plan and kind == "CheckError" and jumps:
            return Outcome("invalid", "a layer jumps where bfloat16 rounds")
        split = Plan.parse(plans.text(plan)).dp * Plan.parse(plans.text(plan)).total_microbatches > 1
        if kind == "CheckError" and split and any(entry.kind in outside.ACROSS_ROWS for entry in pair.spec.entries):
            return Outcome("warned", "rows that see each other in a later step only")
        if still and "depends on no parameter" in str(error):
            return Outcome("invalid", "plain torch refuses the backward of a loss without a graph")
        if pair.through_train and "modified by an inplace operation" in str(error):
            return Outcome("invalid", "torch refuses the backward of a layer, which the profile runs alone")
        if not isinstance(error, Exception) or kind in ("RankDied", "Deadlock"):
            ranks.renew()
        if hasattr(error, "__notes__"):
            print(*error.__notes__, sep="\n", file=sys.stderr)
        return Outcome("CRASH", f"{kind}: " + str(error).split("\n")[0])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if any(key in plan for key in LOSSY):
        whole = plan.get("schedule") not in plans.STALE[:2] + plans.STALE[3:]  # (else each micro-batch has a loss)
        far_off = whole and plan.get("precision") == "bf16" and not _near(found.losses[0], expected.losses[0])
        return Outcome("WRONG", f"losses {found.losses}, in float64 {expected.losses}") if far_off else Outcome("ran")
    if plan.get("schedule") in plans.STALE:
        return _stale(pair, found)
    if plan.get("mode", "sync") != "sync":
        return _served(pair, found)
    told = compare(pair, found, expected)
    worst, text = max(told, key=lambda one: (math.isnan(one[0]), one[0]))
    if worst <= BOUND:
        return Outcome("equal")
    first = next(told_ for told_ in told if not told_[0] <= BOUND)
    noise = max(_differences(pair, expected))
    if worst <= 1000 * noise:
        return Outcome("rounding", f"{worst:.1e}, noise {noise:.1e}")
    if SPLIT_SEEN in found.warned:
        return Outcome("warned")
    return Outcome("WRONG", f"first {first[0]:.1e} ({first[1]}), worst {worst:.1e} ({text})")


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 0.25 * abs(b) + 0.1


def _differences(pair: Pair, expected: oracle.Result) -> list[float]:
    """By how much plain torch itself differs if its parameters are changed in their last bit."""
    return [error for error, _ in compare(pair, _found(expect(pair, NUDGE)), expected)]


def _found(result: oracle.Result) -> Found:
    """What plain torch gave, as if the engine had."""
    found = Found()
    found.losses, found.gradients, found.parameters = result.losses, result.gradients, result.parameters
    return found


def _served(pair: Pair, found: Found) -> Outcome:
    plan = pair.plan
    batches, m = models.Rows(pair.spec).whole, int(plan.get("microbatches", 1))
    clip = float(plan["clip"]) if "clip" in plan else None
    replay = partial(oracle.served, pair.spec, batches, found.order, 5, pair.make, int(plan.get("dp", 1)), m, clip,
                     scheduler=outside.SCHEDULERS[pair.scheduler])  # fmt: skip
    values = replay()
    mine = {k: v for k, v in (found.parameters or {}).items() if k in values}
    if all(v.isfinite().sum() == mine[k].isfinite().sum() == 0 for k, v in values.items() if v.numel()):
        return Outcome("invalid", "late gradients diverge")
    error, name = far(mine, values)
    if error <= BOUND:
        return Outcome("equal")
    noise, _ = far(replay(nudge=NUDGE), values)
    if error <= 1000 * noise:
        return Outcome("rounding", f"{error:.1e}, noise {noise:.1e}")
    if SPLIT_SEEN in found.warned:
        return Outcome("warned")
    return Outcome("WRONG", f"{error:.1e} from the replay: {name}")


def _stale(pair: Pair, found: Found) -> Outcome:
    batches = models.Rows(pair.spec).whole
    replay = partial(
        oracle.stale, pair.spec, batches, found.program, 5, pair.make, scheduler=outside.SCHEDULERS[pair.scheduler]
    )
    expected = replay()
    found.buffers = None  # (each micro-batch may feel them)
    if not all(map(math.isfinite, expected.losses)):  # (late gradients diverge: so far as numbers are of any use)
        pairs = list(zip(found.losses, expected.losses, strict=True))
        useful = next(k for k, (_, b) in enumerate(pairs) if not abs(b) < 1e6)
        far_off = [(a, b) for a, b in pairs[:useful] if not abs(a - b) <= 1e-6 * abs(b)]
        wrong = [f"loss {a}, not {b}" for a, b in far_off]
        return Outcome("WRONG", wrong[0]) if wrong else Outcome("invalid", "not finite")
    error, text = max(compare(pair, found, expected), key=lambda one: (math.isnan(one[0]), one[0]))
    if error <= BOUND:
        return Outcome("equal")
    again = replay(nudge=NUDGE)
    noise = max(error for error, _ in compare(pair, _found(again), expected))
    if error <= 1000 * noise:
        return Outcome("rounding", f"{error:.1e}, noise {noise:.1e}")
    if SPLIT_SEEN in found.warned:
        return Outcome("warned")
    return Outcome("WRONG", f"{error:.1e} from the replay: {text}")


def campaign(
    first: int, count: int, seconds: float, show: Any = print, transport: str = "local"
) -> tuple[Counter[str], list[int]]:
    """Run pairs first, first + 1, ...; how many ended how, and the seeds of failures."""
    ended: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    failed: list[int] = []
    spent: Counter[str] = Counter()
    ranks = Ranks(transport)
    begin = time.monotonic()
    try:
        for seed in range(first, first + count):
            if time.monotonic() - begin > seconds:
                break
            start = time.monotonic()
            pair = draw(seed)
            outcome = judge(pair, ranks)
            ended[outcome.kind] += 1
            spent[outcome.kind] += time.monotonic() - start
            if outcome.kind in ("refused", "invalid"):
                refusals[f"{outcome.kind}: {outcome.text}"] += 1
            if outcome.kind == "rounding":
                show(f"pair {seed}: rounding {outcome.text}")
            if outcome.failed:
                failed.append(seed)
                show(f"\n{outcome.kind} pair {seed}: {outcome.text}\n{pair}", flush=True)
    finally:
        ranks.close()
    total = sum(ended.values())
    show(
        f"\n{total} pairs in {time.monotonic() - begin:.0f} s: "
        + ", ".join(f"{n} {kind}" for kind, n in ended.most_common())
    )
    show("seconds a pair: " + ", ".join(f"{kind} {spent[kind] / ended[kind]:.2f}" for kind in ended))
    for text, times in refusals.most_common():
        show(f"  {times:4d}  {text}")
    if failed:
        show(f"FAILED: {' '.join(map(str, failed))}")
    return ended, failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.campaign", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="of the first pair")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--only", type=int, nargs="+", help="these pairs alone, each shown")
    parser.add_argument("--transport", default="local", help="of the clusters: local or gloo")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.only is None:
        _, failed = campaign(chosen.seed, chosen.count, chosen.seconds, transport=chosen.transport)
        return 1 if failed else 0
    ranks, bad = Ranks(chosen.transport), False
    try:
        for seed in chosen.only:
            pair = draw(seed)
            outcome = judge(pair, ranks)
            bad |= outcome.failed
            print(f"{outcome.kind} pair {seed}: {outcome.text}\n{pair}", flush=True)
    finally:
        ranks.close()
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
