from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from segment_anything.modeling import Sam

import samopt
from samopt import Budget, Phase, Recipe, RecipeError, SavedModelError, Step, optimize
from samopt.passes import PASSES, CastDtype, Compile, SDPAttention
from samopt.recipe import built_in
from tests.snapshot import Snapshot
from tests.toys import Exact, Lossy, Options, Rounding

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a recipe file; the toy pass `options` may stand in it."""
    monkeypatch.setitem(PASSES, "options", Options)

    def write(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# What is a recipe


@pytest.mark.parametrize("name", built_in())
def test_built_in_recipes_load_and_are_in_order(name: str) -> None:
    assert name in built_in()
    recipe = Recipe.of(name)
    assert recipe.name == name
    assert recipe.description
    phases = [step.pass_.phase for step in recipe.steps]
    assert phases == sorted(phases)
    assert phases[-1] is Phase.COMPILE
    compiling = recipe.steps[-1]
    assert not compiling.required, "a machine without a compiler runs it too"
    assert (name == "exact") is not any(isinstance(step.pass_, CastDtype) for step in recipe.steps)
    introduced = [entry for row in recipe.bench_rows for entry in row]
    assert len(set(introduced)) == len(introduced)
    entries = {PASSES[entry] for entry in introduced}
    assert entries in (set(), {type(step.pass_) for step in recipe.steps}), "a benchmark ends with the whole recipe"


def test_a_file_says_what_the_same_in_python_says(write: Write) -> None:
    path = write("""
        description = "my own"

        [accuracy]
        mean_iou = 0.9
        masks = false

        [[pass]]
        name = "options"
        count = 3
        ratio = 1
        flag = true
        mode = "two"
        names = ["a", "b"]
        pair = [3, 4]
        limit = 5

        [[pass]]
        name = "sdpa"
        decoder = false
        required = false
        on_fail = "drop"
        keep = "if-faster"

        [[pass]]
        name = "compile"
        batch_sizes = [1, 8]

        [bench]
        rows = [["sdpa"], ["options"]]
    """)
    expected = Recipe(
        [
            Step(Options(count=3, ratio=1, flag=True, mode="two", names=("a", "b"), pair=(3, 4), limit=5)),
            Step(SDPAttention(decoder=False), required=False, on_fail="drop", keep="if-faster"),
            Step(Compile(batch_sizes=(1, 8))),
        ],
        Budget(mean_iou=0.9, masks=False),
        "mine",
        "my own",
        (("sdpa",), ("options",)),
    )
    assert Recipe.of(path) == expected
    assert Recipe.of(str(path)) == expected


@pytest.mark.parametrize("name", built_in())
def test_a_table_makes_the_same_recipe(name: str) -> None:
    recipe = Recipe.of(name)
    table = json.loads(json.dumps(recipe.to_table(PASSES)))
    assert Recipe.from_table(table, "here", name) == recipe


def test_a_pass_of_ones_own_has_no_name_in_a_table() -> None:
    recipe = Recipe([Step(SDPAttention()), Step(Options(limit=3))])
    with pytest.raises(RecipeError, match="Options is a pass of your own, which no file can name; known: linear_pat"):
        recipe.to_table(PASSES)
    own: dict[str, type[samopt.Pass]] = {**PASSES, "own": Options}
    assert Recipe.from_table(recipe.to_table(own), "here", "recipe", own) == recipe


def test_a_list_of_passes_means_required_steps_and_the_default_budget() -> None:
    listed = Recipe.of([Exact(), Step(Lossy(2.0), required=False)])
    assert listed.steps == (Step(Exact(), True, "raise"), Step(Lossy(2.0), required=False))
    assert listed.accuracy == Budget()
    assert Recipe.of(listed) is listed
    assert Recipe.of(pass_ for pass_ in [Exact()]).steps == (Step(Exact()),)  # type: ignore[arg-type]


# Mistakes in a file: the file, and the entry, are named

FIRST = '[[pass]]\nname = "sdpa"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r": a recipe needs at least one pass"),
        ("[[pass]\n", r": not valid TOML: .*line 1"),
        ('speed = "max"', r": unknown key 'speed'; known: accuracy, bench, description, pass"),
        ("description = 3\n" + FIRST, r": description must be text, not 3"),
        ('[pass]\nname = "sdpa"', r": write each pass as a \[\[pass\]\] table"),
        ('pass = ["sdpa"]', r": write each pass as a \[\[pass\]\] table"),
        (FIRST + "[[pass]]\nencoder = true", r", entry 2 has no name; known passes: .*sdpa"),
        (FIRST + '[[pass]]\nname = "spda"', r", entry 2 names an unknown pass 'spda'; known passes: .*sdpa"),
        (FIRST + '[[pass]]\nname = ["sdpa"]', r", entry 2 names an unknown pass \['sdpa'\]; known passes: .*sdpa"),
        (FIRST + "encodre = true\nb = 1\nz = 1", r", entry 1 \(sdpa\): unknown key 'b'; known: decoder, encoder"),
        (FIRST + 'encoder = "yes"', r", entry 1 \(sdpa\): SDPAttention: option encoder must be bool, not 'yes'"),
        (FIRST + "encoder = 1", r", entry 1 \(sdpa\): SDPAttention: option encoder must be bool, not 1"),
        (
            '[[pass]]\nname = "options"\ncount = true',
            r", entry 1 \(options\): Options: option count must be int, not True",
        ),
        ('[[pass]]\nname = "options"\ncount = 1.5', r", entry 1 \(options\): .*option count must be int, not 1\.5"),
        ('[[pass]]\nname = "options"\nratio = true', r", entry 1 \(options\): .*option ratio must be float, not True"),
        (
            '[[pass]]\nname = "options"\nnames = "abc"',
            r", entry 1 \(options\): .*option names must be tuple\[str, \.\.\.\], not 'abc'",
        ),
        (
            '[[pass]]\nname = "options"\nnames = ["abc", 1]',
            r", entry 1 \(options\): .*option names must be tuple\[str, \.\.\.\], not \('abc', 1\)",
        ),
        (
            '[[pass]]\nname = "options"\npair = [1, 2, 3]',
            r", entry 1 \(options\): .*option pair must be tuple\[int, int\], not \(1, 2, 3\)",
        ),
        (
            '[[pass]]\nname = "dtype"\ndtype = "float8"',
            r", entry 1 \(dtype\): .*option dtype must be one of 'bfloat16', 'float16', not 'float8'",
        ),
        (
            '[[pass]]\nname = "compile"\nbatch_sizes = [2, 1]',
            r", entry 1 \(compile\): Compile: batch_sizes must be positive and rise, .*not \(2, 1\)",
        ),
        (
            '[[pass]]\nname = "compile"\nbatch_sizes = [1, "2"]',
            r", entry 1 \(compile\): .*option batch_sizes must be tuple\[int, \.\.\.\], not \(1, '2'\)",
        ),
        (FIRST + 'required = "no"', r", entry 1 \(sdpa\): .*required must be true or false, not 'no'"),
        (FIRST + 'on_fail = "ignore"', r", entry 1 \(sdpa\): .*on_fail must be 'raise' or 'drop', not 'ignore'"),
        (FIRST + 'keep = "faster"', r", entry 1 \(sdpa\): .*keep must be 'always' or 'if-faster', not 'faster'"),
        (FIRST + "keep = true", r", entry 1 \(sdpa\): .*keep must be 'always' or 'if-faster', not True"),
        (FIRST + 'kept = "always"', r", entry 1 \(sdpa\): unknown key 'kept'; known: .*keep, name, on_fail, required"),
        (FIRST + FIRST, r": entries 1 and 2 are both SDPAttention"),
        (
            '[[pass]]\nname = "rel_pos"\n[[pass]]\nname = "compile"\n' + FIRST,
            r": entry 3 \(SDPAttention\(.*\), phase FLOAT\) must come before entry 2 \(Compile\(.*\), phase COMPILE\)",
        ),
        ("accuracy = 0.9\n" + FIRST, r", \[accuracy\] must be a table"),
        (FIRST + "[accuracy]\nmean = 0.9", r", \[accuracy\]: unknown key 'mean'; known: .*mean_iou"),
        (FIRST + "[accuracy]\nmean_iou = 99", r": accuracy budget: mean_iou must be a number from 0 to 1, not 99"),
        (FIRST + "[accuracy]\nmin_iou = nan", r": accuracy budget: min_iou must be a number from 0 to 1, not nan"),
        (FIRST + "[accuracy]\nmasks = 1", r": accuracy budget: masks must be true or false, not 1"),
        ("bench = 1\n" + FIRST, r", \[bench\] must be a table"),
        (FIRST + "[bench]\nbars = []", r", \[bench\]: unknown key 'bars'; known: rows"),
        (FIRST + "[bench]\nrows = 3", r", \[bench\] rows: write a list of lists of names"),
        (FIRST + '[bench]\nrows = ["sdpa"]', r", \[bench\] rows: write a list of lists of names"),
        (FIRST + '[bench]\nrows = [["sdpa"], ["dtype"]]', r": \[bench\] rows: 'dtype' is no entry of this recipe"),
        (FIRST + '[bench]\nrows = [["sdpa"], []]', r": \[bench\] rows: a row introduces nothing"),
        (FIRST + '[bench]\nrows = [["sdpa"], ["sdpa"]]', r": \[bench\] rows: 'sdpa' is introduced twice"),
    ],
)
def test_a_mistake_names_file_entry_and_what_is_wrong(write: Write, text: str, message: str) -> None:
    path = write(text)
    with pytest.raises(RecipeError, match=f"^{re.escape(str(path))}{message}"):
        Recipe.of(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"none\.toml: cannot read this recipe file"):
        Recipe.of(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'description = "\xe9t\xe9"')
    with pytest.raises(RecipeError, match=r"latin\.toml: cannot read this recipe file"):
        Recipe.of(tmp_path / "latin.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(SavedModelError, match=r"folder\.toml: no saved model"):
        Recipe.of(tmp_path / "folder.toml")


# Mistakes in Python


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("fastest", "unknown recipe 'fastest'; built in: .*exact, fast, max.*, or give a .toml file"),
        ("recipe.yaml", "unknown recipe 'recipe.yaml'"),
        ([], "a recipe needs at least one pass"),
        (None, "a recipe is a built-in name, a TOML file, a Recipe or a list of passes, not NoneType"),
        (Exact(), r"a recipe is a list of passes, not one: write \[Exact\(factor=1\.0\)\]"),
        (Step(Exact()), r"a recipe is a list of passes, not one: write \[Step\("),
        ([Exact], r"a step needs a pass, not <class .*Exact'>; did you forget the parentheses\?"),
        (["sdpa"], "a step needs a pass, not 'sdpa'"),
        ([Exact(), Rounding(), Exact(2.0)], "recipe: entries 1 and 3 are both Exact"),
        (
            [Lossy(), Exact(), Compile()],
            r"recipe: entry 2 \(Exact\(.*\), phase FLOAT\) must come before entry 1 \(Lossy\(.*\), phase QUANTIZE\)",
        ),
    ],
)
def test_a_mistake_in_python_is_told_before_anything_happens(sam: Sam, recipe: Any, message: str) -> None:
    before = Snapshot(sam)
    with pytest.raises(RecipeError, match=message):
        optimize(sam, recipe, inplace=True)
    before.assert_unchanged(sam)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda wrong: Step(Exact(), required=wrong(1)), r"Exact\(.*\): required must be true or false, not 1"),
        (
            lambda wrong: Step(Exact(), on_fail=wrong("skip")),
            r"Exact\(.*\): on_fail must be 'raise' or 'drop', not 'skip'",
        ),
        (
            lambda wrong: Step(Exact(), keep=wrong("never")),
            r"Exact\(.*\): keep must be 'always' or 'if-faster', not 'never'",
        ),
        (
            lambda wrong: Recipe(wrong([Exact()])),
            r"recipe: a recipe is made of steps, not Exact\(.*\); write Step\(Exact\(",
        ),
        (
            lambda wrong: Recipe([Step(Exact())], wrong({"mean_iou": 0.9})),
            "recipe: accuracy must be a Budget, not {'mean_iou': 0.9}",
        ),
    ],
)
def test_a_step_or_recipe_of_wrong_parts_is_an_error(build: Callable[[Any], Any], message: str) -> None:
    def unchecked(value: Any) -> Any:
        return value

    with pytest.raises(RecipeError, match=message):
        build(unchecked)
