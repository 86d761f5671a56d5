"""`slime convert`: bit for bit in both directions, what Megatron itself reads and wrote, memory, and what is refused."""

from __future__ import annotations

import gc
import json
import re
import resource
import shutil
import sys

import pytest
import torch
from slime_core.cli.main import run
from slime_core.errors import CheckpointError
from slime_core.files.checksums import seal
from slime_core.plugins.registry import Registry
from slime_megatron.checkpoint.convert import to_hf, to_megatron
from slime_megatron.checkpoint.finding import find
from slime_megatron.settings.section_roles import LoraSection
from slime_models.family.families.qwen3 import QWEN3
from slime_models.hf.folder import HfCheckpoint
from slime_models.quantization.folder import quantize_folder
from slime_models.quantization.scheme import Quantization

from ..batches import make_batch
from ..comparison import sent
from ..tiny_models import DEEPSEEK, GLM

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
#: Of gpt-oss a folder has all experts' matrices as one tensor, which no file may be larger than.
STACKED = {
    "head_dim": 32,
    "intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def registry():
    return Registry.from_environment()


def equal(found, wanted):
    """Return whether two mappings have the same tensors, bit for bit."""
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"head_dim": 32}),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
        ("qwen3_moe", {"head_dim": 32} | EXPERTS),
        ("glm4_moe", {"head_dim": 32, "tie_word_embeddings": False} | GLM),
        ("glm4", {"head_dim": 32}),
        ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 80}),
        ("glm4", {"head_dim": 32, "tie_word_embeddings": False}),
        ("deepseek_v3", {"tie_word_embeddings": False} | DEEPSEEK),
        ("glm", {"head_dim": 32}),
        ("gpt_oss", STACKED),
        ("minimax_m2", STACKED),
    ],
)
def test_there_and_back_is_bit_for_bit_the_same(make_hf, registry, tmp_path, model_type, changes):
    _, folder = make_hf(model_type, dtype=torch.bfloat16, **changes)
    to_megatron(folder, tmp_path / "megatron", registry)
    found = find(tmp_path / "megatron")
    to_hf(
        found.weights, tmp_path / "hf", registry, config_from=tmp_path / "megatron/hf", max_file_bytes=40_000
    )
    wanted = HfCheckpoint(folder)
    assert ("lm_head.weight" in wanted) != changes.get("tie_word_embeddings", True)
    assert equal(HfCheckpoint(tmp_path / "hf"), wanted)
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3
    assert max(path.stat().st_size for path in files) < 45_000
    assert (tmp_path / "hf/config.json").read_text() == (folder / "config.json").read_text()


@pytest.mark.parametrize(
    "kind",
    [
        "deepseek_v3",
        "qwen3",
        "qwen3_moe",
        "glm4_moe",
        "glm4",
        "qwen2_moe",
        "gpt_oss",
        "minimax_m2",
        "qwen3_next",
    ],
)
def test_megatron_reads_what_was_converted(make_learner, cut_models, registry, tmp_path, kind):
    from megatron.core import dist_checkpointing, parallel_state

    to_megatron(cut_models[kind], tmp_path / "megatron", registry)
    model = make_learner(folder=cut_models[kind]).model
    wanted = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    model.load_state_dict(
        dist_checkpointing.load({"model": state}, str(tmp_path / "megatron/release"))["model"]
    )
    assert equal(dict(model.named_parameters()), wanted)


@pytest.mark.parametrize("lora", [None, LoraSection(rank=4, alpha=6.0)], ids=["", "adapters"])
def test_a_checkpoint_of_the_trainer_becomes_what_it_exports(make_learner, qwen3, registry, tmp_path, lora):
    learner = make_learner(lr=1e-2, settings={} if lora is None else {"lora": lora})
    for seed in range(2):
        learner.train(make_batch(seed=seed))
    learner.save(tmp_path)
    wanted = sent(learner)
    assert not equal(wanted, HfCheckpoint(qwen3[1]))
    to_hf(tmp_path, tmp_path / "hf", registry, config_from=qwen3[1], max_file_bytes=10**9)
    assert equal(HfCheckpoint(tmp_path / "hf"), wanted)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "glm4", "gpt_oss", "qwen3_5_text"])
def test_a_checkpoint_of_four_ranks_becomes_one_folder(ranks, cut_models, registry, tmp_path, kind):
    """Two tensor-parallel ranks have padded the odd vocabulary."""
    size = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "optimizer": "adam"}
    more = {"sequence_parallel": True, "expert_tensor_parallel_size": 1} if kind == "gpt_oss" else {}
    if kind == "qwen3_moe":
        more = {"sequence_parallel": True}
    saved = ranks.run(
        "save_and_go_on",
        4,
        folder=cut_models[kind],
        checkpoint=tmp_path,
        batches=[make_batch(seed=seed) for seed in range(2)],
        megatron=size | more,
        moments=False,
    )[0]
    to_hf(tmp_path, tmp_path / "hf", registry, config_from=cut_models[kind], max_file_bytes=10**9)
    assert equal(HfCheckpoint(tmp_path / "hf"), saved["weights"])


