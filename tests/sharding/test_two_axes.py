"""Ranks that share layers along several axes at once: operators, the tokens of a sequence, experts.

Each axis cuts what the axes before it have left, and a collective is among the ranks of one axis. Runs equal those of
plain torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from minipar import Plan, PlanError, ProgramError, models, verify
from minipar.execution.execution import Job
from minipar.program import Op, Program, repartitions
from minipar.program.forms import along
from minipar.program.mesh import Mesh
from minipar.sharding.sharded import local_model
from minipar.training.training import resume
from tests.sharding.test_models import ROWS, VOCAB, numbers, right, run

pytestmark = [pytest.mark.many(6), pytest.mark.ranks, pytest.mark.usefixtures("captured_for_all_tests")]

ADAM = partial(torch.optim.AdamW, lr=1e-3)
TOKENS = 8
MIXTURE = partial(models.build, "gpt-moe-tiny", layers=2, width=16, heads=4, context=TOKENS, experts=4, vocab=VOCAB)
GRID = "tp=2 context_parallel=2"
gpt = partial(models.gpt, layers=2, width=32, heads=4, context=TOKENS, vocab=VOCAB)


def texts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return ids, ids


def trained(clusters: Any, model: Any, words: str, **options: Any) -> Any:
    return run(clusters, model, texts(), words, **options)


# Gradients ------------------------------------------------------------------------------------------------------------


class Flat(nn.Module):
    """Rows and tokens are one dimension inside: of each row it has a part, and of each part another one."""

    def __init__(self, width: int, hands_on: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.hands_on = nn.Linear(width, 3 * width), nn.Linear(3 * width, width), hands_on

    def forward(self, given: Any) -> Any:
        x, *rest = given if self.hands_on else (given,)
        y = functional.gelu(self.up(x.reshape(-1, x.shape[-1])))
        y = x + self.down(y * torch.sigmoid(y)).view(x.shape)
        return (y, *rest) if self.hands_on else y


def test_rows_and_tokens_in_one_dimension(clusters: Any) -> None:
    data = numbers(4, 8), numbers(4, 8)
    right(run(clusters, lambda: nn.Sequential(*(Flat(8) for _ in range(3))), data, f"{GRID} microbatches=3",
              loss=nn.functional.mse_loss))  # fmt: skip


def flat_mixture() -> nn.Sequential:
    first, *rest = MIXTURE()
    return nn.Sequential(first, rest[0], Flat(16, hands_on=True), *rest[1:])


def test_parts_of_rows_and_of_their_tokens_in_one_dimension(clusters: Any) -> None:
    """Micro-batches of other sizes than the capture's: what is cut by rows has been cut by the axis before."""
    words = "context_parallel=2 ep=2 microbatches=3"
    right(trained(clusters, flat_mixture, words, loss=models.mixture_loss), 1e-10)


# Saves ---------------------------------------------------------------------------------------------------------------


def test_a_run_is_saved_and_goes_on_under_another_mesh(clusters: Any, tmp_path: Any) -> None:
    options: dict[str, Any] = {"optimizer": ADAM, "dtype": torch.float64, "progress": False, "check": True}
    trained(clusters, gpt, "pp=2", optimizer=ADAM, save=str(tmp_path))
    plan = Plan.parse(f"{GRID} sequence_parallel=true")
    again = resume(tmp_path, gpt, texts(), plan, cluster=clusters(plan.ranks), steps=1, **options)
    assert again.first_step == 2
    assert again.max_error() < 1e-10


# Programs -------------------------------------------------------------------------------------------------------------


def compiled(words: str) -> Program:
    return Plan.parse(words).compile(layers=2)


def test_tp_is_the_innermost_axis() -> None:
    """Ranks that exchange most are neighbours: tp, then the tokens, then the experts."""
    program = compiled("dp=2 tp=2 context_parallel=2 ep=2")
    assert program.sharing_axes == ("ep", "cp", "tp")
    assert program.sharers(0, ("tp",)) == (0, 1)
    assert program.sharers(0, ("cp",)) == (0, 2)
    assert program.sharers(0, ("ep",)) == (0, 4)
    assert program.sharers(13) == tuple(range(8, 16))
    assert program.places(13) == ((1, 2), (0, 2), (1, 2))


