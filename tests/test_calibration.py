"""Calibration: what the fit finds, how it is judged, where it is kept, that the runtime uses it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import prompt_of

from localspec import calibration_file, pairs
from localspec.calibrating import own_messages, record, rendered
from localspec.calibration import (
    Calibration,
    Nodes,
    Records,
    calibrate,
    cross_validated,
    errors_by_depth,
    expected_calibration_error,
    fit,
    log_odds_of,
    survival,
)
from localspec.cli import cli
from localspec.engine import DraftOptions, Engine
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.odds import Survival
from localspec.tree import ROOT, build_tree

DEPTHS = 3
TRUE = Calibration(
    (-0.6, -0.3, 0.2), (0.7, 0.8, 0.9), (0.3, 0.3, 0.0), (0.5, 0.5, 0.5), (0.2, 0.2, 0.2)
)


def simulated(rng: np.random.Generator, positions: int, true: Calibration) -> Records:
    chain, tree = (nodes_of(rng, positions, true, share) for share in (1.0, 0.5))
    return Records(chain, tree)


def nodes_of(rng: np.random.Generator, positions: int, true: Calibration, share: float) -> Nodes:
    """Nodes that come true with the odds that `true` says; the trees are chains too, but half of
    their nodes are no likeliest children."""
    parts = []
    for _ in range(positions):
        logit_p = rng.normal(1.0, 1.5, DEPTHS)
        c = rng.normal(0.2, 1.0, DEPTHS)
        log_p = -np.logaddexp(0.0, -logit_p)
        parent, depth = np.arange(-1, DEPTHS - 1), np.arange(DEPTHS)
        first = rng.random(DEPTHS) < share
        nodes = Nodes(parent, depth, first, log_p, c, np.zeros(DEPTHS, bool))
        own = rng.random(DEPTHS) < 1 / (1 + np.exp(-true.log_odds(nodes)))
        parts.append(Nodes(parent, depth, first, log_p, c, np.cumprod(own).astype(bool)))
    return Nodes.joined(parts)


@pytest.fixture(scope="module")
def answers() -> list[Records]:
    rng = np.random.default_rng(0)
    return [simulated(rng, 300, TRUE) for _ in range(25)]


def test_the_error_is_the_mean_gap_between_predicted_and_observed():
    predicted = np.array([0.05, 0.05, 0.95, 0.95])
    assert expected_calibration_error(predicted, np.array([0, 0, 1, 1], bool)) == pytest.approx(
        0.05
    )
    assert expected_calibration_error(predicted, np.array([1, 1, 0, 0], bool)) == pytest.approx(
        0.95
    )
    assert expected_calibration_error(np.full(4, 0.5), np.array([0, 1, 0, 1], bool)) == 0
    assert expected_calibration_error(np.ones(2), np.ones(2, bool)) == 0
    assert expected_calibration_error(np.zeros(0), np.zeros(0, bool)) == 0


def test_survival_is_the_product_along_the_path():
    #  root -> 0 -> 2, root -> 1 -> 3 -> 4
    none = np.zeros(5)
    nodes = Nodes(
        np.array([-1, -1, 0, 1, 3]), np.array([0, 0, 1, 1, 2]), none > 0, none, none, none > 0
    )
    a = np.array([0.5, 0.25, 0.5, 0.8, 0.1])
    found = survival(nodes, np.log(a / (1 - a)))
    assert found == pytest.approx([0.5, 0.25, 0.25, 0.2, 0.02])


def test_the_fit_finds_what_made_the_data(answers: list[Records]):
    table = fit(Records.joined(answers), DEPTHS)
    assert table.sound
    nodes = answers[0].chain
    apart = np.abs(table.log_odds(nodes) - TRUE.log_odds(nodes))
    assert apart.mean() < 0.15


def test_held_out_errors_fall_below_two_percent(answers: list[Records]):
    _, report = calibrate(answers, DEPTHS)
    assert max(report.before) > 0.1
    assert max(report.after) <= 0.02
    assert max(report.tree_after) <= 0.02
    assert report.positions == 25 * 300
    assert report.uses_confidence
    assert report.loss_both < report.loss_probability < report.loss_before


def test_a_confidence_head_that_tells_nothing_is_not_used():
    rng = np.random.default_rng(1)
    zeros = (0.0,) * DEPTHS
    blind = Calibration(TRUE.offsets, TRUE.slopes, TRUE.first, zeros, zeros)
    table, report = calibrate([simulated(rng, 100, blind) for _ in range(10)], DEPTHS)
    assert not report.uses_confidence
    assert not any(table.confidence)
    assert not Survival(DEPTHS, calibration=table).asks_confidence


def test_temperatures_are_chosen_from_left_to_right(answers: list[Records]):
    """A depth's weights do not depend on what happened at deeper ones."""
    from localspec.calibration import _tempered

    def wrong_below(nodes: Nodes) -> Nodes:
        return replace(nodes, right=nodes.right & (nodes.depth < 2))

    whole = Records.joined(answers)
    start = Calibration.identity(DEPTHS)
    one = _tempered(start, whole)
    other = _tempered(start, Records(wrong_below(whole.chain), wrong_below(whole.tree)))
    assert one.slopes[:2] == other.slopes[:2]
    assert one.slopes[2] != other.slopes[2]

    def errors(table: Calibration) -> float:
        return sum(
            sum(errors_by_depth(nodes, survival(nodes, table.log_odds(nodes)), DEPTHS))
            for nodes in (whole.chain, whole.tree)
        )

    assert errors(one) < 0.8 * errors(start)


