"""The short form of the campaign: random models and plans, the same in every run; and tests of the campaign itself."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch

from minipar import Plan
from minipar.models import randomness
from tests.fuzz import models, oracle, outside, plans
from tests.fuzz.campaign import Found, Ranks, compare, draw, expect, judge

PAIRS = (*range(28, 48), 105, 163, 205, 219)  # every second one of outside.py; the last ones: layers that ranks share
FOUND = (  # pairs that were wrong or crashed once
    31327,  # local_steps: a replica without rows, and weight decay
    31639, 32815,  # a weight in a plain list: in the replay of servers; in a layer that is computed whole
    31443,  # a complex parameter that nothing uses
    32987,  # rows that change each other's results by 1e-10
    10709,  # a layer that hands on its input now and then, before one that writes into it
    32043,  # local_steps with nothing to train
    32317,  # a sum of a parameter alone, with tp
    31521,  # a loss that cannot be cut, in bfloat16
    60767,  # messages of a few bytes
    51449,  # a shard that is read in other pieces of the same dimension
    71615,  # a loss that is no mean of its parts from step 1 on, in a plan that only computes it
    74555,  # a frozen part of a reentrant checkpoint, without a gradient for all its parameters
    83303,  # in bfloat16: the gradient of a bias before a norm is rounding alone
    103443,  # parts of gradients of ranks that share layers, which topk cannot make smaller: refused
    74853,  # a worker of an asynchronous server whose rows count nothing: its gradient is zeros, and is an update
    51627, 52155, 51207,  # a stage that gets no gradient, without flushes: its parameters do not decay
)  # fmt: skip
BY_HAND = {"offload_folder", "extra_passes"}  # keys of a plan that are not drawn: they need more than words


@pytest.fixture(scope="module")
def ranks():
    made, before = Ranks(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield made
    torch.set_num_threads(before)
    made.close()


def test_random_models_under_random_plans_equal_plain_torch(ranks):
    ended, failed = Counter(), []
    for seed in (*PAIRS, *FOUND):
        pair = draw(seed)
        outcome = judge(pair, ranks)
        ended[outcome.kind] += 1
        if outcome.failed:
            failed.append(f"{outcome.kind} pair {seed}: {outcome.text}\n{pair}")
    assert not failed, "\n\n".join(failed)
    assert ended["equal"] >= len(PAIRS) // 3, ended


def test_a_pair_is_a_function_of_its_seed():
    for seed in (3, 11):
        assert draw(seed) == draw(seed)
        first, second = (models.build(draw(seed).spec).state_dict() for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_kind_of_layer_fits_somewhere():
    """Of the inputs that there are, at least one lets a layer of each kind be made, and run."""
    rows = [(n,) for n in (3, 4)] + [(2, 4), (3, 5)] + [(2, 4, 4), (3, 6, 6)]
    given = [(shape, dtype) for shape in rows for dtype in (torch.float64, torch.int64, torch.complex128)]
    for name in models.KINDS.keys() - set(models.CLOSING):
        made = 0
        for shape, dtype in given:
            with models.in_float64():
                layer = models.layer(models.Entry(name, 5, shape, dtype))
                if layer is not None:
                    layer(
                        models.example(shape, torch.int64, 3, 0)
                        if dtype is torch.int64
                        else torch.randn(3, *shape, dtype=dtype)
                    )
                    made += 1
        assert made, name


def test_every_key_of_a_plan_is_drawn():
    keys = set()
    for seed in range(3000):
        dice = random.Random(seed)
        facts = plans.Facts(dice.randint(1, 9), seed % 5 == 0, 4 if seed % 7 == 0 else 0, seed % 6 == 0, seed % 2 == 0)
        keys |= (plans.draw if seed % 2 else outside.words)(dice, facts).keys()
    assert keys == {field.name for field in fields(Plan)} - BY_HAND


def test_what_differs_is_found(ranks):
    """A gradient that is 1e-9 off, a parameter that was not updated, a step that was left out."""
    pair = replace(draw(0), spec=_small(), words=(("dp", "1"),), steps=3, cut=0, momentum=0.0, through_train=False)
    expected = expect(pair)

    def found():
        given = expect(pair)
        made = Found()
        made.losses, made.gradients, made.parameters = given.losses, given.gradients, given.parameters
        return made

    def worst(made):
        return max(error for error, _ in compare(pair, made, expected))

    assert worst(found()) == 0
    off = found()
    off.gradients[1]["0.weight"] += 1e-9
    assert worst(off) > 1e-12
    off = found()
    off.parameters["0.bias"] = off.parameters["0.bias"] + 1e-9
    assert worst(off) > 1e-12
    off = found()
    del off.losses[2]
    assert worst(off) == float("inf")


def test_losses_and_optimizers_of_outside_are_what_they_say():
    """Each loss gives a number that its own definition on the whole batch gives; each optimizer moves a parameter."""
    output, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1])
    padded = torch.nn.functional.cross_entropy(output[y != 0], y[y != 0])
    for name in ("own-index", "masked", "sum-and-count", "declared"):
        value = models.loss_of(name)(output, y)
        assert torch.allclose(value[0] / value[1] if isinstance(value, tuple) else value, padded), name
    for name, make in outside.OPTIMIZERS.items():
        weight = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
        optimizer = oracle.optimizer_of(make(0.1), {"0.weight": weight})
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert (weight < 1).all(), name


def test_padding_begins_at_a_step_of_its_own():
    spec = replace(_small(), loss="masked", rows=64)
    for seed in range(4):
        begins = [bool((models.Rows(replace(spec, seed=seed)).whole(step)[1] == 0).any()) for step in range(5)]
        assert begins == [step >= seed for step in range(5)]


def _small():
    entries = (models.Entry("linear", 1, (4,)), models.Entry("tanh", 2, (4,)), models.Entry("dropout", 3, (4,)))
    return models.Spec(1, entries, 7, "mse")


def test_dropout_by_row_is_as_its_definition_says():
    """The oracle's, written from the definition, and the engine's agree on every element."""
    for p, name, step, first in ((0.3, "0.1", 0, 0), (0.5, "drop", 7, 13)):
        x = torch.ones(5, 3, 4, dtype=torch.float64)
        mine = oracle.DropoutByRow(p, name, {"seed": 9, "step": step, "row": first})
        engine = randomness.RowDropout(p, 9, name)
        randomness.at([engine], step, first)
        assert torch.equal(mine(x), engine(x))
        assert 0 < (mine(x) == 0).sum() < x.numel()


def test_layers_that_feel_the_split_are_drawn_for_whole_batches_only():
    for seed in range(60):
        spec = models.draw(random.Random(seed))
        assert not {entry.kind for entry in spec.entries} & set(models.SPLIT)
