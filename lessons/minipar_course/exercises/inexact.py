"""Build it: training that is not one device's: compressed gradients (lesson 06), stashed weights (lesson 12).

What is right is said by a loop in one process, in plain torch, that does the same without any message.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from minipar.cluster import Cluster
from minipar_course import against
from minipar_course.against import Comparison, rows_of_rank
from minipar_course.exercises.building import WIDTH, batches, small_model
from minipar_course.exercises.kinds.built import Trained, Trial


def _nothing(trial: Trial) -> nn.Module:
    return trial.first


@dataclass(frozen=True)
class Recorded(Trained):
    """As `Trained`, but right is what `truth` gives: a loop in one process, of which the answer is a parallel form."""

    truth: Callable[[Trial], nn.Module] = _nothing

    def _compare(self, answer: object, ranks: int, clusters: Callable[[int], Cluster] | None) -> Comparison:
        found = super()._compare(answer, ranks, clusters)
        ends = self._ends(self.truth, ranks)
        errors = tuple(against.difference(one.state, end) for one, end in zip(found.ranks, ends, strict=True))
        return replace(found, expected=tuple(ends), error=errors)


# Lesson 06: compressed gradients --------------------------------------------------------------------------------------

STEPS, SHARE = 6, 10


def kept(tensor: Tensor) -> int:
    """How many numbers of a gradient are sent: a tenth, rounded up."""
    return -(-tensor.numel() // SHARE)


def largest(tensor: Tensor) -> Tensor:
    """A tensor with only its largest numbers, by size; all others are zero."""
    flat = tensor.flatten()
    places = flat.abs().topk(kept(tensor)).indices
    return torch.zeros_like(flat).index_copy(0, places, flat[places]).view_as(tensor)


def _compressed(feedback: str = "rest", divide: bool = True) -> Callable[[Trial], nn.Module]:
    """Compressed training of all ranks in one process. `feedback`: what waits for the next step: rest, none, all."""

    def train(trial: Trial) -> nn.Module:
        model = trial.first
        waiting = [{each: torch.zeros_like(each) for each in model.parameters()} for _ in range(trial.ranks)]
        for batch in trial.batches:
            sent = {each: torch.zeros_like(each) for each in model.parameters()}
            for rank, late in enumerate(waiting):
                x, y = rows_of_rank(batch, rank, trial.ranks)
                model.zero_grad()
                trial.loss(model(x), y).backward()
                for each in model.parameters():
                    assert each.grad is not None
                    whole = each.grad + late[each]
                    part = largest(whole)
                    sent[each] += part
                    late[each] = {"rest": whole - part, "none": torch.zeros_like(whole), "all": whole}[feedback]
            with torch.no_grad():
                for each in model.parameters():
                    each.sub_(trial.lr * sent[each] / (trial.ranks if divide else 1))
        return model

    return train


def _sends_little(found: Comparison) -> tuple[str, str] | None:
    ranks = len(found.ranks)
    numbers = sum(map(kept, small_model().parameters()))
    enough = STEPS * (ranks - 1) * numbers * 16  # values and places
    if found.sent <= 1.01 * enough:
        return None
    return (
        f"a rank sends {found.sent / enough:.1f} times the bytes that are needed",
        "send the values and their places (all_gather of both), not the tensor with its zeros",
    )


COMPRESSED = Recorded(
    "my_compressed(model, batches, loss, lr)",
    small_model,
    batches(8, STEPS),
    ranks=(2, 4),
    praise="a tenth of the gradients, and nothing is lost",
    truth=_compressed(),
    mistakes=(
        (_compressed("none"), "what was not sent is lost: keep it, and add it to the next gradient (error feedback)"),
        (_compressed("all"), "what was sent must not wait as well: keep the gradient minus what was sent"),
        (_compressed(divide=False), "the loss is a mean over rows: the sum of p gradients is p times too large"),
    ),
    cheap=(_sends_little,),
    hint="gradient + what waits; send the largest tenth of each tensor; what waits is the rest",
)

# Lesson 12: stashed weights -------------------------------------------------------------------------------------------

BATCHES, ROWS = 12, 4


def _stages() -> nn.Module:
    """Eight layers of 24 numbers: two or four equal stages."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))


def _pipedream(stash: bool = True) -> Callable[[Trial], nn.Module]:
    """PipeDream's updates in one process: stage r of p computes batch i with its weights after i - (p - 1 - r) updates.

    stash   whether the backward uses the weights of the forward, or the newest ones
    """

    def train(trial: Trial) -> nn.Module:
        model, p = trial.first, trial.ranks
        versions = [deepcopy(model)]
        for i, (x, y) in enumerate(trial.batches):
            used = nn.Sequential()
            for r in range(p):
                old = versions[max(0, i - (p - 1 - r))]
                used.extend(deepcopy(list(against.stage_of_rank(old, r, p).children())))
            output = trial.loss(used(x), y)
            if not stash:  # (autograd has saved the weights themselves, which are changed before the backward)
                for mine, newest in zip(used.parameters(), versions[-1].parameters(), strict=True):
                    mine.data.copy_(newest.data)
            output.backward()
            new = deepcopy(versions[-1])
            for each, mine in zip(new.parameters(), used.parameters(), strict=True):
                each.grad = mine.grad
            against.descend(new.parameters(), trial.lr)
            new.zero_grad()
            versions.append(new)
        return versions[-1]

    return train


def _plainly(trial: Trial) -> nn.Module:
    return trial.trained(trial.first, trial.batches)


def _few_versions(found: Comparison) -> tuple[str, str] | None:
    ranks = len(found.ranks)
    parameters = 8 // ranks * (WIDTH * WIDTH + WIDTH) * 8
    # The weights, their copies for p batches under way and one more, the gradients; activations are small.
    enough = (ranks + 4) * parameters + 16 * ROWS * WIDTH * 8 * 8
    if found.ranks[0].peak <= enough:
        return None
    return (
        f"the first stage holds up to {found.ranks[0].peak:,} bytes; {enough:,} are enough",
        "stage r has p - r batches under way: let the weights of a batch go as soon as its backward is done",
    )


STASHED = Recorded(
    "my_pipedream(stage, batches, loss, lr)",
    _stages,
    batches(ROWS, BATCHES, outputs=WIDTH),
    ranks=(2, 4),
    praise="each backward with the weights of its forward, and never a flush",
    lr=0.5,
    share=against.whole_batch,
    part=against.stage_of_rank,
    truth=_pipedream(),
    mistakes=(
        (_pipedream(stash=False), "the backward uses newer weights than the forward did: keep those of the forward"),
        (_plainly, "each batch waits for the update of the one before: stage r begins with p - 1 - r more forwards"),
    ),
    cheap=(_few_versions,),
    hint="stage r: p - 1 - r forwards first; then forward, backward and update in turn; at the end the backwards left",
)
