"""Settings of kernel problems, their evaluation, and turns. Imports neither torch nor triton."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import field_validator
from slime_core.config.base import Amount, Count, FilePath, Index, Seconds, SectionModel, Seed, Share, Text

CODE, EXPRESSION, SKELETON = "{code}", "{expression}", "{skeleton}"
#: What a prompt says where nothing else is set; `problems.prompt` fills it in.
PROMPT = f"""\
Rewrite this PyTorch module as `ModelNew`, with kernels in Triton that do all of its computation.

```python
{CODE}
```

Answer with one fenced block of Python: the imports, the kernels, and the class `ModelNew` with the same
constructor and the same `forward` as `Model`. PyTorch may only allocate tensors and change their shapes.
"""
Target = Literal["sm_80", "sm_90", "gfx942"]


class KernelsSection(SectionModel):
    """Problems in the format of KernelBench, and how candidates are evaluated."""

    problems: str | None = None
    """JSON Lines file of problems, of the data source kernelbench: `path` or `path@[start:stop]`."""
    eval_problems: str | None = None
    """JSON Lines file of held-out problems, of the data source kernelbench."""
    levels: list[Annotated[int, Ge(1), Le(4)]] = []
    """Levels of problems to keep; all of them when empty."""
    families: list[Text] = []
    """Families of generated problems, of the data source kernel-problems; all of them when empty."""
    size: Count = 64
    """Generated problems to train on."""
    eval_size: Index = 16
    """Generated problems that are held out; none of them is trained on."""
    seed: Seed = 0
    """Seed from which generated problems are drawn."""
    prompt_template: str = PROMPT
    """Text of the prompt, with `{code}` where the problem's source goes, or `{expression}` for what its `forward` returns; and
    `{skeleton}` for the problem's skeleton."""
    answer: Literal["module", "expression"] = "module"
    """What a response to a generated problem is: the whole module, or the expression that is missing in a skeleton of it."""
    targets: list[Target] = ["sm_90"]
    """Architectures that a kernel is compiled for; the first is the one whose time the cost model tells."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where kernels are tried and timed: `cuda` launches them on the GPUs of this process and times them there; `cpu` runs them in
    Triton's interpreter and has a cost model tell their time; `auto` is `cuda` where there is a GPU. A service uses its own."""
    baseline: Literal["eager", "compile"] = "eager"
    """The time in PyTorch that a speedup measured on a GPU is over: as the module is, or by torch.compile. Both are measured."""
    baseline_dir: Text = "~/.cache/slime/kernel-baselines"
    """Folder of such times, by GPU and problem, with versions; measured once each."""
    timed_calls: Annotated[int, Ge(10), Le(10_000)] = 100
    """Calls of which a GPU's time is the median."""
    most_noise: Share = 0.05
    """Largest noise of such a time, as a part of it; a speedup with more is not rewarded."""
    correct_trials: Count = 5
    """Trials on fresh inputs that a kernel must all pass."""
    eval_timeout_s: Seconds = 60.0
    """Deadline of each process of an evaluation, seconds."""
    memory_mb: Count = 4096
    """Memory of all processes of one evaluation together, besides what they share with others, in MiB."""
    concurrency: Count = 2
    """Evaluations at once."""
    compiled_reward: Amount = 0.1
    """Reward of a kernel that compiles."""
    correct_reward: Amount = 0.3
    """Reward of a kernel that is correct, too."""
    most_bonus: Amount = 2.0
    """Most that the speedup above 1 adds to the reward of a correct kernel."""
    service: str | None = None
    """Address of a service that evaluates, such as `http://localhost:18188/eval`; in this process when not given."""

    @field_validator("prompt_template")
    @classmethod
    def _has_code(cls, value: str) -> str:
        if CODE not in value and EXPRESSION not in value:
            raise ValueError(f"text with {CODE} where the problem's source goes, or with {EXPRESSION}")
        return value

    @field_validator("targets")
    @classmethod
    def _has_a_target(cls, value: list[str]) -> list[str]:
        if not value or len(set(value)) < len(value):
            raise ValueError("one architecture or more, each once")
        return value


class TurnsSection(SectionModel):
    """Turns of the generator kernel-turns."""

    multi_turn_gamma: Annotated[float, Ge(0), Le(1)] = 0.4
    """Discount of a turn's reward beside that of the turn before."""
    kernel_max_turns: Count = 3
    """Attempts at one problem."""
    kernel_context: Literal["chat", "history"] = "chat"
    """What a later attempt sees: the chat so far, or one prompt with all earlier attempts and their results."""
    kernel_samples: Literal["trajectory", "turn"] = "trajectory"
    """One sample for all turns, whose reward is their discounted sum; or one for each turn, rewarded by those from it on."""
    kernel_log_dir: FilePath | None = None
    """Folder for a JSON file of each turn and of each trajectory; none are written when not given."""
