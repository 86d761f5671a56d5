"""The path of a GPU with this machine's CPU in its place: the same jobs, sandbox, measuring, baselines and rewards, with real work."""

from __future__ import annotations

import fcntl
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from slime_kernels.judge.asking import Ended
from slime_kernels.judge.device_trials import OnGpu
from slime_kernels.judge.evaluator import Evaluator, Options
from slime_kernels.judge.verdict import EvalStatus
from slime_kernels.problems.problem import KernelProblem
from slime_kernels.sandbox.fork_server import CandidateAnswer
from slime_kernels.timing.gpus import Devices, KernelDevice
from slime_kernels.timing.measure import TimingPlan

from ..kernel_corpus import FAILS_WHERE_INPUTS_COME_AGAIN, IMPORTS, KERNEL_IMPORTS, RELU, candidates, written

CPU = KernelDevice(name="a CPU", bytes_per_us=1e6, cache_bytes=1 << 20, kind="cpu")
#: The module waits longer for what one program of the kernel does than that takes on any machine, however busy.
PROBLEM = KernelProblem(
    level=1,
    problem_id=0,
    name="slow_relu",
    code=IMPORTS
    + """
import time
n = 240
class Model(nn.Module):
    def forward(self, x):
        time.sleep(0.05)
        return torch.relu(x)
def get_inputs():
    return [torch.randn(n)]
def get_init_inputs():
    return []
""",
    shapes=({"n": 100},),
)


def new_model(*lines):
    body = "".join(f"        {line}\n" for line in lines)
    return KERNEL_IMPORTS + RELU + "class ModelNew(nn.Module):\n    def forward(self, x):\n" + body


KERNEL = new_model("y = torch.empty_like(x)", "launch(x, y)", "return y")


@pytest.fixture(scope="module")
def measuring(evaluator, tmp_path_factory):
    """Return a function: (device, changed settings) -> an evaluator on it; baselines are measured once."""
    settings = replace(
        evaluator.settings,
        options=Options(n_trials=2),
        plan=TimingPlan(warm_up=1, n=20, most_noise=10.0),
        compiles=False,
        baseline_dir=tmp_path_factory.mktemp("baselines"),
    )

    def on(gpu=CPU, **changes):
        return Evaluator(replace(settings, **changes), evaluator._asking._server, devices=Devices([gpu]))

    return on


def test_a_right_kernel_is_launched_timed_and_rewarded_by_its_measured_speedup(measuring):
    verdict = measuring().evaluate(PROBLEM, KERNEL)
    assert (verdict.status, verdict.gate, verdict.message) == ("correct", "fast", "")
    timing = verdict.timing
    assert (timing.source, timing.target) == ("cpu-clock", "a CPU")
    assert timing.speedup == timing.baseline_us / timing.runtime_us > 1
    assert verdict.reward == pytest.approx(0.3 + min(timing.speedup - 1.0, 2.0))
    folder = measuring().settings.baseline_dir
    (kept,) = folder.rglob("*.json")
    before = kept.stat().st_mtime_ns
    again = measuring().evaluate(PROBLEM, KERNEL).timing
    assert again.baseline_us == timing.baseline_us  # read, and not measured again
    assert kept.stat().st_mtime_ns == before


def test_no_speedup_is_more_than_the_memory_allows(measuring):
    # 2 x 240 numbers of 4 bytes at a byte in 10 ms: longer than any machine takes, however busy
    verdict = measuring(replace(CPU, bytes_per_us=1e-4)).evaluate(PROBLEM, KERNEL)
    assert verdict.timing.parts["least_us"] == pytest.approx(19_200_000)
    assert verdict.timing.speedup == pytest.approx(verdict.timing.baseline_us / 19_200_000)
    assert verdict.timing.parts["implausible"]


def test_what_is_too_noisy_is_correct_and_no_faster(measuring):
    noisy = TimingPlan(warm_up=1, n=10, tries=1, most_noise=0.0)
    verdict = measuring(plan=noisy).evaluate(PROBLEM, KERNEL)
    assert (verdict.status, verdict.reward, verdict.speedup) == ("correct", 0.3, 0.0)
    assert verdict.message.startswith("time not trusted: noise of ")
    assert verdict.timing.runtime_us > 0


