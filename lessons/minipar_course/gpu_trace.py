"""A step of training on a real GPU, as numbers: one Tesla V100 of a DGX station, recorded by torch.profiler.

Source: tb_plugin/test/gpu_metrics_input.json of pytorch/kineto (commit 301f611b, 2021). A perceptron of two layers,
with a squared error and SGD, trains on 32 rows of 5 numbers. Kept are the times of the step's kernels and copies, of
the calls that launched them, and of what names their phase; names are shortened. `step()` gives them in the form that
the profiler writes today.
"""

from __future__ import annotations

from typing import Any

HOST, AUTOGRAD, GPU = (1, 1), (1, 2), (0, 7)  # process and thread; of the GPU its stream
STEP = (358, 13410)  # start and length of the whole step, in microseconds, as all numbers here

# What was launched; by which thread; start and length of the call; start and length on the GPU.
LAUNCHED = (
    ("Memcpy HtoD", HOST, 1533, 20, 1556, 1),
    ("Memcpy HtoD", HOST, 1752, 12, 1767, 1),
    ("gemmSN_TN", HOST, 2258, 16, 2275, 3),
    ("add", HOST, 2512, 16, 2530, 2),
    ("clamp_min", HOST, 2803, 15, 2820, 1),
    ("gemmSN_TN", HOST, 3309, 15, 3325, 2),
    ("add", HOST, 3558, 15, 3575, 2),
    ("mse", HOST, 3895, 16, 3912, 1),
    ("reduce sum", HOST, 4075, 15, 4092, 2),
    ("fill", HOST, 4601, 16, 4619, 1),
    ("fill", HOST, 4729, 14, 4745, 1),
    ("fill", HOST, 4844, 13, 4859, 1),
    ("fill", HOST, 4958, 13, 4973, 1),
    ("fill", HOST, 5262, 15, 5279, 1),
    ("fill", AUTOGRAD, 5932, 30, 5962, 1),
    ("mse gradient", AUTOGRAD, 6127, 26, 6153, 2),
    ("reduce sum", AUTOGRAD, 6681, 30, 6711, 4),
    ("add", AUTOGRAD, 7133, 29, 7162, 1),
    ("volta_sgemm_128x32_nt", AUTOGRAD, 8073, 27, 8100, 3),
    ("gemmSN_NN", AUTOGRAD, 8665, 27, 8692, 2),
    ("add", AUTOGRAD, 9583, 19, 9603, 1),
    ("fill", AUTOGRAD, 9901, 19, 9921, 1),
    ("compare", AUTOGRAD, 10323, 18, 10342, 1),
    ("where", AUTOGRAD, 10751, 19, 10770, 2),
    ("reduce sum", AUTOGRAD, 11135, 19, 11156, 3),
    ("add", AUTOGRAD, 11425, 19, 11445, 1),
    ("volta_sgemm_128x32_nt", AUTOGRAD, 12006, 17, 12025, 3),
    ("add", AUTOGRAD, 12535, 19, 12555, 1),
    ("add", HOST, 13138, 18, 13158, 1),
    ("add", HOST, 13261, 15, 13278, 1),
    ("add", HOST, 13373, 15, 13390, 1),
    ("add", HOST, 13483, 15, 13501, 1),
)
# What says to which phase a launch belongs: operators of autograd's thread, and the optimizer.
PHASES = (
    ("MseLossBackward", AUTOGRAD, 5516, 727),
    ("aten::sum of AddBackward1", AUTOGRAD, 6459, 279),
    ("torch::autograd::AccumulateGrad", AUTOGRAD, 7028, 228),
    ("MmBackward", AUTOGRAD, 7626, 1124),
    ("torch::autograd::AccumulateGrad", AUTOGRAD, 9515, 148),
    ("ClampBackward1", AUTOGRAD, 9724, 1110),
    ("aten::sum of AddBackward1", AUTOGRAD, 10990, 182),
    ("torch::autograd::AccumulateGrad", AUTOGRAD, 11357, 144),
    ("MmBackward", AUTOGRAD, 11734, 424),
    ("torch::autograd::AccumulateGrad", AUTOGRAD, 12467, 147),
    ("Optimizer.step#SGD.step", HOST, 12935, 663),
)


def step() -> dict[str, Any]:
    """The step as torch.profiler's file: the argument of `Trace.from_kineto`."""
    events = [_event(name, "cpu_op", place, start, length) for name, place, start, length in PHASES]
    for number, (name, place, called, calling, start, length) in enumerate(LAUNCHED):
        copy = name.startswith("Memcpy")
        events.append(_event("cudaMemcpyAsync" if copy else "cudaLaunchKernel", "cuda_runtime", place, called, calling))
        events.append(_event(name, "gpu_memcpy" if copy else "kernel", GPU, start, length))
        for event in events[-2:]:
            event["args"] = {"correlation": number}
    return {"traceEvents": events}


def _event(name: str, kind: str, place: tuple[int, int], start: int, length: int) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": place[0], "tid": place[1], "ts": start, "dur": length}
