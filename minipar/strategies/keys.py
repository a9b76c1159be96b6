"""The values that a plan's keys take. Each key has a domain, which reads text or Python values, and refuses others.

dp: int = key(1, whole(1), "replicas of the pipeline, ...")      a line of the table, in `Plan`
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from minipar.costs.quantities import quantity
from minipar.errors import PlanError
from minipar.program import collectives
from minipar.strategies import draft, segments
from minipar.strategies.exclusions import Need
from minipar.strategies.passes import compress
from minipar.strategies.schedules import registry
from minipar.wording import did_you_mean

if TYPE_CHECKING:
    from minipar.program.shape import Shape
    from minipar.strategies.plan import Plan

MOST_NUMBER = 10**18  # of a key without a limit of its own: such numbers, and products of a few of them, stay cheap
OFFLOADS = ("activations", "optimizer", "parameters")
ALGORITHM = "default"


@dataclass(frozen=True)
class Domain:
    """The values that a key takes.

    words      the values, described in one line
    read       (name of the key, what was given) -> the value; it raises a PlanError that says what is possible
    values     all values, if there are few: a search tries these
    examples   if there are many: gives some, as words, one of each kind. Tests try these with those of other keys
    """

    words: str
    read: Callable[[str, Any], Any]
    values: tuple[Any, ...] = ()
    examples: Callable[[], Sequence[str]] = tuple


@dataclass(frozen=True)
class Key:
    """One line of the table of keys."""

    domain: Domain
    help: str
    need: Need | None


def key(default: Any, domain: Domain, text: str, need: Need | None = None) -> Any:
    """A field of `Plan`: its default, its domain, a line of help, and what it needs in a plan to have an effect."""
    return field(default=default, metadata={"key": Key(domain, text, need)})


# readers --------------------------------------------------------------------------------------------------------------


def words(text: str) -> dict[str, str]:
    """The table of a plan in words, `"pp=2 dp=2"`. Errors: PlanError for a word without a value, or given twice."""
    table: dict[str, str] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise PlanError(f"plan word {word!r}: must be key=value, such as pp=2")
        if key in table:
            raise PlanError(f"plan key {key!r}: given twice")
        table[key] = value
    return table


def check_keys(keys: Iterable[object], known: list[str]) -> None:
    """Refuse words that are no keys of a plan."""
    for key in keys:
        if key == "micro_batch_size" and key not in known:
            raise PlanError(
                "plan key 'micro_batch_size': estimates and the command line read it; a Plan has microbatches=m "
                "instead, and the rows of a step stand beside it (batch = dp x m x micro_batch_size)"
            )
        if key not in known:
            raise PlanError(f"plan key {key!r}: unknown; possible are {', '.join(known)}{did_you_mean(key, known)}")


def whole_number(key: str, value: object, least: int = 1, most: int | None = None) -> int:
    """A whole number from `least` to `most`, or to MOST_NUMBER. Errors: PlanError."""
    try:
        if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
            raise ValueError
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        number = least - 1
    if least <= number <= (MOST_NUMBER if most is None else most):
        return number
    if most is None and number > MOST_NUMBER:
        most = MOST_NUMBER
    possible = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise PlanError(f"{key}={_short(value)}: must be a whole number {possible}")


def numbers(key: str, value: object, least: int, possible: str) -> tuple[int, ...]:
    """Whole numbers of at least `least`, from a list in words or in Python. Errors: PlanError."""
    parts = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    try:
        return tuple(whole_number(key, part, least) for part in parts)
    except PlanError:
        raise PlanError(f"{key}={value}: must be {possible}") from None


def positive(key: str, value: object, text: str, possible: str) -> float:
    """The number above 0 that a text has. Errors: PlanError, which shows the `value` that was given."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise PlanError(f"{key}={value}: must be {possible}")
    return number


def check_size(key: str, value: object) -> None:
    """Refuse whole numbers above MOST_NUMBER, alone or in a list, whatever the key reads. Errors: PlanError."""
    for one in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(one, int) and abs(one) > MOST_NUMBER:
            raise PlanError(f"{key}={_short(one)}: too large; possible are whole numbers up to {MOST_NUMBER}")


