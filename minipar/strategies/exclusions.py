"""Which choices of a plan do not go together, and why. Refusals, help and the page are made from this table.

A refusal is fundamental if the two choices contradict each other. All others are not built: a pair of choices is
offered where it needs no code of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minipar.errors import PlanError
from minipar.program import PRECISIONS
from minipar.strategies.layout import looped
from minipar.strategies.schedules.registry import find
from minipar.strategies.segments import text

if TYPE_CHECKING:
    from minipar.strategies.plan import Plan


@dataclass(frozen=True)
class KeyValues:
    """Some of the values of a key.

    words     the values, described for a table
    chosen    whether a plan has made this choice
    instead   what is possible in its place
    after_compile   whether only the schedule's actions show it, so that only `Plan.compile` can check it
    """

    key: str
    words: str
    chosen: Callable[[Plan], bool]
    instead: str
    after_compile: bool = False

    def written(self, plan: Plan) -> str:
        """The key with the value that the plan gives it."""
        return f"{self.key}={shown(getattr(plan, self.key))}"


@dataclass(frozen=True)
class Exclusion:
    """Two choices that a plan cannot have together."""

    one: KeyValues
    other: KeyValues
    why: str
    fundamental: bool = False

    @property
    def possible(self) -> str:
        """What is possible in place of one of the two choices."""
        return f"{self.other.instead} or {self.one.instead}"

    @property
    def kind(self) -> str:
        """Why it is refused: the two contradict each other, or nobody has built it."""
        return "fundamental" if self.fundamental else "not built"


class Excluded(PlanError):
    """A plan has two choices that do not go together: a `row` of the table."""

    def __init__(self, plan: Plan, row: Exclusion) -> None:
        super().__init__(
            f"{row.one.written(plan)}: not together with {row.other.written(plan)} ({row.why}; {row.kind}); "
            f"possible is {row.possible}"
        )
        self.row = row


@dataclass(frozen=True)
class Need:
    """What a key needs in a plan. Without it any value but the default is refused, because it would have no effect.

    example   words of a plan that has it
    """

    what: str
    there: Callable[[Plan], bool]
    possible: str
    example: str


def shown(value: object) -> str:
    """A value as it is written in a plan's words."""
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return ";".join(f"{pattern}={form}" for pattern, form in value).replace(" on ", "@").replace(" ", "")
    if isinstance(value, tuple):
        return text(value) if value and isinstance(value[0], int) else ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# choices --------------------------------------------------------------------------------------------------------------

