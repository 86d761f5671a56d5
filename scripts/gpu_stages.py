"""What `scripts/gpu_proof` shows, stage by stage: figures that a stage returns, and aims that it sets down."""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decode_steps import copied_bytes_per_s, decode_steps
from kernel_times import kernel_times
from wheels import OURS

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600
#: Element of a junit report -> what became of its test.
_BECAME = {"failure": "failed", "error": "failed", "skipped": "skipped"}
#: SmolLM2-135M, the model of the quickstart. Without --model its weights are random: it takes as long, and learns nothing.
SMOLLM2 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "rope_theta": 100000, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 256,
}  # fmt: skip
TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}


class Stage:
    """What a stage is given, and the aims that it sets down."""

    def __init__(self, folder: Path, *, dry: bool, model: Path | None) -> None:
        self.folder, self.dry, self.given = folder, dry, model
        self.aims: list[dict[str, Any]] = []

    @property
    def device(self) -> str:
        """cpu in a dry run."""
        return "cpu" if self.dry else "cuda"

    def aim(
        self, what: str, found: float, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Set down a figure and what it should be; a dry run does not judge it."""
        met = (at_least is None or found >= at_least) and (at_most is None or found <= at_most)
        bounds = {"at_least": at_least, "at_most": at_most}
        self.aims.append({"what": what, "found": found, **bounds, "met": None if self.dry else met})

    def wait(self) -> None:
        """Wait for what was launched on the device."""
        if not self.dry:
            import torch

            torch.cuda.synchronize()

    def slime(self, line: str, *words: object, cwd: Path = ROOT) -> None:
        """Run the `slime` command with the words of a line and more; raises if it fails. What it prints is in the stage's log."""
        command = [sys.executable, "-m", "slime_core", *line.split(), *map(str, words)]
        subprocess.run(command, cwd=cwd, check=True)

    def model(self, shape: dict[str, Any]) -> Path:
        """Return a folder with random weights of a shape, and a tokenizer whose first ids are bytes."""
        from slime_bench.random_work import write_random_model
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        folder = Path(tempfile.mkdtemp(prefix="model-"))
        shape = shape | (
            TINY | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16} if self.dry else {}
        )
        write_random_model(shape, folder)
        names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
        names += [f"<{i}>" for i in range(len(names), shape["vocab_size"])]
        tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
        return folder


def kernels_of(run: Callable[[], object]) -> list[str]:
    """Return the operators of attention that are called."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        run()
    return sorted(
        {event.name for event in profiled.events() if "attention" in event.name and "::_" in event.name}
    )


def versions(stage: Stage) -> dict[str, Any]:
    """Versions, the device, and the kernel that attention takes for what the trainer and the engine ask of it."""
    from importlib.metadata import distributions

    import torch
    from slime_models.attention import dot_product_attention

    def kernel(dtype: torch.dtype, n_query: int, **options: Any) -> list[str]:
        q, k, v = (
            torch.randn(2, heads, n, 64, dtype=dtype, device=stage.device)
            for heads, n in ((8, n_query), (8, 48), (8, 48))
        )
        return kernels_of(lambda: dot_product_attention(q, k, v, **options))

    mask = torch.zeros(2, 1, 1, 48, dtype=torch.bfloat16, device=stage.device)
    kernels = {
        "a packed sequence, bfloat16": kernel(torch.bfloat16, 48, is_causal=True),
        "a packed sequence, float32": kernel(torch.float32, 48, is_causal=True),
        "a decode step, bfloat16": kernel(torch.bfloat16, 1, attn_mask=mask),
    }
    assert not any("cudnn" in name for names in kernels.values() for name in names), kernels
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "nccl": None if stage.dry else torch.cuda.nccl.version(),
        "device": device_name(stage.dry), "capability": None if stage.dry else torch.cuda.get_device_capability(),
        "memory_bytes": None if stage.dry else torch.cuda.get_device_properties(0).total_memory,
        "packages": {each.name: each.version for each in distributions() if each.name in (*OURS, "megatron-core", "transformers")},
        "attention": kernels,
    }  # fmt: skip


def pytest(stage: Stage, *where: str, words: tuple[object, ...] = ()) -> dict[str, Any]:
    """Run tests, one path after another as long as time is left; count them by what became of them, and name those that failed."""
    end, counts, failed, unfinished = time.perf_counter() + LIMIT_S - 60, Counter[str](), [], []
    for number, path in enumerate(where):
        report = stage.folder / f"{number}.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *words,
            path,
        ]
        try:
            seconds = max(1.0, end - time.perf_counter())
            subprocess.run(list(map(str, command)), cwd=ROOT, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            pass
        if not report.exists():
            unfinished.append(path)
            continue
        for test in ElementTree.parse(report).iter("testcase"):
            became = _BECAME.get(test[0].tag, "passed") if len(test) else "passed"
            counts[became] += 1
            failed += [f"{test.get('classname')}::{test.get('name')}"] if became == "failed" else []
    if stage.dry:
        assert counts.total() and not failed and not unfinished, (counts, failed, unfinished)
    stage.aim("tests that passed", counts["passed"], at_least=1)
    stage.aim("tests that failed", len(failed), at_most=0)
    stage.aim("paths whose tests did not end", len(unfinished), at_most=0)
    return {"counts": dict(counts), "failed": failed, "unfinished": unfinished}


def gpu_tests(stage: Stage) -> dict[str, Any]:
    """The tests marked `gpu`: of kernels, the trainer's state on the device, offloading, sending weights, a whole run."""
    transfer = "packages/slime-models/tests/transfer"
    where = [f"{transfer}/test_fingerprint.py", f"{transfer}/transports/test_cuda_ipc.py"]
    if not stage.dry:
        where += ["packages/slime-megatron/tests/test_cuda.py", "tests/runs/test_stack.py"]
    return pytest(stage, *where, words=("-m", "gpu", "-n", 0))


