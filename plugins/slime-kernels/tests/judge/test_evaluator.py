"""Candidates through all gates, in real processes: a few of the corpus, and what must be a status and never a crash."""

from __future__ import annotations

import asyncio
import os
import tempfile
from dataclasses import replace

import pytest
from slime_core.errors import RewardError
from slime_kernels.judge.asking import Asking, Ended
from slime_kernels.judge.evaluator import Evaluator, Options
from slime_kernels.judge.judging import KernelJudge, judged
from slime_kernels.sandbox.fork_server import CandidateAnswer
from slime_rm.code.sandbox.running import Limits

from ..kernel_corpus import KERNEL_IMPORTS, RELU, candidates, written

PROBLEM, KERNEL, _ = written()["relu"]


def new_model(body):
    return KERNEL_IMPORTS + RELU + "class ModelNew(nn.Module):\n    def forward(self, x):\n        " + body


def test_a_right_kernel_passes_all_gates(evaluator):
    verdict = evaluator.evaluate(PROBLEM, KERNEL)
    assert (verdict.status, verdict.gate, verdict.compiled, verdict.correct) == (
        "correct",
        "fast",
        True,
        True,
    )
    assert verdict.timing.source == "cost-model"
    assert verdict.kernels[0]["targets"]["sm_90"]["registers"] > 0
    assert verdict.reward == pytest.approx(0.3 + verdict.timing.speedup - 1.0)
    assert evaluator.evaluate(PROBLEM, KERNEL) == verdict


@pytest.mark.parametrize(
    ("source", "status", "gate", "said"),
    [
        ("def f(:", "compile_error", "static", "syntax: line 1"),
        ("import os", "rejected", "static", "imports os"),
        (new_model("return tl.tanh(x)"), "compile_error", "static", "uses triton.language.tanh"),
        (new_model("raise SystemExit(0)"), "runtime_error", "compiles", "ended before it answered"),
        (new_model("launch(x, x.gone)\n"), "runtime_error", "compiles", "AttributeError"),
        (
            new_model("launch(x, torch.empty_like(x))\n        return {1}"),
            "runtime_error",
            "correct",
            "a set",
        ),
        (new_model("launch(x, x)\n        return x"), "incorrect", "correct", "the inputs were changed"),
    ],
)
def test_a_bad_candidate_is_a_status(evaluator, source, status, gate, said):
    verdict = evaluator.evaluate(PROBLEM, source)
    assert (verdict.status, verdict.gate) == (status, gate), verdict.message
    assert said in verdict.message


def test_a_problem_that_fails_by_itself_is_a_failed_reward_and_no_zero(evaluator):
    broken = replace(PROBLEM, code=PROBLEM.code.replace("torch.relu(", "torch.no_such_function("))
    verdict = evaluator.evaluate(broken, KERNEL)
    assert (verdict.status, verdict.gate, verdict.compiled) == ("server_error", "problem", False)
    with pytest.raises(
        RewardError,
        match=r"is not evaluated: the problem's own module fails in facts: ValueError: the module runs in no shape",
    ):
        asyncio.run(judged(KernelJudge(evaluator, concurrency=1), broken, KERNEL))


@pytest.mark.parametrize(("failures", "asked"), [(0, 1), (1, 2), (2, 2)])
def test_a_problems_own_module_is_asked_once_more_where_it_fails(failures, asked):
    """Of a machine that is short of memory or time for a moment, no candidate is to blame."""
    slow, done = (
        CandidateAnswer(ending="time", header=None),
        CandidateAnswer(ending="exit", header={"facts": 1}),
    )
    answers = [slow] * failures + [done]
    jobs = []

    class Server:
        def call(self, kind, job, header, buffers, *, limits, gpu):
            jobs.append(job)
            return answers.pop(0)

    asking = Asking(Server(), Limits())
    if failures == 2:
        with pytest.raises(Ended, match="fails in facts: ended by time"):
            asking.trusted("facts", {})
    else:
        assert asking.trusted("facts", {}) is done
    assert jobs == ["facts"] * asked


class Answering:
    """A server whose jobs answer what they are told to: a candidate that launches one kernel twice, in two specialisations."""

    def __init__(self, spilled_bytes):
        about = {"registers": 32, "shared_bytes": 0}
        kernels = [
            {"name": "k", "warps": 4, "targets": {"sm_90": about | {"spilled_bytes": spilled}}}
            for spilled in spilled_bytes
        ]
        empty, nothing = {"list": []}, {"value": None}
        seen = {"delegated": [], "answer": nothing, "mutated": False, "outputs": []}
        launch = {
            "name": "k",
            "programs": 4096,
            "run": 4,
            "flops": 0,
            "products": 0,
            "loaded": 0,
            "stored": 0,
        }
        whole = {"delegated": [], "launches": [launch | {"touched": []}] * 2}
        self.answers = {
            "facts": {"shapes": [{}], "scalable": False, "inputs": empty, "given": empty}
            | {"eager": [], "least_bytes": 1},
            "compile": {"kernels": kernels, "launches": [{"kernel": 0}, {"kernel": 1}]},
            "inputs": {"trials": [{"inputs": empty, "given": empty}] * 2},
            "interpret": {"trials": [seen] * 2},
            "answer": {"answers": [nothing] * 2},
            "sample": {"trials": [whole]},
        }

    def call(self, kind, job, header, buffers, *, limits, gpu=None, **_):
        job = "sample" if "sampled_programs" in header else job
        return CandidateAnswer(ending="exit", header=self.answers[job])


