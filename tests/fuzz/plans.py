"""Random plans over all keys, as text: `draw(dice, facts)` gives a dict of key to text.

They respect what a schedule needs (how many micro-batches, an even number of ranks) and what goes together, so that
most of them run.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

Words = dict[str, str]
WHOLE = ("naive", "gpipe", "1f1b", "eager-1f1b")
CHUNKED = ("interleaved", "looped-bfs", "zb-v", "dualpipe-v")
BOTH_WAYS = ("chimera", "dualpipe")
SPLIT = ("zb-h1", "zb-h2")
STALE = ("pipedream", "pipedream-vertical", "pipedream-2bw", "ampnet")
SCHEDULES = ("1f1b",) * 3 + WHOLE + CHUNKED * 2 + BOTH_WAYS * 2 + SPLIT * 3 + STALE
MOST_RANKS = 4


@dataclass(frozen=True)
class Facts:
    """What a plan is drawn for: how many layers, if they branch, in how many tokens a sequence can be cut (0: not)."""

    layers: int
    branches: bool = False
    tokens: int = 0
    unsplit: bool = False
    core: bool = False  # whether checkpoint=selective finds something
    narrow: bool = True  # whether torch can do it in bfloat16


def text(words: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in words.items())


def draw(dice: random.Random, facts: Facts) -> Words:
    """A random plan."""
    if facts.unsplit:
        return _unsplit(dice, facts)
    if dice.random() < 0.08:
        return _served(dice, facts)
    words: Words = {}
    schedule = dice.choice(["terapipe", "seq1f1b"]) if facts.tokens else dice.choice(SCHEDULES)
    pp = min(dice.choice([1, 2, 2, 2, 4, 4, 3]), facts.layers)
    chunks = 2 if schedule in CHUNKED else 1
    if schedule in BOTH_WAYS:
        pp, chunks = (4 if pp > 2 else 2), 1
        if facts.layers < pp:
            pp = 2
    while pp * chunks > facts.layers and pp > 1:
        pp -= 1
    if pp * chunks > facts.layers:
        schedule, chunks = "1f1b", 1
    if schedule in BOTH_WAYS and pp > facts.layers:
        schedule, pp = "gpipe", 1
    if schedule in ("interleaved", "looped-bfs") and pp * 3 <= facts.layers and dice.random() < 0.4:
        chunks = 3
        words["chunks"] = "3"
    dp = 1 if schedule == "ampnet" else dice.choice([n for n in (1, 1, 2, 2, 3, 4) if n * pp <= MOST_RANKS])
    m = dice.choice([1, 2, 2, 3, 3, 4, 4, 5, 6])
    m = {"interleaved": -(-m // pp) * pp, "chimera": -(-m // pp) * pp, "zb-h2": max(m, 2 * pp - 1),
         "dualpipe": max(m + m % 2, 2 * pp), "dualpipe-v": max(m, 2 * pp),
         "pipedream-2bw": max(m, pp - 1)}.get(schedule, m)  # fmt: skip
    words = {"dp": str(dp), "pp": str(pp), "schedule": schedule, "microbatches": str(m), **words}
    if schedule == "chimera" and m >= 2 * pp and m % (2 * pp) == 0 and dice.random() < 0.5:
        words["doubling"] = "true"
    if schedule == "interleaved" and dice.random() < 0.4:
        words["group"] = str(dice.choice([g for g in range(pp, m + 1) if m % g == 0 or m % g >= pp]))
    if schedule == "ampnet":
        words |= {"in_flight": str(dice.randint(1, 4)), "update_every": str(dice.randint(1, 3))}
    if facts.tokens:
        words["slices"] = _slices(dice, facts.tokens)
    if dice.random() < 0.3:
        words["split"] = _split(dice, facts.layers, pp * chunks)
    elif dice.random() < 0.1:
        words["split"] = "auto"
    elif (
        schedule in ("naive", "gpipe", "1f1b", "looped-bfs", "zb-h1")
        and "chunks" not in words
        and dice.random() < (0.4 if facts.branches else 0.1)
    ):
        words["place"] = _place(dice, facts, pp)
    if dice.random() < 0.4:
        words["checkpoint"] = _checkpoint(dice, facts)
    if schedule in STALE:
        return words | _stale(dice, facts, schedule, dp)
    if dice.random() < 0.15:
        words["accumulate"] = dice.choice(["2", "3"])
    special = dice.choice(["", "", "", "", "", "", "priority", "local", "bf16", "inference", "compress", "host"])
    if facts.tokens and special in ("bf16", "inference"):
        special = ""
    buckets = ["none", "none", "flat", "0.0001", "0.00005", "25", "2x", "3x", "auto", _some(dice, facts.layers)]
    if dice.random() < 0.7:
        words["bucket"] = dice.choice(["none", "0.0001", "0.01"] if special == "priority" else buckets)
    if dice.random() < 0.2:
        words["overlap"] = "none"
    both = schedule in BOTH_WAYS
    if special == "priority":
        words["overlap"] = "priority"
    if special == "local" and dp > 1 and pp == 1:
        words["local_steps"] = dice.choice(["1", "2", "3"])
    if special == "bf16" and not facts.narrow:
        special = ""
    if special == "bf16":
        words["precision"] = "bf16"
    if special == "inference":
        words["inference"] = "true"
    if special == "compress":
        words["compress"] = dice.choice(["bf16", "fp16", "topk:0.5", "topk:0.01", "powersgd:1", "powersgd:2"])
    if special in ("", "bf16", "inference") and dice.random() < 0.45:
        words["zero"] = "1" if both else dice.choice(["1", "2", "3", "3"])
        if not both and dice.random() < 0.4:
            words["reduce"] = dice.choice(["microbatch", "step"])
        if dice.random() < 0.5:
            words["prefetch"] = str(dice.randint(0, 3))
    if special != "host" and dice.random() < 0.3:
        words |= _offload(dice, words.get("zero", "0"), special)
    if special == "host" and dp * pp == 1:
        words["host_layers"] = ",".join(
            map(str, sorted(dice.sample(range(facts.layers), min(facts.layers, dice.randint(1, 2)))))
        )
    if special == "" and dp > 1 and "zero" not in words and dice.random() < 0.1:
        algorithms = ["ring", "tree", "double-tree", "halving-doubling", "hierarchical", "direct"]
        words["algorithm"] = dice.choice(algorithms)
    if special in ("", "host", "bf16") and dice.random() < 0.12:
        words["clip"] = dice.choice(["0.001", "0.1", "100"])
    return words


def _stale(dice: random.Random, facts: Facts, schedule: str, dp: int) -> Words:
    """Of a schedule without flushes: what replicas send, and what else goes with it."""
    words: Words = {}
    if dp > 1:
        if dice.random() < 0.7:
            words["bucket"] = dice.choice(["none", "flat", "0.0001", "25", "2x", "auto", _some(dice, facts.layers)])
        if dice.random() < 0.2:
            words["overlap"] = "none"
        if dice.random() < 0.2:
            words["compress"] = dice.choice(["bf16", "fp16"])
    if facts.narrow and "compress" not in words and dice.random() < 0.15:
        words["precision"] = "bf16"
    return words


def _unsplit(dice: random.Random, facts: Facts) -> Words:
    """One micro-batch, one replica: then layers that feel how a batch is split must be exact, too."""
    schedule = dice.choice(["naive", "gpipe", "1f1b", "looped-bfs", "zb-h1", "zb-v"])
    chunks = 2 if schedule in CHUNKED else 1
    pp = dice.choice([1, 2, 3, 4])
    while pp * chunks > facts.layers and pp > 1:
        pp -= 1
    if pp * chunks > facts.layers:
        schedule, chunks = "1f1b", 1
    words = {"dp": "1", "pp": str(pp), "schedule": schedule}
    if dice.random() < 0.5:
        words["checkpoint"] = _checkpoint(dice, facts)
    if dice.random() < 0.3:
        words["split"] = _split(dice, facts.layers, pp * chunks)
    if dice.random() < 0.4:
        words["bucket"] = dice.choice(["none", "flat", "0.0001"])
    if dice.random() < 0.25:
        words |= _offload(dice, "0", "")
    return words


def _served(dice: random.Random, facts: Facts) -> Words:
    dp = dice.choice([1, 2, 2, 3])
    servers = dice.choice([1, 2]) if dp < 3 else 1
    k = dice.randint(1, dp)
    mode = dice.choice(["sync", "sync", "async", "ssp:0", "ssp:1", f"k-of-n:{k}/{dp}"])
    words = {
        "dp": str(dp),
        "sync": "ps",
        "servers": str(servers),
        "mode": mode,
        "microbatches": str(dice.randint(1, 3)),
    }
    if dice.random() < 0.3:
        words["checkpoint"] = _checkpoint(dice, facts)
    if dice.random() < 0.4:
        words["bucket"] = dice.choice(["none", "flat", "0.0001", "2x"])
    if dice.random() < 0.2:
        words["overlap"] = "none"
    if dice.random() < 0.2:
        words["on_death"] = "continue"
    if dice.random() < 0.2:
        words["schedule"] = dice.choice(["zb-h1", "gpipe"])
    if dice.random() < 0.25:
        words["clip"] = dice.choice(["0.001", "0.1", "100"])
    special = dice.choice(["", "", "", "compress", "bf16"])
    if special == "compress":
        words["compress"] = dice.choice(["bf16", "fp16", "topk:0.5", "topk:0.01"])
    if special == "bf16" and facts.narrow:
        words["precision"] = "bf16"
    return words


def _offload(dice: random.Random, zero: str, special: str) -> Words:
    possible = ["activations", "optimizer", "parameters"]
    if special == "local":
        possible = ["activations"]
    elif zero in ("1", "2") or special == "priority":
        possible.remove("parameters")
    chosen = dice.sample(possible, dice.randint(1, len(possible)))
    words = {"offload": ",".join(chosen)}
    if dice.random() < 0.4:
        words["offload_to"] = "disk"
    if dice.random() < 0.05:
        words["offload_limit"] = dice.choice(["64MiB", "200B"])
    return words


def _checkpoint(dice: random.Random, facts: Facts) -> str:
    layers = facts.layers
    if facts.core and dice.random() < 0.4:
        return "selective"
    counts = [str(k) for k in (1, 1, 2, 2, 3) if k <= layers]
    starts = [_some(dice, layers, 1)] if layers > 1 else []
    return dice.choice([*counts, "sqrt", "64MiB", "20KiB", *starts])


def _some(dice: random.Random, layers: int, least: int = 0) -> str:
    chosen = sorted(dice.sample(range(least, layers), dice.randint(1, layers - least)))
    return ",".join(map(str, chosen)) + ("," if len(chosen) == 1 else "")


def _split(dice: random.Random, layers: int, stages: int) -> str:
    cuts = [0, *sorted(dice.sample(range(1, layers), stages - 1)), layers]
    return ",".join(str(b - a) for a, b in pairwise(cuts))


def _slices(dice: random.Random, tokens: int) -> str:
    count = dice.randint(2, tokens)
    return str(count) if dice.random() < 0.5 else _split(dice, tokens, count)


def _place(dice: random.Random, facts: Facts, pp: int) -> str:
    if facts.branches and dice.random() < 0.4:
        return "branches"
    chosen = [*range(pp), *(dice.randrange(pp) for _ in range(facts.layers - pp))]
    if dice.random() < 0.7:
        dice.shuffle(chosen)
    return ",".join(map(str, chosen))
