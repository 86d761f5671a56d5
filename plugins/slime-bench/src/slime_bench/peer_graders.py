"""Graders of other libraries as rewards, so that the pool can bound them. Each imports its library when it is called."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

from slime_core.sample import Sample


def math_verify(sample: Sample) -> float:
    """math-verify 0.9 as its own documentation calls it."""
    from math_verify import parse, verify

    label = sample.label or ""
    gold = label if "$" in label or "\\boxed" in label else f"${label}$"
    return float(verify(parse(gold), parse(sample.response)))


def trl(sample: Sample) -> float | None:
    """TRL's accuracy_reward; None, an invalid reward, where it cannot read the label."""
    from trl.rewards import accuracy_reward

    label = sample.label or ""
    solution = label if "$" in label or "\\boxed" in label else f"${label}$"
    (score,) = accuracy_reward(
        completions=[[{"role": "assistant", "content": sample.response}]], solution=[solution]
    )
    return score  # type: ignore[no-any-return]  # TRL's own type


def verl_prime(sample: Sample) -> float:
    """verl's prime_math."""
    result = _verl("prime_math").compute_score(sample.response, sample.label)
    return float(result[0] if isinstance(result, tuple) else result)


def verl_math(sample: Sample) -> float:
    """verl's MATH scorer."""
    return float(_verl("math_reward").compute_score(sample.response, sample.label))


def verl_dapo(sample: Sample) -> float:
    """verl's DAPO scorer: -1 or 1."""
    return float(_verl("math_dapo").compute_score(sample.response, sample.label)["score"])


def verl_gsm8k(sample: Sample) -> float:
    """verl's GSM8K scorer."""
    return float(_verl("gsm8k").compute_score(sample.response, sample.label))


#: Peer -> (the grader of ours whose cases it is given, the distribution that it is in, the reward).
PEERS = {
    "math-verify": ("math", "math-verify", "slime_bench.peer_graders:math_verify"),
    "trl": ("math", "trl", "slime_bench.peer_graders:trl"),
    "verl-prime": ("math", "verl", "slime_bench.peer_graders:verl_prime"),
    "verl-math": ("math", "verl", "slime_bench.peer_graders:verl_math"),
    "verl-dapo": ("dapo", "verl", "slime_bench.peer_graders:verl_dapo"),
    "verl-gsm8k": ("gsm8k", "verl", "slime_bench.peer_graders:verl_gsm8k"),
}


def _verl(scorer: str) -> Any:
    """Import a scorer of verl without verl's own imports of trainers and Ray, which scorers do not need."""
    if "verl" not in sys.modules:
        spec = importlib.util.find_spec("verl")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("verl is not installed")
        for name in ("verl", "verl.utils", "verl.utils.reward_score"):
            package = types.ModuleType(name)
            package.__path__ = [f"{spec.submodule_search_locations[0]}/{'/'.join(name.split('.')[1:])}"]
            sys.modules[name] = package
    return importlib.import_module(f"verl.utils.reward_score.{scorer}")
