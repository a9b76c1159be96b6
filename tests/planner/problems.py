"""Small problems for searches: random cost graphs, a perceptron and an attention as captured layers, without torch."""

from __future__ import annotations

import numpy as np

from minipar.planner.cost_graph import CostGraph, Edge, Node
from minipar.sharding.graph import Graph, Layer, Operator, Tensor


def random_graph(
    seed: int, nodes: int = 6, most: int = 4, chain: bool = False, budget: bool = False, impossible: float = 0.1
) -> CostGraph:
    """Costs are small whole numbers, so that sums are exact. A part of the pairs do not go together."""
    random = np.random.default_rng(seed)
    made = []
    for k in range(nodes):
        count = int(random.integers(1, most + 1))
        seconds, memory = random.integers(0, 20, count), random.integers(0, 10, count)
        made.append(Node(f"n{k}", tuple(map(str, range(count))), tuple(map(float, seconds)), tuple(map(float, memory))))
    edges = []
    for a in range(nodes):
        for b in range(a + 1, nodes):
            if (b == a + 1) if chain else random.random() < 0.4:
                table = random.integers(0, 20, (len(made[a].labels), len(made[b].labels))).astype(float)
                table[random.random(table.shape) < impossible] = np.inf
                edges.append(Edge(a, b, table))
    return CostGraph(tuple(made), tuple(edges), float(random.integers(2 * nodes, 5 * nodes)) if budget else None)


def perceptron(layers: int, rows: int, width: int) -> list[Layer]:
    """Matrix products one behind the other, as one layer; the input needs no gradient."""
    tensors = {"x": Tensor("x", (rows, width), 4, "input", False)}
    operators, given = [], "x"
    for k in range(layers):
        tensors[f"w{k}"] = Tensor(f"w{k}", (width, width), 4, "parameter")
        tensors[f"y{k}"] = Tensor(f"y{k}", (rows, width), 4)
        operators.append(Operator(f"m{k}", "aten::mm", (given, f"w{k}"), (f"y{k}",)))
        given = f"y{k}"
    return [Layer(Graph(tuple(operators), tensors, ("x",), (given,)))]


def blocks(count: int, rows: int, width: int, equal: bool = True) -> list[Layer]:
    """`count` layers of two matrix products with a residual around them; equal ones share a graph."""

    def graph() -> Graph:
        tensors = {
            "x": Tensor("x", (rows, width), 4, "input"),
            "a": Tensor("a", (2 * width, width), 4, "parameter"),
            "b": Tensor("b", (width, 2 * width), 4, "parameter"),
            **{name: Tensor(name, (rows, 2 * width)) for name in ("h", "r")},
            **{name: Tensor(name, (rows, width)) for name in ("y", "z")},
        }
        operators = (
            Operator("up", "aten::linear", ("x", "a"), ("h",)),
            Operator("relu", "aten::relu", ("h",), ("r",)),
            Operator("down", "aten::linear", ("r", "b"), ("y",)),
            Operator("add", "aten::add", ("x", "y"), ("z",)),
        )
        return Graph(operators, tensors, ("x",), ("z",))

    one = graph()
    names = [*one.tensors, *(op.name for op in one.operators)]
    return [Layer(one if equal else graph(), {name: f"{k}.{name}" for name in names}) for k in range(count)]


def attention(rows: int, sequence: int, width: int, heads: int) -> list[Layer]:
    """Queries, keys and values of one input, attention, and the projection behind; no biases."""
    whole, apart = (rows, sequence, width), (rows, sequence, heads, width // heads)
    turned = (rows, heads, sequence, width // heads)
    tensors = {"x": Tensor("x", whole, 4, "input", False)}
    operators = []

    def run(name: str, op: str, given: tuple[str, ...], shape: tuple[int, ...], **options: object) -> str:
        tensors[f"{name}:out"] = Tensor(f"{name}:out", shape)
        operators.append(Operator(name, f"aten::{op}", given, (f"{name}:out",), options))
        return f"{name}:out"

    def weight(name: str) -> str:
        tensors[name] = Tensor(name, (width, width), 4, "parameter")
        return name

    three = []
    for name in "qkv":
        made = run(name, "linear", ("x", weight(f"{name}.weight")), whole)
        made = run(f"{name}.view", "view", (made,), apart)
        three.append(run(f"{name}.turn", "transpose", (made,), turned, dim0=1, dim1=2))
    core = run("core", "scaled_dot_product_attention", tuple(three), turned)
    joined = run("reshape", "reshape", (run("turn", "transpose", (core,), apart, dim0=1, dim1=2),), whole)
    last = run("out", "linear", (joined, weight("out.weight")), whole)
    return [Layer(Graph(tuple(operators), tensors, ("x",), (last,)))]