def trainer_tests(stage: Stage) -> dict[str, Any]:
    """The unmarked tests of slime-megatron, on the device that its trainer takes. With fewer GPUs than ranks, ranks compute on the CPU."""
    if stage.dry:
        return pytest(stage, "packages/slime-megatron/tests/batch/test_bin_packing.py", words=("-n", 0))
    folders = ("batch", "model", "optim", "learner", "checkpoint", "hf", "memory", "settings", "parallel")
    paths = [f"packages/slime-megatron/tests/{name}" for name in (*folders, "test_trainer.py")]
    return pytest(stage, *paths, words=("-m", "not gpu and not faults", "-n", 8))


def engine_tests(stage: Stage) -> dict[str, Any]:
    """The unmarked tests of slime-torch, on the device that its engine takes."""
    tests = "plugins/slime-torch/tests"
    if stage.dry:
        return pytest(stage, f"{tests}/layers/test_norm.py", words=("-n", 0))
    return pytest(stage, tests, words=("-m", "not gpu and not faults", "-n", 8))


def attention_plans(stage: Stage) -> dict[str, Any]:
    """First calls of attention for new shapes beside second ones: with a kernel that plans, first ones take tenths of a second."""
    import torch
    from slime_models.attention import dot_product_attention

    draw, n_shapes = random.Random(0), 5 if stage.dry else 200
    lengths = draw.sample(range(16, 64 if stage.dry else 4096), n_shapes)

    def timed(attend: Callable[..., Any], q: Any) -> float:
        stage.wait()
        begin = time.perf_counter()
        attend(q, q, q, is_causal=True)
        stage.wait()
        return 1e3 * (time.perf_counter() - begin)

    found = {}
    for name, attend in (
        ("ours", dot_product_attention),
        ("torch's own choice", torch.nn.functional.scaled_dot_product_attention),
    ):
        queries = (torch.randn(1, 16, n, 128, dtype=torch.bfloat16, device=stage.device) for n in lengths)
        times = [(timed(attend, q), timed(attend, q)) for q in queries]
        q = torch.randn(1, 16, 77, 128, dtype=torch.bfloat16, device=stage.device)
        first, again = ([pair[i] for pair in times[2:]] for i in (0, 1))  # the first two load libraries
        figures = {
            "first_ms": statistics.median(first),
            "first_ms_worst": max(first),
            "again_ms": statistics.median(again),
        }
        found[name] = figures | {"kernels": kernels_of(lambda a=attend, q=q: a(q, q, q, is_causal=True))}
    assert not any("cudnn" in name for name in found["ours"]["kernels"]), found["ours"]
    stage.aim(
        "first call of a new shape over a second one",
        found["ours"]["first_ms"] / found["ours"]["again_ms"],
        at_most=3,
    )
    return {"shapes": n_shapes} | found


def bench_trainer(stage: Stage) -> dict[str, Any]:
    """`slime bench trainer`: full fine-tuning of a 0.6B shape at 4k and 16k tokens."""
    from slime_bench.random_work import SHAPES

    shape, sequence = "0.6b", "4096,16384"
    if stage.dry:
        shape, sequence = str(stage.model(SHAPES["0.6b"])), "16,64"
    file = stage.folder / "bench.json"
    stage.slime(f"bench trainer --sequence {sequence} --peer none --repeats 3 --shape", shape, "--json", file)
    report = json.loads(file.read_text())
    longest = report["work"][-1]["sides"]["slime"]
    stage.aim("tokens a second at the longest", longest["tokens_per_s"], at_least=24_000)
    stage.aim("share of peak at the longest", longest["mfu"], at_least=0.2)
    return report


def bench_engine(stage: Stage) -> dict[str, Any]:
    """`slime bench engine` of a 0.6B shape at 64 and 256 requests, beside what reading the weights for each step allows."""
    report = _bench_engine(stage)
    for n, figures in report["requests"].items():
        what = f"share of what reading the weights allows, {n} requests"
        stage.aim(what, figures["share_of_limit"], at_least=0.5)
    return report


