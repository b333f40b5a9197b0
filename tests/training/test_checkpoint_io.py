"""Checkpoints on the disk: whole or not there, never silently wrong, and the one before kept until they are."""

import os
import resource
import signal
import zipfile

import pytest
import torch
from training.commands import CONTEXT

from sfno_dist import ProcessMesh
from sfno_dist.training import checkpoint_io
from sfno_dist.training.checkpoint import CheckpointError
from sfno_dist.training.checkpoint_io import VerifiedCheckpointIO, damage
from sfno_dist.training.resume import find_checkpoint

IO, ALONE = VerifiedCheckpointIO(), ProcessMesh()


def save(folder, number):
    IO.save_checkpoint({"number": number, "weights": torch.full((50_000,), float(number))}, folder / "last.ckpt")


def number(path):
    return IO.load_checkpoint(path)["number"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_last_and_the_one_before_are_kept(tmp_path):
    folder = tmp_path / "runs" / "checkpoints"
    for n in range(4):
        save(folder, n)
    assert names(folder) == ["last.ckpt", "previous.ckpt"]
    assert [number(folder / name) for name in names(folder)] == [3, 2]
    IO.save_checkpoint({"number": 9}, folder / "best.ckpt")
    IO.save_checkpoint({"number": 10}, folder / "best.ckpt")
    assert names(folder) == ["best.ckpt", "last.ckpt", "previous.ckpt"] and number(folder / "best.ckpt") == 10


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_one_wrong_bit_is_found_where_pytorch_reads_over_it(tmp_path, at):
    save(tmp_path, 1)
    whole = bytearray((tmp_path / "last.ckpt").read_bytes())
    whole[int(at * len(whole))] ^= 1
    (tmp_path / "last.ckpt").write_bytes(whole)
    torch.load(tmp_path / "last.ckpt")
    assert "wrong checksum of" in damage(tmp_path / "last.ckpt")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_shortened_file_is_found(tmp_path, share):
    save(tmp_path, 1)
    assert damage(tmp_path / "last.ckpt") is None
    whole = (tmp_path / "last.ckpt").read_bytes()
    (tmp_path / "last.ckpt").write_bytes(whole[: int(share * len(whole))])
    assert damage(tmp_path / "last.ckpt") == "truncated, or not a checkpoint"


@pytest.mark.parametrize("room", [0, 1000, 100_000, 200_000])  # of 200 kB and the archive's own
def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path, room):
    save(tmp_path, 1)
    save(tmp_path, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))  # Python ignores the signal, so writing is an error
    try:
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    last = tmp_path / "last.ckpt"
    expected = f"{last}: the checkpoint cannot be written (File too large); the one before is whole, {last}"
    assert str(caught.value) == expected
    assert [number(tmp_path / name) for name in names(tmp_path)] == [2, 1]


def test_the_first_checkpoint_in_a_place_without_room_or_right(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"\(Not a directory\); there is none before it$"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_what_the_disk_changed_never_gets_the_name(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def write_and_lose(checkpoint, path):
        torch.save(checkpoint, path)
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 16
        path.write_bytes(whole)

    monkeypatch.setattr(checkpoint_io, "_write", write_and_lose)
    with pytest.raises(CheckpointError, match="what was read back is not what was written: wrong checksum of"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["last.ckpt"] and number(tmp_path / "last.ckpt") == 1


def killed_at(folder, call):
    """Saves, and is killed as it calls a function of the system for the first time after the writing began."""

    def die(*arguments, **settings):
        os.kill(os.getpid(), signal.SIGKILL)

    module, name = call.split(".")
    setattr({"os": os, "zipfile": zipfile.ZipFile}[module], name, die)
    save(folder, 3)


@pytest.mark.parametrize(("call", "last"), [("os.fsync", 2), ("zipfile.testzip", 2), ("os.replace", 2), ("os.open", 3)])
def test_a_kill_at_any_part_of_the_writing_leaves_the_last_good_one(tmp_path, call, last):
    save(tmp_path, 1)
    save(tmp_path, 2)
    process = CONTEXT.Process(target=killed_at, args=(tmp_path, call))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert number(tmp_path / "last.ckpt") == last
    assert number(find_checkpoint(str(tmp_path / "last.ckpt"), tmp_path, ALONE)) == last
    assert len(names(tmp_path)) == (2 if call == "os.open" else 3)  # a part of one is left over
    save(tmp_path, 4)
    assert [number(tmp_path / name) for name in names(tmp_path)] == [4, last]
