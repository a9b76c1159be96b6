"""How a key of a plan is said to another system: rules, which return settings of that system or refuse.

A rule is a function of what is given, for one key. A system has a table of rules by key. Of a key that has its default
only those rules are asked that the system names. A key without a rule must have its default. So a key that is new is
refused by every system until somebody adds a rule.

What a plan says and a system cannot do is refused. What the plan leaves at its default, and only time or memory depend
on, is the system's own choice then; a note says where it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from minipar.errors import PlanError
from minipar.models.sizes import Sizes, Transformer, sizes
from minipar.models.table import Preset
from minipar.program.shape import uniform
from minipar.strategies.exclusions import shown

if TYPE_CHECKING:
    from minipar.strategies.plan import Plan


@dataclass(frozen=True)
class Export:
    """A plan as another system's flags or configuration.

    system   the name of the system
    version  the version of it whose parser the names were checked against
    values   for Megatron-LM a list of flags, for the others the table that the text holds
    text     what the system reads: a command line, JSON or TOML
    launch   the command that starts it; words in capitals stand for what is yours
    notes    what the text cannot say, and what the system does otherwise than minipar; one sentence each
    """

    system: str
    version: str
    values: list[str] | dict[str, Any]
    text: str
    launch: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Given:
    """What a rule is asked: a plan, one of its keys, and the run that it is for.

    system   as errors call it
    rows     rows of one micro-batch on one of the ranks that have other rows
    batch    rows of a step
    nodes    machines, each with `gpus` ranks
    model    the numbers of the model, if they were given
    """

    system: str
    plan: Plan
    rows: int
    batch: int
    nodes: int
    gpus: int
    model: Preset | Sizes | None = None
    key: str = ""

    @property
    def value(self) -> Any:
        """The plan's value of the key."""
        return getattr(self.plan, self.key)

    @property
    def is_default(self) -> bool:
        """Whether the plan says nothing of the key."""
        return bool(self.value == {one.name: one.default for one in fields(self.plan)}[self.key])

    @property
    def transformer(self) -> Transformer | None:
        """The sizes of a model that is one."""
        found = None if self.model is None else sizes(self.model)
        return found if isinstance(found, Transformer) else None

    @property
    def replicas(self) -> int:
        """Ranks with other rows. The other systems count ranks that share experts as replicas."""
        return self.plan.dp * self.plan.ep

    def refuse(self, why: str, possible: str) -> PlanError:
        """The error of a value that the system cannot express."""
        return PlanError(f"{self.key}={shown(self.value)}: {self.system} {why}; possible is {possible}")

    def layers_of_stages(self) -> tuple[int, ...] | None:
        """Layers of each stage, embedding and head included; None if nobody said how many the model has."""
        if self.plan.place is not None:
            return None  # (no system has it: it is refused as a key)
        if self.transformer is not None:
            count = self.transformer.layers + 2
        elif isinstance(self.plan.split, tuple):
            count = sum(self.plan.split)
        else:
            return None
        return self.plan.layout(uniform(count)).split


@dataclass(frozen=True)
class Item:
    """The settings of a system for one key, and notes."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


Rule = Callable[[Given], Item]

NOTHING_LIKE_IT = {
    "annotations": "divides layers by rules of its own",
    "place": "has stages of neighbouring layers",
    "local_steps": "sums gradients in every step",
    "inference": "is told here how it trains",
    "offload_limit": "sets no limit to what waits on the host",
    "host_layers": "computes all layers on the device",
    "sync": "has no parameter servers",
    "algorithm": "leaves the sums to NCCL",
    "extra_passes": "knows no passes of yours",
    "batch_copies": "takes one micro-batch after another through a layer",
    "compress": "sums whole gradients",
}


def absent(given: Given) -> Item:
    """The rule of a key that the system does not have: only the default is possible."""
    default = {one.name: one.default for one in fields(given.plan)}[given.key]
    possible = f"no {given.key}=" if default is None else f"{given.key}={shown(default)}"
    raise given.refuse(NOTHING_LIKE_IT.get(given.key, "has nothing like it"), possible)


def silent(given: Given) -> Item:
    """The rule of a key that other settings say."""
    return Item()


def setting(name: str) -> Rule:
    """The rule of a key whose value the system takes under another name."""
    return lambda given: Item({name: given.value})


def only_default(why: str, possible: str) -> Rule:
    """The rule of a key of which the system has one value, the default, which it needs not be told."""

    def rule(given: Given) -> Item:
        raise given.refuse(why, possible)

    return rule


HOST_ONLY = only_default("has no other place than the host", "offload_to=host")
EACH_MICROBATCH = only_default("sums sharded gradients after each micro-batch", "reduce=microbatch, or zero=1")


def sequence_of_tp(given: Given) -> Item:
    """The rule of `sequence_parallel` for a system that says the rest with `tp`."""
    if given.plan.tp == 1:
        raise given.refuse("divides the sequence between ranks of tp", "sequence_parallel=false, or tp=2")
    return Item()


def rounds(given: Given) -> Item:
    """The rule of `accumulate` for a system that drains its pipeline once a step."""
    plan = given.plan
    if plan.pp > 1:
        raise given.refuse("drains its pipeline once a step", f"accumulate=1 microbatches={plan.total_microbatches}")
    return Item()


def translated(given: Given, rules: Mapping[str, Rule], always: Collection[str]) -> Item:
    """The settings of all keys, in their order. The rules of keys in `always` are asked of a default, too. Errors:
    PlanError for the first that is refused; its details have the others."""
    settings: dict[str, Any] = {}
    notes: list[str] = []
    refused: list[str] = []
    for one in fields(given.plan):
        asked = replace(given, key=one.name)
        if asked.is_default and one.name not in always:
            continue
        try:
            found = rules.get(one.name, absent)(asked)
        except PlanError as error:
            refused.append(error.reason)
            continue
        for name, value in found.settings.items():
            old = settings.get(name)
            settings[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        notes += found.notes
    if refused:
        raise PlanError(refused[0], "\n".join(refused[1:]))
    return Item(settings, tuple(dict.fromkeys(notes)))
