"""Traces in other tools' formats: what Perfetto needs, and torch's own traces."""

import gzip
import itertools
import json
import re
from dataclasses import replace

import pytest

from minipar import MiniparError, Plan, simulate
from minipar.program import Instruction, Op, Program
from minipar.trace import Trace
from tests.trace.test_trace import Bytes


def predicted(words="pp=2 dp=2 schedule=1f1b microbatches=4", layers=4):
    return simulate(Plan.parse(words).compile(layers=layers), Bytes())


def unit_trace():
    return simulate(
        Plan(pp=3, schedule="1f1b", microbatches=4).compile(layers=6), forward=1.0, backward=2.0, latency=0.5
    )


def recorded():
    """As measured: off zero, with odd nanoseconds, and a receive that was posted after its message came."""
    trace = predicted()
    starts = [[12345.6789 + s * 1.0000123 for s in row] for row in trace.starts]
    ends = [[12345.6789 + e * 1.0000123 for e in row] for row in trace.ends]
    k = next(k for k, ins in enumerate(trace.program.ranks[1]) if ins.op is Op.RECV)
    starts[1][k] = ends[1][k] + 0.00125
    return replace(trace, starts=starts, ends=ends, kind="measured", note="a note")


TRACES = {"predicted": predicted, "units": unit_trace, "measured": recorded}


def slices(events):
    return [event for event in events if event["ph"] == "X"]


def exported(trace):
    return json.loads(trace.to_perfetto())["traceEvents"]


# Perfetto -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACES)
def test_the_file_has_every_instruction_with_its_times_to_the_nanosecond(name, tmp_path):
    trace = TRACES[name]()
    assert trace.to_perfetto(tmp_path / "trace.json.gz") == str(tmp_path / "trace.json.gz")
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode() == trace.to_perfetto()
    found = {(e["pid"], e["args"]["index"]): e for e in slices(exported(trace))}
    scale = 1e6 if name != "units" else 1e3  # microseconds; a unit is shown as a millisecond
    for event in trace.events:
        one, ins = found.pop((event.rank, event.index)), event.instruction
        end, start = event.end - trace.span[0], min(event.start, event.end) - trace.span[0]
        assert (one["ts"], one["ts"] + one["dur"]) == pytest.approx((start * scale, end * scale), abs=2e-3, rel=0)
        args = (one["args"]["op"], one["args"]["layers"], one["args"]["microbatch"], one["args"]["stream"])
        assert args == (ins.op.name, list(ins.layers), ins.microbatch, ins.stream)
    assert not found


@pytest.mark.parametrize("name", TRACES)
def test_slices_of_a_thread_never_overlap(name):
    trace = TRACES[name]()
    found = slices(exported(trace))
    assert len(found) == len(trace.program)
    threads = {}
    for event in found:
        span = (round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3))
        threads.setdefault((event["pid"], event["tid"]), []).append((*span, event["args"]["stream"]))
    for mine in threads.values():
        mine.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))
        assert len({stream for *_, stream in mine}) == 1


def test_overlapping_receives_get_a_further_thread():
    ranks = [[Instruction(Op.RECV, (), -1, 0, stream="recv 0", peer=0, name=n) for n in "abc"]]
    trace = Trace(
        Program((tuple(ranks[0]),), 0, 1, ()), [[0.0, 0.0, 2.0]], [[1.0, 2.0, 3.0]], lambda r, v: 0, "measured"
    )
    events = exported(trace)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[e["tid"]] for e in slices(events)] == ["recv 0", "recv 0 (2)", "recv 0"]


def test_processes_are_ranks_and_threads_are_streams():
    trace = predicted()
    events = exported(trace)
    meta = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    for rank, row in enumerate(trace.program.ranks):
        assert meta["process_name", rank, 0]["name"] == f"rank {rank} (predicted)"
        assert meta["process_sort_index", rank, 0]["sort_index"] == rank
        names = {a["name"] for (kind, pid, _), a in meta.items() if kind == "thread_name" and pid == rank}
        assert {re.sub(r" \(\d+\)$", "", name) for name in names} == {ins.stream for ins in row}
    first = next(e for e in slices(events) if e["pid"] == 1)
    event = next(trace.events_of(1))
    assert first["name"] == first["args"]["instruction"] == str(event.instruction)
    send = next(e for e in trace.events if e.instruction.op is Op.SEND)
    args = next(e["args"] for e in slices(events) if (e["pid"], e["args"]["index"]) == (send.rank, send.index))
    assert args["bytes"] == send.bytes == 3 * 2**20
    assert args["peer"] == send.instruction.peer


