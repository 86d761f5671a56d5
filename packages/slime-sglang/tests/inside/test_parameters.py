"""Which part of a tensor a tensor-parallel rank holds, and that a part held nowhere is none."""

from __future__ import annotations

import torch
from slime_sglang.inside.parameters import WHOLE, held_tensors


def module_of(**parameters):
    """A model with parameters of these names, dots as double underscores."""
    model = torch.nn.Module()
    for name, tensor in parameters.items():
        *parents, leaf = name.split("__")
        module = model
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, torch.nn.Module())
            module = getattr(module, parent)
        setattr(module, leaf, torch.nn.Parameter(tensor))
    return model


def held(model, shapes, rank, n_ranks):
    return {
        name: (tensor[:, 0].tolist() if tensor.dim() > 1 else tensor.tolist(), index)
        for name, tensor, index in held_tensors(model, shapes, rank=rank, n_ranks=n_ranks)
    }


def numbered(rows, columns=2):
    return torch.arange(float(rows))[:, None].expand(rows, columns).clone()


def test_heads_of_keys_and_values_that_several_ranks_hold():
    """Four ranks, 8 rows of queries and two heads of 3 rows: ranks 2 and 3 hold the second head."""
    shapes = {"qkv_of.q_proj.weight": (8, 2), "qkv_of.k_proj.weight": (6, 2), "qkv_of.v_proj.weight": (6, 2)}
    model = module_of(qkv_of__qkv_proj__weight=numbered(8))
    for rank, queries, second in ((1, slice(2, 4), slice(0, 3)), (3, slice(6, 8), slice(3, 6))):
        assert held(model, shapes, rank, 4) == {
            "qkv_of.q_proj.weight": ([0, 1], (queries,)),
            "qkv_of.k_proj.weight": ([2, 3, 4], (second,)),
            "qkv_of.v_proj.weight": ([5, 6, 7], (second,)),
        }


def test_each_matrix_of_a_stack_is_found_without_what_pads_it():
    """One rank, gate and up of 3 rows, each padded to 4."""
    shapes = {"mlp.gate_proj.weight": (3, 2), "mlp.up_proj.weight": (3, 2)}
    assert held(module_of(mlp__gate_up_proj__weight=numbered(8)), shapes, 0, 1) == {
        "mlp.gate_proj.weight": ([0, 1, 2], (slice(0, 3),)),
        "mlp.up_proj.weight": ([4, 5, 6], (slice(0, 3),)),
    }


def test_rows_and_columns_are_shared_and_small_tensors_are_held_whole():
    shapes = {
        "mlp.gate_proj.weight": (6, 2),
        "mlp.up_proj.weight": (6, 2),
        "down.weight": (2, 6),
        "norm": (2,),
    }
    model = module_of(mlp__gate_up_proj__weight=numbered(6), down__weight=numbered(2, 3), norm=torch.ones(2))
    assert held(model, shapes, 1, 2) == {
        "mlp.gate_proj.weight": ([0, 1, 2], (slice(3, 6),)),
        "mlp.up_proj.weight": ([3, 4, 5], (slice(3, 6),)),
        "down.weight": ([0, 1], (slice(None), slice(3, 6))),
        "norm": ([1, 1], WHOLE),
    }


def test_what_pads_the_rows_and_columns_of_the_last_rank_is_left_out():
    """As SGLang on a CPU has it: 6 rows padded to 8, of which the second rank holds the last two and what pads them."""
    shapes = {"mlp.gate_proj.weight": (6, 2), "mlp.up_proj.weight": (6, 2), "down.weight": (2, 6)}
    model = module_of(mlp__gate_up_proj__weight=numbered(8), down__weight=torch.arange(8.0).view(2, 4))
    found = held(model, shapes, 1, 2)
    assert found["mlp.gate_proj.weight"] == ([0, 1], (slice(4, 6),))
    assert found["mlp.up_proj.weight"] == ([4, 5], (slice(4, 6),))
    ((down, index),) = [
        entry[1:] for entry in held_tensors(model, shapes, rank=1, n_ranks=2) if "down" in entry[0]
    ]
    assert (down.tolist(), index) == ([[0, 1], [4, 5]], (slice(None), slice(4, 6)))


