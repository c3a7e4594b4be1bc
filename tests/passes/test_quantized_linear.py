"""A quantised linear layer alone: against float64, torchao, and itself loaded, copied and pickled."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samopt.passes import SemiSparse
from samopt.passes.kernels.quantized_rows import LIMITS, Rows, quantize_rows
from samopt.passes.quantized_linear import QuantizedLinear, unfit, weight_of
from samopt.passes.two_four import is_two_four
from tests.numerics import assert_bit_equal, relative_error

dtypes = pytest.mark.parametrize("dtype", LIMITS, ids=str)
ERROR = {torch.int8: 1.5e-2, torch.float8_e4m3fn: 5e-2}  # of normally distributed factors, 64 products a sum


def linear(seed: int = 0, bias: bool = True, dtype: torch.dtype = torch.float32, outputs: int = 48) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(64, outputs, bias=bias, dtype=dtype).requires_grad_(False)


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


@dtypes
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_computes_the_layer_up_to_its_quantisation(dtype: torch.dtype, bias: bool, given: torch.dtype) -> None:
    layer, x = linear(bias=bias, dtype=given), tokens(given)
    ours = QuantizedLinear(layer, dtype)
    found = ours(x)
    assert (found.dtype, found.shape) == (given, (2, 5, 48))
    exact = copy.deepcopy(layer).double()(x.double())
    assert 1e-4 < relative_error(found, exact) < ERROR[dtype]
    rounded = weight_of(ours).double(), [part.double() for part in quantize_rows(x, dtype)]
    same = rounded[1][0] * rounded[1][1] @ rounded[0].T + (layer.bias.double() if bias else 0)
    assert relative_error(found, same) < 4 * torch.finfo(given).eps, "scales, sums and bias are exact"
    gelu = nn.functional.gelu(same)
    assert relative_error(ours(x, gelu=True), gelu) < max(1e-3, 4 * torch.finfo(given).eps)


@dtypes
def test_quantised_rows_are_taken_as_they_are(dtype: torch.dtype) -> None:
    ours, x = QuantizedLinear(linear(), dtype), tokens()
    assert_bit_equal(ours(Rows(*quantize_rows(x, dtype))), ours(x))


@dtypes
def test_rows_and_channels_of_zeros_give_the_bias(dtype: torch.dtype) -> None:
    layer = linear()
    layer.weight[3] = 0
    ours = QuantizedLinear(layer, dtype)
    assert_bit_equal(ours(torch.zeros(1, 64)), layer.bias[None])
    assert_bit_equal(ours(tokens())[..., 3], layer.bias[3].expand(2, 5))


@dtypes
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_show(dtype: torch.dtype, bad: float) -> None:
    layer = linear()
    layer.weight[3, 7] = bad
    found = QuantizedLinear(layer, dtype)(tokens())
    assert not found[..., 3].isfinite().any()
    assert found[..., :3].isfinite().all()


@dtypes
def test_hooks_stay(dtype: torch.dtype) -> None:
    layer, x = linear(), tokens()
    layer.register_forward_pre_hook(lambda _, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True)
    layer.register_forward_hook(lambda _, args, out: out + 1)
    ours = QuantizedLinear(layer, dtype)
    assert_bit_equal(ours(x), QuantizedLinear(linear(), dtype)(2 * x) + 1)
    ours.register_forward_hook(lambda _, args, out: out.zero_())
    assert layer(x).any(), "the layer that was quantised has its own"


@dtypes
def test_its_own_state_loads(dtype: torch.dtype) -> None:
    ours, other = QuantizedLinear(linear(0), dtype), QuantizedLinear(linear(1), dtype)
    state = other.state_dict()
    assert {key: value.shape for key, value in state.items()} == {
        "weight": (48, 64),
        "weight_scale": (48,),
        "bias": (48,),
    }
    ours.load_state_dict(state)
    assert_bit_equal(ours(tokens()), other(tokens()))


@dtypes
@pytest.mark.parametrize("assign", [False, True])
def test_a_float_checkpoint_is_quantised_on_the_way_in(dtype: torch.dtype, assign: bool) -> None:
    ours = QuantizedLinear(linear(0, dtype=torch.bfloat16), dtype)
    state = linear(1).state_dict()
    kept = dict(state)
    ours.load_state_dict(state, assign=assign)
    assert state.keys() == kept.keys(), "the caller's stays as it was"
    assert all(state[key] is kept[key] for key in kept)
    expected = QuantizedLinear(linear(1).bfloat16(), dtype)
    assert_bit_equal([ours.weight.float(), ours.weight_scale], [expected.weight.float(), expected.weight_scale])


@dtypes
def test_a_state_of_the_other_dtype_is_quantised_anew(dtype: torch.dtype) -> None:
    (theirs,) = LIMITS.keys() - {dtype}
    ours, other = QuantizedLinear(linear(0), dtype), QuantizedLinear(linear(1), theirs)
    ours.load_state_dict(other.state_dict())
    assert ours.weight.dtype is dtype
    assert relative_error(weight_of(ours), weight_of(other)) < ERROR[dtype]
    state = {key: value for key, value in other.state_dict().items() if key != "weight_scale"}
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_scale"):
        ours.load_state_dict(state)


@dtypes
def test_a_checkpoint_in_double_precision_is_quantised_too(dtype: torch.dtype) -> None:
    ours = QuantizedLinear(linear(0), dtype)
    ours.load_state_dict(linear(1).double().state_dict())
    assert_bit_equal(ours(tokens()), QuantizedLinear(linear(1), dtype)(tokens()))


@dtypes
def test_weights_with_gradients_leave_buffers_without(dtype: torch.dtype) -> None:
    ours = QuantizedLinear(linear(0), dtype)
    ours.load_state_dict(linear(1).requires_grad_(True).state_dict(keep_vars=True), assign=True)
    assert not ours.weight_scale.requires_grad
    copy.deepcopy(ours)


@dtypes
def test_a_sparse_layer_stays_sparse(dtype: torch.dtype) -> None:
    sparse = nn.Sequential(linear())
    SemiSparse(("0",), criterion="magnitude", update=False)(sparse)
    ours = QuantizedLinear(sparse[0], dtype)
    assert is_two_four(ours.weight.float())
    assert repr(ours).endswith("inputs by token, 2:4 sparse)")
    ours.load_state_dict(linear(1).state_dict())
    expected = QuantizedLinear(linear(1), dtype)
    kept = ours.weight.float() != 0
    assert is_two_four(ours.weight.float())
    assert kept.float().mean() == pytest.approx(0.5, abs=0.02)
    assert relative_error(weight_of(ours)[kept], weight_of(expected)[kept]) < ERROR[dtype]


@dtypes
def test_a_cast_changes_the_results_dtype_and_not_the_weights(dtype: torch.dtype) -> None:
    ours = QuantizedLinear(linear(), dtype)
    expected = ours(tokens())
    ours.half()
    assert (ours.weight.dtype, ours.weight_scale.dtype) == (dtype, torch.float32)
    assert ours(tokens().half()).dtype is torch.float16
    assert relative_error(ours(tokens()), expected) < 2e-3
    assert_bit_equal(ours.float()(tokens()).half(), ours.half()(tokens()))


@dtypes
def test_what_does_not_fit_is_refused_as_in_pytorch(dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        QuantizedLinear(linear(), dtype).load_state_dict(linear(outputs=32).state_dict())


@dtypes
def test_what_is_copied_or_saved_computes_the_same(dtype: torch.dtype) -> None:
    ours, file = QuantizedLinear(linear(), dtype), io.BytesIO()
    torch.save(ours, file)  # Python's own pickle cannot read back a float8 tensor (PyTorch 2.14)
    file.seek(0)
    for again in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert_bit_equal(again(tokens()), ours(tokens()))


@dtypes
def test_it_says_what_it_is(dtype: torch.dtype) -> None:
    kind = str(dtype).removeprefix("torch.")
    sizes = "in_features=64, out_features=48, bias=True"
    expected = f"QuantizedLinear({sizes}, {kind} weights by channel, {kind} inputs by token)"
    assert repr(QuantizedLinear(linear(), dtype)) == expected


@pytest.mark.filterwarnings("ignore:Deprecation. PlainLayout:UserWarning")  # torchao 0.17, of its own code
def test_int8_is_what_torchao_computes() -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    theirs = nn.Sequential(linear())
    quantization.quantize_(
        theirs, quantization.Int8DynamicActivationInt8WeightConfig(version=2, set_inductor_config=False)
    )
    ours = QuantizedLinear(linear(), torch.int8)
    assert relative_error(ours(tokens()), theirs(tokens())) < 1e-2
    exact = linear().double()(tokens().double())
    assert relative_error(ours(tokens()), exact) < 1.1 * relative_error(theirs(tokens()), exact)


def test_sizes_that_do_not_fit_are_declined() -> None:
    assert unfit(linear()) is None
    assert unfit(linear(outputs=4)) == "its sizes, 64 to 4, are no multiples of 16, as quantised products need them"
