"""Models on the Hugging Face hub: found in the hub's cache, else downloaded into it.

The cache is the one that huggingface_hub and other tools use: `models--OWNER--NAME/` has `refs/REVISION`, a commit, and
`snapshots/COMMIT/`, the files. If all files that are needed are there, the hub is not asked. Else it lists the files of
the commit, and those that are needed are downloaded: config, tokenizer and safetensors, or one GGUF file; never code or
pickle. A file whose name leaves its folder is not seen, and a link that leaves the cache is not followed.
"""

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Self

from lce.errors import CapacityError, LceError, ModelError, nearest, shown
from lce.files import named, unwritable, write_whole
from lce.progress import is_silent, notice
from lce.sizes import size_text
from lce.system import existing
from lce.tokenizer.tokenizer import LARGEST_FILE
from lce.weights.folder import BESIDE, CONFIG, INDEX, OTHER_PURPOSE, VOCABULARIES, weight_map_of, weights_in
from lce.weights.gguf_file import SHARD
from lce.weights.safetensors_file import few

_SMALL = (CONFIG, *BESIDE, INDEX)
_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}\w)?"  # the owner or the name
_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>\w[\w./-]{{0,200}}))?(?::(?P<file>[^:]+))?", re.ASCII)
_NAME = re.compile(r"(?:\w[\w.+ ()-]*/)*\w[\w.+ ()-]*", re.ASCII)  # a file's: no part of it begins with a dot
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 10.0  # seconds to wait for the hub's list of files
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class HubId:
    """A model on the hub: `OWNER/NAME@REVISION:FILE`. `file` is a GGUF file, or a part of its name such as `Q4_K_M`."""

    repo: str
    revision: str = "main"
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the id that a text is, None for a text that is no id."""
        match = _ID.fullmatch(text)
        if match is None or ".." in text or "--" in match["repo"]:
            return None
        return cls(match["repo"], match["revision"] or "main", match["file"])

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repo}{revision}{f':{self.file}' if self.file else ''}"

    @property
    def command(self) -> str:
        """The command that downloads the model."""
        file = f" --include '*{self.file}*'" if self.file else ""
        return f"hf download {self.repo}{file}" + ("" if self.revision == "main" else f" --revision {self.revision}")


def fetched(
    model: HubId, revision: str, small_only: bool, *, weights: bool = False, ask: bool = True
) -> "tuple[Snapshot, Path]":
    """Find a model in the cache, else download it. Return its snapshot, and its folder or its GGUF file.

    A folder gets a config and a tokenizer; with `weights`, also weights. Without `ask`, nothing is downloaded. If the
    hub cannot be reached, files of the tokenizer may be absent.
    """
    found, cache = None, f"the hub's cache, {cache_folder()}"
    absent = f"{model} is no file or folder{_hint(model.repo)}, and is not in {cache}"
    if (cached := Snapshot.cached(model, revision, small_only)) is not None:
        try:
            found = cached, cached.path(weights=weights)
        except ModelError as error:
            if not (weights or isinstance(error, Absent)):
                raise
            absent = f"{model} is in {cache}, without its weights" if weights else str(error)
    if found and (weights or not ask or found[0].has_tokenizer or found[1].is_file()):
        return found
    if not ask:
        raise Absent(f"{absent}; download it by `{model.command}`")
    try:
        try:
            asked = cached.commit if cached and CONFIG in cached.names else revision
            remote = Snapshot.listed(model, asked, small_only)
        except NoRevision:  # the commit that the cache has is no longer on the hub
            remote = Snapshot.listed(model, revision, small_only)
        path = remote.path(weights=weights)
    except Unreachable as error:
        if not found:
            raise Unreachable(f"{absent}, and {error}") from error
        notice(f"files of the tokenizer of {model} may be missing, and {error}")
        return found
    if revision != remote.commit:
        with suppress(OSError, LceError):  # the cache notes which commit a branch or tag is
            (ref := _repository(model.repo) / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
            write_whole(ref, remote.commit.encode())
    return remote, path


class Absent(ModelError):
    """The error for files that the cache or the repository does not have."""


class NoRevision(ModelError):
    """The error for a revision that a repository does not have."""


class Unreachable(ModelError):
    """The error for a hub that cannot be asked."""


@dataclass(frozen=True)
class Snapshot:
    """The files `names` of a commit. They are in the cache; or on the hub if there are `sizes`, until `fetch`."""

    id: HubId
    commit: str
    names: frozenset[str] = field(repr=False)
    small_only: bool  # whether `fetch` downloads no weights
    sizes: Mapping[str, int] | None = field(default=None, repr=False)

    @classmethod
    def cached(cls, model: HubId, revision: str, small_only: bool) -> "Snapshot | None":
        """Return what the cache has of a revision, None if it has nothing."""
        commit = revision
        with suppress(OSError, ValueError):
            commit = (_repository(model.repo) / "refs" / revision).read_text("ascii").strip()
        folder = _repository(model.repo) / "snapshots" / commit
        if not _COMMIT.fullmatch(commit) or not folder.is_dir():
            return None
        found = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        return cls(model, commit, frozenset(filter(_NAME.fullmatch, found)), small_only)

    @classmethod
    def listed(cls, model: HubId, revision: str, small_only: bool) -> "Snapshot":
        """Ask the hub for the files of a revision."""
        with _asking(model, revision):
            from huggingface_hub import HfApi, constants

            api = HfApi(endpoint=constants.ENDPOINT)
            info = api.model_info(model.repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if _NAME.fullmatch(file.rfilename)}
            if not _COMMIT.fullmatch(str(info.sha)):
                raise ModelError(f"{constants.ENDPOINT} names no commit of {model}; check HF_ENDPOINT")
        return cls(model, str(info.sha), frozenset(sizes), small_only, sizes)

    @property
    def folder(self) -> Path:
        return _repository(self.id.repo) / "snapshots" / self.commit

    def fetch(self, names: Sequence[str]) -> Path:
        """Return the folder once it has the files `names`. Raises ModelError for a file that is missing."""
        if missing := [name for name in names if name not in self.names]:
            if self.sizes is not None:
                raise Absent(f"{self.id} lacks {few(missing)} on the hub; use another checkpoint")
            raise Absent(f"{self.id} is in the hub's cache, {cache_folder()}, without {few(missing)}")
        if self.sizes is not None:
            self._download({name: self.sizes[name] for name in names if not (self.folder / name).is_file()})
        roots = [os.path.realpath(root) for root in (cache_folder(), _repository(self.id.repo))]
        for name in names:
            real = os.path.realpath(self.folder / name)
            if not any(real.startswith(f"{root}/") for root in roots):
                link = f"{named(self.folder / name)} is a link to {named(real)}, outside the hub's cache"
                raise ModelError(f"{link}; remove the link, and download the model again")
        return self.folder

    def _download(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            if size > LARGEST_FILE and (name in _SMALL or self.small_only):
                has = f"{self.id}: {name} has {size_text(size)}"
                if name in _SMALL:
                    raise ModelError(f"{has}, which no such file has; use a checkpoint from a source you trust")
                command = HubId(self.id.repo, self.id.revision, name).command
                raise ModelError(f"{has}, and only commands that load a model download so much; run `{command}` first")
        with _asking(self.id, self.commit):
            from huggingface_hub import constants, hf_hub_download

            folder, needed = existing(cache_folder()), sum(sizes.values())
            if needed > (free := shutil.disk_usage(folder).free):
                has = f"the download takes {size_text(needed)}, and {named(folder)} has {size_text(free)} free"
                raise CapacityError(f"{has}; free some space, or set HF_HOME to another place")
            for name, size in sizes.items():
                notice(f"downloading {name} of {self.id.repo}, {size_text(size)}")
                cache, hub = constants.HF_HUB_CACHE, constants.ENDPOINT
                hf_hub_download(self.id.repo, name, revision=self.commit, cache_dir=cache, endpoint=hub)

    @property
    def has_tokenizer(self) -> bool:
        alone = "tekken.json" in self.names
        return alone or ("tokenizer_config.json" in self.names and not self.names.isdisjoint(VOCABULARIES))

    def path(self, *, weights: bool) -> Path:
        """Return the model's folder or GGUF file once its config and tokenizer, or `weights` too, are in the cache."""
        ggufs = sorted(name for name in self.names if name.endswith(".gguf"))
        plain = sorted(name for name in self.names if "/" not in name)
        is_folder = any(name.endswith(".safetensors") or name == INDEX for name in plain)
        if self.id.file is not None or not (is_folder or (CONFIG in plain and not ggufs)):
            shards = self._shards(ggufs)
            return self.fetch(shards) / shards[0]
        beside = [name for name in BESIDE if name in plain]
        first = next((name for name in VOCABULARIES if name in beside), None)
        beside = [name for name in beside if name not in VOCABULARIES or name == first]
        folder = self.fetch([CONFIG, *beside])
        if weights and (name := weights_in(plain, str(self.id))):
            self.fetch([name])
            if name == INDEX:
                self.fetch(sorted(set(weight_map_of(folder / INDEX).values())))
        return folder

    def _shards(self, names: Sequence[str]) -> list[str]:
        """Return the shards of the GGUF file that the id names; without a name, of the only one."""
        files: dict[str, list[str]] = {}
        for name in [x for x in names if x == self.id.file or not OTHER_PURPOSE.search(x)] or names:
            files.setdefault(SHARD.sub("", name), []).append(name)
        asked = self.id.file
        if not files:
            raise Absent(f"{self.id} has no config.json with safetensors and no GGUF file; see {self.id.command}")
        word = re.compile(rf"(?<![a-z0-9_]){re.escape(asked or '')}(?![a-z0-9_])", re.IGNORECASE)
        whole = SHARD.sub("", asked or "")
        found = [whole] if whole in files else [name for name in files if asked is None or word.search(name)]
        if not found:
            raise Absent(f"{self.id.repo} has no GGUF file {shown(asked)}; {nearest(asked or '', files)}")
        if len(found) > 1:
            first = HubId(self.id.repo, self.id.revision, found[0])
            raise ModelError(f"{self.id.repo} has several GGUF files; name one, as in {first}: {', '.join(found)}")
        shards = sorted(files[found[0]])
        count = int(match[1]) if (match := SHARD.search(shards[0])) else 1
        return [SHARD.sub(f"-{i:05}-of-{count:05}", shards[0]) for i in range(1, min(count, 1000) + 1)]


