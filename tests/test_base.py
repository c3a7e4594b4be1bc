from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from segment_anything.modeling import Sam
from torch import Tensor, nn

from samopt import AlreadyApplied, InvalidInput, NoSites, Numerics, Pass, Phase, SamoptError, Site, Skip, Unsupported
from tests.snapshot import Snapshot
from tests.toys import NECK, Careless, Exact, Fails, Lossy, Nested, Options, Refuses, Root, Rounding, ToyError

PIXELS = torch.linspace(-1, 1, 3 * 64 * 64).reshape(1, 3, 64, 64)


@torch.no_grad()
def embed(sam: Sam) -> Tensor:
    embedding: Tensor = sam.image_encoder(PIXELS)
    return embedding


class Skeleton(Pass):
    """A pass but for its decorator, phase and numerics; abstract passes may be inherited from."""

    def match(self, model: nn.Module) -> Iterator[Site | Skip]:
        yield Site("")


# The form of a pass


def test_a_forgotten_decorator_is_an_error() -> None:
    class Undecorated(Skeleton):
        phase: ClassVar[Phase] = Phase.FLOAT
        numerics: ClassVar[Numerics] = Numerics.EXACT

        def rewrite(self, module: nn.Module, site: Site, stats: Any) -> nn.Module:
            return module

    with pytest.raises(TypeError, match=r"Undecorated must be decorated with @dataclass\(frozen=True\)"):
        Undecorated()


@pytest.mark.parametrize("missing", ["phase", "numerics"])
def test_a_class_variable_left_out_is_an_error(missing: str) -> None:
    given = {"phase": Phase.FLOAT, "numerics": Numerics.EXACT, "rewrite": Exact.rewrite}
    del given[missing]
    unsaid: type[Pass] = dataclass(frozen=True)(type("Unsaid", (Skeleton,), given))
    with pytest.raises(TypeError, match=f"Unsaid must say its {missing}"):
        unsaid()


def test_inheriting_from_a_pass_is_an_error() -> None:
    with pytest.raises(TypeError, match="Heir inherits from Exact, but passes are final"):
        type("Heir", (Exact,), {})


def test_a_pass_without_rewrite_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Skeleton()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("count", True, "int"),
        ("count", 1.0, "int"),
        ("ratio", "0.5", "float"),
        ("ratio", False, "float"),
        ("flag", 1, "bool"),
        ("flag", "yes", "bool"),
        ("mode", "three", "one of 'one', 'two'"),
        ("mode", True, "one of 'one', 'two'"),
        ("names", "abc", "tuple"),
        ("names", ["abc"], "tuple"),
        ("names", ("abc", 1), "tuple"),
        ("pair", (1,), "tuple"),
        ("pair", (1, True), "tuple"),
        ("limit", "none", "int | None"),
    ],
)
def test_an_option_of_another_type_is_an_error(option: str, value: Any, wanted: str) -> None:
    with pytest.raises(InvalidInput) as error:
        Options(**{option: value})
    for part in ("Options", f"option {option} ", wanted, repr(value)):
        assert part in str(error.value)


def test_options_of_the_declared_types_pass() -> None:
    Options(count=2, ratio=1, flag=True, mode="two", names=("a", "b"), pair=(3, 4), limit=None)
    Options(ratio=0.25, names=(), limit=3)


# What a call does


def test_a_call_rewrites_in_place_and_undo_restores_the_same_objects(sam: Sam) -> None:
    before, embedding = Snapshot(sam), embed(sam)
    result = Rounding(3.0)(sam)
    assert torch.equal(embed(sam), embedding * 3)
    assert result.sites == (Site(NECK),)
    assert result.skipped == (Skip("image_encoder.patch_embed", "it is [left] alone"),)
    assert result.name == "Rounding(factor=3.0)"
    result.undo()
    before.assert_unchanged(sam)
    assert torch.equal(embed(sam), embedding)


def test_a_rewrite_keeps_class_attributes_and_state_dict(sam: Sam) -> None:
    neck, state = sam.image_encoder.neck, sam.state_dict()
    Lossy(2.0)(sam)
    assert sam.image_encoder.neck is not neck
    assert type(sam.image_encoder.neck) is type(neck)
    assert set(dir(neck)) <= set(dir(sam.image_encoder.neck))
    assert {key: value.shape for key, value in sam.state_dict().items()} == {k: v.shape for k, v in state.items()}
    assert sam.image_encoder.neck[0].weight.data_ptr() == neck[0].weight.data_ptr(), "the weights are shared"
    assert sam.image_encoder.neck[0].weight is not neck[0].weight


def test_calls_and_copies_need_no_gradient_nor_mode_of_the_rewritten(sam: Sam) -> None:
    sam.train()
    sam.image_encoder.neck[0].weight.requires_grad_(False)
    Exact()(sam)
    assert sam.image_encoder.neck.training
    flags = [parameter.requires_grad for parameter in sam.image_encoder.neck.parameters()]
    assert flags[0] is False
    assert all(flags[1:])


@pytest.mark.parametrize("where", ["requires", "match", "calibrate", "rewrite"])
def test_a_pass_that_fails_changes_nothing(sam: Sam, where: Any) -> None:
    before = Snapshot(sam)
    with pytest.raises(ToyError, match=where):
        Fails(where)(sam)
    before.assert_unchanged(sam)


