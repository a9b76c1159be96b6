"""Make torchvision importable with a torch without CUDA, for which its wheels are not compiled.

torchvision's Python code registers shapes of operators that only its compiled part has. This module leaves out the
registrations of missing operators; no test calls these operators. Import it before torchvision, timm or transformers
(both import torchvision), in ranks as well.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch


def import_torchvision() -> bool:
    """Whether torchvision is there; it is imported then."""
    if importlib.util.find_spec("torchvision") is None:
        return False
    register = torch.library.register_fake

    def tolerant(name: Any, *args: Any, **options: Any) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            try:
                return register(name, *args, **options)(function)
            except RuntimeError as error:
                if "does not exist" not in str(error):
                    raise
                return function

        return decorate

    torch.library.register_fake = tolerant  # type: ignore[assignment]
    try:
        import torchvision  # noqa: F401
    finally:
        torch.library.register_fake = register
    return True


import_torchvision()
