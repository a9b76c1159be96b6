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

TOGETHER = 1 << 18  # bytes: copying this much takes about as long as a message of its own


def parts_of(value: Any) -> list[Tensor]:
    """What has to be sent for a value: its tensors, or one message with all of them."""
    found = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors(value)]
    if not _together(found):
        return found
    message = torch.empty(sum(map(_room, found)), dtype=torch.uint8, device=found[0].device)
    start = 0
    for tensor in found:
        size = tensor.numel() * tensor.element_size()
        message[start : start + size] = as_bytes(tensor)
        start += _room(tensor)
    return [message]


def places_for(value: Any) -> tuple[Any, list[Tensor]]:
    """For an allocated value: the value with its final tensors, and the tensors to receive into."""
    found = list(tensors(value))
    if not _together(found):
        return value, found
    message = torch.empty(sum(map(_room, found)), dtype=torch.uint8, device=found[0].device)
    views, start = [], 0
    for tensor in found:
        size = tensor.numel() * tensor.element_size()
        views.append(message[start : start + size].view(tensor.dtype).view(tensor.shape))
        start += _room(tensor)
    rest = iter(views)
    return map_tensors(value, lambda _: next(rest)), [message]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, byte by byte. (The stride of a tensor with a single element may be any number,
    and a view as bytes refuses some: so this sets it.)"""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _together(found: list[Tensor]) -> bool:
    return len(found) > 1 and sum(map(_room, found)) <= TOGETHER


def _room(tensor: Tensor) -> int:
    """Bytes of a tensor's part of a message, filled up to 16, as a view of complex numbers needs it."""
    return -(-tensor.numel() * tensor.element_size() // 16) * 16