@pytest.mark.parametrize(
    "lines",
    [
        # at full size no more than one number is computed
        ("y = torch.empty_like(x)", "launch(x[:1] if x.numel() > 200 else x, y)", "return y"),
        # at full size the first answer is kept
        pytest.param(
            (
                "if x.numel() > 200 and hasattr(self, 'kept'):",
                "    return self.kept",
                "self.kept = torch.empty_like(x)",
                "launch(x, self.kept)",
                "return self.kept",
            ),
            marks=pytest.mark.faults,
        ),
        # at full size the inputs are changed
        pytest.param(
            ("y = torch.empty_like(x)", "launch(x, y)", "if x.numel() > 200: launch(x, x)", "return y"),
            marks=pytest.mark.faults,
        ),
        # at full size PyTorch computes, from the start or later
        pytest.param(
            ("y = torch.empty_like(x)", "launch(x, y)", "return x.relu() if x.numel() > 200 else y"),
            marks=pytest.mark.faults,
        ),
        pytest.param(
            (
                "self.n = (self.n if hasattr(self, 'n') else 0) + (x.numel() > 200)",
                "y = torch.empty_like(x)",
                "launch(x, y)",
                "return x.relu() if self.n > 5 else y",
            ),
            marks=pytest.mark.faults,
        ),
    ],
)
def test_what_does_less_where_it_is_timed_is_caught(measuring, lines):
    verdict = measuring().evaluate(PROBLEM, new_model(*lines))
    assert (verdict.status, verdict.gate, verdict.reward) == ("rejected", "honest", 0.0)
    assert "does other things at full size" in verdict.message


def test_no_two_calls_at_full_size_have_the_same_inputs(measuring):
    verdict = measuring().evaluate(PROBLEM, FAILS_WHERE_INPUTS_COME_AGAIN)
    assert (verdict.status, verdict.message) == ("correct", "")
    assert verdict.timing.parts["samples"] == 20


@pytest.mark.parametrize(
    ("lines", "status", "said"),
    [
        (("y = torch.empty_like(x)", "launch(x[1:], y)", "return y"), "incorrect", "numbers are not those"),
        (("y = torch.empty_like(x)", "launch(x, y)", "launch(x, x)", "return y"), "incorrect", "inputs were"),
        (("y = torch.empty_like(x)", "launch(x, y)", "return torch.relu(y)"), "rejected", "relu"),
    ],
)
def test_what_is_wrong_is_caught_where_it_is_launched(measuring, lines, status, said):
    evaluator = measuring()
    evaluator._static_gate = lambda tree: ()
    verdict = evaluator.evaluate(PROBLEM, new_model(*lines))
    assert verdict.status == status, verdict.message
    assert said in verdict.message


def test_what_answers_in_the_place_of_torch_where_it_is_timed_is_seen_before_it_is_asked(measuring):
    evaluator = measuring()
    evaluator._static_gate = lambda tree: ()
    _, source = candidates("cheats")["method_put_back_while_the_answer_is_read"]
    late = source.replace(
        "        put(torch.Tensor, told)", "        if x.numel() > 200: put(torch.Tensor, told)"
    )
    verdict = evaluator.evaluate(PROBLEM, late.replace("launch(-x, y)", "launch(x, y)"))
    assert (verdict.status, verdict.gate, verdict.reward) == ("rejected", "honest", 0.0)
    assert verdict.message == "changed Tensor.detach"


@pytest.mark.parametrize(
    "lines",
    [
        ("launch(x, y[8:])", "launch(x, y)"),  # behind what it made
        pytest.param(("launch(x, x[92:])",), marks=pytest.mark.faults),  # behind what it was given
        pytest.param(("launch(x, self.held[8:])", "launch(x, y)"), marks=pytest.mark.faults),  # what it holds
        pytest.param(
            ("self.made = x[:4].clone()", "launch(x, self.made)", "launch(x, y)"), marks=pytest.mark.faults
        ),
    ],
)
def test_what_writes_outside_its_tensors_is_told_so(measuring, lines):
    source = new_model("y = torch.empty_like(x)", "launch(x, y)", *lines, "return y")
    held = "    def __init__(self):\n        super().__init__()\n        self.held = torch.zeros(100)\n"
    source = source.replace("    def forward", held + "    def forward")
    verdict = measuring().evaluate(PROBLEM, source)
    assert (verdict.status, verdict.gate) == ("incorrect", "correct"), verdict.message
    assert "wrote outside its tensors" in verdict.message


@pytest.mark.faults
def test_what_writes_outside_its_tensors_at_full_size_is_told_so(measuring):
    lines = ("y = torch.empty_like(x)", "if x.numel() > 200: launch(x, y[8:])", "launch(x, y)", "return y")
    verdict = measuring().evaluate(PROBLEM, new_model(*lines))
    assert (verdict.status, verdict.reward) == ("rejected", 0.0)
    assert "at full size than in the trials: wrote outside its tensors" in verdict.message


@pytest.mark.parametrize(
    ("name", "what", "said"),
    [
        ("relu", "no mask at all", "wrote outside its tensors"),
        ("matmul", "the last block of the sum is not masked", "nan; wanted"),
    ],
)
def test_a_missing_mask_is_caught_where_nothing_checks_addresses(measuring, name, what, said):
    problem, kernel, wrong = written()[name]
    quick = Options(n_trials=3, measure=False)
    assert measuring().evaluate(problem, kernel, options=quick).correct
    (source,) = (one["source"] for one in wrong if one["what"] == what)
    verdict = measuring().evaluate(problem, source, options=quick)
    assert verdict.status == "incorrect"
    assert said in verdict.message


