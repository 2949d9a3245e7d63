"""What llama.cpp makes of an architecture: who drafts, who can be drafted for, and its limits."""

from __future__ import annotations

DRAFTER_ARCH = "dflash"
EAGLE_ARCH = "eagle3"
DRAFTER_ARCHS = frozenset((DRAFTER_ARCH, EAGLE_ARCH))
HEADS_ARCH = "localspec-heads"
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
# llama.cpp's graph of a block grows with it, and ends the process when it gets too large.
MAX_BLOCK = 64

# Architectures whose graphs in llama.cpp expose the inputs of their layers (`t_layer_inp`).
FEATURE_ARCHS = frozenset(
    "bailingmoe3 deepseek4 gemma4 gpt-oss hunyuan-dense hunyuan_vl lfm2 lfm2moe llama mimo2 "
    "minimax-01 minimax-m2 muse-glimmer nanbeige nemotron_h nemotron_h_moe qwen3 qwen35 qwen35moe "
    "qwen3moe qwen3next".split()
)
# Of these, the ones that also hand out the last layer's output (as the input of a layer after it).
LAST_OUTPUT_ARCHS = frozenset({"deepseek4"})
# Their caches cannot forget a part or share one between paths, recurrent though they are not.
NO_TREE_ARCHS = frozenset({"deepseek4"})
# Files that llama.cpp can load but that are no text model of their own.
NOT_TARGETS = {
    DRAFTER_ARCH: "a DSpark or DFlash drafter",
    HEADS_ARCH: "the heads of a drafter",
    EAGLE_ARCH: "an Eagle3 drafter",
    "clip": "a vision projector",
    "gemma4-assistant": "a Gemma 4 assistant (drafter)",
}
