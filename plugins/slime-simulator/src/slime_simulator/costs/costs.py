"""What engine, trainer and weight updates cost: a few coefficients each, in seconds, which `fit` finds and `hardware` estimates."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class EngineCosts:
    """What one replica of the engine takes. All its running requests get a token in each decode step.

    A decode step of n requests whose KV caches hold c tokens together takes `step_s + n request_s + c kv_token_s`: reading the
    weights, the matrix products of each token, and reading the KV cache. Prefill of a request holds up the others by
    `prefill_token_s` a token. Not modelled: speculative decoding, preemption where the KV cache is full.
    """

    step_s: float
    """Seconds of a decode step whatever is in it."""
    request_s: float = 0.0
    """Seconds that each running request adds to a decode step."""
    kv_token_s: float = 0.0
    """Seconds that each token in the KV cache adds to a decode step."""
    prefill_token_s: float = 0.0
    """Seconds of prefill for a token of a prompt, or of a response that is continued."""
    slots: int = 256
    """Most requests that a replica decodes together; others wait in the order of their arrival."""
    shares_prompts: bool = False
    """Whether the samples of a prompt are prefilled once, with the first of them."""


@dataclass(frozen=True, kw_only=True)
class TrainerCosts:
    """What a training step takes: `fixed_s + tokens x token_gpu_s / GPUs` seconds, of the tokens that it forwards."""

    token_gpu_s: float
    """GPU-seconds a token."""
    fixed_s: float = 0.0
    """Seconds of a step whatever is in it and however many GPUs there are."""
    shares_prompts: bool = False
    """Whether a prompt is forwarded once for all its samples; else with each of them."""

    def step_s(self, tokens: float, *, gpus: int) -> float:
        """Return the seconds of a step."""
        return self.fixed_s + tokens * self.token_gpu_s / gpus


@dataclass(frozen=True, kw_only=True)
class UpdateCosts:
    """What bringing weights to the engine takes."""

    send_s: float = 0.0
    """Seconds in which the trainer sends and cannot train."""
    pause_s: float = 0.0
    """Seconds in which the engine decodes nothing; they begin as the trainer's do."""
    switch_s: float = 0.0
    """Seconds to move trainer or engine off its devices, or back on them, where they share devices."""


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """How many times as long a part takes while the other one is at work, too, where both run on the same cores."""

    step: float = 1.0
    """`EngineCosts.step_s`, while the trainer trains."""
    request: float = 1.0
    """What else the engine takes, while the trainer trains."""
    trainer: float = 1.0
    """What the trainer takes, while the engine generates."""

    def of(self, costs: EngineCosts) -> EngineCosts:
        """Return what the engine takes while the trainer trains."""
        return replace(
            costs,
            step_s=self.step * costs.step_s,
            request_s=self.request * costs.request_s,
            kv_token_s=self.request * costs.kv_token_s,
            prefill_token_s=self.request * costs.prefill_token_s,
        )


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What all parts of a run take."""

    engine: EngineCosts
    trainer: TrainerCosts
    update: UpdateCosts = UpdateCosts()
    reward_s: float = 0.0
    """Seconds of a reward."""
    slowdown: Slowdown = Slowdown()
    eval_s: float = 0.0
    """Seconds for which the loop waits for an evaluation."""
    save_s: float = 0.0
    """Seconds for which the loop waits for a checkpoint."""
