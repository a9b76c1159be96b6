"""Fusion of messages: the tensors of one value go to one rank at one time, so they go as one message.

    value     ( [ hidden . . . . ], ( [ skip . . . . ], [ counter ] ) )      three tensors
    message   [ hidden . . . . | skip . . . . | counter  ]                   one, each part on a multiple of 16 bytes

A message costs its latency, and copying costs time for each byte: so only short tensors are packed together. Both sides
decide by the form of the value, which both know. A value of one tensor is sent as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minipar.models.tensors import map_tensors, tensors
from minipar.program.comm_volume import packed, room


def parts_of(value: Any) -> list[Tensor]:
    """What has to be sent for a value: its tensors, or one message with all of them."""
    found = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors(value)]
    if not (length := packed([_bytes(tensor) for tensor in found])):
        return found
    message = torch.empty(length, dtype=torch.uint8, device=found[0].device)
    start = 0
    for tensor in found:
        size = _bytes(tensor)
        message[start : start + size] = as_bytes(tensor)
        start += room(size)
    return [message]


def places_for(value: Any, device: torch.device) -> tuple[Any, list[Tensor]]:
    """For a value whose tensors have no memory (on the device "meta"): the value with tensors on a device, and the
    tensors to receive into."""
    found = list(tensors(value))
    if not (length := packed([_bytes(tensor) for tensor in found])):
        # (torch.empty_like of a tensor without memory would import sympy: a second of a core in each rank.)
        value = map_tensors(value, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        return value, list(tensors(value))
    message = torch.empty(length, dtype=torch.uint8, device=device)
    views, start = [], 0
    for tensor in found:
        size = _bytes(tensor)
        views.append(message[start : start + size].view(tensor.dtype).view(tensor.shape))
        start += room(size)
    rest = iter(views)
    return map_tensors(value, lambda _: next(rest)), [message]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, byte by byte. (The stride of a tensor with a single element may be any number,
    and a view as bytes refuses some: so this sets it.)"""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
