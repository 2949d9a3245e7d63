"""Measuring: interleaved runs of several settings on the same prompts, and reports of them.

`settings` says what runs, `prompts` on what, `run` does it, `stats` makes numbers of it; `report`,
`html` and `suite` print them; `peer` runs llama.cpp's own programs.
"""
