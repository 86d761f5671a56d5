"""The stage of `scripts/gpu_proof` that holds the cost model of slime-kernels against what a GPU's clock says."""

from __future__ import annotations

import dataclasses
import re
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_stages import Stage


def kernel_times(stage: Stage) -> dict[str, Any]:
    """The cost model's times of variants of kernels beside those that are measured, and how many pairs both rank as reasoned."""
    from slime_kernels.judge.asking import Asking
    from slime_kernels.judge.evaluator import Evaluator, EvaluatorSettings, Options
    from slime_kernels.judge.measured import Measured
    from slime_kernels.sandbox.fork_server import CandidateServer
    from slime_kernels.timing.baselines import Baselines
    from slime_kernels.timing.gpus import Devices, Gpu, devices_for
    from slime_kernels.timing.measure import Plan

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "plugins/slime-kernels/tests"))
    from kernel_corpus import pairs, variants

    server, known = CandidateServer(), dict(variants())
    plan = Plan(n=10, warm_up=1, tries=1, most_noise=100.0) if stage.dry else Plan()
    stand_in = Devices([Gpu(name="cpu", bytes_per_us=1e5, cache_bytes=1, kind="cpu")])
    devices = stand_in if stage.dry else devices_for("cuda")
    settings = EvaluatorSettings(options=Options(n_trials=2))
    asking = Asking(server, settings.limits)
    measured = Measured(
        asking,
        settings.limits,
        devices,
        baselines=Baselines(None),
        plan=plan,
        baseline="eager",
        compiles=False,
        memory_share=1.0,
    )
    modelled, timed = {}, {}
    for key in list(known)[:2] if stage.dry else known:
        problem, source = known[key]
        modelled[key] = Evaluator(settings, server).evaluate(problem, source).timing.runtime_us
        code = problem.code
        for name, size in problem.shapes[0].items() if stage.dry else ():  # what a CPU interprets in a second
            code = re.sub(rf"^{name} = \d+$", f"{name} = {size}", code, flags=re.MULTILINE)
        problem = dataclasses.replace(problem, code=code)
        facts = asking.trusted("facts", {"code": code, "shapes": list(problem.shapes)}).header
        timed[key] = dataclasses.asdict(measured.take().time(problem, source, facts))
    server.close()
    times = {key: one["runtime_us"] for key, one in timed.items()}
    stage.aim("Spearman of the cost model against timing", spearman(modelled, times), at_least=0.8)
    chosen = [
        (one["problem"], one["faster"], one["slower"])
        for one in pairs()
        if {(one["problem"], one["faster"]), (one["problem"], one["slower"])} <= times.keys()
    ]
    wrong = [pair for pair in chosen if times[pair[0], pair[1]] >= times[pair[0], pair[2]]]
    return {
        "variants": {"/".join(key): {"cost_model_us": modelled[key], **timed[key]} for key in timed},
        "pairs": len(chosen),
        "pairs_timed_otherwise": wrong,
        "not_trusted": ["/".join(key) for key, one in timed.items() if one["doubt"]],
    }


def spearman(one: dict[Any, float], other: dict[Any, float]) -> float:
    """Return the correlation of the ranks of two sets of figures with the same keys, none of them twice."""
    ranks = [{key: i for i, key in enumerate(sorted(each, key=each.__getitem__))} for each in (one, other)]
    return statistics.correlation([ranks[0][key] for key in one], [ranks[1][key] for key in one])
