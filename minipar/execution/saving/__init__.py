"""Runs in folders: saved while or after they run, and continued under any plan.

    contents.py   what must be saved, as named elements; a rank brings its share, and takes its share
    storage.py    elements in safetensors files: written in chunks, read as far as they are wanted
    folder.py     a folder as a whole: index, checksums, one rename that makes a save count
    keeping.py    where the elements are: in ranks that run, or brought back by them

Every parameter, optimizer state and buffer is a line of elements under the model's own name. A rank gives the parts
that it holds, and takes those that its plan gives it. A save writes a new step folder, flushes it, and renames a new
index over the old one. Up to 64 MiB of state come back to the driver without being asked for, so that `run.save` works;
larger runs are saved by their ranks, in parallel. Nothing that is loaded is ever unpickled: an index in JSON, and
tensors in safetensors files.
"""
