"""Ray Data's actors make the shards that this process makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from segment_anything.modeling import Sam

from samopt import InvalidInput, optimize
from samopt.folders.ray_engine import CPU_SHARE, _resources, compiled_again
from samopt.folders.run import segment
from samopt.passes import Compile, HoistRelPos
from tests.folders.images import plain_folder, shards_of


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # Ray's own
@pytest.mark.slow
def test_two_actors_make_the_same_shards_and_go_on_where_one_is_missing(
    sam: Sam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    folder = plain_folder(tmp_path / "in", 6)
    (folder / "02.png").write_bytes(b"")
    asked = [{"image": f"{index:02d}.png", "box": [3, 3, 30, 30]} for index in range(6)]
    (tmp_path / "prompts.json").write_text(json.dumps(asked))
    arguments: dict[str, Any] = {"prompts": tmp_path / "prompts.json", "batch_size": 2, "shard_size": 2}
    segment(sam, folder, tmp_path / "here", **arguments)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # this samopt in Ray's processes, too
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        summary = segment(sam, folder, tmp_path / "there", engine="ray", **arguments)
    finally:
        ray.shutdown()
    assert (summary.done, summary.failed, summary.exit_code) == (5, 1, 1)
    assert shards_of(tmp_path / "there") == shards_of(tmp_path / "here")
    (tmp_path / "there" / "shards" / "000001.parquet").unlink()
    assert segment(sam, folder, tmp_path / "there", **arguments).skipped == 4, "the local engine goes on with it"
    assert shards_of(tmp_path / "there") == shards_of(tmp_path / "here")
    assert not (tmp_path / "there" / "stop").exists()


def test_actors_leave_processors_for_rays_own_tasks() -> None:
    assert _resources({"CPU": 2.0}, gpu=False, most=9) == (2, {"num_cpus": CPU_SHARE})
    for processors in (1, 2, 4, 16, 128):
        for gpus in (1, 2, 8):
            actors, share = _resources({"CPU": float(processors), "GPU": float(gpus)}, gpu=True, most=99)
            assert actors == gpus
            assert share["num_gpus"] == 1
            assert share["num_cpus"] * actors < processors
    assert _resources({"CPU": 8.0, "GPU": 4.0}, gpu=True, most=3)[0] == 3
    with pytest.raises(InvalidInput, match="Ray knows of none"):
        _resources({"CPU": 8.0}, gpu=True, most=3)


@pytest.mark.usefixtures("dynamo_only")
def test_a_model_is_compiled_again_where_it_was(sam: Sam) -> None:
    import copy

    model = copy.deepcopy(optimize(sam, [HoistRelPos(), Compile()], verify="off"))
    assert model.image_encoder._compiled_call_impl is None
    compiled_again(model)
    assert model.image_encoder._compiled_call_impl is not None
    assert compiled_again(sam) is sam
