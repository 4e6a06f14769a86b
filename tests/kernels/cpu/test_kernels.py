"""The kernels in C agree with the reference on ragged shapes, and leave to torch what they must."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cb_kernels import RaggedBatch, pack_linear, reference, torch_impl
from cb_kernels.cpu.kernels import Kernels
from cb_kernels.cpu.library import kernels

from tests.kernels.cases import CASES, Case, attend, make_inputs

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
_EDGES = ((1, 31), (1, 32), (1, 33), (1, 1), (1, 64), (1, 65), (40, 97), (1, 128), (33, 33))
_SHAPES = [(64, 1), (80, 2), (96, 3), (112, 4), (128, 5), (256, 6), (64, 7), (32, 8)]
RAGGED = [
    Case(f"dim-{dim}-group-{group}", _EDGES, 2 * group, 2, dim, block_size=32)
    for dim, group in _SHAPES
]
OPTIONS = [
    dataclasses.replace(RAGGED[2], name="window", sliding_window=20),
    dataclasses.replace(RAGGED[2], name="soft-cap", soft_cap=1.5),
    dataclasses.replace(RAGGED[2], name="all", sliding_window=70, soft_cap=2.0, sinks=True),
]
MANY = Case("many-rows", tuple((1, 1 + i % 40) for i in range(150)), 3, 1, 16, block_size=8)


@pytest.fixture(name="c")
def _c() -> Kernels:
    loaded = kernels()
    if loaded is None:
        pytest.skip("no kernels in C on this machine")
    return loaded


@pytest.fixture(name="threads")
def _threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("heads_outside", [True, False], ids=["heads-outside", "heads-inside"])
@pytest.mark.parametrize("case", [*RAGGED, *OPTIONS, MANY], ids=str)
def test_attention_agrees_with_the_reference(
    c: Kernels, case: Case, heads_outside: bool, dtype: torch.dtype
) -> None:
    inputs = make_inputs(case, dtype, heads_outside=heads_outside)
    assert c.takes_attention(inputs.q, inputs.k_cache, inputs.v_cache)
    expected = attend(reference.paged_attention, inputs, case)
    tolerance = TOLERANCES[dtype]
    actual = attend(c.attention, inputs, case).double()
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", [RAGGED[0], MANY], ids=str)
def test_a_nan_in_a_slot_that_no_row_owns_does_not_leak(
    c: Kernels, case: Case, dtype: torch.dtype
) -> None:
    inputs = make_inputs(case, dtype)
    clean = attend(c.attention, inputs, case)
    unowned = torch.ones(inputs.k_cache.shape[:2], dtype=torch.bool)
    for row, (_, keys) in enumerate(case.rows):
        for p in range(keys):
            block = inputs.batch.block_table[row, p // case.block_size]
            unowned[block, p % case.block_size] = False
    inputs.k_cache[unowned] = torch.nan
    inputs.v_cache[unowned] = torch.nan
    assert torch.equal(attend(c.attention, inputs, case), clean)


def test_a_nan_of_one_row_stays_in_that_row(c: Kernels) -> None:
    inputs = make_inputs(MANY)
    clean = attend(c.attention, inputs, MANY)
    inputs.k_cache[int(inputs.batch.block_table[7, 0]), 0] = torch.nan
    hurt = attend(c.attention, inputs, MANY)
    assert bool(hurt[7].isnan().all())
    others = torch.arange(len(MANY.rows)) != 7
    assert torch.equal(hurt[others], clean[others])


def test_a_row_gives_the_same_bits_alone_and_among_others(c: Kernels) -> None:
    inputs = make_inputs(MANY, torch.bfloat16)
    together = attend(c.attention, inputs, MANY)
    row = 37
    alone = RaggedBatch(
        block_table=inputs.batch.block_table[row : row + 1],
        query_start_loc=[0, 1],
        seq_lens=[inputs.batch.seq_lens[row]],
        block_size=MANY.block_size,
    )
    one = dataclasses.replace(inputs, q=inputs.q[row : row + 1], batch=alone)
    assert torch.equal(attend(c.attention, one, MANY), together[row : row + 1])


def test_a_block_that_is_not_there_is_refused(c: Kernels) -> None:
    inputs = make_inputs(MANY)
    inputs.batch.block_table[3, 0] = inputs.k_cache.shape[0]
    with pytest.raises(IndexError, match="does not have"):
        attend(c.attention, inputs, MANY)
    k = torch.zeros(1, 1, 16)
    with pytest.raises(IndexError, match="slot"):
        c.store_kv(k, k, inputs.k_cache, inputs.v_cache, torch.tensor([10**6]))


@pytest.mark.parametrize("stale", [-1, 10**6])
def test_what_stands_in_a_table_before_the_window_is_not_looked_at(c: Kernels, stale: int) -> None:
    """A row that has moved on keeps the numbers of the blocks that it gave up."""
    case = Case("window", ((1, 15), (3, 15), (1, 4)), sliding_window=5)
    inputs = make_inputs(case)
    expected = attend(c.attention, inputs, case)
    inputs.batch.block_table[0, :2] = stale  # keys 10 to 14 are seen, in blocks 2 and 3
    inputs.batch.block_table[1, :2] = stale  # keys 8 to 14
    assert torch.equal(attend(c.attention, inputs, case), expected)
    inputs.batch.block_table[1, 2] = stale
    with pytest.raises(IndexError, match="does not have"):
        attend(c.attention, inputs, case)


def test_shapes_without_whole_vectors_and_other_dtypes_go_to_torch(c: Kernels) -> None:
    odd = next(case for case in CASES if case.head_dim == 72)
    inputs = make_inputs(odd)
    assert not c.takes_attention(inputs.q, inputs.k_cache, inputs.v_cache)
    inputs = make_inputs(MANY, torch.float16)
    assert not c.takes_attention(inputs.q, inputs.k_cache, inputs.v_cache)
    assert not c.takes_linear(torch.zeros(64, 64), gated=False)
    assert not c.takes_norm(torch.zeros(2, 20), torch.zeros(20))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 700])
def test_norm_and_rope_agree_with_torch(c: Kernels, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 576, dtype=dtype), torch.randn(576, dtype=dtype)
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    expected = F.rms_norm(x, (576,), weight, 1e-5)
    torch.testing.assert_close(c.rms_norm(x, weight, 1e-5), expected, **tolerance)
    heads = torch.randn(tokens, 5, 96, dtype=dtype)[:, :4]
    angles = torch.randn(tokens, 1, 96)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    cos[..., 64:], sin[..., 64:] = 1.0, 0.0
    expected = torch_impl.rope(heads, cos, sin, 32)
    torch.testing.assert_close(c.rope(heads, cos, sin, 32), expected, **tolerance)


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 64, 129, 300])
@pytest.mark.parametrize(("width", "depth"), [(16, 2), (80, 34), (128, 2500), (192, 64)])
def test_linears_agree_with_torch(c: Kernels, width: int, depth: int, rows: int) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16
    x, bias = torch.randn(rows, depth, dtype=dtype), torch.randn(width, dtype=dtype)
    weight = (torch.randn(width, depth) * depth**-0.5).to(dtype)
    onto = torch.randn(rows, width, dtype=dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    packed = c.pack(weight, gated=False)
    actual = c.linear(x, packed, bias, width, gated=False).double()
    torch.testing.assert_close(actual, exact, atol=1e-2, rtol=1e-2)
    actual = c.linear(x, packed, bias, width, gated=False, onto=onto, scale=0.5).double()
    torch.testing.assert_close(actual, onto + 0.5 * exact, atol=1e-2, rtol=1e-2)
    if c.takes_linear(weight, gated=True):
        gate, up = exact.chunk(2, -1)
        packed, bias = c.pack(weight, gated=True), c.interleave(bias)
        actual = c.linear(x, packed, bias, width, gated=True).double()
        torch.testing.assert_close(actual, F.silu(gate) * up, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 24, 25, 60, 128, 129])
@pytest.mark.parametrize("width", [16, 48, 208, 320, 1024])
def test_a_linear_has_the_same_bits_by_any_number_of_threads(
    c: Kernels, width: int, rows: int, threads: Callable[[int], None]
) -> None:
    """Also by more than have a column to multiply, and where panels do not divide among them."""
    x, weight = torch.randn(rows, 34).bfloat16(), torch.randn(width, 34).bfloat16()
    exact, expected = F.linear(x.double(), weight.double()), None
    for count in (1, 2, 3, 7):
        threads(count)
        actual = c.linear(x, c.pack(weight, gated=False), None, width, gated=False)
        expected = actual if expected is None else expected
        assert torch.equal(actual, expected)
        torch.testing.assert_close(actual.double(), exact, atol=5e-2, rtol=1e-2)
        if width % 64 == 0:
            gated = c.linear(x, c.pack(weight, gated=True), None, width, gated=True)
            gate, up = expected.float().chunk(2, -1)
            torch.testing.assert_close(gated.float(), F.silu(gate) * up, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("rows", [0, 1, 30, 200])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_a_weight_without_outputs_has_none(
    c: Kernels, gated: bool, rows: int, threads: Callable[[int], None]
) -> None:
    threads(1)
    packed = c.pack(torch.zeros(0, 64).bfloat16(), gated=gated)
    y = torch.full((128,), 7, dtype=torch.int16)
    x = torch.zeros(rows, 64).bfloat16()
    c.library.cb_linear(
        *(x.data_ptr(), 64, packed.data_ptr(), None, None, 1.0, gated),
        *(y[64:].data_ptr(), rows, 64, 0),
    )
    assert (y == 7).all()


@pytest.mark.parametrize("gate", [-3e38, -1e37, -100.0, 0.0, 90.0, -torch.inf, torch.nan], ids=str)
def test_the_gate_of_a_linear_takes_any_number(c: Kernels, gate: float) -> None:
    weight = torch.zeros(64, 16, dtype=torch.bfloat16)
    weight[:32, 0], weight[32:, 1] = 1.0, 1.0
    x = torch.tensor([[gate, 1.0] + [0.0] * 14], dtype=torch.bfloat16)
    actual = c.linear(x, c.pack(weight, gated=True), None, 64, gated=True)
    expected = F.silu(x[:, :1].float()).expand(1, 32)
    torch.testing.assert_close(actual.float(), expected, atol=1e-6, rtol=1e-2, equal_nan=True)


def test_a_linear_reads_whole_dwords_wherever_x_begins(
    c: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = c.pack(torch.zeros(16, 6, dtype=torch.bfloat16), gated=False)
    begins: list[int] = []
    library = SimpleNamespace(cb_linear=lambda x, *others: begins.append(x))
    monkeypatch.setattr(c, "library", library)
    c.linear(torch.zeros(13, dtype=torch.bfloat16)[1:].view(2, 6), packed, None, 16, gated=False)
    assert begins[0] % 4 == 0


def test_a_packed_weight_refuses_what_it_would_read_as_something_else(c: Kernels) -> None:
    packed = pack_linear(torch.zeros(16, 6, dtype=torch.bfloat16), None, gated=False)
    assert packed is not None
    for wrong in (torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(2, 6)):
        with pytest.raises(ValueError, match=r"x must be bfloat16 \[\.\.\., 6\]"):
            packed(wrong)
    x = torch.zeros(2, 6, dtype=torch.bfloat16)
    for wrong in (torch.zeros(2, 16), x.new_zeros(1, 16), x.new_zeros(2, 15)):
        with pytest.raises(ValueError, match="cannot be added onto"):
            packed(x, wrong)
    for wrong in (torch.zeros(16), x.new_zeros(15)):
        with pytest.raises(ValueError, match="bias"):
            pack_linear(x.new_zeros(16, 6), wrong, gated=False)
