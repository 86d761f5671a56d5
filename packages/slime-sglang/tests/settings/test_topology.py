"""`--sglang-config`: where engines go, and what is refused. Nothing is started."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from slime_core.config.load import load_settings
from slime_core.config.settings import Settings
from slime_core.plugins.registry import Registry
from slime_core.protocols import EngineGpus, GpuRange
from slime_sglang import hooks
from slime_sglang.settings.dividing import rank_problems
from slime_sglang.settings.topology import EnginePlacement, serving_topology

README = Path(__file__).parents[2] / "README.md"
FLAGS = ("--rollout-batch-size", "1", "--rollout-max-response-len", "8", "--hf-checkpoint", "m")
SERVED = ("--rollout-engine", "sglang")
TWO_MODELS = """
sglang:
  - name: policy
    server_groups:
      - num_gpus: 2
        overrides: {max_running_requests: 8}
      - {worker_type: placeholder, num_gpus: 3}
      - {num_gpus: 4, num_gpus_per_engine: 2}
  - name: judge
    model_path: other
    num_gpus_per_engine: 2
    server_groups: [{num_gpus: 2}]
"""

#: A transfer that asks nothing of the machine that the tests run on.
BY_NIXL = ("--sglang-disaggregation-transfer-backend", "nixl")


@pytest.fixture
def settings_of(tmp_path: Path) -> Callable[..., Settings]:
    """Settings with a file of this text, and with these flags."""

    def load(text: str | None, *flags: str) -> Settings:
        given: tuple[str, ...] = ()
        if text is not None:
            path = tmp_path / "groups.yaml"
            path.write_text(text)
            given = ("--sglang-config", str(path))
        return load_settings([], [*FLAGS, *SERVED, *given, *flags], registry=Registry.from_environment())

    return load


@pytest.fixture
def problems_of(settings_of: Callable[..., Settings], tmp_path: Path) -> Callable[..., list[str]]:
    """What is wrong with settings, the file's own name left out."""

    def problems(text: str | None, *flags: str) -> list[str]:
        found = hooks.slime_check_config(
            settings=settings_of(text, *flags), registry=Registry.from_environment()
        )
        return [str(problem).replace(f"{tmp_path}/groups.yaml", "FILE") for problem in found]

    return problems


def topology(settings: Settings):
    return serving_topology(settings)


def test_groups_get_their_gpus_in_the_order_of_the_file(settings_of, problems_of):
    """2 + 3 + 4 + 2 GPUs: engines at 0 and 1, nobody at 2 to 4, engines of two at 5 and 7, the judge at 9."""
    assert problems_of(TWO_MODELS, "--rollout-num-gpus", "11") == []
    found = topology(settings_of(TWO_MODELS))
    (policy,), (judge,) = found.policies, found.others
    small = {"max_running_requests": 8}
    assert found.placements(policy) == [
        EnginePlacement(0, 1, small),
        EnginePlacement(1, 1, small),
        EnginePlacement(5, 2),
        EnginePlacement(7, 2),
    ]
    assert found.placements(judge) == [EnginePlacement(9, 2)]
    assert (found.num_gpus, found.num_ranks) == (11, 8)


def test_the_examples_of_the_readme_are_some(settings_of, problems_of):
    """Four engines, one of two GPUs, one GPU left alone, and the scores: 4 + 2 + 1 + 1 GPUs."""
    text, apart = re.findall(r"```\n(sglang:\n.*?)```", README.read_text(), re.DOTALL)
    assert problems_of(text, "--rollout-num-gpus", "8", "--reward-model-url", "served:scores") == []
    found = topology(settings_of(text))
    assert [
        (placement.first_gpu, placement.num_gpus) for placement in found.placements(found.policies[0])
    ] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
    ]
    assert found.placements(found.others[0]) == [EnginePlacement(7, 1, {"is_embedding": True})]
    assert problems_of(apart, "--rollout-num-gpus", "3", *BY_NIXL) == []


@pytest.mark.parametrize(
    ("flags", "placements"),
    [
        ((), [EnginePlacement(0)]),
        (("--rollout-num-gpus", "3"), [EnginePlacement(0), EnginePlacement(1), EnginePlacement(2)]),
        (("--rollout-num-gpus-per-engine", "2"), [EnginePlacement(0, 2)]),
        (
            ("--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"),
            [EnginePlacement(0, 2), EnginePlacement(2, 2)],
        ),
    ],
)
def test_without_a_file_all_engines_are_alike(settings_of, problems_of, flags, placements):
    assert problems_of(None, *flags) == []
    found = topology(settings_of(None, *flags))
    assert found.placements(found.models[0]) == placements


