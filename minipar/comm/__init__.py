"""Communication between ranks. `communicator.create()` inside a rank gives its `Communicator`."""