def test_each_launch_costs_what_its_own_specialisation_does(evaluator):
    settings = replace(evaluator.settings, options=Options(n_trials=2))
    verdict = Evaluator(settings, Answering([4096, 0])).evaluate(PROBLEM, KERNEL)
    # a launch takes 2.5 us; what 4096 programs of 128 threads spill is written and read through a cache of 8 TB/s
    spilled_us = 2 * 4096 * 128 * 4096 / 8e6
    assert [part["us"] for part in verdict.timing.parts["launches"]] == pytest.approx([2.5 + spilled_us, 2.5])
    assert [one["targets"]["sm_90"]["spilled_bytes"] for one in verdict.kernels] == [4096, 0]


LARGE = replace(
    PROBLEM,
    code=PROBLEM.code.replace("rows = 512", "rows = 32768").replace("columns = 1000", "columns = 12288"),
)


def test_a_problem_larger_than_the_memory_of_a_process_is_compiled_and_estimated_nevertheless(evaluator):
    """Inputs and answer of 1.5 GiB each, of which nothing is used but what some programs of a launch touch."""
    small = replace(evaluator.settings, memory_bytes=1 << 30, options=Options(n_trials=2))
    verdict = Evaluator(small, evaluator._asking._server).evaluate(LARGE, KERNEL)
    assert (verdict.status, verdict.gate, verdict.message) == ("correct", "fast", "")
    # 3 GiB at 3.35 TB/s, and the launch
    assert verdict.timing.runtime_us == pytest.approx(2.5 + 3 * 2**30 / 3.35e6, rel=0.01)


def test_a_problem_that_this_machine_has_no_memory_for_is_no_fault_of_a_candidate(evaluator):
    answering = Answering([0, 0])
    answering.answers["compile"] = {"error": {"kind": "InputsError", "text": "no memory for the inputs"}}
    verdict = Evaluator(evaluator.settings, answering).evaluate(PROBLEM, KERNEL)
    assert (verdict.status, verdict.gate, verdict.compiled) == ("server_error", "problem", False)
    assert verdict.message == "no memory for the inputs"


def test_an_unknown_backend_is_a_status(evaluator):
    verdict = evaluator.evaluate(PROBLEM, KERNEL, backend="cuda")
    assert (verdict.status, verdict.reward) == ("rejected", 0.0)
    assert "backend 'cuda'" in verdict.message


@pytest.mark.parametrize("name", ["cache_on_self", "torch_with_decoy_kernel", "torch_at_full_size"])
def test_a_cheat_that_only_running_shows_is_caught(evaluator, name):
    problem, source = candidates("cheats")[name]
    assert not evaluator.evaluate(problem, source).correct


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("method_put_back_while_the_answer_is_read", "changed Tensor.detach"),
        ("method_of_the_answer_itself", "changed detach of a tensor"),
        (
            "exec_by_the_builtins_of_a_module_of_triton",
            "changed slime_kernels.sandbox.watch.Watch.outputs",
        ),
    ],
)
def test_what_would_answer_in_the_place_of_torch_is_seen_before_it_is_asked(
    evaluator, fork_server, name, said
):
    alone = Evaluator(evaluator.settings, fork_server, static_gate=lambda tree: ())
    verdict = alone.evaluate(*candidates("cheats")[name])
    assert (verdict.status, verdict.gate) == ("rejected", "honest"), verdict.message
    assert verdict.message == said


def test_a_race_is_seen(evaluator):
    problem, _, wrong = written()["mse_loss"]
    verdict = evaluator.evaluate(problem, wrong[1]["source"])
    assert verdict.status == "incorrect"
    assert "nothing orders them" in verdict.message


@pytest.mark.slow
@pytest.mark.faults
def test_every_cheat_of_the_corpus_is_caught(evaluator):
    found = {name: evaluator.evaluate(*one) for name, one in candidates("cheats").items()}
    assert len(found) >= 40
    assert [name for name, verdict in found.items() if verdict.correct] == []


@pytest.mark.slow
@pytest.mark.faults
def test_no_honest_lookalike_is_refused(evaluator):
    found = {name: evaluator.evaluate(*one) for name, one in candidates("honest").items()}
    assert len(found) >= 40
    assert {name: one.message for name, one in found.items() if not one.correct} == {}


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("name", written())
def test_a_written_problem_passes_right_and_fails_wrong_at_the_right_gate(evaluator, name):
    problem, kernel, wrong = written()[name]
    right = evaluator.evaluate(problem, kernel)
    assert right.status == "correct", right.message
    assert right.timing is not None
    for one in wrong:
        verdict = evaluator.evaluate(problem, one["source"])
        assert verdict.status == one["status"], (one["what"], verdict.message)


BAD = {
    "hangs": "while True: pass",
    "crashes": "launch(x, x[:1])\n        return x.view(-1)[: 10**9]",
    "floods": "while True: print('x' * 10000)",
    "eats": "y = [x]\n        while True: y.append(torch.zeros(10**7) + 1)",
    "fails": "raise ValueError('no')",
}


@pytest.mark.slow
@pytest.mark.faults
def test_a_flood_of_bad_candidates_leaves_nothing_behind(evaluator, fork_server, monkeypatch, tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    n = int(os.environ.get("SLIME_KERNELS_EVALUATIONS", "20"))
    quick = Evaluator(replace(evaluator.settings, timeout_s=8.0, memory_bytes=1 << 30), fork_server)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sources = [[*BAD.values(), None][i % (len(BAD) + 1)] for i in range(n)]
    with ThreadPoolExecutor(2) as pool:
        verdicts = list(
            pool.map(lambda one: quick.evaluate(PROBLEM, KERNEL if one is None else new_model(one)), sources)
        )
    for source, verdict in zip(sources, verdicts, strict=True):
        assert verdict.correct == (source is None), (source, verdict)
        assert verdict.status != "server_error"
    assert list(tmp_path.iterdir()) == []
