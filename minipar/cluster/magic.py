"""`%%ranks`: a notebook cell that runs on every rank.

    %load_ext minipar

    %%ranks 4
    x = torch.full((2,), float(rank))
    comm.allreduce(x)

`%%ranks [n] [--only 0,2] [--in f,x] [--out name] [--quiet]`: see `Cells.cell`; `%ranks` says which ranks are running,
and `%ranks close` ends them.

The driver checks the cell and sends its text; each rank runs it in its own `__main__`, where variables are kept. What
ranks print is shown while they run, as by `Cluster.run`. Nothing here needs torch or IPython to be imported.
"""

from __future__ import annotations

import ast
import itertools
import keyword
import linecache
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from minipar.cluster import failures, worker
from minipar.cluster.local import Cluster
from minipar.cluster.members import unpack
from minipar.cluster.output import Show, name_ranks
from minipar.cluster.parcel import Parcel, pack
from minipar.cluster.ranks import MOST_LOCAL, Call
from minipar.errors import MiniparError, PlanError, RankError
from minipar.wording import several

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_DEFAULT_RANKS = 4
_SHOWN = 1 << 20  # most characters that are shown of a rank's output in one cell; a notebook with more is hard to open
_OPTIONS = "n, --only 0,2, --in f,x, --out name, --quiet"
_UNKNOWN = re.compile(r"name '(\w+)' is not defined")


def load(shell: InteractiveShell, communicator: Callable[[object], object]) -> None:
    """Give this shell the magics `%%ranks` and `%ranks`.

    `communicator(comm)` gives the next value of a rank's variable `comm`; all ranks call it together.
    """
    cells = Cells(shell, communicator)
    register: Callable[..., None] = shell.register_magic_function
    register(cells.cell, "cell", "ranks")
    register(cells.line, "line", "ranks")


class Cells:
    """The cluster behind one notebook's `%%ranks` cells."""

    def __init__(self, shell: InteractiveShell, communicator: Callable[[object], object]) -> None:
        self._shell, self._communicator = shell, communicator
        self._cluster: Cluster | None = None
        self._communicates = False  # whether a cell has used `comm` since this cluster began

    def cell(self, line: str, cell: str) -> None:
        """%%ranks [n] [--only 0,2] [--in f,x] [--out name] [--quiet]: run this cell on every rank.

        Each rank has its own variables, which are kept between cells; `rank`, `world_size`, `comm` (a Communicator)
        and `torch` are defined from the start. What the ranks print is shown while they run, the same line of several
        ranks once; then the value of the last expression in rank order (not after a `;`).

        n: the number of ranks (default: those that are running, or else 4); another number starts new ones.
        --only 0,2: run on these ranks only.
        --in f,x: give them the notebook's functions and variables of these names, as they are now.
        --out name: the values of the last expression, in rank order, as a list in the notebook's variable `name`.
        --quiet: show errors only.

        An exception on a rank is this cell's exception, with the traceback of that rank.
        """
        try:
            self._run(line, cell)
        except BaseException as error:
            raise _as_shown(error, self._cluster, self._shell.user_ns) from None

    def line(self, line: str) -> None:
        """%ranks: which ranks are running. %ranks close: end them."""
        word = line.strip()
        if word not in ("", "close"):
            error = PlanError(
                f"%ranks {word}: possible are %ranks (what is running) and %ranks close; %%ranks runs cells"
            )
            raise _as_shown(error, None, {})
        if word == "close":
            self._close()
        elif self._cluster is None:
            print(f"no ranks; a %%ranks cell starts {_DEFAULT_RANKS}, or as many as it says")
        else:
            print(f"{several(self._cluster.size, 'rank')} on {self._cluster.device}: {self._cluster.state}")

    def _run(self, line: str, cell: str) -> None:
        running = _DEFAULT_RANKS if self._cluster is None else self._cluster.size
        request = _parse(line, running)
        # The cell's number is counted here: IPython's own may be one ahead, depending on its version.
        name = f"<%%ranks In[{len(self._shell.user_ns['In']) - 1}]>"
        _remember_source(name, f"%%ranks {line}\n{cell}")
        _, last = _compile(cell, name)
        given = {name: self._variable(name) for name in request.given}
        if request.out and last is None:
            raise PlanError(f"--out {request.out}: the cell must end with an expression, whose values it then gets")
        self._communicates = self._communicates or _mentions_comm(cell)
        cluster = self._ranks(request)
        if self._communicates and len(request.ranks) < cluster.size:
            cluster.run(_make_comm, self._communicator)  # (all ranks must take part)
        communicator = self._communicator if self._communicates else None
        task = CellTask(cell, line, name, communicator, bool(request.out), given)
        show = Show(_SHOWN, request.quiet)
        try:
            answers = cluster.perform(Call(request.ranks, run_cell, (task,), show=show))
        except RankError:
            _check_sendable(given)
            raise
        pairs = list(zip(request.ranks, answers, strict=True))
        if not request.quiet and not cell.rstrip().endswith(";"):
            _show_values(request.ranks, [text for text, _ in answers])
        if request.out:
            what = f"--out {request.out}: the value of rank"
            values = [unpack(Parcel(blob), f"{what} {rank}") for rank, (_, blob) in pairs]
            self._shell.push({request.out: values})

    def _variable(self, name: str) -> object:
        if name not in self._shell.user_ns:
            raise PlanError(f"--in {name}: the notebook has no variable {name!r}")
        return self._shell.user_ns[name]

    def _ranks(self, request: Request) -> Cluster:
        """The running cluster, or a new one of the requested size."""
        if self._cluster is not None and self._cluster.size != request.size:
            if not request.quiet:
                print(
                    f"{request.size} new ranks replace the {self._cluster.size} that were running, and their variables"
                )
            uses = self._communicates
            self._close()
            self._communicates = uses
        if self._cluster is None:
            self._cluster = Cluster(request.size)
        return self._cluster

    def _close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
        self._cluster, self._communicates = None, False


