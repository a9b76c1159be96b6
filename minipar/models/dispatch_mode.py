"""What sees each operation of torch while it is entered: torch's own mode, without the compiler."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no: else torch would import its compiler, for a second or more, only to keep it away from this mode."""
        return False
