"""`%%ranks` in a real kernel. The tests share the kernel; each begins with new ranks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from minipar.cluster import magic
from minipar.errors import PlanError

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the same output everywhere


@dataclass
class Answer:
    """What a cell shows: its printed text, the value after Out[n], and (name, message, traceback) of its error."""

    text: str = ""
    value: str = ""
    error: tuple[str, str, str] = ("", "", "")


class Notebook:
    """A kernel that runs one cell after another."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(ROOT), env=ENVIRONMENT)

    def __call__(
        self, code: str, meanwhile: Callable[[], None] = lambda: None, see: Callable[[str], None] = lambda text: None
    ) -> Answer:
        answer = Answer()
        request = self.client.execute(code, allow_stdin=False)
        meanwhile()
        while True:
            message: dict[str, Any] = self.client.get_iopub_msg(timeout=60)
            content = message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "stream":
                answer.text += content["text"]
                see(content["text"])
            elif message["msg_type"] == "execute_result":
                answer.value = content["data"]["text/plain"]
            elif message["msg_type"] == "error":
                answer.error = (content["ename"], content["evalue"], "\n".join(content["traceback"]))
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return answer

    def begin(self, ranks: int) -> None:
        """New ranks, whatever the tests before have left."""
        assert self("%ranks close").error == self(f"%%ranks {ranks}\n0;").error == ("", "", "")


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    made = Notebook()
    assert made("%load_ext minipar\nimport sys; 'torch' in sys.modules").value == "False"
    yield made
    made.client.stop_channels()
    made.manager.shutdown_kernel(now=True)


def test_output_has_the_ranks_name_and_the_same_line_is_shown_once(notebook: Notebook) -> None:
    notebook.begin(4)
    answer = notebook("%%ranks\nimport os\nprint('one'); os.system(f'echo {rank // 2}')\nrank, world_size")
    assert answer.text == (
        "[ranks 0-3] one\n[ranks 0-1] 0\n[ranks 2-3] 1\n"
        "rank 0 => (0, 4)\nrank 1 => (1, 4)\nrank 2 => (2, 4)\nrank 3 => (3, 4)\n"
    )
    answer = notebook("%%ranks\nimport sys\nprint('same', file=sys.stderr)\n{'a': 1}")
    assert answer.text == "[ranks 0-3] same\nranks 0-3 => {'a': 1}\n"
    assert notebook("%%ranks\nif rank == 2: print('only me')").text == "[rank 2] only me\n"


def test_what_is_not_shown(notebook: Notebook) -> None:
    notebook.begin(4)
    assert notebook("%%ranks\n5;") == Answer()
    assert notebook("%%ranks\nNone") == Answer()
    assert notebook("%%ranks --quiet\nprint('x')\n5") == Answer()
    error = notebook("%%ranks --quiet\nprint('x')\n1 / 0")
    assert error.text == ""
    assert error.error[0] == "ZeroDivisionError"


def test_variables_live_on_in_each_rank_and_not_in_the_notebook(notebook: Notebook) -> None:
    notebook.begin(4)
    notebook("%%ranks\ncount = rank\ndef more(): return count + 1\nclass Mine: pass")
    notebook("%%ranks --only 1,3\ncount += 10")
    assert notebook("%%ranks --only 0,1\nmore()").text == "rank 0 => 1\nrank 1 => 12\n"
    answer = notebook("%%ranks\nimport pickle\n__name__, type(pickle.loads(pickle.dumps(Mine()))) is Mine")
    assert answer.text == "ranks 0-3 => ('__main__', True)\n"
    assert notebook("'count' in globals()").value == "False"


def test_out_brings_the_values_in_rank_order(notebook: Notebook) -> None:
    notebook.begin(4)
    notebook("%%ranks --out values --quiet\nimport time; time.sleep(0.1 * (3 - rank))\ntorch.tensor([rank])")
    assert notebook("[int(value) for value in values]").value == "[0, 1, 2, 3]"
    notebook("%%ranks --only 2,0 --out=values --quiet\n10 * rank")
    assert notebook("values").value == "[0, 20]"
    name, message, shown = notebook("%%ranks --out values\n(x for x in [])").error
    assert name == "RankError"
    assert re.match(r"--out: the value of rank \d, a generator, cannot be sent", message)
    assert shown.startswith(message.splitlines()[0])
    assert notebook("values").value == "[0, 20]"


