"""The values of plan keys: read from text or Python, and refused with what is possible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from minipar.costs.device import quantity
from minipar.errors import PlanError
from minipar.strategies.consistency import Mode

if TYPE_CHECKING:
    from minipar.plan import Plan

OFFLOADS = ("activations", "optimizer", "parameters")


SYNCS = ("allreduce", "ps")
ON_DEATH = ("abort", "continue")


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
    """Layers, by name or number."""
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


def bucket(value: object) -> float | str:
    """MiB per message, "none" or "flat"."""
    if value in ("none", "flat"):
        return str(value)
    text = str(value)
    number = text[:-3] if text.lower().endswith("mib") else text
    try:
        size = float(number)
    except ValueError:
        size = -1.0
    if not 0 < size < float("inf"):
        raise PlanError(f"bucket={value}: must be a size in MiB above 0, none (one message per parameter) or flat")
    return int(size) if size == int(size) else size


def check_servers(plan: Plan) -> None:
    """The keys of parameter servers, and what goes together with them."""
    if plan.sync not in SYNCS:
        raise PlanError(f"sync={plan.sync}: unknown; possible are {', '.join(SYNCS)}")
    if plan.on_death not in ON_DEATH:
        raise PlanError(f"on_death={plan.on_death}: unknown; possible are {', '.join(ON_DEATH)}")
    object.__setattr__(plan, "servers", whole_number("servers", plan.servers))
    if plan.sync == "allreduce":
        for key, default in {"mode": "sync", "servers": 1, "on_death": "abort"}.items():
            if getattr(plan, key) != default:
                raise PlanError(f"{key}={getattr(plan, key)}: is of parameter servers; possible is sync=ps")
        return
    object.__setattr__(plan, "mode", str(Mode.parse(plan.mode, plan.dp)))
    alone: dict[str, object] = {"pp": 1, "zero": 0, "offload": (), "host_layers": (), "clip": None}
    for key, only in (alone | {"precision": "float32", "inference": False}).items():
        value = getattr(plan, key)
        if value != only:
            told = ",".join(value) if isinstance(value, tuple) else value
            shown = "none" if only in ((), None) else only
            raise PlanError(f"sync=ps: not together with {key}={told}; possible is {key}={shown}")
