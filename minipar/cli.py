"""The command line, for people and scripts (--json): `minipar simulate | run | memory | export | shard | ...`.

Exit status: 0 done; 2 the request is impossible (one line says why and what is possible); 1 anything else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from minipar.cluster import launched
from minipar.costs.device import DeviceSpec, holding, known_hardware
from minipar.costs.quantities import quantity
from minipar.errors import DeviceOutOfMemory, MiniparError, PlanError, ProgramError, StoreError
from minipar.models.table import PRESETS, Branchy
from minipar.program import Op
from minipar.program.mesh import AXES, Mesh
from minipar.program.rows import MOST_ROWS
from minipar.strategies import schedules
from minipar.strategies.keys import check_keys, form_pairs
from minipar.strategies.micro_batch_size import without_micro_batch_size
from minipar.strategies.plan import Plan, table
from minipar.wording import several
from minipar_course import freezing, lesson_commands

if TYPE_CHECKING:
    from minipar.program.shape import Shape
    from minipar.sharding.propagation import Divided
    from minipar.training.training import Run


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise PlanError(f"{self.prog}: {message}")


MOST_PROCESSES = 64  # that `run` starts on this machine
MOST_RANKS = 65_536  # of a mesh that `shard` divides a model over
MOST_LISTED = 1_000_000  # ranks and micro-batches of which `memory` looks at each
_EMULATE = "emulate a device: a preset such as 'pcie', and words such as 'forward=20ms bandwidth=1GB/s memory=64MiB'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Without a command it lists them."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        if not given:
            print(overview())
            return 0
        options = _parser().parse_args(given)
        result = options.command(options)
        if launched.speaks():
            print(json.dumps(result, allow_nan=False) if options.json else options.show(result))
        return int(options.failed(result))
    except (PlanError, ProgramError, DeviceOutOfMemory, StoreError) as error:
        _say(error.reason)
        return 2
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 1
    except MiniparError as error:
        _say(str(error))
        return 1


def _say(wrong: str) -> None:
    """Write what went wrong. Of several processes that torchrun started rank 0 does that, and ends first."""
    if launched.speaks():
        print(f"minipar: {wrong}", file=sys.stderr, flush=True)
    else:
        launched.await_rank_0()


# The commands with an example each, as `minipar` alone prints them.
EXAMPLES = {
    "simulate": 'minipar simulate "pp=4 microbatches=8" --layers 8',
    "run": 'minipar run "pp=2 dp=2 microbatches=4" --model gpt-tiny --steps 3 --check',
    "memory": 'minipar memory "zero=3 dp=8 checkpoint=sqrt" --model gpt2-xl',
    "estimate": 'minipar estimate "tp=8 pp=8 micro_batch_size=1" --model gpt3-175b --hardware a100-80gb',
    "validate": "minipar validate",
    "shard": "minipar shard --model gpt-tiny --mesh dp=2,tp=2",
    "plan": "minipar plan --model gpt3-175b --hardware a100-80gb --nodes 128 --batch 1536",
    "export": 'minipar export "tp=2 pp=2 microbatches=4" --to megatron',
    "schedules": "minipar schedules",
    "keys": "minipar keys",
    "doctor": "minipar doctor",
    "bench": "minipar bench simulator --quick",
    "lessons": "minipar lessons list",
    "notebooks": "minipar notebooks freeze lessons/explorer.ipynb",
}


def overview() -> str:
    """What `minipar` alone prints: each command, what it does, and an example."""
    parser = _parser()
    actions = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    lines = [str(parser.description), ""]
    for action in actions._choices_actions:
        lines += [f"  {action.dest:<10} {action.help}", f"             {EXAMPLES[action.dest]}"]
    return "\n".join([*lines, "", "minipar COMMAND --help says more. Every command takes --json."])


def _parser() -> _Parser:
    parser = _Parser(prog="minipar", description="Parallel training that you can see: verify, simulate, run, draw.")
    parser.set_defaults(failed=lambda result: False)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Any, show: Any, text: str) -> argparse.ArgumentParser:
        built = commands.add_parser(name, help=text, description=text)
        built.add_argument("--json", action="store_true", help="print one JSON object")
        built.set_defaults(command=run, show=show)
        return built

    one = command("simulate", _simulate, _show_simulate, "predict a plan's step with costs given by hand")
    one.add_argument("plan", metavar="PLAN", help="key=value words in one string, such as 'pp=4 microbatches=8'")
    shape = one.add_mutually_exclusive_group()
    shape.add_argument("--layers", type=_count, help="number of equal layers (default: one for each stage)")
    shape.add_argument("--model", help="or those of a preset, such as branchy: their number, ties and edges")
    one.add_argument("--steps", type=_count, default=None, help="training steps (default 1)")
    one.add_argument("--forward", type=_time, default=1.0, help="time of a micro-batch's forward on one rank's share")
    one.add_argument("--backward", type=_time, default=None, help="time of its backward (default 2)")
    one.add_argument("--input-gradient", type=_time, default=None, help="time of the input half of the backward")
    one.add_argument("--weight-gradient", type=_time, default=None, help="time of the weight half of the backward")
    one.add_argument("--latency", type=_time, default=0.0, help="delay of every message")
    one.add_argument("--stage-factors", type=_times, default=(), help="factors on the compute times, x0,x1,...")

    one = command("run", _run, _show_run, "train a model by a plan on real processes, also on those of torchrun")
    one.add_argument("plan", metavar="PLAN", help="key=value words, such as 'pp=2 dp=2 microbatches=8', or a TOML file")
    one.add_argument(
        "--model", required=True, help="name of a preset, such as gpt-tiny; or module:build, a function that gives "
        "(model, data) or (model, data, loss), as `train` takes them",
    )  # fmt: skip
    one.add_argument("--steps", type=_count, required=True, help="number of training steps")
    one.add_argument("--batch", type=_rows, default=None, help="rows of a step (default 16)")
    one.add_argument("--ranks", type=_count, default=None, help="ranks to start; must be what the plan needs")
    one.add_argument("--seed", type=_seed, default=0, help="seed of parameters, data and dropout")
    one.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of parameters and rows")
    one.add_argument("--lr", type=_time, default=0.1, help="learning rate of SGD")
    one.add_argument("--check", action="store_true", help="compare every gradient with plain torch's")
    one.add_argument("--no-reference", action="store_true", help="do not train plain torch beside it")
    one.add_argument("--save", metavar="FOLDER", help="save the run there, at its end")
    one.add_argument("--save-every", type=_count, default=None, metavar="STEPS", help="and after so many steps")
    one.add_argument("--resume", metavar="FOLDER", help="go on with the run that is saved there")
    one.add_argument("--memory", action="store_true", help="follow every allocation: peaks with all that is in them")
    one.add_argument("--emulate", type=_device, metavar="SPEC", help=_EMULATE)
    one.add_argument("--live", action="store_true", help="draw progress, loss and the current step while it runs")

    one = command(
        "memory",
        _memory,
        _show_memory,
        "bytes on every rank of a plan, from formulas; where none is known, of its program",
    )
    one.add_argument("plan", metavar="PLAN", help="key=value words, such as 'zero=3 dp=8 checkpoint=sqrt'")
    one.add_argument(
        "--model",
        required=True,
        help="name of a preset or a published model, such as gpt3-175b; or module:build, as for run",
    )
    one.add_argument("--batch", type=_rows, default=None, help="rows of a step (default: one for each micro-batch)")

    one = command("estimate", _estimate, _show_estimate, "seconds and memory of a step on machines that are not here")
    one.add_argument(
        "plan",
        metavar="PLAN",
        help="key=value words, such as 'tp=8 pp=8 micro_batch_size=1'; without dp=, as many replicas as fill the nodes",
    )
    one.add_argument(
        "--model", required=True, help="a preset such as gpt3-175b, 'gpt layers=24 hidden=1024 heads=16 sequence=1024 "
        "vocabulary=50257' (or llama, mixture), a TOML file, or module:build, which gives a torch model and an example",
    )  # fmt: skip
    one.add_argument(
        "--hardware", required=True, help="a preset such as a100-80gb, with words such as far=50GB/s; a TOML file; or "
        "this-machine, which is calibrated first",
    )  # fmt: skip
    one.add_argument("--nodes", type=_count, default=None, help="number of nodes (default: what the plan needs)")
    one.add_argument("--gpus-per-node", type=_count, default=None, help="devices of a node (default: the hardware's)")
    one.add_argument("--stack", default=None, help="the software: megatron-2021, megatron-core, torch-fsdp, "
        "torch-fsdp-compile or deepspeed (default: the one that fits the plan)")  # fmt: skip
    one.add_argument("--batch", type=_rows, default=None, help="rows of a step (default: those of the micro-batches)")
    command("validate", _validate, _show_validate, "predictions beside published numbers, row by row")

    one = command("shard", _shard, _show_shard, "how a model's operators are divided over a mesh, and what that sends")
    one.add_argument("--model", required=True, help="name of a preset, such as gpt-tiny; or module:build, as for run")
    one.add_argument("--mesh", required=True, type=_mesh, help="axes and their sizes, such as dp=2,tp=2")
    one.add_argument(
        "--annotate", default=None, metavar="RULES",
        help="patterns of names and forms, such as '*.mlp.0=S-1 on tp; *.mlp.2=P on tp' (default: the forms that `run` "
        "takes)",
    )  # fmt: skip
    one.add_argument(
        "--sequence-parallel", action="store_true", help="between the divided operators the sequence is cut"
    )
    one.add_argument("--batch", type=_rows, default=16, help="rows of a step (default 16)")

    one = command("plan", _plan, _show_plan, "the fastest plans for a model on machines that are not here, and why")
    one.add_argument("--model", required=True, help="a preset such as gpt3-175b, numbers, a TOML file, or module:build")
    one.add_argument("--hardware", required=True, help="a preset such as a100-80gb, with words such as far=50GB/s")
    one.add_argument(
        "--nodes", type=_count, default=None, help="how many nodes there are (default: the hardware's, or 1)"
    )
    one.add_argument("--gpus-per-node", type=_count, default=None, help="devices of a node (default: the hardware's)")
    one.add_argument("--batch", type=_rows, required=True, help="rows of a step over all replicas")
    one.add_argument("--pin", default="", metavar="WORDS", help="keys that are fixed, such as 'tp=8 zero=1'")
    one.add_argument(
        "--memory", type=_bytes, default=None, help="bytes of a device to use, such as 70GB (default: all)"
    )
    one.add_argument("--best", type=_count, default=20, help="how many plans to show (default 20)")
    one.add_argument("--runs", action="store_true", help="only plans that minipar itself can run")
    one.add_argument(
        "--to", default="", metavar="SYSTEM", help="only plans that megatron, deepspeed or torchtitan runs"
    )
    one.add_argument("--explain", metavar="KEY", help="also what each value of a key, such as tp, would cost instead")
    one.add_argument("--diff", metavar="PLAN", help="also what another plan has and takes otherwise than the best one")
    one.add_argument("--front", action="store_true", help="also the least time for less and less memory")

    one = command("export", _export, _show_export, "a plan as another system's flags or configuration, or as a script")
    one.add_argument("plan", metavar="PLAN", help="key=value words, as `plan` prints them, too; or a file of Plan.save")
    one.add_argument("--to", required=True, metavar="SYSTEM", help="megatron, deepspeed, torchtitan or torchrun")
    one.add_argument("--model", default=None, help="a name, words or a config.json, as for estimate, for its sizes")
    one.add_argument("--batch", type=_rows, default=None, help="rows of a step (default: one for each micro-batch)")
    one.add_argument("--nodes", type=_count, default=None, help="machines (default 1)")
    one.add_argument("--gpus-per-node", type=_count, default=None, help="ranks of each machine")
    one.add_argument("--output", metavar="FILE", default=None, help="write it to this file")

    one = command("schedules", _schedules, _show_schedules, "list the schedules, with their constraints")
    one.add_argument("--markdown", action="store_true", help="as a Markdown table, which docs/schedules.md has")
    one = command("keys", _keys, _show_keys, "list the keys of a plan; of a few all that they take and do not go with")
    one.add_argument("names", metavar="NAME", nargs="*", help="of which keys to say all (default: a line of each)")
    one.add_argument("--markdown", action="store_true", help="as docs/combinations.md: which choices go together")
    one = command("doctor", _doctor, _show_doctor, "what works on this machine, and how to mend what does not")
    one.set_defaults(failed=lambda result: bool(result["to mend"]))
    one = command("bench", _bench, _show_bench, "run the benchmarks: minipar beside torch's own tools")
    one.add_argument("names", metavar="NAME", nargs="*", help="which benchmarks (default: all)")
    one.add_argument("--quick", action="store_true", help="fewer repetitions")
    one.add_argument("--picture", metavar="PATH", help="write the picture of a benchmark that draws one (comm)")
    lesson_commands.add(commands)
    freezing.add(commands)
    return parser


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; possible is 1 or more")
    return number


def _rows(text: str) -> int:
    number = _count(text)
    if number > MOST_ROWS:
        raise argparse.ArgumentTypeError(f"{text} is too large; possible is 1 to {MOST_ROWS}")
    return number


def _time(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a finite number of at least 0")
    return number


def _device(text: str) -> DeviceSpec:
    try:
        return DeviceSpec.parse(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seed(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number from 0 to 2^63 - 1")
    return number


def _times(text: str) -> tuple[float, ...]:
    return tuple(_time(part) for part in text.split(","))


# simulate -------------------------------------------------------------------------------------------------------------


def _simulate(options: argparse.Namespace) -> dict[str, Any]:
    from minipar.prediction.simulator import simulate

    plan = Plan.parse(options.plan)
    from minipar.costs import analytic
    from minipar.models import shapes
    from minipar.program.shape import uniform

    if options.model and plan.sharing > 1:
        shape, costs = _nodes(options.model, plan), None
    else:
        layers = options.layers or 1 + max(map(max, plan.placement()))
        shape = shapes.shape(options.model) if options.model else uniform(layers)
        costs = analytic.layer_costs(options.model, 1) if options.model else None
    program = plan.compile(shape, steps=options.steps or 1, costs=costs)
    halves = (options.input_gradient, options.weight_gradient)
    backward = options.backward
    if backward is None:
        backward = sum(halves) if None not in halves else 2.0
    predicted = partial(
        simulate,
        forward=options.forward,
        backward=backward,
        input_gradient=halves[0],
        weight_gradient=halves[1],
        latency=options.latency,
        stage_factors=options.stage_factors,
    )
    trace = run = predicted(program)
    if plan.asynchronous and options.steps is None:  # (one step is too short to show a run's weight versions)
        run = predicted(plan.compile(shape, steps=plan.settling_steps, check=False, costs=costs))
    if not math.isfinite(trace.time):
        raise PlanError("the times given add up to more than a number can hold; use smaller ones")
    note = {}
    if options.layers is None and options.model is None:
        note["model"] = f"{several(shape.layers, 'equal layer')}, one for each stage; --layers or --model gives others"
    return {
        **note,
        "time": trace.time,
        "bubble_of_total": trace.bubble_of_total(),
        "bubble_of_ideal": trace.bubble_of_ideal(),
        "window_bubble": trace.window_bubble(),
        "in_flight": trace.in_flight(),
        "weight_versions": run.weight_versions(),
        "staleness": run.staleness(),
        "messages_per_microbatch": trace.messages_per_microbatch(),
        "instructions": len(program),
    }


def _nodes(name: str, plan: Plan) -> Shape:
    """The shape of a preset whose layers ranks share: its nodes on the first of them. Only a capture in torch can say
    what they are."""
    from minipar import data, models
    from minipar.costs.slicing import token_ranges
    from minipar.execution.sliced import count_tokens
    from minipar.models.parameter_groups import shape_of
    from minipar.sharding.sharded import local_model
    from minipar.training.training import annotations_of

    x, _ = data.for_model(name).batch(0, 1)
    slices = token_ranges(plan.cut, count_tokens([x])) if plan.slice_count > 1 else ()
    return shape_of(local_model(models.build(name), 0, Mesh(plan.shared), x, annotations_of(plan), plan.inputs, slices))


def _show_simulate(result: dict[str, Any]) -> str:
    return _table({key.replace("_", " "): value for key, value in result.items()})


# run ------------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> dict[str, Any]:
    plan, batch = _given_plan(options.plan, options.batch)
    if options.ranks is not None and options.ranks != plan.ranks:
        raise PlanError(
            f"--ranks {options.ranks}: plan {plan} needs {several(plan.ranks, 'rank')} (dp x pp x tp, and servers)"
        )
    if plan.ranks > MOST_PROCESSES and not launched.started():
        raise PlanError(
            f"plan {plan}: needs {several(plan.ranks, 'rank')}, and each is a process here; possible are up to "
            f"{MOST_PROCESSES}, torchrun on several machines, or minipar estimate"
        )
    if options.emulate and launched.started():
        raise PlanError(
            f"--emulate {options.emulate}: torchrun's processes emulate no device; leave it out, or start minipar run "
            "without torchrun"
        )
    from minipar.costs import analytic
    from minipar.models import shapes

    # Check the plan before torch is imported and ranks are started. (A profile decides split=auto later.)
    if plan.sharing == 1 and ":" not in options.model:  # (how layers are shared only a capture in torch can say)
        costs = analytic.layer_costs(options.model, 1) if plan.split == "auto" else None
        plan.compile(shapes.shape(options.model), costs=costs)

    import torch

    from minipar.cluster import Cluster
    from minipar.execution.following import Screen
    from minipar.models.tensors import dtype_named
    from minipar.program.comm_volume import in_words
    from minipar.training.training import train

    model, rows, loss = _to_train(options.model, options.seed)
    own = nullcontext(None) if launched.started() else Cluster(plan.ranks, device=options.emulate or "auto")
    with own as cluster:
        run = train(
            model,
            rows,
            plan,
            cluster=cluster,
            steps=options.steps,
            batch=batch or 16,
            loss=loss,
            optimizer=partial(torch.optim.SGD, lr=options.lr),
            seed=options.seed,
            dtype=dtype_named(options.dtype),
            reference=not options.no_reference,
            check=options.check,
            save=options.save,
            save_every=options.save_every,
            resume=options.resume,
            memory=options.memory,
            progress=not options.json and not options.live and sys.stderr.isatty(),
            watch=Screen() if options.live else None,
        )
    predicted, measured = run.predicted, run.trace
    steps = measured.program.steps  # of the program that the traces show
    result: dict[str, Any] = {
        "losses": run.losses,
        "reference_losses": [] if run.reference is None else run.reference.losses,
        "first_step": run.first_step,
        "time": {"predicted": predicted.time / steps, "measured": measured.time / steps},
        "bubble_of_total": {"predicted": predicted.bubble_of_total(), "measured": measured.bubble_of_total()},
        "peak_memory": [
            {"predicted": p, "measured": m, "by_kind": measured.peak_by_kind(rank)}
            for rank, (p, m) in enumerate(zip(predicted.peak_memory(), measured.peak_memory(), strict=True))
        ],
        "bytes_sent": run.bytes_sent,
        "bytes_by_link": {link: size // steps for link, size in in_words(measured.bytes_by_link()).items()},
        "bytes_by_kind": {kind: size // steps for kind, size in measured.bytes_by_kind().items()},
        "weight_versions": measured.weight_versions(),
        "staleness": measured.staleness(),
        "asynchronous": plan.asynchronous,
    }
    if run.service is not None:
        result |= _service(run, plan)
    result["checked"] = str(run.checked)
    if options.check:
        result["max_gradient_error"] = run.max_error()
    return result


def _given_plan(text: str, batch: int | None) -> tuple[Plan, int | None]:
    """A plan of words, which may say micro_batch_size=, or in a TOML file; and the rows of a step."""
    if text.endswith(".toml"):
        return Plan.load(text), batch
    words, batch = without_micro_batch_size(text, batch)
    return Plan.parse(words), batch


def _to_train(name: str, seed: int) -> tuple[Any, Any, Any]:
    """Model, data and loss of a preset, or of module:build."""
    from minipar import data, models

    if ":" not in name:
        return partial(models.build, name), data.for_model(name, seed=seed), models.loss_of(name)
    built = _called(name, _GIVEN)
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise PlanError(f"--model {name}: must return {_GIVEN}, as `train` takes them")
    from torch.nn.functional import cross_entropy

    return built if len(built) == 3 else (*built, cross_entropy)


_GIVEN = "(model, data) or (model, data, loss), where None is the model's own loss"


def _service(run: Run, plan: Plan) -> dict[str, Any]:
    """Further results of a run with parameter servers, such as bytes that servers received and sent in a step."""
    assert run.service is not None
    parameters = sum(sum(group.tensors) for group in run.program.groups)
    steps, servers = run.program.steps, range(plan.dp, plan.ranks)
    applied = [
        [row for row in run.predicted.program.ranks[rank] if row.op in (Op.ACCEPT, Op.REPLY)] for rank in servers
    ]
    predicted = [sum(part.bytes for ins in row for part in ins.parts) // steps for row in applied]
    measured = [(a + b) // steps for a, b in zip(run.service.received, run.service.sent, strict=True)]
    return {
        "staleness": run.trace.staleness(),
        "dropped": run.service.dropped,
        "deaths": run.service.deaths,
        "server_bytes": {"predicted": predicted, "measured": measured},
        "allreduce_bytes": round(2 * (plan.dp - 1) / plan.dp * parameters),
    }


def _show_run(result: dict[str, Any]) -> str:
    plain = [f"  {loss:>12.6f}" for loss in result["reference_losses"]]
    lines = [f"{'step':>4}  {'loss':>12}" + (f"  {'plain torch':>12}" if plain else "")]
    rows = zip(result["losses"], plain or [""] * len(result["losses"]), strict=True)
    lines += [f"{step:>4}  {loss:>12.6f}{beside}" for step, (loss, beside) in enumerate(rows, result["first_step"])]
    time, bubble = result["time"], result["bubble_of_total"]
    predicted, measured = (time[kind] * 1e3 for kind in ("predicted", "measured"))
    error = f" ({predicted / measured - 1:+.0%})" if measured else ""
    what = "run time " if result["asynchronous"] else "step time"
    lines.append(f"{what}        {predicted:.2f} ms predicted{error}, {measured:.2f} ms measured")
    lines.append(f"bubble of total  {bubble['predicted']:.1%} predicted, {bubble['measured']:.1%} measured")
    for rank, peak in enumerate(result["peak_memory"]):
        sent = result["bytes_sent"][rank]
        lines.append(
            f"rank {rank}  peak memory {peak['predicted'] / 2**20:.2f} MiB predicted, "
            f"{peak['measured'] / 2**20:.2f} MiB measured; sent {sent / 2**20:.2f} MiB a step"
        )
        parts = [f"{kind} {size / 2**20:.2f}" for kind, size in peak["by_kind"].items() if size]
        lines.append(f"        of which {', '.join(parts)}")
    kinds = [f"{kind} {size / 2**20:.2f} MiB" for kind, size in result["bytes_by_kind"].items()]
    if kinds:
        lines.append(f"sent by all ranks in a step: {', '.join(kinds)}")
    if result["asynchronous"]:
        for rank, pair in enumerate(zip(result["weight_versions"], result["staleness"], strict=True)):
            lines.append(
                f"rank {rank}  up to {several(pair[0], 'version')} of the weights, gradients up to "
                f"{several(pair[1], 'update')} old"
            )
    if "max_gradient_error" in result:
        lines.append(f"max gradient error against plain torch  {result['max_gradient_error']:.2e}")
    return "\n".join(lines)


# memory ---------------------------------------------------------------------------------------------------------------


def _memory(options: argparse.Namespace) -> dict[str, Any]:
    from minipar.models import shapes
    from minipar.prediction.on_paper import model_of, per_rank
    from minipar.prediction.plan_words import default_precision
    from minipar.prediction.rank_memory import KINDS

    words, batch = without_micro_batch_size(options.plan, options.batch)
    plan = Plan.parse(words)
    for key, number in (("ranks", plan.ranks), ("micro-batches", plan.dp * plan.total_microbatches)):
        if number > MOST_LISTED:
            raise PlanError(
                f"plan {words}: has {number} {key}, too many to list them; possible is a plan with at most "
                f"{MOST_LISTED}, or `minipar estimate`"
            )
    preset, own = PRESETS.get(options.model), ":" in options.model
    profiled = plan.slice_count > 1 or plan.place is not None or isinstance(preset, Branchy)
    if own or (preset is not None and profiled):
        from minipar.training.program_memory import first_batch, of_ranks  # (it needs torch)

        if not own:
            plan.compile(shapes.shape(options.model), check=False)  # (it refuses what cannot be before a rank starts)
        with first_batch(*_to_train(options.model, 0), batch or plan.dp * plan.total_microbatches) as job:
            ranks, batch = of_ranks(plan, job), job.batch
    else:
        if "precision=" not in words:
            plan = replace(plan, precision=default_precision(model_of(options.model)))
        ranks = per_rank(plan, options.model, batch)
    each = [
        {**{kind: getattr(rank, kind) for kind in KINDS}, "total": rank.total, "activations_held": rank.held,
         "host": rank.host}
        for rank in ranks
    ]  # fmt: skip
    return {
        "plan": words,
        "model": options.model,
        "precision": plan.precision,
        "batch": plan.dp * plan.total_microbatches if batch is None else batch,
        "per_rank": each,
        "fits": list(holding(max(rank.total for rank in ranks))),
    }


def _show_memory(result: dict[str, Any]) -> str:
    """The table as text. Ranks with the same numbers share a line."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, rank in enumerate(result["per_rank"]):
        alike.setdefault(tuple(rank.values()), []).append(number)
    entries = [result["per_rank"][ranks[0]] for ranks in alike.values()]
    hidden = {"activations_held", *([] if any(entry["host"] for entry in entries) else ["host"])}
    kinds = [kind for kind in entries[0] if kind not in hidden]
    scale, unit = (2**30, "GiB") if max(entry["total"] for entry in entries) >= 10 * 2**30 else (2**20, "MiB")
    rows = [["ranks", *kinds]]
    for entry, ranks in zip(entries, alike.values(), strict=True):
        rows.append([_listed(ranks), *(f"{entry[kind] / scale:.2f}" for kind in kinds)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    what = f"{result['model']}, {result['plan'] or 'one device'}, {several(result['batch'], 'row')} a step"
    lines = [f"{what}, {result['precision']}: {unit} on each rank"]
    for first, *row in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row, widths[1:], strict=True))]
        lines.append("  ".join(cells))
    fits = result["fits"]
    others = [
        f"{name} ({spec.memory / scale:.3g} {unit})"
        for name, spec in known_hardware().items()
        if name not in fits and spec.memory is not None
    ]
    lines.append(f"fits on: {', '.join(fits) or 'none of the hardware presets'}")
    return "\n".join([*lines, *([f"too large for: {', '.join(others)}"] if others else [])])


