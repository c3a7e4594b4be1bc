"""WhereIndexing: bit-equal wherever it rewrites, a Skip with the reason wherever that cannot be known."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from segment_anything import sam_model_registry
from segment_anything.modeling import PromptEncoder, prompt_encoder
from torch import Tensor

from samopt import AlreadyApplied, NoSites, Site, Skip
from samopt.passes.where_indexing import WhereIndexing
from samopt.profiling.syncs import fake_cuda, on_fake_cuda, record_syncs
from tests.models import random_sam
from tests.snapshot import Snapshot
from tests.toy_graphs import assert_same_bits, rewritten


@pytest.fixture
def encoder() -> PromptEncoder:
    return random_sam().prompt_encoder


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def points(batch: int, count: int, dtype: torch.dtype, label_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    coordinates = torch.rand(batch, count, 2, dtype=dtype) * 64
    return coordinates, torch.randint(-2, 4, (batch, count)).to(label_dtype)


@pytest.mark.usefixtures("no_original")
@pytest.mark.parametrize("with_box", [False, True])
@pytest.mark.parametrize("label_dtype", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_prompts_are_encoded_bit_for_bit(
    encoder: PromptEncoder, dtype: torch.dtype, label_dtype: torch.dtype, with_box: bool
) -> None:
    ours = rewritten(encoder, WhereIndexing())
    for batch, count in [(1, 1), (1, 0), (0, 2), (3, 5), (64, 1)]:
        coordinates, labels = points(batch, count, dtype, label_dtype)
        before = coordinates.clone(), labels.clone()
        prompt = (coordinates, labels), torch.rand(batch, 4, dtype=dtype) if with_box else None, None
        assert_same_bits(ours(*prompt), encoder(*prompt))
        assert torch.equal(coordinates, before[0])
        assert torch.equal(labels, before[1])


@pytest.mark.usefixtures("no_original")
def test_special_coordinates_and_strided_inputs_are_encoded_bit_for_bit(encoder: PromptEncoder) -> None:
    ours = rewritten(encoder, WhereIndexing())
    coordinates, labels = points(4, 4, torch.float32, torch.int64)
    coordinates[0, 0], coordinates[1, 1, 0] = float("nan"), float("inf")
    for prompt in [(coordinates, labels), (coordinates.transpose(0, 1), labels.T)]:
        for pad in (False, True):
            assert_same_bits(ours._embed_points(*prompt, pad=pad), encoder._embed_points(*prompt, pad))


def test_one_site_and_the_module_stays_what_it_was(encoder: PromptEncoder) -> None:
    sam = random_sam()
    before, keys, children = Snapshot(sam), list(sam.state_dict()), list(sam.prompt_encoder.children())
    result = WhereIndexing()(sam)
    assert result.sites == (Site("prompt_encoder", {"methods": ("_embed_points",), "rewrites": 4}),)
    assert not result.skipped
    assert list(sam.state_dict()) == keys
    assert type(sam.prompt_encoder) is PromptEncoder
    assert [type(child) for child in sam.prompt_encoder.children()] == [type(child) for child in children]
    result.undo()
    before.assert_unchanged(sam)


def test_twice_is_an_error_and_match_says_so(encoder: PromptEncoder) -> None:
    WhereIndexing()(encoder)
    assert list(WhereIndexing().match(encoder)) == [Skip("", "WhereIndexing was applied already")]
    with pytest.raises(AlreadyApplied):
        WhereIndexing()(encoder)


def test_a_model_without_masks_is_an_error() -> None:
    with pytest.raises(NoSites):
        WhereIndexing()(random_sam().image_encoder)


def test_vit_h_is_matched_quickly() -> None:
    with torch.device("meta"):
        sam = sam_model_registry["vit_h"]()
    tried = [(fqn, name) for fqn, module in sam.named_modules() for name in WhereIndexing().candidates(module)]
    assert tried == [("prompt_encoder", "_embed_points")]  # one trace, not one for each of 500 modules
    (site,) = WhereIndexing().match(sam)
    assert isinstance(site, Site)


def test_the_whole_model_deepcopies_and_pickles() -> None:
    sam = random_sam()
    prompt = points(2, 3, torch.float32, torch.int32), None, None
    expected = sam.prompt_encoder(*prompt)
    WhereIndexing()(sam)
    for other in (copy.deepcopy(sam), pickle.loads(pickle.dumps(sam))):
        assert_same_bits(other.prompt_encoder(*prompt), expected)
        # It runs on its own weights, not on those of the model it came from.
        with torch.no_grad():
            other.prompt_encoder.not_a_point_embed.weight.add_(1)
        assert not torch.equal(other.prompt_encoder(*prompt)[0], expected[0])
    assert_same_bits(sam.prompt_encoder(*prompt), expected)


@pytest.mark.usefixtures("no_original")
def test_weights_children_and_device_are_read_live(encoder: PromptEncoder) -> None:
    ours, prompt = rewritten(encoder, WhereIndexing()), (points(2, 3, torch.float32, torch.int32), None, None)
    other = random_sam(seed=1).prompt_encoder
    ours.load_state_dict(other.state_dict())
    assert_same_bits(ours(*prompt), other(*prompt))
    ours.pe_layer = encoder.pe_layer
    other.pe_layer = encoder.pe_layer
    assert_same_bits(ours(*prompt), other(*prompt))
    ours.to(torch.device("meta"))
    assert ours._embed_points(*(x.to("meta") for x in prompt[0]), pad=True).is_meta


def test_another_image_size_runs_the_original(encoder: PromptEncoder) -> None:
    ours, prompt = rewritten(encoder, WhereIndexing()), (points(2, 3, torch.float32, torch.int32), None, None)
    ours.input_image_size = encoder.input_image_size = (32, 128)  # it was baked into the graph
    assert_same_bits(ours(*prompt), encoder(*prompt))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_without_a_graph_break(encoder: PromptEncoder, dynamic: bool) -> None:
    torch._dynamo.reset()
    ours = rewritten(encoder, WhereIndexing())
    ours.compile(backend="eager", fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for batch, box in [(2, None), (3, None), (3, torch.rand(3, 4))]:
            prompt = points(batch, 3, torch.float64, torch.int32), box, None
            assert_same_bits(ours(*prompt), encoder(*prompt))
    torch._dynamo.reset()


def embed_on_fake_cuda(encoder: PromptEncoder) -> list[str]:
    with record_syncs() as syncs:
        module = on_fake_cuda(encoder)
        prompt = tuple(map(fake_cuda, points(2, 3, torch.float32, torch.int32)))
        module(prompt, None, None)
    return [sync.code for sync in syncs]


def test_it_never_waits_for_the_gpu(encoder: PromptEncoder) -> None:
    before = embed_on_fake_cuda(encoder)
    assert len(before) >= 4
    assert all("point_embedding[labels == " in code for code in before)
    assert embed_on_fake_cuda(rewritten(encoder, WhereIndexing())) == []


def test_a_fork_under_other_names_is_rewritten(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(prompt_encoder).replace("from .common", "from segment_anything.modeling.common")
    source = source.replace("PromptEncoder", "ClickEncoder").replace("labels == 1", "labels >= 1")
    (tmp_path / "fork.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    fork = __import__("fork").ClickEncoder(64, (4, 4), (64, 64), 16)
    ours, prompt = rewritten(fork, WhereIndexing()), (points(3, 5, torch.float32, torch.int32), None, None)
    assert_same_bits(ours(*prompt), fork(*prompt))
