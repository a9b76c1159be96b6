"""Build it: mechanisms of lessons 03 to 10, written with `torch.distributed` and run on real ranks (gloo)."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn

from minipar.wording import several
from minipar_course.against import Batch, Comparison, descend, plain_sgd, rows_of_rank, stage_of_rank, whole_batch
from minipar_course.exercises.kinds.built import Exchanged, Saving, Trained, Trial

# Lessons 03 and 09: a graph that holds less ---------------------------------------------------------------------------

_ROWS, _WIDE, _DEPTH = 256, 32, 8
_TENSOR = _ROWS * _WIDE * 4  # bytes of the output of a layer
_PARAMETERS = _DEPTH * (_WIDE * _WIDE + _WIDE) * 4


def _with_dropout() -> nn.Sequential:
    """Eight blocks; each of them saves four tensors for its backward."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(_WIDE, _WIDE), nn.GELU(), nn.Dropout(0.2), nn.Tanh()) for _ in range(_DEPTH))
    )


def _rows() -> Tensor:
    return torch.randn(_ROWS, _WIDE)


CHECKPOINT = Saving(
    "my_checkpointed(layers, x)",
    _with_dropout,
    _rows,
    held=_PARAMETERS + (_DEPTH + 2) * _TENSOR,
    peak=2 * _PARAMETERS + (_DEPTH + 10) * _TENSOR,
    praise="between two layers one tensor is held, and no more",
    hint="save the input alone; in the backward run the layer again with a graph, and call backward on what it gives",
)
OFFLOAD = Saving(
    "my_offloaded(layers, x)",
    _with_dropout,
    _rows,
    held=_PARAMETERS + 3 * _TENSOR,
    peak=2 * _PARAMETERS + 8 * _TENSOR,
    praise="what the backward needs waits on the disk",
    again=0,
    hint="pack(tensor) writes a file and gives its name; unpack(name) reads it. Parameters need not leave memory",
)

# Lesson 05: the ring -------------------------------------------------------------------------------------------------


def _total(given: list[Tensor], rank: int) -> Tensor:
    return torch.stack(given).sum(0)


def _halved_only(given: list[Tensor], rank: int) -> Tensor:
    """The way there of halving-doubling, without the way back."""
    held = [each.clone() for each in given]
    parts, distance = [(0, len(given[0]))] * len(given), len(given) // 2
    while distance:
        before = [each.clone() for each in held]
        for r, (first, last) in enumerate(parts):
            middle = (first + last) // 2
            mine = (middle, last) if r & distance else (first, middle)
            held[r][slice(*mine)] += before[r ^ distance][slice(*mine)]
            parts[r] = mine
        distance //= 2
    return held[rank]


