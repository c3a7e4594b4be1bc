"""The audit finds the published synchronisations by file and line, and none in the stages once a recipe is through."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from rich.console import Console
from segment_anything import SamPredictor
from segment_anything.modeling import Sam, image_encoder
from segment_anything.modeling.prompt_encoder import PromptEncoder
from torch import Tensor, nn

from samopt import Sample, Unsupported, optimize
from samopt.passes import Int8Dynamic
from samopt.profiling.call import WholeCall
from samopt.profiling.sync_audit import audit
from samopt.profiling.syncs import as_imported
from samopt.tiny import load_tiny

needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="fake CUDA tensors need a build of torch with CUDA"
)


def lines_of(function: Callable[..., object], *texts: str) -> list[str]:
    """Where the lines of a function are that hold one of the texts, as a `Sync` says it."""
    lines, first = inspect.getsourcelines(function)
    file = as_imported(inspect.getfile(function))
    return [f"{file}:{first + i}" for i, line in enumerate(lines) if any(text in line for text in texts)]


@pytest.fixture
def call(pictures: list[Sample]) -> WholeCall:
    return WholeCall.of(pictures[0])


@needs_cuda_build
def test_the_published_synchronisations_in_the_unmodified_model(tiny256: Sam, call: WholeCall) -> None:
    found = audit(tiny256, call)
    assert found.stopped == ""
    (index,) = lines_of(image_encoder.get_rel_pos, "rel_pos_resized[")
    assert index.startswith("segment_anything/modeling/image_encoder.py:")
    masks = lines_of(PromptEncoder._embed_points, "] +=")
    assert len(masks) == 3
    places = [(sync.place, sync.stage, sync.reason, count) for sync, count in found.inside()]
    table = "indexes with a tensor of the host"
    assert places[0] == (index, "image encoder", table, 2 * len(tiny256.image_encoder.blocks))
    written = [
        (line, "prompt encoder", f"{does} with a boolean mask", 1) for line in masks for does in ("reads", "writes")
    ]
    assert places[1:] == written


@needs_cuda_build
def test_what_each_call_has_to_copy(tiny256: Sam, call: WholeCall) -> None:
    copies = [
        (sync.place, sync.stage) for sync, _ in audit(tiny256, call).syncs if sync.stage in ("set_image", "predict")
    ]
    (image,) = lines_of(SamPredictor.set_image, "torch.as_tensor(")
    there, back = lines_of(SamPredictor.predict, "as_tensor(point_"), lines_of(SamPredictor.predict, ".cpu()")
    assert copies == [(image, "set_image"), *((line, "predict") for line in (*there, *back))]
    assert (len(there), len(back)) == (2, 3)


@needs_cuda_build
@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize("recipe", ["exact", "fast"])
def test_none_after_a_recipe(optimised: Callable[[str], Sam], call: WholeCall, recipe: str) -> None:
    model = optimised(recipe)
    compiled = model.image_encoder._compiled_call_impl
    found = audit(model, call)
    assert found.stopped == ""
    assert found.inside() == ()
    assert len(found.syncs) == 6
    assert model.image_encoder._compiled_call_impl is compiled is not None


class Asks(nn.Module):
    """A decoder that asks for a value before it goes on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **arguments: Tensor) -> tuple[Tensor, Tensor]:
        if arguments["image_embeddings"].isnan().any():
            raise ValueError("NaN")
        masks, iou = self.inner(**arguments)
        return masks, iou


@needs_cuda_build
def test_code_that_needs_values_ends_it_with_a_sentence(sam: Sam, call: WholeCall) -> None:
    whole = audit(sam, call)
    sam.mask_decoder = Asks(sam.mask_decoder)
    found = audit(sam, call)
    assert found.stopped.startswith("the mask decoder failed on tensors without values: ")
    assert found.inside()[:-1] == whole.inside()
    (last, _) = found.inside()[-1]
    assert (last.stage, last.reason) == ("mask decoder", "item brings a value to the host")
    assert last.place in lines_of(Asks.forward, "isnan()")
    console = Console(width=130)
    with console.capture() as shown:
        console.print(found)
    assert "the rest is not known: the mask decoder failed" in " ".join(shown.get().split())
    assert found.to_dict()["stopped"] == found.stopped


def test_a_build_without_cuda_says_so(sam: Sam, call: WholeCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(Unsupported, match=r"needs fake CUDA tensors.*no GPU is needed"):
        audit(sam, call)


@needs_cuda_build
def test_weights_of_torchao_are_refused(sam: Sam, call: WholeCall) -> None:
    pytest.importorskip("torchao")
    Int8Dynamic(kernel="torchao")(sam)
    with pytest.raises(Unsupported, match="no fake tensor of a weight that is a Int8Tensor"):
        audit(sam, call)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("recipe", [None, "fast"])
def test_pytorch_itself_sees_the_same_on_a_gpu(recipe: str | None, pictures: list[Sample]) -> None:
    sam: Sam = load_tiny().to("cuda")
    model = sam if recipe is None else optimize(sam, recipe, verify="off")
    call = WholeCall.of(pictures[0])
    for _ in range(3):
        call(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call(model)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in seen if "synchronizing CUDA operation" in str(warning.message)]
    told = Counter(f"{as_imported(warning.filename)}:{warning.lineno}" for warning in waits)
    ours: Counter[str] = Counter()
    for sync, count in audit(model, call).syncs:
        ours[sync.place] += count
    assert told == ours
    torch._dynamo.reset()
