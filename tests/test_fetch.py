"""`fetch` against a server on this machine that cuts, lies, redirects and sends bombs."""

import hashlib
import http.server
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import stat
import struct
import threading
import zipfile
import zlib
from pathlib import Path
from typing import ClassVar

import pytest

from forked import forked
from nmt.config import CleanConfig
from nmt.corpus import fetch, fetching, find_sources
from nmt.errors import DataError

CORPUS = "".join(f"Number {n}.\t第{n}号。\tby A\n" for n in range(300)).encode()


def zipped(members, method=zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return stream.getvalue()


GOOD = zipped([("cmn.txt", CORPUS), ("_about.txt", b"about")])


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    pages: ClassVar[dict[str, tuple[int, dict[str, str], bytes]]] = {}

    def do_GET(self):
        if self.path == "/stall":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"x\t")
            self.wfile.flush()
            self.server.release.wait(5)
            return
        if self.path == "/garbage":
            self.wfile.write(b"this is not HTTP\r\n\r\n")
            self.close_connection = True
            return
        if self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"a\tb\n" * 4096)
            except OSError:
                return
            finally:
                self.close_connection = True
        status, headers, body = self.pages.get(self.path, (404, {}, b""))
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    Handler.pages = {
        "/cmn-eng.zip": (200, {}, GOOD),
        "/cut": (200, {"Content-Length": str(len(CORPUS) + 1000)}, CORPUS),
        "/cut.zip": (200, {}, GOOD[: len(GOOD) // 2]),
        "/longer": (200, {"Content-Length": "100"}, CORPUS),
        "/huge": (200, {"Content-Length": str(1 << 40)}, b"x"),
        "/once": (302, {"Location": "/cmn-eng.zip"}, b""),
        "/loop": (302, {"Location": "/loop"}, b""),
        "/file": (302, {"Location": "file:///etc/hostname"}, b""),
        "/ftp": (302, {"Location": "ftp://127.0.0.1/x"}, b""),
        "/page": (200, {}, b"<!DOCTYPE html><p>log in\tfirst</p>\n"),
        "/error": (500, {}, b"oops"),
        "/empty": (200, {}, b""),
        "/mine.tsv": (200, {}, CORPUS),
        **{f"/far{n}": (302, {"Location": f"/far{n + 1}"}, b"") for n in range(20)},
    }
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.release = threading.Event()
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.release.set()
        running.shutdown()


def refused(name: str, origin: str | None, folder: Path, sha256: str | None = None) -> str:
    """The message of a refusal that left nothing behind."""
    before = sorted(folder.iterdir()) if folder.exists() else []
    with pytest.raises(DataError) as caught:
        fetch(name, origin, folder, sha256)
    assert (sorted(folder.iterdir()) if folder.exists() else []) == before
    return str(caught.value)


def test_a_zip_gives_its_corpus_the_notices_and_a_record(server, tmp_path):
    raw = tmp_path / "cmn" / "raw"
    source = fetch("cmn", f"{server}/cmn-eng.zip", raw)
    assert (raw / "cmn.txt").read_bytes() == CORPUS
    assert (raw / "_about.txt").read_bytes() == b"about"
    assert "Attribution" in (raw / "_licence.txt").read_text()
    assert source == json.loads((raw / "_source.json").read_text())
    assert source["rows"] == 300
    assert source["sha256"] == hashlib.sha256(CORPUS).hexdigest()
    assert source["origin_sha256"] == hashlib.sha256(GOOD).hexdigest()
    assert sorted(path.name for path in raw.iterdir()) == ["_about.txt", "_licence.txt", "_source.json", "cmn.txt"]
    assert find_sources(tmp_path / "cmn", CleanConfig()) == {"cmn": (raw / "cmn.txt",)}


def test_without_an_origin_cmn_comes_from_where_it_is_published(server, tmp_path, monkeypatch):
    monkeypatch.setitem(fetching.ORIGINS, "cmn", fetching.ORIGINS["cmn"]._replace(url=f"{server}/cmn-eng.zip"))
    assert fetch("cmn", None, tmp_path)["rows"] == 300
    assert "no source is known for corpus other" in refused("other", None, tmp_path)


@pytest.mark.parametrize("form", ["path", "file URL", "zip path"])
def test_a_file_on_this_machine_fills_any_corpus(tmp_path, form):
    file = tmp_path / "has blank.tsv"
    file.write_bytes(zipped([("mine.tsv", CORPUS)]) if form == "zip path" else CORPUS)
    origin = file.as_uri() if form == "file URL" else str(file)
    source = fetch("mine", origin, tmp_path / "raw")
    assert source["file"] == "mine.tsv"
    assert source["licence"] is None
    assert (tmp_path / "raw" / "mine.tsv").read_bytes() == CORPUS


def test_a_second_fetch_replaces_the_first_also_under_another_ending(server, tmp_path):
    raw = tmp_path / "mine" / "raw"
    (tmp_path / "x.txt").write_bytes(b"a\tb\n")
    fetch("mine", str(tmp_path / "x.txt"), raw)
    fetch("mine", f"{server}/mine.tsv", raw)
    assert find_sources(tmp_path / "mine", CleanConfig()) == {"mine": (raw / "mine.tsv",)}


def test_a_pinned_hash_is_kept_and_a_wrong_one_refused_with_both(server, tmp_path):
    right, wrong = hashlib.sha256(GOOD).hexdigest(), "0" * 64
    said = refused("cmn", f"{server}/cmn-eng.zip", tmp_path, wrong)
    assert right in said
    assert wrong in said
    assert fetch("cmn", f"{server}/cmn-eng.zip", tmp_path, right.upper())["rows"] == 300


def test_a_refused_fetch_leaves_an_earlier_corpus_alone(server, tmp_path):
    fetch("cmn", f"{server}/cmn-eng.zip", tmp_path)
    refused("cmn", f"{server}/cut", tmp_path)
    assert (tmp_path / "cmn.txt").read_bytes() == CORPUS


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("/cut", "were announced"),
        ("/longer", "were announced"),
        ("/cut.zip", "neither text nor a zip|damaged"),
        ("/huge", "too much"),
        ("/loop", "redirect|infinite"),
        ("/far0", "redirect|infinite"),
        ("/file", "not allowed|less safe"),
        ("/ftp", "less safe"),
        ("/page", "web page"),
        ("/error", "500"),
        ("/missing", "404"),
        ("/empty", "empty"),
        ("/garbage", "cannot fetch"),
    ],
)
def test_a_server_that_cuts_lies_or_leads_astray_is_refused(server, tmp_path, page, said):
    assert re.search(said, refused("cmn", server + page, tmp_path))