def test_comm_is_there_also_after_a_failure_and_with_only(notebook: Notebook) -> None:
    notebook.begin(3)
    assert notebook("%%ranks --only 1\ncomm.rank").text.endswith("rank 1 => 1\n")  # its making takes all ranks
    assert notebook("%%ranks\ndef total(): return comm.allreduce([rank])").error[0] == ""
    assert notebook("%%ranks\ntotal()").text == "ranks 0-2 => [3]\n"
    assert notebook("%%ranks\n1 / 0").error[0] == "ZeroDivisionError"
    code = "%%ranks\nimport minipar\ntotal(), globals()['comm'] is minipar.communicator.create()"
    assert notebook(code).text == "ranks 0-2 => ([3], True)\n"  # a new one, although this cell does not name it


def test_an_error_is_the_cells_own_with_the_ranks_traceback(notebook: Notebook) -> None:
    notebook.begin(4)
    answer = notebook(
        "%%ranks\nkept = rank\ndef divide(by):\n    return 1 / by  # the guilty line\nprint('before')\ndivide(rank - 1)"
    )
    name, message, shown = answer.error
    assert (name, message.splitlines()[0]) == ("ZeroDivisionError", "division by zero")
    assert answer.text == "[ranks 0-3] before\n"
    number = re.search(r"In\[(\d+)\]", shown)
    assert number
    assert shown.splitlines() == [
        "raised on rank 1:",
        "Traceback (most recent call last):",
        f'  File "<%%ranks In[{number[1]}]>", line 6, in <module>',
        "    divide(rank - 1)",
        f'  File "<%%ranks In[{number[1]}]>", line 4, in divide',
        "    return 1 / by  # the guilty line",
        "ZeroDivisionError: division by zero",
    ]
    assert notebook("len(In) - 1").value == str(int(number[1]) + 1)
    assert notebook("%%ranks\nkept").text == "rank 0 => 0\nrank 1 => 1\nrank 2 => 2\nrank 3 => 3\n"


def test_death_of_a_rank(notebook: Notebook) -> None:
    notebook.begin(3)
    notebook("%%ranks\nkept = 1")
    answer = notebook("%%ranks\nif rank == 1:\n    print('last words', flush=True); import os; os.kill(os.getpid(), 9)")
    assert answer.text == "[rank 1] last words\n"
    assert answer.error[2].startswith("RankDied: rank 1 was killed by signal 9")
    assert answer.error[2].endswith(
        "2 of 3 ranks alive; the others start anew at the next cell, without their variables"
    )
    assert notebook("%%ranks\n'kept' in globals()").text == "rank 0 => True\nrank 1 => False\nrank 2 => True\n"


def test_syntax_errors_are_told_before_anything_runs(notebook: Notebook) -> None:
    notebook.begin(4)
    for code, line in ("for i in range(3)", 3), ("return 3", 3):
        answer = notebook(f"%%ranks 4\nprint('not this')\n{code}")
        assert answer.error[0] == "SyntaxError"
        assert f"line {line})" in answer.error[1]
        assert code in re.sub(r"\x1b\[\d*m", "", answer.error[2])
        assert answer.text == ""
    name, _, shown = notebook("%%ranks\nexec('1 +')").error  # this one is found by a rank
    assert name == "RankError"
    assert re.match(r"raised on rank \d:", shown)
    assert "    exec('1 +')" in shown


def test_another_number_of_ranks_replaces_them_with_a_note(notebook: Notebook) -> None:
    notebook.begin(4)
    notebook("%%ranks\nkept = 1")
    assert notebook("%%ranks 2\n'kept' in globals(), world_size").text == (
        "2 new ranks replace the 4 that were running, and their variables\nranks 0-1 => (False, 2)\n"
    )
    assert notebook("%%ranks\nworld_size").text == "ranks 0-1 => 2\n"
    assert notebook("%ranks").text == "2 ranks on cpu: ready\n"
    assert notebook("%ranks close") == Answer()
    assert notebook("%ranks").text == "no ranks; a %%ranks cell starts 4, or as many as it says\n"
    assert notebook("%%ranks\nworld_size").text == "ranks 0-3 => 4\n"


def test_interrupt(notebook: Notebook, tmp_path: Path) -> None:
    notebook.begin(2)

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        notebook.manager.interrupt_kernel()

    began = time.monotonic()
    answer = notebook(
        "%%ranks\nimport pathlib, time\nprint('waiting')\n"
        f"pathlib.Path({str(tmp_path)!r}, str(rank)).touch()\n"
        "comm.allreduce([1]) if rank else time.sleep(60)",
        interrupt,
    )
    assert time.monotonic() - began < 20
    assert answer.error[2].startswith("KeyboardInterrupt")
    assert answer.text.endswith("[ranks 0-1] waiting\n")
    assert notebook("%%ranks\ncomm.allreduce([1])").text == "ranks 0-1 => [2]\n"


