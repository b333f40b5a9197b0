"""Every command of the documentation runs, in the order of its page, and prints the lines that the page shows."""

import argparse
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from training.commands import ROOT, sfno_dist, train

from sfno_dist.cli import _parser

DOCS = ROOT / "docs"
PAGES = ["data", "grid_and_mesh", "resuming", "forecasts"]
# Of the runs of train.py on these pages, so that they take seconds: what they learn is not looked at.
LIMITS = [f"+trainer.limit_{split}_batches=1" for split in ("train", "val", "test")] + ["trainer.accelerator=cpu"]
BLOCK = re.compile(r"(<!-- not run here: [^>]*-->\n)?```(bash)?\n(.*?)```", flags=re.S)


def run_page(name: str, folder: Path) -> None:
    """Runs its bash blocks; other blocks are lines of what the command before them prints."""
    printed = ""
    for marked, language, text in BLOCK.findall((DOCS / f"{name}.md").read_text()):
        if language and not marked:
            printed = "".join(command(line, folder) for line in text.strip().replace("\\\n", " ").splitlines())
        elif not language:
            assert all(line in printed for line in text.strip().splitlines()), (text, printed)


def command(line: str, folder: Path) -> str:
    words = shlex.split(line)
    if words[:2] == ["python", "train.py"]:
        done = train(folder, *words[2:], *LIMITS)
    else:
        assert words[0] == "sfno-dist", line
        done = sfno_dist(folder, *words[1:], SFNO_DIST_ROOT=str(ROOT))
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    (folder / "data").symlink_to(ROOT / "data")
    run_page("index", folder)
    return folder


@pytest.mark.slow
def test_the_first_run_leaves_what_the_page_says(first):
    names = [".hydra", "checkpoints/best.ckpt", "train.log", "csv/metrics.csv", "tensorboard", "curves.png"]
    assert all((first / "runs" / "first" / name).exists() for name in names)
    assert all((first / name).is_file() for name in ("forecast.nc", "forecast.png", "scores.html"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(first, tmp_path, page):
    (tmp_path / "data").symlink_to(ROOT / "data")
    if page == "forecasts":
        shutil.copytree(first / "runs", tmp_path / "runs")
    run_page(page, tmp_path)


def test_every_page_is_in_the_contents_and_every_name_in_the_reference_exists():
    contents = (ROOT / "mkdocs.yml").read_text()
    pages = {path.name for path in DOCS.glob("*.md")}
    assert pages == set(re.findall(r"(\w+\.md)$", contents, flags=re.M))
    for name in re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text(), flags=re.M):
        module, _, thing = name.rpartition(".")
        assert hasattr(__import__(module, fromlist=[thing]), thing), name


def test_every_command_is_in_the_reference():
    (commands,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    told = re.findall(r"^\| `sfno-dist ([\w-]+)", (DOCS / "reference.md").read_text(), flags=re.M)
    assert told == list(commands.choices)


def test_links_between_pages_lead_somewhere():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            made = target.startswith("pictures/")  # by docs/pictures.py as the site is built
            assert target.startswith("http") or made or (DOCS / target).is_file(), (page.name, target)


def test_pictures_are_made_from_the_code(tmp_path):
    path = os.fspath(DOCS / "pictures.py")
    namespace: dict = {"__name__": "pictures", "__file__": path}
    exec(compile(Path(path).read_text(), path, "exec"), namespace)
    namespace["make"](tmp_path / "pictures")
    names = set(re.findall(r"pictures/(\w+\.png)", (DOCS / "how_it_works.md").read_text()))
    assert names == {file.name for file in (tmp_path / "pictures").iterdir()}
