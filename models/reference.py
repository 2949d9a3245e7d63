"""A small target in torch and the plain speculative loop: what the runtime is compared with.

Shapes: n tokens, L layers, d = hidden size, V = vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec.errors import LocalspecError
from localspec.models.checkpoint import read_tensors, tensor_files
from localspec.models.drafter import Drafter
from localspec.models.layers import Attention, ContextCache, Layer, RMSNorm, rope_angles

# model_type -> (biases on q, k, v; normalised queries and keys)
TARGET_TYPES = {"qwen3": (False, True), "qwen2": (True, False), "llama": (False, False)}


class TinyTarget(nn.Module):
    """A causal transformer of the qwen3 family (also qwen2 and llama), unbatched, with a cache.

    Meant for small models: plain attention, float32, no attempt at speed.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """`config`: a parsed Hugging Face config.json of one of TARGET_TYPES."""
        super().__init__()
        self.config = config
        bias, qk_norm = TARGET_TYPES[config["model_type"]]
        d, eps = config["hidden_size"], config["rms_norm_eps"]
        heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or d // heads
        rope = config.get("rope_parameters") or config
        self.rope_theta = float(rope.get("rope_theta", 10000.0))
        self.embed_tokens = nn.Embedding(config["vocab_size"], d)
        self.layers = nn.ModuleList(
            Layer(
                Attention(
                    d,
                    heads,
                    self.kv_heads,
                    self.head_dim,
                    eps,
                    bias=bias,
                    output_bias=False,
                    qk_norm=qk_norm,
                ),
                d,
                config["intermediate_size"],
                eps,
            )
            for _ in range(config["num_hidden_layers"])
        )
        self.norm = RMSNorm(d, eps)
        tied = config.get("tie_word_embeddings", False)
        self.lm_head = None if tied else nn.Linear(d, config["vocab_size"], bias=False)

    @classmethod
    def load(cls, path: str | Path) -> TinyTarget:
        """Load a Hugging Face directory in float32. Raises LocalspecError if it cannot be one."""
        path = Path(path)
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            with torch.device("meta"):
                target = cls(config)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LocalspecError(
                f"{path}: is not a {' / '.join(TARGET_TYPES)} model directory; "
                "point to one with config.json and model.safetensors"
            ) from error
        files = tensor_files(path)
        stored = {_stored_name(name): tuple(t.shape) for name, t in target.state_dict().items()}
        missing = sorted(stored.keys() - files.keys())
        if missing:
            raise LocalspecError(f"{path}: tensor {missing[0]} is missing; download it again")
        tensors = read_tensors(files, stored)
        target.load_state_dict(
            {name.removeprefix("model."): t.float() for name, t in tensors.items()}, assign=True
        )
        return target.eval()

    @property
    def output_matrix(self) -> Tensor:
        """[V, d]: lm_head, or the embeddings when they are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def new_cache(self) -> ContextCache:
        """An empty context."""
        return ContextCache(
            len(self.layers), self.kv_heads, self.head_dim, self.embed_tokens.weight
        )

    @torch.no_grad()
    def forward(self, tokens: Tensor, cache: ContextCache) -> tuple[Tensor, list[Tensor]]:
        """Decode tokens [n] after what the cache holds, and add them to it.

        -> (logits [n, V], hidden states: L + 1 of [n, d]; entry 0 is the embedding output and
        entry i + 1 the output of layer i, before any final norm).
        """
        past = len(cache)
        positions = torch.arange(past, past + len(tokens))
        visible = torch.arange(past + len(tokens)) <= positions[:, None]
        rope = rope_angles(positions, self.head_dim, self.rope_theta)
        x = self.embed_tokens(tokens)
        hidden = [x]
        for index, layer in enumerate(self.layers):
            x, (k, v) = layer(x, rope, cache.layers[index], visible)
            cache.append(index, k, v)
            hidden.append(x)
        return F.linear(self.norm(x), self.output_matrix), hidden

    @staticmethod
    def features(hidden: list[Tensor], layer_ids: Sequence[int]) -> Tensor:
        """Concatenate the chosen layers' outputs, -1 = embedding output -> [n, len(ids) * d]."""
        return torch.cat([hidden[layer + 1] for layer in layer_ids], dim=-1)

    def greedy(
        self, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Collection[int] = ()
    ) -> list[int]:
        """Plain decoding: prompt and output, ending with the stop token if one came."""
        ids, cache = list(prompt_ids), self.new_cache()
        pending = ids
        for _ in range(max_new_tokens):
            logits, _ = self(torch.tensor(pending), cache)
            pending = [int(logits[-1].argmax())]
            ids = ids + pending
            if pending[0] in stop_ids:
                break
        return ids


@dataclass
class Round:
    """What one round did, in the words of the golden files."""

    start: int  # position of the anchor
    anchor: int
    draft: list[int]  # the greedy chain
    conf: list[float] | None  # confidence per depth
    accepted: int  # drafted tokens accepted; a stop token ends the count
    base: Tensor = field(repr=False)  # [D, V]
    hidden: Tensor = field(repr=False)  # [D, d]


@torch.no_grad()
def speculative_decode(
    target: TinyTarget,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> tuple[list[int], list[Round]]:
    """Greedy speculative decoding with a chain of full length every round.

    -> (prompt and output ids, the rounds). The output has at most `max_new_tokens` tokens and
    ends with the first stop token. It is the target's own greedy text.
    """
    ids = list(prompt_ids)
    limit = len(ids) + max_new_tokens
    layer_ids = drafter.config.target_layer_ids
    target_cache, context = target.new_cache(), drafter.new_cache()
    rounds: list[Round] = []

    logits, hidden = target(torch.tensor(ids), target_cache)
    drafter.absorb(target.features(hidden, layer_ids), context)
    ids.append(int(logits[-1].argmax()))
    while len(ids) <= limit and ids[-1] not in stop_ids:
        start = len(ids) - 1
        proposal = drafter.propose(ids[-1], start, context)
        draft = proposal.tokens.tolist()
        logits, hidden = target(torch.tensor([ids[-1], *draft]), target_cache)
        choice = logits.argmax(dim=-1).tolist()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == choice[accepted]:
            accepted += 1
            if draft[accepted - 1] in stop_ids:
                break
        conf = proposal.confidence
        rounds.append(
            Round(
                start=start,
                anchor=ids[-1],
                draft=draft,
                conf=None if conf is None else conf.tolist(),
                accepted=accepted,
                base=proposal.base,
                hidden=proposal.hidden,
            )
        )
        ids += draft[:accepted]
        if ids[-1] not in stop_ids:
            ids.append(choice[accepted])
        kept = start + 1 + accepted
        target_cache.crop(kept)
        drafter.absorb(target.features(hidden, layer_ids)[: accepted + 1], context)
    return ids[:limit], rounds


def _stored_name(name: str) -> str:
    """Parameter name -> the name Hugging Face stores it under."""
    return name if name.startswith("lm_head.") else f"model.{name}"
