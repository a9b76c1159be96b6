"""Layers with graphs of odd shapes, and with hooks: plain torch's gradients, with backwards whole and in halves."""

from __future__ import annotations

from functools import partial

import pytest

from tests.execution.test_pipelines import check
from tests.odd_layers import ODD, model

pytestmark = pytest.mark.many(7)

PLANS = (
    "pp=2 schedule=1f1b microbatches=3 split=3,4",
    "pp=2 schedule=zb-h1 microbatches=3 split=3,4",
    "pp=2 schedule=zb-v microbatches=4 split=1,2,2,2",
    "pp=2 schedule=dualpipe microbatches=4 split=3,4",
)


@pytest.mark.many(8)
@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("name", ODD)
def test_gradients_of_odd_layers(clusters, name, text):
    check(clusters, text, partial(model, name), 11)