def test_a_prompt_is_predicted_from_the_others_only(answers: list[Records]):
    few = answers[:6]
    _, first, _ = cross_validated(few, DEPTHS, folds=6)
    lie = few[0].chain
    lies = (replace(nodes, right=nodes.right & False) for nodes in (lie, few[0].tree))
    _, second, _ = cross_validated([Records(*lies), *few[1:]], DEPTHS, folds=6)
    n = len(lie)
    assert np.array_equal(first[:n], second[:n])
    assert not np.array_equal(first[n:], second[n:])


def test_survival_starts_from_the_table_and_asks_for_confidence():
    s = Survival(DEPTHS, calibration=TRUE)
    assert s.asks_confidence
    log_p = np.log(np.array([[0.6, 0.3], [0.9, 0.05]], np.float32))
    c = np.array([[0.7], [-1.0]], np.float32)
    for d in range(DEPTHS):
        nodes = Nodes(
            np.full(4, -1),
            np.full(4, d),
            np.array([True, False, True, False]),
            log_p.ravel(),
            np.repeat(c.ravel(), 2),
            np.zeros(4, bool),
        )
        expected = -np.logaddexp(0, -TRUE.log_odds(nodes)).reshape(2, 2)
        assert s.log_odds(d, log_p, c) == pytest.approx(expected, abs=1e-5)
    # Unknown confidence counts as the usual one.
    usual = np.full((2, 1), TRUE.confidence_mean[0], np.float32)
    assert s.log_odds(0, log_p) == pytest.approx(s.log_odds(0, log_p, usual))
    for _ in range(60):
        s.observe(0, 0.9, False)
    assert s.offsets[0] < TRUE.offsets[0]
    assert s.offsets[1] == TRUE.offsets[1]


