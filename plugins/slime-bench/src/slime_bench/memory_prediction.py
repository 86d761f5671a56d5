"""`slime bench memory`: the peak memory that is predicted of a trainer's ranks beside what their processes really take, on a CPU."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from slime_core.runtime.processes.ports import ReservedPort

#: What `mallopt` calls the size from which the C library maps memory, and gives it back at once when it is freed.
_M_MMAP_THRESHOLD, _MAPPED_FROM = -3, 2**16
#: Has oneDNN, PyTorch's cache of its products, and MKL keep nothing: kernels for each number of rows otherwise stay, some 50 MiB
#: a step where experts get other numbers of rows each time.
_FORGETFUL = {
    "LRU_CACHE_CAPACITY": "1",
    "MKL_DISABLE_FAST_MM": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
}
_MIB = 2**20
_NOTES = """\
predicted: the sum of slime plan --memory for a rank. measured: the most of the resident set (VmHWM) in two steps of
the trainer, over what the process had after its imports and a step of a model of 0.2 million parameters.
Each rank is a process of its own, with one thread. So that the resident set is what tensors take, the C
library maps each 64 KiB or more by itself, and oneDNN keeps no compiled products; by default both keep
memory for later: --keep shows how much."""

_DENSE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}
_LLAMA = _DENSE | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "tie_word_embeddings": False,
}
_EXPERTS = _DENSE | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_TINY = _DENSE | {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}


@dataclass(frozen=True, kw_only=True)
class TrainerRun:
    """A run of the trainer."""

    name: str
    config: dict[str, Any]
    """config.json of a model with random weights."""
    flags: tuple[str, ...] = ()
    """Of the run."""
    ranks: int = 1
    """Processes."""
    samples: int = 9
    """Of the optimizer step; they nearly fill three micro-batches of each replica."""
    length: int = 680
    """Tokens of the longest sample; the shortest has nine tenths of them."""
    prompt: int = 64
    """Tokens of each prompt."""
    micro_batch: int = 2048
    """`max_tokens_per_gpu`."""


_TWO = ("--actor-num-gpus-per-node", "2")
CASES = (
    TrainerRun(name="qwen3, tied", config=_DENSE),
    TrainerRun(name="qwen3, recomputed", config=_DENSE, flags=("--recompute-granularity", "full")),
    TrainerRun(name="qwen3, float32", config=_DENSE, flags=("--no-bf16",)),
    TrainerRun(name="llama, short samples", config=_LLAMA, samples=48, length=128, prompt=32),
    TrainerRun(name="llama, logits by 512", config=_LLAMA, flags=("--log-probs-chunk-size", "512")),
    TrainerRun(name="qwen3_moe, 8 experts", config=_EXPERTS),
    TrainerRun(
        name="qwen3, TP 2, sequence parallel",
        config=_DENSE,
        ranks=2,
        flags=("--tensor-model-parallel-size", "2", "--sequence-parallel", *_TWO),
    ),
    TrainerRun(
        name="qwen3, PP 2", config=_DENSE, ranks=2, flags=("--pipeline-model-parallel-size", "2", *_TWO)
    ),
    TrainerRun(
        name="llama, DP 2, distributed optimizer",
        config=_LLAMA,
        ranks=2,
        samples=18,
        flags=_TWO,
    ),
)


def memory(argv: list[str]) -> int:
    """Run the trainer over models of several shapes and layouts, and compare its peak memory with what is predicted."""
    parser = argparse.ArgumentParser(prog="slime bench memory", description=memory.__doc__, epilog=_NOTES)
    parser.add_argument("--case", action="append", help=f"of {', '.join(case.name for case in CASES)}; all")
    parser.add_argument("--keep", action="store_true", help="let C library and oneDNN keep memory")
    parser.add_argument("--json", type=Path, help="write all figures here, too")
    options = parser.parse_args(argv)
    rows = []
    for number, case in enumerate(CASES):
        if options.case and case.name not in options.case:
            continue
        for rank, found in enumerate(_measured(number, case, keep=options.keep)):
            row = {"case": case.name, "rank": rank, **found}
            rows.append(row)
            print(_line(row), flush=True)
    print(f"\n{_NOTES}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def _line(row: dict[str, Any]) -> str:
    predicted, measured = sum(row["parts"].values()), row["measured"]
    parts = ", ".join(f"{name} {size / _MIB:.0f}" for name, size in row["parts"].items())
    return (
        f"{row['case']}, rank {row['rank']}: predicted {predicted / _MIB:.0f} MiB, measured {measured / _MIB:.0f} "
        f"({predicted / measured - 1:+.1%}); {parts}"
    )


def _measured(number: int, case: TrainerRun, *, keep: bool) -> list[dict[str, Any]]:
    """Return what each rank of a case predicts and takes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if not keep:
        environment |= _FORGETFUL
    with (
        tempfile.TemporaryDirectory(prefix="slime-bench-") as place,
        ReservedPort() as first,
        ReservedPort() as second,
    ):
        ports = f"{first.number},{second.number}"
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-m",
                    __spec__.name,
                    str(number),
                    str(rank),
                    ports,
                    place,
                    str(int(keep)),
                ],
                env=environment,
            )
            for rank in range(case.ranks)
        ]
        try:
            if any(rank.wait() for rank in ranks):
                raise RuntimeError(f"slime bench memory: a rank of {case.name!r} failed; its output says why")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [json.loads((Path(place) / f"{rank}.json").read_text()) for rank in range(case.ranks)]


