"""What a loss is a mean over. It is needed because a batch's loss is the weighted mean of the losses of its parts:

    loss of the batch = sum over parts of (loss of the part * weight of the part) / weight of the batch

The weight of a part is the number of things that its mean is over. By default these are target elements other than
`ignore_index` for integer targets, each with its class's weight, and rows for all other targets. Any other loss must
say its weight:

    losses.weighted(masked_loss, count=lambda y: y[1].sum())     y = (targets, mask): the mean is over the mask
    def masked_loss(output, y): ...; return total, count         or the loss itself returns the sum and the count

A loss that is no such mean (in-batch contrastive, a plain sum) is refused before the run, unless nothing is split.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.models.reached import reached
from minipar.models.tensors import allocate, count_rows, map_tensors, spec, take_rows, tensors
from minipar.program.rows import split_rows
from minipar.wording import several

_SAMPLE = 1 << 22  # a loss is tried on outputs with at most so many numbers


@dataclass(frozen=True)
class Weighted:
    """A loss that says what its mean is over; see `weighted`."""

    loss: Callable[[Any, Any], Any]
    count: Callable[[Any], Any]

    def __call__(self, output: Any, y: Any) -> Any:
        return self.loss(output, y)


@dataclass(frozen=True)
class Own:
    """The loss that the model makes itself of a batch, which is both x and y; see `own_loss.py`.

    count   of a batch, what its mean is over; None: not found yet
    """

    count: Callable[[Any], Any] | None = None

    def __call__(self, output: Any, y: Any) -> Tensor:
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        numbers = [t for t in tensors(output) if not t.dim() and t.is_floating_point()]
        found = numbers[0] if found is None and len(numbers) == 1 else found
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise PlanError(
                f"loss=None: the model gives a {type(output).__name__}, in which there is no loss: it is a scalar, an "
                "attribute or a key `loss`, or the only scalar of a tuple. Possible are a batch that has what the "
                "model makes its loss of (labels, targets), and train(loss=...) with a function of the output"
            )
        return found.reshape(())


def weighted(loss: Callable[[Any, Any], Any] | None, count: Callable[[Any], Any]) -> Weighted | Own:
    """A loss with its weight: `count(y)` is the number of things in some targets that the mean is over. The counts of
    rows must add up. None is the model's own loss, whose y is the whole batch."""
    return Own(count) if loss is None else Weighted(loss, count)


