"""Statistics of samples, under the reference system's metric names."""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from slime_core.protocols import MULTI_TURN, Metrics
from slime_core.rollout.user_hooks import KEPT_DESPITE, REMOVED
from slime_core.samples import Group, Sample, Status


def rollout_metrics(groups: Sequence[Group], *, reward_key: str | None, drops: Counter[str]) -> Metrics:
    """Return `rollout/*` metrics of the groups that a step trains on, and of those that it dropped."""
    samples = [sample for group in groups for sample in group]
    rewards = np.array([sample.reward_value(reward_key) for sample in samples])
    lengths = np.array([sample.effective_response_length for sample in samples])
    metrics: Metrics = {
        "rollout/raw_reward": float(rewards.mean()),
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/median": float(np.median(lengths)),
        "rollout/response_len/max": float(lengths.max()),
        "rollout/response_len/min": float(lengths.min()),
        "rollout/truncated_ratio": float(np.mean([s.status is Status.TRUNCATED for s in samples])),
        "rollout/repetition_frac": float(np.mean([has_repetition(s.response) for s in samples])),
        "rollout/samples": float(len(samples)),
    }
    solved = [[one.reward_value(reward_key) == 1 for one in outcomes(group)] for group in groups]
    metrics |= {f"passrate/{name}": value for name, value in pass_rates(solved).items()}
    for group in groups:
        values = {sample.reward_value(reward_key) for sample in group}
        if len(group) > 1 and len(values) == 1:
            key = f"rollout/zero_std/count_{values.pop():g}"
            metrics[key] = metrics.get(key, 0.0) + 1.0
    for reason, count in drops.items():
        metrics[f"rollout/dynamic_filter/drop_{reason}"] = float(count)
    despite = Counter(
        str(group[0].metadata[KEPT_DESPITE]) for group in groups if KEPT_DESPITE in group[0].metadata
    )
    for reason, count in despite.items():
        metrics[f"rollout/dynamic_filter/kept_{reason}"] = float(count)
    removed = Counter(str(s.metadata[REMOVED]) for s in samples if s.remove_sample and REMOVED in s.metadata)
    for reason, count in removed.items():
        metrics[f"rollout/sample_filter/removed_{reason}"] = float(count)
    metrics |= _sources(samples, reward_key)
    if drops["reward_error"]:
        metrics["rollout/reward_errors"] = float(drops["reward_error"])
    if sampling_masks := [
        s.rollout_top_p_token_offsets for s in samples if s.rollout_top_p_token_offsets is not None
    ]:
        kept = np.concatenate([np.diff(offsets) for offsets in sampling_masks])
        metrics["rollout/top_p_kept_vocab_per_token"] = float(kept[kept > 0].mean()) if kept.any() else 0.0
    metrics |= _speculation(samples) | _conversations(samples)
    parts = {key for sample in samples if isinstance(sample.reward, dict) for key in sample.reward}
    for part in sorted(parts):
        values_of = [s.reward.get(part) for s in samples if isinstance(s.reward, dict)]
        numbers = [float(value) for value in values_of if isinstance(value, int | float)]
        if numbers:
            metrics[f"rollout/reward/{part}"] = float(np.mean(numbers))
    return metrics


def _sources(samples: Sequence[Sample], reward_key: str | None) -> Metrics:
    """Return samples and mean reward of each data set, where samples say which they are of."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if (name := sample.metadata.get("source_name")) is not None:
            rewards[str(name)].append(sample.reward_value(reward_key))
    metrics: Metrics = {}
    for name, values in sorted(rewards.items()):
        metrics[f"rollout/source/{name}/samples"] = float(len(values))
        metrics[f"rollout/source/{name}/raw_reward"] = float(np.mean(values))
    return metrics


def _speculation(samples: Iterable[Sample]) -> Metrics:
    """Return acceptance rate and tokens per verification pass of speculative decoding; empty without it."""
    counts: Counter[str] = Counter()
    for sample in samples:
        if sample.spec_info:
            counts.update(sample.spec_info)
    if not counts["spec_draft_token_num"] or not counts["spec_verify_ct"]:
        return {}
    return {
        "rollout/spec_accept_rate": counts["spec_accept_token_num"] / counts["spec_draft_token_num"],
        "rollout/spec_accept_length": counts["completion_token_num"] / counts["spec_verify_ct"],
    }


def _conversations(samples: Sequence[Sample]) -> Metrics:
    """Return turns, the environment's tokens, and shares of what ended conversations; empty where there were none."""
    records = [sample.metadata[MULTI_TURN] for sample in samples if MULTI_TURN in sample.metadata]
    if not records:
        return {}
    turns = [record["turns"] for record in records]
    metrics: Metrics = {
        "rollout/multi_turn/turns/mean": float(np.mean(turns)),
        "rollout/multi_turn/turns/max": float(max(turns)),
        "rollout/multi_turn/environment_tokens/mean": float(
            np.mean([record["environment_tokens"] for record in records])
        ),
    }
    for reason, count in sorted(Counter(record["ended_by"] for record in records).items()):
        metrics[f"rollout/multi_turn/ended_by_{reason}"] = count / len(records)
    spoken = [sample for sample in samples if MULTI_TURN in sample.metadata]
    for name, values in (
        ("raw_response_length/response_length", [sample.response_length for sample in spoken]),
        ("wo_obs_response_length/response_length", [sample.generated_length for sample in spoken]),
        ("multi_turn_metric/round_number", turns),
    ):
        for statistic in ("mean", "max", "min"):
            metrics[f"multi_turn/{name}_{statistic}"] = float(getattr(np, statistic)(values))
    return metrics


