"""The bookkeeping of CUDA graphs, with a stand-in for the GPU; `test_gpu.py` has the graphs themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from samopt.errors import SamoptError
from samopt.passes import cuda_graphs
from samopt.passes.cuda_graphs import Cuda, CudaGraphs, pooled_bytes
from samopt.passes.parts import Parts
from tests.numerics import assert_bit_equal
from tests.stand_in import StandIn


class Model:
    """A linear layer with its graphs."""

    def __init__(self) -> None:
        self.layer = nn.Linear(4, 4).requires_grad_(False)
        self.device = StandIn()
        self.graphs = CudaGraphs("the layer", self.device)
        self.parts = Parts(self.layer)

    def __call__(self, pixels: Tensor, count: int | None = None) -> Tensor:
        (features,) = self.graphs.replay(lambda x: (self.layer(x),), [pixels], self.parts, count=count)
        return features


@pytest.fixture
def model() -> Model:
    return Model()


def test_one_graph_for_each_shape_dtype_and_mode(model: Model) -> None:
    pixels = torch.randn(2, 3, 5, 4)
    for _ in range(2):
        model(pixels)
        model(pixels[:1])
        model(pixels[:, :, :3].contiguous())
        with torch.no_grad():
            model(pixels)
        with torch.inference_mode():
            assert model(pixels).is_inference()
        model.graphs.replay(lambda pixels: (model.layer(pixels.float()),), [pixels.double()], model.parts)
    assert model.device.captured == [2, 1, 2, 2, 2, 2]
    assert model.device.replays == 12


def test_features_are_copied_out_and_cut(model: Model) -> None:
    pixels = torch.randn(2, 4, 3, 2, 4)
    first = model(pixels[0], count=3)
    assert first.untyped_storage().nbytes() == first.nbytes
    second = model(pixels[1])
    assert_bit_equal(first, model.layer(pixels[0])[:3])
    assert_bit_equal(second, model.layer(pixels[1]))


def test_what_is_expanded_is_kept_once(model: Model) -> None:
    row = torch.randn(1, 3, 1, 4)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        assert x.stride() == expanded.stride()
        return x.sum((1, 2)), (x[:, :1] + 1)[:, :, :1].expand(-1, 6, -1, -1)

    expanded = row.expand(2, -1, 5, -1)
    for rows in (row, 2 * row):
        total, wide = model.graphs.replay(call, [rows.expand(2, -1, 5, -1)], model.parts)
        assert_bit_equal([total, wide], list(call(rows.expand(2, -1, 5, -1))))
        assert wide.stride(1) == 0
        assert wide.untyped_storage().nbytes() == 2 * 4 * 4
    assert model.device.captured == [2]


def test_only_what_comes_again_is_captured_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MET", 2)
    model = Model()
    model.graphs = CudaGraphs("the layer", model.device, at_once=False)
    pixels = torch.randn(4, 3, 2, 4)
    for count, captured in ((1, []), (1, [1]), (2, [1]), (1, [1]), (3, [1]), (2, [1, 2])):
        assert_bit_equal(model(pixels[:count]), model.layer(pixels[:count]))
        assert model.device.captured == captured
    for count in (4, 1, 2, 4):
        model(pixels[:count])
    assert model.device.captured == [1, 2, 4]
    for count in (2, 1, 4):
        model.graphs._graphs.clear()
        model(pixels[:count])
    model(pixels[:3])
    assert model.device.captured == [1, 2, 4], "of three kinds that were met the first is forgotten"


def test_graphs_hold_so_many_bytes() -> None:
    model = Model()
    one = 4 * (3 * 2 * 4) * 2  # input and output
    model.graphs = CudaGraphs("the layer", model.device, keep=3 * one)
    pixels = torch.randn(4, 3, 2, 4)
    for count in (1, 2, 1):
        model(pixels[:count])
    assert (model.device.captured, model.device.waits) == ([1, 2], 0)
    model(pixels[:4])
    assert (model.device.captured, model.device.waits) == ([1, 2, 4], 2), "the last is kept, whatever it holds"
    model(pixels[:1])
    model(pixels[:2])
    assert (model.device.captured, model.device.waits) == ([1, 2, 4, 1, 2], 3)


def test_what_cannot_be_captured_runs_without(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, capture = torch.randn(2, 3, 2, 4), model.device.capture

    def fail(*_: Any) -> Any:
        raise SamoptError("the layer runs without a CUDA graph")

    monkeypatch.setattr(model.device, "capture", fail)
    with pytest.warns(UserWarning, match="the layer runs without a CUDA graph"):
        assert_bit_equal(model(pixels), model.layer(pixels))
    monkeypatch.setattr(model.device, "capture", capture)
    assert_bit_equal(model(pixels), model.layer(pixels))
    assert model.device.captured == [], "it is not tried again"
    assert_bit_equal(model(pixels[:1]), model.layer(pixels[:1]))
    assert model.device.captured == [1], "another kind of call is"


def test_values_written_in_place_need_no_new_capture(model: Model) -> None:
    pixels, other = torch.randn(1, 3, 2, 4), nn.Linear(4, 4)
    model(pixels)
    model.layer.load_state_dict(other.state_dict())
    with torch.no_grad():
        expected = other(pixels)
    assert_bit_equal(model(pixels), expected)
    assert model.device.captured == [1]
    assert model.device.resets == 1  # the first call's, of nothing


def test_weights_elsewhere_throw_all_graphs_away(model: Model) -> None:
    pixels, other = torch.randn(2, 3, 2, 4), nn.Linear(4, 4)
    model(pixels)
    model(pixels[:1])
    model.layer.load_state_dict(other.state_dict(), assign=True)
    with torch.no_grad():
        expected = other(pixels)
    assert_bit_equal(model(pixels), expected)
    assert model.device.captured == [2, 1, 2]
    assert model.device.resets == 2
    model(pixels[:1])
    assert model.device.captured == [2, 1, 2, 1]
    model.layer.bias.data = model.layer.bias.data.clone()  # as `.to(device)` does
    model(pixels)
    assert model.device.captured == [2, 1, 2, 1, 2]


REPLACED: dict[str, Callable[[nn.Linear, Tensor], None]] = {
    "a new parameter": lambda layer, weight: setattr(layer, "weight", nn.Parameter(weight, requires_grad=False)),
    "new data": lambda layer, weight: setattr(layer.weight, "data", weight),
}


@pytest.mark.parametrize("replace", REPLACED)
def test_a_replaced_weight_would_be_stale_if_nobody_looked(
    model: Model, replace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, weight = torch.randn(1, 3, 2, 4), torch.randn(4, 4)
    with monkeypatch.context() as nobody_looks:
        nobody_looks.setattr(CudaGraphs, "_forget_if_moved", lambda *_: None)
        before = model(pixels)
        REPLACED[replace](model.layer, weight)
        assert_bit_equal(model(pixels), before)
    assert_bit_equal(model(pixels), nn.functional.linear(pixels, weight, model.layer.bias))
    assert model.device.captured == [1, 1]


def test_no_graph_where_gradients_are_wanted_or_nothing_can_be_captured(model: Model) -> None:
    pixels = torch.randn(1, 3, 2, 4)
    assert model.graphs.may_stand_for([pixels], model.parts)
    for wants in (pixels, model.layer.weight):
        wants.requires_grad_()
        assert not model.graphs.may_stand_for([pixels], model.parts)
        with torch.no_grad():
            assert model.graphs.may_stand_for([pixels], model.parts)
        wants.requires_grad_(False)
    model.device.refuses = True
    assert not model.graphs.may_stand_for([pixels], model.parts)


def test_threads_take_turns(model: Model) -> None:
    images = torch.randn(4, 1, 3, 2, 4)
    expected = [model.layer(image) for image in images]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert_bit_equal(list(pool.map(model, images)), expected)
    assert model.device.captured == [1]


def test_a_failed_capture_leaves_no_graph(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.randn(1, 3, 2, 4)

    def fail(pixels: Tensor) -> tuple[Tensor]:
        raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        model.graphs.replay(fail, [pixels], model.parts)
    assert_bit_equal(model(pixels), model.layer(pixels))


CUDNN: Any = torch.backends.cudnn
SETTINGS: dict[str, Callable[[], None]] = {
    "matmul": lambda: torch.set_float32_matmul_precision("high"),
    "matmul, anew": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "convolution": lambda: setattr(CUDNN, "allow_tf32", False),
    "convolution, anew": lambda: setattr(CUDNN.conv, "fp32_precision", "ieee"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
}


@pytest.fixture
def settings() -> Iterator[None]:
    """Starts from what PyTorch starts with, whatever other tests left, and puts back what a test sets."""
    matmul, before = torch.backends.cuda.matmul.fp32_precision, CUDNN.allow_tf32
    CUDNN.allow_tf32 = True
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = matmul
    CUDNN.allow_tf32 = before  # and with it what the newer interface says
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_chooses_other_kernels_is_captured_anew(model: Model, setting: str) -> None:
    pixels = torch.randn(1, 3, 2, 4)
    model(pixels)
    SETTINGS[setting]()
    for _ in range(2):
        model(pixels)
    assert model.device.captured == [1, 1]
    assert model.device.resets == 1, "the other graphs stay"


def test_a_failed_capture_says_what_failed_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pixels: Tensor) -> tuple[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    cuda = Cuda("the mask decoder")
    cuda._pool = cuda._side = cast(Any, "broken")
    with pytest.raises(SamoptError) as error:
        cuda._record(cast(torch.cuda.CUDAGraph, None), fail, (torch.zeros(1),))
    assert str(error.value) == (
        "the mask decoder runs without a CUDA graph, as it cannot be captured: OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 2 GiB; if position tables are indexed at every call, apply HoistRelPos before Compile"
    )
    assert (cuda._pool, cuda._side) == (None, None)


def test_what_graphs_hold_is_counted_as_long_as_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = iter([100, 164, 200, 208])
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: next(reserved))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    cuda, graph = Cuda("the mask decoder"), cast(torch.cuda.CUDAGraph, None)
    for _ in range(2):
        cuda._record(graph, lambda pixels: (pixels,), (torch.zeros(1),))
    assert pooled_bytes(torch.device("cuda")) == pooled_bytes(torch.device("cuda", 7)) == 72
    assert pooled_bytes(torch.device("cuda", 0)) == 0
    cuda.reset()
    assert pooled_bytes(torch.device("cuda")) == 0


def test_a_cpu_takes_no_graphs() -> None:
    assert not Cuda("the image encoder").takes(torch.zeros(1, 3, 2, 2))
