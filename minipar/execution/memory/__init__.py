"""Where a rank's bytes are: measured storage by storage, bounded by a device's capacity, and recorded for predictions.

    storages.py     follows live storages by torch's dispatch hooks
    tracker.py      that, for a rank's executor: kinds, layers, instructions, capacity
    watching.py     whether a run follows its memory, and for how many passes it keeps what happened
    capacity.py     what `DeviceOutOfMemory` says
    tape.py         what one layer allocates and frees, in order, alone on one device
    stores.py       what is kept away from the device: in the host's memory, or in files (disk.py)

`minipar.trace` holds the series that a run gives, and `minipar.prediction.memory` predicts them from tapes.
"""
