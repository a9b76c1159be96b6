"""Which choices of a plan do not go together, and why. Refusals, help and the page are made from this table.

A refusal is fundamental if the two choices contradict each other. All others are not built: a pair of choices is
offered where it needs no code of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minipar.errors import PlanError
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


def _several(key: str) -> KeyValues:
    """2 or more of what a key counts."""
    return KeyValues(key, f"{key} of 2 or more", lambda plan: bool(getattr(plan, key) > 1), f"{key}=1")


def _given(key: str) -> KeyValues:
    """Any value of a key that a plan can do without."""
    return KeyValues(key, key, lambda plan: getattr(plan, key) is not None, f"no {key}=")


def _other(key: str, default: object) -> KeyValues:
    """Any value of a key but its default."""
    return KeyValues(key, key, lambda plan: bool(getattr(plan, key) != default), f"{key}={shown(default)}")


def _one_of(key: str, *values: object, instead: str) -> KeyValues:
    """Some values of a key, whatever numbers they have behind a colon; of a key that is a list, each of them in it."""
    words = set(map(str, values))

    def chosen(plan: Plan) -> bool:
        value = getattr(plan, key)
        if isinstance(value, tuple):
            return not words.isdisjoint(map(str, value))
        return str(value).partition(":")[0] in words

    return KeyValues(key, f"{key}={', '.join(map(str, values))}", chosen, instead)


REPLICAS, STAGES, ROUNDS, IN_STEP = map(_several, ("dp", "pp", "accumulate", "batch_copies"))
OPERATORS, CONTEXT, EXPERTS = SHARERS = tuple(map(_several, ("tp", "context_parallel", "ep")))
SPLIT, CHUNKS, PLACE, MESSAGES = map(_given, ("split", "chunks", "place", "bucket"))
WHOLES = KeyValues(
    "bucket", "bucket=flat, 4x or layers",
    lambda plan: not isinstance(plan.messages, (int, float)) and plan.messages not in ("none", "auto"),
    "bucket=none or a size",
)  # fmt: skip
BEST_SIZE = _one_of("bucket", "auto", instead="bucket=none or a size")
SUMS_AFTER_BACKWARD = _one_of("overlap", "none", "priority", instead="overlap=backward")
PRIORITY = _one_of("overlap", "priority", instead="overlap=backward")
LOCAL, COMPRESSED = _other("local_steps", 0), _other("compress", "none")
SHORTER = _one_of("compress", "bf16", "fp16", instead="compress=topk:0.01, powersgd:1")
LEAVING_OUT = _one_of("compress", "topk", "powersgd", instead="compress=none")
LARGEST = _one_of("compress", "topk", instead="compress=bf16, powersgd:1")
LOW_RANK = _one_of("compress", "powersgd", instead="compress=topk:0.01")
ZERO = _one_of("zero", 1, 2, 3, instead="zero=0")
ZERO_ABOVE_1 = _one_of("zero", 2, 3, instead="zero=1")
ZERO_BELOW_3 = _one_of("zero", 1, 2, instead="zero=0 or zero=3")
INFERENCE, CLIP = _other("inference", False), _other("clip", None)
BF16 = _one_of("precision", "bf16", instead="precision=float32")
OFFLOAD, HOST_LAYERS = _other("offload", ()), _other("host_layers", ())
OFFLOADED_STATES = _one_of("offload", "optimizer", "parameters", instead="offload=activations")
OFFLOADED_PARAMETERS = _one_of("offload", "parameters", instead="offload=optimizer")
SLICED = KeyValues("slices", "slices", lambda plan: plan.slice_count > 1, "no slices=")
SERVERS = _one_of("sync", "ps", instead="sync=allreduce")
ALGORITHM = _other("algorithm", "default")
ASYNCHRONOUS = KeyValues(
    "schedule", "schedule without flushes", lambda plan: plan.asynchronous, "a synchronous schedule such as 1f1b"
)
DYNAMIC = KeyValues(
    "schedule", "schedule that decides as it runs", lambda plan: plan.deciding,
    "a schedule with an order such as pipedream",
)  # fmt: skip
UNSUMMED = KeyValues(
    "schedule", "schedule without flushes, of one replica", lambda plan: plan.asynchronous and plan.dp == 1,
    "dp=2 with a schedule such as pipedream",
)  # fmt: skip
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
_BY_ITSELF = "every replica trains by itself"
_NO_SUMS = "one replica sums no gradients"
_DECIDES = "each rank decides by what has come to it"
_ALIKE = "ranks that share a layer must decide alike: by a message at each decision, which it exists to avoid"
_WHOLE = "parameter servers serve replicas of one rank, which compute a whole model from what they pull"

_FUNDAMENTAL = {
    (PLACE, SPLIT): _PLACES,
    (PLACE, CHUNKS): _PLACES,
    (PLACE, PLACING): _PLACES,
    (PLACE, AROUND): "its groups go around the ranks in turns; ranks whose stages lie in another order would wait for "
    "each other",
    (PLACE, ASYNCHRONOUS): "a rank is ahead by as many micro-batches as stages of a row are behind it; ranks with "
    "layers anywhere take them one after the other",
    (OFFLOADED_PARAMETERS, ZERO_BELOW_3): "it keeps whole parameters on the device",
    (PRIORITY, CLIP): "a layer is updated as soon as its gradient is there, and the norm needs all gradients",
    (PRIORITY, WHOLES): "gradients go in pieces of `bucket` MiB, or whole",
    (COMPRESSED, LOCAL): "replicas send each other no gradients that could be made smaller",
    (SHORTER, BF16): "gradients have 16 bits already",
    (LOCAL, ZERO): f"{_BY_ITSELF}, with whole states",
    (LOCAL, PRIORITY): f"{_BY_ITSELF}, and sends no gradients to others",
    (SERVERS, ZERO): "the servers hold the optimizer's state, and share it out",
    (SERVERS, INFERENCE): "nothing is updated",
    (SERVERS, LOW_RANK): "all ranks sum its factors together, and go on with what they have summed",
    (SERVERS, LOCAL): "updates are made of gradients, and workers that train alone could push differences of "
    "parameters only",
    (REPLICAS, DYNAMIC): f"{_DECIDES}, so the updates of replicas have other micro-batches, and their sums would wait "
    "for each other",
    (ROUNDS, ASYNCHRONOUS): "it updates without rounds: microbatches=, or update_every= of ampnet, say how often",
    (CLIP, ASYNCHRONOUS): "the norm of all gradients is known only after a flush",
    (INFERENCE, ASYNCHRONOUS): "nothing is updated",
    (PRIORITY, ASYNCHRONOUS): "forwards use a version that is there, and wait for no sum",
    **{(sums, UNSUMMED): _NO_SUMS for sums in (COMPRESSED, SUMS_AFTER_BACKWARD, MESSAGES, ALGORITHM)},
    (ALGORITHM, LARGEST): "the largest numbers of all ranks are gathered, and not summed",
    (ALGORITHM, LOCAL): "replicas do not sum their gradients",
    (ALGORITHM, SERVERS): "servers sum the gradients",
    **{(shared, DYNAMIC): f"{_DECIDES}, and {_ALIKE}" for shared in SHARERS},
    (ZERO_ABOVE_1, COPIES): "the copies of a stage work at different times, and would wait for each other's slices",
}
_NOT_BUILT = {
    **{(SERVERS, other): _WHOLE for other in (STAGES, OPERATORS, CONTEXT, EXPERTS, ASYNCHRONOUS)},
    **{(SERVERS, other): _WHOLE for other in (PRIORITY, OFFLOAD, HOST_LAYERS, SLICED)},
    **{(shared, ASYNCHRONOUS): "versions of parameters are those of whole layers" for shared in SHARERS},
    **{(shared, LOCAL): "ranks that share layers take their steps together" for shared in SHARERS},
    **{
        (shared, LEAVING_OUT): "what is left out of a gradient is kept by ranks that have all of it"
        for shared in (CONTEXT, EXPERTS)
    },
    **{(shared, HOST_LAYERS): "layers on the host are whole" for shared in (CONTEXT, EXPERTS)},
    (ZERO, ASYNCHRONOUS): "every rank keeps whole versions of its parameters",
    (OFFLOAD, ASYNCHRONOUS): "versions of parameters, and what uses them, stay on the device",
    (HOST_LAYERS, ASYNCHRONOUS): "versions of parameters are on the device",
    (LOCAL, ASYNCHRONOUS): "replicas sum the gradients of every update",
    (LEAVING_OUT, ASYNCHRONOUS): "sums carry all of a gradient",
    (PRIORITY, ZERO): "it orders sums of whole gradients",
    (PRIORITY, BEST_SIZE): "its size is found for sums that end with the step",
    (PRIORITY, COMPRESSED): "pieces of gradients are sent as they are",
    (PRIORITY, ALGORITHM): "ranks play an algorithm's program themselves, and compute nothing meanwhile",
    (COMPRESSED, ZERO): "slices of gradients are summed as they are",
    (ALGORITHM, ZERO): "slices are summed and gathered by the default algorithm",
    (LEAVING_OUT, BF16): "its messages are of numbers in the model's own type",
    (LOCAL, OFFLOADED_STATES): "parameters are averaged on the device",
    (LOCAL, COPIES): "the copies of a stage are updated together, in every step",
    (LOCAL, CLIP): "the norm is of the gradients of all replicas",
    (HOST_LAYERS, ZERO): "layers on the host keep whole states there",
    (HOST_LAYERS, OFFLOADED_STATES): "their states are on the host already",
    (HOST_LAYERS, OFFLOADED_PARAMETERS): "their parameters are on the host already",
    (HOST_LAYERS, REPLICAS): "gradients are summed on the device",
    (HOST_LAYERS, STAGES): "what stages send each other is on the device",
    (IN_STEP, STAGES): "micro-batches go in step on ranks that wait for no other stage",
    (IN_STEP, ZERO): "slices of gradients are summed micro-batch by micro-batch",
}
EXCLUSIONS = tuple(
    Exclusion(one, other, why, fundamental)
    for pairs, fundamental in ((_FUNDAMENTAL, True), (_NOT_BUILT, False))
    for (one, other), why in pairs.items()
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
        raise PlanError("checkpoint=operators: is estimated and exported, but not run; possible are selective or 1")
    for row in EXCLUSIONS:
        late = row.one.after_compile or row.other.after_compile
        if late is compiled and row.one.chosen(plan) and row.other.chosen(plan):
            raise Excluded(plan, row)


def check_needs(plan: Plan, key: str, default: object, need: Need) -> None:
    """Refuse a key that says how to do something that the plan does not do: no key is ignored silently."""
    value = getattr(plan, key)
    if value != default and not need.there(plan):
        raise PlanError(f"{key}={shown(value)}: is of {need.what}; possible is {need.possible}")
