"""What is different on CUDA. A body runs on the device that there is, and once more as one that is marked `gpu`.

On a machine without CUDA `-m gpu` skips and says so; the bodies themselves run there all the same, on the CPU.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from slime_bench.memory_in_use import bytes_in_use
from slime_bench.random_work import SHAPES
from slime_bench.trainer.command import trainer as bench_trainer
from slime_core.errors import TrainerError
from slime_megatron.settings.section import MegatronSection

from .algorithms import policy_gradient
from .batches import hf_log_probs, make_batch
from .comparison import gradients_of, relative, sent, shared_prompts

#: What rounding to bfloat16 (8 bits of mantissa) changes a number by, at most, relative to it.
ROUNDING = 2.0**-8
#: Roundings that a token's hidden state meets in a layer, one after another: norm, product, norm of queries and keys,
#: rotation (two), probabilities, attention, product, sum; norm, product, activation, gate, product, sum.
ROUNDINGS_A_LAYER = 15
#: How near a step's loss and norm are to another's that began alike: kernels of CUDA add up in no fixed order.
NEAR = {"cpu": 1e-5, "cuda": 1e-3}
INSTALLED = importlib.util.find_spec("transformer_engine") is not None
#: Operators of kernels that never hold scores of all pairs of tokens, by device and whether it computes in bfloat16: forward.
FLASH = {
    ("cpu", False): {"_scaled_dot_product_flash_attention_for_cpu"},
    ("cpu", True): {"_scaled_dot_product_flash_attention_for_cpu"},
    ("cuda", False): {"_scaled_dot_product_efficient_attention", "_efficient_attention_forward"},
    # torch's call of variable lengths is an operator of its own, and calls the flash kernel's.
    ("cuda", True): {"torch_attn::_varlen_attn", "_flash_attention_forward"},
}
#: What names of operators of attention begin with, whichever kernel they have.
ATTENTION = (
    "_scaled_dot_product_",
    "_efficient_attention_",
    "_flash_attention_",
    "_cudnn_attention_",
    "torch_attn::",
)


@pytest.fixture(params=["here", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """Return the device that the trainer takes on this machine."""
    from slime_megatron.parallel import process_groups

    found = process_groups.device()
    assert request.param in ("here", found.type)
    return found


def kernels_of_attention(run: Callable[[], Any]) -> set[str]:
    """Return the operators of attention that are called, forward and backward. The host calls them, whatever the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        run()
    names = {event.name.removeprefix("aten::") for event in profiled.events()}
    return {name for name in names if name.startswith(ATTENTION)}


def with_backward(forward: set[str]) -> set[str]:
    """Return operators and those of their gradients."""
    return forward | {f"{name.removesuffix('_forward')}_backward" for name in forward}


