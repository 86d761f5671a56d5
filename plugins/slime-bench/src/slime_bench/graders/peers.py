"""Graders of other libraries as rewards, so that the pool can bound them. Each imports its library when it is called."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slime_core.samples import Sample


@dataclass(frozen=True)
class Library:
    """A library and its graders."""

    distribution: str
    """What is installed; a checkout on `PYTHONPATH` does too."""
    module: str
    """What is imported; its presence says that the library is installed."""
    graders: Mapping[str, str]
    """Grader of ours, whose cases are given -> the reward of this module that grades them."""

    def is_installed(self) -> bool:
        """Return whether its module is found, without importing it."""
        parent, _, rest = self.module.partition(".")
        spec = importlib.util.find_spec(parent)
        if spec is None or not rest:
            return spec is not None
        places = [place for place in spec.submodule_search_locations or [] if not _is_ours(place)]
        inner = [f"{place}/{'/'.join(rest.split('.')[:-1])}" for place in places]
        return importlib.machinery.PathFinder.find_spec(self.module, inner) is not None

    def version(self) -> str:
        """Return the version of its distribution; nothing where only its source is on the path."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return ""


def _is_ours(place: str) -> bool:
    """Return whether a package is the one of the reference system's name that slime-compat brings, whose graders are ours."""
    return Path(place).with_name("slime_compat").is_dir()


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
    result = _part("verl.utils.reward_score.prime_math").compute_score(sample.response, sample.label)
    return float(result[0] if isinstance(result, tuple) else result)


def verl_math(sample: Sample) -> float:
    """verl's MATH scorer."""
    return float(_part("verl.utils.reward_score.math_reward").compute_score(sample.response, sample.label))


def verl_dapo(sample: Sample) -> float:
    """verl's DAPO scorer: -1 or 1."""
    return float(
        _part("verl.utils.reward_score.math_dapo").compute_score(sample.response, sample.label)["score"]
    )


def verl_gsm8k(sample: Sample) -> float:
    """verl's GSM8K scorer, strict."""
    return float(_part("verl.utils.reward_score.gsm8k").compute_score(sample.response, sample.label))


def slime_math(sample: Sample) -> float:
    """slime's `math`."""
    return float(_part("slime.rollout.rm_hub.math_utils").grade_answer_verl(sample.response, sample.label))


def slime_deepscaler(sample: Sample) -> float:
    """slime's `deepscaler`."""
    hub = _part("slime.rollout.rm_hub.deepscaler")
    return float(hub.get_deepscaler_rule_based_reward(sample.response, sample.label))


def slime_dapo(sample: Sample) -> float:
    """slime's `dapo`: -1 or 1."""
    result = _part("slime.rollout.rm_hub.math_dapo_utils").compute_score(sample.response, sample.label)
    return float(result["score"] if isinstance(result, dict) else result)


def slime_gpqa(sample: Sample) -> float:
    """slime's `gpqa`, which grades the cases of our `multiple_choice` too."""
    hub = _part("slime.rollout.rm_hub.gpqa")
    return float(hub.compute_gpqa_reward(sample.response, sample.label, metadata=dict(sample.metadata)))


def slime_f1(sample: Sample) -> float:
    """slime's `f1`."""
    return float(_part("slime.rollout.rm_hub.f1").f1_score(sample.response, sample.label)[0])


#: Library -> where it is and which of its graders are given the cases of which of ours.
LIBRARIES: Mapping[str, Library] = {
    "math-verify": Library(
        "math-verify",
        "math_verify",
        {"math": f"{__name__}:math_verify", "math_verify": f"{__name__}:math_verify"},
    ),
    "trl": Library("trl", "trl", {"math": f"{__name__}:trl"}),
    "slime": Library(
        "slime",
        "slime.rollout.rm_hub",
        {
            "math": f"{__name__}:slime_math",
            "deepscaler": f"{__name__}:slime_deepscaler",
            "dapo": f"{__name__}:slime_dapo",
            "gpqa": f"{__name__}:slime_gpqa",
            "multiple_choice": f"{__name__}:slime_gpqa",
            "f1": f"{__name__}:slime_f1",
        },
    ),
    "verl": Library(
        "verl",
        "verl.utils.reward_score",
        {"math": f"{__name__}:verl_math", "dapo": f"{__name__}:verl_dapo", "gsm8k": f"{__name__}:verl_gsm8k"},
    ),
    "verl-prime": Library("verl", "verl.utils.reward_score", {"math": f"{__name__}:verl_prime"}),
}


def _part(module: str) -> Any:
    """Import a module without what its packages import, trainers and Ray, which graders do not need."""
    top, *inner = module.split(".")[:-1]
    if top not in sys.modules:
        spec = importlib.util.find_spec(top)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"{top} is not installed")
        place, name = spec.submodule_search_locations[0], top
        for part in ["", *inner]:
            name, place = (f"{name}.{part}", f"{place}/{part}") if part else (name, place)
            package = types.ModuleType(name)
            package.__path__ = [place]
            sys.modules[name] = package
    return importlib.import_module(module)
