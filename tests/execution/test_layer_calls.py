"""A rank's layers and parameter groups get the additions that its program needs, and no others."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from minipar import Plan
from minipar.comm.communicator import Communicator
from minipar.execution.compute import Compute
from minipar.execution.owners import Owner, Wide
from minipar.execution.parameter_slices import SlicedGroup, pack_gradients
from minipar.execution.parameter_versions import Versions
from minipar.execution.state import choose_owners
from minipar.models import randomness
from minipar.models.parameter_groups import parameters_of, shape_of
from minipar.program import Instruction, Op, Program, param
from minipar.strategies.rewriting import computed_on_host


def around(run: Any) -> list[str]:
    """The names of the functions around a module, from the outermost one inwards."""
    inner = inspect.getclosurevars(run).nonlocals.get("run")
    return [run.__name__, *around(inner)] if inner is not None else []


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        nn.Linear(4, 4),
        nn.Linear(4, 3),
    ]


def compiled(text: str) -> Program:
    return Plan.parse(text).compile(shape_of(layers()))


@pytest.mark.parametrize(
    ("text", "added"),
    [
        ("dp=1", [["call_by_row"], [], [], []]),
        (
            "checkpoint=1",
            [["call_by_row", "call_shortened"], ["call_remembering", "call_shortened"], ["call_shortened"], []],
        ),
        ("offload=activations microbatches=2", [["call_by_row", "call_keeping"], ["call_keeping"], [], []]),
    ],
)
def test_a_layer_gets_what_its_program_needs(text: str, added: list[list[str]]) -> None:
    program, model = compiled(text), nn.Sequential(*layers())
    randomness.replace_dropout(model, 0)
    compute = Compute(program, 0, torch.device("cpu"), list(model), nn.functional.mse_loss)
    for layer, names in enumerate(added):
        measuring = [] if "call_keeping" in names else ["call_weighed"]
        loss = ["call_with_loss"] if layer == 3 else []
        assert around(compute.calls[layer]) == ["call_seeded", *names, *measuring, *loss]


def owners_of(text: str, rank: int = 0) -> list[Owner]:
    program, model = compiled(text), layers()
    held = {id(p) for layer in program.placement[rank] for p in model[layer].parameters()}
    groups = [[p for p in params if id(p) in held] for params in parameters_of(model)]
    _, at_home = computed_on_host(program.ranks[rank])
    comm = cast(Communicator, SimpleNamespace(rank=rank, device=torch.device("cpu")))
    return choose_owners(program, comm, groups, at_home)


@pytest.mark.parametrize(
    ("text", "kind", "layers_have", "trained", "on_host"),
    [
        ("dp=2", Owner, torch.float32, torch.float32, False),
        ("precision=bf16", Wide, torch.bfloat16, torch.float32, False),
        ("offload=optimizer", Owner, torch.float32, torch.float32, True),
        ("precision=bf16 offload=optimizer", Owner, torch.bfloat16, torch.float32, True),
        ("dp=2 zero=1", SlicedGroup, torch.float32, torch.float32, False),
        ("dp=2 zero=3 precision=bf16", SlicedGroup, torch.bfloat16, torch.float32, False),
        ("dp=2 zero=2 offload=optimizer", SlicedGroup, torch.float32, torch.float32, True),
        ("pp=2 schedule=pipedream microbatches=4", Versions, torch.float32, torch.float32, False),
        ("host_layers=0,1,2,3", Owner, torch.float32, torch.float32, False),
    ],
)
def test_who_owns_a_group(
    text: str, kind: type[Owner], layers_have: torch.dtype, trained: torch.dtype, on_host: bool
) -> None:
    for owner in owners_of(text)[:2]:
        assert type(owner) is kind
        assert {p.dtype for p in owner.params} == {layers_have}
        assert {p.dtype for p in owner.trained} == {trained}
        assert bool(owner.masters) == on_host
        assert (owner.trained is owner.masters) == on_host


def test_slices_of_all_ranks_are_the_whole_gradient() -> None:
    ranks = [cast(list[SlicedGroup], owners_of("dp=3 zero=2", rank)) for rank in range(3)]
    expected: dict[tuple[int, int], torch.Tensor] = {}
    for g, owner in enumerate(ranks[0]):
        for k, p in enumerate(owner.params):
            p.grad = torch.randn(p.shape)
            expected[g, k] = p.grad.clone()
    packed = pack_gradients(ranks[0], torch.device("cpu")).view(3, -1)
    found = {key: torch.full((g.numel(),), torch.nan) for key, g in expected.items()}
    for rank, owners in enumerate(ranks):
        parts = packed[rank].split([owner.size for owner in owners])
        for g, (owner, part) in enumerate(zip(owners, parts, strict=True)):
            of = {id(p): k for k, p in enumerate(owner.params)}
            for p, begin, end, place in owner.places():
                found[g, of[id(p)]][begin:end] = part[place : place + end - begin]
    for key, gradient in expected.items():
        assert torch.equal(found[key], gradient.reshape(-1))


def test_an_update_leaves_a_version_alone_that_is_still_needed() -> None:
    owner = owners_of("pp=2 schedule=pipedream microbatches=4")[0]
    assert isinstance(owner, Versions)
    before = [p.detach().clone() for p in owner.params]

    def update(*frees: int) -> None:
        for p in owner.params:
            p.grad = torch.ones_like(p)
        made, gone = (param(0, 9),), tuple(param(0, version) for version in frees)
        owner.take_gradients(Instruction(Op.STEP, (0,), -1, 0, (), made, gone))
        torch.optim.SGD(list(owner.trained), lr=1.0).step()
        owner.finish_update()

    update()
    assert all(torch.equal(p, old) for p, old in zip(owner.params, before, strict=True))
    owner.show(param(0, 1))
    assert all(torch.equal(p, old - 1) for p, old in zip(owner.params, before, strict=True))
    update(1)  # nothing needs version 1 any more: it is updated in place
    assert sorted(owner.alive) == [0, 2]
    assert all(torch.equal(p, old - 2) for p, old in zip(owner.params, before, strict=True))
    owner.release(param(0, 0))
    assert sorted(owner.alive) == [2]