def test_a_server_that_stalls_is_not_waited_for(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "TIMEOUT", 0.3)
    assert "cannot fetch" in refused("cmn", f"{server}/stall", tmp_path)


def test_a_stream_without_end_stops_at_the_cap(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "LARGEST_DOWNLOAD", 3_000_000)
    assert "too much" in refused("cmn", f"{server}/endless", tmp_path)


def test_a_few_redirects_are_followed(server, tmp_path):
    assert fetch("cmn", f"{server}/once", tmp_path)["rows"] == 300


def test_no_server_at_all_says_what_to_do(tmp_path):
    assert "--from PATH" in refused("cmn", "http://127.0.0.1:1/x", tmp_path)


@pytest.mark.parametrize("origin", ["ftp://127.0.0.1/x", "data://text,x", "/no/such/file", "."])
def test_an_origin_that_is_none_is_refused(tmp_path, origin):
    refused("cmn", origin, tmp_path)


def test_a_password_in_a_url_is_neither_shown_nor_kept(server, tmp_path):
    secret = server.replace("http://", "http://me:secret@")
    assert "secret" not in refused("cmn", f"{secret}/missing", tmp_path)


# ── archives ────────────────────────────────────────────────────────────────────────────────────────────────────────


def fetch_archive(tmp_path: Path, content: bytes) -> str:
    (tmp_path / "a.zip").write_bytes(content)
    return refused("cmn", str(tmp_path / "a.zip"), tmp_path / "raw")