REPLICAS = KeyValues("dp", "dp of 2 or more", lambda plan: plan.dp > 1, "dp=1")
STAGES = KeyValues("pp", "pp of 2 or more", lambda plan: plan.pp > 1, "pp=1")
ROUNDS = KeyValues("accumulate", "accumulate of 2 or more", lambda plan: plan.accumulate > 1, "accumulate=1")
SPLIT = KeyValues("split", "split", lambda plan: plan.split is not None, "no split=")
CHUNKS = KeyValues("chunks", "chunks", lambda plan: plan.chunks is not None, "no chunks=")
PLACE = KeyValues("place", "place", lambda plan: plan.place is not None, "no place=")
MESSAGES = KeyValues("bucket", "bucket", lambda plan: plan.bucket is not None, "no bucket=")
WHOLES = KeyValues(
    "bucket", "bucket=flat, 4x or layers",
    lambda plan: not isinstance(plan.messages, (int, float)) and plan.messages not in ("none", "auto"),
    "bucket=none or a size",
)  # fmt: skip
BEST_SIZE = KeyValues("bucket", "bucket=auto", lambda plan: plan.bucket == "auto", "bucket=none or a size")
SUMS_AFTER_BACKWARD = KeyValues(
    "overlap", "overlap=none, priority", lambda plan: plan.overlap != "backward", "overlap=backward"
)  # fmt: skip
PRIORITY = KeyValues("overlap", "overlap=priority", lambda plan: plan.overlap == "priority", "overlap=backward")
LOCAL = KeyValues("local_steps", "local_steps", lambda plan: plan.local_steps > 0, "local_steps=0")
COMPRESSED = KeyValues("compress", "compress", lambda plan: plan.compress != "none", "compress=none")
SHORTER = KeyValues(
    "compress", "compress=bf16, fp16", lambda plan: plan.compress in ("bf16", "fp16"), "compress=topk:0.01, powersgd:1"
)
LEAVING_OUT = KeyValues(
    "compress", "compress=topk, powersgd", lambda plan: plan.compress.startswith(("topk", "powersgd")), "compress=none"
)
LARGEST = KeyValues(
    "compress", "compress=topk", lambda plan: plan.compress.startswith("topk"), "compress=bf16, powersgd:1"
)
LOW_RANK = KeyValues(
    "compress", "compress=powersgd", lambda plan: plan.compress.startswith("powersgd"), "compress=topk:0.01"
)
ZERO = KeyValues("zero", "zero=1, 2, 3", lambda plan: plan.zero > 0, "zero=0")
ZERO_ABOVE_1 = KeyValues("zero", "zero=2, 3", lambda plan: plan.zero > 1, "zero=1")
ZERO_BELOW_3 = KeyValues("zero", "zero=1, 2", lambda plan: plan.zero in (1, 2), "zero=0 or zero=3")
INFERENCE = KeyValues("inference", "inference", lambda plan: plan.inference, "inference=false")
CLIP = KeyValues("clip", "clip", lambda plan: plan.clip is not None, "clip=none")
BF16 = KeyValues("precision", "precision=bf16", lambda plan: bool(PRECISIONS[plan.precision]), "precision=float32")
OFFLOAD = KeyValues("offload", "offload", lambda plan: bool(plan.offload), "offload=none")
OFFLOADED_STATES = KeyValues(
    "offload", "offload=optimizer, parameters", lambda plan: bool({"optimizer", "parameters"} & {*plan.offload}),
    "offload=activations",
)  # fmt: skip
OFFLOADED_PARAMETERS = KeyValues(
    "offload", "offload=parameters", lambda plan: "parameters" in plan.offload, "offload=optimizer"
)
HOST_LAYERS = KeyValues("host_layers", "host_layers", lambda plan: bool(plan.host_layers), "host_layers=none")
SLICED = KeyValues("slices", "slices", lambda plan: plan.slice_count > 1, "no slices=")
OPERATORS = KeyValues("tp", "tp of 2 or more", lambda plan: plan.tp > 1, "tp=1")
CONTEXT = KeyValues(
    "context_parallel", "context_parallel of 2 or more", lambda plan: plan.context_parallel > 1, "context_parallel=1"
)
EXPERTS = KeyValues("ep", "ep of 2 or more", lambda plan: plan.ep > 1, "ep=1")
SERVERS = KeyValues("sync", "sync=ps", lambda plan: plan.sync == "ps", "sync=allreduce")
ALGORITHM = KeyValues("algorithm", "algorithm", lambda plan: plan.algorithm != "default", "algorithm=default")
ASYNCHRONOUS = KeyValues(
    "schedule", "schedule without flushes", lambda plan: plan.asynchronous, "a synchronous schedule such as 1f1b"
)
DYNAMIC = KeyValues(
    "schedule",
    "schedule that decides as it runs",
    lambda plan: plan.deciding,
    "a schedule with an order such as pipedream",
)
UNSUMMED = KeyValues(
    "schedule",
    "schedule without flushes, of one replica",
    lambda plan: plan.asynchronous and plan.dp == 1,
    "dp=2 with a schedule such as pipedream",
)


IN_STEP = KeyValues("batch_copies", "batch_copies of 2 or more", lambda plan: plan.batch_copies > 1, "batch_copies=1")
COPIES = KeyValues(
    "schedule", "schedule with copies of a stage", lambda plan: plan.copies,
    "a schedule of one copy such as 1f1b", after_compile=True,
)  # fmt: skip


PLACING = KeyValues(
    "schedule", "schedule that places stages", lambda plan: find(plan.schedule).placement is not looped,
    "naive, gpipe, 1f1b, looped-bfs, zb-h1",
)  # fmt: skip
AROUND = KeyValues(
    "schedule", "schedule of groups of micro-batches", lambda plan: "group" in find(plan.schedule).options,
    "naive, gpipe, 1f1b, looped-bfs, zb-h1",
)  # fmt: skip


# the table ------------------------------------------------------------------------------------------------------------

_PLACES = "each says which rank has which layers"
_AT_ONCE = "a layer is updated as soon as its gradient is there"
_BY_ITSELF = "every replica trains by itself"
_NO_SUMS = "one replica sums no gradients"
_DECIDES_LOCALLY = (
    "each rank decides by what has come to it, and ranks that share a layer must decide alike: by a message at each "
    "decision, which it exists to avoid"
)
_REPLICAS_DECIDE_LOCALLY = (
    "each rank decides by what has come to it, so the updates of replicas have other micro-batches, and their sums "
    "would wait for each other"
)
_WHOLE = "parameter servers serve replicas of one rank, which compute a whole model from what they pull"
_NOT_ON_SERVERS = (
    STAGES, OPERATORS, CONTEXT, EXPERTS, ASYNCHRONOUS, PRIORITY, OFFLOAD, HOST_LAYERS, SLICED
)  # fmt: skip

