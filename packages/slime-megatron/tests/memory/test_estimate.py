"""What the trainer predicts of a run: beside a real learner's tensors, and by its settings."""

from __future__ import annotations

import pytest
from slime_core.protocols.memory import Device
from slime_core.testing.memory import TINY_QWEN3, memory_question, write_config
from slime_megatron.memory.estimate import (
    ACTIVATIONS,
    CONTEXT,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    WORKING,
    RankSettings,
    static_parts,
    trainer_memory,
)
from slime_megatron.memory.layout import Layout
from slime_megatron.memory.parameters import parameters_of_stages
from slime_megatron.memory.remedies import trainer_remedies
from slime_megatron.settings.derive import shares_optimizer
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection
from slime_models.hf.config import read_config

from ..algorithms import policy_gradient
from ..batches import make_batch
from ..held_bytes import bytes_of, weight_bytes
from ..layouts import DENSE, LAYOUTS, PIPELINE, SEQUENCE, TENSOR, settings_of
from ..tiny_models import FAMILIES
from .test_parameters import EXPERTS

GPU = Device(kind="cuda", memory_bytes=80 * 2**30)


@pytest.fixture
def question(tmp_path):
    """Return a function that asks of a run with a folder that has a config.json alone."""

    def ask(*flags, config=TINY_QWEN3, folder=None, device=GPU, prompt=8):
        folder = folder or write_config(tmp_path, config)
        return memory_question(folder, *flags, device=device, prompt_tokens=prompt)

    return ask


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3", "qwen3_moe", "glm4_moe", "glm4", "qwen2_moe"])
@pytest.mark.parametrize("bf16", [True, False])
def test_weights_gradients_and_optimizer_are_those_of_a_real_learner(
    question, make_learner, cut_models, model, bf16
):
    learner = make_learner(folder=cut_models[model], bf16=bf16)
    learner.train(make_batch())
    (found,) = trainer_memory(question(*([] if bf16 else ["--no-bf16"]), folder=cut_models[model]))
    assert tuple(found.parts[name] for name in (WEIGHTS, GRADIENTS, OPTIMIZER)) == bytes_of(learner)


