"""Tiny targets and drafters for the test-suite: numpy only, seeded, built in a second.

The target is structured: every token has a few likely successors (one long cycle of first
choices, through printable text, some multi-byte characters and the end token), and random
attention and MLPs perturb which of them wins. The drafter's heads are made in closed form from
the same transition logits, so drafts are sometimes accepted whole, sometimes in part.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

PAD_ID, START_ID, EOS_ID, MASK_ID = 0, 1, 2, 3
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
FIRST_BYTE = len(SPECIALS)  # byte b is token FIRST_BYTE + b
CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>'+m['role']+'\n'+m['content']+'<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
# "x y" merges into "xy"; a merge may use the ones before it. The sign Ġ stands for the space.
MERGES = (
    "t h|h e|th e|Ġ the|i n|a n|an d|Ġ and|e r|o n|r e|Ġ a|o r|e n|a t|e s|i s|Ġ is|i t|Ġ it|"
    "o u|Ġ t|s t|a r|n d|t o|Ġ to|in g|o f|Ġ of|e d|Ġ s|a l|l e|Ġ w|o m|a s|h a|v e|l l|Ġ b|Ġ c|"
    "i c|r o|l i|Ġ m|Ġ d|e a|Ġ f|w h|Ġ p|u s|er s|u t|i l|o w|Ġ h|Ġ n|n e|c h"
).split("|")
MULTIBYTE = ("é", "日", "🙂")  # no two share a byte, so each has its own place on the cycle
FLOAT = np.float32


@dataclass(frozen=True)
class TinyModel:
    """A model on disk and in memory.

    path: the directory with config.json and model.safetensors; gguf: the F32 file of a target;
    tensors: what was written, by name; transition: [V, V] logits of the next token (column) given
    the last one (row), before any layer.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, np.ndarray] = field(repr=False)
    transition: np.ndarray = field(repr=False)
    gguf: Path | None = None


def build_target(
    dir: str | Path,
    *,
    seed: int = 0,
    arch: str = "qwen3",
    vocab: int = 320,
    layers: int = 4,
    width: int = 96,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 192,
    noise: float = 0.3,
    context: int = 2048,
    tied: bool = False,
) -> TinyModel:
    """Write a target as a Hugging Face directory with `target.gguf` (F32) in it.

    arch: "qwen3", "llama" (both hand out layer features) or "qwen2" (does not). noise: size of
    each sublayer's output against the residual stream; 0 makes a plain first-order chain. tied:
    the file has no output matrix and the model reads its embeddings backwards, which keeps no
    transition structure: for loading tests.
    """
    if arch not in ("qwen3", "llama", "qwen2"):
        raise ValueError(f"no tiny target of arch {arch!r}")
    rng = np.random.default_rng(seed)
    if arch == "qwen2":  # llama.cpp takes no other head size for it
        head_dim = width // heads
    config = {
        "architectures": [{"qwen3": "Qwen3", "llama": "Llama", "qwen2": "Qwen2"}[arch]
                          + "ForCausalLM"],
        "model_type": arch,
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }  # fmt: skip
    embed = rng.standard_normal((vocab, width)).astype(FLOAT)
    normed = embed / np.sqrt((embed**2).mean(-1, keepdims=True))
    output = embed if tied else _fit_output(normed, _successors(normed, rng), rng)
    tensors = {"model.embed_tokens.weight": embed, "model.norm.weight": np.ones(width, FLOAT)}
    if not tied:
        tensors["lm_head.weight"] = output
    for i in range(layers):
        layer = _layer(rng, width, heads, kv_heads, head_dim, ffn, noise)
        if arch != "qwen3":
            del layer["self_attn.q_norm.weight"], layer["self_attn.k_norm.weight"]
        if arch == "qwen2":
            for part, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                bias = 0.1 * rng.standard_normal(rows * head_dim)
                layer[f"self_attn.{part}_proj.bias"] = bias.astype(FLOAT)
        tensors |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    path = _write_directory(dir, config, tensors)
    _write_gguf(path / "target.gguf", arch, config, tensors)
    return TinyModel(path, config, tensors, normed @ output.T, path / "target.gguf")


