"""All of localspec that touches ctypes or llama_cpp: models, contexts, batches, the KV cache.

llama.cpp ends the process when an assertion fails, so every input that could reach one is
checked here first.
"""

from __future__ import annotations

from localspec.llama.backends import Device, build_report, devices, has_gpu
from localspec.llama.context import (
    KV_TYPES,
    MAX_N_CTX,
    MAX_SEQUENCES,
    MIN_N_CTX,
    Context,
    ContextOptions,
    valid_context,
)
from localspec.llama.grammar_sampler import GrammarSampler
from localspec.llama.library import NEEDED_VERSION, library
from localspec.llama.model import Model, ModelOptions, cut_long_runs
from localspec.llama.quantizing import FILE_TYPES, TENSOR_TYPES, quantize, quantize_rows
from localspec.llama.threads import MAX_THREADS, default_threads

__all__ = [
    "FILE_TYPES",
    "KV_TYPES",
    "MAX_N_CTX",
    "MAX_SEQUENCES",
    "MAX_THREADS",
    "MIN_N_CTX",
    "NEEDED_VERSION",
    "TENSOR_TYPES",
    "Context",
    "ContextOptions",
    "Device",
    "GrammarSampler",
    "Model",
    "ModelOptions",
    "build_report",
    "cut_long_runs",
    "default_threads",
    "devices",
    "has_gpu",
    "library",
    "quantize",
    "quantize_rows",
    "valid_context",
]
