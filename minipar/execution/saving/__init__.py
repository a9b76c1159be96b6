"""Runs in folders: saved while or after they run, and gone on with under any plan.

    contents.py   what must be saved, as named elements; a rank brings its share, and takes its share
    storage.py    torch.distributed.checkpoint's planners and storage, with safetensors files
    folder.py     a folder as a whole: index, checksums, one rename that makes a save count
    keeping.py    where the elements are: in ranks that run, or brought back by them

Nothing that is loaded is ever unpickled: an index in JSON, and tensors in safetensors files.
"""
