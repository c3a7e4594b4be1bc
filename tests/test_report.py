from __future__ import annotations

import copy
import io
import json
import pickle
from typing import Any

import pytest
import torch
from rich.console import Console
from segment_anything.modeling import Sam
from torch import nn

from samopt import Numerics, Pass, Phase, Report, SamoptError, Sample, Site, Skip, Step, optimize, report
from samopt.observe import Timings
from samopt.passes import Compile
from samopt.report import StepReport
from samopt.speed import BlockSpeed
from samopt.verify import Agreement, KindAgreement
from tests.toys import Exact, Lossy, Refuses, Rounding

MASKS = KindAgreement((0.9876, 1.0), 0.25, 0.8123, 0.8)
MEASURED = Agreement(MASKS, {"point": MASKS}, 0.0123, 0.02, False, True, Timings(0.05, 1.5, 0.0025, 0))
BASELINE = Agreement(MASKS, {"point": MASKS}, 0.0, 0.0, True, True, Timings(0.125, 1.5, 0.004, 0))
STEPS = (
    StepReport(
        "Toy(mode='[red]')",
        Phase.FLOAT,
        Numerics.EXACT,
        "applied",
        "",
        (Site("a", {"grid": (4, 4)}), Site("b")),
        (),
        0.5,
        MEASURED,
    ),
    StepReport("Shy()", Phase.FLOAT, Numerics.ROUNDING, "skipped", "there is no [gpu] here"),
    StepReport(
        "Bad()",
        Phase.FLOAT,
        Numerics.LOSSY,
        "dropped",
        "it cost [/too] much",
        (Site("c"),),
        (Skip("d", "too [b]wide"), Skip("e", "too [b]wide")),
        0.1,
        MEASURED,
    ),
)
REPORT = Report(
    "mine [bold]", "Toy", ("cell [1].png",), "cpu", BASELINE, STEPS, {"torch": "2.0"}, ("something changed",)
)


def shown(made: Report) -> str:
    """A report's text, its lines joined where the table folded them."""
    return " ".join(str(made).split())


def test_text_holds_every_entry_figure_reason_and_note() -> None:
    text = shown(REPORT)
    for part in (
        "Toy, recipe mine [bold], on cpu",
        "Shy skipped: there is no [gpu] here",
        "Bad dropped: it cost [/too] much",
        "Bad left out d and 1 other: too [b]wide",
        "something changed",
        "torch 2.0",
        "1.2e-02",  # embedding error
        "0.9938",  # mean mask IoU
        "0.988",  # worst mask
        "0.8123",  # ground truth
        "125.0",  # milliseconds
        "50.0",
    ):
        assert part in text
    assert "GPU" not in text, "a column without a figure is left out"
    assert "\x1b" not in str(REPORT), "no colours in plain text"
    rows = [line for line in str(REPORT).splitlines() if "│" in line]
    assert [row.split("│")[1].strip() for row in rows] == ["unmodified", "Toy", "Shy", "Bad"]
    assert [row.split("│")[2].strip() for row in rows[1:]] == ["2", "skipped", "dropped"]


def test_html_and_rich_show_what_text_shows(capsys: pytest.CaptureFixture[str]) -> None:
    html = REPORT._repr_html_()
    assert "<table>" in html
    for part in ("Toy, recipe mine [bold]", "Toy", "skipped", "dropped", "0.9938", "something changed"):
        assert part in html
    console = Console(width=130, color_system=None)
    with console.capture() as capture:
        console.print(REPORT)
    assert [line.rstrip() for line in capture.get().rstrip().splitlines()] == [
        line.rstrip() for line in str(REPORT).splitlines()
    ]
    assert capsys.readouterr() == ("", ""), "making text prints nothing"


def test_the_dictionary_is_json_and_complete() -> None:
    found = json.loads(json.dumps(REPORT.to_dict(), allow_nan=False))
    assert found["recipe"] == "mine [bold]"
    assert found["unmodified"]["encode_seconds"] == 0.125
    assert [step["status"] for step in found["steps"]] == ["applied", "skipped", "dropped"]
    first, second, third = found["steps"]
    assert first["pass"] == "Toy(mode='[red]')"
    assert first["numerics"] == "exact"
    assert first["sites"] == ["a (grid=(4, 4))", "b"]
    assert first["accuracy"]["masks"]["min_iou"] == 0.9876
    assert second["accuracy"] is None
    assert third["skipped"] == ["d: too [b]wide", "e: too [b]wide"]


def test_untrained_weights_and_unmeasured_runs_show_no_masks() -> None:
    untrained = Agreement(None, {}, 0.5, 0.1, False, True, Timings(0.1, 0.2, 0.01, 0))
    made = Report(
        "r",
        "Toy",
        (),
        "cpu",
        untrained,
        (StepReport("Toy()", Phase.FLOAT, Numerics.LOSSY, "applied", agreement=untrained),),
    )
    assert "masks: not measured, untrained weights" in shown(made)
    assert "mask IoU" not in str(made)
    bare = Report("r", "Toy", (), "cpu", None, (StepReport("Toy()", Phase.FLOAT, Numerics.LOSSY, "applied"),))
    assert "Toy" in str(bare)
    assert "embedding error" not in str(bare)
    assert bare.to_dict()["unmodified"] is None


