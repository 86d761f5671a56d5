"""`Evaluator`: one candidate through all gates, each in a fresh process."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime_rm.code.sandbox.running import Limits

from slime_kernels.gates.findings import Finding
from slime_kernels.gates.portable import portable
from slime_kernels.gates.static import check, parse
from slime_kernels.judge.asking import Asking, Ended
from slime_kernels.judge.compare import difference
from slime_kernels.judge.cost_model import SOURCE, candidate_us, eager_us, kernels_of, least_us
from slime_kernels.judge.device_trials import Baseline, DeviceTrials, OnGpu
from slime_kernels.judge.reward import RewardScale
from slime_kernels.judge.trials import batches, trials_of, whole_trial
from slime_kernels.judge.verdict import EvalStatus, Timing, Verdict
from slime_kernels.problems.problem import KernelProblem
from slime_kernels.sandbox.fork_server import CandidateServer
from slime_kernels.timing.baselines import Baselines
from slime_kernels.timing.gpus import Devices
from slime_kernels.timing.measure import TimingPlan

BACKENDS = ("triton",)
_SAMPLED_PROGRAMS = 4
_MOST_FINDINGS = 3
_MOST_FACTS = 4096


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one evaluation may have otherwise than others of its evaluator."""

    n_trials: int = 5
    seed: int = 42
    measure: bool = True
    """Tell the time of what is correct."""


@dataclass(frozen=True, kw_only=True)
class EvaluatorSettings:
    """How candidates are tried."""

    targets: Sequence[str] = ("sm_90",)
    """Architectures to compile for; the first is the one whose time is estimated, where there is no GPU."""
    options: Options = field(default_factory=Options)
    """Of evaluations that bring none."""
    timeout_s: float = 60.0
    """Of each process."""
    memory_bytes: int = 4 << 30
    scale: RewardScale = field(default_factory=RewardScale)
    plan: TimingPlan = field(default_factory=TimingPlan)
    """How calls are timed, where there is a GPU."""
    baseline: Baseline = "eager"
    """The time in PyTorch that a speedup is over, where there is a GPU."""
    compiles: bool = True
    """Time torch.compile as well, once a problem."""
    baseline_dir: Path | None = None
    """Folder of such times; in memory where None."""
    memory_share: float = 1.0
    """Part of a GPU's memory that a process may use."""

    @property
    def limits(self) -> Limits:
        """What each process may use."""
        return Limits(
            wall_s=self.timeout_s,
            cpu_s=int(self.timeout_s) + 1,
            memory_bytes=self.memory_bytes,
            processes=64,
            output_bytes=256 << 20,
            disk_bytes=64 << 20,
            open_files=256,
        )