ADAM = {"optimizer": "adam"}
MORE = {
    "TP2+LoRA": (2, TENSOR, LoraSection(rank=4)),
    "DP2+LoRA": (2, {}, LoraSection(rank=4)),
    "PP2+frozen": (2, PIPELINE | {"freeze_params_name_list": ["embedding", r"layers\.1\.mlp"]}, None),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bf16"),
    [
        pytest.param(
            kind,
            bf16,
            marks=[pytest.mark.faults] * ((kind, bf16) != ("qwen3", False)),
        )
        for kind in ("deepseek_v3", "qwen3", "qwen3_moe", "glm4_moe", "glm4")
        for bf16 in (True, False)
    ],
)
def test_every_rank_of_every_layout_holds_what_is_predicted(ranks, cut_models, kind, bf16):
    found = {}
    for layout in [*LAYOUTS, *MORE]:
        if layout in MORE:
            n, megatron, lora = MORE[layout]
            if kind not in DENSE and megatron == TENSOR:  # adapters within experts are not cut
                megatron = megatron | SEQUENCE | {"expert_tensor_parallel_size": 1}
        elif (settings := settings_of(kind, layout)) is None:
            continue
        else:
            n, megatron, lora = *settings, None
        section = MegatronSection(**ADAM | megatron)
        train = {"max_tokens_per_gpu": 40, "bf16": bf16}
        held = ranks.run(
            "held_bytes", n, folder=cut_models[kind], batch=make_batch(), megatron=ADAM | megatron, train=train, lora=lora
        )  # fmt: skip
        sizes, family = Layout.of(section, n), FAMILIES[kind]
        architecture = family.architecture(read_config(cut_models[kind])).with_padded_vocab(sizes.tensor)
        stages = parameters_of_stages(family, architecture, section, lora or LoraSection(), sizes)
        shares = shares_optimizer(section, n)
        rank = RankSettings(dtype_bytes=2 if bf16 else 4, shared_optimizer=shares)
        for number, real in enumerate(held):
            parts = static_parts(stages[number * sizes.pipeline // n], rank, sizes)
            wanted = tuple(parts[name] for name in (WEIGHTS, GRADIENTS, OPTIMIZER))
            # A distributed optimizer pads its buffers so that ranks have equal shares, by a few hundred numbers.
            slack = 8192 if shares else 0
            if any(abs(a - b) > slack for a, b in zip(real, wanted, strict=True)):
                found[f"{layout}, rank {number}"] = (real, wanted)
    assert not found


@pytest.mark.parametrize(
    "flags",
    [
        ("--use-precision-aware-optimizer",),
        ("--optimizer-cpu-offload",),
        ("--fp8-format", "e4m3"),
        ("--pipeline-model-parallel-layout", "Et|tL"),
        ("--decoder-first-pipeline-num-layers", "1"),
    ],
    ids=lambda flags: flags[0],
)
def test_nothing_is_predicted_where_megatrons_own_flags_change_sizes(question, flags):
    assert trainer_memory(question(*flags)) == []


def test_layers_that_are_recomputed_in_groups_are_reckoned_with(question):
    """Of the two layers; what Megatron's parser refuses is for it to tell."""
    full = "--recompute-granularity", "full"

    def kept(*more):
        (found,) = trainer_memory(question(*full, *more))
        return found.parts[ACTIVATIONS]

    assert kept("--recompute-num-layers", "2") < kept() < kept("--recompute-method", "block")
    assert kept() == kept("--recompute-num-layers", "1") == kept("--recompute-num-layers", "none")


def test_stages_that_take_as_much_are_one_entry(question):
    """Four layers on four stages: the two in the midst have a layer each, but hold 3 and 2 micro-batches."""
    flags = ("--launcher", "ray", "--actor-num-gpus-per-node", "8", "--pipeline-model-parallel-size", "4")
    found = trainer_memory(question(*flags, config=TINY_QWEN3 | {"num_hidden_layers": 4}))
    assert [(each.who, each.ranks) for each in found] == [
        (f"trainer, pipeline stage {stage}", 2) for stage in range(4)
    ]
    middle = [each.parts[ACTIVATIONS] for each in found[1:3]]
    assert middle[0] * 2 == middle[1] * 3


def test_a_reference_and_a_critic_are_reckoned_with(question):
    (plain,) = trainer_memory(question())
    assert plain.host == {}
    (found,) = trainer_memory(question("--use-kl-loss"))
    assert found.host == {"reference": 2 * 2104}
    (ppo,) = trainer_memory(question("--advantage-estimator", "ppo"))
    trunk = 2104 - 256  # its head stands where the output layer was, and is not reckoned with
    assert {name: ppo.parts[name] - plain.parts[name] for name in (WEIGHTS, GRADIENTS, OPTIMIZER)} == {
        WEIGHTS: 2 * trunk,
        GRADIENTS: 4 * trunk,
        OPTIMIZER: 12 * trunk,
    }


def test_a_critic_with_ranks_of_its_own_leaves_the_policy_as_it_is_without_one(question):
    ppo = ("--advantage-estimator", "ppo", "--launcher", "ray", "--actor-num-gpus-per-node", "4")
    (plain,) = trainer_memory(question(*ppo[2:]))
    policy, critic = trainer_memory(question(*ppo, "--critic-num-gpus-per-node", "2"))
    assert policy == plain
    assert (critic.who, critic.ranks) == ("critic", 2)
    trunk = 2104 - 256  # its head, and what is kept for it, is not reckoned with but for a column of logits
    assert critic.parts[WEIGHTS] == 2 * trunk
    assert critic.parts[GRADIENTS] == 4 * trunk
    assert critic.parts[OPTIMIZER] == 12 * trunk / 2  # shared by its two ranks
    (on_two,) = trainer_memory(question(*ppo[2:5], "2"))
    assert critic.parts[ACTIVATIONS] == on_two.parts[ACTIVATIONS]
    assert critic.parts[WORKING] < on_two.parts[WORKING]
    (among,) = trainer_memory(question(*ppo))
    apart = "--launcher ray --critic-num-gpus-per-node 4"
    assert apart in [remedy.text for remedy in trainer_remedies(question(*ppo))]
    assert among.total > policy.total


def test_frozen_models_with_ranks_of_their_own_have_weights_alone(question):
    on_four = ("--launcher", "ray", "--actor-num-gpus-per-node", "4")
    both = ("--use-kl-loss", "--use-opd", "--opd-teacher-load", "teacher")
    (plain,) = trainer_memory(question(*on_four, "--use-opd"))
    policy, ref = trainer_memory(question(*on_four, *both, "--ref-num-gpus-per-node", "2"))
    assert policy == plain
    (among,) = trainer_memory(question(*on_four, *both))
    assert among.host == {"reference": 2 * 2104, "teacher": 2 * 2104}
    assert (ref.who, ref.ranks, ref.host) == ("ref", 2, {})
    assert ref.parts.keys() == {WEIGHTS, WORKING, CONTEXT}
    assert ref.parts[WEIGHTS] == 2 * 2 * 2104
    assert 0 < ref.parts[WORKING] < policy.parts[ACTIVATIONS] + policy.parts[WORKING]
    assert ref.resting == ref.parts[WEIGHTS] + ref.parts[CONTEXT]


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3", "qwen3_moe"])
def test_weights_of_a_reference_of_its_own_are_those_that_are_predicted(
    question, make_learner, cut_models, model
):
    algorithm, apart = policy_gradient("ref_log_probs"), {"apart": frozenset({"ref"})}
    learner = make_learner(algorithm, folder=cut_models[model], bf16=True, settings=apart, role="ref")
    flags = ("--use-kl-loss", "--launcher", "ray", "--ref-num-gpus-per-node", "1")
    _, found = trainer_memory(question(*flags, folder=cut_models[model]))
    assert found.parts[WEIGHTS] == weight_bytes(learner._models["ref"])


def test_what_is_offloaded_and_copied_is_in_the_hosts_memory(question):
    (found,) = trainer_memory(question("--colocate", "--async-save", "--save-interval", "1"))
    host = {"copy for saving": (2 + 12) * 2104, "offloaded optimizer": 12 * 2104}
    assert found.host == host | {"offloaded weights": 2 * 2104}
    assert found.offloaded == found.parts[CONTEXT]
    assert found.updating == found.parts[WEIGHTS] + found.parts[CONTEXT]


def test_nothing_is_predicted_under_flags_of_megatron_that_change_sizes(question):
    assert trainer_memory(question("--moe-aux-loss-coeff", "0.1"))
    assert not trainer_memory(question("--optimizer-cpu-offload"))


@pytest.mark.parametrize("native", [True, False])
def test_samples_are_attended_to_in_float32_on_a_cpu_where_they_are_short_or_it_is_slow_in_bfloat16(
    question, native, monkeypatch
):
    """4 bytes in the place of 2 for each of q, k, v and output, and a copy of the output; the fused projection is not kept."""
    monkeypatch.setattr("slime_models.cpu.attends_in_bfloat16", lambda: native)
    cpu = Device(kind="cpu")
    lengths = ("--max-tokens-per-gpu", "1024", "--rollout-max-response-len")
    short, long = (
        trainer_memory(question(*lengths, str(length), device=cpu, prompt=24))[0].parts[ACTIVATIONS]
        for length in (488 - 1, 488)
    )
    # 511 x 2 tokens fill no more than 1,022 of 1,024.
    assert (short == long) == (not native)


@pytest.mark.parametrize(("flags", "is_more"), [((), True), (("--no-bf16",), False)])
def test_a_cpu_that_has_no_products_of_bfloat16_works_with_float32_copies(
    question, flags, is_more, monkeypatch
):
    def working(native):
        monkeypatch.setattr("slime_models.cpu.multiplies_bfloat16", lambda: native)
        wide = TINY_QWEN3 | {"vocab_size": 4096}
        return trainer_memory(question(*flags, config=wide, device=Device(kind="cpu")))[0].parts[WORKING]

    assert (working(native=False) > working(native=True)) == is_more


def test_remedies_are_those_that_model_and_ranks_allow(question):
    def flags(*given, **asked):
        return [remedy.text for remedy in trainer_remedies(question(*given, **asked))]

    one = flags("--max-tokens-per-gpu", "1100")
    assert one == [
        "--log-probs-chunk-size 1024",
        "--recompute-granularity full",
        "--max-tokens-per-gpu 550",
        "--max-tokens-per-gpu 275",
        "--launcher ray --actor-num-gpus-per-node 2",
    ]
    ray = ("--launcher", "ray", "--actor-num-gpus-per-node", "8", "--max-tokens-per-gpu", "256")
    assert flags(*ray, "--no-use-distributed-optimizer") == [
        "--use-distributed-optimizer",
        *flags(*ray),
    ]
    assert flags(*ray) == [
        "--log-probs-chunk-size 1024",
        "--recompute-granularity full",
        "--pipeline-model-parallel-size 2",  # of two layers
        "--tensor-model-parallel-size 2 --sequence-parallel",  # of two query groups
        "--launcher ray --actor-num-gpus-per-node 16",
    ]
    assert "--expert-model-parallel-size 2" in flags(*ray, config=EXPERTS)


def test_parallel_sizes_and_a_shared_optimizer_take_less_where_weights_are_most(question):
    """A billion numbers, of which half are of experts, on 8 ranks."""
    large = EXPERTS | {
        "vocab_size": 2**16,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "moe_intermediate_size": 4096,
    }
    ray = ("--launcher", "ray", "--actor-num-gpus-per-node", "8", "--max-tokens-per-gpu", "64")
    whole = "--no-use-distributed-optimizer"

    def highest(*flags):
        return max(each.total for each in trainer_memory(question(*ray, *flags, config=large)))

    before = highest(whole)
    assert highest() == highest("--use-distributed-optimizer")
    for flags in (
        ["--use-distributed-optimizer"],
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["--pipeline-model-parallel-size", "2"],
        ["--expert-model-parallel-size", "2"],
    ):
        assert highest(*flags) < 0.85 * before, flags
        assert flags == ["--use-distributed-optimizer"] or highest(whole, *flags) < 0.85 * before, flags
