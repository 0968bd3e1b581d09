"""Bring a raw corpus to `data/NAME/raw`, from the network, from a file, or from this package, and check it.

What arrives goes to a `.part` file under a size cap; of an archive only the expected members are taken; nothing takes
its place before all of it has been checked.
"""

import hashlib
import http.client
import json
import os
import re
import shutil
import stat
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from nmt.charset import how_to_convert, utf_16
from nmt.corpus.layout import foreign_format
from nmt.errors import DataError, counted, describe_error
from nmt.io import sha256_of, write_lines

LARGEST_DOWNLOAD = 1 << 30
"""Bytes."""
LARGEST_MEMBER = 4 << 30
"""Bytes of an archive's member when unpacked."""
LARGEST_RATIO = 200
"""Unpacked bytes for each packed one; text has 3 to 10."""
SMALL_MEMBER = 1 << 20
"""Bytes below which the ratio says nothing."""
MOST_REDIRECTS = 5
TIMEOUT = 30.0
"""Seconds without a byte."""
BLOCK = 1 << 20


def shipped(name: str) -> Path | None:
    """The folder with the raw files of a corpus that is part of this package (or of its clone); None for any other."""
    package = Path(__file__).parents[1]
    places = [package / "corpora" / name / "raw", package.parents[1] / "data" / name / "raw"]
    return next((place for place in places if name in SHIPPED and place.is_dir()), None)


class Origin(NamedTuple):
    """The default URL of a corpus, its licence, and the notice that must stay with it."""

    url: str | None
    """None where it ships with nmt."""
    licence: str
    notice: str


ORIGINS = {
    "cmn": Origin(
        "https://www.manythings.org/anki/cmn-eng.zip",
        "CC BY 2.0 FR",
        "English-Mandarin sentence pairs from the Tatoeba project (tatoeba.org), selected by www.manythings.org/anki.\n"
        "Licence: Creative Commons Attribution 2.0 France, https://creativecommons.org/licenses/by/2.0/fr/.\n"
        "The third column of each row names the authors of its two sentences; whoever passes the text on passes that "
        "on too.",
    ),
    "mini": Origin(
        None,
        "CC0 1.0",
        "Written for nmt and in the public domain: https://creativecommons.org/publicdomain/zero/1.0/.",
    ),
}
SHIPPED = [name for name, origin in ORIGINS.items() if origin.url is None]


