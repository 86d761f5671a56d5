"""The `Trainer` protocol: starting from settings, training beside a live event loop, sending weights."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from safetensors.torch import load_file
from slime_core.config.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.config.sections import TrainSection
from slime_core.errors import PluginError, TrainerError
from slime_core.plugins.registry import Registry
from slime_core.protocols import Trainer, TransferPlan
from slime_core.weights.sync import MemoryChannel
from slime_megatron.settings.learner_settings import LearnerSettings
from slime_megatron.settings.section import MegatronSection
from slime_megatron.trainer import MegatronTrainer, create_trainer
from slime_models.family.families.qwen3 import QWEN3
from slime_models.hf.folder import HfCheckpoint
from slime_models.transfer.fingerprint import fingerprint
from slime_models.transfer.transports.disk import DiskChannel

from .algorithms import policy_gradient
from .batches import make_batch


def make_trainer(folder, *needs, close_s=10.0, algorithm=None, **megatron):
    return MegatronTrainer(
        LearnerSettings(
            model_path=folder,
            family=QWEN3,
            train=TrainSection(bf16=False, lr=1e-3),
            megatron=MegatronSection(**megatron),
            algorithm=algorithm or policy_gradient(*needs),
            seed=1,
        ),
        registry=Registry(),
        close_s=close_s,
    )


async def receive(plan):
    """Play the engine: copy the buckets to the host, and return tensors and number of buckets."""
    held, n_buckets = {}, 0
    async for bucket in plan.channel.buckets():
        n_buckets += 1
        held |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket}
    return held, n_buckets


def test_sent_weights_are_the_folders_in_the_plans_dtype(qwen3):
    async def main():
        trainer = make_trainer(qwen3[1], update_weight_buffer_size=100_000)
        assert isinstance(trainer, Trainer)
        await trainer.start()
        plan = TransferPlan(transport="memory", version="1", dtype="bfloat16", channel=MemoryChannel())
        sent, (held, n_buckets) = await asyncio.gather(trainer.send(plan), receive(plan))
        await trainer.close()
        return sent, held, n_buckets

    sent, held, n_buckets = asyncio.run(main())
    original = HfCheckpoint(qwen3[1])
    assert n_buckets > 2
    assert held.keys() == sent.keys() == set(original)
    assert all(torch.equal(held[name], original[name].bfloat16()) for name in original)
    assert all(fingerprint(held[name]) == sent[name] for name in sent)


def test_closing_waits_for_a_call_that_hangs_no_longer_than_it_is_told(qwen3, caplog):
    async def main():
        trainer, event = make_trainer(qwen3[1], close_s=0.2), threading.Event()
        await trainer.start()
        learner, thread = trainer._learner, trainer._thread
        thread.submit(event.wait)
        async with asyncio.timeout(100):
            await trainer.close()
            await trainer.close()
        event.set()
        thread.shutdown()
        learner.close()  # the process groups, for the tests that follow

    asyncio.run(main())
    assert "the trainer's thread still computes after 0.2 s" in caplog.text


def test_a_folder_that_the_trainer_sends_is_the_one_it_started_from(qwen3, tmp_path):
    async def main():
        trainer = make_trainer(qwen3[1], update_weight_buffer_size=100_000)
        await trainer.start()
        channel = DiskChannel(folder=tmp_path / "sent", config_from=qwen3[1])
        sent = await trainer.send(
            TransferPlan(transport="disk", version="1", dtype="bfloat16", channel=channel)
        )
        await trainer.close()
        return sent

    sent = asyncio.run(main())
    original, arrived = HfCheckpoint(qwen3[1]), HfCheckpoint(tmp_path / "sent")
    assert sent.keys() == set(original) == set(arrived)
    assert all(torch.equal(arrived[name], original[name].bfloat16()) for name in original)


def test_the_event_loop_runs_while_the_trainer_trains_and_training_changes_what_is_sent(qwen3, tmp_path):
    async def main():
        trainer = make_trainer(qwen3[1])
        await trainer.start()
        turns = 0

        async def turn():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def prints():
            plan = TransferPlan(transport="memory", version="1", dtype="float32", channel=MemoryChannel())
            return (await asyncio.gather(trainer.send(plan), receive(plan)))[0]

        before = await prints()
        turning = asyncio.create_task(turn())
        metrics = await trainer.train(make_batch())
        turning.cancel()
        after = await prints()
        await trainer.save(tmp_path / "new" / "folder")
        await trainer.train(make_batch(seed=1))
        assert await prints() != after
        await trainer.load(tmp_path / "new" / "folder")
        assert await prints() == after
        await trainer.offload()
        await trainer.onload()
        assert await prints() == after
        await trainer.close()
        await trainer.close()
        return metrics, before, after, turns

    metrics, before, after, turns = asyncio.run(main())
    assert turns > 10
    assert all(before[name] != after[name] for name in before)
    assert {
        "train/loss",
        "train/pg_loss",
        "train/lr",
        "train/grad_norm",
        "train/skipped_steps",
    } <= metrics.keys()
    assert metrics["perf/train_tokens"] == 97
    assert 0 <= metrics["perf/padding_frac"] < 0.25


def test_phases_of_training_are_within_one_another(qwen3):
    """Two optimizer steps of three samples; the first pass is for old log-probs, as there are two steps."""

    async def main():
        trainer = make_trainer(qwen3[1])
        await trainer.start()
        for _ in range(2):  # those of the call before are forgotten
            metrics, phases = await trainer.train(make_batch(n_steps=2)), await trainer.phases()
        await trainer.close()
        return metrics, phases

    metrics, phases = asyncio.run(main())
    assert MegatronTrainer.capabilities.phases
    assert [phase.name for phase in phases if phase.name != "micro_batch"] == [
        "log_probs", *["forward_backward", "optimizer_update", "optimizer_step"] * 2,
    ]  # fmt: skip
    of = {name: [phase for phase in phases if phase.name == name] for name in {p.name for p in phases}}
    assert metrics["perf/log_probs_time"] == of["log_probs"][0].seconds
    inside = {"micro_batch": ("log_probs", "forward_backward"), "forward_backward": ("optimizer_step",)}
    for inner, outer in inside.items():
        holding = [phase for name in outer for phase in of[name]]
        for phase in of[inner]:
            assert any(
                one.begin <= phase.begin and phase.begin + phase.seconds <= one.begin + one.seconds + 1e-9
                for one in holding
            )
    assert len(of["micro_batch"]) == 4  # one of each optimizer step, with and without gradients
    assert all(phase.rank == 0 for phase in phases)


def test_what_the_trainer_cannot_fill_is_refused_before_it_starts(qwen3):
    with pytest.raises(
        TrainerError, match="need routing, taste, which the trainer megatron does not compute"
    ):
        make_trainer(qwen3[1], "entropy", "taste", "routing")


def test_a_trainer_that_is_not_started_says_so(qwen3):
    with pytest.raises(TrainerError, match=r"not started; call start\(\) first"):
        asyncio.run(make_trainer(qwen3[1]).train(make_batch()))


def build_of(folder, tmp_path, *flags):
    registry = Registry()
    settings = load_settings(
        [],
        [
            "--hf-checkpoint",
            str(folder),
            "--rollout-batch-size",
            "2",
            "--rollout-max-response-len",
            "8",
            *flags,
        ],
        registry=registry,
    )
    return BuildContext(
        settings=settings, registry=registry, load_tokenizer=lambda: None, model_path=folder, run_dir=tmp_path
    )


def test_the_factory_builds_a_trainer_from_settings(qwen3, tmp_path):
    async def main():
        trainer = create_trainer(build_of(qwen3[1], tmp_path, "--no-bf16", "--num-rollout", "3"))
        await trainer.start()
        metrics = await trainer.train(make_batch())
        await trainer.close()
        return metrics

    metrics = asyncio.run(main())
    assert metrics["train/lr"] == 1e-6
    assert "train/pg_clipfrac" in metrics


def test_the_policys_rate_decays_over_the_steps_that_it_takes(qwen3, tmp_path):
    """Of five rollouts the critic has two for itself."""

    def settings(*flags):
        flags = ("--num-rollout", "5", "--num-critic-only-steps", "2", *flags)
        return create_trainer(build_of(qwen3[1], tmp_path, *flags))._settings

    found = settings("--advantage-estimator", "ppo")
    assert (found.total_steps, found.critic_total_steps) == (3, 5)
    assert settings("--advantage-estimator", "grpo").total_steps == 5


def test_an_unsupported_model_type_is_refused_by_name(make_hf, tmp_path):
    _, folder = make_hf("gpt_neox")
    with pytest.raises(PluginError, match=r"no plugin is named 'gpt_neox'; did you mean 'gpt_oss'\?"):
        create_trainer(build_of(folder, tmp_path))


@pytest.mark.parametrize(
    ("flags", "bytes_a_weight"),
    [
        ([], 2 + 4 + 8),  # bfloat16, float32 master, two moments
        (["--no-bf16"], 4 + 8),
        (["--optimizer", "sgd"], 2 + 4 + 4),
        (["--optimizer", "sgd", "--sgd-momentum", "0"], 2 + 4),
        (["--lora-rank", "4"], 2),
        (["--advantage-estimator", "ppo"], 2 * (2 + 4 + 8)),  # policy and critic
    ],
)
def test_the_size_of_a_checkpoint_is_estimated_by_weight(qwen3, tmp_path, flags, bytes_a_weight):
    n_weights = sum(tensor.numel() for tensor in load_file(qwen3[1] / "model.safetensors").values())
    assert create_trainer.checkpoint_bytes(build_of(qwen3[1], tmp_path, *flags)) == n_weights * bytes_a_weight


def test_no_size_is_estimated_of_a_model_without_safetensors(tmp_path):
    assert create_trainer.checkpoint_bytes(build_of(tmp_path, tmp_path)) is None