EXCLUSIONS = (
    Exclusion(PLACE, SPLIT, _PLACES, fundamental=True),
    Exclusion(PLACE, CHUNKS, _PLACES, fundamental=True),
    Exclusion(PLACE, PLACING, _PLACES, fundamental=True),
    Exclusion(
        PLACE,
        AROUND,
        "its groups go around the ranks in turns; ranks whose stages lie in another order would wait for each other",
        fundamental=True,
    ),
    Exclusion(
        PLACE,
        ASYNCHRONOUS,
        "a rank is ahead by as many micro-batches as stages of a row are behind it; ranks with layers anywhere take "
        "them one after the other",
        fundamental=True,
    ),
    Exclusion(OFFLOADED_PARAMETERS, ZERO_BELOW_3, "it keeps whole parameters on the device", fundamental=True),
    Exclusion(PRIORITY, CLIP, f"{_AT_ONCE}, and the norm needs all gradients", fundamental=True),
    Exclusion(PRIORITY, WHOLES, "gradients go in pieces of `bucket` MiB, or whole", fundamental=True),
    Exclusion(COMPRESSED, LOCAL, "replicas send each other no gradients that could be made smaller", fundamental=True),
    Exclusion(SHORTER, BF16, "gradients have 16 bits already", fundamental=True),
    Exclusion(LOCAL, ZERO, f"{_BY_ITSELF}, with whole states", fundamental=True),
    Exclusion(LOCAL, PRIORITY, f"{_BY_ITSELF}, and sends no gradients to others", fundamental=True),
    Exclusion(SERVERS, ZERO, "the servers hold the optimizer's state, and share it out", fundamental=True),
    Exclusion(SERVERS, INFERENCE, "nothing is updated", fundamental=True),
    Exclusion(
        SERVERS, LOW_RANK, "all ranks sum its factors together, and go on with what they have summed", fundamental=True
    ),
    Exclusion(
        SERVERS,
        LOCAL,
        "updates are made of gradients, and workers that train alone could push differences of parameters only",
        fundamental=True,
    ),
    Exclusion(REPLICAS, DYNAMIC, _REPLICAS_DECIDE_LOCALLY, fundamental=True),
    Exclusion(
        ROUNDS,
        ASYNCHRONOUS,
        "it updates without rounds: microbatches=, or update_every= of ampnet, say how often",
        fundamental=True,
    ),
    Exclusion(CLIP, ASYNCHRONOUS, "the norm of all gradients is known only after a flush", fundamental=True),
    Exclusion(INFERENCE, ASYNCHRONOUS, "nothing is updated", fundamental=True),
    Exclusion(PRIORITY, ASYNCHRONOUS, "forwards use a version that is there, and wait for no sum", fundamental=True),
    Exclusion(COMPRESSED, UNSUMMED, _NO_SUMS, fundamental=True),
    Exclusion(SUMS_AFTER_BACKWARD, UNSUMMED, _NO_SUMS, fundamental=True),
    Exclusion(MESSAGES, UNSUMMED, _NO_SUMS, fundamental=True),
    Exclusion(ALGORITHM, UNSUMMED, _NO_SUMS, fundamental=True),
    Exclusion(ALGORITHM, LARGEST, "the largest numbers of all ranks are gathered, and not summed", fundamental=True),
    Exclusion(ALGORITHM, LOCAL, "replicas do not sum their gradients", fundamental=True),
    Exclusion(ALGORITHM, SERVERS, "servers sum the gradients", fundamental=True),
    *(Exclusion(SERVERS, other, _WHOLE, fundamental=False) for other in _NOT_ON_SERVERS),
    *(
        Exclusion(shared, other, why, fundamental)
        for shared in (OPERATORS, CONTEXT, EXPERTS)
        for other, why, fundamental in (
            (DYNAMIC, _DECIDES_LOCALLY, True),
            (ASYNCHRONOUS, "versions of parameters are those of whole layers", False),
            (LOCAL, "ranks that share layers take their steps together", False),
        )
    ),
    *(
        Exclusion(shared, other, why)
        for shared in (CONTEXT, EXPERTS)
        for other, why in (
            (LEAVING_OUT, "what is left out of a gradient is kept by ranks that have all of it"),
            (HOST_LAYERS, "layers on the host are whole"),
        )
    ),
    *(
        Exclusion(one, ASYNCHRONOUS, why)
        for one, why in (
            (ZERO, "every rank keeps whole versions of its parameters"),
            (OFFLOAD, "versions of parameters, and what uses them, stay on the device"),
            (HOST_LAYERS, "versions of parameters are on the device"),
            (LOCAL, "replicas sum the gradients of every update"),
            (LEAVING_OUT, "sums carry all of a gradient"),
        )
    ),
    *(
        Exclusion(PRIORITY, other, why)
        for other, why in (
            (ZERO, "it orders sums of whole gradients"),
            (BEST_SIZE, "its size is found for sums that end with the step"),
            (COMPRESSED, "pieces of gradients are sent as they are"),
            (ALGORITHM, "ranks play an algorithm's program themselves, and compute nothing meanwhile"),
        )
    ),
    *(
        Exclusion(other, ZERO, why)
        for other, why in (
            (COMPRESSED, "slices of gradients are summed as they are"),
            (ALGORITHM, "slices are summed and gathered by the default algorithm"),
        )
    ),
    Exclusion(LEAVING_OUT, BF16, "its messages are of numbers in the model's own type"),
    *(
        Exclusion(LOCAL, other, why)
        for other, why in (
            (OFFLOADED_STATES, "parameters are averaged on the device"),
            (COPIES, "the copies of a stage are updated together, in every step"),
            (CLIP, "the norm is of the gradients of all replicas"),
        )
    ),
    *(
        Exclusion(HOST_LAYERS, other, why)
        for other, why in (
            (ZERO, "layers on the host keep whole states there"),
            (OFFLOADED_STATES, "their states are on the host already"),
            (OFFLOADED_PARAMETERS, "their parameters are on the host already"),
            (REPLICAS, "gradients are summed on the device"),
            (STAGES, "what stages send each other is on the device"),
        )
    ),
    *(
        Exclusion(IN_STEP, other, why)
        for other, why in (
            (STAGES, "micro-batches go in step on ranks that wait for no other stage"),
            (ZERO, "slices of gradients are summed micro-batch by micro-batch"),
        )
    ),
    Exclusion(
        ZERO_ABOVE_1,
        COPIES,
        "the copies of a stage work at different times, and would wait for each other's slices",
        fundamental=True,
    ),
)

