"""What SGLang's engines are predicted to take. Nothing is started.

The tiny model has 2,104 numbers; a token's keys and values are 2 layers x 2 x 2 heads x 4 wide x 2 bytes = 64 bytes.
"""

from __future__ import annotations

import pytest
from slime_core.protocols.memory import Device
from slime_core.testing.memory import TINY_QWEN3, memory_question, write_config
from slime_sglang.settings.memory import engine_memory, engine_remedies

GIB = 2**30


@pytest.fixture
def question(tmp_path):
    """Return a function that asks of a run with a config.json alone."""

    def ask(*flags, kind="cuda", memory=80 * GIB, config=TINY_QWEN3):
        device = Device(kind=kind, memory_bytes=memory)
        return memory_question(
            write_config(tmp_path, config), "--rollout-engine", "sglang", *flags, device=device
        )

    return ask


def test_on_a_cpu_the_cache_has_its_tokens(question):
    (found,) = engine_memory(question(kind="cpu"))
    assert found.parts == {"weights": 2 * 2104, "KV cache": 32768 * 64}
    (fewer,) = engine_memory(question("--sglang-max-total-tokens", "100", kind="cpu"))
    assert fewer.parts["KV cache"] == 100 * 64


def test_on_a_gpu_there_are_weights_and_one_longest_request_at_least(question):
    """8 tokens and a response of 24."""
    (found,) = engine_memory(question())
    assert found.parts == {"weights": 2 * 2104, "KV cache": 32 * 64}
    assert found.fills is None
    assert found.offloaded == 0


def test_a_share_that_is_given_is_filled(question):
    (found,) = engine_memory(question("--sglang-mem-fraction-static", "0.5"))
    assert found.fills == 0.5
    (limited,) = engine_memory(
        question("--sglang-mem-fraction-static", "0.5", "--sglang-max-total-tokens", "10")
    )
    assert limited.fills is None
    assert limited.parts["KV cache"] == 10 * 64