def _rank(case: TrainerRun, rank: int, ports: list[int], place: Path, *, keep: bool) -> None:
    """Be one rank: take two steps of a tiny model, then two of the case's, and write down what they take."""
    if not keep:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)
    import torch
    from slime_megatron import compat

    compat.install()
    from slime_bench.memory_in_use import bytes_in_use, peak_bytes

    cpu = torch.device("cpu")
    tiny = TrainerRun(
        name="tiny", config=_TINY | {"model_type": "qwen3"}, ranks=case.ranks, flags=_TWO * (case.ranks > 1)
    )
    _steps(tiny, rank, ports[0], place / f"tiny-{rank}")
    before = bytes_in_use(cpu)
    parts = _steps(case, rank, ports[1], place / f"model-{rank}")
    after = peak_bytes(cpu)
    if before is None or after is None:
        raise RuntimeError("slime bench memory: wanted Linux, whose /proc tells how much is resident")
    (place / f"{rank}.json").write_text(json.dumps({"measured": after - before, "parts": parts}))


def _steps(case: TrainerRun, rank: int, port: int, folder: Path) -> dict[str, int]:
    """Take two steps of a case's run; returns what is predicted of this rank."""
    from slime_core.config.build import MemoryQuestion, Rank
    from slime_core.config.load import load_settings
    from slime_core.plugins.registry import Registry
    from slime_core.protocols.memory import Device
    from slime_core.run.assemble import algorithm
    from slime_megatron.learner.learner import Learner
    from slime_megatron.memory.estimate import trainer_memory
    from slime_megatron.settings.learner_settings import LearnerSettings
    from slime_megatron.settings.section import MegatronSection

    from slime_bench.random_work import Lengths, random_batch, write_random_model

    folder.mkdir()
    write_random_model(case.config, folder)
    registry = Registry.from_environment()
    words = ["--hf-checkpoint", str(folder), "--launcher", "ray", "--rollout-batch-size", str(case.samples)]
    words += ["--rollout-max-response-len", str(case.length - case.prompt)]
    words += ["--max-tokens-per-gpu", str(case.micro_batch), *case.flags]
    settings = load_settings([], words, registry=registry)
    question = MemoryQuestion(
        settings=settings,
        registry=registry,
        model_path=folder,
        device=Device(kind="cpu"),
        prompt_tokens=case.prompt,
    )
    stages = [each for estimate in trainer_memory(question) for each in [estimate] * estimate.ranks]
    longest = case.length - case.prompt
    draw = np.random.default_rng(2)
    responses = draw.integers(longest * 9 // 10, longest + 1, case.samples)
    lengths = Lengths(np.full(case.samples, case.prompt), responses, case.name)
    learner = Learner(
        LearnerSettings(
            model_path=folder,
            family=registry.resolve("slime.models", case.config["model_type"]),
            train=settings.train,
            megatron=settings.section(MegatronSection),
            algorithm=algorithm(settings, registry),
            seed=0,
            rank=Rank(number=rank, count=case.ranks, port=port),
        )
    )
    batch = random_batch(lengths, vocab_size=case.config["vocab_size"])
    for _ in range(2):
        learner.train(batch)
    learner.close()
    return dict(stages[rank].parts) | dict(stages[rank].host)


if __name__ == "__main__":
    _rank(
        CASES[int(sys.argv[1])],
        int(sys.argv[2]),
        [int(port) for port in sys.argv[3].split(",")],
        Path(sys.argv[4]),
        keep=sys.argv[5] == "1",
    )