def build_drafter(
    dir: str | Path,
    target: TinyModel,
    *,
    head: str = "vanilla",
    block_size: int = 7,
    conf_markov: bool = True,
    confidence: bool = True,
    seed: int = 0,
    rank: int = 64,
    layers: int = 2,
    target_layer_ids: Sequence[int] | None = None,
    own_embeddings: bool = True,
    base_noise: float = 0.4,
    shard: bool = False,
) -> TinyModel:
    """Write a drafter for `target` in the published checkpoint format.

    head: "vanilla", "gated", "rnn", or "none" (rank 0). own_embeddings: False leaves embed_tokens
    and lm_head to the target. base_noise: standard deviation of the base logits, which disturb
    what the head knows. shard: two files and an index.
    """
    rng = np.random.default_rng(seed + 1000)
    c = target.config
    vocab, width = c["vocab_size"], c["hidden_size"]
    n_target = c["num_hidden_layers"]
    if target_layer_ids is None:
        target_layer_ids = sorted({0, (n_target - 1) // 2, n_target - 2})
    rank = 0 if head == "none" else min(rank, width)
    config = {
        key: c[key]
        for key in (
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters",
            "max_position_embeddings", "eos_token_id", "pad_token_id",
        )
    } | {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "attention_bias": False,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "block_size": block_size,
        "mask_token_id": MASK_ID,
        "target_layer_ids": list(target_layer_ids),
        "num_target_layers": n_target,
        "num_anchors": 16,
        "markov_rank": rank,
        "enable_confidence_head": confidence,
    }  # fmt: skip
    embed = target.tensors["model.embed_tokens.weight"]
    output = target.tensors.get("lm_head.weight", embed)
    # Random hidden states of scale s give base logits of deviation s * |row of the output|.
    scale = base_noise / np.sqrt((output**2).sum(-1).mean())
    features = len(target_layer_ids) * width
    tensors = {
        "fc.weight": _random(rng, width, features, 1.0),
        "hidden_norm.weight": _around_one(rng, width),
        "norm.weight": scale * _around_one(rng, width),
    }
    if own_embeddings:
        tensors |= {"embed_tokens.weight": embed, "lm_head.weight": output}
    for i in range(layers):
        layer = _layer(
            rng, width, c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"],
            c["intermediate_size"], 0.6,
        )  # fmt: skip
        tensors |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    w1 = np.zeros((vocab, 0), FLOAT)
    if rank:
        config["markov_head_type"] = head
        w1, markov = _markov_head(rng, head, target.transition, rank, width, float(scale))
        tensors |= {f"markov_head.{name}": value for name, value in markov.items()}
    if confidence:
        conf_markov = conf_markov and rank > 0
        config["confidence_head_with_markov"] = conf_markov
        known = w1 if conf_markov else w1[:, :0]
        weight, bias = _confidence_head(rng, target.transition, known, width, float(scale))
        tensors |= {"confidence_head.proj.weight": weight, "confidence_head.proj.bias": bias}
    path = _write_directory(dir, config, tensors, shard=shard)
    return TinyModel(path, config, tensors, target.transition)


def _successors(normed: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[V, V] probabilities of the next token (column) after each token (row).

    First choices form one cycle over the text tokens, which takes its longest way from the line
    break (where an answer starts) to the end token; second and third choices are random text.
    How likely the first choice is can be read off one direction of the embedding.
    """
    vocab = len(normed)
    texts = [[FIRST_BYTE + b] for b in range(32, 127)]
    texts += [[token] for token in range(FIRST_BYTE + 256, min(vocab, _used_vocab()))]
    starts = np.array([chunk[0] for chunk in texts])
    multibyte = [[FIRST_BYTE + b for b in char.encode()] for char in MULTIBYTE]
    texts += multibyte
    text = [token for i in rng.permutation(len(texts)) for token in texts[i]]
    cycle = [FIRST_BYTE + ord("\n"), *text, EOS_ID]
    first = rng.choice(starts, vocab)
    first[cycle] = np.roll(cycle, -1)
    table = np.full((vocab, vocab), 0.02 / vocab)
    direction = rng.standard_normal(normed.shape[1])
    sure = 0.4 + 0.55 / (1 + np.exp(-2 * normed @ direction / np.linalg.norm(direction)))
    for chunk in multibyte:
        sure[chunk[:-1]] = 0.97
    rows = np.arange(vocab)
    np.add.at(table, (rows, first), sure)
    np.add.at(table, (rows, rng.choice(starts, vocab)), 0.7 * (0.98 - sure))
    np.add.at(table, (rows, rng.choice(starts, vocab)), 0.3 * (0.98 - sure))
    return table


def _fit_output(normed: np.ndarray, table: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Output matrix [V, d] with softmax(normed @ W.T) close to `table`: softmax regression."""
    weight = np.zeros((len(table), normed.shape[1]), FLOAT)
    momentum, square = np.zeros_like(weight), np.zeros_like(weight)
    table = table.astype(FLOAT)
    for step in range(1, 151):
        # Noise stands for what the layers add, so that the fit keeps a margin against it.
        x = normed + 0.2 * rng.standard_normal(normed.shape, dtype=FLOAT)
        gradient = (_softmax(x @ weight.T) - table).T @ x
        momentum = 0.9 * momentum + 0.1 * gradient
        square = 0.98 * square + 0.02 * gradient**2
        mean = momentum / (1 - 0.9**step)
        weight -= 0.05 * mean / (np.sqrt(square / (1 - 0.98**step)) + 1e-6)
    return weight


def _layer(
    rng: np.random.Generator,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    noise: float,
) -> dict[str, np.ndarray]:
    """Random weights of one layer. Its attention adds about `noise` to the residual stream, its MLP
    a quarter of that: what the MLP does depends on the token alone, which no context changes."""
    return {
        "input_layernorm.weight": _around_one(rng, width),
        "post_attention_layernorm.weight": _around_one(rng, width),
        "self_attn.q_proj.weight": _random(rng, heads * head_dim, width, 1.4),
        "self_attn.k_proj.weight": _random(rng, kv_heads * head_dim, width, 1.4),
        "self_attn.v_proj.weight": _random(rng, kv_heads * head_dim, width, 1.0),
        # Attention averages values, which shrinks them to about half.
        "self_attn.o_proj.weight": _random(rng, width, heads * head_dim, 2 * noise),
        "self_attn.q_norm.weight": 1.4 * _around_one(rng, head_dim),
        "self_attn.k_norm.weight": 1.4 * _around_one(rng, head_dim),
        "mlp.gate_proj.weight": _random(rng, ffn, width, 1.0),
        "mlp.up_proj.weight": _random(rng, ffn, width, 1.0),
        "mlp.down_proj.weight": _random(rng, width, ffn, noise / 2),
    }


def _markov_head(
    rng: np.random.Generator,
    head: str,
    transition: np.ndarray,
    rank: int,
    width: int,
    hidden_scale: float,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(W1 [V, r], the head's tensors): W2 W1[u] is the best rank-r fit of the transition logits."""
    left, values, right = np.linalg.svd(transition, full_matrices=False)
    unit = np.sqrt(len(transition)) * left[:, :rank]  # columns of deviation 1
    table = (right[:rank].T * values[:rank]) / np.sqrt(len(transition))
    h = 1.0 / hidden_scale  # brings hidden states to deviation 1
    if head == "vanilla":
        w1, w2, more = unit, table, {}
    elif head == "gated":
        # Gates sit around sigmoid(2): mostly open, moved by the hidden state and the parent.
        gate = np.hstack([_random(rng, rank, width, 0.5) * h, _random(rng, rank, rank, 0.5)])
        w1, w2 = unit, table / _sigmoid(2.0)
        more = {"gate_proj.weight": gate, "gate_proj.bias": np.full(rank, 2.0)}
    elif head == "rnn":
        # tanh of a small input is nearly the identity; the state and h_d shift that input a bit.
        small = 0.25
        joint = np.hstack(
            [
                _random(rng, 3 * rank, rank, 0.5),
                _random(rng, 3 * rank, rank, 0.5),
                _random(rng, 3 * rank, width, 0.5) * h,
            ]
        )
        joint[2 * rank :] *= 0.04
        joint[2 * rank :, rank : 2 * rank] += small * np.eye(rank)
        bias = 0.1 * rng.standard_normal(3 * rank)
        bias[2 * rank :] = 0
        w1, w2 = unit, table / small
        more = {"joint_proj.weight": joint, "joint_proj.bias": bias}
    else:
        raise ValueError(f"no Markov head {head!r}")
    tensors = {"markov_w1.weight": w1, "markov_w2.weight": w2, **more}
    return w1, {name: np.ascontiguousarray(value, FLOAT) for name, value in tensors.items()}


def _confidence_head(
    rng: np.random.Generator,
    transition: np.ndarray,
    w1: np.ndarray,
    width: int,
    hidden_scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """(weight [1, d + r], bias [1]): ridge fit of how sure a parent's first successor is."""
    top = np.clip(_softmax(transition).max(-1), 0.05, 0.97)
    logit = np.log(top / (1 - top))
    bias = logit.mean()
    ridge = w1.T @ w1 + len(w1) * 0.1 * np.eye(w1.shape[1])
    from_parent = np.linalg.solve(ridge, w1.T @ (logit - bias))
    from_hidden = _random(rng, 1, width, 0.4)[0] / hidden_scale
    weight = np.concatenate([from_hidden, from_parent])[None]
    return weight.astype(FLOAT), np.array([bias], FLOAT)


def _random(rng: np.random.Generator, rows: int, columns: int, gain: float) -> np.ndarray:
    """[rows, columns] that turns inputs of deviation 1 into outputs of deviation `gain`."""
    return (gain / np.sqrt(columns) * rng.standard_normal((rows, columns))).astype(FLOAT)


def _around_one(rng: np.random.Generator, size: int) -> np.ndarray:
    return (1 + 0.1 * rng.standard_normal(size)).astype(FLOAT)


def _softmax(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def _sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def _write_directory(
    dir: str | Path, config: dict[str, Any], tensors: dict[str, np.ndarray], shard: bool = False
) -> Path:
    path = Path(dir)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    ready = {name: np.ascontiguousarray(value, FLOAT) for name, value in sorted(tensors.items())}
    if not shard:
        save_file(ready, str(path / "model.safetensors"), metadata={"format": "pt"})
        return path
    names = list(ready)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({name: ready[name] for name in part}, str(path / file), {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(value.nbytes for value in ready.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return path


def byte_letters() -> list[str]:
    """The printable letter byte-level BPE writes for each of the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, spare = [], 256
    for b in range(256):
        letters.append(chr(b) if b in plain else chr(spare))
        spare += b not in plain
    return letters


def _used_vocab() -> int:
    return FIRST_BYTE + 256 + len(MERGES)


def write_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """The byte-level BPE of every tiny model: 4 specials, 256 bytes, merges, unused padding."""
    merges = list(MERGES[: max(0, vocab - FIRST_BYTE - 256)])
    tokens = [*SPECIALS, *byte_letters(), *(merge.replace(" ", "") for merge in merges)]
    if vocab < len(tokens):
        raise ValueError(f"a tiny vocabulary needs at least {FIRST_BYTE + 256} tokens")
    kinds = [gguf.TokenType.CONTROL] * FIRST_BYTE
    kinds += [gguf.TokenType.NORMAL] * (len(tokens) - FIRST_BYTE)
    kinds += [gguf.TokenType.UNUSED] * (vocab - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(len(tokens), vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges or ["t h"])
    writer.add_eos_token_id(EOS_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _write_gguf(
    path: Path, arch: str, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name(f"tiny-{arch}")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    write_tokenizer(writer, config["vocab_size"])
    for name, value in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            value = _interleave(value, heads)
        elif arch == "llama" and ".k_proj." in name:
            value = _interleave(value, kv_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(value, FLOAT))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's llama rotates neighbours where Hugging Face rotates halves: reorder the rows."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """Hugging Face tensor name of a target -> its GGUF name."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, index, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    short = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }[part]
    return f"blk.{index}.{short}.{kind}"