def _short(value: object) -> str:
    """A value in an error. Python refuses to write integers of thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"about {'-' * (value < 0)}10^{round(math.log10(2) * abs(value).bit_length())}"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def truth(key: str, value: object) -> bool:
    """True or False, from a word. Errors: PlanError."""
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if str(value).lower() not in known:
        raise PlanError(f"{key}={value}: must be true or false")
    return known[str(value).lower()]


def clip_norm(value: object) -> float | None:
    """The largest norm that gradients may have; None: any norm. Errors: PlanError."""
    if value is None or value == "none":
        return None
    return positive("clip", value, str(value), "a number above 0, the norm that gradients may have, or none")


def offloaded(value: object) -> tuple[str, ...]:
    """What is offloaded, in the order of OFFLOADS. Errors: PlanError."""
    found = tuple(value.split(",") if isinstance(value, str) else value) if isinstance(value, Iterable) else ()
    if value is None or found == ("none",):
        return ()
    if not isinstance(value, Iterable) or not all(what in OFFLOADS for what in found):
        raise PlanError(f"offload={value}: must be none, or a list of {', '.join(OFFLOADS)}")
    return tuple(what for what in OFFLOADS if what in found)


def names(value: object) -> tuple[str, ...]:
    """The words of a list, such as layers by name or number, or passes by name."""
    words = value if isinstance(value, Iterable) and not isinstance(value, str) else str(value).split(",")
    return tuple(str(word) for word in words if str(word) not in ("", "none"))


def folder(name: str, value: object) -> str:
    """The path of a folder, as text. Errors: PlanError."""
    if not isinstance(value, (str, os.PathLike)) or isinstance(os.fspath(value), bytes):
        raise PlanError(f"{name}={value!r}: must be the path of a folder")
    return str(os.fspath(value))


def form_pairs(value: object) -> tuple[tuple[str, str], ...]:
    """Pairs of a pattern of names and a form, from a table, from pairs, or from words. Errors: PlanError.

    In a plan's words, which have no spaces, a pair is PATTERN=FORM, `@` stands for ` on `, and `;` separates pairs:
    `*.mlp.0=S-1@tp;*.mlp.2=P@tp`.
    """
    if value is None or value == "none":
        return ()
    found: list[tuple[str, str]] = []
    given: Any = value
    if isinstance(value, str):
        given = [tuple(rule.split("=", 1)) for rule in value.replace("@", " on ").split(";") if rule.strip()]
    pairs = given.items() if isinstance(given, Mapping) else given if isinstance(given, Iterable) else [given]
    for pair in pairs:
        two = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, str) for part in pair)
        pattern, form = (" ".join(part.split()) for part in pair) if two else ("", "")
        if not pattern or not form or re.search(r"[\s=;@]", pattern) or re.search(r"[=;@]", form):
            raise PlanError(
                f"annotations={value}: must be none, or patterns of names with forms, such as "
                "*.mlp.0=S-1@tp;*.mlp.2=P@tp"
            )
        if pattern in dict(found):
            raise PlanError(f"annotations: {pattern!r} is there twice; keep one of the two")
        found.append((pattern, re.sub(r"\s*,\s*", ", ", form)))
    return tuple(found)


def limit(value: object) -> int | None:
    """A number of bytes, or None for no limit."""
    return None if value is None or value == "none" else int(quantity("offload_limit", value))


def split(value: object, stages: int, ranks: int, chunks: int) -> tuple[int, ...] | str | None:
    """The number of layers of each stage; None: as even as possible; "auto": by cost. Errors: PlanError."""
    if value is None or (isinstance(value, str) and value == "even"):
        return None
    if isinstance(value, str) and value == "auto":
        return value
    counts = numbers("split", value, 1, "layer counts per stage, such as 3,3,2, or even, or auto")
    if len(counts) != stages:
        plan = f"pp={ranks}" if chunks == 1 else f"pp={ranks} chunks={chunks} has {stages}"
        raise PlanError(f"split={','.join(map(str, counts))}: {len(counts)} stages, but {plan}")
    return counts


def slices(value: object) -> int | tuple[int, ...] | None:
    """How many slices a sequence is cut into, or their lengths in tokens; None: the schedule's default."""
    if value is None:
        return None
    found = numbers("slices", value, 1, "how many slices, or their lengths in tokens, such as 4,3,2,2")
    return found[0] if len(found) == 1 else found


def check_causal(plan: Plan, shape: Shape) -> None:
    """Refuse slices for a model that takes only whole sequences."""
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


def bucket(value: object) -> float | str | tuple[int, ...] | None:
    """The size of messages: MiB, "none", "flat", "auto", a number of messages such as "4x", or the layers that end a
    message, such as (7, 3). Errors: PlanError."""
    if value is None:
        return None
    text = "".join(f"{layer}," for layer in value) if isinstance(value, (tuple, list)) else str(value)
    if text in ("none", "flat", "auto"):
        return text
    if re.fullmatch(r"[1-9][0-9]{0,5}x", text):
        return text
    if re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*,?", text) and "," in text:
        return tuple(sorted({int(layer) for layer in text.split(",") if layer}, reverse=True))
    size = positive(
        "bucket",
        value,
        text[:-3] if text.lower().endswith("mib") else text,
        "a size in MiB above 0, none (one message per parameter), flat (one for all), auto, a number of buckets such "
        "as 4x, or the layers that end one such as 7,3",
    )
    return int(size) if size == int(size) else size


