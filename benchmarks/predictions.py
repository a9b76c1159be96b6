"""Predicted beside measured step times: of ten plans on this machine's cores and links, and of twelve on four emulated
devices.

A prediction uses only a profile of one layer at a time, a calibration of the cluster, and the number of cores; on
emulated devices it uses their rates alone. It uses no run of its plan. The measured time is the median of the steps
after the first. Other programs on the machine make it longer.

Where ranks share cores, the prediction is too short, most of all for dp=2 pp=2 on two cores (-21 %): ranks in turn
on a core take more CPU time than one rank of a profile, whose numbers stay in the cache, and collectives take none in
the simulator (docs/estimate.md, "On the machine that trains").
"""

from __future__ import annotations

from functools import partial
from statistics import median

from benchmarks.harness import Row
from minipar import Cluster, Plan, calibrate, data, models
from minipar.execution.execution import Job, execute, profile_job
from minipar.prediction.forecast import Forecast
from minipar.prediction.oversubscription import available_cores
from minipar.prediction.program_costs import microbatch_rows
from minipar.training.training import train
from minipar.wording import several

PLANS = (
    "dp=2",
    "dp=4",
    "dp=2 accumulate=2",
    "dp=4 bucket=flat",
    "pp=2 schedule=gpipe microbatches=4",
    "pp=4 schedule=gpipe microbatches=8",
    "pp=4 schedule=1f1b microbatches=8",
    "pp=2 dp=2 schedule=1f1b microbatches=8",
    "pp=4 schedule=naive",
    "pp=4 schedule=eager-1f1b microbatches=8",
)
BATCHES = {"gpt-demo": 16, "mlp-wide": 256}
AIM = 15.0  # percent
EMULATED = (
    "dp=4 microbatches=2",
    "dp=4 zero=1 microbatches=2",
    "dp=4 zero=3 microbatches=2",
    "dp=2 zero=2 pp=2 microbatches=4",
    "pp=4 schedule=gpipe microbatches=8",
    "pp=4 schedule=1f1b microbatches=8 checkpoint=1",
    "pp=2 chunks=2 dp=2 schedule=interleaved microbatches=4",
    "pp=4 schedule=zb-h1 microbatches=8",
    "pp=4 schedule=chimera microbatches=8",
    "tp=4 microbatches=2",
    "tp=2 dp=2 microbatches=2",
    "tp=2 pp=2 sequence_parallel=true microbatches=4",
)
DEVICE = "flops=500MFLOP/s bandwidth=25MB/s latency=1ms"
MEDIAN_MUST, WORST_MUST = 5.0, 10.0  # percent


def measure(quick: bool = False) -> list[Row]:
    rows = []
    with Cluster(2, device="cpu") as two, Cluster(4, device="cpu") as four:
        clusters = {2: two, 4: four}
        calibrations = {n: calibrate(cluster, seconds=1.0, progress=False) for n, cluster in clusters.items()}
        for model in list(BATCHES)[: 1 if quick else None]:
            batch, errors = BATCHES[model], []
            job = Job(partial(models.build, model), data.for_model(model), batch)
            plans = [Plan.parse(text) for text in PLANS]
            sizes = {n for plan in plans for n in microbatch_rows(batch, plan.dp, plan.total_microbatches)}
            (facts,) = two.run_on([0], profile_job, job, tuple(sorted(sizes)))
            for plan in plans:
                program = plan.compile(facts.shape)
                known = Forecast(facts, batch, None, available_cores(), lambda each: calibrations[len(each.ranks)])
                predicted = known.of(program)
                done = execute(
                    program, job, cluster=clusters[plan.ranks], passes=4 if quick else 12, keep_gradients=False
                )
                measured = median(done.times[1:])
                errors.append(100 * (predicted.time / measured - 1))
                note = f"{predicted.time * 1e3:.1f} ms predicted, {measured * 1e3:.1f} ms measured"
                rows.append(Row(f"prediction, {model}, {plan}: error", errors[-1], "%", note=note))
            sizes_of_errors = sorted(map(abs, errors))
            rows.append(Row(f"prediction, {model}: median error of {len(PLANS)} plans", median(sizes_of_errors), "%"))
            rows.append(Row(f"prediction, {model}: worst error", sizes_of_errors[-1], "%", aim=AIM))
    return rows + _emulated(quick)


def _emulated(quick: bool) -> list[Row]:
    """The same of plans on four devices that are slower than this machine, so that its cores do not matter. Where other
    programs take the cores, they do: then the note counts the instructions whose real work was late."""
    model, rows = partial(models.build, "gpt-tiny", layers=4), []
    errors = []
    with Cluster(4, device=DEVICE) as cluster:
        for plan in EMULATED[-2:] if quick else EMULATED:
            run = train(model, data.for_model("gpt-tiny"), plan, cluster=cluster, batch=16, steps=4, progress=False)
            measured = median(run.step_times[1:])
            errors.append(100 * (run.predicted.time / measured - 1))
            note = f"{run.predicted.time * 1e3:.1f} ms predicted, {measured * 1e3:.1f} ms measured"
            if late := sum(map(len, run.trace.overruns)):
                note += f"; {several(late, 'instruction')} took longer than the device would have"
            rows.append(Row(f"prediction, emulated devices, {plan}: error", errors[-1], "%", note=note))
    sizes = sorted(map(abs, errors))
    text = f"prediction, emulated devices: median error of {len(sizes)} plans"
    rows.append(Row(text, median(sizes), "%", MEDIAN_MUST))
    rows.append(Row("prediction, emulated devices: worst error", sizes[-1], "%", WORST_MUST))
    return rows