def test_trees_ask_the_confidence_head_per_parent(load: Callable[..., Engine]):
    engine = load("vanilla")
    engine.complete(prompt_of(1), max_tokens=5, draft=DraftOptions(tokens=0))
    drafter = engine._drafter
    assert drafter is not None
    block = drafter.propose(5)
    table = Calibration((0.1,) * 7, (0.9,) * 7, (0.4,) * 7, (0.8,) * 7, (0.3,) * 7)
    s = Survival(7, calibration=table)
    options: dict[str, Any] = {"budget": 20, "children": 3, "frontier": 6}
    tree = build_tree(block, drafter.heads, calibrate=s.log_odds, ask_confidence=True, **options)
    whole = build_tree(block, drafter.heads, **options | {"budget": 63})
    raw = {
        tuple(whole.token[whole.path(i)]): float(
            whole.score[i] - (0 if whole.parent[i] == ROOT else whole.score[whole.parent[i]])
        )
        for i in range(len(whole))
    }
    compared = set()
    for i in range(len(tree)):
        p, d = int(tree.parent[i]), int(tree.depth[i])
        log_p = raw.get(tuple(tree.token[tree.path(i)]))
        if log_p is None:
            continue
        above, parent = (0.0, block.anchor) if p == ROOT else (tree.score[p], tree.token[p])
        assert block.hidden is not None
        c = log_odds_of(drafter.heads.confidence(np.array([parent]), block.hidden[d - 1]))
        boosted = i == min(tree.children[p])  # the likeliest child stands first
        shaped = np.full((1, 1) if boosted else (1,), log_p, np.float32)
        expected = float(s.log_odds(d - 1, shaped, c.reshape(shaped.shape)).ravel()[0])
        assert float(tree.score[i] - above) == pytest.approx(expected, abs=1e-3)
        compared.add(d)
    assert len(compared) > 1


def test_records_say_what_the_target_went_on_with(load: Callable[..., Engine]):
    engine, prompt = load("vanilla"), prompt_of(3)
    records = record(engine, prompt, max_tokens=30)
    chain, depths = records.chain, 7
    answer = engine.complete(prompt, max_tokens=30, draft=DraftOptions(tokens=0)).token_ids
    assert (chain.depth == 0).sum() == len(answer) - depths
    # The same as fixed chains accept at the first position.
    first = engine.complete(prompt, max_tokens=depths + 2, draft=DraftOptions(tokens=7)).rounds[0]
    assert chain.right[:depths].sum() == first.accepted
    for nodes in (chain, records.tree):
        inner = nodes.parent >= 0
        assert (nodes.depth[inner] == nodes.depth[nodes.parent[inner]] + 1).all()
        assert not (nodes.right[inner] & ~nodes.right[nodes.parent[inner]]).any()
        assert (nodes.log_p <= 1e-6).all()
        assert np.isfinite(nodes.confidence).all()


def test_the_target_writes_messages_and_the_same_ones_again(load: Callable[..., Engine]):
    engine = load("vanilla")
    found = list(own_messages(engine, 4, seed=3))
    assert found and found == list(own_messages(engine, 4, seed=3))
    assert len(rendered(engine, found[0])) > len(engine.tokenize(found[0]))


def a_drafter(folder: Path, text: bytes = b"weights" * 40_000) -> Path:
    path = folder / "d.gguf"
    path.write_bytes(text)
    return path


def test_a_calibration_is_kept_beside_its_drafter_and_found_again(tmp_path: Path):
    drafter = a_drafter(tmp_path)
    assert calibration_file.load(drafter, DEPTHS) is None
    path = calibration_file.save(drafter, TRUE, {"note": 1})
    assert path == tmp_path / "d.calibration.json"
    assert json.loads(path.read_text())["note"] == 1
    assert calibration_file.load(drafter, DEPTHS) == TRUE
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


def test_it_goes_to_the_cache_where_that_cannot_be_written(tmp_path: Path):
    drafter = a_drafter(tmp_path)
    (tmp_path / "d.calibration.json").mkdir()  # nothing can be put in its place
    path = calibration_file.save(drafter, TRUE, {})
    assert path == calibration_file.cached_file(drafter)
    assert calibration_file.load(drafter, DEPTHS) == TRUE
    # Once it can be written beside the drafter, the cached one must not shadow it.
    (tmp_path / "d.calibration.json").rmdir()
    other = Calibration.identity(DEPTHS)
    calibration_file.save(drafter, other, {})
    assert not path.exists()
    assert calibration_file.load(drafter, DEPTHS) == other


