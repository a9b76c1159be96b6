"""Tensor and expert parallelism on paper: what one of the ranks that share a transformer's blocks holds and keeps.

    tp = 2     every matrix is cut in two: heads, hidden numbers, words of the vocabulary. Norms and the biases behind
               the second matrices are whole on both ranks; so is what norms keep, unless `sequence` divides that, too
    ep = 4     each block has `experts` MLPs instead of one, shared out over 4 data-parallel ranks; every token goes to
               `top` of them. What they are trained by is summed over dp / ep ranks only

Sources: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al. 2022, section 4 (`sequence`); Lepikhin et al.,
"GShard", 2020, and Fedus et al., "Switch Transformers", 2021 (experts). Experts are taken to be equally busy.
"""

from __future__ import annotations

from dataclasses import dataclass

from minipar.errors import PlanError
from minipar.models.table import GPT, Preset, check_gpt
from minipar.program import Group


@dataclass(frozen=True)
class Division:
    """How the blocks of a transformer are shared out. The default: they are not.

    tp        tensor-parallel ranks
    sequence  whether these divide norms, dropout and the inputs of blocks by tokens
    experts   MLPs of each block; 0: one, for all tokens
    top       experts that a token goes to
    ep        data-parallel ranks that share out the experts
    """

    tp: int = 1
    sequence: bool = False
    experts: int = 0
    top: int = 1
    ep: int = 1

    def check(self, model: Preset, dp: int) -> None:
        """Refuse what cannot be, for a model on `dp` data-parallel ranks."""
        for key in ("tp", "top", "ep"):
            if getattr(self, key) < 1:
                raise PlanError(f"{key}={getattr(self, key)}: must be a whole number of at least 1")
        if self != WHOLE and not isinstance(model, GPT):
            raise PlanError("tp and ep: formulas are for transformers; possible is tp=1 ep=1 experts=0")
        if isinstance(model, GPT) and model.heads % self.tp:
            divisors = [str(n) for n in range(1, model.heads + 1) if model.heads % n == 0]
            raise PlanError(f"tp={self.tp}: must divide {model.heads} heads; possible are {', '.join(divisors)}")
        if self.ep > 1 and not self.experts:
            raise PlanError(f"ep={self.ep}: there are no experts to share out; possible is ep=1, or experts=8")
        if self.experts and not 1 <= self.top <= self.experts:
            raise PlanError(f"top={self.top}: a token goes to at most {self.experts} experts")
        if self.ep > 1 and (self.experts % self.ep or dp % self.ep):
            possible = [str(n) for n in range(1, dp + 1) if dp % n == 0 and self.experts % n == 0]
            raise PlanError(
                f"ep={self.ep}: must divide dp={dp} and experts={self.experts}; possible are {', '.join(possible)}"
            )

    @property
    def here(self) -> int:
        """Experts of a block on one rank."""
        return self.experts // self.ep


WHOLE = Division()


def groups(gpt: GPT, division: Division) -> tuple[tuple[Group, ...], int]:
    """Parameter groups of one rank's part, in numbers, and how many of them (the last ones) are experts."""
    check_gpt(gpt)
    h, t, last = gpt.width, division.tp, gpt.layers + 1

    def first(inputs: int, outputs: int) -> tuple[int, int]:  # cut by outputs, with its bias
        return inputs * _part(outputs, t), _part(outputs, t)

    def second(inputs: int, outputs: int) -> tuple[int, int]:  # cut by inputs; its bias is added once, to the sum
        return _part(inputs, t) * outputs, outputs

    norm, mlp = (h, h), (*first(h, 4 * h), *second(4 * h, h))
    router = (h * division.experts,) if division.experts else ()
    block = (*norm, *first(h, 3 * h), *second(h, h), *norm, *(router or mlp))
    words, position = _part(gpt.vocab, t) * h, gpt.context * h
    middle = [Group((layer,), block) for layer in range(1, last)]
    tied = [Group((0, last), (words,))] if gpt.tied else []
    ends = (position,) if gpt.tied else (words, position), norm if gpt.tied else (*norm, words)
    experts = [Group((layer,), mlp * division.here) for layer in range(1, last)] if division.experts else []
    return (Group((0,), ends[0]), *middle, Group((last,), ends[1]), *tied, *experts), len(experts)


def _part(size: int, ranks: int) -> int:
    return -(-size // ranks)
