"""evaluate() gives the same as a plain torch loop, and changes nothing."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from minipar import PlanError, SaveError, evaluate, train
from minipar.strategies.plan import Plan
from tests.execution.test_updating import MOMENTUM
from tests.toys import rows, toy

cloudpickle.register_pickle_by_value(sys.modules[__name__])

mse, cross_entropy = nn.functional.mse_loss, nn.functional.cross_entropy


def model() -> nn.Sequential:
    """Dropout, running statistics, tuples between layers, a tie."""
    net = toy(("dropout", "tuples", "in-place"), tied=True)
    layers = list(net)
    return nn.Sequential(*layers[:2], nn.BatchNorm1d(6), *layers[2:])


def fixed() -> nn.Sequential:
    torch.manual_seed(3)
    net = model().double()
    net[2].running_mean.normal_()
    return net


def right(output: Tensor, y: Tensor) -> tuple[Tensor, int]:
    return (output.argmax(1) == y).sum(), int((y != -100).sum())


def plainly(net: nn.Module, data: tuple[Tensor, Tensor], loss: Any = cross_entropy) -> tuple[float, float, Tensor]:
    """Mean loss, accuracy and outputs, over all that counts."""
    net = copy.deepcopy(net).eval()
    with torch.no_grad():
        output = net(data[0])
        counts = data[1] != -100
        return loss(output, data[1]).item(), (output.argmax(1) == data[1]).sum().item() / int(counts.sum()), output


PLANS = ["dp=2 pp=2 zero=3 clip=1.0 checkpoint=2", "pp=2 schedule=pipedream", "dp=2 sync=ps"]


@pytest.mark.parametrize("text", PLANS)
def test_it_is_plain_torch_s_loop(clusters, text):
    """29 rows are batches of 8, 8, 8 and 5; six targets, all of one micro-batch among them, do not count."""
    net, data, plan = fixed(), rows(29, classes=True, ignored=6), Plan.parse(text)
    before = copy.deepcopy(net.state_dict())
    found = evaluate(net, data, plan, cluster=clusters(plan.ranks), batch=8, metrics={"accuracy": right}, outputs=True,
                     dtype=torch.float64)  # fmt: skip
    loss, accuracy, output = plainly(net, data)
    assert found.loss == pytest.approx(loss, rel=1e-13)
    assert found.metrics == {"accuracy": pytest.approx(accuracy, rel=1e-15)}
    assert found.count == 23
    assert torch.allclose(found.outputs, output, rtol=0, atol=1e-13)
    assert all(module.training for module in net.modules())
    assert all(torch.equal(values, net.state_dict()[name]) for name, values in before.items())


def test_data_of_every_kind(clusters):
    net, (x, y) = fixed(), rows(29)
    expected = mse(copy.deepcopy(net).eval()(x), y).item()
    go: Any = partial(evaluate, net, cluster=clusters(2), plan="dp=2", loss=mse, dtype=torch.float64)

    class Set:
        def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
            mine = slice(step * size, (step + 1) * size)
            return x[mine], y[mine]

    assert go(data=(x, y), batch=29).loss == pytest.approx(expected, rel=1e-13)
    assert go(data=DataLoader(TensorDataset(x, y), batch_size=7)).loss == pytest.approx(expected, rel=1e-13)
    assert go(data=[(x[:1], y[:1]), (x[1:], y[1:])]).loss == pytest.approx(expected, rel=1e-13)
    assert go(data=Set(), batch=10, batches=3).loss == pytest.approx(expected, rel=1e-13)
    first = mse(copy.deepcopy(net).eval()(x[:10]), y[:10]).item()
    assert go(data=(x, y), batch=10, batches=1).loss == pytest.approx(first, rel=1e-13)
    assert go(data=TensorDataset(x, y), batch=8).loss == pytest.approx(expected, rel=1e-13)
    outputs = go(data=TensorDataset(x, y), batch=64, outputs=True).outputs
    with torch.no_grad():
        assert torch.allclose(outputs, copy.deepcopy(net).eval()(x), rtol=0, atol=1e-13), "in the order of the data"
    for data, message in ((Set(), "say how many batches"), ([], "the data have no rows"), (3, "data=int: possible are"),
                          ([x], "data: a batch is a Tensor, which does not say")):  # fmt: skip
        with pytest.raises(PlanError, match=message):
            go(data=data)
    with pytest.raises(PlanError, match="batches=9: the data have 3"):
        go(data=(x, y), batch=10, batches=9)


def test_the_parameters_of_a_run_a_folder_or_a_state_dict(clusters, tmp_path):
    """Running statistics belong to them; a tie has one name."""
    data = rows(16, classes=True)
    made = partial(toy, ("dropout", "linear"), tied=True)
    run = train(
        made, data, "dp=2 zero=2", cluster=clusters(2), steps=3, optimizer=MOMENTUM, progress=False,
        dtype=torch.float64, save=tmp_path,
    )  # fmt: skip
    from minipar.execution.saving import keeping

    net = made().double()
    net.load_state_dict(keeping.model_in(tmp_path), strict=False)
    expected = plainly(net, data)[0]
    states: list[Any] = [run, tmp_path, str(tmp_path), net.state_dict()]
    for state in states:
        found = evaluate(made, data, "dp=2", state=state, cluster=clusters(2), dtype=torch.float64)
        assert found.loss == pytest.approx(expected, rel=1e-13)
    assert evaluate(made, data, "dp=2", cluster=clusters(2), dtype=torch.float64).loss != pytest.approx(expected)
    go: Any = partial(evaluate, made, data, "", cluster=clusters(1))
    with pytest.raises(SaveError, match=r"state: has 9.weight, but the model has none"):
        go(state={**net.state_dict(), "9.weight": torch.zeros(1)})
    with pytest.raises(SaveError, match=r"state: has no 1.0.weight; give"):
        go(state={name: v for name, v in net.state_dict().items() if name != "1.0.weight"})
    with pytest.raises(SaveError, match=r"state: 0.bias has shape \(7,\) there, and \(6,\) in the model"):
        go(state={**net.state_dict(), "0.bias": torch.zeros(7)})
    with pytest.raises(PlanError, match="state=int: possible are a Run"):
        go(state=3)


def test_the_parameters_of_a_run_with_servers(clusters):
    data, made = rows(16, classes=True), partial(toy, ("linear",))
    run = train(made, data, "dp=2 sync=ps", cluster=clusters(3), steps=2, progress=False, dtype=torch.float64)
    net = made().double()
    net.load_state_dict(run.service.parameters)
    found = evaluate(made, data, "", state=run, cluster=clusters(1), dtype=torch.float64)
    assert found.loss == pytest.approx(plainly(net, data)[0], rel=1e-13)


def test_sums_with_their_counts(clusters):
    """A loss may say itself how much it counts."""
    net, (x, y) = fixed(), rows(29)

    def summed(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return ((output - target) ** 2).sum(), 3 * len(target)

    go: Any = partial(evaluate, net, (x, y), "dp=2", cluster=clusters(2), batch=8, dtype=torch.float64)
    assert go(loss=summed).loss == pytest.approx(2 * go(loss=mse).loss, rel=1e-13)