@pytest.mark.parametrize("name", TRACES)
def test_every_send_has_an_arrow_to_what_reads_it(name):
    trace = TRACES[name]()
    events = exported(trace)
    tails = {e["id"]: e for e in events if e["ph"] == "s"}
    heads = {e["id"]: e for e in events if e["ph"] == "f"}
    sends = sum(ins.op is Op.SEND for row in trace.program.ranks for ins in row)
    assert len(tails) == len(heads) == sends > 0
    assert sum(e["ph"] in "sf" for e in events) == 2 * sends

    def under(flow):
        mine = [s for s in slices(events) if (s["pid"], s["tid"]) == (flow["pid"], flow["tid"])]
        (one,) = [s for s in mine if s["ts"] == flow["ts"]] or [
            s for s in mine if s["ts"] < flow["ts"] < s["ts"] + s["dur"]
        ]
        return trace.program.ranks[one["pid"]][one["args"]["index"]]

    for number, tail in tails.items():
        head = heads[number]
        assert head["bp"] == "e"
        assert head["ts"] >= tail["ts"]
        send, reader = under(tail), under(head)
        assert send.op is Op.SEND
        assert send.peer == head["pid"]
        assert send.reads[0] in reader.reads


def test_memory_counters():
    trace = predicted()
    counters = [e for e in exported(trace) if e["ph"] == "C"]
    for rank, peak in enumerate(trace.peak_memory()):
        mine = [e["args"] for e in counters if e["pid"] == rank]
        assert max(sum(args.values()) for args in mine) == peak
        assert "activations" in mine[0]
        assert all(any(args[kind] for args in mine) for kind in mine[0]), "a kind that is never there"


# torch's profiler -----------------------------------------------------------------------------------------------------


def test_a_real_profile(tmp_path):
    import torch
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 32)
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
    recording.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = Trace.from_kineto(tmp_path / "trace.json")
    (row,) = trace.program.ranks
    ops = [ins.op for ins in row]
    assert [str(ins) for ins in row if ins.op is Op.STEP] == ["Optimizer.step#SGD.step"] * 2
    assert {str(ins) for ins in row if ins.op is Op.FORWARD} >= {"aten::linear", "aten::relu", "aten::sum"}
    assert [str(ins) for ins in row].count("aten::linear") == 4
    assert "aten::addmm" not in {str(ins) for ins in row}, "an operator within another one"
    assert any("AddmmBackward0" in str(ins) and ins.op is Op.BACKWARD for ins in row)
    assert ops.index(Op.FORWARD) < ops.index(Op.BACKWARD) < ops.index(Op.STEP)
    assert trace.kind == "measured"
    assert trace.span[0] == 0.0
    raw = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e.get("cat") == "cpu_op"]
    whole = max(e["ts"] + e["dur"] for e in raw) - min(e["ts"] for e in raw)
    assert trace.time >= whole * 1e-6 * (1 - 1e-6)
    assert 0 < trace.bubble_of_total() < 1
    assert len(slices(exported(trace))) == len(row)


def event(name, ts, dur, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "pid": 7, "tid": tid, "ts": ts, "dur": dur, "args": args}


def job(rank, *events, **more):
    return {"distributedInfo": {"rank": rank, "world_size": 4}, "traceEvents": list(events), **more}


def kernel(name, ts, dur, correlation=None, cat="kernel", **args):
    args |= {"stream": 7} if correlation is None else {"stream": 7, "correlation": correlation}
    return event(name, ts, dur, cat, 7, **args)


def test_kernels_of_a_gpu():
    launch = [
        event("cudaLaunchKernel", ts, 1, "cuda_runtime", tid, correlation=c)
        for c, ts, tid in ((1, 10, 1), (2, 21, 2), (3, 41, 1), (4, 10, 3))
    ]
    host = [
        event("aten::linear", 9, 5),
        event("autograd::engine::evaluate_function: MmBackward0", 20, 9, tid=2),
        event("Optimizer.step#Adam.step", 40, 9, "user_annotation"),
    ]
    device = [
        kernel("gemm", 100, 10, 1),
        kernel("gemm", 110, 20, 2),
        kernel("elementwise", 130, 5, 3),
        kernel("side", 105, 3, 4),
        kernel("layer_norm_bwd", 140, 1),
        kernel("multi_tensor_apply_kernel<>", 141, 1),
        kernel("Memcpy HtoD (Pageable -> Device)", 90, 4, cat="gpu_memcpy"),
        kernel("Memcpy DtoH", 150, 4, cat="gpu_memcpy"),
        kernel("Memset (Device)", 95, 1, cat="gpu_memset"),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 120, 30, **{"Process Group Ranks": "[2, 0]"}),
        kernel("ncclDevKernel_SendRecv", 155, 1, **{"Collective name": "recv", "Src Rank": 2}),
        event("gpu annotation", 100, 60, "gpu_user_annotation", 7, stream=7),
    ]
    other = job(
        0,
        kernel("gemm", 100, 10),
        kernel("ncclDevKernel_SendRecv", 150, 4, **{"Collective name": "send", "Dst Rank": 3}),
    )
    files = [job(3, *launch, *host, *device), job(2, kernel("gemm", 100, 10)), other]
    trace = Trace.from_kineto(files)
    found = {
        str(e.instruction) + f" {e.start * 1e6:.0f}": (e.instruction.op.name, e.stream) for e in trace.events_of(2)
    }
    assert found == {
        "Memcpy HtoD (Pageable -> Device) 0": ("FETCH", "copy HtoD"),
        "Memset (Device) 5": ("FETCH", "copy"),
        "gemm 10": ("FORWARD", "compute"),
        "side 15": ("FORWARD", "compute (2)"),
        "gemm 20": ("BACKWARD", "compute"),
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL 30": ("ALL_REDUCE", "group 0,1,2"),  # its own rank is not listed
        "elementwise 40": ("STEP", "compute"),
        "layer_norm_bwd 50": ("BACKWARD", "compute"),
        "multi_tensor_apply_kernel<> 51": ("STEP", "compute"),
        "Memcpy DtoH 60": ("OFFLOAD", "copy DtoH"),
        "ncclDevKernel_SendRecv 65": ("RECV", "recv 1"),
    }
    assert trace.busy == pytest.approx([10e-6, 10e-6, 37e-6])
    assert [ins.stream for ins in trace.program.ranks[0]] == ["compute", "send 2"]
    assert "0 = 0 of the job, 1 = 2 of the job, 2 = 3 of the job" in trace.note
    assert {"forward", "copy", "collective (C)", "message"} <= {
        text.get_text() for legend in trace.plot().legends for text in legend.get_texts()
    }