def test_figures_of_a_pass_kept_or_undone_for_its_speed_are_shown() -> None:
    kept, undone = BlockSpeed(7.92e-3, 5.13e-3, 8), BlockSpeed(5.13e-3, 5.2e-3, 8)
    emulated = (Site("a", {"emulated": True}), Site("b"))
    float_, exact = Phase.FLOAT, Numerics.EXACT
    steps = (
        StepReport("Quick(x=1)", float_, exact, "applied", agreement=MEASURED, speed=kept),
        StepReport("Slow()", float_, exact, "undone", f"not faster: {undone}", speed=undone),
        StepReport("Aside()", float_, exact, "applied", "not timed, kept"),
        StepReport("Odd()", float_, exact, "applied", "", emulated),
        StepReport("Gone()", float_, exact, "undone", "emulated on cpu, so not faster", emulated),
    )
    made = Report("r", "Toy", (), "cpu", BASELINE, steps)
    text = shown(made)
    assert "Quick applied: encoder blocks: 7.92 -> 5.13 ms an image at batch 8" in text
    assert "Slow undone: not faster: encoder blocks: 5.13 -> 5.2 ms an image at batch 8" in text
    assert text.count("5.13 -> 5.2 ms") == 1
    assert "Aside applied: not timed, kept" in text
    assert text.count("Odd applied, emulated: ") == 1
    assert "Gone applied" not in text
    rows = [line for line in str(made).splitlines() if "│" in line]
    cells = [row.split("│")[2].strip() for row in rows[1:]]
    assert cells == ["0", "undone", "0", "2, emulated", "undone"]
    found = json.loads(json.dumps(made.to_dict()))["steps"]
    assert [step["emulated"] for step in found] == [False, False, False, True, True]
    assert found[0]["speed"] == {"before_seconds": 7.92e-3, "after_seconds": 5.13e-3, "batch_size": 8}
    assert found[2]["speed"] is None


# Reports of models


@pytest.fixture(scope="module")
def optimized(pictures: list[Sample]) -> Sam:
    from tests.models import random_sam

    steps: list[Pass | Step] = [Rounding(1 + 1e-7), Step(Refuses(), required=False), Lossy(1.0)]
    return optimize(random_sam(), steps, samples=pictures)


def test_a_model_reports_each_entry_in_order(optimized: Sam) -> None:
    made = report(optimized)
    assert [step.name for step in made.steps] == [
        "Rounding(factor=1.0000001)",
        "Refuses(how='unsupported')",
        "Lossy(factor=1.0)",
    ]
    assert [step.status for step in made.steps] == ["applied", "skipped", "applied"]
    assert made.steps[1].reason == "this is the wrong planet; move to Mars"
    assert all((step.agreement is None) is (step.status == "skipped") for step in made.steps)
    assert made.baseline is not None
    assert made.baseline.equal
    assert made.versions["torch"] == torch.__version__
    assert "left out image_encoder.patch_embed: it is [left] alone" in shown(made)


def test_copies_report_too(optimized: Sam) -> None:
    for again in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        assert report(again) == report(optimized)
        assert report(again).notes == ()


def test_a_report_holds_no_tensor_and_no_module(optimized: Sam) -> None:
    kinds: set[type] = set()

    class Recorder(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            kinds.add(type(value))
            return NotImplemented

    Recorder(io.BytesIO()).dump(report(optimized))
    assert Report in kinds
    assert {kind.__module__.partition(".")[0] for kind in kinds} <= {"abc", "builtins", "samopt", "enum"}


@pytest.mark.parametrize("what", [nn.Linear(1, 1), None, {"model": 1}])
def test_what_was_not_optimised_has_no_report(what: Any) -> None:
    with pytest.raises(SamoptError, match=r"this model has no report: it was not made by samopt\.optimize"):
        report(what)


def test_a_copy_says_that_it_is_not_compiled(sam: Sam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compile, "requires", lambda self, model: None)  # nothing is compiled before the first call
    fast = optimize(sam, [Exact(), Compile(scope="encoder")], verify="off")
    assert report(fast).notes == ()
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        (note,) = report(again).notes
        assert "not compiled: a copy loses its compilation" in note
        assert note in " ".join(str(report(again)).split())
        Compile(scope="encoder")(again)
        assert report(again).notes == ()


def test_a_slower_result_is_not_passed_over() -> None:
    def timed(encode: float, decode: float) -> Agreement:
        return Agreement(None, {}, 0.0, 0.0, True, True, Timings(encode, encode, decode, 0))

    def made(after: Agreement) -> str:
        step = StepReport("Toy()", Phase.FLOAT, Numerics.LOSSY, "applied", agreement=after)
        return shown(Report("r", "Toy", (), "cpu", timed(1.0, 0.1), (step,)))

    assert "slower" not in made(timed(0.5, 0.1))
    assert "slower: encoding takes 3.0 times as long" in made(timed(3.0, 0.1))
    assert "slower: answering prompts takes 2.0 times as long" in made(timed(0.5, 0.2))