def test_each_matrix_of_a_quantised_folder_is_dequantised_once(make_hf, registry, tmp_path, monkeypatch):
    _, folder = make_hf("qwen3", tie_word_embeddings=False)
    quantized = tmp_path / "quantized"
    n_quantized = quantize_folder(
        folder, quantized, QWEN3, method="fp8-block", group_size=32, max_file_bytes=10**9
    )
    asked, dequantized = [], Quantization.dequantized
    monkeypatch.setattr(
        Quantization, "dequantized", lambda *args: asked.append(args[1]) or dequantized(*args)
    )
    to_megatron(quantized, tmp_path / "megatron", registry)
    assert len(asked) == len(set(asked)) == n_quantized


@pytest.mark.parametrize("cuda", [False, True])
def test_memory_holds_a_tensor_or_a_file_and_never_the_model(make_hf, registry, tmp_path, monkeypatch, cuda):
    if cuda:  # where torch writes tensors in another way
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    _, folder = make_hf("llama", tie_word_embeddings=False, num_hidden_layers=12)
    largest = max(
        tensor.nbytes for tensor in HfCheckpoint(folder).values()
    )  # the first of an MLP holds two of them
    gc.collect()
    gc.freeze()  # from now on `get_objects` returns only what is made
    most = []

    def measure(done, total):
        found = {
            tensor.data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in gc.get_objects()
            if torch.is_tensor(tensor)
        }
        most.append(sum(found.values()))

    to_megatron(folder, tmp_path / "megatron", registry, progress=measure)
    assert max(most) <= 4 * largest
    most.clear()
    source = find(tmp_path / "megatron").weights
    size = 200_000
    to_hf(source, tmp_path / "hf", registry, config_from=folder, max_file_bytes=size, progress=measure)
    assert max(most) <= size + 4 * largest
    assert sum(tensor.nbytes for tensor in HfCheckpoint(folder).values()) > 2 * (size + 4 * largest)


def test_a_path_may_be_a_run_a_checkpoint_or_a_folder_of_megatron(tmp_path):
    step = tmp_path / "run/checkpoints/step_000004"
    (step / "trainer").mkdir(parents=True)
    (step / "trainer/trainer.json").write_text("{}")
    (step / "state.json").write_text("{}")
    seal(step, 4)
    (tmp_path / "run/config.toml").write_text('[model]\nhf_checkpoint = "smollm2-135m"\n')
    for path in (tmp_path / "run", step, step / "trainer"):
        found = find(path)
        assert (found.weights, found.model) == (step / "trainer", "smollm2-135m")
    (tmp_path / "pretrained").mkdir()
    (tmp_path / "pretrained/latest_checkpointed_iteration.txt").write_text("120\n")
    found = find(tmp_path / "pretrained")
    assert (found.weights, found.model) == (tmp_path / "pretrained/iter_0000120", None)
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="the run has no checkpoint yet"):
        find(tmp_path / "empty")


