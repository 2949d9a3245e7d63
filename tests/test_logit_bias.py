"""A logit bias: the text changes as the user says, and by no more for being drafted.

The distribution itself is tested in test_sampling.py, that of whole rounds in
test_exact_sampling.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conftest import CHAIN, PLAIN, TREE, first_difference, prompt_of

from localspec import Chat, transcript
from localspec.engine import DraftOptions, Engine
from localspec.errors import LocalspecError
from localspec.grammar import Grammar
from localspec.sampling import SamplingParams

DRAFTS = {"chain": CHAIN, "tree": TREE, "context": DraftOptions(tokens=15, width=3, context=True)}
EXACT = {"flash_attn": False, "kv_type": "f32"}


def common(tokens: list[int]) -> list[int]:
    """Tokens that stand in a text, most frequent first."""
    return sorted(set(tokens), key=lambda t: (-tokens.count(t), t))


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "acceptance": "match"}], ids=str)
def test_text_under_a_bias_is_the_plain_text(
    load: Callable[..., Engine], options: dict[str, object], draft: str
):
    engine = load("vanilla", **EXACT)
    changed = equal = accepted = 0
    for seed in range(4):
        prompt = prompt_of(seed)
        free = SamplingParams(seed=seed, **options)  # type: ignore[arg-type]
        before = engine.complete(prompt, free, max_tokens=32, draft=PLAIN).token_ids
        banned, *_, lifted = common(before)
        bias = {banned: -100.0, lifted: 3.5, 300: -2.0}
        params = SamplingParams(seed=seed, logit_bias=bias, **options)  # type: ignore[arg-type]
        plain = engine.complete(prompt, params, max_tokens=32, draft=PLAIN).token_ids
        found = engine.complete(prompt, params, max_tokens=32, draft=DRAFTS[draft])
        accepted += sum(r.accepted for r in found.rounds)
        assert banned not in plain and banned not in found.token_ids
        changed += first_difference(before, plain) is not None
        equal += plain == found.token_ids
    assert changed == 4 and accepted > 0
    assert equal >= 3  # rounding: passes of different sizes


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_drafts_do_not_bring_back_what_is_banned(load: Callable[..., Engine], acceptance: str):
    """The drafter knows nothing of the bias and goes on proposing it."""
    engine = load("vanilla")
    proposed: set[int] = set()
    engine.on_verified = lambda tree, path: proposed.update(tree.token.tolist())
    for seed in range(6):
        params = SamplingParams(temperature=1.0, seed=seed, acceptance=acceptance)
        text = engine.complete(prompt_of(seed), params, max_tokens=30, draft=TREE).token_ids
        banned = common(text)[:3]
        params = SamplingParams(
            temperature=1.0,
            seed=seed,
            acceptance=acceptance,
            logit_bias=dict.fromkeys(banned, -100),
        )
        proposed.clear()
        found = engine.complete(prompt_of(seed), params, max_tokens=30, draft=TREE)
        assert proposed & set(banned)
        assert not set(found.token_ids) & set(banned)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_token_only_and_its_end(load: Callable[..., Engine], temperature: float):
    engine = load("vanilla")
    token = engine.tokenize("z")[-1]
    params = SamplingParams(temperature=temperature, seed=1, logit_bias={token: 100})
    for draft in (PLAIN, CHAIN, TREE):
        found = engine.complete(prompt_of(1), params, max_tokens=9, draft=draft, logprobs=1)
        assert found.text == "z" * 9
        # Log probabilities are the target's own, as without the bias.
        assert all(t.logprob < -1 and t.top[0][0] != token for t in found.logprobs)
    params = SamplingParams(temperature=temperature, seed=1, logit_bias={engine.model.eos: 100})
    found = engine.complete(prompt_of(1), params, max_tokens=9, draft=CHAIN)
    assert found.text == "" and found.finish_reason == "stop"


def test_a_grammar_goes_before_a_bias(load: Callable[..., Engine]):
    engine = load("vanilla")
    y, n, z = (engine.tokenize(c)[-1] for c in "ynz")
    grammar = Grammar.from_gbnf('root ::= "yes" | "no"')
    for temperature in (0.0, 1.0):
        for token, text in ((y, "yes"), (n, "no")):
            params = SamplingParams(temperature=temperature, seed=0, logit_bias={token: 50, z: 100})
            for draft in (PLAIN, TREE):
                found = engine.complete(prompt_of(2), params, grammar=grammar, draft=draft)
                assert found.text == text


def test_tokens_that_there_are_not(load: Callable[..., Engine]):
    engine = load()
    last = engine.model.n_vocab - 1
    assert engine.complete(
        prompt_of(0), SamplingParams(logit_bias={last: -1}), max_tokens=2, draft=PLAIN
    ).token_ids
    with pytest.raises(LocalspecError, match="outside the vocabulary of 320"):
        engine.generate(prompt_of(0), SamplingParams(logit_bias={5: 1, last + 1: 1}))
    with pytest.raises(LocalspecError, match="outside the vocabulary"):
        next(Chat(engine, params=SamplingParams(logit_bias={10**12: 1})).send("x"))


def test_saved_conversations_keep_it(tmp_path):
    file = tmp_path / "chat.json"
    params = SamplingParams(temperature=0.5, logit_bias={3: -100, np.int32(12): 0.5})
    transcript.save(file, [{"role": "user", "content": "x"}], params)
    assert transcript.load(file).params == params
    good = file.read_text()
    file.write_text(good.replace('"3"', '"three"'))
    with pytest.raises(LocalspecError, match="'three' is no token id"):
        transcript.load(file)
    file.write_text(good.replace("-100.0", '"much"'))
    with pytest.raises(LocalspecError, match="token 3 needs a number"):
        transcript.load(file)