def test_a_bad_line_is_refused_in_one_line(notebook: Notebook) -> None:
    notebook.begin(4)
    name, message, shown = notebook("%%ranks 4 --only 7\n1").error
    assert name == "PlanError"
    assert shown == f"PlanError: {message}" == "PlanError: --only 7: there is no rank '7'; ranks 0 to 3 are there"
    message = notebook("%%ranks --out x\ny = 1").error[1]
    assert message == "--out x: the cell must end with an expression, whose values it then gets"
    assert notebook("%ranks 4").error[2].startswith("PlanError: %ranks 4: possible are %ranks (what is running) and")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0", "n=0: must be a whole number from 1 to 4,096"),
        ("9" * 5000, "must be a whole number from 1 to 4,096"),
        ("-2", "n=-2: must be a whole number"),
        ("2 3", "unknown argument '3'; possible are n, --only 0,2, --in f,x, --out name, --quiet"),
        ("--loud", "unknown argument '--loud'; possible are n, --only 0,2, --in f,x, --out name, --quiet"),
        ("--only", "--only : there is no rank ''; ranks 0 to 3 are there"),
        ("1 --only 1", "--only 1: there is no rank '1'; rank 0 is there"),
        ("--only 1,1", "--only 1,1: each rank can be named once"),
        ("--out", "--out '': must be the name of a variable"),
        ("--out if", "--out 'if': must be the name of a variable"),
        ("--out 'a", "No closing quotation"),
        ("--in a,,b", "--in '': must be the name of a variable"),
        ("--in 'a.b'", "--in 'a.b': must be the name of a variable"),
    ],
)
def test_lines_that_cannot_be(line: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        magic._parse(line, 4)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lines_that_can_be() -> None:
    assert magic._parse("", 3) == magic.Request(3, (0, 1, 2), "", False)
    line = "--out=a --quiet 2 --only 1,0 --in f,x  # comment"
    assert magic._parse(line, 3) == magic.Request(2, (0, 1), "a", True, ("f", "x"))


def test_a_cell_that_prints_very_much_shows_the_first_part(notebook: Notebook) -> None:
    notebook.begin(2)
    answer = notebook("%%ranks\nfor k in range(200): print(f'{k:03}', 'x' * 99_995)")
    assert answer.error == ("", "", "")
    assert 2_000_000 > len(answer.text) > 900_000
    assert "[ranks 0-1] 009 xxx" in answer.text
    assert answer.text.endswith(
        "[rank 0] ... and 19,000,000 characters more\n[rank 1] ... and 19,000,000 characters more\n"
    )


def test_functions_and_variables_get_in(notebook: Notebook) -> None:
    notebook.begin(2)
    notebook("factor = 3\ndef times(x): return factor * x\nopen_file = open('README.md')")
    error = notebook("%%ranks\ntimes(rank)").error
    assert error[0] == "NameError"
    assert error[2].splitlines()[-1] == (
        "times is a variable of the notebook; the ranks have their own: %%ranks --in times"
    )
    assert "variable of the notebook" not in notebook("%%ranks\nnowhere").error[2]
    assert notebook("%%ranks --in times,factor\ntimes(rank), factor").text == "rank 0 => (0, 3)\nrank 1 => (3, 3)\n"
    assert notebook("%%ranks\ntimes(1)").text == "ranks 0-1 => 3\n"  # it stays
    assert notebook("%%ranks --in lost\n1").error[1] == "--in lost: the notebook has no variable 'lost'"
    assert notebook("%%ranks --in open_file\n1").error[1].startswith("--in open_file: a TextIOWrapper cannot be sent")


def test_a_deadlock_of_all_is_reported_soon_and_at_an_interrupt_at_once(notebook: Notebook) -> None:
    notebook.begin(2)
    code = "%%ranks\ncomm.barrier()\nif rank == 0: comm.recv(1)\nelse: comm.recv(0)"
    began = time.monotonic()
    name, _, shown = notebook(code).error
    assert name == "Deadlock"
    assert 3 < time.monotonic() - began < 20  # (the patience of a cluster is 30 s)
    assert "and none of them can go on" in shown
    pattern = (
        r"ranks 0-1 wait for what does not come.*rank 0: recv from rank 1 tag -?\d+, since .*"
        r"if rank == 0: comm\.recv\(1\).*rank 1: recv from rank 0 tag -?\d+, since "
    )
    assert re.search(pattern, shown, re.DOTALL)

    def interrupt() -> None:
        time.sleep(2)
        notebook.manager.interrupt_kernel()

    shown = notebook(code, interrupt).error[2]
    assert shown.startswith("KeyboardInterrupt: the ranks were interrupted\n")
    assert re.search(pattern, shown, re.DOTALL)