def cache_folder() -> Path:
    """Return the folder of the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _repository(repo: str) -> Path:
    return cache_folder() / f"models--{repo.replace('/', '--')}"


@contextmanager
def _asking(model: HubId, revision: str) -> Iterator[None]:
    """Turn the errors of huggingface_hub into one line each, and hide its messages. Its bars follow `silenced`."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, hides_bars = logging.getLogger("huggingface_hub"), is_silent() and not are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    if hides_bars:
        disable_progress_bars()
    try:
        yield
    except (LceError, ImportError):
        raise
    except Exception as error:
        page, login = f"{constants.ENDPOINT}/{model.repo}", "log in by `hf auth login`"
        if isinstance(error, errors.GatedRepoError):
            raise ModelError(f"{model} is gated: accept its terms at {page}, then {login}") from error
        if isinstance(error, errors.RepositoryNotFoundError):
            fault = f"{model} is no file or folder{_hint(model.repo)}, and {constants.ENDPOINT} has no such model"
            raise ModelError(f"{fault}, or hides it; check the name; for a private model {login}") from error
        if isinstance(error, errors.RevisionNotFoundError):
            fault = f"{model.repo} has no revision {revision!r}"
            raise NoRevision(f"{fault}; give a branch, tag or commit of {page}") from error
        if isinstance(error, errors.OfflineModeIsEnabled):
            remedy = f"unset it, or run `{model.command}` where there is a network"
            raise Unreachable(f"HF_HUB_OFFLINE forbids to download it; {remedy}") from error
        if isinstance(error, OSError) and error.errno in _DISK:
            raise unwritable(cache_folder(), error) from error
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        fault = f"it cannot be downloaded from {constants.ENDPOINT}: {shown(reason)[1:-1]}"
        raise Unreachable(f"{fault}; try again, or run `{model.command}` where there is a network") from error
    finally:
        logger.setLevel(level)
        if hides_bars:
            enable_progress_bars()


def _hint(repo: str) -> str:
    """Return the hint for a name like that of a model in the cache or of a file here: " (did you mean 'O/N'?)"."""
    found = [path.name.removeprefix("models--").replace("--", "/") for path in cache_folder().glob("models--*")]
    found += map(str, Path(repo).parent.glob("*"))
    close = get_close_matches(repo, {*found} - {repo}, n=1, cutoff=0.8)
    return f" (did you mean {close[0]!r}?)" if close else ""
