"""Plans: the same validation for text, tables and keywords; errors of one line; the user's own schedule."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar import Backward, Forward, Plan, PlanError, ProgramError, simulate
from minipar.program import Op
from minipar.strategies.schedules import registry
from tests.fuzz.fingerprints import judge
from tests.interpreters import shape


@pytest.fixture
def own_schedules(monkeypatch):
    """Schedules registered in a test are forgotten after it."""
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))


def test_words_table_and_keywords_agree():
    words = Plan.parse("pp=2 dp=3 schedule=gpipe microbatches=8 accumulate=2 split=5,3 bucket=0.5 overlap=none")
    table = Plan.parse({
        "pp": 2, "dp": 3, "schedule": "gpipe", "microbatches": 8, "accumulate": 2, "split": [5, 3], "bucket": 0.5,
        "overlap": "none",
    })  # fmt: skip
    keywords = Plan(
        pp=2, dp=3, schedule="gpipe", microbatches=8, accumulate=2, split=(5, 3), bucket=0.5, overlap="none"
    )
    assert words == table == keywords
    assert (words.pp, words.split, words.bucket) == (2, (5, 3), 0.5)
    assert words.ranks == 6
    assert words.total_microbatches == 16


def test_defaults_and_spellings():
    assert Plan.parse("") == Plan.parse({}) == Plan() == Plan(split="even", pp="1", dp=1.0)
    assert Plan(bucket="25MiB").messages == Plan().messages == Plan(zero=2).messages == 25
    assert Plan(zero=3).messages == 8  # (its layers are gathered one by one)
    assert Plan().ranks == 1
    assert Plan.parse("pp=3 split=2,2,1") == Plan(pp=3, split=[2, 2, 1])
    assert len({Plan(pp=2), Plan(pp="2"), Plan(pp=3)}) == 2  # plans are equal by value and can be keys


KEYS = "possible are dp, pp, tp, sequence_parallel"
NAMES = "possible are "
COUNTS = "must be a whole number of at least 1"
SPLITS = "must be layer counts per stage, such as 3,3,2, or even, or auto"
SIZES = "must be a size in MiB above 0, none (one message per parameter), flat (one for all), auto"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("pp=2 microbatch=4", f"plan key 'microbatch': unknown; {KEYS}"),
        ("pp=2 stages=4", f"plan key 'stages': unknown; {KEYS}"),
        ({7: 1}, f"plan key 7: unknown; {KEYS}"),
        ("pp=2 dp=2 pp=2", "plan key 'pp': given twice"),
        ("pp=2 1f1b", "plan word '1f1b': must be key=value, such as pp=2"),
        ("pp=", "plan word 'pp=': must be key=value, such as pp=2"),
        ("pp=two", f"pp=two: {COUNTS}"),
        ("dp=0", f"dp=0: {COUNTS}"),
        ({"pp": 2.5}, f"pp=2.5: {COUNTS}"),
        ({"pp": True}, f"pp=True: {COUNTS}"),
        ({"dp": float("nan")}, f"dp=nan: {COUNTS}"),
        ("schedule=gpip", f"schedule=gpip: unknown; {NAMES}"),
        ({"schedule": ["gpipe"]}, f"schedule=['gpipe']: unknown; {NAMES}"),
        ("pp=2 split=3,2,1", "split=3,2,1: 3 stages, but pp=2"),
        ("pp=2 split=3,0", f"split=3,0: {SPLITS}"),
        ("pp=2 split=3,,1", f"split=3,,1: {SPLITS}"),
        ({"split": 3.5}, f"split=3.5: {SPLITS}"),
        ("bucket=0", f"bucket=0: {SIZES}"),
        ("bucket=nan", f"bucket=nan: {SIZES}"),
        ({"bucket": True}, f"bucket=True: {SIZES}"),
        ("overlap=forward", "overlap=forward: unknown; possible are none, backward"),
        ({"overlap": True}, "overlap=True: unknown; possible are none, backward"),
    ],
)
def test_refused_plans_name_the_thing_the_value_and_what_is_possible(given, says):
    with pytest.raises(PlanError) as error:
        Plan.parse(given)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


def test_a_key_that_is_nearly_one_gets_a_suggestion():
    with pytest.raises(PlanError, match=r"; did you mean microbatches\?$"):
        Plan.parse("microbatch=4")
    with pytest.raises(PlanError, match=r"^(?!.*did you mean)"):
        Plan.parse("quagga=4")


@pytest.mark.parametrize(
    ("plan", "arguments", "says"),
    [
        ("pp=4", {"layers": 3}, "pp=4: more stages than layers (3); possible are 1 to 3"),
        ("pp=2 split=2,1", {"layers": 4}, "split=2,1: sums to 3, but the model has 4 layers; possible is split=2,2"),
        ("pp=2", {"layers": 0}, "layers=0: must be a whole number of at least 1"),
        ("pp=2", {"layers": 2.5}, "layers=2.5: must be a whole number of at least 1"),
        ("pp=2", {"layers": True}, "layers=True: must be a whole number of at least 1"),
        ("pp=2", {"layers": 2, "steps": 0}, "steps=0: must be a whole number of at least 1"),
        ("pp=2", {}, "compile: give either a shape (models.shape(name)) or layers=N"),
        ("pp=2", {"shape": shape(2), "layers": 2}, "compile: give either a shape (models.shape(name)) or layers=N"),
    ],
)
def test_plans_that_do_not_fit_the_model(plan, arguments, says):
    with pytest.raises(PlanError) as error:
        Plan.parse(plan).compile(**arguments)
    assert str(error.value) == says


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=3) | st.sampled_from(["1", "2,2"]),
    lambda some: st.lists(some, max_size=3) | st.tuples(some, some),
    max_leaves=4,
)


KEYS_OF_TABLES = ["pp", "split", "bucket", "schedule", "overlap", "checkpoint", "micro"]


@given(st.dictionaries(st.sampled_from(KEYS_OF_TABLES), anything))
def test_any_table_is_a_plan_or_a_plan_error(table):
    try:
        plan = Plan.parse(table)
    except PlanError:
        return
    assert Plan.parse(str(plan)) == plan


def test_the_first_stages_get_the_layers_left_over():
    assert Plan(pp=3).compile(layers=8).placement == ((0, 1, 2), (3, 4, 5), (6, 7))
    assert Plan(pp=3, split=(1, 5, 2)).compile(layers=8).placement == ((0,), (1, 2, 3, 4, 5), (6, 7))


def test_accumulation_repeats_the_schedule_before_one_step():
    program = Plan(pp=2, microbatches=3, accumulate=2, schedule="gpipe").compile(layers=2)
    assert program.microbatches == 6
    last = [(ins.op.value, ins.microbatch) for ins in program.ranks[1] if ins.stream == "compute"]
    rounds = [[("F", i) for i in r] + [("B", i) for i in r] for r in (range(3), range(3, 6))]
    assert last == [*rounds[0], *rounds[1], ("STEP", -1)]


# the user's own schedule ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_schedules")
def test_ten_lines_make_a_schedule():
    @minipar.schedule("mine")
    def mine(rank, stages, microbatches):
        for i in range(microbatches):
            yield Forward(i)
        for i in reversed(range(microbatches)):
            yield Backward(i)

    program = Plan.parse("pp=4 dp=2 schedule=mine microbatches=8").compile(layers=8)
    assert judge(program) == ""
    gpipe = Plan.parse("pp=4 dp=2 schedule=gpipe microbatches=8").compile(layers=8)
    assert simulate(program).time == simulate(gpipe).time == 33
    assert simulate(program).in_flight() == simulate(gpipe).in_flight()
    back = [ins.microbatch for ins in program.ranks[0] if ins.op is Op.BACKWARD]
    assert back == [7, 6, 5, 4, 3, 2, 1, 0]
    assert "mine" in [schedule.name for schedule in minipar.strategies.schedules()]


def own(actions):
    @minipar.schedule("mine")
    def mine(rank, stages, microbatches):
        return actions(rank, microbatches)

    return Plan(pp=2, microbatches=2, schedule="mine")


@pytest.mark.usefixtures("own_schedules")
@pytest.mark.parametrize(
    ("actions", "says"),
    [
        (
            lambda rank, m: [Forward(0), Forward(2)],
            "schedule=mine: Forward(microbatch=2, chunk=0) on rank 0; micro-batches count from 0 to 1",
        ),
        (
            lambda rank, m: [Forward(0.5)],
            "schedule=mine: Forward(microbatch=0.5, chunk=0) on rank 0; micro-batches count from 0 to 1",
        ),
        (
            lambda rank, m: [Forward(0, chunk=1)],
            "schedule=mine: Forward(microbatch=0, chunk=1) on rank 0; chunks count from 0 to 0",
        ),
        (
            lambda rank, m: [(0, 0)],
            "schedule=mine: yielded (0, 0); possible are Forward(i, chunk), Backward, BackwardInput and BackwardWeight",
        ),
        (
            lambda rank, m: None,
            "schedule=mine: gave None; it must yield actions; possible are Forward(i, chunk), Backward",
        ),
        (
            lambda rank, m: [Forward(i) for i in range(m)][m],
            "schedule=mine: IndexError on rank 0: list index out of range, in line ",
        ),
    ],
)
def test_own_schedules_that_cannot_be_are_refused(actions, says):
    with pytest.raises(PlanError) as error:
        own(actions).compile(layers=4)
    assert error.value.reason.startswith(says)
    assert "\n" not in error.value.reason


@pytest.mark.usefixtures("own_schedules")
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_schedule_that_forgets_the_backward_is_refused_with_any_number_of_replicas(replicas):
    @minipar.schedule("mine")
    def mine(rank, stages, microbatches):
        return [Forward(i) for i in range(microbatches)]

    with pytest.raises(ProgramError, match="micro-batch 0 is missing: .* the backward of layer 0"):
        Plan(pp=2, dp=replicas, schedule="mine").compile(layers=2)


@pytest.mark.parametrize("name", ["", "two words", "a=b", "a,b"])
def test_schedule_names_are_one_word(name):
    with pytest.raises(PlanError, match="must be one word without '=' and ','"):
        minipar.schedule(name)


def test_every_way_to_give_a_plan_is_judged_alike():
    import numpy as np

    with pytest.raises(PlanError, match="'micro': unknown; possible are dp, pp"):
        Plan(micro=4)
    plan = Plan(pp=2, split=np.array([3, 1]), microbatches=np.int64(2))
    assert plan == Plan.parse("pp=2 split=3,1 microbatches=2")
    assert Plan.parse(plan) is plan
    assert plan.compile(np.int64(4)).layers == 4
    for wrong in (None, ["pp=2"], 3):
        with pytest.raises(PlanError, match="must be a Plan"):
            Plan.parse(wrong)
    for wrong in ("gpt-tiny", 3.0):
        with pytest.raises(PlanError, match="give a shape"):
            plan.compile(wrong)
    with pytest.raises(PlanError, match="either a shape"):
        plan.compile(4, layers=4)


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ("pp=1000000000 split=5,3", 8),
        ("pp=100000000 place=0,1", 8),
        ("pp=2 chunks=100000000 schedule=interleaved", 8),
        ("dp=1000000", 8),
        ("pp=2 accumulate=1000000", 8),
        ("tp=1000000", 8),
        ("ep=1000000000", 8),
        ("dp=2 sync=ps servers=1000000000", 8),
        ("microbatches=1000000000", 8),
        ("dp=100", 10**6),
    ],
)
def test_absurd_numbers_are_refused_before_anything_is_built(words, layers):
    begun = time.process_time()
    with pytest.raises(PlanError, match="possible are up to"):
        Plan.parse(words).compile(layers=layers)
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize("value", [[], 3, None, b"x"])
def test_a_folder_is_a_path(value):
    with pytest.raises(PlanError, match="offload_folder=.*: must be the path of a folder"):
        Plan(offload="optimizer", offload_to="disk", offload_folder=value)


@pytest.mark.parametrize(
    "key", ["pp", "dp", "microbatches", "accumulate", "slices", "bucket", "clip", "split", "place"]
)
def test_numbers_of_thousands_of_digits_are_refused_in_one_line(key):
    for value in (10**5000, (10**5000, 1)):
        with pytest.raises(
            PlanError, match=f"{key}=about 10.5000: too large; possible are .* up to 10{{18}}"
        ) as caught:
            Plan(**{key: value})
        assert len(str(caught.value)) < 120
    with pytest.raises(PlanError, match=r"pp=1000.* \(5001 characters\): must be a whole number") as caught:
        Plan.parse(f"pp=1{'0' * 5000}")
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_actions_are_not_listed_if_there_are_too_many(schedule):
    plan = Plan(pp=2, microbatches=10**9, schedule=schedule)
    with pytest.raises(PlanError, match="about 4000000000 actions of 2 ranks in a step; possible are up to 10000000"):
        _ = plan.splits
    with pytest.raises(PlanError, match="about 2000000000 actions of a rank in a step; possible are up to 10000000"):
        plan.actions(0)
    assert Plan(pp=2, microbatches=100, schedule=schedule).splits == (schedule == "zb-h1")