def fetch(name: str, origin: str | None, folder: Path, sha256: str | None = None) -> dict[str, Any]:
    """Fill `folder` with corpus `name` from `origin` (path or URL of a text file or zip; None: its usual place).

    Writes NAME.txt or NAME.tsv, the notices, and last `_source.json`, which is also what comes back. With `sha256`,
    what is fetched must have that hash.
    """
    known, inside = ORIGINS.get(name), shipped(name)
    if origin is not None and name in SHIPPED:
        known = None  # Another file under that name is not under our licence.
    origin = origin or (str(inside / f"{name}.txt") if inside else known and known.url)
    if origin is None:
        raise DataError(
            f"no source is known for corpus {name}; give one with --from PATH or URL "
            f"(without it: {', '.join(ORIGINS)})."
        )
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / ".fetch.part"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        arrived = work / "arrived"
        hashed = _bring(origin, arrived)
        if sha256 is not None and hashed != sha256.lower():
            raise DataError(f"{_shown(origin)} has SHA-256 {hashed}, expected {sha256.lower()}; nothing was kept.")
        suffix = ".tsv" if urllib.parse.urlsplit(origin).path.endswith(".tsv") else ".txt"
        files = _unpack(arrived, name, work) if zipfile.is_zipfile(arrived) else {f"{name}{suffix}": arrived}
        corpus = next(file for file in files if not file.startswith("_"))
        rows = _check_text(files[corpus], _shown(origin))
        if known:
            write_lines(work / "licence", [f"{known.licence}", *known.notice.split("\n")])
            files["_licence.txt"] = work / "licence"
        source = {
            "corpus": name,
            "origin": _shown(origin),
            "origin_sha256": hashed,
            "file": corpus,
            "sha256": sha256_of(files[corpus]),
            "bytes": files[corpus].stat().st_size,
            "rows": rows,
            "licence": known.licence if known else None,
        }
        write_lines(work / "source", [json.dumps(source, ensure_ascii=False, indent=1)])
        for file, path in (*files.items(), ("_source.json", work / "source")):
            os.replace(path, folder / file)
    except OSError as error:
        raise DataError(f"cannot fetch {_shown(origin)} to {describe_error(error, folder)}.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    # A corpus that an earlier fetch left under the other suffix would be a second source.
    (folder / f"{name}{'.txt' if corpus.endswith('.tsv') else '.tsv'}").unlink(missing_ok=True)
    return source


def _shown(origin: str) -> str:
    """The origin without a password in it."""
    return re.sub(r"(?<=://)[^/@]*@", "", origin)


# ── arriving ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _bring(origin: str, target: Path) -> str:
    """Copy `origin` to `target`; its SHA-256."""
    scheme = urllib.parse.urlsplit(origin).scheme.lower() if "://" in origin else ""
    if scheme in ("http", "https"):
        with _open_url(origin) as (stream, announced):
            return _copy(stream, target, origin, announced)
    if scheme not in ("", "file"):
        raise DataError(f"cannot fetch from {scheme}://; give an http, https or file URL, or a path.")
    path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(origin).path) if scheme else origin)
    if not path.is_file():
        raise DataError(f"{path} is {'a folder, not' if path.is_dir() else 'not'} a file; nothing was fetched.")
    with open(path, "rb") as stream:
        return _copy(stream, target, str(path), path.stat().st_size)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A few redirects, never from https to anything less."""

    max_redirections = MOST_REDIRECTS
    max_repeats = 2

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        scheme = urllib.parse.urlsplit(newurl).scheme
        if scheme != "https" and (scheme != "http" or req.type == "https"):
            raise DataError(
                f"{_shown(req.full_url)} redirects to {_shown(newurl)}, which is less safe; nothing was kept."
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextmanager
def _open_url(url: str) -> Iterator[tuple[BinaryIO, int | None]]:
    """The body behind an http or https URL, and its announced length."""
    opener = urllib.request.build_opener(_Redirects)
    request = urllib.request.Request(url, headers={"User-Agent": "nmt", "Accept-Encoding": "identity"})
    try:
        with opener.open(request, timeout=TIMEOUT) as response:
            length = response.headers.get("Content-Length")
            announced = int(length) if length and length.isdigit() else None
            # Read to the end of the connection, not only as far as announced: a wrong length shows both ways.
            response.length = None
            yield response, announced
    except urllib.error.HTTPError as error:
        raise DataError(f"{_shown(url)}: the server says {error.code} {error.reason.strip()[:200]}.") from error
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ValueError) as error:
        reason = getattr(error, "reason", None) or error or type(error).__name__
        raise DataError(
            f"cannot fetch {_shown(url)}: {reason}; nothing was kept. Where there is no network, download it elsewhere "
            "and use --from PATH."
        ) from error


def _copy(stream: BinaryIO, target: Path, origin: str, announced: int | None) -> str:
    """Copy the stream to its end; refused above the cap or when it isn't as long as announced."""
    digest, size = hashlib.sha256(), 0
    if announced is not None and announced > LARGEST_DOWNLOAD:
        raise _too_large(origin)
    with open(target, "wb") as out:
        while True:
            try:
                block = stream.read(BLOCK)
            except TimeoutError:
                if size != announced:  # Else a server that doesn't close: all has arrived.
                    raise
                block = b""
            if not block:
                break
            size += len(block)
            if size > LARGEST_DOWNLOAD:
                raise _too_large(origin)
            digest.update(block)
            out.write(block)
    if announced is not None and size != announced:
        raise DataError(
            f"{_shown(origin)}: {counted(size, 'byte')} arrived and {announced:,} were announced; "
            "nothing was kept, fetch it again."
        )
    return digest.hexdigest()


