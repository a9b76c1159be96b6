"""Where a run's bytes are: measured storage by storage, and bounded by a device's capacity.

    storages.py     follows live storages by torch's dispatch hooks
    tracker.py      that, for a rank's executor: kinds, layers, instructions, capacity; what `DeviceOutOfMemory` says
    tape.py         what one layer allocates and frees, in order, alone on one device
    disk.py         tensors in a file, which is what the disk is as a tier

A dispatch mode follows every storage to the byte, says afterwards what kind it was, and ties each change to an
instruction. Capacity is checked at each allocation. `prediction/memory.py` lays tapes along a program and a model's
edges. A storage dies when the executor, the layer that made it and the layers that read it have released it. A received
message is `buffers` until it is read, then `activations`. A bucket is the gradient itself, and what is copied into it
is temporary. A rank counts only its own layers, from when its executor is built. `trace/` reads the series of both
without torch.
"""