#: A launcher that places servers, and four ranks on each of two machines.
PLACED = ("--launcher", "ray", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4")


def test_a_launcher_is_told_the_gpus_of_every_server_in_their_order(settings_of):
    ranges = [(0, 1), (1, 1), (5, 2), (7, 2), (9, 2)]  # 2 to 4 are the placeholder's
    gpus = topology(settings_of(TWO_MODELS)).gpus
    assert gpus == EngineGpus(11, tuple(GpuRange(*each) for each in ranges))
    assert [each.name for each in gpus.processes] == [
        "policy 0",
        "policy 1",
        "policy 2",
        "policy 3",
        "judge 0",
    ]


def test_colocated_servers_take_the_gpus_of_the_trainer_where_a_launcher_places_them(
    settings_of, problems_of
):
    ipc = ("--update-weight-transport", "cuda-ipc")  # they are on two machines
    shared = (*PLACED, *ipc, "--colocate", "--rollout-num-gpus-per-engine", "4")
    assert problems_of(None, *shared) == []
    assert topology(settings_of(None, *shared)).gpus == EngineGpus(8, (GpuRange(0, 4), GpuRange(4, 4)))
    alone = settings_of(
        None, "--colocate", "--rollout-num-gpus-per-engine", "4"
    )  # one process, and one server
    assert topology(alone).gpus == EngineGpus(4, (GpuRange(0, 4),))
    (found,) = problems_of(None, *shared[:-1], "3")
    assert found == (
        "fleet.rollout_num_gpus_per_engine: found 3 with cluster.colocate, and 8 GPUs of the trainer; wanted a divisor of 8; "
        "2 would be left over"
    )


def test_the_gpus_of_a_placed_server_are_the_launchers_to_choose(problems_of):
    (found,) = problems_of(None, *PLACED, "--sglang-base-gpu-id", "4")
    assert found.startswith("sglang.server_args.base_gpu_id: found it with launcher ray; wanted nothing")
    assert problems_of(None, "--sglang-base-gpu-id", "4") == []


APART = """
sglang:
  - name: policy
    server_groups:
      - {worker_type: prefill, num_gpus: 1, overrides: {chunked_prefill_size: 64}}
      - {worker_type: decode, num_gpus: 4, num_gpus_per_engine: 2}
"""


def test_prefill_and_decode_groups_are_engines_of_the_policy(settings_of, problems_of):
    assert problems_of(APART, *BY_NIXL) == []
    found = topology(settings_of(APART))
    assert found.placements(found.models[0]) == [
        EnginePlacement(0, 1, {"chunked_prefill_size": 64}, "prefill"),
        EnginePlacement(1, 2, role="decode"),
        EnginePlacement(3, 2, role="decode"),
    ]
    assert found.num_ranks == 5


def test_so_many_of_the_engines_read_prompts_and_the_others_generate(settings_of):
    flags = ("--rollout-num-gpus", "6", "--rollout-num-gpus-per-engine", "2", "--prefill-num-servers", "1")
    found = topology(settings_of(None, *flags))
    assert found.placements(found.models[0]) == [
        EnginePlacement(0, 2, role="prefill"),
        EnginePlacement(2, 2, role="decode"),
        EnginePlacement(4, 2, role="decode"),
    ]


@pytest.mark.parametrize(
    ("text", "flags", "problem"),
    [
        (APART.replace("decode", "prefill"), (), "FILE: sglang.0.server_groups: found prefill groups; wanted both prefill and decode"),
        (APART.replace("decode", "regular"), (), "FILE: sglang.0.server_groups: found prefill and regular groups; wanted both"),
        (APART + "  - {name: judge, model_path: other, server_groups: [{worker_type: prefill, num_gpus: 1}, {worker_type: decode, num_gpus: 1}]}",
         (), "FILE: sglang.1.server_groups: found prefill and decode groups of 'judge', which is not the policy; wanted regular groups"),
        (APART, ("--prefill-num-servers", "1"), "fleet.prefill_num_servers: found 1 beside sglang_config; wanted one of them"),
        (APART.replace("chunked_prefill_size: 64", "disaggregation_mode: decode"), (),
         "FILE: sglang.0.server_groups.0.overrides.disaggregation_mode: found an argument that slime gives the server itself"),
    ],
)  # fmt: skip
def test_prefill_without_decode_is_refused_and_the_other_way_round(problems_of, text, flags, problem):
    (found,) = problems_of(text, *flags, *BY_NIXL)
    assert found[: len(problem)] == problem


def test_a_group_that_does_not_say_has_engines_of_the_flags_size(settings_of):
    text = "sglang: [{name: policy, server_groups: [{num_gpus: 4}]}]"
    found = topology(settings_of(text, "--rollout-num-gpus-per-engine", "2"))
    assert found.placements(found.models[0]) == [EnginePlacement(0, 2), EnginePlacement(2, 2)]


@pytest.mark.parametrize(
    ("model", "is_policy"),
    [
        ("{}", True),
        ("{model_path: m}", True),
        ("{model_path: other}", False),
        ("{update_weights: false}", False),
        ("{model_path: m, update_weights: false}", False),
        ("{model_path: m, update_weights: true}", True),
    ],
)
def test_the_policy_is_the_model_of_the_run(settings_of, model, is_policy):
    text = f"sglang: [{{name: a, server_groups: [{{num_gpus: 1}}], {model[1:-1]}}}]"
    found = topology(settings_of(text))
    assert bool(found.policies) == is_policy


def test_everything_that_is_wrong_is_reported_at_once(problems_of):
    text = """
sglang:
  - name: policy
    model_path: other
    update_weights: true
    server_groups:
      - {worker_type: encoder, num_gpus: 1}
      - {num_gpus: 3, num_gpus_per_engine: 2}
      - {num_gpus: 1, overrides: {max_running_request: 8, port: 80, base_gpu_id: 1, tp_size: 2}}
      - {worker_type: placeholder, num_gpus: 1, overrides: {page_size: 1}}
  - name: policy
    server_groups: [{worker_type: placeholder, num_gpus: 1}]
"""
    found = problems_of(text, "--rollout-num-gpus", "8")
    wanted = [
        "FILE: the sum of num_gpus: found 7; wanted 8, as rollout_num_gpus says",
        "FILE: sglang: found 2 models that get the trainer's weights: policy, policy; wanted one",
        "FILE: sglang: found the name 'policy' 2 times; wanted each name once",
        "FILE: sglang.0.server_groups.0.worker_type: found encoder; wanted regular, prefill, ",
        "FILE: sglang.0.server_groups.1.num_gpus: found 3 with num_gpus_per_engine 2; wanted a multiple of 2",
        "FILE: sglang.0.server_groups.2.overrides.max_running_request: found no argument of SGLang's server; "
        "wanted one that it has; did you mean 'max_running_requests'?",
        "FILE: sglang.0.server_groups.2.overrides.port: found an argument that slime gives",
        "FILE: sglang.0.server_groups.2.overrides.tp_size: found an argument that slime gives",
        "FILE: sglang.0.server_groups.2.overrides.base_gpu_id: found 1; wanted nothing",
        "FILE: sglang.0.server_groups.3.overrides: found some of a placeholder; wanted none",
        "FILE: sglang.0.model_path: found other; wanted m, the run's own",
        "FILE: sglang.1.server_groups: found no engine; wanted one regular group at least",
    ]
    assert [problem[: len(start)] for problem, start in zip(found, wanted, strict=True)] == wanted


@pytest.mark.parametrize(
    ("size", "on_cpu", "names"),
    [
        (2, True, ["num_key_value_heads"]),
        (2, False, []),  # each GPU has the one head
        (3, False, ["num_attention_heads", "intermediate_size"]),
        (3, True, ["num_attention_heads", "num_key_value_heads", "intermediate_size"]),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(settings_of, size, on_cpu, names):
    found = topology(settings_of(None, "--rollout-num-gpus-per-engine", str(size)))
    config = {"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 64}
    problems = rank_problems(found, found.models[0], config, on_cpu=on_cpu)
    assert [problem.found.split()[-5] for problem in problems] == names


@pytest.mark.parametrize("name", ["pp_size", "pipeline_parallel_size"])
def test_the_ranks_of_a_pipeline_stage_share_matrices(settings_of, name):
    found = topology(settings_of(None, "--rollout-num-gpus-per-engine", "8"))
    config = {"num_attention_heads": 4, "num_hidden_layers": 3}

    def problems(stages):
        return [
            str(one)
            for one in rank_problems(found, found.models[0], config, on_cpu=True, server_args={name: stages})
        ]

    assert problems(2) == []  # two stages of four ranks
    (problem,) = problems(3)
    assert "found 8 with pp_size 3; wanted a multiple of 3" in problem
    (problem,) = problems(4)
    assert "pp_size of an engine of 'policy': found 4; wanted 3 at most, a layer for each stage" in problem


def test_a_group_has_pipeline_stages_of_its_own(settings_of):
    text = """
sglang:
  - name: policy
    server_groups:
      - {num_gpus: 2}
      - {num_gpus: 3, num_gpus_per_engine: 3, overrides: {pp_size: 2}}
"""
    found = topology(settings_of(text))
    (problem,) = rank_problems(found, found.models[0], {"num_attention_heads": 3}, on_cpu=True)
    assert problem.found == "3 with pp_size 2"


@pytest.mark.parametrize(
    ("data", "expert"), [("dp_size", "ep_size"), ("data_parallel_size", "expert_parallel_size")]
)
def test_attention_in_copies_and_experts_apart_are_shared_by_fewer_ranks(settings_of, data, expert):
    found = topology(settings_of(None, "--rollout-num-gpus-per-engine", "8"))
    config = {"num_attention_heads": 20, "moe_intermediate_size": 12}
    for attention in ({"enable_dp_attention": True, data: 4}, {"attn_dp_size": "4"}):
        given = {**attention, expert: "2"}
        assert list(rank_problems(found, found.models[0], config, on_cpu=False, server_args=given)) == []
    names = [str(one) for one in rank_problems(found, found.models[0], config, on_cpu=False)]
    assert len(names) == 3  # 8 ranks share neither 20 heads, twice, nor 12 rows


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "FILE: the file: found None; wanted a table of sglang"),
        ("sglang: [3]", "FILE: sglang.0: found 3; wanted a table of name, model_path, "),
        ("sglang: &a [*a]", "FILE: sglang.0: found [[...]]; wanted a table of name, "),
        ("sglang: {name: a}", "FILE: sglang: found {'name': 'a'}; wanted a valid list"),
        ("sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: decoder}]}]",
         "FILE: sglang.0.server_groups.0.worker_type: found 'decoder'; wanted 'regular', 'placeholder', "),
        ("sglang: []", "FILE: sglang: found []; wanted list should have at least 1 item"),
        ("sglang: [", "FILE: found no YAML: while parsing"),
        ("sglan: 1\nsglang: [{name: a, server_groups: [{num_gpus: 1}]}]", "FILE: sglan: found an unknown key; wanted 'sglang'"),
        ("sglang: [{name: a, engine_groups: [{num_gpus: 1}], server_groups: [{num_gpus: 1}]}]",
         "FILE: sglang.0.engine_groups: found an unknown key; wanted 'server_groups'"),
        ("sglang: [{name: a, server_groups: [{num_gpu: 1, num_gpus: 1}]}]",
         "FILE: sglang.0.server_groups.0.num_gpu: found an unknown key; wanted 'num_gpus'"),
        ("sglang: [{name: a, server_groups: [{}]}]", "FILE: sglang.0.server_groups.0.num_gpus: found nothing; wanted a value"),
        ("sglang: [{name: a, server_groups: [{num_gpus: 0}]}]", "FILE: sglang.0.server_groups.0.num_gpus: found 0; wanted "),
        ("sglang: [{name: a/b, server_groups: [{num_gpus: 1}]}]", "FILE: sglang.0.name: found 'a/b'; wanted "),
        ("sglang:\n- name: a\n  name: b\n  server_groups: [{num_gpus: 1}]", "FILE: line 3: found the key 'name' again"),
    ],
)  # fmt: skip
def test_a_file_of_another_form_is_refused_by_key(problems_of, text, problem):
    (found,) = problems_of(text)
    assert found[: len(problem)] == problem


def test_a_reward_asks_for_a_model_that_the_run_serves(problems_of):
    assert problems_of(TWO_MODELS, "--reward-model-url", "served:judge") == []
    (found,) = problems_of(TWO_MODELS, "--reward-model-url", "served:jugde")
    assert (
        found == "rm.reward_model_url: found served:jugde, which the run does not serve; wanted served:judge"
    )
    (found,) = problems_of(TWO_MODELS, "--judge-url", "served:policy/v1")
    assert found == "rm.judge_url: found served:policy, which the run does not serve; wanted served:judge"
    (found,) = problems_of(None, "--judge-url", "served:judge/v1")
    assert "wanted the address of a server; models of the run are in --sglang-config" in found
    (found,) = problems_of(TWO_MODELS, "--judge-url", "served:judge/v1", "--rollout-engine", "torch")
    assert "with --rollout-engine sglang" in found


def test_a_file_beside_servers_that_run_already_is_refused(problems_of):
    (found,) = problems_of(TWO_MODELS, "--rollout-external-engine-addrs", "127.0.0.1:1")
    assert found.startswith("fleet.sglang_config: found")