def _too_large(origin: str) -> DataError:
    return DataError(f"{_shown(origin)} has over {LARGEST_DOWNLOAD:,} bytes, too much for a corpus; nothing was kept.")


# ── unpacking and checking ────────────────────────────────────────────────────────────────────────────────────────────


def _unpack(archive: Path, name: str, work: Path) -> dict[str, Path]:
    """NAME.txt or NAME.tsv of the archive, and `_about.txt` where it has one; their names and where they lie now."""
    wanted = {f"{name}.txt", f"{name}.tsv", "_about.txt"}
    try:
        with open(archive, "rb") as packed, zipfile.ZipFile(packed) as opened:
            members = opened.infolist()
            for member in members:
                _check_member(member)
            found = [member for member in members if member.filename in wanted]
            names = [member.filename for member in found]
            if len(set(names)) != len(names) or len(set(names) - {"_about.txt"}) != 1:
                there = ", ".join(member.filename[:40] for member in members[:5])
                raise DataError(f"the archive should have one {name}.txt or {name}.tsv; it has {there or 'nothing'}.")
            return {member.filename: _unpack_member(packed, opened, member, work) for member in found}
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError, ValueError) as error:
        raise DataError(f"the archive is damaged ({error}); nothing was kept, fetch it again.") from error


def _check_member(member: zipfile.ZipInfo) -> None:
    parts = re.split(r"[/\\]", member.orig_filename)
    mode = member.external_attr >> 16
    if ".." in parts or parts[0] == "" or ":" in parts[0] or (mode and stat.S_IFMT(mode) not in _PLAIN):
        raise DataError(f"the archive has {member.orig_filename[:80]!r}, which no corpus has; nothing was kept.")
    if member.flag_bits & 1:
        raise DataError("the archive is encrypted; unpack it yourself and use --from PATH.")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # Others may ask for gigabytes of memory before the first byte comes out.
        raise DataError("the archive is packed by an unusual method; unpack it yourself and use --from PATH.")


_PLAIN = (0, stat.S_IFREG, stat.S_IFDIR)


def _unpack_member(packed: BinaryIO, opened: zipfile.ZipFile, member: zipfile.ZipInfo, work: Path) -> Path:
    """Unpack one member as far as its real, not its announced, size allows; a bomb stops within its first blocks."""
    target, size = work / f"member{len(list(work.iterdir()))}", 0
    with opened.open(member) as stream, open(target, "wb") as out:
        # As much is read packed as is asked for unpacked: a large block would raise the bound before it is looked at.
        while block := stream.read(BLOCK >> 4):
            size += len(block)
            most = min(LARGEST_MEMBER, max(SMALL_MEMBER, LARGEST_RATIO * (packed.tell() - member.header_offset)))
            if size > most:
                raise DataError(f"{member.filename} of the archive unpacks to over {most:,} bytes; nothing was kept.")
            out.write(block)
    return target


def _check_text(path: Path, origin: str) -> int:
    """The number of rows of a text file; refused when it is empty, a web page, or no text at all."""
    rows, last = 0, b"\n"
    with open(path, "rb") as stream:
        start = stream.read(4096)
        if start.startswith(b"PK\x03\x04"):
            raise DataError(f"{origin} is a damaged zip archive; nothing was kept, fetch it again.")
        if found := foreign_format(start):
            raise DataError(f"{origin} is {found[0]}, not a corpus; nothing was kept. To use it, {found[1]}.")
        if encoding := utf_16(start):
            command = how_to_convert("FILE", encoding)
            raise DataError(f"{origin} is {encoding.upper()}; convert it ({command}) and use --from NEW.")
        if b"\0" in start:
            raise DataError(f"{origin} is neither text nor a zip archive; unpack it and use --from PATH.")
        stream.seek(0)
        while block := stream.read(BLOCK):
            rows, last = rows + block.count(b"\n"), block[-1:]
    rows += last != b"\n"
    if not rows:
        raise DataError(f"{origin} is empty; nothing was kept.")
    return rows
