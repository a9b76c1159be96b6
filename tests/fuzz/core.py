"""The keys that are promised together, two by two, in a hundred wide plans beside plain torch.

    python -m tests.fuzz.core                    try the plans of core_plans.txt
    python -m tests.fuzz.core --write            choose them anew (minutes)
    python -m tests.fuzz.core --threes 500       try so many plans more, which have threes of values that no other had

A plan of `core_plans.txt` has as many of these values as go together, so that each two of them that a plan can have are
in one of the plans. A plan is trained for a few steps on 2 or 4 ranks; the losses, the gradients of all steps and the
parameters after the last one must be those of plain torch: one process, the whole batch, no executor. The batch cannot
be divided evenly, not all of its targets count, and models have dropout, tied, frozen and unused parameters.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minipar import Plan, models
from minipar.cluster import Cluster
from minipar.cluster.ranks import Ranks
from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError
from minipar.execution.execution import Job, execute
from minipar.execution.saving import keeping
from minipar.models.network import edges_of
from minipar.models.parameter_groups import shape_of
from minipar.program.mesh import Mesh
from minipar.strategies import schedules
from minipar.training.training import annotations_of, train
from tests.comparing import captured
from tests.fuzz import oracle

PLANS = Path(__file__).with_name("core_plans.txt")
STEPS, LAYERS = 2, 9
BOUND = 1e-10
SHORT = {"loss": 0.03, "gradient": 0.25}  # of layers that compute in bfloat16: no term is missing, and none is doubled
# The first two are no keys of a plan: what is trained, and whether the last step is that of a run which was saved.
VALUES: dict[str, tuple[str, ...]] = {
    "model": ("dropout", "tied", "frozen"),
    "resumed": ("true",),
    "dp": ("2", "4"),
    "pp": ("2", "4"),
    "tp": ("2",),
    "sequence_parallel": ("true",),
    "context_parallel": ("2",),
    "ep": ("2",),
    "schedule": tuple(one.name for one in schedules() if one.asynchronous is None and one.name != "1f1b"),
    "microbatches": ("4", "8"),
    "accumulate": ("2",),
    "chunks": ("2",),
    "split": ("uneven",),
    "bucket": ("none", "flat", "0.0001"),
    "overlap": ("none",),
    "zero": ("1", "2", "3"),
    "reduce": ("step",),
    "prefetch": ("0", "2"),
    "checkpoint": ("1", "sqrt", "selective", "60KiB"),
    "offload": ("optimizer", "parameters", "activations", "optimizer,parameters,activations"),
    "offload_to": ("disk",),
    "precision": ("bf16",),
    "clip": ("0.1",),
    "slices": ("2", "3"),
}
NEEDS = {
    "sequence_parallel": {"tp": "2"}, "reduce": {"zero": "2"}, "prefetch": {"zero": "3"},
    "offload_to": {"offload": "optimizer"}, "slices": {"schedule": "terapipe"}, "chunks": {"schedule": "interleaved"},
}  # fmt: skip
# Where these keys do something.
ACTS: dict[str, Callable[[Plan], bool]] = {
    "zero": lambda plan: plan.dp > 1 or plan.copies,
    "bucket": lambda plan: plan.dp > 1 or plan.copies,
    "overlap": lambda plan: plan.dp > 1 or plan.copies,
    "prefetch": lambda plan: plan.zero == 3 or "parameters" in plan.offload,
}
BASES = (
    "dp=2 pp=2 microbatches=4", "dp=2 microbatches=4", "pp=2 microbatches=4", "pp=4 microbatches=8", "microbatches=4",
    "dp=2 pp=2", "dp=2",
)  # fmt: skip
Choice = tuple[str, str]  # a key and its value

Sizes = dict[str, int]
SMALL = {"layers": LAYERS - 2, "width": 8, "heads": 2, "context": 8, "vocab": 16}
LARGER = {"layers": LAYERS - 2, "width": 32, "heads": 2, "context": 16, "vocab": 64}  # of which memory is measured


def gpt(sizes: Sizes, **more: Any) -> nn.Sequential:
    return models.gpt(fused=False, **sizes, **more)


def frozen(sizes: Sizes) -> nn.Sequential:
    """A GPT with a layer of which half does not train, one that does not train at all, and a parameter that nobody
    uses."""
    model = gpt(sizes)
    for name, parameter in model.named_parameters():
        if name.startswith("2.") or (name.startswith("3.") and "bias" in name):
            parameter.requires_grad_(False)
    model[1].unused = nn.Parameter(torch.ones(3))
    return model


def mixture(sizes: Sizes, balance: bool = True) -> nn.Sequential:
    return models.mixture(experts=2, capacity=None, balance=balance, **sizes)


MODELS: dict[str, Callable[[Sizes], nn.Sequential]] = {
    "gpt": gpt,
    "dropout": partial(gpt, dropout=0.1),
    "tied": partial(gpt, tied=True),
    "frozen": frozen,
    "mixture": mixture,
    "mixture in slices": partial(mixture, balance=False),
}


@dataclass(frozen=True)
class Wide:
    """A plan, the model that it trains, and whether it goes on from a saved run for its last step."""

    plan: Plan
    model: str
    resumed: bool


def read(words: str) -> Wide:
    """A plan from words such as `model=tied pp=2 split=uneven`. PlanError for one that cannot be."""
    table = dict(word.split("=", 1) for word in words.split())
    model, resumed = table.pop("model", "gpt"), table.pop("resumed", "") == "true"
    if table.get("split") == "uneven":
        del table["split"]
        stages = Plan.parse(table).placement()
        table["split"] = _uneven(1 + max(map(max, stages)))
    plan = Plan.parse(table)
    idle = [key for key in table if not ACTS.get(key, lambda _: True)(plan)]
    if idle:
        raise PlanError(f"{', '.join(idle)}: nothing to act upon")
    if plan.slice_count == 3 and (plan.context_parallel > 1 or plan.sequence_parallel):
        raise PlanError("slices=3: of 8 tokens are not of even lengths, and two ranks have equal parts of each")
    if plan.ep > 1:
        if model != "gpt":
            raise PlanError("the model with experts has no dropout, and no tied or frozen parameters")
        model = "mixture in slices" if plan.slice_count > 1 else "mixture"
    return Wide(plan, model, resumed)


def _uneven(stages: int) -> str:
    """Counts of layers that differ; the last stage has more than one."""
    counts = [1] * stages
    counts[-1] += 1
    for _ in range(LAYERS - stages - 1):
        counts[stages // 2] += 1
    if sum(counts) != LAYERS or len(set(counts)) == 1:
        raise PlanError(f"{stages} stages of {LAYERS} layers cannot be uneven")
    return ",".join(map(str, counts))


# one plan beside plain torch ------------------------------------------------------------------------------------------


@cache
def data(experts: bool, tokens: int = SMALL["context"], vocab: int = SMALL["vocab"]) -> tuple[Tensor, Tensor]:
    """Sequences and what follows each of their tokens; some targets do not count."""
    rows = 64 if experts else 18  # (ranks with experts have equal parts of a micro-batch)
    generator = torch.Generator().manual_seed(rows)
    x, y = (torch.randint(vocab, (rows, tokens), generator=generator) for _ in range(2))
    y[0, :4] = -100
    return x, y


def loss_of(model: str) -> Callable[..., Tensor]:
    return models.mixture_loss if model.startswith("mixture") else nn.functional.cross_entropy


@cache
def plain(model: str, clip: float | None) -> oracle.Result:
    """What plain torch makes of a model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = MODELS[model](SMALL).double()
    given = data(model.startswith("mixture"))
    return oracle.whole(
        oracle.Plain(made, loss_of(model), 0, partial(torch.optim.SGD, lr=0.2)), lambda step: given, STEPS, clip
    )