def damage(data: dict[str, Any], how: str) -> object:
    rows = data["depths"]
    if how == "list":
        return [1, 2]
    if how == "number":
        return 5
    if how == "version":
        return data | {"version": 99}
    if how == "shorter":
        return data | {"depths": rows[:-1]}
    if how == "none":
        return data | {"depths": []}
    field, value = {
        "text": ("offsets", "0.1"),
        "true": ("offsets", True),
        "nan": ("confidence", float("nan")),
        "huge": ("slopes", 1e9),
        "falling": ("slopes", -0.5),
        "missing": ("slopes", None),
    }[how]
    return data | {"depths": [rows[0] | {field: value}, *rows[1:]]}


@pytest.mark.parametrize(
    "how",
    ["list", "number", "version", "shorter", "none", "text", "true", "nan", "huge", "falling",
     "missing"],
)  # fmt: skip
def test_what_cannot_be_used_is_passed_over_with_a_warning(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
):
    drafter = a_drafter(tmp_path)
    path = calibration_file.save(drafter, TRUE, {})
    path.write_text(json.dumps(damage(json.loads(path.read_text()), how)))
    with caplog.at_level(logging.WARNING, "localspec"):
        assert calibration_file.load(drafter, DEPTHS) is None
    assert len(caplog.records) == 1
    assert "localspec calibrate" in caplog.text
    with pytest.raises(LocalspecError):
        calibration_file.read(path, drafter, DEPTHS)


@pytest.mark.parametrize("text", ["", "{", '"x"', "[" * 100_000, "\x00\xff", "{}"])
def test_damaged_files_are_no_calibration(tmp_path: Path, text: str):
    drafter = a_drafter(tmp_path)
    calibration_file.side_file(drafter).write_bytes(text.encode("latin-1"))
    assert calibration_file.load(drafter, DEPTHS) is None


def test_another_training_of_the_same_drafter_is_another_drafter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    drafter = a_drafter(tmp_path)
    calibration_file.save(drafter, TRUE, {})
    a_drafter(tmp_path, b"weights" * 39_999 + b"retrain")  # same size, same header
    assert calibration_file.load(drafter, DEPTHS) is None
    assert "another drafter" in caplog.text


def run(args: Sequence[object]) -> Any:
    return CliRunner().invoke(cli, ["calibrate", *map(str, args)])


def test_the_command_calibrates_and_the_engine_uses_it(load: Callable[..., Engine], tmp_path: Path):
    paths = load("vanilla")._files
    drafter = a_drafter(tmp_path, paths[1].read_bytes())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"tell {i}"]}) + "\n" for i in range(6)))
    common = ["-m", paths[0], "-d", drafter, "--n-ctx", 256, "--threads", 1, "--count", 6, "-n", 20]
    done = run([*common, "--prompts", prompts, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["file"] == str(tmp_path / "d.calibration.json")
    assert report["prompts"] >= 5 and len(report["after"]) == 7
    table = calibration_file.load(drafter, 7)
    assert table is not None
    with Engine.load(paths[0], drafter, n_ctx=256, n_threads=1) as engine:
        engine.complete(prompt_of(2), max_tokens=3)
        assert engine._auto is not None
        assert tuple(engine._auto.survival.start) == table.offsets
        assert tuple(engine._auto.survival.slopes) == table.slopes
    shown = run([*common, "--temp", 1])
    assert shown.exit_code == 0, shown.output
    assert "after" in shown.output and "saved to" in shown.output


def test_the_command_says_what_is_missing(load: Callable[..., Engine], tmp_path: Path):
    target = load(None)._files[0]
    done = run(["-m", target, "--n-ctx", 256, "--threads", 1])
    assert isinstance(done.exception, LocalspecError)
    assert "-d" in str(done.exception)


def test_the_default_drafter_ships_with_its_calibration():
    drafter = pairs.default_drafter()
    path = calibration_file.side_file(drafter)
    if not drafter.exists():
        pytest.skip("the default drafter is not here")
    with GgufFile(drafter) as file:
        depths = pairs.read_drafter(file).max_depth
    table = calibration_file.read(path, drafter, depths)
    assert table.sound
    report = json.loads(path.read_text("utf-8"))["report"]
    assert max(report["after"]) <= 0.02
    assert max(report["tree_after"]) <= 0.02