def test_each_collective_is_among_the_ranks_of_one_axis() -> None:
    program = compiled("pp=2 tp=2 context_parallel=2 sequence_parallel=true microbatches=2")
    for rank, row in enumerate(program.ranks):
        for ins in filter(repartitions, row):
            (source,), (target,) = ins.reads, ins.writes
            changed = [k for k in range(2) if along(source.form, k) != along(target.form, k)]
            assert len(changed) == 1
            assert ins.group == program.sharers(rank, (program.sharing_axes[changed[0]],))


def test_gradients_are_summed_along_the_axes_that_make_parts_of_them() -> None:
    program = compiled("tp=2 context_parallel=2 sequence_parallel=true")
    groups = {program.groups[g].form: set() for g in range(len(program.groups))}  # type: ignore[var-annotated]
    for ins in program.ranks[0]:
        if ins.op is Op.ALL_REDUCE and ins.reads[0].kind == "grad":
            for g in ins.layers:
                groups[program.groups[g].form].add(ins.group)
    assert groups["P/S"] == {(0, 2)}  # shards of operators: over the ranks with other tokens
    assert groups["P/P"] == {(0, 1, 2, 3)}  # norms, of whose tokens each rank has a quarter


def test_a_collective_of_another_axis_is_refused() -> None:
    program = compiled("tp=2 context_parallel=2")
    rows = [list(row) for row in program.ranks]
    for rank, row in enumerate(rows):
        k = next(k for k, ins in enumerate(row) if repartitions(ins))
        row[k] = row[k]._replace(group=program.sharers(rank, ("cp",)))
    with pytest.raises(ProgramError, match="possible are 0,1"):
        verify(replace(program, ranks=tuple(map(tuple, rows))))


def test_a_sum_over_different_shards_is_refused() -> None:
    program = compiled("tp=2 context_parallel=2 bucket=none")
    rows = [list(row) for row in program.ranks]
    for row in rows:
        for k, ins in enumerate(row):
            if ins.op is Op.ALL_REDUCE and ins.reads[0].kind == "grad" and program.groups[ins.layers[0]].form == "P/S":
                row[k] = ins._replace(group=(0, 1, 2, 3), stream="tp 0,1,2,3")
    with pytest.raises(ProgramError, match="adds different shards of layer"):
        verify(replace(program, ranks=tuple(map(tuple, rows))))


def test_a_sum_that_is_left_out_is_named_with_its_ranks() -> None:
    program = compiled("tp=2 context_parallel=2 bucket=none")
    g = next(g for g, group in enumerate(program.groups) if group.form == "P/S")
    rows = [tuple(ins for ins in row if not (ins.op is Op.ALL_REDUCE and ins.layers == (g,))) for row in program.ranks]
    with pytest.raises(ProgramError, match=rf"ALL_REDUCE of grad\({g}\) over 0,2, the ranks that share its layer"):
        verify(replace(program, ranks=tuple(rows)))


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_parameter_that_two_axes_would_cut_is_refused() -> None:
    model, x = models.build("gpt-tiny"), torch.zeros(4, 8, dtype=torch.long)
    both = {"*.mlp.0": "S-1 on tp, R on cp", "*.mlp.0.weight": "S1 on cp"}
    with pytest.raises(PlanError, match=r"mlp.0.weight: would be cut along cp and tp; possible are annotations"):
        local_model(model, 0, Mesh(cp=2, tp=2), x, both, "S1")


def test_layers_that_cut_themselves_do_so_along_one_axis() -> None:
    from tests.sharding import by_hand

    with pytest.raises(PlanError, match="by a method `shard`, along one axis"):
        local_model(by_hand.model(), 0, Mesh(cp=2, tp=2), numbers(8), None, "S1")


def test_shards_of_one_parameter_are_the_whole_one() -> None:
    """Each rank has what its place along tp says, whatever its place along cp is."""
    x, _ = texts()
    job = Job(gpt, texts())
    whole = dict(job.build().named_parameters())
    parts = [local_model(job.build(), k, Mesh(cp=2, tp=2), x, None, "S1") for k in range(4)]
    held: list[dict[str, Tensor]] = [dict(part.named_parameters()) for part in parts]
    for name, value in whole.items():
        assert all(torch.equal(held[k][name], held[k + 2][name]) for k in range(2))
        cut = parts[0].cuts.get(name)
        joined = held[0][name] if cut is None else cut.joined([held[0][name], held[1][name]])
        assert torch.equal(joined, value)
    assert all(a.forms == b.forms for a, b in pairwise(parts))
