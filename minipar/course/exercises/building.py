"""Build it: mechanisms of lessons 05 to 10, written with `torch.distributed` and run on real ranks (gloo)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from minipar.course.against import Batch, Comparison, plain_sgd, stage_of_rank, whole_batch
from minipar.course.exercises.kinds.built import Exchanged, Trained, Trial
from minipar.wording import several

# Lesson 05: the ring -------------------------------------------------------------------------------------------------


def _total(given: list[Tensor], rank: int) -> Tensor:
    return torch.stack(given).sum(0)


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
    return plain_sgd(trial.model, trial.own, trial.loss, trial.lr)


def _summed(trial: Trial) -> nn.Module:
    return plain_sgd(trial.first, trial.batches, trial.loss, trial.lr * trial.ranks)


def _first_step_only(trial: Trial) -> nn.Module:
    plain_sgd(trial.first, trial.batches[:1], trial.loss, trial.lr)
    return plain_sgd(trial.first, trial.own[1:], trial.loss, trial.lr)


def _averaged_models(trial: Trial) -> nn.Module:
    return plain_sgd(trial.first, trial.own, trial.loss, trial.lr)


def _added_up(trial: Trial) -> nn.Module:
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
    (_added_up, "`backward` adds to what is in `.grad`: set the gradients to zero in every step"),
    (_first_step_only, "only the first step agrees: what is different in the second one?"),
)
_HINT = "broadcast rank 0's weights once; in each step sum the gradients of all ranks, divide by p, then update"
_STEPS = 3
_TENSORS = 2 * LAYERS


def _gradient_bytes() -> int:
    return sum(8 * parameter.numel() for parameter in small_model().parameters())


def _sends_gradients_once(found: Comparison) -> tuple[str, str] | None:
    ranks = len(found.ranks)
    # The weights once, and 2 (p - 1)/p of the gradients in each step.
    enough = (1 + 2 * _STEPS) * _gradient_bytes() * (ranks - 1) / ranks
    if found.sent <= 1.05 * enough:
        return None
    return (
        f"a rank sends {found.sent / enough:.1f} times the bytes that are needed",
        "once all weights; then in each step one sum of each gradient, by all_reduce",
    )


def _overlaps(found: Comparison) -> tuple[str, str] | None:
    early = min(rank.early for rank in found.ranks)
    if early >= _STEPS * 2:
        return None
    return (
        f"{several(early, 'sum')} of {_STEPS} steps began inside a backward: nothing can overlap",
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

# Lesson 10: pipelines ------------------------------------------------------------------------------------------------

MICROBATCHES, ROWS = 16, 512


def _stages() -> nn.Module:
    """Eight layers of 24 numbers, each with its own nonlinearity: two or four equal stages."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))


def _scaled(factor: float) -> Callable[[Trial], nn.Module]:
    def train(trial: Trial) -> nn.Module:
        return plain_sgd(trial.first, trial.batches, trial.loss, trial.lr * factor)

    return train


def _last_only(trial: Trial) -> nn.Module:
    """Only the gradient of the last micro-batch counts."""
    last = [(x[-(len(x) // MICROBATCHES) :], y[-(len(y) // MICROBATCHES) :]) for x, y in trial.batches]
    return plain_sgd(trial.first, last, trial.loss, trial.lr / MICROBATCHES)


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
    cheap=(_micro_batches, _only_to_neighbours),
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
    cheap=(_micro_batches, _only_to_neighbours, _few_activations),
    hint="first make it right as GPipe does; then change the order of forwards and backwards",
)
