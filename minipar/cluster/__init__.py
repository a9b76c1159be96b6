"""Persistent local ranks: `Cluster`. Importing this package imports no torch."""

from __future__ import annotations

from minipar.cluster.local import Cluster

__all__ = ["Cluster"]
