"""Losses of routers against their definitions, and replayed routes against transformers, under several layouts."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from slime_core.config.load import load_settings
from slime_core.errors import TrainerError
from slime_core.plugins.registry import Registry
from slime_megatron import hooks
from slime_models.family.families.qwen3_moe import QWEN3_MOE
from slime_models.hf.config import read_config

from ..batches import hf_log_probs, make_batch
from ..layouts import CONTEXT, EXPERT, PIPELINE, SEQUENCE, TENSOR, with_shared_prompts
from ..ranks import Job

EXPERTS, TOPK, N_LAYERS = 4, 2, 2
KINDS = {
    "z_loss": ({"moe_z_loss_coeff": "1.0"}, "train/z_loss"),
    "aux_loss": ({"moe_aux_loss_coeff": "1.0"}, "train/load_balancing_loss"),
    "seq_aux_loss": (
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": "1.0"},
        "train/seq_load_balancing_loss",
    ),
    "global_aux_loss": (
        {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": "1.0"},
        "train/global_load_balancing_loss",
    ),
}
#: Ranks, Megatron's settings.
LAYOUTS = {
    "TP2+SP": (2, TENSOR | SEQUENCE),
    "PP2": (2, PIPELINE),
    "CP2": (2, CONTEXT),
    "EP2": (2, EXPERT),
    "PP2, recomputed": (2, PIPELINE | {"recompute_granularity": "full"}),
    "TP2+SPxEP2, PP2": (4, TENSOR | SEQUENCE | EXPERT | PIPELINE | {"expert_tensor_parallel_size": 1}),
}


@pytest.fixture(scope="module")
def reference(cut_models):
    """Transformers' model of the folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(cut_models["qwen3_moe"], dtype=torch.float32).train()


def router_logits(model, batch):
    """Return, of each sample and layer, the router's logits [tokens - 1, E], with gradient."""
    found = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *args: found[-1].append(args[2][0]))
        for layer in model.model.layers
    ]
    for i in range(len(batch)):
        found.append([])
        tokens = torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1] - 1].astype(np.int64))
        model(tokens[None])
    for hook in hooks:
        hook.remove()
    return found


def shares(logits):
    """Return what part of their choices tokens send to each expert."""
    chosen = logits.detach().topk(TOPK, dim=-1).indices.flatten()
    return torch.bincount(chosen, minlength=EXPERTS) / len(chosen)


def losses_of(kind, logits, rounds):
    """Return the loss of each layer by its definition.

    Args:
        kind: of the loss.
        logits: of each sample and layer.
        rounds: one after another, the samples of each rank's micro-batch.
    """
    n_tokens, result = sum(len(sample[0]) for sample in logits), []
    for layer in range(N_LAYERS):
        own = [sample[layer] for sample in logits]
        if kind == "z_loss":
            result.append(torch.cat(own).logsumexp(-1).square().sum() / n_tokens)
        elif kind == "seq_aux_loss":
            each = [EXPERTS * shares(x) @ x.softmax(-1).mean(0) for x in own]
            result.append(sum(each) / len(own))
        else:
            loss, seen = 0.0, []
            for micros in rounds:
                seen += [own[i] for members in micros for i in members]
                for members in micros:
                    x = torch.cat([own[i] for i in members])
                    f = shares(x if kind == "aux_loss" else torch.cat(seen))
                    loss = loss + EXPERTS * (f @ x.softmax(-1).sum(0)) / n_tokens
            result.append(loss)
    return result


def assert_gradients(found, without, model, loss):
    """Check that the difference of two gradients is that of transformers' model for `loss`."""
    model.zero_grad()
    loss.backward(retain_graph=True)
    names = ["model.embed_tokens.weight"]
    for layer in range(N_LAYERS):
        names += [f"model.layers.{layer}.mlp.gate.weight", f"model.layers.{layer}.self_attn.q_proj.weight"]
    for name in names:
        wanted = model.get_parameter(name).grad
        wanted = torch.zeros_like(found[name]) if wanted is None else wanted
        assert (found[name] - without[name] - wanted).abs().max() <= 2e-5 * max(wanted.abs().max(), 1), name


def job(folder, batch, n, megatron, *, max_tokens=1000):
    return Job(
        "train",
        n,
        {"folder": folder, "batch": batch, "megatron": megatron, "train": {"max_tokens_per_gpu": max_tokens}},
    )