def test_messages_on_the_cpu_and_files_without_ranks(tmp_path):
    """As gloo is seen: the call on the main thread, the collective itself on another one."""
    events = [
        event("c10d::allreduce_", 5, 3),
        event("aten::mm", 1, 2),
        event("gloo:all_reduce", 6, 40, "user_annotation", 2),
        event("DistributedDataParallel.forward", 0, 9, "user_annotation"),
        event("aten::add", 10, 1, tid=2),
    ]
    late = json.loads(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 1_000_003_000}))
    (tmp_path / "b.json").write_text(json.dumps(late))
    with gzip.open(tmp_path / "a.json.gz", "wt") as file:
        json.dump({"traceEvents": events, "baseTimeNanoseconds": 1_000_000_000}, file)
    trace = Trace.from_kineto([str(tmp_path / "a.json.gz"), tmp_path / "b.json"])
    seen = [(str(i), i.op, i.stream) for i in trace.program.ranks[0]]
    assert seen == [
        ("aten::mm", Op.FORWARD, "compute"),
        ("gloo:all_reduce", Op.ALL_REDUCE, "group 0,1"),
        ("aten::add", Op.FORWARD, "compute"),
    ]
    assert trace.starts[1] == pytest.approx([s + 3e-6 for s in trace.starts[0]])  # the clocks' bases differ
    only_calls = Trace.from_kineto([{"traceEvents": [event("c10d::send", 5, 3), event("aten::mm", 1, 2)]}])
    assert [ins.op for ins in only_calls.program.ranks[0]] == [Op.FORWARD, Op.SEND]
    assert Trace.from_kineto({"traceEvents": events}).program.replicas == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"events": []}, "has no list traceEvents"),
        ({"traceEvents": []}, "trace 0 has no events to show"),
        ([], "no trace to import"),
        ([job(0, event("aten::mm", 1, -2.5))], "`aten::mm` at 1 us has a negative duration, -2.5 us"),
        ([job(0, event("aten::mm", 1, None))], "dur=None: both must be numbers"),
        ([job(1, event("a", 1, 1)), job(1, event("a", 1, 1))], "trace 0 and trace 1 are both of rank 1"),
        ([job(1, event("a", 1, 1)), {"traceEvents": [event("a", 1, 1)]}], "both of rank 1"),
        ([job(0, event("a", 1, 1), baseTimeNanoseconds="x")], "must be a whole number"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_said_in_words(source, words):
    with pytest.raises(MiniparError) as caught:
        Trace.from_kineto(source)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"3", "has no list traceEvents"),
        (b"\x1f\x8bnonsense", "cannot be read"),
        (gzip.compress(b"{}" * 1000, mtime=0)[:-12], "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_no_traces(content, words, tmp_path):
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MiniparError, match=words) as caught:
        Trace.from_kineto(path)
    assert str(path) in str(caught.value)


def test_empty_traces_are_not_exported():
    with pytest.raises(MiniparError, match="empty"):
        Trace(Program(((),), 0, 1, ()), [[]], [[]], lambda rank, value: 0).to_perfetto()


def test_an_instruction_may_have_a_name_of_its_own():
    plain = Instruction(Op.FORWARD, (0,), 1, 0)
    named = plain._replace(name="aten::mm")
    assert (str(plain), str(named)) == ("F 0 mb1", "aten::mm")
    program = Program(((plain, named),), 1, 2, ())
    data = json.loads(json.dumps(program.to_json()))
    assert Program.from_json(data).ranks == program.ranks
    assert [len(line) for line in data["ranks"][0]] == [11, 12], "programs without names are written as before"
