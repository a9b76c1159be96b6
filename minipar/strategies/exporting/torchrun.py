"""A plan as a script that torchrun starts: minipar's own `train`, on the processes of a cluster (docs/cluster.md)."""

from __future__ import annotations

from minipar.errors import PlanError
from minipar.models import table
from minipar.strategies import plan_file
from minipar.strategies.exporting.rules import Export, Given

SCRIPT = '''\
"""Written by minipar; change it as you like. On each machine{where}:

    {launch}
"""

import os
from functools import partial

import torch
from minipar import data, models, train

run = train(
    partial(models.build, "{model}"), data.for_model("{model}"),
    {plan!r},
    loss=models.loss_of("{model}"), optimizer=partial(torch.optim.AdamW, lr=1e-3),
    batch={batch}, steps=100, save="runs/{model}", save_every=10,
)
if os.environ["RANK"] == "0":  # every process goes through this script
    print(run)
'''


def export(given: Given, model: object) -> Export:
    """The script. Errors: PlanError without the name of a preset, and for a plan that has something of the user's own,
    since another process would not know it by its name."""
    if model not in table.PRESETS:
        raise PlanError(f"model={model}: the script builds it; possible are {', '.join(table.PRESETS)}")
    plan_file.text(given.plan)
    several = given.nodes > 1
    where = ["--standalone"]
    if several:
        where = [f"--nnodes={given.nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500", f"--rdzv-id={model}"]
    launch = ("torchrun", *where, f"--nproc-per-node={given.gpus}", "train.py")
    text = SCRIPT.format(
        where=", with HOST the name of one of them" if several else "", launch=" ".join(launch), model=model,
        plan=str(given.plan), batch=given.batch,
    )  # fmt: skip
    notes = ("All machines must share the folder that it saves to, runs.",) if several else ()
    values = {"plan": str(given.plan), "model": model, "batch": given.batch}
    return Export("torchrun", "torch.distributed.run", values, text, launch, notes)
