"""Memory before the start: `slime check` refuses what cannot fit, `slime plan --memory` needs no weights."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.timeout(600)

#: Qwen/Qwen3-30B-A3B, as published.
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
RUN = ("--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "8192")


@pytest.mark.slow
def test_a_check_says_what_is_taken_and_refuses_what_cannot_fit(slime_here, root):
    """135 million numbers, of 18 bytes each in the trainer: 2.3 GiB without which nothing runs."""
    recipe = str(root / "recipes/own-data.toml")
    fits = slime_here("check", recipe, "--device-memory-gb", "80")
    assert fits.returncode == 0, fits.stderr
    said = [line for line in fits.stdout.splitlines() if "memory: " in line]
    assert [line.split(":")[1].strip() for line in said] == ["trainer", "engine torch"]
    refused = slime_here("check", recipe, "--device-memory-gb", "2")
    assert refused.returncode == 2
    assert (
        "GiB on the GPU of trainer and engine torch while it trains; wanted at most 2.0 GiB;"
        in refused.stderr
    )
    assert "--colocate" in refused.stderr
    may = slime_here("check", recipe, "--device-memory-gb", "3.2")
    assert may.returncode == 0, may.stderr
    assert "may not fit" in may.stdout


def test_a_config_alone_is_enough_and_an_unknown_family_is_named(slime_here, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    layout = ("--launcher", "ray", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "8")
    layout += (
        "--tensor-model-parallel-size",
        "4",
        "--sequence-parallel",
        "--expert-model-parallel-size",
        "8",
    )
    layout += ("--expert-tensor-parallel-size", "1", "--use-distributed-optimizer")
    words = (
        "--hf-checkpoint",
        str(tmp_path),
        *RUN,
        *layout,
        "--rollout-engine",
        "none",
        "--device-memory-gb",
        "80",
    )
    table = slime_here(
        "plan", "--memory", *words, "--recompute-granularity", "full", "--max-tokens-per-gpu", "9216"
    )
    assert table.returncode == 0, table.stderr
    rows = {
        line.rsplit(maxsplit=1)[0].strip(): line.split()[-1] for line in table.stdout.splitlines() if line
    }
    # Experts: 48 layers x 128 x 3 x 2048 x 768 numbers, an eighth on each rank, and on each of 2 ranks alike; the rest a quarter, but for
    # norms and routers (48 x (2 x 2048 + 2 x 128 + 128 x 2048) + 2048), on all 16 alike. 2, 4 and 12 bytes each, in GiB.
    experts, whole = 48 * 128 * 3 * 2048 * 768 // 8, 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
    others = (30_532_122_624 - 8 * experts - whole) // 4 + whole
    assert rows["weights"] == f"{2 * (experts + others) / 2**30:.2f}"
    assert rows["gradients"] == f"{4 * (experts + others) / 2**30:.2f}"
    assert rows["optimizer"] == f"{12 * (experts / 2 + others / 4) / 2**30:.2f}"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "deepseek_v99"}))
    unknown = slime_here("plan", "--memory", *words)
    assert unknown.returncode == 2
    assert "no plugin is named 'deepseek_v99'; did you mean 'deepseek_v3'?" in unknown.stderr


#: deepseek-ai/DeepSeek-V3, as published.
DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "max_position_embeddings": 163840, "rope_theta": 10000,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def test_deepseek_v3_on_256_gpus_takes_what_arithmetic_says(slime_here, tmp_path):
    """Experts a 256th a rank, wide matrices an eighth, projections to latent vectors, norms and routers whole; see docs/memory.md."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    layout = "--launcher ray --actor-num-nodes 32 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 8 --sequence-parallel "
    layout += "--expert-model-parallel-size 256 --expert-tensor-parallel-size 1 --use-distributed-optimizer "
    layout += (
        "--recompute-granularity full --max-tokens-per-gpu 9216 --rollout-engine none --device-memory-gb 80"
    )
    table = slime_here("plan", "--memory", "--hf-checkpoint", str(tmp_path), *RUN, *layout.split())
    assert table.returncode == 0, table.stderr
    rows = {
        line.rsplit(maxsplit=1)[0].strip(): line.split()[-1] for line in table.stdout.splitlines() if line
    }
    experts = 58 * 3 * 7168 * 2048
    cut = 61 * (1536 * 24576 + 512 * 32768 + 16384 * 7168) + 3 * 3 * 7168 * 18432
    cut += 58 * 3 * 7168 * 2048 + 2 * 129280 * 7168
    whole = 61 * (7168 * (1536 + 576) + 2048 + 2 * 7168) + 58 * 256 * 7168 + 7168
    assert 256 * experts + cut + whole == 671_026_404_352
    others = cut / 8 + whole
    assert rows["weights"] == f"{2 * (experts + others) / 2**30:.2f}"
    assert rows["gradients"] == f"{4 * (experts + others) / 2**30:.2f}"
    assert rows["optimizer"] == f"{12 * (experts + others / 32) / 2**30:.2f}"