@pytest.mark.parametrize("is_tied", [False, True])
def test_of_pipeline_stages_the_largest_counts(question, is_tied):
    """A layer of 792 numbers each: the last has the norm (8) and the output layer (256), its own also where that is the embedding."""
    config = {**TINY_QWEN3, "tie_word_embeddings": is_tied}
    flags = "--rollout-num-gpus-per-engine=2", "--sglang-pp-size=2"
    (found,) = engine_memory(question(*flags, kind="cpu", config=config))
    assert found.parts == {"weights": 2 * (792 + 8 + 256), "KV cache": 32768 * 64 // 2}
    assert found.ranks == 2


def test_ranks_of_a_pipeline_stage_share_it(question):
    flags = "--rollout-num-gpus-per-engine=4", "--sglang-pp-size=2"
    (found,) = engine_memory(question(*flags, kind="cpu"))
    assert found.parts == {"weights": 792 + 8 + 256, "KV cache": 32768 * 64 // 4}


#: Published sizes.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "max_position_embeddings": 163840, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "norm_topk_prob": True, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize("n_ranks", [1, 8])
def test_every_rank_has_the_latents_of_latent_attention(question, n_ranks):
    """61 layers x (512 + 64) x 2 bytes = 70,272 a token."""
    (found,) = engine_memory(
        question(
            f"--rollout-num-gpus-per-engine={n_ranks}", "--sglang-max-total-tokens=1", config=DEEPSEEK_V3
        )
    )
    assert found.parts["KV cache"] == 70_272


def test_layers_with_a_delta_net_have_no_cache(question):
    """Layers 4 and 8 of 8, x 2 x 2 heads x 8 wide x 2 bytes = 128 a token; of two pipeline stages each has one."""
    flags = ("--sglang-max-total-tokens=1",)
    (found,) = engine_memory(question(*flags, config=QWEN3_NEXT))
    assert found.parts["KV cache"] == 128
    flags = (*flags, "--rollout-num-gpus-per-engine=2", "--sglang-pp-size=2")
    (found,) = engine_memory(question(*flags, config=QWEN3_NEXT))
    assert found.parts["KV cache"] == 64


@pytest.mark.parametrize(
    "flag", ["quantization=fp8", "kv-cache-dtype=fp8_e5m2", "cpu-offload-gb=4", "attn-dp-size=2"]
)
def test_of_weights_and_caches_of_other_sizes_nothing_is_predicted(question, flag):
    assert not engine_memory(question(f"--sglang-{flag}"))


@pytest.mark.parametrize(
    "more", [{"model_type": "gpt_neox"}, {"rope_scaling": {"rope_type": "dynamic"}}, {"hidden_act": "gelu"}]
)
def test_of_a_model_that_no_family_reads_nothing_is_predicted(question, more):
    """SGLang may serve it all the same, where nothing is trained."""
    assert not engine_memory(question("--train-backend", "none", config={**TINY_QWEN3, **more}))


def test_weights_on_disk_count_where_they_are_fewer_bytes(question, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (found,) = engine_memory(question())
    assert found.parts["weights"] == 1000
    (tmp_path / "model.safetensors").write_bytes(bytes(4 * 2104))  # float32, served in bfloat16
    (found,) = engine_memory(question())
    assert found.parts["weights"] == 2 * 2104


def test_ranks_of_an_engine_share_weights_and_heads(question):
    flags = (
        "--rollout-num-gpus",
        "8",
        "--rollout-num-gpus-per-engine",
        "2",
        "--sglang-max-total-tokens",
        "1000",
    )
    (found,) = engine_memory(question(*flags))
    assert found.ranks == 8
    assert found.parts["weights"] == 2104
    assert found.parts["KV cache"] == 32 * 64 // 2  # one head of keys and values each
    assert found.host == {"shared memory": 2 * 2104 // 8}  # a staged update, once for all


@pytest.mark.parametrize(
    ("flags", "is_staged"),
    [
        ((), True),
        (("disk",), False),
        (("disk", "--update-weight-mode", "delta"), True),
        (("nccl",), False),
        (("cuda-ipc",), False),
    ],
)
def test_what_is_staged_in_shared_memory_counts_there(question, flags, is_staged):
    transport = ("--update-weight-transport", *flags) if flags else ()
    (found,) = engine_memory(question(*transport, kind="cpu"))
    assert found.host == ({"shared memory": 2 * 2104} if is_staged else {})


def test_the_first_gpu_is_the_one_that_is_given(question):
    (found,) = engine_memory(question("--sglang-base-gpu-id", "4"))
    assert found.first_device == 4


def test_a_launcher_with_places_gives_servers_gpus_behind_those_of_all_ranks(question):
    ranks = "--launcher", "ray", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4"
    (apart,) = engine_memory(question(*ranks))
    (colocated,) = engine_memory(question(*ranks, "--colocate"))
    assert (apart.first_device, colocated.first_device) == (8, 0)
    assert [remedy.text for remedy in engine_remedies(question(*ranks))] == ["--colocate"]


def test_of_external_servers_and_unknown_models_nothing_is_known(question):
    assert not list(engine_memory(question("--rollout-external-engine-addrs", "h:1")))
    assert not list(engine_memory(question(config=TINY_QWEN3 | {"model_type": "of_nobody"})))


def test_smaller_shares_turns_and_other_gpus_are_proposed(question):
    def flags(*given):
        return [remedy.text for remedy in engine_remedies(question(*given))]

    assert flags() == ["--colocate", "--sglang-base-gpu-id 1"]
    assert flags("--sglang-base-gpu-id", "1") == ["--colocate"]
    assert flags("--loop", "one-step-off") == ["--sglang-base-gpu-id 1"]
    shares = [f"--sglang-mem-fraction-static {share}" for share in (0.4, 0.2)]
    assert flags("--colocate", "--sglang-mem-fraction-static", "0.5") == shares