# The line after %%ranks


@dataclass(frozen=True)
class Request:
    """What the line of a cell requests. `ranks` are those that run it."""

    size: int
    ranks: tuple[int, ...]
    out: str
    quiet: bool
    given: tuple[str, ...] = ()


def _parse(line: str, running: int) -> Request:
    """Read the line; PlanError, which names the value, if it is impossible."""
    size, only, out, quiet, given = running, None, "", False, ""
    counted = False
    try:
        words = iter(shlex.split(line, comments=True))
    except ValueError as error:
        raise PlanError(f"%%ranks {line.strip()}: {error}; possible are {_OPTIONS}") from None
    for word in words:
        option, equals, value = word.partition("=")
        if option in ("--only", "--in", "--out") and not equals:
            value = next(words, "")
        if option == "--only":
            only = value
        elif option == "--in":
            given = ",".join(_variable("--in", word.strip()) for word in value.split(","))
        elif option == "--out":
            out = _variable("--out", value)
        elif word == "--quiet":
            quiet = True
        elif counted or word.startswith("--"):
            raise PlanError(f"%%ranks: unknown argument {word!r}; possible are {_OPTIONS}")
        else:
            size, counted = _count(word), True
    ranks = tuple(range(size)) if only is None else _chosen(only, size)
    return Request(size, ranks, out, quiet, tuple(filter(None, given.split(","))))


def _count(word: str) -> int:
    if not word.isdecimal() or len(word) > 9 or not 1 <= int(word) <= MOST_LOCAL:
        raise PlanError(f"n={word}: must be a whole number from 1 to {MOST_LOCAL:,}; possible are {_OPTIONS}")
    return int(word)


def _variable(option: str, word: str) -> str:
    if not word.isidentifier() or keyword.iskeyword(word):
        raise PlanError(f"{option} {word!r}: must be the name of a variable")
    return word


def _chosen(text: str, size: int) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or len(word) > 9 or int(word) >= size:
            there = "rank 0 is" if size == 1 else f"ranks 0 to {size - 1} are"
            raise PlanError(f"--only {text}: there is no rank {word!r}; {there} there")
    ranks = sorted(map(int, words))
    if len(set(ranks)) != len(ranks):
        raise PlanError(f"--only {text}: each rank can be named once")
    return tuple(ranks)


# The cell's text, in the driver and in the ranks


def _compile(cell: str, name: str) -> tuple[Any, Any]:
    """The code of the cell and of its last expression (None where it ends otherwise). SyntaxError."""
    tree = ast.parse("\n" + cell, name)  # one line more, so that lines are numbered as in the notebook
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with warnings.catch_warnings():
        if not worker.in_rank():  # (the ranks show the warnings)
            warnings.simplefilter("ignore")
        body = compile(tree, name, "exec", dont_inherit=True)
        if not isinstance(last, ast.Expr):
            return body, None
        return body, compile(ast.Expression(last.value), name, "eval", dont_inherit=True)


