"""Chains, skeletons and right answers: by hand, and through all gates."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from slime_core.data.rows.record import Record
from slime_core.errors import DataError
from slime_kernels.problems.chains import CHAINS, STEPS
from slime_kernels.problems.examples import example_of, skeleton_of
from slime_kernels.problems.generated import generated_problems
from slime_kernels.problems.problem import ANSWER, expression_of, filled, problem_of
from slime_kernels.problems.templates import FAMILIES
from slime_kernels.turns.extraction import candidate_of


def problem(family, n=0):
    return generated_problems(n + 1, families=[family])[0][n]


@pytest.mark.parametrize(
    ("name", "in_pytorch", "in_triton"),
    [
        ("relu_of_sine", "torch.relu(torch.sin(x))", "tl.maximum(tl.sin(x), 0.0)"),
        ("double_of_add_one", "2.0 * (x + 1.0)", "2.0 * (x + 1.0)"),
        ("square_of_add_one", "torch.square((x + 1.0))", "(x + 1.0) * (x + 1.0)"),
        ("exponential_of_tanh", "torch.exp(torch.tanh(x))", "tl.exp((2.0 * tl.sigmoid(2.0 * x) - 1.0))"),
    ],
)
def test_chains_by_hand(name, in_pytorch, in_triton):
    assert CHAINS[name] == (in_pytorch, in_triton)


def test_every_ordered_pair_of_steps_is_a_chain():
    assert len(CHAINS) == len(STEPS) * (len(STEPS) - 1)


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_in_a_kernel_is_the_chain_of_pytorch(name):
    """Triton's functions by torch's of the same meaning."""
    tl = SimpleNamespace(
        maximum=lambda x, least: torch.clamp(x, min=least),
        **{
            function: getattr(torch, function)
            for function in ("abs", "sigmoid", "exp", "sin", "cos", "clamp", "log")
        },
    )
    wanted, found = (
        eval(expression, {"torch": torch, "tl": tl, "x": torch.linspace(-3, 3, 101, dtype=torch.float64)})
        for expression in CHAINS[name]
    )
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_no_chain_is_both_trained_on_and_held_out():
    train, held_out = generated_problems(100, families=["chain"], held_out=40)
    assert len({one.name for one in (*train, *held_out)}) == 140
    with pytest.raises(DataError, match="chain gave 156 distinct problems, wanted 157"):
        generated_problems(157, families=["chain"])


def test_families_have_answers_of_all_their_operations_or_of_none():
    for family in FAMILIES.values():
        assert not family.answers or set(family.answers) == set(family.variants)


def test_a_skeleton_lacks_one_expression():
    skeleton = skeleton_of(problem("binary"))
    assert skeleton.count(ANSWER) == 1
    assert "def kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):" in skeleton
    assert f"tl.store(out_ptr + at, {ANSWER}, mask=at < n)" in skeleton


def test_a_right_answer_is_an_expression_or_a_whole_module():
    one = problem("elementwise")
    whole = example_of(one)
    expression = example_of(replace(one, skeleton=skeleton_of(one)))
    assert whole == f"```python\n{filled(skeleton_of(one), expression)}```"
    assert example_of(problem("softmax")) is None
    with pytest.raises(
        DataError, match=r"has no skeleton; set kernels\.families to some of elementwise, binary"
    ):
        skeleton_of(problem("softmax"))


@pytest.mark.parametrize(
    ("response", "candidate"),
    [
        ("tl.abs(x)", "f(tl.abs(x))"),
        ("<think>x</think>\n tl.abs(x) \n", "f(tl.abs(x))"),
        ("So:\n```python\ntl.abs(x)\n```", "f(tl.abs(x))"),
        ("  \n", None),
    ],
)
def test_a_response_goes_into_the_skeleton(response, candidate):
    assert candidate_of(response, f"f({ANSWER})") == candidate


def test_what_forward_returns_is_the_expression():
    one = problem("chain")
    assert expression_of(one.code, "here") == CHAINS[one.name.partition("_")[2]][0]
    longer = one.code.replace("        return", "        y = x\n        return")
    with pytest.raises(DataError, match="here: found a forward of several statements"):
        expression_of(longer, "here")


def test_a_row_may_have_a_skeleton():
    row = problem("elementwise").to_dict()
    assert problem_of(Record("rows.jsonl:1", row | {"skeleton": f"x = {ANSWER}"})).skeleton == f"x = {ANSWER}"
    for bad in ("x = 1", f"{ANSWER} {ANSWER}", 3):
        with pytest.raises(DataError, match="in 'skeleton'; wanted a module with <answer> in one place"):
            problem_of(Record("rows.jsonl:1", row | {"skeleton": bad}))


@pytest.mark.parametrize("family", ["chain", "binary"])
def test_a_right_answer_passes_all_gates(evaluator, family):
    one = problem(family)
    verdict = evaluator.evaluate(one, filled(skeleton_of(one), example_of(replace(one, skeleton="x"))))
    assert verdict.correct, verdict.message


@pytest.mark.slow
@pytest.mark.faults
def test_right_answers_of_every_operation_pass_all_gates(evaluator):
    """Of chains each step once as the inner and once as the outer one; the values of all chains are compared above."""
    steps = list(STEPS)
    wanted = {f"chain_{outer}_of_{inner}" for inner, outer in zip(steps, steps[1:] + steps[:1], strict=True)}
    wanted |= {
        f"{name}_{variant}" for name in ("elementwise", "binary") for variant in FAMILIES[name].variants
    }
    problems = {
        one.name: one
        for family, n in (("chain", len(CHAINS)), ("elementwise", 200), ("binary", 200))
        for one in generated_problems(n, families=[family])[0]
    }
    assert wanted <= problems.keys()
    for name in sorted(wanted):
        one = problems[name]
        verdict = evaluator.evaluate(one, filled(skeleton_of(one), example_of(replace(one, skeleton="x"))))
        assert verdict.correct, (name, verdict.message)