class Evaluator:
    """Judges candidates. Threads may use one side by side.

    Args:
        settings: how.
        server: makes the processes.
        devices: on which candidates are launched and timed; they are interpreted and estimated where None.
        static_gate: what it has against a candidate's syntax tree. Another one than `check` shows what the sandbox holds by itself.
    """

    def __init__(
        self,
        settings: EvaluatorSettings,
        server: CandidateServer,
        *,
        devices: Devices | None = None,
        static_gate: Callable[[ast.Module], Sequence[Finding]] = check,
    ) -> None:
        self.settings, self._static_gate = settings, static_gate
        self._asking = Asking(server, settings.limits)
        self._device_trials = None
        if devices is not None:
            self._device_trials = DeviceTrials(
                self._asking,
                settings.limits,
                devices,
                plan=settings.plan,
                baselines=Baselines(settings.baseline_dir),
                baseline=settings.baseline,
                compiles=settings.compiles,
                memory_share=settings.memory_share,
            )
        self._facts: dict[str, dict[str, Any]] = {}

    def evaluate(
        self, problem: KernelProblem, source: str, *, backend: str = "triton", options: Options | None = None
    ) -> Verdict:
        """Return what becomes of a candidate; blocks until it is known.

        Nothing that a candidate does raises here.

        Raises:
            SandboxError: this machine cannot isolate a process; nothing was run.
        """
        options = options or self.settings.options
        reached = {"compiled": False, "correct": False}
        kernels: list[dict[str, Any]] = []
        timing = None
        try:
            tree = self._static(source, backend)
            facts = self._facts_of(problem)
            own = ast.unparse(tree)  # before devices in it are the CPU
            code = portable(tree)
            on = None if self._device_trials is None else self._device_trials.take()
            launched = self._compile(code, facts)
            kernels += {id(kernel): kernel for kernel in launched}.values()
            reached["compiled"] = True
            self._correct(problem, source, code if on is None else own, facts, options, on)
            reached["correct"] = True
            ended = Ended(EvalStatus.CORRECT, "correct", "")
            if options.measure:
                timing = self._estimate(code, facts, launched) if on is None else on.time(problem, own, facts)
                ended = Ended(
                    EvalStatus.CORRECT, "fast", timing.doubt and f"time not trusted: {timing.doubt}"
                )
        except Ended as error:
            ended = error
            if ended.status in (EvalStatus.REJECTED, EvalStatus.SERVER_ERROR):
                reached = {"compiled": False, "correct": False}
        verdict = Verdict(
            status=EvalStatus.CORRECT if reached["correct"] else ended.status,
            gate=ended.gate,
            message=ended.message,
            timing=timing,
            kernels=kernels,
            **reached,
        )
        return _with_reward(verdict, self.settings.scale)

    def _static(self, source: str, backend: str) -> ast.Module:
        if backend not in BACKENDS:
            wanted = f"backend {backend[:40]!r}; wanted {', '.join(BACKENDS)}"
            raise Ended(EvalStatus.REJECTED, "static", wanted)
        tree = parse(source)
        if isinstance(tree, Finding):
            raise Ended(EvalStatus.COMPILE_ERROR, "static", str(tree))
        if findings := self._static_gate(tree):
            told = "; ".join(map(str, findings[:_MOST_FINDINGS]))
            is_mistake = {one.rule for one in findings} == {"name"}  # which the compiler would tell, too
            status = EvalStatus.COMPILE_ERROR if is_mistake else EvalStatus.REJECTED
            raise Ended(status, "static", told)
        return tree

    def _facts_of(self, problem: KernelProblem) -> dict[str, Any]:
        found = self._facts.get(problem.code)
        if found is None:
            header = {"code": problem.code, "shapes": [dict(shape) for shape in problem.shapes]}
            found = self._asking.trusted("facts", header).header
            assert found is not None
            if len(self._facts) >= _MOST_FACTS:
                self._facts.clear()
            self._facts[problem.code] = found
        return found

    def _compile(self, code: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the compiled kernel of each launch, in order."""
        header = {"code": code, "targets": list(self.settings.targets), "trial": whole_trial(facts)}
        said, _ = self._asking.untrusted("compile", "compile", header, (), "compiles", reserves=True)
        if "error" in said:
            kind, text = said["error"]["kind"], said["error"]["text"]
            status = EvalStatus.COMPILE_ERROR if kind in _COMPILER_ERRORS else EvalStatus.RUNTIME_ERROR
            raise Ended(status, "compiles", f"{kind}: {text}")
        if not said["launches"]:
            raise Ended(EvalStatus.REJECTED, "honest", "launches no kernel")
        return [said["kernels"][launch["kernel"]] for launch in said["launches"]]

    def _correct(
        self,
        problem: KernelProblem,
        source: str,
        code: str,
        facts: dict[str, Any],
        options: Options,
        on: OnGpu | None,
    ) -> None:
        trials = trials_of(problem, source, facts, n_trials=options.n_trials, seed=options.seed)
        made = self._asking.trusted("inputs", {"code": problem.code, "trials": trials})
        assert made.header is not None
        trials = batches(made.header["trials"], trials)
        header = {"code": code, "trials": trials}
        if on is None:
            said, found = self._asking.untrusted("interpret", "interpret", header, made.buffers, "correct")
        else:
            said, found = on.launch(header, made.buffers)
        if "error" in said:
            raise _failure(said["error"])
        for trial in said["trials"]:
            if trial["delegated"]:
                told = f"has PyTorch compute: {', '.join(sorted(set(trial['delegated'])))}"
                raise Ended(EvalStatus.REJECTED, "honest", told)
        wanted = self._asking.trusted("answer", {"code": problem.code, "trials": trials}, made.buffers)
        assert wanted.header is not None
        for number, (trial, answer) in enumerate(zip(said["trials"], wanted.header["answers"], strict=True)):
            why = difference(trial["answer"], answer, found, wanted.buffers)
            if why is None and trial["mutated"]:
                why = "the inputs were changed"
            if why is not None:
                where = f"trial {number} with {trials[number]['constants']}, {trials[number]['dtype']}"
                raise Ended(EvalStatus.INCORRECT, "correct", f"{where}: {why}")
            for output in trial["outputs"]:
                if not output["plain"] or output["unwritten"]:
                    told = (
                        f"{output['unwritten']} numbers of the answer were written by no kernel in trial {number}"
                        if output["plain"]
                        else "returns something that only looks like a tensor"
                    )
                    raise Ended(EvalStatus.REJECTED, "honest", told)

    def _estimate(self, code: str, facts: dict[str, Any], launched: list[dict[str, Any]]) -> Timing:
        """Estimate the time of a correct candidate at the problem's own size.

        Raises:
            Ended: it does other things there than in the trials; `compiled` and `correct` stand.
        """
        header = {"code": code, "trials": [whole_trial(facts)], "sampled_programs": _SAMPLED_PROGRAMS}
        said, _ = self._asking.untrusted("interpret", "interpret", header, (), "fast", reserves=True)
        if "error" in said:
            raise Ended(EvalStatus.CORRECT, "fast", f"not timed: {said['error']['text'][:300]}")
        seen, target = said["trials"][0], self.settings.targets[0]
        if seen["delegated"] or not seen["launches"]:
            raise Ended(EvalStatus.REJECTED, "honest", "does other things at full size than in the trials")
        runtime, parts = candidate_us(seen["launches"], kernels_of(seen["launches"], launched), target)
        baseline, least = eager_us(facts["eager"], target), least_us(facts["least_bytes"], target)
        return Timing(
            source=SOURCE,
            target=target,
            runtime_us=runtime,
            baseline_us=baseline,
            speedup=baseline / max(runtime, least),
            parts={"launches": parts, "least_us": least, "implausible": runtime < least},
        )


#: Errors of Triton's compiler, and of the tools that it calls.
_COMPILER_ERRORS = frozenset(
    [
        "CompilationError",
        "UnsupportedLanguageConstruct",
        "CompileTimeAssertionFailure",
        "OutOfResources",
        "PTXASError",
        "RuntimeError",
    ]
)
#: Errors of what the interpreter checks, under which a kernel is wrong and does not merely fail.
_WRONG = ("BoundsError", "RaceError")


def _failure(error: dict[str, str]) -> Ended:
    kind, text = error["kind"], error["text"]
    if kind == "TamperError":
        return Ended(EvalStatus.REJECTED, "honest", text)
    if kind in _WRONG or any(f"{one}(" in text for one in _WRONG):
        return Ended(EvalStatus.INCORRECT, "correct", f"{kind}: {text}")
    return Ended(EvalStatus.RUNTIME_ERROR, "correct", f"{kind}: {text}")


def _with_reward(verdict: Verdict, scale: RewardScale) -> Verdict:
    return replace(verdict, reward=scale.reward(verdict))
