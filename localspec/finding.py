"""From what people write to files: a path, a name of the registry, or a model on the hub."""

from __future__ import annotations

import contextlib
import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from localspec import converted, default_pair, gguf_choice, hub
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.mtp import MTP, read_mtp
from localspec.pairs import check_pair, check_target
from localspec.registry import RESERVED, KnownPair, known_pairs

Name = str | Path | None


class Files(NamedTuple):
    """A target, and what drafts for it: a file, "mtp" (the target's own layers) or nothing."""

    target: Path
    drafter: Path | str | None

    def check(self) -> None:
        """Refuse what is no target, or a pair that does not fit, from the headers.

        Raises:
            LocalspecError: with the reason.
        """
        with GgufFile(self.target) as header:
            check_target(header)
            if self.drafter == MTP:
                read_mtp(header)
            elif self.drafter is not None:
                with GgufFile(self.drafter) as other:
                    check_pair(header, other)


@dataclass(frozen=True)
class Finder:
    """Finds files, and downloads what is not there.

    Attributes:
        say: told, in a line, what takes a while.
        show: opened around conversions, which tell it how far they are.
        update: ask the hub for newer files; otherwise it is asked for missing ones only.
        verify: compare conversions with the torch reference.
    """

    say: hub.Say = lambda line: None
    show: converted.ShowProgress = lambda: contextlib.nullcontext(None)
    update: bool = False
    verify: bool = False

    def files(self, target: Name = None, drafter: Name = None) -> Files:
        """The files that are meant.

        Args:
            target: a path; a name of the registry, perhaps with a quantisation
                ("qwen3-4b:Q8_0"); or a model on the hub (owner/name, owner/name:Q4_K_M,
                owner/name/file.gguf). None: the pair that comes with the package.
            drafter: a path, a model on the hub (a checkpoint is converted), "mtp", "none", or,
                where the target has a name, a family ("dspark"). None: a named target's first
                drafter; for others none.

        Raises:
            LocalspecError: nothing has that name, or it cannot be downloaded or does not fit.
        """
        path, pair = self._packaged() if target is None else self._target(target)
        return Files(path, self._drafter(drafter, path, pair))

    def target(self, target: str | Path) -> Path:
        """The target alone; see `files`."""
        return self._target(target)[0]

    def _packaged(self) -> tuple[Path, KnownPair | None]:
        pair = next(p for p in known_pairs().values() if p.target is None)
        return self._known_target(pair, None), pair

    def _target(self, text: str | Path) -> tuple[Path, KnownPair | None]:
        if isinstance(text, Path) or os.path.isfile(text):
            return Path(text), None
        name, colon, tag = text.partition(":")
        pair = known_pairs().get(name.lower())
        if pair is not None:
            return self._known_target(pair, tag if colon else None), pair
        if os.path.exists(text):
            return Path(text), None
        model = gguf_choice.parse(text)
        if model is not None:
            return self._hub_file(model), None
        if _is_a_word(text):
            near = difflib.get_close_matches(name.lower(), known_pairs(), 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise LocalspecError(
                f"no file and no known model is named {text!r}; {meant}`localspec models` lists "
                "the names; others are owner/name on the hub, or a GGUF file"
            )
        return Path(text), None

    def _known_target(self, pair: KnownPair, tag: str | None) -> Path:
        path = self._known_file(pair, tag)
        with GgufFile(path) as header:
            pair.check(header)
        return path

    def _known_file(self, pair: KnownPair, tag: str | None) -> Path:
        known = pair.target
        if known is None:
            if tag is not None:
                raise LocalspecError(
                    f"{pair.name} comes in one quantisation only; leave :{tag} out"
                )
            return default_pair.default_target()
        if tag is not None and not gguf_choice.has_tag(known.file, tag):
            return self._hub_file(gguf_choice.HubModel(known.repo, tag=tag))
        here = hub.cached(known.repo, known.file, known.revision)
        if here is not None:
            return here
        self.say(f"downloading {known.repo} {known.file} ({hub.size_in_words(known.size)})")
        return hub.fetch(
            known.repo, known.file, known.revision,
            revision=known.revision, sha256=known.sha256, say=self.say,
        )  # fmt: skip

    def _hub_file(self, model: gguf_choice.HubModel) -> Path:
        """A GGUF on the hub, its other parts too; of the cache where that is certain enough."""
        here = self._cached(model)
        usual = gguf_choice.PREFERRED[0]
        certain = model.file or model.tag or (here and gguf_choice.has_tag(here.name, usual))
        if here is not None and certain and not self.update:
            return here
        try:
            found = hub.listing(model.repo, model.revision)
        except hub.UnreachableError as e:
            if here is None:
                raise
            self.say(f"{e}; using what is here")
            return here
        try:
            return self._download(model, found)
        except hub.UnreachableError as e:
            if here is None or self.update:
                raise
            self.say(f"{e}; using what is here")
            return here

    def _download(self, model: gguf_choice.HubModel, found: hub.Listing) -> Path:
        """What is missing of a model at the commit that the hub lists; its first file."""
        parts = _names(model, list(found.sizes))
        paths = {}
        # Heads first: where a drafter's file is, they are too.
        for name in [*gguf_choice.heads_of(parts[0], found.sizes), *parts]:
            if hub.cached(model.repo, name, found.commit) is None:
                size = found.sizes.get(name)
                words = f" ({hub.size_in_words(size)})" if size else ""
                self.say(f"downloading {model.repo} {name}{words}")
            paths[name] = hub.fetch(
                model.repo, name, found.commit,
                revision=model.revision, say=self.say, whole=False,
            )  # fmt: skip
        hub.remember(model.repo, model.revision, found.commit)
        return paths[parts[0]]

    def _cached(self, model: gguf_choice.HubModel) -> Path | None:
        """It in the newest snapshot that has all its parts."""
        for files in hub.snapshots(model.repo, model.revision):
            with contextlib.suppress(LocalspecError):
                return files[_names(model, list(files))[0]]
        return None

    def _drafter(self, text: Name, target: Path, pair: KnownPair | None) -> Path | str | None:
        if text is None:
            if pair is None:
                return None
            if pair.target is None:
                return default_pair.default_pair()[1]
            text = pair.drafters[0].family
        if str(text) in RESERVED:
            return None if str(text) == "none" else str(text)
        if isinstance(text, Path) or os.path.isfile(text):
            return Path(text)
        known = pair.drafter(text) if pair is not None else None
        if known is None and os.path.exists(text):
            return Path(text)
        model = gguf_choice.parse(text)
        if known is None and model is None:
            if _is_a_word(text):
                raise LocalspecError(_no_such_drafter(text, pair))
            return Path(text)
        if model is not None and (model.file or model.tag):
            return self._hub_file(model)
        repo = known.repo if known is not None else model.repo if model is not None else ""
        return converted.drafter(
            repo, target, update=self.update, verify=self.verify, say=self.say, show=self.show
        )


def fetch(target: Name = None, drafter: Name = None) -> Files:
    """The files of a model and its drafter, downloaded and converted where they are not here yet.

    target, drafter = localspec.fetch("qwen3-4b")

    Arguments and errors are those of `Finder.files`.
    """
    return Finder().files(target, drafter)


def _names(model: gguf_choice.HubModel, files: list[str]) -> list[str]:
    """The files in a listing that a model consists of."""
    if model.file is None:
        return gguf_choice.choose(files, model.repo, model.tag)
    if model.file not in files:
        near = difflib.get_close_matches(model.file, files, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise LocalspecError(f"{model.repo} holds no file {model.file!r}{meant}")
    return gguf_choice.parts_of(model.file, files)


def _is_a_word(text: str) -> bool:
    """Whether this was never meant to be a path."""
    return bool(text) and not text.lower().endswith(".gguf") and not set("/\\~") & set(text)


def _no_such_drafter(text: str, pair: KnownPair | None) -> str:
    if pair is None:
        return (
            f"no file is named {text!r}; -d takes a GGUF file, owner/name on the hub, mtp or none "
            "(families such as dspark go with the names of `localspec models` only)"
        )
    families = ", ".join(d.family for d in pair.drafters) or "its own only"
    return f"{pair.name} has no drafter {text!r}; it has {families}, or mtp, none, or a file"
