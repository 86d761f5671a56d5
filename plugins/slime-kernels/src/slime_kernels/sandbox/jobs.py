"""The jobs of a process of an evaluation: reading one, doing it, answering. Imported by the zygote, before it forks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from slime_kernels.sandbox import candidate_jobs, device_jobs, problem_jobs
from slime_kernels.sandbox.messages import pack, unpack

Job = Callable[[dict[str, Any], Sequence[bytes]], tuple[dict[str, Any], list[bytes]]]
JOBS: dict[str, Job] = {
    "facts": problem_jobs.facts,
    "inputs": problem_jobs.make_inputs,
    "answer": problem_jobs.answer,
    "compile": candidate_jobs.compile_for_targets,
    "interpret": candidate_jobs.interpret,
    "launch": device_jobs.launch,
    "time": device_jobs.time_candidate,
    "time-problem": device_jobs.time_problem,
    "answer-at-full-size": device_jobs.answer_at_full_size,
}
_ERROR_CHARACTERS = 2000


_PROBLEM = """\
import torch
n = 16
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x, dim=1) + torch.nn.functional.layer_norm(x, (n,))
def get_inputs():
    return [torch.randn(n, n)]
def get_init_inputs():
    return []
"""


def warm() -> None:
    """Do once what imports and prepares on its first use, so that no fork has to."""
    problem_jobs.facts({"code": _PROBLEM, "shapes": []}, [])
    trial = {"constants": {}, "dtype": "float32", "seed": 0, "weights": 0, "scale": 1.0}
    problem_jobs.make_inputs({"code": _PROBLEM, "trials": [trial]}, [])
    candidate_jobs.prepare()


def work(answer: int) -> None:
    """Do the job that standard input gives, and answer it on a descriptor; an error is an answer, too."""
    header, buffers = unpack(sys.stdin.buffer.read())
    nonce, job = header.pop("nonce"), header.pop("job")
    try:
        said, out = JOBS[job](header, buffers)
    except Exception as error:  # a candidate's, or a problem's: anything at all
        said, out = {"error": describe(error)}, []
    message = memoryview(pack({"nonce": nonce, **said}, out))
    while message:
        message = message[os.write(answer, message) :]


def describe(error: BaseException) -> dict[str, str]:
    """Return the kind and the text of an error, whatever its own methods do."""
    try:
        text = str(error)
    except Exception:
        text = "an error without a text"
    return {"kind": type(error).__name__, "text": text[-_ERROR_CHARACTERS:]}