def _listed(ranks: list[int]) -> str:
    """Rank numbers as short text: a range, or the first ones and how many there are."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"


# estimate -------------------------------------------------------------------------------------------------------------


def _estimate(options: argparse.Namespace) -> dict[str, Any]:
    from minipar.prediction.estimating import estimate, report

    found = estimate(
        options.plan, _sizes(options.model), _machine(options.hardware), options.batch, nodes=options.nodes,
        gpus_per_node=options.gpus_per_node, stack=options.stack,
    )  # fmt: skip
    return report(found)


def _machine(given: str) -> Any:
    """What --hardware names; this-machine is calibrated."""
    if given != "this-machine":
        return given
    from minipar.cluster import Cluster
    from minipar.costs.hardware import Hardware
    from minipar.execution.measuring.calibration import calibrate

    with Cluster(2) as cluster:
        return Hardware.measured(calibrate(cluster), memory=_memory_here() // 2)


def _sizes(given: str) -> Any:
    """What --model names."""
    return _own_model(given) if ":" in given.partition(" ")[0] else given


def _memory_here() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _own_model(text: str) -> Any:
    """The numbers of a model that `module:build` gives, with an example of its input."""
    from minipar.models.counting import chain_of

    built = _called(text, "(model, example)")
    if not isinstance(built, tuple) or len(built) != 2:
        raise PlanError(f"--model {text}: must return (model, example), with an example of the model's input")
    return chain_of(*built, name=text)


def _called(text: str, what: str) -> Any:
    """What the function `module:build` returns; it must return `what`."""
    import importlib

    home, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(home), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(
            f"--model {text}: {error}; possible is MODULE:FUNCTION, of a module in this folder or an installed one"
        ) from None
    if not callable(build):
        raise PlanError(f"--model {text}: is no function; it must return {what}")
    try:
        return build()
    except Exception as error:
        raise PlanError(f"--model {text}: the function raised {type(error).__name__}: {error}") from error


def _show_estimate(result: dict[str, Any]) -> str:
    return str(result["text"])


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    from minipar.planner.exhaustive import report, search

    found = search(
        _sizes(options.model), _machine(options.hardware), options.nodes, options.gpus_per_node, options.batch,
        pins=options.pin, memory=options.memory, most=options.best, runs=options.runs, to=options.to,
    )  # fmt: skip
    return report(found, options.explain, options.front, options.diff)


def _show_plan(result: dict[str, Any]) -> str:
    return str(result["text"])


def _bytes(text: str) -> int:
    try:
        return int(quantity("memory", text))
    except PlanError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of bytes above 0, such as 70GB") from None


def _validate(options: argparse.Namespace) -> dict[str, Any]:
    from minipar.prediction import validation

    return validation.report()


def _show_validate(result: dict[str, Any]) -> str:
    from minipar.prediction import validation

    return validation.show(result)


# shard ----------------------------------------------------------------------------------------------------------------


def _mesh(text: str) -> Mesh:
    found: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        axis, equals, size = word.partition("=")
        if not equals or not axis.isidentifier():
            raise argparse.ArgumentTypeError(f"{word!r}: write axes and their sizes, such as dp=2,tp=2")
        if axis not in AXES:
            raise argparse.ArgumentTypeError(f"{text!r}: {axis!r} is no axis of a mesh; possible are {', '.join(AXES)}")
        if axis in found:
            raise argparse.ArgumentTypeError(f"{text!r}: {axis} is named twice")
        found[axis] = _count(size)
    if not found:
        raise argparse.ArgumentTypeError("needs an axis, such as tp=2")
    if math.prod(found.values()) > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r}: too many ranks; possible are at most {MOST_RANKS} together")
    return Mesh(found)


def _shard(options: argparse.Namespace) -> dict[str, Any]:
    rules = None if options.annotate is None else dict(form_pairs(options.annotate))
    mesh, tensor = options.mesh, options.mesh.length("tp")
    if options.sequence_parallel and tensor == 1:
        raise PlanError("--sequence-parallel: is of ranks that share layers; possible is --mesh tp=2")
    from minipar import sharding
    from minipar.models.tensors import take_rows
    from minipar.sharding import sharded
    from minipar.training.program_memory import first_batch

    if rules is not None and options.sequence_parallel:
        rules = {**sharding.sequence_parallel(), **rules}
    with first_batch(*_to_train(options.model, 0), options.batch) as job:
        model, x = job.build(), take_rows(job.sample(job.batch)[0][0], range(job.batch))
    if rules is None and mesh.length("ep") > 1:
        sharded.check_experts(model, mesh.length("ep"))
    captured = sharding.capture_model(model, x)
    if rules is None and tensor > 1:
        rules = sharding.sequence_parallel() if options.sequence_parallel else sharding.default(captured.layers, tensor)
    if options.annotate is None and mesh.length("ep") > 1:
        rules = {**(rules or {}), **sharding.experts()}
    parts = {"dp": "S0", "ep": "S0", "cp": "S1"}  # of the rows, and of the tokens of each row
    inputs = ", ".join(f"{form} on {axis}" for axis, form in parts.items() if mesh.length(axis) > 1) or "I"
    found = sharding.propagate_model(captured.layers, rules or {}, mesh, inputs)
    for name in found.layers[-1].graph.outputs if "S1 on cp" in inputs else ():
        if found.shardings[-1].forms[name].on("cp").kind != "S":
            raise PlanError(
                f"--mesh cp={mesh.length('cp')}: each rank has a part of the tokens, but the output "
                f"{len(found.layers) - 1}:{name} is {found.shardings[-1].forms[name]}; possible are models whose "
                "output has a number for each token"
            )
    divided = [
        {"layer": number, "operator": layer.own(one.operator.name), "op": one.operator.op, "forms": _arrow(one)}
        for number, (layer, forms) in enumerate(zip(found.layers, found.shardings, strict=True))
        for one in forms.operators
        if any(choice.divided for choice in one.choices.values())
    ]
    return {
        "coverage": [{"op": row.op, "count": row.count, "state": row.state} for row in captured.coverage.rows],
        "whole": captured.whole,
        "forms": {name: str(form) for name, form in found.forms().items()},
        "collectives": [one.as_dict() for one in found.collectives()],
        "annotations": dict(rules or {}),
        "divided": divided,
    }


def _arrow(one: Divided) -> str:
    return f"{' ; '.join(map(str, one.ins))} -> {' ; '.join(map(str, one.outs))}"


_STATES = {"rule": "rule", "no input": "made by every rank", "whole": "no rule: falls back to whole"}


def _show_shard(result: dict[str, Any]) -> str:
    lines = ["operators", *_columns([(row["op"], row["count"], _STATES[row["state"]]) for row in result["coverage"]])]
    same: dict[tuple[str, ...], list[int]] = {}  # equal operators of several layers stand in one line
    for row in result["divided"]:
        name = row["operator"].removeprefix(f"{row['layer']}.")
        same.setdefault((name, row["op"], row["forms"]), []).append(row["layer"])
    full = {
        (row["layer"], row["operator"].removeprefix(f"{row['layer']}.")): row["operator"] for row in result["divided"]
    }
    rows = [
        (_numbers(layers), full[layers[0], name] if len(layers) == 1 else f"*.{name}", *rest)
        for (name, *rest), layers in same.items()
    ]
    if result["whole"]:
        lines += ["", "computed whole by every rank", *_columns(list(result["whole"].items()))]
    lines += ["", "divided, by layer", *(_columns(rows) or ["  none"])]
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in result["collectives"]:
        layer = one["value"].rpartition(":")[0]
        kinds.setdefault((layer, one["phase"], one["op"], one["axis"]), []).append(one)
    found: dict[tuple[str, ...], list[int]] = {}
    for (layer, phase, op, axis), ones in kinds.items():
        size, time = (sum(one[key] for one in ones) for key in ("bytes", "time"))
        words = f"{phase}: {len(ones)} {op} over {axis}", f"{size / 2**20:.3f} MiB", f"{time * 1e3:.3f} ms"
        found.setdefault(words, []).append(int(layer) if layer else -1)
    rows = [(_numbers(layers), *words) for words, layers in found.items()]
    lines += ["", "collectives of one layer, by layer: bytes on each rank, time", *(_columns(rows) or ["  none"])]
    total = sum(one["bytes"] for one in result["collectives"]), sum(one["time"] for one in result["collectives"])
    count = several(len(result["collectives"]), "collective")
    lines.append(f"together {count}, {total[0] / 2**20:.3f} MiB on each rank, {total[1] * 1e3:.3f} ms")
    return "\n".join(lines)


def _numbers(layers: Sequence[int]) -> str:
    """Layers' numbers, neighbours as 1-4; -1 stands for parameters, which layers may share."""
    if layers == [-1]:
        return "parameters"
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _columns(rows: Sequence[Sequence[Any]]) -> list[str]:
    widths = [max(len(str(row[k])) for row in rows) for k in range(len(rows[0]))] if rows else []
    return ["  " + "  ".join(str(c).ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


# export ---------------------------------------------------------------------------------------------------------------


def _export(options: argparse.Namespace) -> dict[str, Any]:
    plan, batch = _given_plan(options.plan, options.batch)
    found = plan.export(options.to, options.model, batch, options.nodes, options.gpus_per_node)
    if options.output is not None:
        try:
            Path(options.output).write_text(found.text, "utf-8")
        except OSError as error:
            raise PlanError(f"--output {options.output}: cannot be written ({error.strerror})") from None
    values = json.loads(json.dumps(found.values), parse_constant=lambda word: "inf")  # (JSON has no infinite number)
    return {
        "system": found.system, "version": found.version, "values": values, "text": found.text,
        "launch": list(found.launch), "notes": list(found.notes), "output": options.output,
    }  # fmt: skip


def _show_export(result: dict[str, Any]) -> str:
    """The text alone, so that it can be sent to a file; what else there is to say stands on stderr."""
    for note in result["notes"]:
        print(f"minipar: {note}", file=sys.stderr)
    print(f"minipar: start it with {' '.join(result['launch'])}", file=sys.stderr)
    return str(result["output"] or result["text"].rstrip("\n"))


# lists ----------------------------------------------------------------------------------------------------------------


def _schedules(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "schedules": [
            {
                "name": s.name, "summary": s.summary, "chunks": s.chunks, "options": list(s.options), "needs": s.needs,
                "time": s.time, "peak": s.peak, "paper": s.paper,
            }
            for s in schedules()
        ],
        "markdown": options.markdown,
    }  # fmt: skip


def _show_schedules(result: dict[str, Any]) -> str:
    rows = [("schedule", "chunks", "needs", "step time", "peak activations", "source")]
    for s in result["schedules"]:
        chunks = f"{s['chunks']} or more" if "chunks" in s["options"] and s["chunks"] > 1 else str(s["chunks"])
        rows.append((s["name"], chunks, s["needs"], s["time"], s["peak"], s["paper"]))
    if result["markdown"]:
        rows = [rows[0], ("---",) * 6, *(("`" + row[0] + "`", *row[1:]) for row in rows[1:])]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    widths = [max(len(row[k]) for row in rows) for k in range(6)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _keys(options: argparse.Namespace) -> dict[str, Any]:
    known = table()
    check_keys(options.names, list(known))
    rows = [{"name": name, **known[name]} for name in options.names or known]
    return {"keys": rows, "names": options.names, "markdown": options.markdown}


def _show_keys(result: dict[str, Any]) -> str:
    if result["markdown"]:
        from minipar.strategies.combinations import page

        return page()
    if result["names"]:
        return "\n".join(map(_key, result["keys"]))
    wide = max(len(row["name"]) for row in result["keys"])
    lines = []
    for row in result["keys"]:
        text = textwrap.shorten(row["help"], 86 - wide, placeholder=" ...")
        lines.append(f"{row['name']:{wide}}  {row['default'] or '-':10}  {text}")
    return "\n".join([*lines, "", "minipar keys NAME says all of one: its values, and what it does not go with."])


def _key(row: dict[str, Any]) -> str:
    """All of one key: its values, its default, its help, what it needs, and what it does not go with."""
    lines = [f"{row['name']} = {row['default'] or '(nothing)'}    of: {row['domain']}"]
    lines += textwrap.wrap(row["help"], 112, initial_indent="    ", subsequent_indent="    ")
    if row["needs"]:
        lines.append(f"    only with {row['needs']}")
    for own in dict.fromkeys(other["words"] for other in row["excludes"]):
        against = [f"{other['with']} ({other['why']})" for other in row["excludes"] if other["words"] == own]
        words = f"{own}: not with {'; '.join(against)}"
        lines += textwrap.wrap(words, 112, initial_indent="    ", subsequent_indent="      ")
    return "\n".join(lines)


def _doctor(options: argparse.Namespace) -> dict[str, Any]:
    from minipar.doctor import examine

    return examine()


def _show_doctor(result: dict[str, Any]) -> str:
    facts = {key: value for key, value in result.items() if key != "to mend"}
    return "\n".join([_table(facts), *(f"to mend: {text}" for text in result["to mend"])])


def _bench(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, os.getcwd())  # benchmarks/ is no part of the installed package
    try:
        import benchmarks
    except ModuleNotFoundError:
        raise PlanError("minipar bench: no folder benchmarks/ here; run it in a clone of the repository") from None
    return benchmarks.run(options.names, quick=options.quick, show=not options.json, picture=options.picture)


def _show_bench(result: dict[str, Any]) -> str:
    from benchmarks import table

    return str(table(result["rows"]))


def _table(result: dict[str, Any]) -> str:
    width = max(map(len, result))

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.6g}"
        return ", ".join(map(cell, value)) if isinstance(value, list) else str(value)

    return "\n".join(f"{key.ljust(width)}  {cell(value)}" for key, value in result.items())


if __name__ == "__main__":
    sys.exit(main())
