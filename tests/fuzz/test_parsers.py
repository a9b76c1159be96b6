"""What somebody else wrote is read, or refused in one line, whatever it is; in little time and memory."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minipar.errors import ProgramError
from minipar.program import Program
from tests.fuzz import parsers
from tests.fuzz.parsers import PARSERS


@pytest.mark.many(2)
@pytest.mark.parametrize("name", PARSERS)
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_input_is_taken_or_refused(name: str, data: st.DataObject) -> None:
    parsers.check(name, data.draw(PARSERS[name].inputs))


@pytest.mark.parametrize("name", PARSERS)
def test_right_inputs_are_taken(name: str) -> None:
    right = {
        "plans": "pp=2 microbatches=4",
        "plan files": "pp = 2",
        "programs": parsers.a_program(),
        "profiles": parsers.a_profile(),
        "compressed traces": parsers.gzip.compress(parsers.json.dumps(parsers.a_profile()).encode()),
        "devices": "pcie latency=1ms",
        "saves": parsers.a_save(),
        "texts of saves": None,  # (a whole save is among `saves`)
        "cells": "4 --only 0",
        "commands": ["simulate", "pp=2", "--layers", "2"],
    }[name]
    if right is not None:
        assert parsers.check(name, right)


@pytest.mark.parametrize("field", ["layers", "microbatches", "steps"])
def test_a_program_of_a_billion_is_refused_at_once(field: str) -> None:
    with pytest.raises(ProgramError, match=f"{field}=1e[+]09: the instructions name"):
        Program.from_json({**parsers.a_program(), field: 10**9})