@pytest.mark.parametrize(
    "kind",
    [
        *("aux_loss", "seq_aux_loss"),
        *(pytest.param(kind, marks=pytest.mark.faults) for kind in ("z_loss", "global_aux_loss")),
    ],
)
def test_losses_of_routers_are_those_of_their_definition(ranks, cut_models, reference, kind):
    """Three cuts: all at once; uneven micro-batches that share prompts; two ranks, one with an uncounted one."""
    from slime_megatron.batch.rank_schedule import rank_schedule

    flags, metric = KINDS[kind]
    folder = cut_models["qwen3_moe"]
    shared, three = with_shared_prompts(), make_batch(lengths=((5, 9), (12, 3), (4, 20)))
    for batch, n, max_tokens in ((shared, 1, 1000), (shared, 1, 40), (three, 2, 25)):
        cut = rank_schedule(
            batch, range(len(batch)), n_ranks=n, max_tokens=max_tokens, share=True, cost=lambda f: f.n_tokens
        )
        counted = [[m if m.counted else None for m in micros] for micros in cut]
        rounds = [
            [[i for tree in m.trees for i in tree.members] for m in micros if m is not None]
            for micros in zip(*counted, strict=True)
        ]
        logits = router_logits(reference, batch)
        losses = losses_of(kind, logits, rounds)
        (without, *_), ((metrics, gradients, _), *_) = ranks.run_all(
            [
                job(folder, batch, n, megatron, max_tokens=max_tokens)
                for megatron in ({}, {"megatron_args": flags})
            ]
        )
        assert metrics[metric] == pytest.approx(float(sum(losses)) / N_LAYERS, rel=1e-5)
        assert metric not in without[0]
        assert_gradients(gradients, without[1], reference, sum(losses))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_routers_do_not_depend_on_the_layout(ranks, cut_models, layout):
    """All of them at once, each token's own share too: one micro-batch, or a pair of like ones on two ranks."""
    flags = {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": ["0.5", "0.25", "0.125"],
        "moe_z_loss_coeff": "0.1",
    }
    n, megatron = LAYOUTS[layout]
    if (
        "EP2" in layout
    ):  # its two data-parallel ranks have a micro-batch each, of which `aux_loss` is the mean
        flags |= {"moe_aux_loss_coeff": ["0.0", "0.25", "0.125"]}
    batch, folder = with_shared_prompts(), cut_models["qwen3_moe"]
    one = ranks.run_all([job(folder, batch, 1, {"megatron_args": flags})])[0][0]
    other = ranks.run_all([job(folder, batch, n, megatron | {"megatron_args": flags})])[0][0]
    for name, wanted in one[1].items():
        assert (other[1][name] - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name
    assert {k: v for k, v in other[0].items() if k.startswith("train/")} == pytest.approx(
        {k: v for k, v in one[0].items() if k.startswith("train/")}, rel=1e-5, abs=1e-6
    )


R2, R3 = {"use_routing_replay": True}, {"use_rollout_routing_replay": True}


@pytest.mark.parametrize("layout", ["one", "TP2+SP", "EP2", "CP2", "PP2"])
def test_training_takes_the_routes_of_the_pass_before(ranks, cut_models, layout):
    """Three optimizer steps: the weights of the second and third are not those of the pass for log-probs."""
    n, megatron = LAYOUTS.get(layout, (1, {}))
    common = {"folder": cut_models["qwen3_moe"], "batch": make_batch(n_steps=3)}
    free = ranks.run_all([Job("routes_of_passes", n, {"megatron": megatron, **common})])[0]
    again = ranks.run_all([Job("routes_of_passes", n, {"megatron": megatron | R2, **common})])[0]
    for before, after, gradient in again:
        assert len(before) == len(after) >= 3
        assert all(a.equal(b) for a, b in zip(before, after, strict=True))
        assert gradient > 1e-6
    assert any(not a.equal(b) for before, after, _ in free for a, b in zip(before, after, strict=True))


@contextmanager
def forced(model, routes):
    """Let transformers' routers send the tokens of the next samples, one after another, where `routes` says."""
    given = iter([sample[:, layer] for sample in routes for layer in range(N_LAYERS)])

    def force(_gate, _inputs, output):
        logits = output[0]
        rows = np.concatenate([next(given), np.arange(TOPK)[None]])  # the last token, which predicts nothing
        chosen = torch.from_numpy(rows.astype(np.int64))
        gates = logits.softmax(-1).gather(1, chosen)
        return logits, gates / gates.sum(-1, keepdim=True), chosen

    hooks = [layer.mlp.gate.register_forward_hook(force) for layer in model.model.layers]
    yield
    for hook in hooks:
        hook.remove()


@pytest.fixture(scope="module")
def routed_batch(reference):
    """Random routes, and transformers' log-probs under them as the engine's: so the trainer's must be equal.

    Of two pairs of samples with one prompt, one pair routes it alike.
    """
    batch, draw = with_shared_prompts(), np.random.default_rng(0)
    routes = [
        draw.random((n - 1, N_LAYERS, EXPERTS)).argsort(-1)[..., :TOPK].astype(np.int32)
        for n in batch.lengths
    ]
    routes[1][:5] = routes[0][:5]
    with torch.no_grad(), forced(reference, routes):
        log_probs = hf_log_probs(reference, batch).numpy()
    return replace(batch, extra={"rollout_routed_experts": routes}, rollout_log_probs=log_probs)


MISMATCH = "train/train_rollout_logprob_abs_diff"


def test_the_engines_routes_give_the_log_probs_of_transformers_under_them(ranks, cut_models, routed_batch):
    folder = cut_models["qwen3_moe"]
    several = replace(routed_batch, optimizer_steps=tuple(np.array_split(np.arange(7), 3)))
    (free, *_), (once, *_), (thrice, *_) = ranks.run_all(
        [job(folder, *rest) for rest in ((routed_batch, 1, {}), (routed_batch, 1, R3), (several, 1, R3))]
    )
    assert free[0][MISMATCH] > 0.1
    assert once[0][MISMATCH] < 1e-5  # of the training pass
    assert thrice[0][MISMATCH] < 1e-5  # of the pass for log-probs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_engines_routes_are_replayed_under_every_layout(ranks, cut_models, routed_batch, layout):
    n, megatron = LAYOUTS[layout]
    folder = cut_models["qwen3_moe"]
    one = ranks.run_all([job(folder, routed_batch, 1, R3)])[0][0]
    cut = job(folder, routed_batch, n, megatron | R3, max_tokens=30)  # several micro-batches
    metrics, gradients, _ = ranks.run_all([cut])[0][0]
    assert metrics[MISMATCH] < 1e-5
    for name, wanted in one[1].items():
        assert (gradients[name] - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name
    assert all(gradients[f"model.layers.{i}.mlp.gate.weight"].abs().max() > 1e-6 for i in range(N_LAYERS))


def test_an_overflow_of_one_expert_lowers_the_scale_of_the_loss_for_all(ranks, cut_models):
    """Three overflows: by Megatron's hysteresis the second and the third halve it."""
    found = ranks.run("loss_scales", 2, folder=cut_models["qwen3_moe"], batch=make_batch(), megatron=EXPERT)
    assert found == [([2.0**14, 2.0**14], True)] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda routes: None, "sample 103: rollout_routed_experts is missing"),
        (lambda routes: routes[1:], "sample 103: rollout_routed_experts has shape [17, 2, 2]; wanted [18, 2, 2]"),
        (lambda routes: routes + 1, "sample 103: rollout_routed_experts holds experts 1 to 4; the model's are 0 to 3"),
        (lambda routes: routes * 0, "sends token 0 to an expert of layer 0 twice: [0, 0]"),
    ],
)  # fmt: skip
def test_routes_that_are_not_the_models_are_refused(cut_models, routed_batch, change, message):
    from slime_megatron.batch.routing import engine_routes

    routes = list(routed_batch.extra["rollout_routed_experts"])
    routes[3] = change(routes[3])
    batch = replace(routed_batch, extra={"rollout_routed_experts": routes})
    with pytest.raises(TrainerError) as error:
        engine_routes(batch, QWEN3_MOE.architecture(read_config(cut_models["qwen3_moe"])))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--use-routing-replay", "--keep-old-actor"), "megatron.use_routing_replay: found it beside"),
        (("--moe-router-load-balancing-type", "sinkhorn"), "moe_router_load_balancing_type: found sinkhorn"),
        (("--moe-aux-loss-coeff", "0.1", "0.2"), "found 2 for 1 of moe_router_load_balancing_type"),
        *(
            (
                ("--launcher", "ray", "--pipeline-model-parallel-size", "2", reads, "--moe-layer-recompute"),
                "moe_layer_recompute: found it beside pipeline_model_parallel_size 2",
            )
            for reads in ("--use-routing-replay", "--moe-router-enable-expert-bias")
        ),
        *(
            ((replays, "--moe-router-fusion"), "moe_router_fusion: found it beside use_routing_replay or")
            for replays in ("--use-routing-replay", "--use-rollout-routing-replay")
        ),
        *(
            (
                (
                    "--launcher",
                    "ray",
                    "--pipeline-model-parallel-size",
                    "2",
                    "--use-routing-replay",
                    *modules,
                ),
                "recompute_modules: found it beside pipeline_model_parallel_size 2",
            )
            for modules in (("--recompute-modules", "moe"), ("--recompute-modules", "moe_act", "moe"))
        ),
    ],
)
def test_flags_of_routers_that_cannot_be_followed_are_refused(flags, message):
    assert len([problem for problem in problems(*flags) if message in problem]) == 1


@pytest.mark.parametrize("modules", [("moe_act",), ("moe_act", "layernorm")])
def test_activations_of_experts_are_computed_again_beside_replayed_routes(modules):
    found = problems("--launcher", "ray", "--pipeline-model-parallel-size", "2", "--use-routing-replay",
                     "--recompute-granularity", "selective", "--recompute-modules", *modules)  # fmt: skip
    assert not [problem for problem in found if "recompute_modules" in problem]


def problems(*flags):
    needed = ["--hf-checkpoint", "x", "--rollout-batch-size", "2", "--rollout-max-response-len", "8"]
    settings = load_settings([], [*needed, *flags], registry=Registry())
    return [str(problem) for problem in hooks.slime_check_config(settings, Registry())]


def test_the_engines_routes_are_asked_for_where_they_are_replayed():
    def needs(*flags):
        needed = ["--hf-checkpoint", "x", "--rollout-batch-size", "2", "--rollout-max-response-len", "8"]
        return hooks.slime_engine_needs(load_settings([], [*needed, *flags], registry=Registry()))

    assert needs("--use-rollout-routing-replay") == ["routed_experts"]
    assert needs("--use-routing-replay") == needs() == []
    assert needs("--use-rollout-routing-replay", "--train-backend", "another") == []