# domains --------------------------------------------------------------------------------------------------------------


def whole(least: int = 1, most: int | None = None) -> Domain:
    """Whole numbers of at least `least`, and at most `most` if that is given."""
    words = f"a whole number of at least {least}" if most is None else f"{least} to {most}"
    values = () if most is None else tuple(range(least, most + 1))
    examples = (lambda: ("2",)) if most is None else tuple
    return Domain(words, lambda name, value: whole_number(name, value, least, most), values, examples)


def one_of(*words: str) -> Domain:
    """One of a few words."""

    def read(name: str, value: object) -> str:
        if value not in words:
            raise PlanError(f"{name}={value}: unknown; possible are {', '.join(words)}{did_you_mean(value, words)}")
        return str(value)

    return Domain(", ".join(words), read, words)


def perhaps(domain: Domain) -> Domain:
    """The same values, or None, which means the schedule's default."""
    return replace(domain, read=lambda name, value: None if value is None else domain.read(name, value))


def _as_given(name: str, value: Any) -> Any:
    return value


def _schedule(name: str, value: str) -> str:
    return registry.find(value).name


def _algorithm(name: str, value: str) -> str:
    possible = (ALGORITHM, *collectives.names("allreduce"))
    if value not in possible:
        raise PlanError(
            f"algorithm={value}: unknown; possible are {', '.join(possible)}, or one of your own, which "
            f"@minipar.collective({value!r}) registers{did_you_mean(value, possible)}"
        )
    return value


TRUTH = Domain("true, false", truth, (False, True))
SCHEDULE = Domain(
    "a schedule, by its name (minipar schedules), or one of your own", _schedule,
    examples=lambda: [one.name for one in registry.schedules()],
)  # fmt: skip
SPLIT = Domain(  # (Plan reads this: it must fit the stages)
    "even, auto, or layers per stage such as 3,3,2", _as_given, examples=lambda: ("auto",)
)
PLACE = Domain(  # (this must fit the ranks)
    "none, branches, or the rank of each layer such as 0,0,1,1,0", _as_given,
    examples=lambda: ("branches", "0,1,0,1,1,0"),
)  # fmt: skip
MODE = Domain(  # (this must fit the workers)
    "sync, async, ssp:S, k-of-n:K/N", _as_given, examples=lambda: ("async", "ssp:1", "k-of-n:1/2")
)
SLICES = Domain(
    "how many, or lengths in tokens such as 4,3,2,2", lambda name, value: slices(value),
    examples=lambda: ("2", "4,3,1"),
)  # fmt: skip
BUCKET = Domain(
    "MiB, none, flat, auto, 4x, or layers such as 7,3", lambda name, value: bucket(value),
    examples=lambda: ("0.0001", "none", "flat", "auto", "2x", "4,2"),
)  # fmt: skip
COMPRESS = Domain(
    "none, bf16, fp16, topk:R, powersgd:R", lambda name, value: compress.parse(value),
    examples=lambda: ("bf16", "fp16", "topk:0.5", "powersgd:1"),
)  # fmt: skip
CHECKPOINT = Domain(
    "none, sqrt, selective, operators, K, a budget such as 64MiB, or layers such as 3,7,11",
    lambda name, value: segments.parse(value), examples=lambda: ("sqrt", "selective", "1", "128KiB", "2,4"),
)  # fmt: skip
NORM = Domain("none, or a number above 0", lambda name, value: clip_norm(value), examples=lambda: ("0.1",))
OFFLOAD = Domain(
    "none, or a list of " + ", ".join(OFFLOADS), lambda name, value: offloaded(value), examples=lambda: OFFLOADS
)
FOLDER = Domain("a folder", lambda name, value: folder(name, value))
BYTES = Domain("none, or bytes such as 64MiB", lambda name, value: limit(value), examples=lambda: ("64MiB",))
LAYERS = Domain(
    "none, or layers by name or number, such as 0", lambda name, value: names(value), examples=lambda: ("0", "2,3")
)
SUM = Domain(
    "default, an algorithm such as ring (collectives.names), or one of your own", _algorithm,
    examples=lambda: ("ring", "tree"),
)  # fmt: skip
ANNOTATIONS = Domain(
    "none, or patterns of names with forms, such as *.mlp.0=S-1@tp;*.mlp.2=P@tp",
    lambda name, value: form_pairs(value), examples=lambda: ("*.mlp.0=S-1@tp",),
)  # fmt: skip
PASSES = Domain("none, or names of passes of your own", lambda name, value: draft.check_names(names(value)))
