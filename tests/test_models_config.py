"""models.config: what it reads, what it refuses, and that a refusal is one useful line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.errors import LocalspecError
from localspec.models.config import DrafterConfig

GOOD: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "block_size": 7,
    "mask_token_id": 3,
    "target_layer_ids": [-1, 2, 4],
    "num_target_layers": 6,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "attention_bias": False,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 8,
    "markov_rank": 16,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "num_anchors": 24,
}


def changed(**changes: Any) -> dict[str, Any]:
    """GOOD with fields replaced; the value `...` removes the field."""
    merged = {**GOOD, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def test_reads_every_field():
    config = DrafterConfig.from_dict(GOOD)
    assert config.target_layer_ids == (-1, 2, 4)
    assert config.num_features == 3 * 96
    assert config.rope_theta == 5000.0
    assert (config.window(0), config.window(1)) == (None, 8)
    assert (config.markov_head_type, config.markov_rank) == ("gated", 16)
    assert config.num_depths == 7
    assert DrafterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_rope_theta_at_top_level():
    assert DrafterConfig.from_dict(changed(rope_parameters=..., rope_theta=777)).rope_theta == 777.0


def test_partial_rotary_factor_is_ignored():
    nested = {**GOOD["rope_parameters"], "partial_rotary_factor": 0.25}
    config = DrafterConfig.from_dict(changed(rope_parameters=nested))
    assert config == DrafterConfig.from_dict(GOOD)


def test_no_heads():
    config = DrafterConfig.from_dict(
        changed(
            markov_rank=0,
            markov_head_type=...,
            enable_confidence_head=False,
            confidence_head_with_markov=...,
        )
    )
    assert config.markov_rank == 0 and not config.enable_confidence_head


def test_dflash_config_predicts_at_mask_positions():
    config = DrafterConfig.from_dict(
        changed(
            mask_token_id=...,
            target_layer_ids=...,
            dflash_config={"mask_token_id": 5, "target_layer_ids": [1, 3]},
        )
    )
    assert (config.mask_token_id, config.target_layer_ids) == (5, (1, 3))
    assert not config.sample_from_anchor and config.num_depths == 6


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"vocab_size": ...}, "vocab_size", "missing"),
        ({"hidden_size": "96"}, "hidden_size", "integer"),
        ({"hidden_size": True}, "hidden_size", "integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "at most"),
        ({"block_size": 1}, "block_size", "at least 2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "divide"),
        ({"head_dim": ..., "hidden_size": 98}, "hidden_size", "divisible"),
        ({"head_dim": 31}, "head_dim", "even"),
        ({"hidden_act": "gelu"}, "hidden_act", "silu"),
        ({"mask_token_id": 512}, "mask_token_id", "outside"),
        ({"target_layer_ids": []}, "target_layer_ids", "non-empty"),
        ({"target_layer_ids": [2, 2]}, "target_layer_ids", "strictly increasing"),
        ({"target_layer_ids": [4, 2]}, "target_layer_ids", "strictly increasing"),
        ({"target_layer_ids": [-2, 2]}, "target_layer_ids", "-1 for the embedding"),
        ({"target_layer_ids": [0, 5]}, "target_layer_ids", "last usable one is 4"),
        ({"target_layer_ids": [0, 1.5]}, "target_layer_ids", "1.5"),
        ({"layer_types": ["full_attention"]}, "layer_types", "2 entries"),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types", "linear"),
        ({"layer_types": ..., "use_sliding_window": True}, "layer_types", "missing"),
        ({"sliding_window": None}, "sliding_window", "missing"),
        ({"markov_head_type": "lstm"}, "markov_head_type", "vanilla, gated, rnn"),
        ({"markov_head_type": ...}, "markov_head_type", "missing"),
        ({"markov_head_type": 3}, "markov_head_type", "3"),
        ({"markov_rank": -1}, "markov_rank", "at least 0"),
        ({"markov_rank": 0}, "confidence_head_with_markov", "markov_rank is 0"),
        ({"confidence_head_with_markov": ...}, "confidence_head_with_markov", "missing"),
        ({"enable_confidence_head": "yes"}, "enable_confidence_head", "true or false"),
        ({"rope_parameters": ...}, "rope_theta", "missing"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta", "positive"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta", "positive"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta", "positive"),
        ({"rope_parameters": 3}, "rope_parameters", "object"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling", "yarn"),
    ],
)
def test_refuses(changes: dict[str, Any], field: str, says: str):
    with pytest.raises(LocalspecError) as caught:
        DrafterConfig.from_dict(changed(**changes), where="here")
    message = str(caught.value)
    assert message.startswith(f"here: {field} ")
    assert says in message
    assert "\n" not in message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*GOOD, "rope_scaling", "dflash_config"]), JSON, min_size=1))
def test_anything_is_read_or_refused_in_one_line(changes: dict[str, Any]):
    try:
        config = DrafterConfig.from_dict({**GOOD, **changes})
    except LocalspecError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert DrafterConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("text", ["", "{", "[]", "nul", "\x00"])
def test_files_that_hold_no_config(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LocalspecError, match=r"config\.json"):
        DrafterConfig.from_file(tmp_path)


def test_a_message_is_one_line_whatever_it_quotes():
    with pytest.raises(LocalspecError) as caught:
        DrafterConfig.from_dict(changed(block_size=0), where="odd\ndirectory")
    assert str(caught.value).startswith("odd directory: block_size")


def test_missing_and_undecodable_files(tmp_path: Path):
    with pytest.raises(LocalspecError, match="cannot be read"):
        DrafterConfig.from_file(tmp_path / "nowhere")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(LocalspecError, match="cannot be read"):
        DrafterConfig.from_file(tmp_path)


def test_importing_the_config_does_not_import_torch():
    code = "import sys, localspec.models.config; sys.exit('torch' in sys.modules)"
    # -I: the repository's own folder must not come before the installed package.
    assert subprocess.run([sys.executable, "-I", "-c", code], check=False).returncode == 0
