"""The disk cleaner: least recently used files go first, the folder stays below its bound."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.sidecars.block_files import ABANDONED_SECONDS
from kvist_epp.sidecars.disk_cleaner import DiskCleaner, Pass, Watermarks, main
from kvist_epp.sidecars.disk_growth import DiskGrowth

KIB = 1 << 10


def block(folder: Path, name: str, used: float, size: int = 8 * KIB, suffix: str = ".bin") -> Path:
    """Write a file where vLLM would, last used so many seconds after a fixed time."""
    path = folder / "m_r0" / name[:3] / f"{name[3:5]}_g0" / f"{name}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (1_700_000_000 + used, 1_600_000_000))
    return path


def on_disk(folder: Path) -> int:
    """Bytes on disk of everything below a folder, as the kubelet counts them."""
    return sum(p.lstat().st_blocks * 512 for p in folder.rglob("*"))


def marks(low: int, high: int) -> Watermarks:
    """Watermarks with a limit far above them."""
    return Watermarks(low=low, high=high, limit=high * 2)


def cleaner(folder: Path | str, watermarks: Watermarks, candidates: int = 1000) -> DiskCleaner:
    """Return a cleaner for which no time passes, on a file system without other growth."""
    return DiskCleaner(
        str(folder),
        watermarks,
        candidates=candidates,
        clock=lambda: 0.0,
        used=lambda: 0,
        sleep=lambda _: None,
    )


@given(
    uses=st.lists(st.integers(0, 30), min_size=1, max_size=24),
    sizes=st.lists(st.integers(1, 20), min_size=24, max_size=24),
    low=st.integers(8, 120),
    room=st.integers(4, 60),
    candidates=st.integers(1, 40),
)
def test_no_file_is_removed_before_one_that_was_used_earlier(
    uses: list[int], sizes: list[int], low: int, room: int, candidates: int
) -> None:
    """Whatever the sizes, uses and bounds are: the total ends at the bound or below, and every file that is
    left was used at least as recently as every file removed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = {
            block(folder, f"{i:06x}", used, size * KIB): used
            for i, (used, size) in enumerate(zip(uses, sizes, strict=False))
        }
        before = on_disk(folder)
        found = cleaner(name, marks(low * KIB, (low + room) * KIB), candidates).clean()
        left = {path for path in made if path.exists()}
        gone = made.keys() - left

        assert found.found == before
        assert found.removed == len(gone)
        assert max((made[p] for p in gone), default=0) <= min((made[p] for p in left), default=99)
        if before <= (low + room) * KIB:
            assert not gone
        elif left:
            assert on_disk(folder) <= low * KIB


