"""Accepted length when the text copies its own context, with and without context branches.

    python benchmarks/copying.py [--target T.gguf] [--drafter D.gguf]

The prompt asks to repeat a text of about 300 tokens with one word changed. Small models stray from
the task, so the answer is measured where they do copy, too: its first sentence can be given.
"""

from __future__ import annotations

import argparse

from common import rendered
from localspec import pairs
from localspec.engine import DraftOptions, Engine

STORY = (
    "The lighthouse at Cape Farewell was built in 1862 by a crew of forty men who lived in tents "
    "on the windward side of the ridge. Every stone was carried up from the beach by mule, and the "
    "work took three summers and two winters. The first keeper, a quiet man called Anders Holm, "
    "arrived with his wife, two goats and a barrel of salted herring. He kept a journal in which "
    "he noted the weather, the ships that passed, and the number of birds that struck the lantern "
    "during the night. In the spring of 1871 a storm tore the roof from the store house and "
    "carried it into the sea. Anders wrote that the sound was like a hundred doors closing at "
    "once. The rebuilt house had thicker walls and a smaller window, and it stands to this day. "
    "Visitors may climb the tower on Sundays, and from the gallery they can see the whole of the "
    "bay, the islands beyond it, and on clear days the mountains of the far coast. The lamp is "
    "electric now and turns by itself, but the old lens is kept in a glass case by the stairs, "
    "together with a pair of boots, a brass telescope and the last page of the journal. On that "
    "page Anders thanked the sea for its patience, asked his children to feed the goats, and "
    "noted, as he had done on every evening for thirty years, that the light was burning. "
)
TASK = 'Repeat the following text exactly, but write "sheep" instead of "goats".\n\n'
SETTINGS = {
    "plain": DraftOptions(tokens=0),
    "tree 15": DraftOptions(tokens=15, width=4),
    "tree 15 with context": DraftOptions(tokens=15, width=4, context=True),
}


def main() -> None:
    """Print accepted length and speed of every setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=None)
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--given", type=int, default=0, help="words of the answer to start with")
    args = parser.parse_args()
    target, drafter = args.target, args.drafter
    if target is None:
        target, drafter = pairs.default_pair()
    with Engine.load(target, drafter, n_ctx=2048, n_threads=args.threads) as engine:
        print(f"the text has {len(engine.model.tokenize(STORY))} tokens")
        chat = engine.model.chat_template is not None
        prompt = rendered(engine, TASK + STORY) if chat else TASK + STORY + "\n\n"
        if args.given:
            prompt += " ".join(STORY.split(" ")[: args.given])
        for name, draft in SETTINGS.items():
            result = engine.complete(prompt, max_tokens=300, draft=draft)
            print(
                f"{name:22s} accepted length {result.tau:5.2f}, {result.tokens_per_second:6.1f} "
                f"tokens/s, {len(result.token_ids)} tokens: {result.text[:60]!r}",
                flush=True,
            )


if __name__ == "__main__":
    main()
