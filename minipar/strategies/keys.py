"""The values of plan keys: read from text or Python, and refused with what is possible."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from minipar.costs.device import quantity
from minipar.errors import PlanError
from minipar.program import Op, Program, collectives
from minipar.program.server_rule import Mode
from minipar.strategies.passes import segments

if TYPE_CHECKING:
    from minipar.program.shape import Shape
    from minipar.strategies.plan import Plan

OFFLOADS = ("activations", "optimizer", "parameters")


SYNCS = ("allreduce", "ps")
ON_DEATH = ("abort", "continue")


def check_keys(keys: Iterable[object], known: list[str]) -> None:
    """Refuse what is no key of a plan."""
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise PlanError(f"plan key {key!r}: unknown; possible are {', '.join(known)}{hint}")


def whole_number(key: str, value: object, least: int = 1, most: int | None = None) -> int:
    """A whole number from `least` on, to `most` if there is one."""
    try:
        if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
            raise ValueError
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        number = least - 1
    if number < least or (most is not None and number > most):
        possible = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise PlanError(f"{key}={value}: must be a whole number {possible}")
    return number


def truth(key: str, value: object) -> bool:
    """A yes or no."""
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if str(value).lower() not in known:
        raise PlanError(f"{key}={value}: must be true or false")
    return known[str(value).lower()]


def clip_norm(value: object) -> float | None:
    """The norm that gradients may have; None: any."""
    if value is None or value == "none":
        return None
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise PlanError(f"clip={value}: must be a number above 0, the norm that gradients may have, or none")
    return number


def offloaded(value: object) -> tuple[str, ...]:
    """What waits away from the device, in the order of OFFLOADS."""
    found = tuple(value.split(",") if isinstance(value, str) else value) if isinstance(value, Iterable) else ()
    if value is None or found == ("none",):
        return ()
    if not isinstance(value, Iterable) or not all(what in OFFLOADS for what in found):
        raise PlanError(f"offload={value}: must be none, or a list of {', '.join(OFFLOADS)}")
    return tuple(what for what in OFFLOADS if what in found)


def names(value: object) -> tuple[str, ...]:
    """Words of a list: layers by name or number, passes by name."""
    words = value if isinstance(value, Iterable) and not isinstance(value, str) else str(value).split(",")
    return tuple(str(word) for word in words if str(word) not in ("", "none"))


def limit(value: object) -> int | None:
    """Bytes, or None."""
    return None if value is None or value == "none" else int(quantity("offload_limit", value))


def split(value: object, stages: int, ranks: int, chunks: int) -> tuple[int, ...] | str | None:
    """Layers per stage; None: even; "auto": by cost."""
    if value is None or (isinstance(value, str) and value == "even"):
        return None
    if isinstance(value, str) and value == "auto":
        return value
    parts = value.split(",") if isinstance(value, str) else value
    try:
        if not isinstance(parts, Iterable):
            raise PlanError("not a list")
        counts = tuple(whole_number("split", part) for part in parts)
    except PlanError:
        raise PlanError(f"split={value}: must be layer counts per stage, such as 3,3,2, or even, or auto") from None
    if len(counts) != stages:
        plan = f"pp={ranks}" if chunks == 1 else f"pp={ranks} chunks={chunks} has {stages}"
        raise PlanError(f"split={','.join(map(str, counts))}: {len(counts)} stages, but {plan}")
    return counts


def slices(value: object) -> int | tuple[int, ...] | None:
    """How many slices a sequence is cut into, or their lengths in tokens; None: what the schedule says."""
    if value is None:
        return None
    parts = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    try:
        numbers = tuple(whole_number("slices", part) for part in parts)
    except PlanError:
        raise PlanError(
            f"slices={value}: must be how many slices, or their lengths in tokens, such as 4,3,2,2"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def check_causal(plan: Plan, shape: Shape) -> None:
    """Refuse to cut the sequences of a model that takes them whole."""
    if plan.slice_count > 1 and shape.whole:
        raise PlanError(
            f"schedule={plan.schedule}: layer {shape.whole} of this model takes whole sequences; possible are causal "
            "models whose layers derive from minipar.models.Sliced, such as models.gpt, or a schedule such "
            "as 1f1b"
        )
    if plan.slice_count > 1 and not shape.carries:
        raise PlanError(
            f"schedule={plan.schedule}: no layer of this model carries anything from slice to slice, its tokens are as "
            "good as rows; possible is a schedule such as 1f1b, on micro-batches of rows"
        )


def check_slices(plan: Plan) -> None:
    """Refuse what sequences that are cut into slices do not go together with."""
    impossible = {
        "sync=ps": plan.sync == "ps",
        f"local_steps={plan.local_steps}": bool(plan.local_steps),
        f"checkpoint={plan.checkpoint}": segments.budget_of(plan.checkpoint) is not None,
        "offload=activations": "activations" in plan.offload,
        f"host_layers={','.join(plan.host_layers)}": bool(plan.host_layers),
    }
    for words, wanted in impossible.items():
        if wanted:
            name = plan.schedule
            raise PlanError(f"{words}: not with schedule={name}, whose micro-batches are slices; possible is 1f1b")


def bucket(value: object) -> float | str | tuple[int, ...] | None:
    """MiB per message, "none", "flat", "auto", how many such as "4x", or the layers that end one such as (7, 3)."""
    if value is None:
        return None
    text = "".join(f"{layer}," for layer in value) if isinstance(value, (tuple, list)) else str(value)
    if text in ("none", "flat", "auto"):
        return text
    if re.fullmatch(r"[1-9][0-9]{0,5}x", text):
        return text
    if re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*,?", text) and "," in text:
        return tuple(sorted({int(layer) for layer in text.split(",") if layer}, reverse=True))
    number = text[:-3] if text.lower().endswith("mib") else text
    try:
        size = float(number)
    except ValueError:
        size = -1.0
    if not 0 < size < float("inf"):
        raise PlanError(
            f"bucket={value}: must be a size in MiB above 0, none (one message per parameter), flat (one for all), "
            "auto, a number of buckets such as 4x, or the layers that end one such as 7,3"
        )
    return int(size) if size == int(size) else size


def check_priority(bucket: object, zero: int, clip: object, offload: object, host_layers: object) -> None:
    """Refuse what overlap=priority cannot do: it updates each gradient as soon as it is there."""
    why = "overlap=priority: updates a layer as soon as its gradient is there"
    if clip is not None:
        raise PlanError(f"{why}, but clip={clip} needs the norm of all; possible is clip=none")
    if zero:
        raise PlanError(f"{why}, whole; zero={zero} shares it out; possible is zero=0")
    if offload or host_layers:
        raise PlanError(f"{why}, on the device; possible are offload=none and no host_layers")
    if not isinstance(bucket, (int, float)) and bucket != "none":
        raise PlanError(f"{why}, in pieces of `bucket` MiB; possible are a size or none (whole), not {bucket}")


def check_local(steps: int, overlap: str, zero: int, clip: object, offload: object, host_layers: object) -> None:
    """Refuse what local_steps cannot do: it has no gradients of all replicas."""
    why = f"local_steps={steps}: every replica trains by itself"
    if zero:
        raise PlanError(f"{why}, with whole states; possible is zero=0, not {zero}")
    if clip is not None:
        raise PlanError(f"{why}, and clip={clip} needs the norm over all of them; possible is clip=none")
    if overlap == "priority":
        raise PlanError(f"{why}, and sends no gradients; possible are overlap=none and backward, not priority")
    if offload or host_layers:
        raise PlanError(f"{why}, on the device; possible are offload=none and no host_layers")


def check_compress(plan: Plan) -> None:
    """Refuse what compress cannot do: it makes whole gradients smaller, once a step."""
    why = f"compress={plan.compress}: makes whole gradients smaller, once a step"
    if plan.zero:
        raise PlanError(f"{why}; zero={plan.zero} sums slices of them; possible is zero=0")
    if plan.overlap == "priority":
        raise PlanError(f"{why}; overlap=priority sends pieces of them; possible are overlap=none and backward")
    if plan.local_steps:
        raise PlanError(f"{why}; local_steps={plan.local_steps} sends none; possible is local_steps=0")
    if plan.precision != "float32":
        raise PlanError(f"{why}; with precision={plan.precision} they are small already; possible is compress=none")
    if plan.host_layers or set(plan.offload) - {"activations"}:
        raise PlanError(f"{why}, on the device; possible are offload=none or activations, and no host_layers")


def check_parts(plan: Plan) -> None:
    """Refuse a key that says how to do what the plan does not do: nothing that is asked for is left out in silence."""
    disk = bool(plan.offload) and plan.offload_to == "disk"
    served = plan.sync == "ps"
    parts: dict[str, tuple[object, bool, str, str]] = {  # its default, whether there is what it is of, that, and where
        "mode": ("sync", served, "parameter servers", "sync=ps"),
        "servers": (1, served, "parameter servers", "sync=ps"),
        "on_death": ("abort", served, "parameter servers", "sync=ps"),
        "reduce": ("microbatch", plan.zero >= 2, "sharded gradients", "zero=2, zero=3"),
        "prefetch": (
            1,
            plan.zero == 3 or "parameters" in plan.offload or plan.prefetch == 0,  # (0 asks for nothing)
            "parameters that come layer by layer",
            "zero=3, offload=parameters",
        ),
        "offload_to": ("host", bool(plan.offload), "what is offloaded", f"offload={', '.join(OFFLOADS)}"),
        "offload_limit": (None, bool(plan.offload), "what is offloaded", f"offload={', '.join(OFFLOADS)}"),
        "offload_folder": ("", disk, "what is offloaded to the disk", "offload_to=disk with offload="),
    }
    for key, (default, there, what, possible) in parts.items():
        value = getattr(plan, key)
        if value != default and not there:
            raise PlanError(f"{key}={value}: is of {what}; possible is {possible}")


def check_servers(plan: Plan) -> None:
    """The keys of parameter servers, and what goes together with them."""
    if plan.sync not in SYNCS:
        raise PlanError(f"sync={plan.sync}: unknown; possible are {', '.join(SYNCS)}")
    if plan.on_death not in ON_DEATH:
        raise PlanError(f"on_death={plan.on_death}: unknown; possible are {', '.join(ON_DEATH)}")
    object.__setattr__(plan, "servers", whole_number("servers", plan.servers))
    if plan.sync == "allreduce":
        return
    object.__setattr__(plan, "mode", str(Mode.parse(plan.mode, plan.dp)))
    alone: dict[str, object] = {"pp": 1, "zero": 0, "offload": (), "host_layers": (), "clip": None}
    alone |= {"precision": "float32", "inference": False, "compress": "none", "local_steps": 0}
    if plan.overlap == "priority":
        raise PlanError("sync=ps: not together with overlap=priority; possible are overlap=none and backward")
    for key, only in alone.items():
        value = getattr(plan, key)
        if value != only:
            told = ",".join(map(str, value)) if isinstance(value, tuple) else value
            shown = "none" if only in ((), None) else only
            raise PlanError(f"sync=ps: not together with {key}={told}; possible is {key}={shown}")


ALGORITHM = "default"


def check_algorithm(plan: Plan) -> None:
    """The algorithm that sums gradients, and what goes together with it."""
    if plan.algorithm == ALGORITHM:
        return
    possible = collectives.names("allreduce")
    if plan.algorithm not in possible:
        raise PlanError(
            f"algorithm={plan.algorithm}: unknown; possible are {ALGORITHM}, {', '.join(possible)}, "
            f"or one of your own, which @minipar.collective({plan.algorithm!r}) registers"
        )
    if plan.asynchronous:
        raise PlanError(
            f"algorithm={plan.algorithm}: schedule={plan.schedule} sums no gradients over ranks; "
            f"possible is algorithm={ALGORITHM}"
        )
    alone: dict[str, object] = {"zero": 0, "compress": "none", "local_steps": 0, "host_layers": (), "sync": "allreduce"}
    for key, only in {"overlap": "none", **alone}.items():
        value = getattr(plan, key)
        if value != only:
            why = "its messages are the rank's own work" if key == "overlap" else "it sums whole gradients"
            told, shown = (",".join(v) if isinstance(v, tuple) else v for v in (value, only))
            raise PlanError(
                f"algorithm={plan.algorithm}: not together with {key}={told}, since {why}; "
                f"possible is {key}={shown or 'none'}, or algorithm={ALGORITHM}"
            )


def check_one_group(plan: Plan, program: Program) -> None:
    """Of sums by an algorithm each rank has one group: ranks that wait in another order would wait for ever."""
    if plan.algorithm == ALGORITHM:
        return
    for rank, row in enumerate(program.ranks):
        groups = {ins.group for ins in row if ins.op is Op.ALL_REDUCE}
        if len(groups) > 1:
            told = " and over ranks ".join(",".join(map(str, group)) for group in sorted(groups))
            raise PlanError(
                f"algorithm={plan.algorithm}: rank {rank} sums gradients over ranks {told}; possible are plans in "
                f"which each rank has one group, such as ties within one stage, or algorithm={ALGORITHM}"
            )


def at_least_1(name: str, value: int) -> int:
    """`value`, or a PlanError that names it."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise PlanError(f"{name}={value!r}: must be a whole number of at least 1")
    return number
