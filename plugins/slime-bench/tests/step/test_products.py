"""The products of a step are counted as the arithmetic of a dense decoder says."""

from __future__ import annotations

from types import SimpleNamespace


def test_each_product_of_a_step_is_counted_once(monkeypatch):
    from slime_bench.step import products
    from slime_bench.step.products import StepShape, products_seconds

    # A second a multiplication and addition, so that the answer is the number of those.
    monkeypatch.setattr(products, "_forward", lambda rows, inputs, outputs: rows * inputs * outputs)
    monkeypatch.setattr(products, "_both", lambda rows, inputs, outputs: 3 * rows * inputs * outputs)
    architecture = SimpleNamespace(
        hidden_size=4,
        query_size=6,
        num_query_groups=1,
        head_dim=3,
        ffn_hidden_size=5,
        num_layers=2,
        vocab_size=7,
    )
    layers = 2 * (4 * (6 + 2 * 3) + 6 * 4 + 4 * 2 * 5 + 5 * 4)
    head = 4 * 7
    shape = StepShape(prompts=3, samples=2, prompt_tokens=10, new_tokens=8)
    decoded, read = 6 * 8, 3 * 10
    wanted = (layers + head) * decoded  # a step of 6 rows for each of 8 tokens
    wanted += layers * read + head * 3  # prompts, and the logits of their last tokens
    wanted += 3 * (layers * (read + decoded) + head * decoded)  # forward and backward
    assert products_seconds(architecture, shape) == wanted


def test_products_without_instructions_for_bfloat16_are_of_float32(monkeypatch):
    import torch
    from slime_bench.step import products

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for has, wanted in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("slime_torch.engine.multiplies_bfloat16", lambda has=has: has)
        assert {matrix.dtype for matrix in products._matrices((2, 3), (4, 3))} == {wanted}