def run(wide: Wide, ranks: Callable[[int], Ranks]) -> oracle.Result:
    """What the engine makes of it."""
    result = oracle.Result()
    with tempfile.TemporaryDirectory() as folder:
        if wide.resumed:
            _train(wide, STEPS - 1, ranks, None, folder, result)
            _train(wide, 1, ranks, folder, folder, result)
        else:
            _train(wide, STEPS, ranks, None, folder, result)
        result.parameters = keeping.model_in(folder)
    return result


def _train(
    wide: Wide, steps: int, ranks: Callable[[int], Ranks], resume: str | None, save: str, result: oracle.Result
) -> None:
    plan = wide.plan
    model, optimizer = partial(MODELS[wide.model], SMALL), partial(torch.optim.SGD, lr=0.2)
    job = Job(model, data(plan.ep > 1), loss=loss_of(wide.model), optimizer=optimizer, dtype=torch.float64)
    built = job.build()
    if plan.sharing > 1:
        job = captured(replace(job, annotations=annotations_of(plan)), plan.sharing, plan.cut, ranks(plan.ranks))
        shape = shape_of(job.share(built, 0, Mesh(plan.shared), plan.inputs, plan.cut))
    else:
        shape = replace(shape_of(built), names=tuple(built._modules), edges=edges_of(built))
    program = plan.compile(shape, costs=_costs(shape.layers))
    storing = keeping.storing(resume, save, 0, False)
    done = execute(program, job, cluster=ranks(plan.ranks), passes=steps, check=False, storing=storing)
    result.losses += done.losses
    result.gradients += done.gradients


