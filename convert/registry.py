"""What converts, what runs, and which test says so: the table of docs/checkpoints.md.

python -m localspec.convert.registry        prints the page
python -m localspec.convert.registry FILE   writes it
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One kind of checkpoint.

    Attributes:
        family: the kind of drafter.
        packaging: whose layout, and how to recognise it.
        converts: "yes", "not needed", or what is refused.
        runs: what the runtime does with it.
        proof: "file::test" in tests/, run on tiny seeded checkpoints.
    """

    family: str
    packaging: str
    converts: str
    runs: str
    proof: str


YES = "yes"
ROWS = (
    Row("DSpark, Qwen3 backbone", "published (`Qwen3DSparkModel`); vanilla, gated and rnn heads",
        YES, "chain and tree", "test_convert_verify.py::test_what_is_right_passes"),
    Row("DSpark, Qwen3 backbone", "published, with a reduced vocabulary (`d2t`), as `localspec "
        "train` saves it",
        YES, "chain and tree",
        "test_train_block.py::test_a_reduced_vocabulary_in_the_published_layout"),
    Row("DSpark, Gemma 4 backbone", "published (`Gemma4DSparkModel`)",
        YES, "chain and tree",
        "test_convert_gemma4.py::test_llama_cpp_computes_what_the_reference_does"),
    Row("DFlash", "z-lab (`dflash_config`); sliding windows, causal variants",
        YES, "chain and tree",
        "test_convert_dflash.py::test_llama_cpp_computes_what_the_reference_does"),
    Row("DFlash 2", "z-lab (`DFlash2DraftModel`: candidate selector, dynamic convolutions)",
        YES, "its lattice as the tree",
        "test_convert_dflash.py::test_our_scores_are_llama_cpp_s_lattice"),
    Row("DSpark, Gemma 4 backbone", "with `attention_k_eq_v` false, MoE blocks, per-layer inputs",
        "refused: llama.cpp's drafter graph has none of them", "no",
        "test_convert_gemma4.py::test_what_cannot_be_represented_is_refused_by_name"),
    Row("DFlash", "windows on some layers, directions undeclared or mixed",
        "yes, with a note: llama.cpp has one direction for all layers", "chain and tree",
        "test_convert_dflash.py::test_undeclared_directions"),
    Row("DFlash", "with `mask_embedding.pt`", "refused", "no",
        "test_convert_dflash.py::test_a_mask_embedding_of_its_own_is_refused"),
    Row("Eagle3", "the DSpark release's (Qwen3; q and k norms, five feature layers)",
        "yes, into two files", "chain and tree",
        "test_eagle3.py::test_hidden_states_logits_and_chain_are_the_references"),
    Row("Eagle3", "SpecForge and speculators (one layer, three feature layers, `d2t`)",
        YES, "chain and tree", "test_eagle3.py::test_verified_in_every_type"),
    Row("Eagle3", "Gemma 4, `fc_norm` (Eagle3.1), scaled rope", "refused", "no",
        "test_eagle3.py::test_what_cannot_be_converted_is_refused"),
    Row("multi-token prediction layer", "inside a Qwen3.5-type target's GGUF",
        "not needed: `-d mtp`", "chain", "test_mtp.py::test_greedy_text_is_the_targets"),
    Row("multi-token prediction layers", "inside other targets' GGUFs",
        "recognised by `localspec inspect`", "no", "test_mtp.py::test_recognised"),
    Row("DSpark, DeepSeek-V4 backbone", "inside a full DeepSeek-V4 checkpoint (`mtp.N.*`)",
        YES, "chain",
        "test_convert_deepseek4.py::test_verification_passes_for_every_kind_of_type"),
    Row("DSpark", "speculators (`DSparkSpeculator`, nested `transformer_layer_config`)",
        YES, "chain and tree", "test_convert_packaging.py::test_speculators_dspark"),
    Row("DSpark", "speculators with bonus-anchor blocks (`sample_from_anchor` false or absent)",
        YES, "chain and tree", "test_convert_packaging.py::test_speculators_bonus_anchor"),
    Row("DSpark", "speculators with a reduced vocabulary (`d2t`)",
        YES, "chain and tree", "test_convert_packaging.py::test_speculators_reduced_vocabulary"),
    Row("DFlash", "speculators (`DFlashSpeculator`)",
        YES, "chain and tree", "test_convert_packaging.py::test_speculators_dflash"),
    Row("DSpark, DFlash", "speculators, sliding layers that see a block only backwards",
        "refused (`sliding_window_non_causal` false)", "no",
        "test_convert_packaging.py::test_sliding_layers_that_look_only_backwards_are_refused"),
    Row("DSpark", "LFM2.5 and Ling (`rope_is_neox_style` false, `dflash_config`)",
        YES, "chain and tree",
        "test_convert_packaging.py::test_interleaved_rope_and_nested_taps"),
    Row("DSpark", "LFM2.5 and Ling that rotate a part of each head",
        "refused (`partial_rotary_factor`)", "no",
        "test_convert_packaging.py::test_partial_rotation_is_refused_for_packagings_that_mean_it"),
    Row("any of these", "DeepSpec training output (`step_N`, `step_latest`)",
        YES, "as the family", "test_convert_packaging.py::test_deepspec_steps"),
    Row("any of these", "speculators training output (`0`, `1`, `checkpoint_best`)",
        YES, "as the family", "test_convert_packaging.py::test_speculators_epochs"),
    Row("any of these", "NeMo AutoModel, consolidated (`epoch_E_step_S/model/consolidated`)",
        YES, "as the family", "test_convert_packaging.py::test_nemo_automodel"),
    Row("any of these", "NeMo AutoModel, split over ranks (`.distcp`, `shard-*`)",
        "refused: consolidate first", "no",
        "test_convert_packaging.py::test_split_weights_ask_to_be_consolidated"),
    Row("any Qwen3-like", "`.bin` and `.pt` weights, read as weights only",
        YES, "as the family", "test_convert_packaging.py::test_torch_weights"),
    Row("any of these", "a hub id, or a mirror's",
        YES, "as the family",
        "test_convert_hub.py::test_downloads_what_is_needed_and_converts"),
    Row("any of these", "a drafter that is a GGUF already",
        "not needed: checked, copied with `-o`", "as the family",
        "test_convert_verify.py::test_a_drafter_that_is_a_gguf"),
)  # fmt: skip

_HEAD = """# Which checkpoints convert

Generated from `convert/registry.py`, in `docs/`, with
`python -m localspec.convert.registry checkpoints.md`.
Every row is proven on tiny seeded checkpoints in exactly that layout: written out, converted,
loaded in llama.cpp and compared with the torch reference, or, where only the packaging differs,
compared with a conversion that was. None was tried here on a published checkpoint of full size;
`localspec convert` makes the same comparison on yours (see [converting](convert.md)).

| drafter | packaging | converts | runs | proven by |
|---|---|---|---|---|
"""


def page() -> str:
    """docs/checkpoints.md."""
    lines = [
        f"| {row.family} | {row.packaging} | {row.converts} | {row.runs} | `{row.proof}` |\n"
        for row in ROWS
    ]
    return _HEAD + "".join(lines)


def main(arguments: list[str]) -> None:
    """Print the page, or write it to the file named."""
    if arguments:
        Path(arguments[0]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main(sys.argv[1:])