def test_a_replacement_that_does_not_fit_changes_nothing(sam: Sam) -> None:
    before = Snapshot(sam)
    with pytest.raises(AttributeError):
        Fails("install")(sam)
    before.assert_unchanged(sam)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("unsupported", Unsupported, "this is the wrong planet; move to Mars"),
        ("no_sites", NoSites, "there is nothing here"),
        ("one_skip", NoSites, "Refuses found nothing to rewrite: image_encoder: it is too round"),
        ("alike", NoSites, "Refuses found nothing to rewrite: it is a block (12 modules)"),
        (
            "only_skips",
            NoSites,
            "Refuses found nothing to rewrite: image_encoder: it is too round; "
            "image_encoder.blocks.0 and 11 others: it is a block",
        ),
        (
            "nothing",
            NoSites,
            "Refuses found nothing to rewrite: no module of the kind it looks for; "
            "leave it out, or check that this is a Sam",
        ),
    ],
)
def test_a_refusal_says_why_and_changes_nothing(sam: Sam, how: Any, kind: type[Unsupported], message: str) -> None:
    before = Snapshot(sam)
    with pytest.raises(Unsupported) as error:
        Refuses(how)(sam)
    assert type(error.value) is kind
    assert str(error.value) == message
    assert error.value.why == message.removeprefix("Refuses found nothing to rewrite: ")
    before.assert_unchanged(sam)


def test_applied_twice_says_so_until_undone(sam: Sam) -> None:
    result = Exact()(sam)
    Lossy()(sam).undo()
    with pytest.raises(AlreadyApplied, match="Exact was applied to this model already; undo it first"):
        Exact(2.0)(sam)
    result.undo()
    Exact()(sam)


@pytest.mark.parametrize("how", ["same_module", "same_site"])
def test_a_pass_that_breaks_the_rules_is_told_and_changes_nothing(sam: Sam, how: Any) -> None:
    before = Snapshot(sam)
    with pytest.raises(TypeError, match=f"Careless.*{NECK}"):
        Careless(how)(sam)
    before.assert_unchanged(sam)


def test_a_compiled_model_is_refused(sam: Sam) -> None:
    sam.image_encoder.neck.compile()
    before = Snapshot(sam)
    with pytest.raises(Unsupported, match=f"{NECK} is compiled already; apply Exact before Compile"):
        Exact()(sam)
    before.assert_unchanged(sam)


def test_a_module_wrapped_by_torch_compile_is_refused(sam: Sam) -> None:
    sam.image_encoder = torch.compile(sam.image_encoder)
    with pytest.raises(Unsupported, match=r"image_encoder is wrapped by torch\.compile; .*_orig_mod"):
        Exact()(sam)


# Nested sites and the root


def test_a_site_inside_a_site_lands_in_its_replacement(sam: Sam) -> None:
    before, embedding = Snapshot(sam), embed(sam)
    result = Nested()(sam)
    assert [site.fqn for site in result.sites] == ["image_encoder", NECK], "outermost first"
    assert torch.equal(embed(sam), embedding * 4)
    result.undo()
    before.assert_unchanged(sam)
    assert torch.equal(embed(sam), embedding)


@pytest.mark.parametrize("child", ["", "image_encoder"])
def test_the_root_as_a_site_stays_the_same_object(sam: Sam, child: str) -> None:
    before, pixels, embedding = Snapshot(sam), sam.preprocess(PIXELS[0]), embed(sam)
    held = sam
    result = Root(child=child)(sam)
    assert held is sam
    assert torch.equal(held.preprocess(PIXELS[0]), pixels * 2)
    assert torch.equal(embed(held), embedding * (2 if child else 1))
    result.undo()
    before.assert_unchanged(sam)
    assert torch.equal(held.preprocess(PIXELS[0]), pixels)


def test_the_roots_new_methods_read_the_root_not_the_module_they_were_built_on(sam: Sam) -> None:
    Root()(sam)
    gc.collect()
    for model in (sam, copy.deepcopy(sam)):
        once = model.preprocess(PIXELS[0])
        vars(model)["factor_of_Root"] = 4.0
        assert torch.equal(model.preprocess(PIXELS[0]), once * 2)


# Undo


def test_undone_twice_is_an_error(sam: Sam) -> None:
    result = Exact()(sam)
    result.undo()
    before = Snapshot(sam)
    with pytest.raises(SamoptError, match=r"Exact\(factor=1.0\) was undone already"):
        result.undo()
    before.assert_unchanged(sam)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Exact(), Lossy()),  # the same module
        (Nested(), Lossy()),  # the second inside the first
        (Lossy(), Nested()),  # the first inside the second
        (Root(), Exact()),  # the second inside the root
        (Exact(), Root()),  # the root after a part of it
        (Root(method="preprocess"), Fails("install")),  # the second fails: nothing stands in the first's way
    ],
    ids=str,
)
def test_undone_out_of_order_is_an_error_and_in_order_restores(sam: Sam, first: Pass, second: Pass) -> None:
    before = Snapshot(sam)
    one = first(sam)
    between = Snapshot(sam)
    if isinstance(second, Fails):
        with pytest.raises(AttributeError):
            second(sam)
    else:
        two = second(sam)
        with pytest.raises(SamoptError, match=r"a later pass rewrote .*; undo that one first"):
            one.undo()
        two.undo()
    between.assert_unchanged(sam)
    one.undo()
    before.assert_unchanged(sam)


def test_passes_on_different_modules_undo_in_any_order(sam: Sam) -> None:
    before = Snapshot(sam)
    one, two = Exact()(sam), Fails("forward")(sam)
    one.undo()
    two.undo()
    before.assert_unchanged(sam)


def test_an_undone_pass_lets_its_modules_go(sam: Sam) -> None:
    result = Exact()(sam)
    new = weakref.ref(sam.image_encoder.neck)
    result.undo()
    gc.collect()
    assert new() is None


def test_undo_of_a_moved_model_is_refused(sam: Sam) -> None:
    result = Exact()(sam)
    sam.to("meta")
    with pytest.raises(SamoptError, match="the model was moved since; move it back first"):
        result.undo()
