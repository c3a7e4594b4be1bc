from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from segment_anything.modeling import Sam
from torch import Tensor, nn

from samopt import InvalidInput, NoSites, Pass, Sample, Unsupported, optimize
from samopt.errors import AccuracyError
from samopt.passes import CastDtype, LinearGELU, SDPAttention, SemiSparse, TritonAttention, TunedLinear
from samopt.passes.calibration import input_moments
from samopt.passes.kernels.semi_sparse import MULTIPLES, compress, fastest, product
from samopt.passes.two_four import fitted, is_two_four, two_four, two_four_mask
from samopt.samples import scene_samples
from samopt.verify import Agreement, Reference, verify
from tests.models import random_sam
from tests.numerics import assert_bit_equal, relative_error
from tests.snapshot import Snapshot

MAGNITUDE = SemiSparse(criterion="magnitude", update=False)
SITES = [
    f"image_encoder.blocks.{index}.{path}"
    for index in (0, 1)
    for path in ("attn.qkv", "attn.proj", "mlp.lin1", "mlp.lin2")
]


@pytest.fixture
def inputs() -> Tensor:
    """Tokens [256, 24] whose features differ in size and hang together, as those of a model do."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(256, 24, generator=generator) @ torch.randn(24, 24, generator=generator)
    return mixed * torch.logspace(-0.3, 0.3, 24)


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(10, 24, generator=torch.Generator().manual_seed(1))


def best_two(scores: np.ndarray[Any, np.dtype[np.float64]]) -> Tensor:
    """True for the two best of each four, by sorting."""
    blocks = scores.reshape(-1, 4)
    keep = np.zeros(blocks.shape, dtype=bool)
    np.put_along_axis(keep, np.argsort(blocks, axis=1)[:, 2:], True, axis=1)
    return torch.from_numpy(keep.reshape(scores.shape))


# Masks and weights


def test_the_sparsifiers_mask_is_the_two_largest_of_four(weight: Tensor) -> None:
    assert torch.equal(two_four_mask(weight), best_two(weight.double().abs().numpy()))
    assert torch.equal(two_four(weight), weight * best_two(weight.double().abs().numpy()))


def test_activation_is_wandas_score(weight: Tensor, inputs: Tensor) -> None:
    norms = np.sqrt((inputs.double().numpy() ** 2).sum(0))
    expected = best_two(np.abs(weight.double().numpy()) * norms)
    assert not torch.equal(expected, two_four_mask(weight))
    squares = inputs.square().mean(0)
    assert torch.equal(two_four(weight, squares, "activation"), weight * expected)
    assert torch.equal(two_four(weight, inputs.T @ inputs / 256, "activation"), weight * expected)
    assert torch.equal(two_four(weight, squares, "magnitude"), two_four(weight))


def test_compensation_is_what_losing_a_weight_costs_at_least(weight: Tensor, inputs: Tensor) -> None:
    h = inputs.T @ inputs / len(inputs)
    damped = h.double() + 0.01 * h.diagonal().mean() * torch.eye(24)
    costs = torch.zeros_like(weight, dtype=torch.float64)
    for column in range(24):  # the column set to zero, and the others solved for anew
        rest = [index for index in range(24) if index != column]
        lost = torch.zeros(10, 24, dtype=torch.float64)
        lost[:, column] = -weight[:, column]
        lost[:, rest] = torch.linalg.solve(damped[rest][:, rest], -damped[rest][:, [column]] * lost[:, column]).T
        costs[:, column] = ((lost @ damped) * lost).sum(1)
    expected = best_two(costs.numpy())
    assert not torch.equal(expected, two_four_mask(weight))
    assert torch.equal(two_four(weight, h, "compensation"), weight * expected)


@pytest.mark.parametrize("criterion", ["magnitude", "activation", "compensation"])
def test_fitting_finds_the_least_squares_solution(weight: Tensor, inputs: Tensor, criterion: Any) -> None:
    h = inputs.T @ inputs / len(inputs)
    plain, new = (two_four(weight, h, criterion, update=update) for update in (False, True))
    assert torch.equal(new != 0, plain != 0)

    def change(candidate: Tensor) -> float:
        return float(((candidate - weight).double() @ inputs.double().T).square().sum())

    assert change(new) < 0.8 * change(plain)
    # Row by row, the rest of the features as they are, and damped: this is what it should come to.
    damped = inputs.double().T @ inputs.double() / len(inputs)
    damped += 0.01 * damped.diagonal().mean() * torch.eye(24)
    solved = torch.zeros_like(weight, dtype=torch.float64)
    for row, keep in enumerate(plain != 0):
        solved[row, keep] = torch.linalg.solve(damped[keep][:, keep], damped[keep] @ weight[row].double())
    assert relative_error(new, solved) < 1e-2


def test_fitting_changes_nothing_where_nothing_is_missing(weight: Tensor, inputs: Tensor) -> None:
    h = inputs.T @ inputs
    assert_bit_equal(two_four(two_four(weight), h, update=True), two_four(weight))
    everything = torch.ones_like(weight, dtype=torch.bool)
    assert_bit_equal(fitted(weight, everything, h), weight)


@pytest.mark.parametrize("rank", [0, 1, 5])
@pytest.mark.parametrize("criterion", ["magnitude", "activation", "compensation"])
def test_inputs_that_say_little_give_finite_weights(weight: Tensor, inputs: Tensor, rank: int, criterion: Any) -> None:
    few = inputs[:rank].clone()
    few[:, 4:8] = 0
    new = two_four(weight, few.T @ few, criterion, update=True)
    assert new.isfinite().all()
    assert is_two_four(new)
    if rank == 0:
        assert_bit_equal(new, two_four(weight))
    assert new.abs().max() < 10 * weight.abs().max()


@pytest.mark.parametrize("criterion", ["magnitude", "activation", "compensation"])
def test_weights_that_are_zero_or_nan_do_not_crash(weight: Tensor, inputs: Tensor, criterion: Any) -> None:
    weight[3], weight[4, 5], weight[5] = 0, math.nan, math.nan
    h = inputs.T @ inputs
    for new in (two_four(weight), two_four(weight, h, criterion, update=True)):
        assert is_two_four(new)
        assert new[3].eq(0).all()
        assert new[5].isnan().sum() == 12
    h[2, 3] = h[3, 2] = math.nan
    assert is_two_four(two_four(weight, h, criterion, update=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_dtype_stays_and_only_rounds(weight: Tensor, inputs: Tensor, dtype: torch.dtype) -> None:
    h = inputs.T @ inputs
    new, wide = two_four(weight.to(dtype), h, update=True), two_four(weight.to(dtype).float(), h, update=True)
    assert new.dtype is dtype
    assert is_two_four(new)
    assert relative_error(new, wide) < max(torch.finfo(dtype).eps, 1e-5)


def test_what_is_two_four() -> None:
    assert is_two_four(torch.tensor([[0.0, 1, 0, 2, 0, 0, 0, 1]]))
    assert not is_two_four(torch.tensor([[0.0, 1, 1, 1, 0, 0, 0, 0]]))
    assert not is_two_four(torch.tensor([[0.0, math.nan, math.nan, 1]]))
    assert not is_two_four(torch.zeros(2, 6))
    assert not is_two_four(torch.zeros(8))


# Calibration


@pytest.mark.parametrize("layers", [("qkv", "lin2"), ("decoder",)])
def test_moments_are_those_of_the_inputs(
    sam: Sam, pictures: list[Sample], layers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [site.fqn for site in SemiSparse(layers).match(sam)]
    before = Snapshot(sam)
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    found = dict(input_moments(sam, names, pictures, crossed=True))
    diagonals = dict(input_moments(sam, names, pictures, crossed=False))
    monkeypatch.setattr("samopt.passes.calibration.BYTES", 4 * 300**2)  # one layer, or a few, at a time
    in_turns = dict(input_moments(sam, names, pictures, crossed=True))
    before.assert_unchanged(sam)

    for name in names:
        module = sam.get_submodule(name)
        module.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0].flatten(0, -2)))
    Reference.record(sam, pictures)
    assert list(found) == list(in_turns) == names
    for name, inputs in seen.items():
        x = torch.cat(inputs).double()
        assert relative_error(found[name], x.T @ x / len(x)) < 1e-5
        assert relative_error(diagonals[name], x.square().mean(0)) < 1e-5
        assert_bit_equal(in_turns[name], found[name])


def test_scenes_are_drawn_where_there_are_no_samples(sam: Sam) -> None:
    ((_, ours),) = input_moments(sam, SITES[:1], None, crossed=True)
    ((_, drawn),) = input_moments(sam, SITES[:1], scene_samples(4, 64, 3_000_000), crossed=True)
    ((_, measured_on),) = input_moments(sam, SITES[:1], scene_samples(4, 64), crossed=True)
    assert_bit_equal(ours, drawn)
    assert not torch.equal(ours, measured_on)


def test_a_part_of_a_sam_cannot_be_calibrated(sam: Sam) -> None:
    with pytest.raises(Unsupported, match=r"ImageEncoderViT is no Sam.*calibrating takes a whole Sam"):
        SemiSparse()(sam.image_encoder)
    assert len(MAGNITUDE(sam.image_encoder).sites) == 8


# The pass


PASSES = (SemiSparse(), MAGNITUDE, SemiSparse(criterion="activation", update=False), SemiSparse(("decoder",)))


@pytest.mark.parametrize("pass_", PASSES, ids=str)
def test_every_site_becomes_two_four_and_undo_restores(sam: Sam, pictures: list[Sample], pass_: SemiSparse) -> None:
    before, keys = Snapshot(sam), {key: (value.shape, value.dtype) for key, value in sam.state_dict().items()}
    ours = copy.deepcopy(sam)
    snapshot = Snapshot(ours)
    result = pass_(ours, pictures)
    assert {key: (value.shape, value.dtype) for key, value in ours.state_dict().items()} == keys
    changed = {name for name, value in ours.state_dict().items() if not torch.equal(value, sam.state_dict()[name])}
    assert changed == {f"{site.fqn}.weight" for site in result.sites}
    for site in result.sites:
        old, new = sam.get_submodule(site.fqn), ours.get_submodule(site.fqn)
        assert is_two_four(new.weight)
        assert type(new) is type(old)
        assert repr(new) == repr(old).replace("bias=True", "bias=True, 2:4 sparse")
        assert site.facts["emulated"] is True
    result.undo()
    snapshot.assert_unchanged(ours)
    before.assert_unchanged(sam)


def test_options_of_layers_choose_sites(sam: Sam) -> None:
    assert [site.fqn for site in SemiSparse().match(sam)] == SITES
    assert [site.fqn for site in SemiSparse(("image_encoder.blocks.1.mlp.*",)).match(sam)] == SITES[6:]
    with pytest.raises(InvalidInput, match=r"layers: 'lin3' is no role"):
        SemiSparse(("lin3",))(sam)
    with pytest.raises(InvalidInput, match=r"layers=\(\) leaves nothing to do"):
        SemiSparse(())


def test_rows_that_do_not_split_into_fours_are_a_skip() -> None:
    sam = random_sam(width=66, heads=3)
    with pytest.raises(NoSites, match="the sparsifier needs in_features to be a multiple of 4, not 66"):
        SemiSparse(("qkv",))(sam)


@pytest.mark.parametrize("kernel", ["cusparselt", "cutlass"])
def test_a_kernel_asked_for_by_name_needs_a_gpu(sam: Sam, kernel: Any) -> None:
    with pytest.raises(Unsupported, match='2:4 products need a GPU and the model is on cpu; kernel="auto" or "dense"'):
        SemiSparse(kernel=kernel)(sam)


def copied(model: Any) -> Any:
    return copy.deepcopy(model)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("then", [lambda model: model, copied, pickled])
def test_loaded_weights_become_two_four(sam: Sam, then: Callable[[Any], Any], assign: bool) -> None:
    dense, sparse = random_sam(seed=1), random_sam(seed=1)
    MAGNITUDE(sam)
    sam = then(sam)
    state = dense.state_dict()
    given = {key: value.clone() for key, value in state.items()}
    sam.load_state_dict(state, assign=assign)
    MAGNITUDE(sparse)
    assert_bit_equal(list(sam.state_dict().values()), list(sparse.state_dict().values()))
    assert_bit_equal(list(state.values()), list(given.values()))
    assert_bit_equal(sam.image_encoder(torch.ones(1, 3, 64, 64)), sparse.image_encoder(torch.ones(1, 3, 64, 64)))


def test_loaded_weights_that_are_two_four_are_taken_as_they_are(sam: Sam, pictures: list[Sample]) -> None:
    calibrated = random_sam(seed=1)
    SemiSparse()(calibrated, pictures)
    MAGNITUDE(sam)
    sam.load_state_dict(calibrated.state_dict())
    assert_bit_equal(list(sam.state_dict().values()), list(calibrated.state_dict().values()))


def test_weights_of_another_shape_are_refused_as_ever(sam: Sam) -> None:
    MAGNITUDE(sam)
    with pytest.raises(RuntimeError, match=r"size mismatch for image_encoder.blocks.0.attn.qkv.weight"):
        sam.load_state_dict(random_sam(width=128, heads=2).state_dict())


@pytest.mark.usefixtures("kernels_anywhere")
@pytest.mark.parametrize(
    "before", [(), (SDPAttention(),), (CastDtype(),), (CastDtype(), TritonAttention(), LinearGELU())], ids=str
)
def test_after_other_passes_it_finds_and_fits_the_same(pictures: list[Sample], before: tuple[Pass, ...]) -> None:
    sam, alone = random_sam(window=4), random_sam(window=4)  # no token that only some of them compute
    SemiSparse()(alone, pictures)
    for pass_ in before:
        pass_(sam)
    SemiSparse()(sam, pictures)
    for name in SITES:
        ours, theirs = sam.get_submodule(name).weight, alone.get_submodule(name).weight
        assert is_two_four(ours)
        assert ((ours != 0) == (theirs != 0)).float().mean() > 0.98
        assert relative_error(ours, theirs) < 0.15
    pixels = torch.ones(1, 3, 64, 64)
    assert relative_error(sam.image_encoder(pixels), alone.image_encoder(pixels)) < 0.1


def test_a_nan_is_left_to_verification(sam: Sam, pictures: list[Sample]) -> None:
    with torch.no_grad():
        sam.image_encoder.blocks[0].mlp.lin1.weight[0, 0] = math.nan
    SemiSparse()(sam, pictures)
    assert all(is_two_four(sam.get_submodule(name).weight) for name in SITES)


# Compressed weights, with kernels made up for a CPU


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """A kernel whose compressed form is the two kept columns of four and their positions; what each call was given."""
    seen: list[tuple[Tensor, ...]] = []

    def compressed(weight: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
        assert kernel == "cutlass"
        positions = weight.reshape(-1, 4).abs().topk(2, dim=1).indices
        return weight.reshape(-1, 4).gather(1, positions), positions

    def multiplied(x: Tensor, parts: Any, bias: Tensor | None) -> Tensor:
        seen.append(tuple(parts))
        values, positions = parts
        weight = torch.zeros(len(values), 4, dtype=values.dtype).scatter_(1, positions, values)
        return nn.functional.linear(x, weight.reshape(-1, x.shape[-1]), bias)

    module = "samopt.passes.semi_sparse"
    monkeypatch.setattr(f"{module}.cannot_multiply", lambda device: None)
    monkeypatch.setattr(f"{module}.fastest", lambda weight, kernels: ("cutlass", "made up"))
    monkeypatch.setattr(f"{module}.unfit", lambda weight, kernel: None)
    monkeypatch.setattr(f"{module}.compress", compressed)
    monkeypatch.setattr(f"{module}.product", multiplied)
    return seen


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("then", [lambda model: model, copied, pickled])
def test_compressed_weights_are_used_not_saved_and_follow_loaded_ones(
    sam: Sam, made_up: list[tuple[Tensor, ...]], then: Callable[[Any], Any], assign: bool
) -> None:
    keys, pixels, dense = sam.state_dict().keys(), torch.ones(1, 3, 64, 64), random_sam()
    SemiSparse(criterion="magnitude", update=False, kernel="dense")(dense)
    result = MAGNITUDE(sam)
    assert {site.facts["kernel"] for site in result.sites} == {"cutlass"}
    assert not any("emulated" in site.facts for site in result.sites)
    assert sam.state_dict().keys() == keys
    assert "bias=True, 2:4 sparse by cutlass)" in repr(sam.image_encoder.blocks[0].attn.qkv)
    sam = then(sam)
    for state in (None, random_sam(seed=1).state_dict()):
        if state is not None:
            sam.load_state_dict(state, assign=assign)
            dense.load_state_dict(state)
        made_up.clear()
        assert_bit_equal(sam.image_encoder(pixels), dense.image_encoder(pixels))
        assert len(made_up) == len(SITES)


def test_a_weight_that_the_kernel_cannot_take_any_more_is_multiplied_densely(
    sam: Sam, made_up: list[tuple[Tensor, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    MAGNITUDE(sam)
    monkeypatch.setattr("samopt.passes.semi_sparse.unfit", lambda weight, kernel: "it is too late")
    dense, pixels = random_sam(seed=1), torch.ones(1, 3, 64, 64)
    sam.load_state_dict(dense.state_dict())
    dense.load_state_dict(sam.state_dict())
    assert_bit_equal(sam.image_encoder(pixels), dense.image_encoder(pixels))
    assert made_up == []


def test_a_layer_that_was_cast_is_compressed_anew(sam: Sam, made_up: list[tuple[Tensor, ...]]) -> None:
    MAGNITUDE(sam)
    layer: Any = sam.image_encoder.blocks[0].attn.qkv
    layer.double()
    tokens = torch.randn(3, 64, dtype=torch.double)
    layer(tokens)
    assert made_up[-1][0].dtype is torch.double
    layer.weight.data = layer.weight * 3
    layer.half().double()
    assert_bit_equal(layer(tokens), nn.functional.linear(tokens, layer.weight, layer.bias))


def test_a_layer_moved_to_where_there_is_no_kernel_is_multiplied_densely(
    sam: Sam, made_up: list[tuple[Tensor, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    MAGNITUDE(sam)
    monkeypatch.setattr("samopt.passes.semi_sparse.cannot_multiply", lambda device: "it was moved to a CPU")
    sam.to("cpu").image_encoder(torch.ones(1, 3, 64, 64))
    assert made_up == []


@pytest.mark.usefixtures("kernels_anywhere")
def test_the_fused_mlp_stays_dense_unless_a_kernel_is_asked_for(made_up: list[tuple[Tensor, ...]]) -> None:
    sam = random_sam()
    CastDtype()(sam)
    LinearGELU()(sam)
    asked, tokens = copy.deepcopy(sam), torch.randn(2, 4, 4, 64).bfloat16()
    facts = {site.fqn: site.facts for site in MAGNITUDE(sam).sites}
    assert facts[SITES[2]] == {"kernel": "dense", "emulated": True, "why": "another pass computes the product"}
    assert facts[SITES[3]]["kernel"] == "cutlass"
    SemiSparse(("lin1",), criterion="magnitude", update=False, kernel="cutlass")(asked)
    mlp = asked.image_encoder.blocks[0].mlp
    ours, theirs = mlp.act(mlp.lin1(tokens, gelu=True), computed=True), nn.functional.gelu(mlp.lin1(tokens))
    assert_bit_equal(ours, theirs)
    assert len(made_up) == 2
    assert relative_error(mlp(tokens), mlp.lin2(theirs)) < 1e-6  # which asks lin1 for both


@pytest.mark.usefixtures("kernels_anywhere")
def test_a_layer_with_a_tuned_dense_product_may_get_a_sparse_one(made_up: list[tuple[Tensor, ...]]) -> None:
    sam = random_sam()
    CastDtype()(sam)
    TunedLinear()(sam)
    assert {site.facts["kernel"] for site in MAGNITUDE(sam).sites} == {"cutlass"}
    sam.image_encoder(torch.randn(1, 3, 64, 64))
    assert len(made_up) == len(SITES)


# Accuracy


@pytest.fixture(scope="module")
def reference(tiny256: Sam) -> Reference:
    return Reference.record(tiny256, scene_samples(4, 256))


def accuracy(model: Sam, reference: Reference, pass_: SemiSparse) -> Agreement:
    """Calibrated on drawn scenes that are not those measured on."""
    ours = copy.deepcopy(model)
    pass_(ours)
    return verify(ours, reference)


def test_calibration_keeps_the_accuracy_that_magnitude_loses(tiny256: Sam, reference: Reference) -> None:
    magnitude, ours = (accuracy(tiny256, reference, pass_) for pass_ in (MAGNITUDE, SemiSparse()))
    assert ours.masks is not None
    assert magnitude.masks is not None
    assert ours.embedding_error < 0.25 * magnitude.embedding_error
    assert 1 - ours.masks.mean_iou < 0.4 * (1 - magnitude.masks.mean_iou)
    assert ours.masks.mean_iou > 0.95
    assert ours.masks.truth is not None
    assert ours.masks.reference_truth is not None
    assert ours.masks.truth > ours.masks.reference_truth - 0.007


def test_optimize_calibrates_on_its_samples_and_holds_the_pass_to_the_budget(tiny256: Sam) -> None:
    with pytest.raises(AccuracyError, match=r"SemiSparse\(.*below the budget's"):
        optimize(tiny256, [MAGNITUDE], samples=scene_samples(1, 256))


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kernel", list(MULTIPLES))
def test_a_compressed_product_is_the_dense_one(kernel: str, bias: bool) -> None:
    weight = two_four(torch.randn(384, 256, device="cuda")).bfloat16()
    x, b = torch.randn(2, 3, 7, 256, device="cuda").bfloat16(), torch.randn(384, device="cuda").bfloat16()
    try:
        parts = compress(weight, kernel)
        ours = product(x, parts, b if bias else None)
    except RuntimeError as failure:
        pytest.skip(f"{kernel} does not run here: {failure}")
    truth = nn.functional.linear(x.double(), weight.double(), b.double() if bias else None)
    assert ours.is_contiguous()
    assert relative_error(ours, truth) < 4e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kernel", ["auto", *MULTIPLES])
def test_a_sparse_encoder_computes_what_its_dense_weights_do(kernel: Any) -> None:
    sam = random_sam(128, width=128, heads=2).cuda()
    CastDtype()(sam)
    LinearGELU()(sam)
    dense = copy.deepcopy(sam)
    SemiSparse(kernel="dense")(dense)
    sites = SemiSparse(kernel=kernel)(sam).sites
    if kernel != "auto" and (refused := next((site for site in sites if site.facts["kernel"] == "dense"), None)):
        pytest.skip(f"{kernel} does not run here: {refused}")
    pixels = torch.randn(2, 3, 128, 128, device="cuda")
    with torch.no_grad():
        assert relative_error(sam.image_encoder(pixels), dense.image_encoder(pixels)) < 2e-2
        sam.load_state_dict(random_sam(128, width=128, heads=2, seed=1).state_dict())
        dense.load_state_dict(random_sam(128, width=128, heads=2, seed=1).state_dict())
        assert relative_error(sam.image_encoder(pixels), dense.image_encoder(pixels)) < 2e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_fastest_kernel_is_one_that_runs() -> None:
    kernel, why = fastest(torch.empty(768, 768, device="cuda", dtype=torch.bfloat16), list(MULTIPLES))
    assert kernel in ("dense", *MULTIPLES)
    assert why
    assert fastest(torch.empty(768, 768, device="cuda"), list(MULTIPLES))[0] == "dense"  # float32
