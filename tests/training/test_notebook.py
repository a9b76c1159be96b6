"""What a notebook shows of plans, runs and errors."""

from __future__ import annotations

from functools import partial

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import minipar
from minipar import Plan, PlanError, ProgramError, data, models, simulate, train, verify
from minipar.strategies.schedules import registry


@pytest.fixture(scope="module")
def run(clusters):
    model, rows = partial(models.build, "gpt-tiny"), data.for_model("gpt-tiny")
    return train(model, rows, "pp=2 microbatches=2", cluster=clusters(2), steps=2, batch=4, memory=True)


@pytest.mark.parametrize("plan", ["", "pp=2 microbatches=4", "dp=2 zero=3 checkpoint=sqrt", "sync=ps dp=2 mode=ssp:2"])
def test_a_plan_shows_what_differs_from_its_defaults(plan):
    made = Plan.parse(plan)
    assert eval(repr(made), {"Plan": Plan}) == made
    assert repr(Plan.parse("pp=2 microbatches=4")) == "Plan(pp=2, microbatches=4)"


def test_a_run_has_a_table_and_a_picture(run):
    html = run._repr_html_()
    assert f"loss {run.losses[0]:.4f} -&gt; {run.losses[-1]:.4f}" in html
    assert html.count("<tr>") == 3  # a head and two ranks
    assert '<img src="data:image/png;base64,' in html
    assert "rank 1" in html
    assert len(html) < 80_000  # it is stored in the notebook


def test_the_memory_of_a_run_has_a_table_and_a_picture(run):
    html = run.memory._repr_html_()
    most = max(run.memory, key=lambda peak: peak.bytes)
    assert f"{most.bytes / 2**20:.2f} MiB" in html
    assert "optimizer" not in html
    assert str(run.program.ranks[0][run.memory[0].index]) in html
    assert "at its peak" in html
    assert [peak.bytes for peak in run.memory] == run.peak_memory
    first = repr(run.memory).splitlines()[0]
    assert first.startswith(f"rank 0: {run.memory[0].bytes / 2**20:.2f} MiB in ")
    assert "parameters " in first


def test_plans_can_be_simulated_and_are_told_what_they_need():
    assert simulate("pp=4 microbatches=8").time == simulate(Plan(pp=4, microbatches=8).compile(layers=4)).time
    assert simulate(Plan(pp=2, microbatches=4, schedule="interleaved", chunks=2)).program.layers == 4
    with pytest.raises(PlanError, match=r"one layer for each stage.*plan\.compile\(models\.shape"):
        simulate("pp=4 microbatches=8 checkpoint=40MiB")
    verify(Plan(pp=2))
    with pytest.raises(PlanError, match=r"checkpoint=40MiB: a budget needs the sizes"):
        verify(Plan(pp=2, checkpoint="40MiB"))
    with pytest.raises(ProgramError, match=r"takes a program or a Plan, and str is neither; Plan\.parse"):
        verify("pp=2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        (lambda: Plan(schedule="1f1bb"), "1f1b"),
        (lambda: Plan.parse("microbatchs=4"), "microbatches"),
        (lambda: Plan(sync="pss"), "ps"),
        (lambda: models.shape("gpt-tinny"), "gpt-tiny"),
        (lambda: minipar.estimate("tp=8", "gpt3-175", "a100-80gb"), "gpt3-175b"),
        (lambda: minipar.estimate("tp=8", "gpt3-175b", "a100-80g"), "a100-80gb"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_nearest(wrong, meant):
    with pytest.raises(PlanError, match=rf"did you mean {meant}\?"):
        wrong()


def test_a_schedule_of_minipar_is_not_replaced_by_accident():
    own = registry.find("gpipe").generate
    with pytest.raises(PlanError, match=r"'gpipe'.*replace=True"):
        minipar.schedule("gpipe")(lambda rank, ranks, microbatches: iter(()))
    assert registry.find("gpipe").generate is own
    kept = registry._schedules["gpipe"]
    try:
        minipar.schedule("gpipe", replace=True)(lambda rank, ranks, microbatches: iter(()))
        assert registry.find("gpipe").generate is not own
    finally:
        registry._schedules["gpipe"] = kept


CELL = """\
from minipar import Plan

def mine():
    return Plan(pp=2, schedule="1f1bb")

mine()
"""


@pytest.fixture
def shell():
    made = InteractiveShell.instance()
    made.colors = "nocolor"
    yield made
    InteractiveShell.clear_instance()


def shown(shell: InteractiveShell, cell: str) -> str:
    with capture_output() as told:
        shell.run_cell(cell)
    return told.stdout + told.stderr


def test_errors_show_the_lines_of_the_user_and_the_reason(shell):
    text = shown(shell, CELL)
    assert "Cell In[1], line 6, in <module>\n    mine()" in text
    assert 'line 4, in mine\n    return Plan(pp=2, schedule="1f1bb")' in text
    assert text.count("line ") == 2  # nothing of minipar or of the interpreter
    assert "PlanError: schedule=1f1bb: unknown" in text
    shell.run_line_magic("xmode", "Verbose")
    assert "__post_init__" in shown(shell, CELL)


def test_other_errors_are_shown_as_ever(shell):
    assert "Traceback (most recent call last)" in shown(shell, "import minipar\n1 / 0")
