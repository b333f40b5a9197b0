"""Checks of a configuration: a value that nothing reads is an error, never ignored."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import hydra
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

SECTIONS = (
    "paths",
    "data",
    "grid",
    "mesh",
    "model",
    "trainer",
    "optim",
    "callbacks",
    "logger",
    "name",
    "resume",
    "seed",
)


class ConfigError(ValueError):
    """A configuration that cannot be used. One line naming the setting and what there is instead."""


def refuse_unread(config: DictConfig) -> None:
    """``ConfigError`` for a section that nothing reads, or a key of ``grid`` or ``optim`` that nothing reads."""
    _refuse("", config, SECTIONS)
    _refuse("grid.", config.grid, ("data", "latent"))
    _refuse("grid.latent.", config.grid.latent, ("kind", "nlat", "nlon"))
    _refuse("optim.", config.optim, ("optimizer", "warmup", "objective"))


def arguments(section: DictConfig, name: str, reader: Callable, *, beside: tuple[str, ...] = ()) -> dict[str, Any]:
    """A section as plain dicts, lists, strings and numbers that are arguments of ``reader``.

    ``beside`` names settings of the section that something else reads.
    """
    container = OmegaConf.to_container(section, resolve=True)
    assert isinstance(container, dict)
    _refuse(f"{name}.", container, (*inspect.signature(reader).parameters, *beside))
    return {str(key): value for key, value in container.items()}


def build(section: DictConfig, name: str, **further: Any) -> Any:
    """The object that a section with ``_target_`` describes; ``ConfigError`` where it cannot be made."""
    try:
        return hydra.utils.instantiate(section, **further)
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise ConfigError(f"{name}: {type(cause).__name__}: {cause}") from error


def _refuse(prefix: str, given: Iterable, read: tuple[str, ...]) -> None:
    unread = [f"{prefix}{key}" for key in given if key not in read]
    if unread:
        raise ConfigError(f"nothing reads the setting {', '.join(unread)}; there are {', '.join(read)}")