@pytest.mark.parametrize("name", ["../cmn.txt", "/etc/cmn.txt", "a/../../cmn.txt", "C:/cmn.txt", "..\\cmn.txt"])
def test_a_member_that_leads_out_of_its_folder_is_refused(tmp_path, name):
    assert "no corpus has" in fetch_archive(tmp_path, zipped([("cmn.txt", CORPUS), (name, b"x")]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "raw"]


def test_a_link_is_refused(tmp_path):
    link = zipfile.ZipInfo("cmn.txt")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    assert "no corpus has" in fetch_archive(tmp_path, zipped([(link, b"/etc/hostname")]))


def test_a_bomb_stops_at_the_ratio_and_leaves_no_bytes(tmp_path):
    assert "unpacks to over" in fetch_archive(tmp_path, zipped([("cmn.txt", b"a\tb\n" * 2_000_000)]))
    assert sum(path.stat().st_size for path in (tmp_path / "raw").iterdir()) == 0


def test_a_bomb_that_lies_about_its_size_is_refused(tmp_path):
    bomb = bytearray(zipped([("cmn.txt", b"a\tb\n" * 2_000_000)]))
    true, told = (8_000_000).to_bytes(4, "little"), (1000).to_bytes(4, "little")
    assert bomb.count(true) == 2
    assert "damaged" in fetch_archive(tmp_path, bytes(bomb).replace(true, told))


@pytest.mark.parametrize(
    "members", [[], [("other.txt", b"x")], [("_about.txt", b"x")], [("cmn.txt", b"a\tb\n"), ("cmn.tsv", b"a\tb\n")]]
)
def test_an_archive_without_exactly_the_corpus_is_refused(tmp_path, members):
    assert "should have one cmn.txt" in fetch_archive(tmp_path, zipped(members))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_given_twice_is_refused(tmp_path):
    assert "should have one" in fetch_archive(tmp_path, zipped([("cmn.txt", b"a\tb\n"), ("cmn.txt", b"c\td\n")]))


def test_other_members_are_left_in_the_archive(tmp_path):
    (tmp_path / "a.zip").write_bytes(zipped([("cmn.txt", CORPUS), ("virus.exe", b"x"), ("sub/cmn.txt", b"y")]))
    fetch("cmn", str(tmp_path / "a.zip"), tmp_path / "raw")
    assert sorted(os.listdir(tmp_path / "raw")) == ["_licence.txt", "_source.json", "cmn.txt"]


def test_a_changed_byte_in_an_archive_is_refused(tmp_path):
    stored = bytearray(zipped([("cmn.txt", CORPUS)], zipfile.ZIP_STORED))
    stored[200] ^= 1
    assert "damaged" in fetch_archive(tmp_path, bytes(stored))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'<?xml version="1.0"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<tmx version="1.4">\n', "is a TMX file"),
        (b'<?xml version="1.0"?>\n<corpus>\n', "is an XML file"),
        (b"<html>\n", "is a web page"),
        (b"\x1f\x8b\x08\x00" + b"x" * 99, "is packed with gzip"),
        (CORPUS.decode().encode("utf-16"), "is UTF-16; convert it (iconv -f UTF-16 "),
        (CORPUS.decode().encode("utf-16-le"), "is UTF-16-LE; convert it (iconv -f UTF-16LE "),
        (CORPUS.decode().encode("utf-16-be"), "is UTF-16-BE; convert it (iconv -f UTF-16BE "),
        (b"a\tb\0\n", "neither text nor a zip"),
        (GOOD[: len(GOOD) // 2], "a damaged zip archive"),
    ],
)
def test_a_file_that_is_no_corpus_is_refused_by_what_it_is(tmp_path, content, said):
    assert said in fetch_archive(tmp_path, content)


def test_text_in_another_encoding_is_fetched_and_left_to_clean(tmp_path):
    (tmp_path / "x.tsv").write_bytes(CORPUS.decode().encode("gb18030"))
    assert fetch("mine", str(tmp_path / "x.tsv"), tmp_path / "raw")["rows"] == 300


def test_a_packed_file_of_another_kind_is_refused(tmp_path):
    assert "packed with xz" in fetch_archive(tmp_path, b"\xfd7zXZ\x00\x00\x04" + b"\x00" * 50)


@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK])
def test_a_device_a_pipe_or_a_socket_is_refused(tmp_path, kind):
    special = zipfile.ZipInfo("cmn.txt")
    special.external_attr = (kind | 0o666) << 16
    assert "no corpus has" in fetch_archive(tmp_path, zipped([(special, b"a\tb\n")]))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_way_of_packing_that_may_take_much_memory_is_refused(tmp_path, method):
    assert "unusual method" in fetch_archive(tmp_path, zipped([("cmn.txt", CORPUS)], method))