#: A response repeats itself if so many characters at its end compress by more than that.
_REPEATED_CHARACTERS, _REPEATED_RATIO = 10_000, 10
#: What engines measure of a request.
REQUEST_TIMINGS = ("e2e_latency", "queue_time", "first_token_latency")


def request_metrics(groups: Iterable[Group], *, rollout_s: float) -> Metrics:
    """Return metrics of generation: tokens a second over the rollout's `rollout_s`, requests' own timings, prefix cache.

    Tokens are those that the step trains on; what it dropped or aborted took time, too. Empty where nothing was generated.
    """
    samples = [sample for group in groups for sample in group if "generate" in sample.timings]
    if not samples:
        return {}
    tokens = sum(sample.effective_response_length for sample in samples)
    metrics: Metrics = {}
    if rollout_s:  # 0 in virtual time, where the groups were there already, and where they were made beside earlier steps
        metrics["perf/rollout_tokens_per_sec"] = tokens / rollout_s
    for name in REQUEST_TIMINGS:
        seconds = [sample.timings[name] for sample in samples if name in sample.timings]
        if seconds:
            metrics[f"perf/request/{name}/mean"] = float(np.mean(seconds))
            metrics[f"perf/request/{name}/max"] = max(seconds)
    elsewhere = [sample.non_generation_time for sample in samples]
    if any(elsewhere):
        metrics["perf/non_generation_time/mean"] = float(np.mean(elsewhere))
        metrics["perf/non_generation_time/max"] = max(elsewhere)
    return metrics | _prefix_cache(samples)


def _prefix_cache(samples: Sequence[Sample]) -> Metrics:
    """Return the hit rate of the engine's prefix cache and cached tokens per sample; empty if the engine reports none."""
    counts: Counter[str] = Counter()
    for sample in samples:
        if sample.prefix_cache_info:
            counts.update(sample.prefix_cache_info)
    if not counts["total_prompt_tokens"]:
        return {}
    return {
        "rollout/prefix_cache_hit_rate": counts["cached_tokens"] / counts["total_prompt_tokens"],
        "rollout/avg_cached_tokens_per_sample": counts["cached_tokens"] / len(samples),
    }


def pass_at_k(n: int, solved: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from `n` samples, `solved` of them right.

    Source: Chen et al. 2021 (arXiv:2107.03374), equation 1: 1 - C(n - c, k) / C(n, k).
    """
    if not 1 <= k <= n or not 0 <= solved <= n:
        raise ValueError(f"pass@{k} needs 1 <= k <= n and 0 <= solved <= n, found n={n}, solved={solved}")
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def outcomes(group: Group) -> list[Sample]:
    """Return the sample of each execution that says how it came out: the last turn, branch or role of those that are trained on.

    An execution that fans out into several samples is one attempt at its prompt, however many there are.
    """
    found: dict[tuple[bool, int], Sample] = {}
    for number, sample in enumerate(group):
        key = (False, number) if sample.rollout_id is None else (True, sample.rollout_id)
        if key not in found or not sample.remove_sample:
            found[key] = sample
    return list(found.values())


def pass_rates(solved: Sequence[Sequence[bool]]) -> Metrics:
    """Return `pass@k`, mean over groups, for powers of two up to the size of the smallest group."""
    n, metrics, k = min(map(len, solved)), Metrics(), 1
    while k <= n:
        metrics[f"pass@{k}"] = float(np.mean([pass_at_k(len(group), sum(group), k) for group in solved]))
        k *= 2
    return metrics


def has_repetition(text: str) -> bool:
    """Return whether the last 10,000 characters of a text compress to less than a tenth; a shorter text repeats nothing.

    Source: slime/utils/metric_utils.py, `has_repetition`.
    """
    end = text[-_REPEATED_CHARACTERS:].encode(errors="replace")
    return len(end) >= _REPEATED_CHARACTERS and len(end) > _REPEATED_RATIO * len(zlib.compress(end))


def evaluation_metrics(
    name: str, groups: Iterable[Group], *, reward_key: str | None, threshold: float
) -> Metrics:
    """Return `eval/*` metrics of one evaluation set: mean reward and pass@k, by executions (`outcomes`); lengths, by samples."""
    filled = [group for group in groups if group]
    samples = [sample for group in filled for sample in group]
    rewards = [[one.reward_value(reward_key) for one in outcomes(group)] for group in filled]
    metrics: Metrics = {
        f"eval/{name}": float(np.mean([value for values in rewards for value in values])),
        f"eval/{name}/response_len/mean": float(np.mean([s.effective_response_length for s in samples])),
        f"eval/{name}-truncated_ratio": float(np.mean([s.status is Status.TRUNCATED for s in samples])),
    }
    rates = pass_rates([[value >= threshold for value in values] for values in rewards])
    return metrics | {f"eval/{name}-{k}": value for k, value in rates.items()}


def idle_shares(metrics: Metrics, step_s: float, *, engine_s: float) -> Metrics:
    """Return the shares of a step in which the engine had no request of training, and the trainer no batch.

    Args:
        metrics: of the step.
        step_s: how long it took, seconds.
        engine_s: seconds in which the engine had requests.
    """
    busy_s = {"engine": engine_s, "trainer": metrics.get("perf/train_time", 0.0)}
    return {f"perf/{part}_idle_share": max(0.0, 1.0 - busy / step_s) for part, busy in busy_s.items()}
