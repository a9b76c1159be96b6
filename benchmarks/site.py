"""How long the engine takes in a page: Pyodide under node, which is the browser's engine without the browser."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.harness import Row
from docs.site import engine

_PROGRAM = """
import { readFileSync } from "node:fs";
const cpu = () => { const used = process.cpuUsage(); return (used.user + used.system) / 1e3; };
const before = performance.now();
const { loadPyodide } = await import("MODULES/pyodide/pyodide.mjs");
const py = await loadPyodide();
py.unpackArchive(new Uint8Array(readFileSync("PACKED")), "zip", { extractDir: "/minipar" });
py.runPython("import sys; sys.path.insert(0, '/minipar')\\nfrom minipar_widgets.live import Live");
const open = (view, address) => {
  py.runPython(`Live().answer({"do": "open", "view": "${view}", "address": "${address}"}); None`);
};
open("ScheduleExplorer", "");
const found = { boot: [performance.now() - before, cpu()] };
const timed = (name, run) => {
  const start = performance.now(), used = cpu();
  run();
  found[name] = [performance.now() - start, cpu() - used];
};
timed("simulate", () => open("ScheduleExplorer", "stages=16&microbatches=64"));
timed("plan", () => open("PlanExplorer", "model=llama2-70b&hardware=h100&gpus=64&batch=512"));
console.log(JSON.stringify(found));
"""


def measure(quick: bool = False) -> list[Row]:
    if not (shutil.which("node") and shutil.which("npm")):
        return []
    modules = engine.install(engine.ROOT / "build" / "npm")
    with tempfile.TemporaryDirectory() as work:
        packed, program = Path(work) / "minipar.zip", Path(work) / "run.mjs"
        size = engine.pack(packed.parent)
        program.write_text(_PROGRAM.replace("MODULES", modules.as_posix()).replace("PACKED", packed.as_posix()))
        runs = 1 if quick else 3
        texts = [subprocess.run(["node", program], capture_output=True, text=True, check=True) for _ in range(runs)]
    found = [json.loads(text.stdout) for text in texts]
    # The clock, and the computing of all threads beside it, which other work on the machine lengthens less.
    best = {name: [min(run[name][k] for run in found) / 1e3 for k in (0, 1)] for name in found[0]}
    rows = {
        "boot": ("from nothing to a live explorer", 6.0, ""),
        "simulate": ("explorer, 16 ranks x 64 micro-batches", 1.0, ""),
        "plan": ("plans for Llama 70B on 64 H100", 10.0, "; and those of a smaller model"),
    }
    return [
        Row("page: minipar, zipped", size / 1e3, "kB", engine.MOST / 1e3),
        *(
            Row(f"page: {words}", best[name][0], "s", most, None, f"{best[name][1]:.2f} s of computing{more}")
            for name, (words, most, more) in rows.items()
        ),
    ]