@pytest.mark.parametrize(
    "name",
    [
        "cache_on_self",
        *(
            pytest.param(name, marks=pytest.mark.faults)
            for name in ("torch_with_decoy_kernel", "torch_at_full_size")
        ),
    ],
)
def test_a_cheat_that_only_running_shows_is_caught(measuring, name):
    verdict = measuring().evaluate(*candidates("cheats")[name])
    assert (verdict.status, verdict.correct) in [("rejected", False), ("incorrect", False)], verdict.message


def test_a_speedup_by_hand(measuring):
    on = measuring(replace(CPU, bytes_per_us=4.0), plan=TimingPlan())._device_trials.take()
    found = {"median_us": 20.0, "noise": 0.01, "n": 100, "tries": 1}
    record = {"eager": {"median_us": 100.0, "noise": 0.02}, "compile": {"error": "no"}}
    assert on.timing(found, record, 40).speedup == 5.0  # at least 10 us, which is no bound
    assert on.timing(found, record, 100).speedup == 4.0  # at least 25 us
    assert on.timing(found, record, 40).noise == 0.02
    assert (
        "noise of 6.0% after 1 tries; wanted at most 5.0%"
        in on.timing({**found, "noise": 0.06}, record, 40).doubt
    )
    with pytest.raises(Ended, match="a time of 0"):
        on.timing({**found, "median_us": 0.0}, record, 40)
    compiled = measuring(
        replace(CPU, bytes_per_us=4.0), plan=TimingPlan(), baseline="compile"
    )._device_trials.take()
    with pytest.raises(Ended, match=r"torch\.compile fails: no"):
        compiled.timing(found, record, 40)
    record["compile"] = {"median_us": 60.0, "noise": 0.02}
    assert compiled.timing(found, record, 40).speedup == 3.0


class Looking:
    """Answers jobs and questions for times of a module, and notes who has the device meanwhile."""

    def __init__(self, gpu):
        self.use = Path(
            tempfile.gettempdir(), f"slime-gpu-locks-{os.getuid()}", f"{gpu.name}-{gpu.visible}.use"
        )
        self.seen = []

    def note(self, what):
        with self.use.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                self.seen.append((what, "taken"))
            else:
                self.seen.append((what, "free"))

    def get(self, gpu, code, make):
        self.note("times of the module")
        return make()

    def trusted(self, job, header, *, gpu, limits):
        self.note(job)
        return CandidateAnswer(ending="exit", header={"measured": {"median_us": 100.0, "noise": 0.02}})

    def untrusted(self, kind, job, header, buffers, gate, *, gpu):
        self.note(job)
        return {"error": {"kind": "ValueError", "text": "no"}}, []


def test_times_of_a_module_are_waited_for_without_a_device_and_measured_alone_on_it(measuring):
    """Where several devices have one name, another one may be measuring them, for minutes."""
    gpu = replace(CPU, name=f"looked-at-{os.getpid()}", visible="0")
    with gpu.used(alone=False):
        looking = Looking(gpu)
    trials = measuring(gpu)._device_trials
    trials.asking = trials.baselines = looking
    with pytest.raises(Ended, match="not timed: ValueError: no"):
        OnGpu(trials, gpu).time(PROBLEM, KERNEL, {"least_bytes": 1})
    assert looking.seen == [("times of the module", "free"), ("time-problem", "taken"), ("time", "taken")]


class NoCompiler:
    """Answers how long the module takes, and ends where torch.compile is asked for."""

    def trusted(self, job, header, *, gpu, limits):
        if header["compile"]:
            raise Ended(EvalStatus.SERVER_ERROR, "problem", "no compiler")
        return CandidateAnswer(ending="exit", header={"measured": {"median_us": 100.0, "noise": 0.02}})


def test_where_torch_compile_ends_its_process_the_module_is_timed_nevertheless(measuring):
    trials = measuring(replace(CPU, bytes_per_us=4.0), plan=TimingPlan(), compiles=True)._device_trials
    trials.asking = NoCompiler()
    on = OnGpu(trials, trials._devices.take())
    record = on._baseline(PROBLEM)
    timing = on.timing({"median_us": 20.0, "noise": 0.01, "n": 100, "tries": 1}, record, 40)
    assert (timing.speedup, timing.parts["compile_us"]) == (5.0, None)
    assert timing.parts["compile_error"] == "no compiler"


@pytest.mark.slow
@pytest.mark.faults
def test_torch_compile_is_timed_in_the_sandbox(measuring):
    prompt = replace(PROBLEM, code=PROBLEM.code.replace("time.sleep(0.05)", ""))
    timing = measuring(baseline="compile").evaluate(prompt, KERNEL).timing
    assert timing.parts["over"] == "compile"
    assert timing.baseline_us == timing.parts["compile_us"] > 0