RING = Exchanged(
    "my_allreduce(x)",
    ((2, 8), (4, 12), (3, 7), (4, 2)),
    truth=_total,
    # Chunks of 7 numbers on 3 ranks have 3, 2 and 2: the largest one may travel in each of the 2 (p - 1) steps.
    sent=lambda ranks, nbytes: 2 * (ranks - 1) * 8 * -(-(nbytes // 8) // ranks),
    allowed=frozenset({"send", "recv"}),
    praise="each rank sends 2 (p - 1)/p of the tensor, and no ring can send less",
    wasteful="cut the tensor into as many chunks as there are ranks; a step sends one of them",
    mistakes=(
        (
            lambda given, rank: given[rank],
            "that is what the rank began with: do you return the tensor that you changed?",
        ),
        (
            lambda given, rank: _total(given, rank) / len(given),
            "that is the mean; an all-reduce sums, and whoever wants a mean divides afterwards",
        ),
        (lambda given, rank: given[rank] + given[rank - 1], "a chunk must travel p - 1 steps to meet all ranks"),
    ),
    hint="first p - 1 steps that add what arrives, then p - 1 steps that copy it; which chunk is complete where?",
)

HALVING = Exchanged(
    "my_halving_doubling(x)",
    ((2, 8), (4, 12), (4, 6)),
    truth=_total,
    # Halves of an odd number of numbers are not equal: in each of the rounds one number more may travel, both ways.
    sent=lambda ranks, nbytes: 2 * (ranks - 1) * nbytes / ranks + 16 * (ranks.bit_length() - 1),
    messages=lambda ranks: 2 * (ranks.bit_length() - 1),
    allowed=frozenset({"send", "recv"}),
    praise="as few bytes as a ring, in 2 log2 p messages",
    wasteful="exchange a half with the rank at distance p/2, a quarter at distance p/4, ..., and the same way back",
    mistakes=(
        (
            lambda given, rank: given[rank],
            "that is what the rank began with: do you return the tensor that you changed?",
        ),
        (
            lambda given, rank: _total(given, rank) / len(given),
            "that is the mean; an all-reduce sums, and whoever wants a mean divides afterwards",
        ),
        (_halved_only, "each rank has the sum of its own part: on the way back these parts are collected"),
    ),
    hint="on the way there a rank sends one half of its part and keeps the other; on the way back it gets it, summed",
)

# Lesson 06: data parallel --------------------------------------------------------------------------------------------

LAYERS, WIDTH = 6, 24


def small_model() -> nn.Module:
    """Six layers; 24 numbers in, 4 out."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def batches(rows: int, steps: int = 3, inputs: int = WIDTH, outputs: int = 4) -> list[Batch]:
    """Batches of random numbers, the same ones in each call."""
    generator = torch.Generator().manual_seed(1)
    random = partial(torch.randn, dtype=torch.float64, generator=generator)
    return [(random(rows, inputs), random(rows, outputs)) for _ in range(steps)]


def _alone(trial: Trial) -> nn.Module:
    return trial.trained(trial.model, trial.own)


def _summed(trial: Trial) -> nn.Module:
    return trial.trained(trial.first, trial.batches, trial.lr * trial.ranks)


def _first_step_only(trial: Trial) -> nn.Module:
    plain_sgd(trial.first, trial.batches[:1], trial.loss, trial.lr)
    return plain_sgd(trial.first, trial.own[1:], trial.loss, trial.lr)


def _averaged_models(trial: Trial) -> nn.Module:
    return trial.trained(trial.first, trial.own)


def added_up(trial: Trial) -> nn.Module:
    """Gradients that are never set to zero."""
    model = trial.first
    for x, y in trial.batches:
        trial.loss(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(trial.lr * parameter.grad)
    return model


_MISTAKES = (
    (_alone, "each rank has trained on its own rows, from its own weights: nothing was exchanged"),
    (_averaged_models, "the ranks begin alike, but their gradients are not summed"),
    (_summed, "the loss is a mean over rows: the sum of p such gradients is p times too large"),
    (added_up, "`backward` adds to what is in `.grad`: set the gradients to zero in every step"),
    (_first_step_only, "only the first step agrees: what is different in the second one?"),
)
_HINT = "broadcast rank 0's weights once; in each step sum the gradients of all ranks, divide by p, then update"
_STEPS = 3
_TENSORS = 2 * LAYERS


def _gradient_bytes() -> int:
    return sum(8 * parameter.numel() for parameter in small_model().parameters())


def _sends_once(weights: bool, hint: str) -> Callable[[Comparison], tuple[str, str] | None]:
    """A demand: 2 (p - 1)/p of the gradients in each step, and all `weights` once."""

    def demand(found: Comparison) -> tuple[str, str] | None:
        ranks = len(found.ranks)
        enough = (weights + 2 * _STEPS) * _gradient_bytes() * (ranks - 1) / ranks
        if found.sent <= 1.05 * enough:
            return None
        return f"a rank sends {found.sent / enough:.1f} times the bytes that are needed", hint

    return demand


_sends_gradients_once = _sends_once(
    weights=True, hint="once all weights; then in each step one sum of each gradient, by all_reduce"
)


def _overlaps(found: Comparison) -> tuple[str, str] | None:
    early, waited = (min(rank.early for rank in found.ranks), max(rank.waited for rank in found.ranks))
    if early - waited >= _STEPS * 2:
        return None
    began = f"{several(early, 'sum')} of {_STEPS} steps began inside a backward"
    return (
        f"{began}, which waited for {waited}: nothing overlaps" if waited else f"{began}: nothing can overlap",
        "start a bucket's all_reduce(async_op=True) in the hook of its last gradient; wait for all after the backward",
    )


def _few_messages(found: Comparison) -> tuple[str, str] | None:
    sums = max(rank.calls["all_reduce"] for rank in found.ranks)
    most = _STEPS * _TENSORS // 2
    if sums <= most:
        return None
    return (
        f"it makes {several(sums // _STEPS, 'sum')} in a step, for {_TENSORS} tensors",
        f"copy several gradients into one buffer, so that a step makes at most {_TENSORS // 2} sums",
    )


NAIVE_DDP = Trained(
    "my_ddp(model, batches, loss, lr)",
    small_model,
    batches(8),
    ranks=(2, 4),
    praise="data parallelism that works, and that sends each gradient once",
    alike=False,
    mistakes=_MISTAKES,
    cheap=(_sends_gradients_once,),
    hint=_HINT,
)
BUCKET_DDP = Trained(
    "my_bucket_ddp(model, batches, loss, lr)",
    small_model,
    batches(8),
    ranks=(2, 4),
    praise="few messages, and they travel while the backward computes",
    alike=False,
    mistakes=_MISTAKES,
    cheap=(_sends_gradients_once, _overlaps, _few_messages),
    hint=_HINT,
)

# Lesson 04: micro-batches on several ranks ----------------------------------------------------------------------------

PARTS = 4


def _in_parts(weight: Callable[[int, int], float]) -> Callable[[Trial], nn.Module]:
    """Accumulation on all ranks. `weight`: of the rows of a part and of the rank, what the loss is multiplied by."""

    def train(trial: Trial) -> nn.Module:
        model = trial.first
        for batch in trial.batches:
            model.zero_grad()
            for rank in range(trial.ranks):
                x, y = rows_of_rank(batch, rank, trial.ranks)
                for rows, target in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
                    (weight(len(rows), len(x)) / trial.ranks * trial.loss(model(rows), target)).backward()
            descend(model.parameters(), trial.lr)
        return model

    return train


def _one_part_at_a_time(found: Comparison) -> tuple[str, str] | None:
    rows = -(-_MANY_ROWS // len(found.ranks) // PARTS)
    # Parameters, gradients, a copy of these to be sent; of a part what each layer hands on, and three tensors more.
    enough = 3 * _gradient_bytes() + (LAYERS + 3) * rows * WIDTH * 8
    if found.peak <= enough:
        return None
    return (
        f"a rank holds up to {found.peak:,} bytes; {enough:,} are enough",
        f"x.chunk({PARTS}): forward and backward of one part, before the next one begins",
    )


_MANY_ROWS = 724  # on 2 and on 4 ranks they make parts of unequal size
ACCUMULATED = Trained(
    "my_accumulated(model, batches, loss, lr)",
    small_model,
    batches(_MANY_ROWS),
    ranks=(2, 4),
    praise="the activations of one part, and the messages of one batch",
    mistakes=(
        (_alone, "each rank has trained on its own rows: sum the gradients over the ranks"),
        (
            _in_parts(lambda part, rows: 1 / PARTS),
            "every part counts the same here; but one with more rows counts more",
        ),
        (
            _in_parts(lambda part, rows: 1.0),
            "these are sums of the parts' gradients: a mean over all rows was asked for",
        ),
        (_summed, "the loss is a mean over rows: the sum of p such gradients is p times too large"),
        (added_up, "`backward` adds to what is in `.grad`: set the gradients to zero once a step"),
    ),
    cheap=(
        _sends_once(
            weights=False, hint="gradients add up on each rank first: sum them over the ranks after the last part"
        ),
        _one_part_at_a_time,
    ),
    hint="a part's loss times its rows over the rank's rows; after the last part one sum over the ranks, divided by p",
)

# Lesson 07: a server ------------------------------------------------------------------------------------------------


def rows_of_worker(batch: Batch, rank: int, ranks: int) -> Batch:
    """Rank 0 is the server and has no rows; the others share them out."""
    x, y = batch
    return (x[:0], y[:0]) if rank == 0 else rows_of_rank(batch, rank - 1, ranks - 1)


def _only_messages(found: Comparison) -> tuple[str, str] | None:
    others = sorted({call for rank in found.ranks for call in rank.calls} - {"send", "recv"})
    if not others:
        return None
    return f"it calls {', '.join(others)}", "a server and its workers use send and recv: nobody waits for a third one"


def _pushes_once(found: Comparison) -> tuple[str, str] | None:
    enough = _STEPS * _gradient_bytes()
    most = max(rank.sent for rank in found.ranks[1:])
    if most <= enough:
        return None
    return (
        f"a worker sends {most / enough:.1f} times the bytes of its gradients",
        "a worker pushes its gradients and nothing else; the server pushes the parameters",
    )


def _summed_by_workers(trial: Trial) -> nn.Module:
    return trial.trained(trial.first, trial.batches, trial.lr * (trial.ranks - 1))


def _divided_by_all(trial: Trial) -> nn.Module:
    return trial.trained(trial.first, trial.batches, trial.lr * (trial.ranks - 1) / trial.ranks)


SERVER = Trained(
    "my_server(model, batches, loss, lr)",
    small_model,
    batches(12),
    ranks=(2, 3, 4),
    praise="a parameter server, with the parameters in one place",
    alike=False,
    share=rows_of_worker,
    mistakes=(
        (_summed_by_workers, "the server divides the sum of the gradients by the number of workers"),
        (_divided_by_all, "the server has no rows: divide by the number of workers, p - 1"),
    ),
    cheap=(_only_messages, _pushes_once),
    hint="in each step the server sends its parameters to every worker, receives a gradient from each, and updates",
)

# Lesson 08: ZeRO -----------------------------------------------------------------------------------------------------

MOMENTUM, BLOCKS, WIDE = 0.9, 8, 32


def _blocks() -> nn.Module:
    """Eight layers of 32 numbers; the first dimension of each parameter can be divided by 2 and by 4."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(BLOCKS)))


def _without_momentum(trial: Trial) -> nn.Module:
    return plain_sgd(trial.first, trial.batches, trial.loss, trial.lr)


def _own_chunk_only(trial: Trial) -> nn.Module:
    """Each rank updates its own chunk of each parameter, and nobody collects the others."""
    models = [deepcopy(trial.first) for _ in range(trial.ranks)]
    velocity: dict[nn.Parameter, Tensor] = {}
    for batch in trial.batches:
        for rank, model in enumerate(models):
            x, y = rows_of_rank(batch, rank, trial.ranks)
            model.zero_grad()
            trial.loss(model(x), y).backward()
        for same in zip(*(model.parameters() for model in models), strict=True):
            gradient = torch.stack([one.grad for one in same if one.grad is not None]).mean(0)
            for rank, one in enumerate(same):
                velocity[one] = trial.momentum * velocity.get(one, 0.0) + gradient
                one.data.chunk(trial.ranks)[rank].sub_(trial.lr * velocity[one].chunk(trial.ranks)[rank])
    return models[trial.rank]


_ZERO_MISTAKES = (
    (_own_chunk_only, "each rank has updated its own chunks; all_gather brings it those of the others"),
    (_averaged_models, "each rank has trained on its own rows: nothing was exchanged"),
    (_summed, "the loss is a mean over rows: the sum of p such gradients is p times too large"),
    (_without_momentum, f"v = {MOMENTUM} v + gradient; parameter -= lr v: the momentum is missing"),
)
_BLOCK = (WIDE * WIDE + WIDE) * 8  # bytes of the parameters of a layer
_MODEL = BLOCKS * _BLOCK


def _sends(times: float) -> Callable[[Comparison], tuple[str, str] | None]:
    def demand(found: Comparison) -> tuple[str, str] | None:
        ranks = len(found.ranks)
        psi = found.sent / (_STEPS * _MODEL * (ranks - 1) / ranks)
        # Where a model is gathered once more to be compared, that is a third of a step's parameters of 3 steps.
        if psi <= times + 1 / _STEPS + 0.01:
            return None
        return (
            f"a rank sends {psi:.1f} Ψ (N-1)/N numbers in a step; {times:.0f} are enough",
            "an all_reduce brings each rank the sums that only the owner needs: use reduce_scatter, then all_gather",
        )

    return demand


def _holds(parameters: str, gradients: str, momentum: str) -> Callable[[Comparison], tuple[str, str] | None]:
    """A demand on the bytes of each of the three: "whole", or "part", which is that of one rank."""

    def demand(found: Comparison) -> tuple[str, str] | None:
        ranks = len(found.ranks)
        states = sum(_MODEL if one == "whole" else _MODEL / ranks for one in (parameters, gradients, momentum))
        activations = 2 * BLOCKS * (8 // ranks) * WIDE * 8
        enough = round(states + 2 * _BLOCK + activations)
        if found.peak <= enough:
            return None
        kinds = {"parameters": parameters, "gradients": gradients, "momentum": momentum}
        shared = [kind for kind, how in kinds.items() if how == "part"]
        return (
            f"a rank holds up to {found.peak:,} bytes; {enough:,} are enough, for a model of {_MODEL:,}",
            f"each rank keeps only its part of {' and '.join(shared)}, and lets go of what belongs to others at once",
        )

    return demand


def _zero(stage: int, sends: float, praise: str, *, parameters: str, gradients: str) -> Trained:
    return Trained(
        f"my_zero{stage}(model, batches, loss, lr)",
        _blocks,
        batches(8, _STEPS, WIDE, WIDE),
        ranks=(2, 4),
        praise=praise,
        momentum=MOMENTUM,
        mistakes=_ZERO_MISTAKES,
        cheap=(_sends(sends), _holds(parameters, gradients, "part")),
        hint="rank r owns the r-th chunk of each parameter, of its gradient and of its momentum",
    )


ZERO_1 = _zero(1, 2, "the momentum of a rank is one part of N", parameters="whole", gradients="whole")
ZERO_2 = _zero(2, 2, "gradients live until their sum is with its owner", parameters="whole", gradients="part")
ZERO_3 = _zero(3, 3, "no rank ever holds the model", parameters="part", gradients="part")

# Lesson 10: pipelines ------------------------------------------------------------------------------------------------

MICROBATCHES, ROWS = 16, 512


def _stages() -> nn.Module:
    """Eight layers of 24 numbers, each with its own nonlinearity: two or four equal stages."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))


def _scaled(factor: float) -> Callable[[Trial], nn.Module]:
    def train(trial: Trial) -> nn.Module:
        return trial.trained(trial.first, trial.batches, trial.lr * factor)

    return train


def _last_only(trial: Trial) -> nn.Module:
    """Only the gradient of the last micro-batch counts."""
    last = [(x[-(len(x) // MICROBATCHES) :], y[-(len(y) // MICROBATCHES) :]) for x, y in trial.batches]
    return trial.trained(trial.first, last, trial.lr / MICROBATCHES)


_PIPELINE_MISTAKES = (
    (
        _scaled(MICROBATCHES),
        "the loss of a micro-batch is the mean of its rows: divide it by the number of micro-batches",
    ),
    (_last_only, "only the last micro-batch counts: set gradients to zero once a step, not for each micro-batch"),
)


def _micro_batches(found: Comparison) -> tuple[str, str] | None:
    sends = found.ranks[0].calls["send"]
    if sends >= MICROBATCHES * 2:
        return None
    return (
        f"the first stage sends {several(sends, 'message')} in 2 steps: while it computes, the others wait",
        f"cut the batch into {MICROBATCHES} micro-batches by x.chunk, and send each one as soon as it is done",
    )


def _runs_ahead(count: Callable[[int], int], hint: str) -> Callable[[Comparison], tuple[str, str] | None]:
    """A demand on the first stage: it sends `count(ranks)` micro-batches before its first backward."""

    def demand(found: Comparison) -> tuple[str, str] | None:
        ahead, enough = found.ranks[0].ahead, count(len(found.ranks))
        if ahead >= enough:
            return None
        reason = f"the first stage sends {several(ahead, 'micro-batch')} before its first backward, and not {enough}"
        return f"{reason}: the stages behind it have nothing to do meanwhile", hint

    return demand


def _only_to_neighbours(found: Comparison) -> tuple[str, str] | None:
    size = ROWS * WIDTH * 8  # bytes between two stages, of a step and a direction
    if found.sent <= 2 * 2 * size * 1.05:
        return None
    return (
        f"a stage sends {found.sent / (4 * size):.1f} times the bytes that are needed",
        "a stage sends its outputs to the next one and the gradients of its inputs to the one before, nothing else",
    )


def _few_activations(found: Comparison) -> tuple[str, str] | None:
    peak, enough = found.ranks[0].peak, _held_by_1f1b(len(found.ranks))
    if peak <= enough:
        return None
    return (
        f"the first stage holds up to {peak:,} bytes; {enough:,} are enough",
        "stage r does p - r forwards first, then one backward after each forward; and a backward lets go of its graph",
    )


def _held_by_1f1b(ranks: int) -> int:
    """Bytes that the first stage may hold: three times its parameters, p + 1 micro-batches of activations, and all
    outputs, which a rank may keep until they are sent, with something to spare."""
    layers = 8 // ranks
    parameters = layers * (WIDTH * WIDTH + WIDTH) * 8
    rows = ROWS // MICROBATCHES
    return 3 * parameters + (ranks + 1) * rows * WIDTH * 8 * layers + ROWS * WIDTH * 10


GPIPE = Trained(
    "my_gpipe(stage, batches, loss, lr)",
    _stages,
    batches(ROWS, 2, outputs=WIDTH),
    ranks=(2, 4),
    praise="a pipeline of real processes",
    share=whole_batch,
    part=stage_of_rank,
    mistakes=_PIPELINE_MISTAKES,
    cheap=(
        _micro_batches,
        _runs_ahead(
            lambda ranks: MICROBATCHES, "first all forwards, each sent as soon as it is done; then all backwards"
        ),
        _only_to_neighbours,
    ),
    hint="the stage before needs the gradient of what it sent: recv, requires_grad_(), and after backward .grad",
)
ONE_F_ONE_B = Trained(
    "my_1f1b(stage, batches, loss, lr)",
    _stages,
    batches(ROWS, 2, outputs=WIDTH),
    ranks=(2, 4),
    praise="the pipeline of GPipe, with the activations of p micro-batches instead of all",
    share=whole_batch,
    part=stage_of_rank,
    mistakes=_PIPELINE_MISTAKES,
    cheap=(
        _micro_batches,
        _runs_ahead(lambda ranks: ranks, "stage r does p - r forwards before its first backward"),
        _only_to_neighbours,
        _few_activations,
    ),
    hint="first make it right as GPipe does; then change the order of forwards and backwards",
)
