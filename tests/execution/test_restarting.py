"""A run that saves, in another attempt of the same launch: which step it begins with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from minipar import models, train
from minipar.errors import SaveError
from minipar.execution.saving import keeping, restarting
from minipar.execution.saving.folder import open_folder
from tests.conftest import Clusters
from tests.execution.test_saved_folder import forged


@pytest.fixture
def saved(clusters: Clusters, tmp_path: Path) -> Path:
    """A folder with a run of four steps."""
    rows = torch.randn(4, 3), torch.randint(2, (4,))
    train(partial(models.mlp, (3, 2)), rows, "", cluster=clusters(1), steps=4, save=tmp_path, progress=False)
    return tmp_path


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As in a process of torchrun that trains for the first time."""
    known = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**known, "TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(restarting, "_calls", 0)
    return monkeypatch


def ask(folder: Path, steps: int, resume: Path | None = None) -> tuple[int, int]:
    """The first step, and how many."""
    storing, left = restarting.going_on(keeping.storing(resume, folder, 1, None), steps)
    return storing.first, left


def leave(folder: Path, first: int, steps: int, launch: str = "mine", call: int = 0) -> None:
    """As if this attempt had saved what is there."""
    forged(folder, call=[launch, call, first, steps])


def test_the_steps_that_are_left_are_done(saved: Path, launch: Any) -> None:
    leave(saved, 0, 10)
    storing, left = restarting.going_on(keeping.storing(None, saved, 1, None), 10)
    assert (storing.first, left) == (4, 6)
    assert storing.call == ("mine", 0, 0, 10)  # the next attempt goes on with what this one saves


def test_a_first_attempt_begins_where_it_was_asked_to(saved: Path, launch: Any) -> None:
    assert ask(saved, 10) == (0, 10)  # (what is saved there is of another launch)
    assert ask(saved, 10, resume=saved) == (4, 10)  # the second call of this process


def test_a_resumed_run_counts_from_its_own_beginning(saved: Path, launch: Any) -> None:
    leave(saved, 2, 10)  # it had begun with step 2, and has done two of its ten
    assert ask(saved, 10, resume=saved) == (4, 8)


def test_other_launches_and_other_calls_are_not_gone_on_with(saved: Path, launch: pytest.MonkeyPatch) -> None:
    leave(saved, 0, 10, launch="another")
    assert ask(saved, 10) == (0, 10)
    leave(saved, 0, 10, call=5)
    assert ask(saved, 10) == (0, 10)
    launch.setenv("TORCHELASTIC_RUN_ID", "none")  # as without --rdzv-id: the same for everybody
    launch.setattr(restarting, "_calls", 0)
    leave(saved, 0, 10, launch="none")
    assert ask(saved, 10) == (0, 10)
    launch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # but torchrun has restarted it
    assert ask(saved, 10) == (4, 6)


def test_a_complete_run_is_done_again_or_refused(saved: Path, launch: pytest.MonkeyPatch) -> None:
    leave(saved, 0, 4)
    assert ask(saved, 4) == (0, 4)
    leave(saved, 2, 2)
    launch.setattr(restarting, "_calls", 0)
    with pytest.raises(SaveError, match="all 2 steps of this run are done"):
        ask(saved, 2, resume=saved)


def test_without_torchrun_no_call_is_noted(saved: Path) -> None:
    assert ask(saved, 10) == (0, 10)
    assert open_folder(saved).header.call is None
