from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slime_models.transfer import fingerprint as module
from slime_models.transfer import threads
from slime_models.transfer.fingerprint import copied_fingerprints, fingerprint, fingerprints
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MODULUS = 1 << 64


def reference(tensor: Tensor) -> int:
    """The checksum, spelled out a byte at a time in Python's integers, from its docstring."""

    def splitmix_weight(position: int, stream: int) -> int:
        value = ((position + 1) << 2 | stream) * 0x9E3779B97F4A7C15 % MODULUS
        for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            value = (value ^ signed_shift(value, 29)) * multiplier % MODULUS
        return value ^ signed_shift(value, 31) | 1

    def signed_shift(value: int, bits: int) -> int:
        return ((value - MODULUS if value >> 63 else value) >> bits) % MODULUS

    places = [splitmix_weight(place, 1) for place in range(512)]
    rows = [splitmix_weight(row, 2) for row in range(tensor.nbytes // 4096 + 1)]
    assert all(weight % 2 for weight in (*places, *rows))
    raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    total = 0
    for start in range(0, len(raw), 8):
        word = int.from_bytes(raw[start : start + 8].ljust(8, b"\0"), "little", signed=True)
        total += (word + (word >> 32)) * places[start // 8 % 512] * rows[start // 4096]
    text = f"{total % MODULUS} {tensor.dtype} {tuple(tensor.shape)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (4, 4), (41, 401), (3 * 4096 * 4 + 5,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sum_is_the_one_spelled_out(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random(*shape, dtype=dtype)
    assert fingerprint(tensor) == reference(tensor)


@pytest.mark.parametrize("with_numba", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 255, 256, 300])
@pytest.mark.parametrize("more", [0, 1, 8, 4088])
def test_sum_is_the_one_spelled_out_compiled_or_not(
    monkeypatch: pytest.MonkeyPatch, rows: int, more: int, with_numba: bool
) -> None:
    if with_numba:
        pytest.importorskip("numba")
    monkeypatch.setattr(module, "is_compiled_for", lambda _: with_numba)
    tensor = torch.randint(-128, 128, (rows * 4096 + more,), dtype=torch.int8)
    assert fingerprint(tensor) == reference(tensor)


@pytest.mark.parametrize("with_numba", [False, True])
@pytest.mark.parametrize("shift", [0, 8, 32])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_copied_and_summed_is_what_is_copied_and_what_is_summed(
    monkeypatch: pytest.MonkeyPatch, with_numba: bool, shift: int, threads: int
) -> None:
    """To places side by side, aligned or not, from pieces of several threads; and no byte beside them is written."""
    if with_numba:
        pytest.importorskip("numba")
    monkeypatch.setattr(module, "is_compiled_for", lambda _: with_numba)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("slime_models.transfer.threads._PART_BYTES", 3 * 4096)
    shapes = [(3 * 4096 + 5,), (), (0, 4), (2047,), (2, 4096), (33, 7), (1,)]
    sources = [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    memory = torch.full((1 << 17,), 77, dtype=torch.uint8)
    base, pairs = -memory.data_ptr() % 64 + shift, []
    written = torch.zeros(1 << 17, dtype=torch.bool)
    for source in sources:
        end = base + source.nbytes
        pairs.append((memory[base:end].view(source.dtype).view(source.shape), source))
        written[base:end] = True
        base = -(-end // 64) * 64 + shift
    assert copied_fingerprints(pairs) == [reference(source) for source in sources]
    assert all(target.equal(source) for target, source in pairs)
    assert (memory[~written] == 77).all()


def test_what_is_not_contiguous_or_of_another_dtype_is_copied_and_its_source_summed() -> None:
    source, cast = random(40, 30).T, random(9, dtype=torch.float32)
    targets = torch.zeros(30, 40, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.bfloat16)
    assert copied_fingerprints([(targets[0], source), (targets[1], cast)]) == [
        reference(source),
        reference(cast),
    ]
    assert targets[0].equal(source)
    assert targets[1].equal(cast.to(torch.bfloat16))
    assert copied_fingerprints([]) == []


def test_two_signs_that_flip_show() -> None:
    """In the upper bits of words, where few bits of a product are left."""
    tensor = random(64, 64)
    for i, j in ((0, 1), (0, 2), (1, 63), (17, 40)):
        flipped = tensor.clone()
        flipped[i, 3] = -flipped[i, 3]
        flipped[j, 63] = -flipped[j, 63]
        assert fingerprint(flipped) != fingerprint(tensor)


def test_how_tensors_are_grouped_and_cut_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(3, 70_001), (), (0, 4), (17,), (40, 2048), (1, 65_536), (5, 5)]
    tensors = [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    alone = [reference(tensor) for tensor in tensors]
    assert fingerprints(tensors) == alone
    assert fingerprints([]) == []
    for group_bytes, few_rows, part_bytes in (
        (1, 1, 1),
        (1, 100, 1),
        (500_000, 32, 150_000),
        (1 << 28, 2, 9000),
    ):
        monkeypatch.setattr(module, "_GROUP_BYTES", group_bytes)
        monkeypatch.setattr(module, "_FEW_ROWS", few_rows)
        monkeypatch.setattr(threads, "_PART_BYTES", part_bytes)
        assert fingerprints(iter(tensors)) == alone


@settings(max_examples=30)
@given(st.lists(st.integers(0, 70) | st.integers(130_000, 300_000), min_size=1, max_size=6), st.booleans())
def test_the_way_of_a_device_gives_the_sums_of_the_way_of_the_host(sizes: list[int], apart: bool) -> None:
    """Both in host memory; neighbours in memory go to a device as one."""
    sizes = sizes if apart else [*(size // 8 * 8 for size in sizes[:-1]), sizes[-1]]  # each begins at a word
    flats = list(torch.randint(-128, 128, (sum(sizes),), dtype=torch.int8).split(sizes))
    flats = [flat.clone() for flat in flats] if apart else flats
    on_host = module._host_sums(flats)
    assert [total % (1 << 64) for total in module._device_sums(flats).tolist()] == [
        total % (1 << 64) for total in on_host
    ]


def test_tensors_that_lie_together_in_memory_have_the_sums_that_they_have_apart() -> None:
    """The third has a few elements after its last row of 4096 bytes."""
    parts = random(4 * 65_536 + 65_552).split([65_536, 65_536, 65_552, 65_536, 65_536])
    alone = [fingerprint(part.clone()) for part in parts]
    assert fingerprints(parts) == alone
    assert alone[2] == reference(parts[2])
    assert fingerprints(parts[::-1]) == alone[::-1]
    assert len(set(alone)) == 5


class Reads(TorchDispatchMode):
    """Counts operations that wait for a device: it has to say a number, or how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.n_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # torch's own
        aten = torch.ops.aten
        self.n_reads += func in (
            aten._local_scalar_dense.default,
            aten.nonzero.default,
            aten.masked_select.default,
        )
        return func(*args, **(kwargs or {}))


def test_no_tensor_is_waited_for_by_itself() -> None:
    """What is left is one read of all sums, which is a copy to the host where they are on a device."""
    tensors = [random(3, 70_001), random(5), random(40, 2048), random(0)]
    with Reads() as reads:
        found = fingerprints(tensors)
    assert reads.n_reads == 0
    assert found == [reference(tensor) for tensor in tensors]
    with Reads() as reads:
        tensors[0].sum().item()
    assert reads.n_reads == 1


@settings(max_examples=200)
@given(st.data())
def test_any_flipped_bit_shows(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.int8]))
    tensor = random(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 2000)), dtype=torch.float32).to(
        dtype
    )
    flipped = tensor.clone()
    raw = flipped.view(torch.uint8).reshape(-1)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(flipped) != fingerprint(tensor)


@settings(max_examples=200)
@given(st.data())
def test_two_swapped_elements_show(data: st.DataObject) -> None:
    tensor = torch.tensor(data.draw(st.lists(st.floats(width=16), min_size=2, max_size=60))).bfloat16()
    i, j = (data.draw(st.integers(0, tensor.numel() - 1)) for _ in range(2))
    swapped = tensor.clone()
    swapped[[i, j]] = swapped[[j, i]]
    same = torch.equal(swapped.view(torch.int16), tensor.view(torch.int16))
    assert (fingerprint(swapped) == fingerprint(tensor)) == same


@settings(max_examples=60)
@given(rows=st.integers(2, 50), columns=st.integers(2, 50), seed=st.integers(0, 2**31), data=st.data())
def test_swapped_rows_swapped_columns_and_transposition_show(
    rows: int, columns: int, seed: int, data: st.DataObject
) -> None:
    tensor = random(rows, columns, seed=seed)
    i, j = data.draw(st.permutations(range(rows)))[:2]
    k, m = data.draw(st.permutations(range(columns)))[:2]
    rows_swapped, columns_swapped = tensor.clone(), tensor.clone()
    rows_swapped[[i, j]] = tensor[[j, i]]
    columns_swapped[:, [k, m]] = tensor[:, [m, k]]
    prints = {fingerprint(x) for x in (tensor, rows_swapped, columns_swapped, tensor.T)}
    assert len(prints) == 4


def test_rows_with_equal_sums_show_when_swapped() -> None:
    tensor = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8], [8.0, 7, 6, 5, 4, 3, 2, 1]])
    assert fingerprint(tensor) != fingerprint(tensor.flip(0))


def test_words_that_differ_in_their_top_bit_only_show_when_swapped() -> None:
    tensor = torch.zeros(2, 4, dtype=torch.bfloat16)
    tensor[1, 3] = -0.0
    assert fingerprint(tensor) != fingerprint(tensor.flip(0))


def test_symmetric_matrix_in_another_shape_or_dtype_is_another_tensor() -> None:
    zeros = torch.zeros(4, 4)
    others = [zeros.reshape(2, 8), zeros.reshape(16), zeros.int(), zeros.bfloat16(), torch.zeros(4, 5)]
    assert len({fingerprint(x) for x in (zeros, *others)}) == 6


def test_strides_and_alignment_do_not_show() -> None:
    tensor = random(33, 17)
    shifted = torch.cat([torch.zeros(1).bfloat16(), tensor.reshape(-1)])[1:].reshape(33, 17)
    wide = torch.cat([tensor, tensor], dim=1)[:, :17]
    for same in (tensor.T.contiguous().T, shifted, wide, tensor.clone().requires_grad_()):
        assert fingerprint(same) == fingerprint(tensor)


def test_no_two_of_many_tensors_share_a_fingerprint() -> None:
    assert len({fingerprint(random(8, 8, seed=seed)) for seed in range(2000)}) == 2000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(0,), (3, 5), (4097, 1234), (40_000_001,)])
def test_device_does_not_show(shape: tuple[int, ...]) -> None:
    tensor = random(*shape)
    assert fingerprint(tensor.cuda()) == fingerprint(tensor)