@pytest.fixture
def own_family(qwen3, tmp_path, monkeypatch):
    """Return a folder of a model_type that no installed family has, and the name of one of somebody's own that reads it."""
    (tmp_path / "my_family.py").write_text(
        "from dataclasses import replace\n"
        "from slime_models.family.families.qwen3 import QWEN3\n"
        "def architecture(config):\n"
        "    return QWEN3.architecture({**config, 'model_type': 'qwen3'})\n"
        "FAMILY = replace(QWEN3, model_type='my_qwen3', architecture=architecture)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = tmp_path / "own"
    shutil.copytree(qwen3[1], own)
    config = json.loads((own / "config.json").read_text()) | {"model_type": "my_qwen3"}
    (own / "config.json").write_text(json.dumps(config))
    yield own, "my_family:FAMILY"
    sys.modules.pop("my_family", None)


def test_a_run_whose_family_was_named_is_converted_by_it(make_learner, own_family, tmp_path):
    own, name = own_family
    step = tmp_path / "run/checkpoints/step_000004"
    make_learner().save(step / "trainer")
    (step / "state.json").write_text("{}")
    seal(step, 4)
    (tmp_path / "run/config.toml").write_text(f'[model]\nhf_checkpoint = "{own}"\nmodel_name = "{name}"\n')
    assert run(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    assert equal(HfCheckpoint(tmp_path / "hf"), HfCheckpoint(own))
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "my_qwen3"


def test_a_family_is_named_to_the_command(own_family, tmp_path, capsys):
    (own, name), megatron, back, few = own_family, tmp_path / "megatron", tmp_path / "back", tmp_path / "few"
    assert run(["convert", "to-megatron", str(own), str(megatron)]) == 2
    assert "model_type: found 'my_qwen3'" in capsys.readouterr().err
    named = ["--model-name", name]
    assert run(["convert", "to-megatron", str(own), str(megatron), *named]) == 0
    assert run(["convert", "to-hf", str(megatron), str(back), *named]) == 0
    assert equal(HfCheckpoint(back), HfCheckpoint(own))
    assert (
        run(["convert", "quantize", str(own), str(few), "--format", "int4", "--group-size", "16", *named])
        == 0
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 5e5},
            r"rope_theta is 10000\.0, .* is 500000\.0",
        ),
        ("rms_norm_eps", 1e-3, r"norm_epsilon is 1e-06, .* is 0\.001"),
        ("num_attention_heads", 8, r"num_attention_heads is 4, .* is 8"),
        ("vocab_size", 300, r"vocab_size is 250, .* is 300"),
        ("tie_word_embeddings", False, r"tie_word_embeddings is True, .* is False"),
    ],
)
def test_a_config_of_another_model_is_refused_by_its_field(
    make_learner, qwen3, registry, tmp_path, field, value, message
):
    make_learner().save(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((qwen3[1] / "config.json").read_text()) | {field: value}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=f"checkpoint: architecture.{message}; give the folder of the model"
    ):
        to_hf(tmp_path, tmp_path / "hf", registry, config_from=other, max_file_bytes=10**9)
    (tmp_path / "trainer.json").unlink()  # then shapes alone can tell
    if field in ("vocab_size", "num_attention_heads"):
        with pytest.raises(CheckpointError, match=r"has shape .*; wanted .*, by config.json"):
            to_hf(tmp_path, tmp_path / "hf", registry, config_from=other, max_file_bytes=10**9)
    assert not (tmp_path / "hf").exists()


def test_what_cannot_be_read_leaves_nothing_behind(qwen3, tmp_path, capsys):
    target = tmp_path / "out"
    assert run(["convert", "to-hf", str(tmp_path / "nowhere"), str(target)]) == 2
    assert "no checkpoint; wanted a run's folder" in capsys.readouterr().err
    megatron = tmp_path / "megatron"
    assert run(["convert", "to-megatron", str(qwen3[1]), str(megatron)]) == 0
    assert capsys.readouterr().out == f"{megatron}\n"
    assert run(["convert", "to-megatron", str(qwen3[1]), str(megatron)]) == 2
    assert "exists; wanted a new folder" in capsys.readouterr().err
    assert run(["convert", "to-hf", str(megatron / "release"), str(target)]) == 2
    assert "--config-from FOLDER" in capsys.readouterr().err
    (data,) = (megatron / "release").glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    assert run(["convert", "to-hf", str(megatron), str(target)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"megatron"}


@pytest.mark.parametrize("direction", ["to-megatron", "to-hf"])
def test_a_full_disk_leaves_nothing_behind(qwen3, registry, tmp_path, capsys, direction):
    """No file may be larger than 50 kB, as if there were no more room."""
    source, target = qwen3[1], tmp_path / "out"
    if direction == "to-hf":
        to_megatron(qwen3[1], tmp_path / "megatron", registry)
        source = tmp_path / "megatron"
    before = set(tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        status = run(["convert", direction, str(source), str(target)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2
    assert "cannot be written" in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == before


def test_a_command_of_a_plugin_is_in_the_help_and_suggested(capsys):
    assert run(["--help"]) == 0
    assert re.search(r"\n  convert +from slime-megatron\n", capsys.readouterr().out)
    assert run(["convrt"]) == 2
    assert "did you mean 'convert'?" in capsys.readouterr().err


def test_a_folder_is_quantised_for_servers(make_hf, tmp_path, capsys):
    _, folder = make_hf("llama", dtype=torch.bfloat16)
    command = ["convert", "quantize", str(folder), str(tmp_path / "few"), "--format"]
    assert run([*command, "int4", "--group-size", "16", "--ignore", "self_attn"]) == 0
    tensors = HfCheckpoint(tmp_path / "few")
    assert tensors["model.layers.0.mlp.down_proj.weight_packed"].dtype == torch.int32
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert f"{3 * 3} tensors in int4; " in capsys.readouterr().out
    assert run([*command, "int4"]) == 2
    assert "few: exists; wanted a new folder" in capsys.readouterr().err