def test_what_pads_a_vocabulary_is_left_out_and_a_rank_may_have_none_of_it():
    """Three ranks hold four rows each of a vocabulary of five."""
    model = module_of(embed=numbered(4))
    parts = [held(model, {"embed": (5, 2)}, rank, 3)["embed"] for rank in range(3)]
    assert parts == [([0, 1, 2, 3], (slice(0, 4),)), ([0], (slice(4, 5),)), ([], (slice(5, 5),))]


def test_rows_that_no_rank_holds_make_no_part():
    """Then what is held is compared with the whole tensor, which it is not."""
    shapes = {"embed": (9, 2), "mlp.gate_proj.weight": (6, 2), "mlp.up_proj.weight": (6, 2)}
    found = held(module_of(embed=numbered(4), mlp__gate_up_proj__weight=numbered(4)), shapes, 0, 2)
    assert found["embed"] == ([0, 1, 2, 3], WHOLE)
    assert found["mlp.up_proj.weight"] == ([2, 3], WHOLE)
    assert held(module_of(embed=numbered(4)), {"embed": (5, 2)}, 0, 1)["embed"] == ([0, 1, 2, 3], WHOLE)


def test_a_matrix_that_folders_stack_too_is_cut_in_both_halves():
    """12 rows, gate above up, over three ranks; then one rank, which holds it whole."""
    shapes = {"mlp.gate_up_proj.weight": (12, 2)}
    ((name, held, (rows,)),) = held_tensors(
        module_of(mlp__gate_up_proj__weight=numbered(4)), shapes, rank=1, n_ranks=3
    )
    assert (name, len(held), rows.tolist()) == ("mlp.gate_up_proj.weight", 4, [2, 3, 8, 9])
    assert held_of_one(shapes) == ("mlp.gate_up_proj.weight", WHOLE)


def held_of_one(shapes):
    ((name, _, index),) = held_tensors(
        module_of(mlp__gate_up_proj__weight=numbered(12)), shapes, rank=0, n_ranks=1
    )
    return name, index


def test_ranks_of_dp_attention_hold_the_same_heads_in_each_group():
    """Four ranks, two groups of two: queries of 8 rows and keys and values of 4 each; an output of 8 columns; a dense matrix whole."""
    shapes = {
        "self_attn.q_proj.weight": (8, 2), "self_attn.k_proj.weight": (4, 2), "self_attn.v_proj.weight": (4, 2),
        "o_proj.weight": (2, 8), "gate.weight": (6, 2),
    }  # fmt: skip
    model = module_of(
        self_attn__qkv_proj__weight=numbered(8), o_proj__weight=numbered(2, 4), gate__weight=numbered(6)
    )
    parts = [
        {
            name: index
            for name, _, index in held_tensors(model, shapes, rank=rank, n_ranks=4, attention_ranks=2)
        }
        for rank in range(4)
    ]
    assert parts[0] == parts[2] and parts[1] == parts[3]
    assert parts[1] == {
        "self_attn.q_proj.weight": (slice(4, 8),), "self_attn.k_proj.weight": (slice(2, 4),),
        "self_attn.v_proj.weight": (slice(2, 4),), "o_proj.weight": (slice(None), slice(4, 8)), "gate.weight": WHOLE,
    }  # fmt: skip


def test_a_rank_has_the_experts_of_its_group():
    """Four ranks, experts divided between two groups: rank 2 has the upper half of experts 2 and 3."""
    shapes = {f"mlp.experts.{expert}.down_proj.weight": (2, 8) for expert in range(4)}
    model = module_of(mlp__experts__w2_weight=torch.zeros(2, 2, 4))
    found = {name: index for name, _, index in held_tensors(model, shapes, rank=3, n_ranks=4)}
    assert found == {
        f"mlp.experts.{expert}.down_proj.weight": (slice(0, 2), slice(4, 8)) for expert in (2, 3)
    }
