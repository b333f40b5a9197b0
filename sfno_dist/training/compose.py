"""The configuration of ``train.py`` in other commands, from the same overrides."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sfno_dist.training.config import ConfigError


def compose_training(
    overrides: Sequence[str], decided: Mapping[str, Any] | None = None, *, may_lack: Sequence[str] = ()
) -> DictConfig:
    """conf/train.yaml with ``overrides``, resolved; ``decided`` are settings that the command sets itself.

    ``may_lack`` names settings that train.py must be given, and that are None where they are not given.
    ``ConfigError``, one line, for overrides that train.py would refuse.
    """
    root = _root()
    os.environ["SFNO_DIST_ROOT"] = str(root)
    try:
        with initialize_config_dir(str(root / "conf"), version_base="1.3"):
            config = compose("train", list(overrides))
        lacking = {key: None for key in may_lack if OmegaConf.is_missing(*_parent(config, key))}
        for key, value in {**lacking, **(decided or {})}.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        return DictConfig(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(" ".join(str(error).split())) from error


def _parent(config: DictConfig, key: str) -> tuple[DictConfig, str]:
    section, _, name = key.rpartition(".")
    return OmegaConf.select(config, section), name


def _root() -> Path:
    """The folder of train.py and conf/: as the environment says, or where the command was given, or the source tree."""
    named = os.environ.get("SFNO_DIST_ROOT")
    folders = [Path(named)] if named else [Path.cwd(), Path(__file__).parents[2]]
    for folder in folders:
        if (folder / "conf" / "train.yaml").is_file():
            return folder
    looked = " or ".join(str(folder / "conf") for folder in folders)
    raise ConfigError(f"no train.yaml in {looked}; run this in the folder of train.py or set SFNO_DIST_ROOT to it")