def test_a_bomb_below_the_ratio_stops_at_the_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "LARGEST_MEMBER", 5_000_000)
    text = "".join(f"{n * 7919 % 1_000_003}\tx\n" for n in range(1_000_000)).encode()
    assert "unpacks to over 5,000,000" in fetch_archive(tmp_path, zipped([("cmn.txt", text)]))
    assert os.listdir(tmp_path / "raw") == []


def test_a_bomb_of_ten_gigabytes_stops_early_with_little_memory_and_a_clean_disk(tmp_path, monkeypatch):
    # Four megabytes of zeros as a block of deflate that stands alone, 2,500 times.
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    blocks = (packer.compress(bytes(1 << 22)) + packer.flush(zlib.Z_FULL_FLUSH)) * 2500
    bomb = bytearray(zipped([("cmn.txt", blocks)], zipfile.ZIP_STORED))
    central = bomb.rindex(b"PK\x01\x02")
    for method, unpacked in ((8, 22), (central + 10, central + 24)):
        bomb[method : method + 2] = struct.pack("<H", zipfile.ZIP_DEFLATED)
        bomb[unpacked : unpacked + 4] = struct.pack("<I", 2**32 - 2)
    assert len(bomb) > 10_000_000
    written: list[int] = []
    monkeypatch.setattr(fetching, "open", lambda *given: Counting(open(*given), written), raising=False)  # noqa: SIM115
    before = resource.getrusage(resource.RUSAGE_SELF)
    assert "unpacks to over" in fetch_archive(tmp_path, bytes(bomb))
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert after.ru_maxrss - before.ru_maxrss < 100_000  # KiB
    assert sum(written) < len(bomb) + 30_000_000
    assert os.listdir(tmp_path / "raw") == []


class Counting:
    """A file that notes how much is written to it."""

    def __init__(self, stream, written: list[int]) -> None:
        self._stream, self._written = stream, written

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stream.close()

    def write(self, block: bytes) -> int:
        self._written.append(len(block))
        return self._stream.write(block)


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """An archive with some bits flipped, cut short, or with a part again or something else in it."""
    at, to = sorted(rng.randrange(len(raw)) for _ in range(2))
    match rng.randrange(5):
        case 0 | 1:
            changed = bytearray(raw)
            for _ in range(rng.choice((1, 1, 3, 30))):
                changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            return bytes(changed)
        case 2:
            return raw[:at] + raw[to:]
        case 3:
            return raw[:to] + raw[at:to] + raw[to:]
        case _:
            return raw[:at] + rng.randbytes(rng.choice((1, 4, 200))) + raw[at:]


def test_six_hundred_mutated_archives_are_refused_or_give_the_corpus_and_never_anything_else(tmp_path):
    names, taken = {"cmn.txt", "_about.txt", "_licence.txt", "_source.json"}, 0
    for seed in range(600):
        rng = random.Random(seed)
        method = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED))
        members = [("cmn.txt", CORPUS), ("_about.txt", b"about" * 50), ("other.bin", rng.randbytes(200))]
        (tmp_path / "a.zip").write_bytes(mutated(zipped(members, method), rng))
        shutil.rmtree(tmp_path / "raw", ignore_errors=True)
        try:
            fetch("cmn", str(tmp_path / "a.zip"), tmp_path / "raw")
        except DataError:
            assert os.listdir(tmp_path / "raw") == [], seed
            continue
        assert set(os.listdir(tmp_path / "raw")) <= names, seed
        assert (tmp_path / "raw" / "cmn.txt").read_bytes() == CORPUS, seed
        taken += 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "raw"]
    assert 0 < taken < 300


def test_what_a_killed_fetch_left_is_never_used_and_goes_with_the_next_one(tmp_path):
    raw = tmp_path / "cmn" / "raw"
    (tmp_path / "x.txt").write_bytes(CORPUS)

    def die_half_way() -> None:
        copy = fetching._copy

        def half(stream, target, origin, announced):
            copy(io.BytesIO(stream.read(1000)), target, origin, None)
            os.kill(os.getpid(), signal.SIGKILL)

        fetching._copy = half
        fetch("cmn", str(tmp_path / "x.txt"), raw)

    assert forked(die_half_way).code == -signal.SIGKILL
    assert (raw / ".fetch.part").exists()
    with pytest.raises(DataError):
        find_sources(tmp_path / "cmn", CleanConfig())
    fetch("cmn", str(tmp_path / "x.txt"), raw)
    assert sorted(os.listdir(raw)) == ["_licence.txt", "_source.json", "cmn.txt"]
    assert (raw / "cmn.txt").read_bytes() == CORPUS


