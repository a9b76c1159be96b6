"""Finds mistakes in the actions of a schedule, so that errors name the actions, as the user wrote them, not layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from minipar.program import Action, Backward, BackwardInput, BackwardWeight, Forward

_AFTER: dict[type, type] = {Backward: Forward, BackwardInput: Forward, BackwardWeight: BackwardInput}


def mistake(
    actions: Sequence[Sequence[Action]], placement: Sequence[Sequence[int]], microbatches: int, trained: Collection[int]
) -> str:
    """The first mistake in the actions of a rank, each rank checked alone; "" if there is none.

    placement   for each rank, the stages of its chunks
    trained     the stages that have a backward
    """
    for rank, chosen in enumerate(actions):
        several = len(placement[rank]) > 1
        last = {_key(action): k for k, action in enumerate(chosen)}
        seen: dict[tuple[type, int, int], int] = {}
        for k, action in enumerate(chosen):
            kind, i, c = key = _key(action)
            words = _word(key, several)
            if key in seen:
                return f"rank {rank}: {words} comes twice, as actions {seen[key]} and {k}"
            seen[key] = k
            before = (_AFTER.get(kind, kind), i, c)
            if before not in seen:
                verb = "comes before" if before in last else "comes without"
                return f"rank {rank}: {words} {verb} {_word(before, several)}"
            other = (Backward if kind is BackwardInput else BackwardInput, i, c)
            if kind in (Backward, BackwardInput) and other in seen:
                return f"rank {rank}: {words} comes after {_word(other, several)}; possible is one of them"
    copies = [stage for mine in placement for stage in mine]
    for rank, chosen in enumerate(actions):
        done = set(map(_key, chosen))
        for c, stage in enumerate(placement[rank]):
            for i in range(microbatches if copies.count(stage) == 1 else 0):
                several = len(placement[rank]) > 1
                if (Forward, i, c) not in done:
                    return f"rank {rank} never yields {_word((Forward, i, c), several)}"
                halves = (BackwardInput, i, c) in done
                wanted = BackwardWeight if halves else Backward
                if stage in trained and (wanted, i, c) not in done:
                    return f"rank {rank} never yields {_word((wanted, i, c), several)}"
    return ""


def _key(action: Action) -> tuple[type, int, int]:
    return type(action), action.microbatch, action.chunk


def _word(key: tuple[type, int, int], several: bool) -> str:
    kind, i, c = key
    return f"{kind.__name__}({i}, {c})" if several or c else f"{kind.__name__}({i})"
