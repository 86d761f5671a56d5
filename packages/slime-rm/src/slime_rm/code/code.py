"""The reward `code`: whether a response's Python program passes every test in the sandbox."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.errors import SampleError
from slime_core.rewards.results import Grade
from slime_core.samples import Sample

from slime_rm.code.fences import python_block
from slime_rm.code.outputs import same_text, same_value
from slime_rm.code.sandbox.running import Limits, Ran, run
from slime_rm.text.labels import label_of

_SHOWN = 300
#: Calls the function with the arguments that standard input holds, and prints what it returns as JSON.
_CALL = """\
import json, os, sys
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
with open("/box/solution.py") as file:
    source = file.read()
name, arguments = json.load(sys.stdin)
names = {"__name__": "solution"}
exec(compile(source, "solution.py", "exec"), names)
function = names[name] if name in names else getattr(names["Solution"](), name)
json.dump(function(*arguments), answer)
answer.close()
"""


@dataclass(frozen=True)
class _Test:
    given: Any
    """Standard input, or the arguments of the function."""
    wanted: Any
    """Standard output, or what the function returns."""
    is_wrapped: bool = False
    """Whether all outputs of the row are lists of one value: of APPS and TACO what the function returns is the value, or the list."""


def code(
    sample: Sample,
    *,
    wall_s: float = 5.0,
    total_s: float = 20.0,
    memory_mb: int = 512,
    processes: int = 8,
    max_tests: int | None = None,
) -> Grade:
    """Score 1.0 when the last fenced block of Python in the response (`fences.python_block`) passes every test, else 0.0.

    The label is JSON: `{"inputs": [...], "outputs": [...]}`, texts for standard input and output, which are compared
    line by line but for blanks at their ends; with `"fn_name"`, lists of arguments and what the function (or the
    method of a class `Solution`) returns, as JSON values. Decimals are compared to a tolerance, whole numbers exactly
    (`outputs.is_close`). The part `share` is the share of tests that are passed.

    Each test runs in a sandbox of its own (`sandbox.running`): no file of the machine, no network, no other process,
    limits on everything. The wanted outputs never enter it. Tests that have not begun within `total_s` are failed: a program
    that never ends must not take the time that a reward has (`--reward-timeout-s`), which would stop the run.

    Args:
        sample: scored.
        wall_s: time of one test, seconds.
        total_s: time in which all tests of a sample begin, seconds; with `wall_s` less than `--reward-timeout-s`.
        memory_mb: memory of all processes of one test together.
        processes: processes and threads at once.
        max_tests: run the first of the tests only.

    Raises:
        SampleError: the label is not a set of tests.
        SandboxError: this machine cannot isolate a program; nothing was run.
    """
    name, tests = _tests(sample)
    program = python_block(sample.response)
    if program is None:
        return Grade(
            score=0.0, parts={"share": 0.0}, details={"why": "no fenced block of Python after the thought"}
        )
    limits = Limits(wall_s=wall_s, cpu_s=int(wall_s) + 1, memory_bytes=memory_mb << 20, processes=processes)
    begin, count, failures = time.monotonic(), len(tests[:max_tests]), []
    for number, test in enumerate(tests[:max_tests]):
        if time.monotonic() - begin > total_s:
            late = f"not run: the tests before took the {total_s:g} s of all (total_s, max_tests)"
            failures += [f"test {each}: {late}" for each in range(number, count)]
            break
        if (why := _failure(program, name, test, limits)) is not None:
            failures.append(f"test {number}: {why}")
    return Grade(
        score=float(not failures),
        parts={"share": 1 - len(failures) / count},
        details={"passed": count - len(failures), "tests": count, "failures": failures[:5]},
    )


def _tests(sample: Sample) -> tuple[str | None, Sequence[_Test]]:
    label = label_of(sample)
    try:
        tests = json.loads(label)
        inputs, outputs, name = tests["inputs"], tests["outputs"], tests.get("fn_name")
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            raise ValueError("inputs and outputs that are not both lists")
        if not inputs or len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
        if name is not None and not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"fn_name {str(name)[:30]}")
        kind = str if name is None else list
        if not all(isinstance(given, kind) for given in inputs):
            raise ValueError(f"inputs that are not {'texts' if name is None else 'lists of arguments'}")
        if name is None and not all(
            isinstance(wanted, str | int | float) and not isinstance(wanted, bool) for wanted in outputs
        ):
            raise ValueError("outputs that are not texts")
        "".join(inputs if name is None else ()).encode()  # a lone surrogate is no input of a program
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        why = f"without the key {error}" if isinstance(error, KeyError) else error
        raise SampleError(
            f"{sample.name}: label is {label[:100]!r} ({why}); wanted tests as JSON: "
            '{"inputs": [...], "outputs": [...]}, and "fn_name" to call a function'
        ) from error
    wrapped = name is not None and all(isinstance(wanted, list) and len(wanted) == 1 for wanted in outputs)
    return name, [_Test(given, wanted, wrapped) for given, wanted in zip(inputs, outputs, strict=True)]


def _failure(source: str, name: str | None, test: _Test, limits: Limits) -> str | None:
    """Run one test; returns what went wrong."""
    if name is None:
        ran = run({"solution.py": source}, "solution.py", stdin=test.given, limits=limits)
        right = same_text(ran.stdout, str(test.wanted))
    else:
        files = {"solution.py": source, "call.py": _CALL}
        ran = run(files, "call.py", stdin=json.dumps([name, test.given]), limits=limits)
        wanted = [test.wanted, *(test.wanted if test.is_wrapped else ())]
        right = any(same_value(value, one) for value in _returned(ran.stdout) for one in wanted)
    if (ran.ending, ran.code) == ("exit", 0):
        return None if right else f"wrong answer {ran.stdout[:_SHOWN]!r}"
    return _end(ran)


def _end(ran: Ran) -> str:
    why = {
        "exit": f"exit status {ran.code}",
        "signal": f"killed by signal {ran.code}",
        "time": "out of time",
        "output": "too much output",
        "memory": "out of memory",
    }[ran.ending]
    return f"{why} {ran.stderr.strip()[-_SHOWN:]}".strip()


def _returned(text: str) -> list[Any]:
    """Return the value that the call printed, in a list; empty when it printed none, or one without end."""
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError):
        return []
