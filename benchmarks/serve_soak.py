"""Does `localspec serve` survive many clients, and is every answer its own?

    python benchmarks/serve_soak.py -m target.gguf -d drafter.gguf [--requests 1000 --clients 8]

Greedy answers must be the text of `localspec generate`; they may part where the target's two best
tokens are as good as equal (with `--deterministic`: nowhere). Every token must be counted once, and
the server's memory must not grow after the first fifth of the requests. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

from localspec import DraftOptions, Engine
from localspec.chat import chat_template
from localspec.text import TextStream

PROMPTS = (
    "Hello!", "Why is the sky blue?", "Name three rivers.", "What is 12 times 12?",
    "Write a haiku about rain.", "Who was Ada Lovelace?", "Count from one to ten.",
    "What do bees make?", "Translate 'good morning' into French.", "Is the earth round?",
    "Tell me a joke.", "Write a loop in Python.",
)  # fmt: skip
# How far apart the two best logits of a quantised target may lie where rounding decides.
NOISE = 0.75
MAY_GROW = 0.02


def generated(args: argparse.Namespace, prompt: str) -> dict[str, Any]:
    """What `localspec generate --json` prints."""
    command = [sys.executable, "-m", "localspec", "generate", *model_options(args)]
    command += ["-p", prompt, "-n", str(args.tokens), "--json"]
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))


def model_options(args: argparse.Namespace) -> list[str]:
    options = ["--n-ctx", str(args.n_ctx), "--threads", str(args.threads)]
    for name, value in (("-m", args.model), ("-d", args.drafter), ("--policy", args.policy)):
        options += [name, value] if value else []
    return [*options, "--deterministic"] if args.deterministic else options


@contextmanager
def server(args: argparse.Namespace) -> Iterator[tuple[psutil.Process, str]]:
    """`localspec serve` and its base URL; ended as Ctrl-C would."""
    command = [sys.executable, "-m", "localspec", "serve", *model_options(args), "--port", "0"]
    command += ["--prefix-cache", args.prefix_cache]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise SystemExit("the server does not start")
            yield psutil.Process(process.pid), url
            process.send_signal(signal.SIGINT)
            if process.wait(60) != 0:
                raise SystemExit(f"the server ended with status {process.returncode}")
        finally:
            process.kill()


def ask(client: httpx.Client, body: dict[str, Any]) -> tuple[str, int]:
    """Text and number of tokens of an answer."""
    if not body["stream"]:
        response = client.post("chat/completions", json=body)
        response.raise_for_status()
        answer = response.json()
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]
    text, tokens = "", 0
    body = body | {"stream_options": {"include_usage": True}}
    with client.stream("POST", "chat/completions", json=body) as response:
        response.raise_for_status()
        lines = [line for line in response.iter_lines() if line]
    if lines[-1] != "data: [DONE]":
        raise SystemExit("a stream ended early")
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "))
        text += "".join(c["delta"].get("content") or "" for c in event["choices"])
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return text, tokens


def undecided(args: argparse.Namespace, prompt: str, right: dict[str, Any], text: str) -> bool:
    """Whether the target is undecided where an answer parts from the right one."""
    same = next((i for i, (a, b) in enumerate(zip(right["text"], text, strict=False)) if a != b),
                min(len(right["text"]), len(text)))  # fmt: skip
    with Engine.load(args.model or default_target(), n_ctx=args.n_ctx, n_threads=1) as engine:
        stream, shown, at = TextStream(engine.model.piece, ()), "", -1
        for token in right["token_ids"]:
            shown, at = shown + stream.feed(token), at + 1
            if len(shown) > same:
                break
        rendered = chat_template(engine).render([{"role": "user", "content": prompt}])
        ids = [*engine.tokenize(rendered), *right["token_ids"][:at]]
        engine.complete(ids, max_tokens=1, draft=DraftOptions(tokens=0))
        second, best = sorted(engine.last_logits)[-2:]
    print(f"parted after {right['text'][:same]!r}: gap {best - second:.3f}", flush=True)
    return bool(best - second < NOISE)


def default_target() -> str:
    from localspec import pairs

    return str(pairs.default_pair()[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", help="target (the default pair otherwise)")
    parser.add_argument("-d", "--drafter")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--n-ctx", type=int, default=512)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--policy", choices=("auto", "fixed"))
    parser.add_argument("--prefix-cache", default="16M", help="must be full after the first fifth")
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    prompts = PROMPTS[: args.prompts]
    right = {prompt: generated(args, prompt) for prompt in prompts}
    print(f"{len({r['text'] for r in right.values()})} different answers by localspec generate")
    with server(args) as (process, url):
        soak(args, prompts, right, process, url)


def soak(
    args: argparse.Namespace,
    prompts: tuple[str, ...],
    right: dict[str, dict[str, Any]],
    process: psutil.Process,
    url: str,
) -> None:
    lock = threading.Lock()
    parted: list[tuple[str, str]] = []
    memory: list[float] = []
    done = tokens = compared = 0
    began = time.perf_counter()

    def one_client(who: int) -> None:
        nonlocal done, tokens, compared
        rng = random.Random(who)
        with httpx.Client(base_url=url, timeout=600) as client:
            for i in range(who, args.requests, args.clients):
                prompt = rng.choice(prompts)
                greedy = i % 5 != 0
                body = {
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": args.tokens,
                    "temperature": 0 if greedy else 1,
                    "seed": i,
                    "stream": rng.random() < 0.5,
                    "user": f"client {who}",
                }
                text, n = ask(client, body)
                with lock:
                    done, tokens, compared = done + 1, tokens + n, compared + greedy
                    if greedy and text != right[prompt]["text"]:
                        parted.append((prompt, text))
                    elif greedy and n != len(right[prompt]["token_ids"]):
                        raise SystemExit(f"{n} tokens counted for {right[prompt]}")
                    if done % max(1, args.requests // 10) == 0:
                        memory.append(process.memory_info().rss / 2**20)
                        print(f"{done}: {memory[-1]:.1f} MiB, {process.num_threads()} threads, "
                              f"{process.num_fds()} descriptors", flush=True)  # fmt: skip

    with ThreadPoolExecutor(args.clients) as pool:
        for each in [pool.submit(one_client, who) for who in range(args.clients)]:
            each.result()
    seconds = time.perf_counter() - began
    metrics = httpx.get(url.removesuffix("v1") + "metrics").text
    counted = {k: float(v) for k, v in re.findall(r"^localspec_(\w+) (\S+)$", metrics, re.M)}
    answered = re.findall(
        r'requests_total{route="/v1/chat/completions",status="(\d+)"} (\d+)', metrics
    )
    grown = memory[-1] / memory[1] - 1
    print(f"{done} requests by {args.clients} clients in {seconds:.0f} s: status {answered}; "
          f"{compared} greedy answers, {len(parted)} part from localspec generate; "
          f"{tokens} tokens, {counted['generated_tokens_total']:.0f} counted by the server; "
          f"{counted['prompt_tokens_processed_total']:.0f} of {counted['prompt_tokens_total']:.0f} "
          f"prompt tokens evaluated; {counted['accepted_tokens_total']:.0f} of "
          f"{counted['drafted_tokens_total']:.0f} drafted tokens accepted; memory {memory[1]:.1f} "
          f"-> {memory[-1]:.1f} MiB ({100 * grown:+.2f}%)", flush=True)  # fmt: skip
    problems = []
    if answered != [("200", str(args.requests))]:
        problems.append("not every request was answered with 200")
    if counted["generated_tokens_total"] != tokens:
        problems.append("tokens were lost or counted twice")
    if grown > MAY_GROW:
        problems.append(f"memory grew by more than {MAY_GROW:.0%}")
    for prompt, text in sorted(set(parted)):
        if args.deterministic or not undecided(args, prompt, right[prompt], text):
            problems.append(f"another answer than by localspec generate to {prompt!r}: {text!r}")
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