def test_a_folder_between_the_watermarks_is_left_alone(tmp_path: Path) -> None:
    """Nothing is removed below the high watermark; above it, files go until the low one."""
    for i in range(8):
        block(tmp_path, f"{i:06x}", i)
    size = on_disk(tmp_path)

    assert cleaner(tmp_path, marks(size // 2, size)).clean().removed == 0
    found = cleaner(tmp_path, marks(size // 2, size - 1)).clean()
    assert found.total == on_disk(tmp_path) <= size // 2
    assert not (tmp_path / "m_r0/000/00_g0/000000.bin").exists()
    assert (tmp_path / "m_r0/000/00_g0/000007.bin").exists()


def test_only_blocks_and_abandoned_files_are_removed(tmp_path: Path) -> None:
    """The tier's configuration and files being written stay, whatever the bound; a file that an engine left
    half-written when it died goes first."""
    config = tmp_path / "m_r0" / "config.json"
    config.parent.mkdir()
    config.write_text("{}" * 5000)
    writing = block(tmp_path, "aaaa01", 0, suffix=".bin_123.tmp")
    os.utime(writing)
    abandoned = block(tmp_path, "aaaa02", 0, suffix=".bin_124.tmp")
    past = time.time() - ABANDONED_SECONDS - 1
    os.utime(abandoned, (past, past))
    newest = block(tmp_path, "bbbb01", 5)
    size = on_disk(tmp_path)

    cleaner(tmp_path, marks(size - KIB, size - 1)).clean()
    assert not abandoned.exists()
    assert newest.exists()
    cleaner(tmp_path, marks(1, 2)).clean()
    assert not newest.exists()
    assert writing.exists()
    assert config.exists()


def test_files_may_vanish_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is gone between walk and removal is passed over, and the next one is removed instead."""
    paths = [block(tmp_path, f"{i:06x}", i, 16 * KIB) for i in range(6)]
    plain = os.lstat

    def lstat(path: str) -> os.stat_result:
        if str(path).endswith(paths[0].name):
            paths[0].unlink(missing_ok=True)
        return plain(path)

    monkeypatch.setattr(os, "lstat", lstat)
    size = on_disk(tmp_path)
    found = cleaner(tmp_path, marks(size - 20 * KIB, size - 1)).clean()
    monkeypatch.undo()
    assert found.removed >= 1
    assert not paths[1].exists()
    assert paths[5].exists()
    assert on_disk(tmp_path) <= size - 20 * KIB


def test_a_block_used_after_the_walk_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is read while a pass runs is not removed by this pass as long as others can be."""
    paths = [block(tmp_path, f"{i:06x}", i, 16 * KIB) for i in range(6)]
    plain = os.lstat

    def lstat(path: str) -> os.stat_result:
        if str(path).endswith(paths[0].name):
            os.utime(path, (1_800_000_000, 1_600_000_000))
        return plain(path)

    monkeypatch.setattr(os, "lstat", lstat)
    size = on_disk(tmp_path)
    cleaner(tmp_path, marks(size - 20 * KIB, size - 1)).clean()
    assert paths[0].exists()
    assert not paths[1].exists()


def test_reads_are_recorded_again_after_each_pass(tmp_path: Path) -> None:
    """On a file system with relatime, which records one read a day, each pass sees the reads since the last
    one, so that a block that is read often is never the oldest."""
    if not os.statvfs(tmp_path).f_flag & os.ST_RELATIME:
        pytest.skip("this file system is not mounted with relatime")
    path = block(tmp_path, "000001", 0)
    path.write_bytes(bytes(8 * KIB))
    cleaning = cleaner(tmp_path, marks(1 << 40, 1 << 41))
    seen = []
    for _ in range(3):
        time.sleep(0.02)
        path.read_bytes()
        cleaning.clean()
        seen.append(path.stat().st_atime_ns)
    assert seen[0] < seen[1] < seen[2]


GIB = 1 << 30
OF_500 = Watermarks(low=375 * GIB, high=425 * GIB, limit=500 * GIB)


@pytest.mark.parametrize(
    ("estimate_gib", "walk_seconds", "expected"),
    [(0, 0.0, 30.0), (420, 0.5, 30.0), (420, 15.0, 45.0), (430, 2.0, 6.0), (445, 2.0, 2.0)],
)
def test_the_next_pass_comes_when_the_folder_has_grown(
    estimate_gib: int, walk_seconds: float, expected: float
) -> None:
    """Half a minute after the last one below the high watermark; above it after three times as long as the
    walk takes, and far above it as soon as possible."""
    cleaning = cleaner("/nowhere", OF_500)
    made = Pass(walk_seconds=walk_seconds)
    assert cleaning.pause_after(made, estimate_gib * GIB) == pytest.approx(expected)


@given(st.floats(0, 1e12), st.integers(1, 99), st.integers(1, 99))
def test_lowered_watermarks_keep_their_order(room: float, low: int, more: int) -> None:
    """Whatever room is asked for, low < high < urgent < limit, none is raised, and the room is there unless
    the low watermark is at its lowest."""
    limit = 100 * GIB
    usual = Watermarks(low * GIB, min(99, low + more) * GIB + 1, limit)
    found = usual.with_room(room)

    assert 0 < found.low < found.high <= found.urgent < limit
    assert (found.low, found.high) <= (usual.low, usual.high)
    assert limit - found.urgent >= min(int(room), (limit - found.low) // 2) - 1 or found.low <= limit // 4


@dataclass
class FileSystem:
    """Bytes in use on a file system."""

    used: int = 0


def test_the_watermarks_follow_the_largest_step_that_was_seen() -> None:
    """The room above the urgent watermark is twice the most that was written between two looks; it is given
    back when the steps get smaller."""
    disk = FileSystem()
    growth = DiskGrowth(lambda: disk.used)
    for written in (1, 8, 2):
        disk.used += written * GIB
        growth.grown()
    assert growth.largest_step == 8 * GIB
    for _ in range(30):
        growth.counted(0)
    assert growth.largest_step < GIB

    cleaning = DiskCleaner("/nowhere", OF_500, used=lambda: disk.used)
    assert cleaning.marks == OF_500
    disk.used += 30 * GIB
    cleaning.look()
    assert cleaning.marks.limit - cleaning.marks.urgent == 60 * GIB


def test_growth_is_never_underestimated_by_the_cleaners_own_work() -> None:
    """Space that the cleaner frees hides no write of the engine; space that others free counts once."""
    disk = FileSystem()
    growth = DiskGrowth(lambda: disk.used)
    disk.used += 5 * GIB - 3 * GIB
    growth.freed(3 * GIB)
    assert growth.grown() == 5 * GIB

    growth.counted(0)
    disk.used -= 4 * GIB  # of another program
    assert growth.grown() == 0
    disk.used += GIB
    assert growth.grown() == GIB


def test_growth_above_the_urgent_watermark_removes_files_without_a_walk(tmp_path: Path) -> None:
    """Between two walks the oldest files of the last one go as soon as the file system shows that the folder
    may have grown so far."""
    for i in range(20):
        block(tmp_path, f"{i:06x}", i, 64 * KIB)
    size, disk = on_disk(tmp_path), FileSystem()
    limits = Watermarks(low=size, high=size + 100 * KIB, limit=size + 500 * KIB)
    cleaning = DiskCleaner(str(tmp_path), limits, used=lambda: disk.used + on_disk(tmp_path))
    assert cleaning.clean().removed == 0

    for step in range(1, 7):
        disk.used += 50 * KIB  # the last one is the urgent watermark
        assert cleaning.look() == size + step * 50 * KIB
    assert len(list(tmp_path.rglob("*.bin"))) == 20
    disk.used += 50 * KIB
    assert cleaning.look() <= limits.high
    left = {path.stem for path in tmp_path.rglob("*.bin")}
    assert left == {f"{i:06x}" for i in range(20 - len(left), 20)}
    assert 250 // 68 <= 20 - len(left) <= 250 // 64 + 1


def test_growth_during_a_walk_removes_files_at_once(tmp_path: Path) -> None:
    """A walk that takes so long that the folder would be full before its end is no obstacle, even if it is
    the first one: what it has seen so far goes, oldest first."""
    for i in range(1000):
        block(tmp_path, f"{i:06x}", i)
    size, looks = on_disk(tmp_path), iter(range(10**6))
    limits = Watermarks(low=size * 2, high=size * 3, limit=size * 4)
    cleaning = DiskCleaner(
        str(tmp_path), limits, used=lambda: next(looks) * size, sleep=lambda _: time.sleep(0.2)
    )
    cleaning.clean(urgent=False)
    assert len(list(tmp_path.rglob("*.bin"))) < 1000


def test_files_removed_during_a_walk_are_not_a_size_that_the_folder_had(tmp_path: Path) -> None:
    """A walk that counts files which are removed before its end does not report them as there, so that the
    log says of no folder that it was too large although it was not."""
    for i in range(1000):
        block(tmp_path, f"{i:06x}", i)
    size, looks = on_disk(tmp_path), iter(range(10**6))
    limits = Watermarks(low=size * 2, high=size * 3, limit=size * 4)
    cleaning = DiskCleaner(
        str(tmp_path), limits, used=lambda: next(looks) * size, sleep=lambda _: time.sleep(0.2)
    )
    found = cleaning.clean(urgent=False).found
    removed = 1000 - len(list(tmp_path.rglob("*.bin")))
    assert removed
    assert found <= size - removed * 8 * KIB


def test_a_reader_keeps_the_block_that_it_has_opened(tmp_path: Path) -> None:
    """A file that is removed while it is read is read to its end."""
    path = block(tmp_path, "000001", 0)
    path.write_bytes(b"k" * 8 * KIB)
    with path.open("rb") as reading:
        assert cleaner(tmp_path, marks(1, 2)).clean().removed == 1
        assert reading.read() == b"k" * 8 * KIB


def test_empty_folders_go_with_their_last_block(tmp_path: Path) -> None:
    """The folders of vLLM's tier, up to a million, do not stay behind their blocks."""
    block(tmp_path, "000001", 0)
    cleaner(tmp_path, marks(1, 2)).clean()
    assert list((tmp_path / "m_r0" / "000").iterdir()) == []


WRITER = """
import mmap, os, sys, time
folder, seconds, size, times, cleaner, share = sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:7])
direct = os.O_DIRECT if sys.argv[7] == "1" else 0
end, n, failed, written = time.time() + seconds, 0, 0, 0
data = mmap.mmap(-1, size)
data.write(os.urandom(size))

def wakes():
    with open(f"/proc/{cleaner}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary"))

seen, last, allowed = wakes(), time.time(), 0
while time.time() < end or written < times:
    while share and written >= allowed:
        now, count = time.time(), wakes()
        if count > seen and now - last >= 0.05:
            seen, last, allowed = count, now, written + share
        else:
            time.sleep(0.002)
    n += 1
    written += size
    name = f"{n * 2654435761 % 2**32:08x}"
    path = f"{folder}/m_r0/{name[:3]}/{name[3:5]}_g0/{name}.bin"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        made = os.open(path + "_1.tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | direct, 0o644)
        os.write(made, data)
        os.close(made)
        os.replace(path + "_1.tmp", path)
    except FileNotFoundError:
        failed += 1
    print(name, flush=True)
print("end", n, failed, flush=True)
"""
"""Writes as vLLM does: a temporary file in a folder of its own, renamed. With a share, in bytes, it writes
so much after the cleaner has woken up again, at most twenty times a second: a machine that gives the cleaner
little time has a slow engine."""


@dataclass
class Load:
    """Figures of one run under load."""

    before: int
    peak: int = 0
    blocks: int = 0
    failed: int = 0
    hits: int = 0
    misses: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Reader(threading.Thread):
    """Reads blocks among the last ones written, as an engine does: a block that is gone is a miss."""

    def __init__(self, folder: Path, size: int, load: Load) -> None:
        super().__init__(daemon=True)
        self.names: deque[str] = deque(maxlen=1 << 15)
        self.done = threading.Event()
        self._folder, self._size, self._load = folder, size, load

    def run(self) -> None:
        """Read until the end."""
        random = Random(1)
        while not self.done.wait(0.002):
            if not self.names:
                continue
            name = self.names[random.randrange(len(self.names))]
            path = self._folder / "m_r0" / name[:3] / f"{name[3:5]}_g0" / f"{name}.bin"
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                self._load.misses += 1
            except OSError as error:
                self._load.errors.append(str(error))
            else:
                self._load.hits += 1
                if len(data) != self._size:
                    self._load.errors.append(f"{name} has {len(data)} bytes")


def under_load(
    folder: Path,
    limit: int,
    size: int,
    *,
    seconds: float = 0,
    times: float = 2,
    share: int = 0,
    direct: bool = False,
) -> Load:
    """Fill a folder to 80 % of its limit, then write and read while the cleaner runs."""
    for number in range(limit * 8 // 10 // (size + 4 * KIB)):  # each with a folder of its own
        block(folder, f"{number:04x}0", number, size)
    load = Load(on_disk(folder))
    command = [sys.executable, "-m", "kvist_epp.sidecars.disk_cleaner", str(folder), "--limit", str(limit)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as cleaning:
        assert cleaning.stderr is not None
        assert "keeps" in cleaning.stderr.readline()
        says = threading.Thread(target=sys.stdout.writelines, args=(cleaning.stderr,))
        says.start()
        words = [
            str(folder),
            str(seconds),
            *map(str, (size, int(times * limit), cleaning.pid, share, int(direct))),
        ]
        arguments = [sys.executable, "-c", WRITER, *words]
        reader, begun = Reader(folder, size, load), time.monotonic()
        reader.start()
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
            follower = threading.Thread(target=_follow, args=(writer, reader, load))
            follower.start()
            while writer.poll() is None:
                load.peak = max(load.peak, on_disk_now(folder))
                time.sleep(0.02)
            follower.join()
        load.seconds = time.monotonic() - begun
        reader.done.set()
        reader.join()
        assert cleaning.poll() is None
        cleaning.terminate()
        says.join()
    written = load.blocks * size
    print(  # noqa: T201 - the figures of a long run
        f"{load.blocks} blocks of {size >> 10} KiB in {load.seconds:.0f} s, {written / limit:.1f} times the "
        f"limit of {limit >> 20} MiB ({written / limit / load.seconds:.0%} of it each second, "
        f"{written / load.seconds / (1 << 20):.0f} MiB/s); peak {load.peak / limit:.1%}; failed writes "
        f"{load.failed}; reads: {load.hits} hits, {load.misses} misses, {len(load.errors)} errors"
    )
    return load


def _follow(writer: "subprocess.Popen[str]", reader: Reader, load: Load) -> None:
    assert writer.stdout is not None
    for line in writer.stdout:
        words = line.split()
        if words[0] == "end":
            load.blocks, load.failed = int(words[1]), int(words[2])
        else:
            reader.names.append(words[0])


def test_the_folder_stays_below_its_limit_under_load(tmp_path: Path) -> None:
    """A folder that is 80 % full and gets three times its limit, 2 % for each time that the cleaner has run,
    never exceeds the limit, and neither reads nor writes fail."""
    limit, size = 32 << 20, 32 * KIB
    load = under_load(tmp_path, limit, size, times=3, share=limit // 50)
    assert load.blocks * size >= 3 * limit
    assert load.peak <= limit
    assert load.errors == []
    assert load.failed <= load.blocks // 1000


@pytest.mark.skipif("KVIST_DISK_SECONDS" not in os.environ, reason="a long run: make bench-disk")
def test_ten_minutes_of_overflow_at_full_speed(tmp_path: Path) -> None:
    """An engine that writes as fast as the disk takes it (O_DIRECT, as vLLM does) for the time in
    KVIST_DISK_SECONDS never brings the folder above its limit, and neither reads nor writes fail."""
    limit, size = 4 << 30, 1 << 20
    load = under_load(tmp_path, limit, size, seconds=float(os.environ["KVIST_DISK_SECONDS"]), direct=True)
    assert load.peak <= limit
    assert load.errors == []
    assert load.failed <= load.blocks // 1000


def on_disk_now(folder: Path) -> int:
    """Bytes on disk below a folder whose files may vanish meanwhile."""
    total = 0
    for at, _, names in os.walk(folder):
        for name in (".", *names):
            try:
                total += Path(at, name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def test_the_program_ends_with_sigterm(tmp_path: Path) -> None:
    """The container's process says what it does and ends at once when the pod ends."""
    command = [
        sys.executable,
        "-m",
        "kvist_epp.sidecars.disk_cleaner",
        str(tmp_path),
        "--limit",
        str(1 << 30),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "between 768.0 MiB and 870.4 MiB" in process.stderr.readline()
        process.terminate()
        assert process.wait(timeout=10) == 0


@pytest.mark.parametrize("words", [["--low", "90"], ["--limit", "0"], ["--high", "100"]])
def test_contradicting_bounds_are_refused(tmp_path: Path, words: list[str]) -> None:
    """The low watermark is below the high one, and both are below the limit."""
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "--limit", "1000", *words])
    assert ended.value.code == 2
