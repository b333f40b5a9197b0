"""``sfno-dist doctor``: it tells what is, and what is wrong where something is."""

import fcntl
import importlib.metadata
import os
import re

import pytest
import torch
from training.commands import ROOT, sfno_dist

from sfno_dist import doctor
from sfno_dist.ops import compiled


def sections(text: str) -> dict[str, dict[str, str]]:
    """By title, the text after each name."""
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if not line.startswith("  "):
            title = line.partition(" in ")[0].partition(":")[0]
            found[title] = {}
        else:
            name, _, told = line.strip().partition("  " if "  " in line.strip() else " ")
            found[title][name] = told.strip()
    return found


def test_a_sound_installation(tmp_path):
    """In a process of its own, with a few variables set, as a user runs it."""
    variables = {"OMP_NUM_THREADS": "3", "SLURM_JOB_ID": "41", "SLURM_JWT": "secret", "MASTER_PORT": "29511"}
    assert ".venv/bin/sfno-dist doctor\n" in (ROOT / "README.md").read_text()
    done = sfno_dist(tmp_path, "doctor", **variables)
    assert done.returncode == 0, done.stderr
    told = sections(done.stdout)
    assert list(told)[:3] == ["versions", "kernels", "processor"] and list(told)[-1] == "self-test"
    assert told["versions"]["torch"] == importlib.metadata.version("torch")
    assert told["kernels"]["CPU"] == compiled.description()
    assert told["communication"]["gloo"] == "works in a group of one process"
    assert told["environment"]["OMP_NUM_THREADS"] == "3" and told["environment"]["MASTER_PORT"] == "29511"
    assert told["SLURM"] == {"SLURM_JOB_ID": "41"} and "secret" not in done.stdout
    assert told["files"]["netCDF"] == "written and read" and told["files"]["locks"].startswith("work")
    assert f"files in {tmp_path}" in done.stdout and not list(tmp_path.iterdir())
    assert len(re.findall(r"cpu, \w+: agrees within", done.stdout)) == 2


def test_kernels_that_compute_something_else_are_told(monkeypatch, capsys):
    """A result off by a ten-thousandth, a NaN, or a wrong gradient alone: doctor says so and ends with status 1."""
    forward, backward = compiled.forward, compiled.backward
    for change in (lambda y: y * 1.0001, lambda y: y * torch.nan):
        monkeypatch.setattr(compiled, "forward", lambda *call, change=change: (change((r := forward(*call))[0]), r[1]))
        text, passed = doctor.self_test()[0]
        assert "cpu, float32: DIFFERS" in text and not passed
    monkeypatch.setattr(compiled, "forward", forward)
    assert all(passed for _, passed in doctor.self_test())
    monkeypatch.setattr(compiled, "backward", lambda *call: (*backward(*call)[:2], -backward(*call)[2]))
    assert not doctor.self_test()[0][1]
    from sfno_dist import cli

    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code == 1 and "DIFFERS" in capsys.readouterr().out


def test_without_the_library_it_says_how_to_build_it(tmp_path):
    done = sfno_dist(tmp_path, "doctor", SFNO_DIST_LIBRARY=str(tmp_path / "absent.so"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "absent.so is not a file; unset it" in sections(done.stdout)["kernels"]["CPU"]
    assert "cpu, float32: FAILED" in done.stdout and "files in" in done.stdout


def test_a_file_system_without_locks_and_a_folder_that_is_not_there(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert "no: [Errno 37] No locks available" in doctor.report(tmp_path)[0]
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert "are granted twice" in doctor.report(tmp_path)[0]
    assert "does not exist" in sections(doctor.report(tmp_path / "absent")[0])["files"]["folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    tmp_path.chmod(0o500)
    assert "no: [Errno 13] Permission denied" in doctor.report(tmp_path)[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_gpus_are_named_and_their_kernels_tried():
    text, sound = doctor.report()
    assert torch.cuda.get_device_name(0) in text and "cuda, bfloat16: agrees" in text and sound