@dataclass(frozen=True)
class Counting:
    """The count of a loss that returns (sum, count). It is found by calling the loss on zeros instead of the model's
    output.

    form   the form of the output for one row, as `tensors.spec` writes it
    """

    loss: Callable[[Any, Any], Any]
    form: Any

    def __call__(self, y: Any) -> float:
        rows, total = count_rows(y), 0.0
        size = max(1, sum(t.numel() for t in tensors(allocate(self.form, torch.device("meta")))))
        step = max(1, _SAMPLE // size)
        place = next((t.device for t in tensors(y)), torch.device("cpu"))
        for start in range(0, rows, step):
            part = range(start, min(rows, start + step))
            blank = _zeros(self.form, len(part), place)
            try:
                with torch.no_grad():
                    _, count = self.loss(blank, take_rows(y, part))
            except Exception as error:
                raise PlanError(
                    f"loss: gives (sum, count), and its count could not be found by calling it on zeros: {error}; say "
                    "it with minipar.models.losses.weighted(loss, count=lambda y: ...)"
                ) from error
            total += float(count)
        return total


def _zeros(form: Any, rows: int, device: torch.device) -> Any:
    def zeros(t: Tensor) -> Tensor:
        return torch.zeros((rows, *t.shape[1:]), dtype=t.dtype, device=device)

    return map_tensors(allocate(form, torch.device("meta")), zeros)


def option(loss: Any, name: str, default: Any) -> Any:
    """An option of a loss: a keyword of a partial, or an attribute of a loss module."""
    while isinstance(loss, partial):
        if name in loss.keywords:
            return loss.keywords[name]
        loss = loss.func
    return getattr(loss, name, default)


def check_loss(loss: Any) -> None:
    """Errors: PlanError for what cannot be a loss, for a loss that is no mean, and for one that reaches parameters that
    are trained, its own or the model's."""
    if not callable(loss):
        raise PlanError(f"loss={loss!r}: must be a function loss(output, y) -> scalar")
    if option(loss, "reduction", "mean") == "sum":
        raise PlanError("loss: reduction='sum' is not possible; use 'mean' (gradients are of the mean over all rows)")
    for path, found in reached(loss, "loss"):
        if isinstance(found, Tensor) and found.requires_grad:
            raise PlanError(
                f"loss: reaches {path}, of shape {tuple(found.shape)}, which needs a gradient; but a loss is given "
                "(output, y) alone: the optimizer has only the model's parameters, and each rank has only its own. "
                "Possible are: parameters of the loss as part of the last layer; a penalty on weights in the optimizer "
                "(weight_decay, or a step hook: docs/own_model.md), one on activations as part of the output; "
                "requires_grad_(False) for a network that is not trained; a loss that does not hold the model"
            )


def sum_and_count(value: Any) -> tuple[Tensor, Any]:
    """What a loss returns: (its value, None), or (sum, count). Errors: PlanError if it is no real scalar."""
    found, count = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(found, Tensor) or found.dim() or found.is_complex():
        kind = type(found).__name__
        form = f"{kind} of shape {tuple(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else kind
        raise PlanError(f"loss: gave a {form}; it must be a scalar tensor, the mean over the rows, or (sum, count)")
    return found, count


def scalar(value: Any) -> Tensor:
    """The mean that a loss returns: its value, or sum / count if it returns (sum, count)."""
    found, count = sum_and_count(value)
    return found if count is None else found / count


def says_count(loss: Any) -> bool:
    """Whether a loss itself says what its mean is over, so that its targets alone do not tell."""
    return callable(option(loss, "count", None)) or option(loss, "weight", None) is not None


def counts_elements(y: Any) -> bool:
    """Whether the weight of a batch is its number of target elements (integer targets), and not its number of rows."""
    first = next(iter(tensors(y)), None)
    return first is not None and not first.is_floating_point() and not first.is_complex()


def counted(y: Any, loss: Any) -> float:
    """The weight of a batch in a mean loss: what the loss counts. By default these are the target elements that are not
    ignored, each with its class's weight; or the rows if y is not integer."""
    count = option(loss, "count", None)
    if callable(count):
        return _plain(float(count(y)))
    if not counts_elements(y):
        return count_rows(y)
    first = tensors(y)[0]
    known = first != option(loss, "ignore_index", -100)
    classes = option(loss, "weight", None)
    if classes is None:
        return int(known.sum())
    return _plain(float(classes.to(first.device, torch.float64)[first[known]].sum()))


def _plain(count: float) -> float:
    """The count, as an int if it is a whole number."""
    return int(count) if math.isfinite(count) and count == int(count) else count


_MEANS = (nn.functional.cross_entropy, nn.functional.mse_loss, nn.functional.l1_loss, nn.functional.smooth_l1_loss,
          nn.functional.huber_loss, nn.functional.binary_cross_entropy_with_logits)  # fmt: skip
_MEAN_MODULES = (nn.CrossEntropyLoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss)


def is_mean(loss: Any) -> bool:
    """Whether a loss is one of torch's own means, with no options but those that `counted` reads, so that it is the
    weighted mean of its parts for all batches."""
    while isinstance(loss, partial) and not loss.args and loss.keywords.keys() <= {"ignore_index"}:
        loss = loss.func
    options = (getattr(loss, "label_smoothing", 0.0), getattr(loss, "pos_weight", None), getattr(loss, "weight", None))
    return any(loss is one for one in _MEANS) or (type(loss) in _MEAN_MODULES and options == (0.0, None, None))


# before the run -------------------------------------------------------------------------------------------------------


def try_loss(loss: Any, output: Any, y: Any, parts: int) -> tuple[Any, str]:
    """Test with one batch whether a loss is the weighted mean of its parts' losses.

    output   the model's output for some rows; the loss is tried on mixtures of these rows
    y        targets of the batch, or of its first rows
    parts    how many parts a batch is split into in training

    Returns (form, warning). `form` is the form of the output for one row if the loss returns (sum, count) and has no
    `count` of its own (see `Counting`), otherwise None. The warning may be "". Errors: PlanError, which says what to
    do, for a loss that cannot be split, and for a count that depends on the output.
    """
    given, form = loss, None
    width = max(1, sum(t[:1].numel() for t in tensors(output) if t.dim()))
    total = min(count_rows(y), max(8, _SAMPLE // width))
    y = take_rows(y, range(total))
    if not total or not count_rows(output):
        return None, ""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        first, second = _between(output, total), _between(output, total)
        try:
            value, again = loss(first, y), loss(first, y)
        except Exception as error:
            raise_unless_again(error, lambda: loss(first, y))
            return None, ""  # the profile of the layers will raise this error
        scalar(value)
        if isinstance(value, tuple) and not callable(option(loss, "count", None)):
            other = loss(second, y)
            if float(other[1]) != float(value[1]):
                raise PlanError(
                    f"loss: gives (sum, count) with a count that depends on the output: {float(value[1]):g} and "
                    f"{float(other[1]):g} for the same targets; possible is one that depends on y alone"
                )
            form = spec(map_tensors(output, lambda t: t[:1]))
            loss = Weighted(loss, Counting(loss, form))
        if parts == 1 or total == 1:
            return form, ""
        if _number(value) != _number(again) and not math.isnan(_number(value)):
            return form, (
                "the loss gives another number for the same rows each time: it draws random numbers or changes what it "
                "keeps, and with parts of a batch it does so more often than with the whole"
            )
        wide = _widened(given, first, y)
        cuts = {(total // 3 or 1, total - (total // 3 or 1)), tuple(map(len, split_rows(total, parts)))}
        for sizes, one in product(sorted(cuts), (given, partial(_slope, given))):
            _compare(one, loss, *(wide or (first, y)), sizes, 1e-9 if wide else 1e-4)
    return form, ""


def try_tokens(loss: Any, output: Any, short: Any, y: Any, tokens: Sequence[range], shared: bool = False) -> None:
    """Test with one batch whether a loss of whole sequences is the weighted mean of the losses of their parts.

    output   the model's output for some rows; `short`: the same for the first part of their tokens, by which one sees
             which dimension the tokens are. None: it is dimension 1
    y        targets of these rows
    tokens   the parts into which sequences are cut; `shared`: ranks have them

    Errors: PlanError for a loss that looks at other tokens than those of a part, such as one that compares each output
    with the next token; and where ranks have parts of an output without tokens.
    """
    count = tokens[-1].stop
    if short is None:
        dims = [1 if t.shape[1:2] == (count,) else -1 for t in tensors(output)]
    else:
        pairs = zip(tensors(output), tensors(short), strict=True)
        dims = [
            next((d for d, n in enumerate(t.shape) if s.dim() == t.dim() and n != s.shape[d]), -1) for t, s in pairs
        ]
    rows = min(count_rows(output), count_rows(y))
    y = take_rows(y, range(rows))
    sizes = {t.shape[d] for d, t in zip(dims, tensors(output), strict=True) if d >= 0}
    if shared and not sizes:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors(output))
        raise PlanError(
            f"model: gives {shapes} for sequences of {several(count, 'token')}, nothing for each token, of which "
            "context_parallel= gives each rank a part; possible are tp= or dp="
        )
    if sizes != {count} or not rows:
        return  # (it has nothing for each token of the input: nobody can say what a part of it is)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        output = _between(output, rows)
        try:
            value, again = loss(output, y), loss(output, y)
        except Exception as error:
            raise_unless_again(error, lambda: loss(output, y))
            return  # the profile of the layers will raise this error
        wide = _widened(loss, output, y)
        output, y = wide or (output, y)
        whole, found, scale = _number(loss(output, y)), 0.0, 0.0
        if _number(value) != _number(again) or not math.isfinite(whole):
            return
        for part in tokens:
            mine = _tokens_of(output, part, dims)
            own = map_tensors(y, partial(_some_tokens, part=part))
            try:
                value = loss(mine, own)
            except Exception as error:
                text = f"loss: cannot be computed of {len(part)} of {several(count, 'token')}: {error}"
                raise PlanError(f"{text}; {_TOKENS}") from error
            if isinstance(value, tuple):  # (sum, count)
                share = float(value[1]) / (float(loss(output, y)[1]) or 1)
            else:
                by_count = counts_elements(y) or says_count(loss)
                share = counted(own, loss) / (counted(y, loss) or 1) if by_count else len(part) / count
            if share:
                found, scale = found + _number(value) * share, scale + abs(_number(value) * share)
    if not math.isfinite(found) or abs(found - whole) > (1e-9 if wide else 1e-4) * max(abs(whole), scale):
        shown = " + ".join(str(len(part)) for part in tokens[:4]) + (" + ..." if len(tokens) > 4 else "")
        raise PlanError(
            f"loss: of sequences of {several(count, 'token')} it is {whole:.6g}, but their parts of {shown} tokens "
            f"give {found:.6g}; {_TOKENS}"
        )


class Trial:
    """In a run: tests a loss on a few rows of real outputs and targets, and on these beside rows of an earlier part.

    Targets may be uneven first in a later batch, as where data are sorted by length. So this is done for all parts of
    the first steps; for every part with a target below or above all before it, or whose rows are the first to have the
    least or the largest one unequally often, as where padding begins; and for as many others as take `_SHARE` of the
    time, but at least for one of ever rarer steps.
    """

    def __init__(self, loss: Any) -> None:
        self.loss = _copied(loss)  # (it may count its calls)
        self.first, self.last = -1, -1  # the first step of the run, and the one before
        self.earlier: tuple[Any, Any] | None = None
        self.ends: dict[tuple[int, bool], tuple[float, bool]] = {}  # of each target: its least and its largest number
        self.order: list[int] = []  # rows of a part, by how often they have these
        self.begin, self.spent = time.monotonic(), 0.0

    def is_due(self, step: int, y: Any) -> bool:
        """Whether to test the next part of a step, with these targets."""
        self.first = step if self.first < 0 else self.first
        done, another, self.last = step - self.first, step != self.last, step
        new, rare = self._is_new(y), another and (done & (done - 1) == 0 or done % _SELDOM == 0)
        return new or rare or done < _EVERY or self.spent < _SHARE * (time.monotonic() - self.begin)

    def _is_new(self, y: Any) -> bool:
        before, rows, often = dict(self.ends), count_rows(y), None
        for k, t in enumerate(tensors(y)):
            if t.device.type != "cpu" or not t.dim() or not 0 < t.numel() <= _SAMPLE or t.is_complex():
                continue  # (a GPU would be waited for)
            for least in (True, False):
                end = t.amin() if least else t.amax()
                known, uneven = self.ends.get((k, least), (float(end), False))
                if float(end) < known if least else float(end) > known:
                    known, uneven = float(end), False
                each = (t == known).reshape(len(t), -1).sum(1)
                self.ends[k, least] = known, uneven or bool(each.min() < each.max())
                often = each if often is None and len(t) == rows and each.min() < each.max() else often
        self.order = [] if often is None else often.argsort().tolist()
        return before != self.ends

    def __call__(self, output: Any, y: Any, step: int) -> None:
        """PlanError if the loss of some rows is not the weighted mean of the losses of their parts."""
        start = time.monotonic()
        rows = count_rows(y)
        order = self.order if len(self.order) == rows else list(range(rows))
        places = [order[k] for k in sorted({round(k * (rows - 1) / (_FEW - 1)) for k in range(_FEW)})] if rows else []

        def some(t: Tensor) -> Tensor:
            return t[places].detach() if t.dim() and len(t) == rows else t.detach()

        now = map_tensors(output, some), map_tensors(y, some)
        before, self.earlier = self.earlier, now
        tried = [(*now, (len(places) // 2, len(places) - len(places) // 2))] if len(places) > 1 else []
        if before is not None and _forms(before) == _forms(now):
            tried.append((*_beside(before, now), (count_rows(before[1]), len(places))))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for whole, targets, sizes in tried:
                wide = _widened(self.loss, whole, targets)
                given = wide or (whole, targets)
                try:
                    for what in (self.loss, partial(_slope, self.loss)):
                        _compare(what, self.loss, *given, sizes, 1e-9 if wide else 1e-4, f"in step {step}, ")
                except PlanError:
                    if _number(self.loss(*given)) == _number(self.loss(*given)):  # (else it draws random numbers)
                        raise
        self.spent += time.monotonic() - start


def _copied(loss: Any) -> Any:
    try:
        return copy.deepcopy(loss)
    except Exception:
        return loss


_FEW = 6  # rows of a part
_EVERY, _SELDOM = 8, 256  # steps
_SHARE = 0.02  # of the time


def _forms(value: Any) -> list[tuple[torch.dtype, torch.Size]]:
    """What the tensors of a value have in common if they can be joined row by row."""
    return [(t.dtype, t.shape[1:]) for t in tensors(value)]


def _beside(before: tuple[Any, Any], now: tuple[Any, Any]) -> tuple[Any, Any]:
    """The rows of two parts, one after the other."""
    rest = iter(tensors(before))

    def joined(t: Tensor) -> Tensor:
        other = next(rest)
        return torch.cat([other, t]) if t.dim() else t

    output, y = map_tensors(now, joined)
    return output, y


def _some_tokens(t: Tensor, part: range) -> Tensor:
    """The part of targets that have tokens; all of those that have one number for a row."""
    return t[:, part.start : part.stop] if t.dim() > 1 else t


def _tokens_of(output: Any, part: range, dims: Sequence[int]) -> Any:
    """The part of an output of whose tensors these dimensions are the tokens; -1: the tensor has none, and stays."""
    every = iter(dims)

    def of(t: Tensor) -> Tensor:
        dim = next(every)
        return t.narrow(dim, part.start, len(part)) if dim >= 0 else t

    return map_tensors(output, of)


_TOKENS = (
    "so its sequences cannot be cut. Possible are a loss that compares each output with the target in its place, and "
    "targets that are the next tokens already; or a plan without context_parallel= and slices="
)


def raise_unless_again(error: Exception, call: Callable[[], Any]) -> None:
    """Raise an error that a trial met, unless the same call meets one again: what comes after the trial, and would tell
    of it, meets it only then."""
    try:
        call()
    except Exception:
        return
    raise error


def _compare(given: Any, loss: Any, output: Any, y: Any, sizes: Sequence[int], bound: float, where: str = "") -> None:
    """Compare the loss of a batch with the weighted mean of its parts of these sizes."""
    bound, what = (100 * bound, "its gradient times output") if _slope is getattr(given, "func", 0) else (bound, "it")
    whole, weight = _number(given(output, y)), counted(y, loss)
    if not math.isfinite(whole) or not weight:
        return
    found = plain = scale = 0.0
    start = 0
    for size in sizes:
        part, start = range(start, start + size), start + size
        own = take_rows(y, part)
        mine = counted(own, loss) if size else 0
        if not mine:
            continue
        try:
            cut = partial(_rows_of, part=part, count=sum(sizes))
            value = _number(given(map_tensors(output, cut), own))
        except Exception as error:
            raise PlanError(f"loss: cannot be computed of {size} of {sum(sizes)} rows: {error}; {_WAYS}") from error
        found, plain = found + value * mine / weight, plain + value
        scale += abs(value * mine / weight)
    if math.isfinite(found) and abs(found - whole) <= bound * max(abs(whole), scale):
        return
    kind = "" if abs(plain - whole) > bound * max(abs(whole), scale) else "; it seems to be a sum, and no mean"
    shown = " + ".join(map(str, sizes[:4])) + (" + ..." if len(sizes) > 4 else "")
    over = "what it counts" if says_count(loss) else "target elements" if counts_elements(y) else "rows"
    raise PlanError(
        f"loss: {where}of {sum(sizes)} rows {what} is {whole:.6g}, but its parts of {shown} rows, weighted by {over}, "
        f"give {found:.6g}{kind}; {_WAYS}"
    )


def _slope(loss: Any, output: Any, y: Any) -> Tensor:
    """How a loss changes with its output. (Of parts it may be another at the same value: a loss may detach some.)"""
    leaves = map_tensors(output, lambda t: t.detach().requires_grad_(t.is_floating_point()))
    with torch.enable_grad():
        value = scalar(loss(map_tensors(leaves, torch.clone), y))
    inputs = [t for t in tensors(leaves) if t.requires_grad and t.dim() and len(t) == count_rows(y)]
    found = torch.autograd.grad(value, inputs, allow_unused=True) if value.requires_grad else ()
    return sum(((g * t).abs().sum() for g, t in zip(found, inputs, strict=False) if g is not None), torch.zeros(()))


def _rows_of(t: Tensor, part: range, count: int) -> Tensor:
    """The part of a tensor that has `count` rows; all of a tensor that has another number."""
    return t[part.start : part.stop] if t.dim() and len(t) == count else t


_WAYS = (
    "so it cannot be split into micro-batches. Let it return (sum, count), or say what its mean is over with "
    "minipar.models.losses.weighted(loss, count=lambda y: ...); or train with dp=1 microbatches=1"
)


def _between(output: Any, rows: int) -> Any:
    """So many rows, each of which is a mixture of two rows of an output. So they are possible outputs, too."""
    count = count_rows(output)
    a, b, share = torch.randint(count, (rows,)), torch.randint(count, (rows,)), torch.rand(rows)

    def mix(t: Tensor) -> Tensor:
        if not t.dim() or len(t) != count:
            return t  # it has no rows, so it is the same for every part of a batch
        one, other = t[a.to(t.device)], t[b.to(t.device)]
        if not t.is_floating_point():
            return one
        part = share.to(t.device, t.dtype).view(-1, *(1,) * (t.dim() - 1))
        return one * part + other * (1 - part)

    return map_tensors(output, mix)


def _widened(loss: Any, output: Any, y: Any) -> tuple[Any, Any] | None:
    """Output and y in float64, where rounding errors are small; None if the loss does not take, or keep, float64."""
    wide = [map_tensors(value, lambda t: t.double() if t.is_floating_point() else t) for value in (output, y)]
    try:
        value = scalar(loss(*wide))
    except Exception as error:
        raise_unless_again(error, lambda: loss(*wide))
        return None
    return (wide[0], wide[1]) if value.dtype is torch.float64 else None


def _number(value: Any) -> float:
    return float(scalar(value))