def test_a_full_disk_leaves_the_earlier_corpus_and_tells_the_room(tmp_path):
    raw = tmp_path / "raw"
    (tmp_path / "x.txt").write_bytes(CORPUS)
    fetch("cmn", str(tmp_path / "x.txt"), raw)
    (tmp_path / "y.txt").write_bytes(CORPUS * 2)

    def fill() -> None:
        with pytest.raises(DataError, match=r"raw: File too large; [\d,]+ bytes are free"):
            fetch("cmn", str(tmp_path / "y.txt"), raw)

    ended = forked(fill, largest_file=len(CORPUS))
    assert ended.code == 0, ended.told
    assert (raw / "cmn.txt").read_bytes() == CORPUS
    assert sorted(os.listdir(raw)) == ["_licence.txt", "_source.json", "cmn.txt"]


# ── the corpus that ships with nmt ──────────────────────────────────────────────────────────────────────────────────

MINI = Path(__file__).parent.parent / "data/mini/raw/mini.txt"


def test_the_corpus_that_ships_is_copied_with_its_licence_from_no_network(tmp_path):
    facts = fetch("mini", None, tmp_path / "raw", hashlib.sha256(MINI.read_bytes()).hexdigest())
    assert (facts["file"], facts["licence"]) == ("mini.txt", "CC0 1.0")
    assert (tmp_path / "raw/mini.txt").read_bytes() == MINI.read_bytes()
    assert (tmp_path / "raw/_licence.txt").read_text(encoding="utf-8").startswith("CC0 1.0\n")


def test_another_file_under_the_name_of_the_corpus_that_ships_is_not_under_its_licence(tmp_path):
    (tmp_path / "x.txt").write_bytes(CORPUS)
    assert fetch("mini", str(tmp_path / "x.txt"), tmp_path / "raw")["licence"] is None
    assert sorted(os.listdir(tmp_path / "raw")) == ["_source.json", "mini.txt"]


def test_the_corpus_that_ships_is_read_where_it_ships_until_there_is_another(tmp_path):
    home, settings = tmp_path / "data/mini", CleanConfig()
    assert find_sources(home, settings) == {"mini": (MINI,)}
    assert not home.exists()
    (home / "raw").mkdir(parents=True)
    (home / "raw/_notes.txt").write_bytes(b"no corpus")
    assert find_sources(home, settings) == {"mini": (MINI,)}
    (home / "raw/own.txt").write_bytes(CORPUS)
    assert find_sources(home, settings) == {"own": (home / "raw/own.txt",)}
    (home / "raw/own.txt").unlink()
    (home / "raw/own.en").write_bytes(b"half of a pair\n")
    with pytest.raises(DataError, match=r"no own\.zh beside it"):
        find_sources(home, settings)


def test_without_the_shipped_files_the_corpus_is_fetched_from_a_path_like_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "__file__", str(tmp_path / "a/b/c/d.py"))
    assert fetching.shipped("mini") is None
    with pytest.raises(DataError, match="--from PATH"):
        fetch("mini", None, tmp_path / "raw")
    (tmp_path / "own/raw").mkdir(parents=True)
    with pytest.raises(DataError, match="no corpus in"):
        find_sources(tmp_path / "mini", CleanConfig())


@pytest.mark.parametrize("name", ["cmn", "Mini", "mini2", ".."])
def test_no_other_corpus_ships(name):
    assert fetching.shipped(name) is None


@pytest.mark.parametrize(("name", "hint"), [("cmn", "`nmt fetch cmn` fills"), ("news", "`nmt fetch news --from PATH`")])
def test_what_is_said_where_there_is_no_corpus_is_a_command_that_can_work(tmp_path, name, hint):
    with pytest.raises(DataError, match=hint):
        find_sources(tmp_path / name, CleanConfig())