def _costs(layers: int) -> LayerCosts:
    unit = (1.0,) * layers
    return LayerCosts(unit, unit, (1000,) * layers, (2000,) * layers, (1000,) * layers)


def differs(words: str, ranks: Callable[[int], Ranks]) -> str:
    """By what a plan differs from plain torch; empty: it does not."""
    wide = read(words)
    expected = plain(wide.model, wide.plan.clip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(wide, ranks)
    bounds = SHORT if wide.plan.precision == "bf16" else dict.fromkeys(SHORT, BOUND)
    if len(found.losses) != STEPS or len(found.gradients) != STEPS:
        return f"{len(found.losses)} losses and gradients of {len(found.gradients)} steps"
    for step, (mine, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if not abs(mine - theirs) <= bounds["loss"] * abs(theirs):
            return f"loss of step {step}: {mine}, not {theirs}"
    tables = [*zip(found.gradients, expected.gradients, strict=True), (found.parameters, expected.parameters)]
    for step, (some, others) in enumerate(tables):
        what = f"gradient of step {step}" if step < STEPS else "parameter after the last step"
        if some.keys() != others.keys():
            return f"{what}: of {sorted(some.keys() ^ others.keys())} there is one only here or there"
        largest = max(t.abs().max().item() for t in others.values())
        for name, right in others.items():
            error = (some[name].to(right.dtype) - right).abs().max().item() / largest
            if not error <= bounds["gradient"]:
                return f"{what}: {name} differs by {error:.1e}"
    return ""


def memory_error(words: str, ranks: Callable[[int], Ranks]) -> float:
    """How far the predicted peak of memory is from the measured one, on the rank where it is furthest. Its
    micro-batches are of equal size."""
    wide = read(words.replace("60KiB", "4MiB"))  # (these layers are larger)
    model, given = partial(MODELS[wide.model], LARGER), data(True, LARGER["context"], LARGER["vocab"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = train(
            model, given, wide.plan, cluster=ranks(wide.plan.ranks), batch=len(given[0]), steps=4, memory=True,
            loss=loss_of(wide.model), optimizer=partial(torch.optim.Adam, lr=1e-3), progress=False,
        )  # fmt: skip
    both = zip(done.predicted.series, done.trace.series, strict=True)
    return max(abs(a.peak().bytes / b.peak().bytes - 1) for a, b in both)


# the plans ------------------------------------------------------------------------------------------------------------


def choices() -> list[Choice]:
    return [(key, value) for key, values in VALUES.items() for value in values]


def words_of(chosen: Iterable[Choice], compiled: bool = True) -> str:
    """The words of a plan with these choices, in the first base that takes them all. PlanError if there is none.
    `compiled`: whether its program is made, which some refusals need."""
    given = dict(chosen)
    needs = {key: value for one in given for key, value in NEEDS.get(one, {}).items()}
    last = PlanError("it needs more than 4 ranks")
    for base in BASES:
        table = {**dict(word.split("=") for word in base.split()), **needs, **given}
        words = " ".join(f"{key}={value}" for key, value in table.items())
        try:
            plan = read(words).plan
            if plan.ranks in (2, 4):
                if compiled:
                    plan.compile(layers=LAYERS, costs=_costs(plan._uniform(LAYERS).layers))
                return words
        except PlanError as error:
            last = error
    raise last


def possible(chosen: Iterable[Choice], compiled: bool = True) -> bool:
    try:
        words_of(chosen, compiled)
    except PlanError:
        return False
    return True


def chosen_in(words: str) -> frozenset[Choice]:
    """Which of the choices a plan makes."""
    table = dict(word.split("=", 1) for word in words.split())
    return frozenset(one for one in choices() if table.get(one[0]) == one[1])


def sets_of(size: int) -> Iterator[frozenset[Choice]]:
    """All sets of so many values of as many keys."""
    for some in combinations(choices(), size):
        if len({key for key, _ in some}) == size:
            yield frozenset(some)


def shown_by(words: str, size: int) -> set[frozenset[Choice]]:
    """Which sets of so many values a plan shows to go together: numbers of 16 bits hide what is wrong with others."""
    found = map(frozenset, combinations(chosen_in(words), size))
    return {some for some in found if "precision=bf16" not in words.split() or ("precision", "bf16") in some}


def cover(size: int, plans: list[str], most: int, tried: Callable[[str], bool], seed: int = 0) -> list[str]:
    """Plans that show, with those given, all sets of so many values that a plan can have; at most so many.

    Each begins with a set that no plan has, and takes the value that adds most of such sets, again and again.
    `tried`: whether a plan runs; of one that does not the first set is tried by itself.
    """
    left = set(sets_of(size)).difference(*(shown_by(one, size) for one in plans))
    order, found = sorted(left, key=sorted), list[str]()
    random.Random(seed).shuffle(order)
    for start in order:
        if start not in left or len(found) == most:
            continue
        left.discard(start)
        if not possible(start):
            continue
        for some in (_widened(start, left, size, False), _widened(start, left, size, True), sorted(start)):
            if possible(some) and tried(words := words_of(some)):
                found.append(words)
                left -= shown_by(words, size)
                break
    return found


def _widened(start: frozenset[Choice], left: set[frozenset[Choice]], size: int, compiled: bool) -> list[Choice]:
    chosen, rest = sorted(start), [one for one in choices() if one[0] not in dict(start)]
    while rest:
        gain = {one: sum(frozenset((*few, one)) in left for few in combinations(chosen, size - 1)) for one in rest}
        best = max(rest, key=lambda one: gain[one])
        if not gain[best]:
            break
        if best != ("precision", "bf16") and possible([*chosen, best], compiled):
            chosen.append(best)
        rest = [one for one in rest if one != best and one[0] not in dict(chosen)]
    return chosen


def committed() -> list[str]:
    return PLANS.read_text().splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.core", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="choose the plans of pairs anew; else they are tried")
    parser.add_argument("--threes", type=int, default=0, help="so many plans more, for threes that no other plan has")
    parser.add_argument("--seed", type=int, default=0, help="the order in which sets are tried")
    parser.add_argument("--device", default="cpu", help="of the ranks")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    clusters: dict[int, Cluster] = {}
    wrong: list[str] = []

    def ranks(count: int) -> Cluster:
        if count not in clusters:
            clusters[count] = Cluster(count, device=chosen.device, patience=15.0)
        return clusters[count]

    def tried(words: str) -> bool:
        try:
            said = differs(words, ranks)
        except PlanError as error:
            print(f"refused  {words}: {str(error).splitlines()[0]}", flush=True)
            return False
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            for cluster in clusters.values():
                cluster.close()
            clusters.clear()
        if said:
            wrong.append(words)
        print(f"{'WRONG' if said else 'equal'}  {words}  {said}", flush=True)
        return True

    if chosen.write:
        PLANS.write_text("\n".join(cover(2, [], sys.maxsize, tried, chosen.seed)) + "\n")
    elif not chosen.threes:
        refused = [words for words in committed() if not tried(words)]
        wrong += refused
    if chosen.threes:
        cover(3, committed(), chosen.threes, tried, chosen.seed)
    for cluster in clusters.values():
        cluster.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