SHARED = Need("ranks that share layers", lambda plan: plan.sharing > 1, "tp=2", "tp=2")
SHARED_BY_SEVERAL = Need(
    "ranks that share layers, with several micro-batches each",
    lambda plan: plan.sharing > 1 and plan.total_microbatches > 1,
    "tp=2 with microbatches=2",
    "tp=2 microbatches=2",
)
SERVED = Need("parameter servers", SERVERS.chosen, "sync=ps", "sync=ps")
SHARDED_GRADIENTS = Need("sharded gradients", lambda plan: plan.zero >= 2, "zero=2, zero=3", "zero=2")
GATHERED = Need(
    "parameters that come layer by layer",
    lambda plan: plan.zero == 3 or "parameters" in plan.offload or plan.prefetch == 0,  # (0 has no effect anyway)
    "zero=3, offload=parameters",
    "zero=3",
)
AWAY = Need("what is offloaded", OFFLOAD.chosen, "offload=activations, optimizer, parameters", "offload=optimizer")
ON_DISK = Need(
    "what is offloaded to the disk",
    lambda plan: bool(plan.offload) and plan.offload_to == "disk",
    "offload_to=disk with offload=",
    "offload=optimizer offload_to=disk",
)


def check(plan: Plan, compiled: bool = False) -> None:
    """Refuse the first two choices of a plan that do not go together; with `compiled` only those that its actions
    show."""
    if compiled and plan.checkpoint == "operators":
        raise PlanError(
            "checkpoint=operators: is estimated and exported, but does not run here; possible are selective or 1"
        )
    for row in EXCLUSIONS:
        both = row.one, row.other
        if any(choice.after_compile for choice in both) is compiled and all(choice.chosen(plan) for choice in both):
            raise Excluded(plan, row)


def check_needs(plan: Plan, key: str, default: object, need: Need) -> None:
    """Refuse a key that says how to do something that the plan does not do: no key is ignored silently."""
    value = getattr(plan, key)
    if value != default and not need.there(plan):
        raise PlanError(f"{key}={shown(value)}: is of {need.what}; possible is {need.possible}")
