"""Drafting with the multi-token prediction (MTP) layers inside a target's own file.

Such a layer reads a token together with the target's last hidden state of the position before,
and its own output state takes the target's place for drafted tokens: an autoregressive drafter
like Eagle3, without features, an encoder or a file of its own. Published models have one such
layer, trained to look one token ahead; llama.cpp runs it in a context of its own over the same
weights.
"""

from __future__ import annotations

import numpy as np

from localspec.eagle import EagleDrafter, Floats
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.pairs import DrafterInfo, vocab_size

# What stands for a drafter file: the target's own layers.
MTP = "mtp"
# Architectures whose single MTP layer llama.cpp evaluates in a context of its own, and whose
# graphs hand out the states it reads. Others are recognised and not run.
MTP_ARCHS = frozenset(("qwen35", "qwen35moe"))
# Drafts beyond the first token reuse a layer trained for one; few more are ever accepted.
DEPTHS = 4


def n_mtp_layers(target: GgufFile) -> int:
    """Multi-token prediction layers in a target's file."""
    n = target.arch_get("nextn_predict_layers", 0)
    return n if isinstance(n, int) and not isinstance(n, bool) and n > 0 else 0


def can_draft(target: GgufFile) -> bool:
    """Whether localspec can draft with the MTP layers of this file."""
    return (
        target.architecture in MTP_ARCHS
        and n_mtp_layers(target) == 1
        and f"{_layer(target)}.nextn.eh_proj.weight" in target.tensors
    )


def read_mtp(target: GgufFile) -> DrafterInfo:
    """The drafter inside a target.

    Raises:
        LocalspecError: there is none, or llama.cpp cannot run it in this process.
    """
    if n_mtp_layers(target) == 0:
        raise LocalspecError(
            f"{target.path.name} has no multi-token prediction layers; give a drafter's file with "
            "-d, or leave it out"
        )
    if not can_draft(target):
        raise LocalspecError(
            f"localspec cannot draft with the multi-token prediction layers of "
            f"{target.path.name} ({target.architecture}); leave -d out to decode plainly"
        )
    layer = _layer(target)
    for part in ("nextn.enorm", "nextn.hnorm", "attn_norm", "post_attention_norm", "attn_output"):
        if f"{layer}.{part}.weight" not in target.tensors:
            raise LocalspecError(
                f"{target.path} lacks {layer}.{part}.weight of its multi-token prediction layer; "
                "download or convert it again"
            )
    return DrafterInfo(
        n_embd=int(target.arch_get("embedding_length")),
        n_vocab=vocab_size(target),
        block_size=DEPTHS,
        target_layers=(),
        mask_token=0,
        sample_from_anchor=True,
        head_type="none",
        has_confidence=False,
        heads_path=None,
        family=MTP,
    )


def _layer(target: GgufFile) -> str:
    return f"blk.{int(target.arch_get('block_count')) - 1}"


class MtpDrafter(EagleDrafter):
    """The MTP layer of the target, in a context made with `mtp`."""

    shift = 1

    def _fuse(self, features: Floats) -> Floats:
        return np.ascontiguousarray(features, np.float32)
