"""Converting a checkpoint of the size of a real release: memory, speed, and what is written.

    python benchmarks/convert_big.py [--folder /tmp/big] [--outtype q8_0]

Writes a random checkpoint with the shapes of the 4B release (about 2.4 GB in bfloat16, with its
copies of embeddings and output) and the header of a matching target, converts it in a process of
its own, and compares with a plain copy of as many bytes as were read and written.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np

LAYERS, WIDTH, VOCAB, RANK = 5, 2560, 151_936, 256
HEADS, KV_HEADS, HEAD, FFN = 32, 8, 128, 9728
TARGET_LAYERS, TAPS = 36, (1, 9, 17, 25, 33)
BLOCK = 8 << 20


def shapes() -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of the release."""
    tensors: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, WIDTH),
        "lm_head.weight": (VOCAB, WIDTH),
        "fc.weight": (WIDTH, len(TAPS) * WIDTH),
        "hidden_norm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
        "markov_head.markov_w1.weight": (VOCAB, RANK),
        "markov_head.markov_w2.weight": (VOCAB, RANK),
        "confidence_head.proj.weight": (1, WIDTH + RANK),
        "confidence_head.proj.bias": (1,),
    }
    layer = {
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
        "self_attn.q_proj": (HEADS * HEAD, WIDTH),
        "self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
        "self_attn.v_proj": (KV_HEADS * HEAD, WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * HEAD),
        "self_attn.q_norm": (HEAD,),
        "self_attn.k_norm": (HEAD,),
        "mlp.gate_proj": (FFN, WIDTH),
        "mlp.up_proj": (FFN, WIDTH),
        "mlp.down_proj": (WIDTH, FFN),
    }
    for i in range(LAYERS):
        tensors |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return tensors


def write_checkpoint(folder: Path) -> int:
    """Random bfloat16 weights; returns the size of the file in bytes."""
    config = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "vocab_size": VOCAB,
        "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "block_size": 7,
        "mask_token_id": 151_669, "target_layer_ids": list(TAPS), "markov_rank": RANK,
        "num_target_layers": TARGET_LAYERS, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, shape in shapes().items():
        size = 2 * int(np.prod(shape))
        header[name] = {
            "dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]
        }  # fmt: skip
        offset += size
    text = json.dumps(header).encode()
    noise = np.random.default_rng(0).standard_normal(BLOCK // 2, dtype=np.float32) * 0.02
    data = (noise.view(np.uint32) >> 16).astype("<u2").tobytes()
    with open(folder / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for at in range(0, offset, BLOCK):
            f.write(data[: min(BLOCK, offset - at)])
    return offset


def write_target(path: Path) -> None:
    """The metadata of a 4B target, and one small tensor."""
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_block_count(TARGET_LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def drop_cache(f: BinaryIO) -> None:
    """Have the next read of a file come from the disk, where the system lets us."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_speed(source: Path, to: Path, nbytes: int) -> float:
    """Bytes read plus written per second by a plain copy that ends on the disk."""
    with open(source, "rb") as f:
        drop_cache(f)
    start, left = time.perf_counter(), nbytes
    with open(source, "rb") as f, open(to, "wb") as g:
        while left > 0 and (data := f.read(min(BLOCK, left))):
            g.write(data)
            left -= len(data)
        g.flush()
        os.fsync(g.fileno())
    seconds = time.perf_counter() - start
    to.unlink()
    return 2 * (nbytes - left) / seconds


def child(folder: Path, outtype: str) -> None:
    """Convert and print seconds, peak RSS and sizes as JSON."""
    from localspec.convert import convert

    with open(folder / "checkpoint/model.safetensors", "rb") as f:
        drop_cache(f)
    start = time.perf_counter()
    result = convert(
        folder / "checkpoint", folder / "target.gguf", folder / "out.gguf", outtype=outtype
    )
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    print(json.dumps({"seconds": seconds, "peak": peak, "size": result.nbytes}))


def main() -> None:
    """Run the comparison and print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where about 4 GB are free")
    parser.add_argument("--outtype", default="q8_0")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.folder, options.outtype)
        return
    folder = Path(tempfile.mkdtemp(prefix="localspec-big-", dir=options.folder))
    try:
        read = write_checkpoint(folder / "checkpoint")
        write_target(folder / "target.gguf")
        command = [sys.executable, __file__, "--child", "--folder", str(folder)]
        done = subprocess.run(
            [*command, "--outtype", options.outtype], check=True, capture_output=True, text=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
        weights = folder / "checkpoint/model.safetensors"
        copy = copy_speed(weights, folder / "copy", read)
        from localspec.ggufio import GgufFile

        with GgufFile(folder / "out.gguf") as out:
            copies = sorted({"token_embd.weight", "output.weight"} & set(out.tensors))
        speed = (read + found["size"]) / found["seconds"]
        print(f"checkpoint        {read / 1e9:.2f} GB")
        print(f"{options.outtype:<18}{found['size'] / 1e9:.3f} GB")
        print(f"peak memory       {found['peak'] / 1e9:.2f} GB")
        print(f"time              {found['seconds']:.1f} s")
        print(f"read + written    {speed / 1e6:.0f} MB/s")
        print(f"plain copy        {copy / 1e6:.0f} MB/s")
        print(f"share             {speed / copy:.0%}")
        print(f"target's matrices {', '.join(copies) or 'none'}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