@pytest.mark.parametrize("bf16", [True, False], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared prompts"])
def test_attention_takes_a_flash_kernel_and_no_other(device, make_learner, shared, bf16):
    learner = make_learner(bf16=bf16)
    kernels = kernels_of_attention(lambda: learner.train(shared_prompts() if shared else make_batch()))
    assert kernels == with_backward(FLASH[device.type, bf16])


def test_steps_and_checkpoints_of_a_distributed_optimizer_go_through_the_devices_groups(
    device, make_learner, tmp_path
):
    from megatron.core import parallel_state

    sections = [MegatronSection(), MegatronSection(use_distributed_optimizer=True)]
    alone = make_learner(bf16=True, megatron=sections[0]).train(make_batch())
    learner = make_learner(bf16=True, megatron=sections[1])
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert dist.get_backend(group) == ("nccl" if device.type == "cuda" else "gloo")
    total = torch.ones(3, device=device)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [1, 1, 1]
    found: list[Any] = [None]
    dist.all_gather_object(found, {"rank": 0}, group=group)
    assert found == [{"rank": 0}]
    shared = learner.train(make_batch())
    for name in ("train/loss", "train/grad_norm"):
        assert shared[name] == pytest.approx(alone[name], rel=NEAR[device.type])
    learner.save(tmp_path)
    saved = state_of(learner)
    goes_on = learner.train(make_batch(seed=1))
    again = make_learner(bf16=True, megatron=sections[1])
    again.load(tmp_path)
    assert_same(state_of(again), saved)
    resumed = again.train(make_batch(seed=1))
    for name in ("train/loss", "train/grad_norm"):
        assert resumed[name] == pytest.approx(goes_on[name], rel=NEAR[device.type])


def state_of(learner: Any) -> list[torch.Tensor]:
    """Return copies of weights, master weights and moments, on the host."""
    tensors = [parameter for _, parameter in learner.model.named_parameters()]
    for each in learner._policy.optimizer.chained_optimizers:
        for group in each.optimizer.param_groups:
            for parameter in group["params"]:
                tensors += [
                    parameter,
                    *(value for _, value in sorted(each.optimizer.state[parameter].items())),
                ]
    return [tensor.detach().cpu().clone() for tensor in tensors if torch.is_tensor(tensor)]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_bfloat16_is_float32_on_the_cpu_within_its_rounding(device, make_learner, make_hf):
    """Errors of single roundings are independent: n in a row make sqrt(n) of one. Backward meets as many again."""
    from transformers import AutoModelForCausalLM

    _, folder = make_hf("qwen3", head_dim=32, dtype=torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = make_batch()
    seen: list[torch.Tensor] = []

    def estimator(view: Any) -> tuple[Any, Any]:
        seen.append(view.old_log_probs)
        advantages = view.rewards[view.sample_of_token]
        return advantages, advantages

    algorithm = replace(policy_gradient("old_log_probs"), estimator=estimator)
    learner = make_learner(algorithm, folder=folder, bf16=True)
    learner.train(batch)
    assert learner.model.embedding.word_embeddings.weight.device.type == device.type
    wanted = hf_log_probs(reference, batch)
    advantages = torch.from_numpy(np.repeat(batch.rewards, batch.response_lengths))
    (torch.from_numpy(batch.weights) * -(wanted - wanted.detach()).exp() * advantages).sum().backward()
    bound = ROUNDING * math.sqrt(ROUNDINGS_A_LAYER * reference.config.num_hidden_layers)
    spread = logits_spread(reference, batch)
    error = (seen[0].cpu() - wanted.detach()).square().mean().sqrt().item()
    assert error <= bound * spread
    gradients = gradients_of(learner, folder)
    errors = {
        name: ((gradients[name] - p.grad).norm() / p.grad.norm()).item()
        for name, p in reference.named_parameters()
    }
    assert max(errors.values()) <= math.sqrt(2) * bound * spread, errors


def logits_spread(model: Any, batch: Any) -> float:
    """Return the standard deviation of a token's logits: what a relative error of hidden states is multiplied by."""
    tokens = torch.from_numpy(batch.tokens.astype(np.int64))[None]
    with torch.no_grad():
        return model(tokens).logits.float().std(dim=-1).mean().item()


@pytest.mark.parametrize("distributed", [False, True], ids=["", "distributed optimizer"])
def test_offload_gives_up_masters_moments_and_gradients_and_onload_brings_them_back(
    device, make_learner, make_hf, distributed
):
    _, folder = make_hf("qwen3", head_dim=32, hidden_size=128, intermediate_size=448)
    section = MegatronSection(use_distributed_optimizer=distributed)
    learner = make_learner(folder=folder, bf16=True, megatron=section)
    learner.train(make_batch())
    before, weights = state_of(learner), list(sent(learner, "bfloat16").values())
    held = bytes_in_use(device)
    learner.offload()
    if device.type == "cuda":  # on a CPU all is on the host already
        left = bytes_in_use(device)
        n = sum(parameter.numel() for parameter in learner.model.parameters())
        assert held is not None and left is not None
        assert held - left >= 0.95 * 16 * n  # float32: master, two moments, gradient
        learner.offload_weights()
        without = bytes_in_use(device)
        assert without is not None and left - without >= 0.95 * 2 * n
        learner.onload_weights()
    assert_same(list(sent(learner, "bfloat16").values()), weights)
    learner.offload_weights()
    learner.onload()
    assert_same(state_of(learner), before)
    goes_on = learner.train(make_batch(seed=1))
    never = make_learner(folder=folder, bf16=True, megatron=section)
    never.train(make_batch())
    wanted = never.train(make_batch(seed=1))
    for name in ("train/loss", "train/grad_norm"):
        assert goes_on[name] == pytest.approx(wanted[name], rel=NEAR[device.type])


@pytest.mark.gpu
@pytest.mark.skipif(not INSTALLED, reason="TransformerEngine is not installed")
def test_layers_of_transformer_engine_are_taken_and_compute_the_same(make_learner, qwen3, tmp_path):
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    found = {}
    for kind in ("local", "transformer_engine"):
        section = MegatronSection(megatron_args={"transformer_impl": kind})
        learner = make_learner(megatron=section)
        metrics = learner.train(make_batch())
        found[kind] = metrics["train/loss"], gradients_of(learner, qwen3[1])
    layers = [type(layer) for layer in learner.model.decoder.modules()]
    assert (layers.count(TEColumnParallelLinear), layers.count(TERowParallelLinear)) == (6, 6)
    assert found["transformer_engine"][0] == pytest.approx(found["local"][0], rel=1e-4)
    assert relative(found["transformer_engine"][1], found["local"][1]) <= 1e-3  # TE may multiply in TF32
    learner.save(tmp_path)
    wanted = list(sent(learner, "bfloat16").values())
    again = make_learner(megatron=MegatronSection())
    again.load(tmp_path)
    assert_same(list(sent(again, "bfloat16").values()), wanted)


@pytest.mark.skipif(INSTALLED and torch.cuda.is_available(), reason="TransformerEngine is there")
def test_transformer_engine_that_is_not_there_is_refused(make_learner):
    with pytest.raises(TrainerError, match="found no CUDA device, or TransformerEngine is not installed"):
        make_learner(megatron=MegatronSection(megatron_args={"transformer_impl": "transformer_engine"}))


def measure_shape(folder: Path, shape: str, sequence: str) -> None:
    """Print the table of full fine-tuning, and check that each length has its row of finite figures."""
    file = folder / "figures.json"
    arguments = ["--shape", shape, "--sequence", sequence, "--peer", "none", "--repeats", "3"]
    assert bench_trainer([*arguments, "--json", str(file)]) == 0
    lengths = [int(length) for length in sequence.split(",")]
    rows = json.loads(file.read_text())["work"]
    assert [int(row["samples"].split()[-1]) for row in rows] == lengths
    for row in rows:
        figures = row["sides"]["slime"]
        assert all(figures[name] > 0 for name in ("tokens_per_s", "mfu"))
        assert all(
            math.isfinite(figures[name]) for name in ("tokens_per_s", "mfu", "held_bytes", "peak_bytes")
        )


def test_the_table_of_a_small_shape_has_its_rows(tmp_path):
    config = SHAPES["0.6b"] | {
        "vocab_size": 250,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    measure_shape(tmp_path, str(tmp_path), "16,64")


@pytest.mark.gpu
def test_the_table_of_a_06b_shape_at_4k_and_16k_has_its_rows(tmp_path, capsys):
    """For reading: the published figure of one H100 at 16k is 11.9k tokens a second, 11.1% of its peak."""
    measure_shape(tmp_path, "0.6b", "4096,16384")
    with capsys.disabled():
        print("\n" + capsys.readouterr().out)