def _mentions_comm(cell: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "comm" for node in ast.walk(ast.parse(cell)))


def _remember_source(name: str, text: str) -> None:
    """Let tracebacks show the lines of this cell."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


# In a rank


@dataclass(frozen=True)
class CellTask:
    """What a rank gets to run, with the notebook's variables in `given`; its last value is sent back if `wanted`."""

    cell: str
    line: str
    name: str
    communicator: Callable[[object], object] | None
    wanted: bool
    given: Mapping[str, object]


def run_cell(task: CellTask) -> tuple[str, bytes]:
    """Run the cell in this rank's `__main__`. The text of its last value ("" for None); the value, pickled, if wanted.

    RankError when it is wanted and cannot be pickled.
    """
    __tracebackhide__ = True
    _remember_source(task.name, f"%%ranks {task.line}\n{task.cell}")
    namespace = _namespace()
    if task.communicator:
        _make_comm(task.communicator)
    namespace.update(task.given)
    body, last = _compile(task.cell, task.name)
    exec(body, namespace)
    value = None if last is None else eval(last, namespace)
    return "" if value is None else repr(value), _packed(value) if task.wanted else b""


def _packed(value: object) -> bytes:
    __tracebackhide__ = True
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        kind = type(value).__name__
        reason = f"the value of rank {worker.context().rank}, a {kind}, cannot be sent: {failures.said(error)}"
        raise RankError(f"--out: {reason}; let the cell end with tensors, numbers or text") from None


def _namespace() -> dict[str, Any]:
    """The variables of this rank: its `__main__`, so that classes of a cell can be pickled there too."""
    import torch

    namespace = sys.modules["__main__"].__dict__
    context = worker.context()
    for name, value in {"rank": context.rank, "world_size": context.size, "torch": torch}.items():
        namespace.setdefault(name, value)
    return namespace


def _make_comm(communicator: Callable[[object], object]) -> None:
    """Set `comm`, and make it again after a failure. All ranks do this together, if a cell has used `comm`."""
    namespace = _namespace()
    namespace["comm"] = communicator(namespace.get("comm"))


# What the notebook shows


def _show_values(ranks: Sequence[int], texts: Sequence[str]) -> None:
    """Print the values in rank order, the same one of neighbouring ranks once, nothing for None."""
    pairs = zip(ranks, texts, strict=True)
    for text, group in itertools.groupby(pairs, key=lambda pair: pair[1].rstrip("\n")):
        if text:
            print(_value([rank for rank, _ in group], text))


def _value(ranks: list[int], text: str) -> str:
    if "\n" in text:  # the lines of a tensor stay below each other
        return f"{name_ranks(ranks)} =>\n{_indent(text)}"
    return f"{name_ranks(ranks)} => {text}"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.split("\n"))


def _check_sendable(given: Mapping[str, object]) -> None:
    """RankError, which names it, for a variable that cannot be sent."""
    for name, value in given.items():
        try:
            pack(value, inside=True)
        except Exception as error:
            raise RankError(
                f"--in {name}: a {type(value).__name__} cannot be sent to the ranks: {failures.said(error)}"
            ) from None


def _as_shown(error: BaseException, cluster: Cluster | None, variables: Mapping[str, object]) -> BaseException:
    """The exception, changed so that the notebook shows what happened in the rank and not the driver's own frames."""
    note = failures.note_of(error)
    if note is not None:
        text = f"{error.reason}\n{note}" if isinstance(error, RankError) else note
        unknown = _UNKNOWN.match(str(error)) if isinstance(error, NameError) else None
        if unknown and unknown[1] in variables:
            text += f"\n{unknown[1]} is a variable of the notebook; the ranks have their own: %%ranks --in {unknown[1]}"
        if isinstance(error, SyntaxError):  # IPython would show it as one of this cell
            error = RankError("a rank met a SyntaxError", note)
    elif isinstance(error, SyntaxError):  # an error of the cell: IPython shows it well without the traceback
        return error.with_traceback(None)
    elif isinstance(error, MiniparError | KeyboardInterrupt):
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
    else:
        return error  # an error of minipar itself: show everything
    if cluster is not None and "alive" in cluster.state:
        text += f"\n{cluster.state}; the others start anew at the next cell, without their variables"
    error._render_traceback_ = text.splitlines  # type: ignore[attr-defined]
    return error