def bench_launches(stage: Stage) -> dict[str, Any]:
    """The same, with decoding steps launched kernel by kernel and not as CUDA graphs."""
    return _bench_engine(stage, *([] if stage.dry else ["--no-cuda-graphs"]))


def _bench_engine(stage: Stage, *words: str) -> dict[str, Any]:
    from slime_bench.random_work import SHAPES

    folder, bytes_per_s = stage.model(SHAPES["0.6b"]), copied_bytes_per_s(stage)
    weights, found = sum(file.stat().st_size for file in folder.glob("*.safetensors")), {}
    for n, new_tokens in ((2, 4),) if stage.dry else ((64, 128), (256, 128)):
        file = stage.folder / f"bench-{n}.json"
        line = f"bench engine --prompts {n} --new-tokens {new_tokens} --repeats {1 if stage.dry else 3} --dtype bfloat16"
        stage.slime(line, "--model", folder, "--json", file, *words)
        figures = json.loads(file.read_text())
        figures["limit_tokens_per_s"] = n * bytes_per_s / weights
        figures["share_of_limit"] = (
            figures["tokens_per_s"]["slime torch engine"] / figures["limit_tokens_per_s"]
        )
        found[str(n)] = figures
    return {"weight_bytes": weights, "memory_bytes_per_s": bytes_per_s, "requests": found}


def quickstart(stage: Stage) -> dict[str, Any]:
    """The main job, whole; with random weights unless --model is given."""
    folder = stage.given or stage.model(SMOLLM2)
    tiny = "--num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 2 --eval-interval none"
    words = tiny.split() if stage.dry else []
    begin = time.perf_counter()
    recipe = ROOT / "recipes/quickstart.toml"
    stage.slime("train", recipe, "--hf-checkpoint", folder, *words, cwd=stage.folder)
    seconds = time.perf_counter() - begin
    stage.aim("seconds", seconds, at_most=60)
    run = stage.folder / "runs/quickstart"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": "given" if stage.given else "random",
        "seconds": seconds,
        "summary": json.loads((run / "summary.json").read_text()),
        "last_step": rows[-1],
    }


def ranks_on_one_gpu(stage: Stage) -> dict[str, Any]:
    """Two processes that add up a tensor on one GPU: NCCL may refuse that, which is told and is no failure."""
    body = (
        "import os, sys, torch, torch.distributed as dist; cuda = sys.argv[1] == 'cuda';"
        "dist.init_process_group('nccl' if cuda else 'gloo'); x = torch.full((3,), dist.get_rank() + 1.0, device=sys.argv[1]);"
        "dist.all_reduce(x); assert x.tolist() == [3, 3, 3], x; dist.destroy_process_group()"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", body, stage.device],
            env=env | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=LIMIT_S / 2)[1].strip().splitlines() for rank in ranks]
    allowed = not any(rank.returncode for rank in ranks)
    refused = not stage.dry and any("Duplicate GPU" in line for lines in said for line in lines)
    assert allowed or refused, said
    return {"allowed": allowed, "said": None if allowed else [lines[-1:] for lines in said]}


def transports(stage: Stage) -> dict[str, Any]:
    """Every transport of weights, from tensors of the device: what arrives, and what must not. By NCCL where there are two GPUs."""
    import torch
    from slime_core.plugins.registry import Registry
    from slime_models.testing.transports import check_transport

    registry = Registry.from_environment()
    names = sorted(plugin.name for plugin in registry.plugins("slime.transports"))
    failed = dict[str, str]()
    for name in names:
        try:
            check_transport(registry.resolve("slime.transports", name), device=stage.device)
        except Exception as error:  # the others are checked all the same
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
    assert not failed, f"{len(failed)} of {', '.join(names)} failed: {failed}"
    return {"checked": names, "by_nccl": torch.cuda.device_count() > 1}


def kernels(stage: Stage) -> dict[str, Any]:
    """Kernels of Triton, launched and timed on the GPU in the sandbox: right ones, wrong ones, cheats."""
    tests = "plugins/slime-kernels/tests"
    found = [f"{tests}/timing/test_gpus.py"]
    if not stage.dry:
        found += [f"{tests}/judge/test_on_gpu.py"]
    return pytest(stage, *found, words=("-m", "gpu", "-n", 0))


STAGES: dict[str, Callable[[Stage], dict[str, Any]]] = {
    "versions": versions, "gpu-tests": gpu_tests, "trainer-tests": trainer_tests, "engine-tests": engine_tests,
    "attention-plans": attention_plans, "bench-trainer": bench_trainer, "bench-engine": bench_engine, "bench-launches": bench_launches,
    "decode-steps": decode_steps,
    "quickstart": quickstart,
    "ranks-on-one-gpu": ranks_on_one_gpu, "transports": transports, "kernels": kernels, "kernel-times": kernel_times,
}  # fmt: skip


def device_name(dry: bool) -> str:
    """Return the name of what is measured."""
    if dry:
        return "cpu"
    import torch

    return torch.cuda.get_device_name()
