"""``fastNLP.core.utils.cache_results``: keep the result of a slow function in a file."""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ParamSpec, TypeVar

from cadenza.compat.fastnlp.core.log.logger import logger
from cadenza.status.reprs import signature_of

__all__ = ["cache_results"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_OWN = ("_cache_fp", "_hash_param", "_refresh", "_verbose", "_check_hash")


def cache_results(
    _cache_fp: str | None,
    _hash_param: bool = True,
    _refresh: bool = False,
    _verbose: int = 1,
    _check_hash: bool = True,
) -> Callable[[Callable[Arguments, Result]], Callable[..., Result]]:
    """Return a decorator: the function runs once, and later calls read its result from a file.

    Each call also takes these five arguments by name, instead of those of the decorator. The file is a pickle: read only files
    that you trust. Several processes may write it at the same time.

    Args:
        _cache_fp: The file; None: no cache.
        _hash_param: Put a hash of the arguments in front of the name of the file, so that other arguments have another file.
        _refresh: Run the function, and replace the file.
        _verbose: 1 logs when the result comes from a file.
        _check_hash: Warn if the function, or one that it calls, has another source text than when the file was written.

    Raises:
        RuntimeError: The function has one of these arguments itself, `_cache_fp` is a folder, or the result is None.

    .. code-block::

        @cache_results("caches/train.pkl")
        def process(path):
            ...
    """
    defaults = dict(zip(_OWN, (_cache_fp, _hash_param, _refresh, _verbose, _check_hash), strict=True))

    def decorated(function: Callable[Arguments, Result]) -> Callable[..., Result]:
        signature = signature_of(function)
        if taken := signature.parameters.keys() & set(_OWN):
            raise RuntimeError(f"{function.__qualname__} has the arguments {sorted(taken)} of cache_results. Rename them.")

        @wraps(function)
        def cached(*args: Any, **kwargs: Any) -> Result:
            own = {name: kwargs.pop(name, value) for name, value in defaults.items()}
            path = _path(own, signature, args, kwargs)
            if path is not None and path.exists() and not own["_refresh"]:
                found: Result = _read(path, function, own)
                return found
            result = function(*args, **kwargs)
            if path is not None:
                _write(path, result, function)
            return result

        return cached

    return decorated


def cal_fn_hash_code(fn: Callable[..., Any] | None = None, fn_kwargs: Mapping[str, object] | None = None) -> str:
    """Return a hash of the source text of a function and of those that it calls, and of the texts of arguments."""
    digest = hashlib.sha1(usedforsecurity=False)
    for source in _sources(fn) if fn is not None else ():
        digest.update(source.encode())
    for name, value in sorted((fn_kwargs or {}).items()):
        digest.update(f"{name}{value}".encode())
    return digest.hexdigest()


def _path(own: Mapping[str, Any], signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Path | None:
    given = own["_cache_fp"]
    if given is None:
        return None
    path = Path(given).absolute()
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    if own["_hash_param"] and bound.arguments:
        path = path.with_name(f"{cal_fn_hash_code(None, _texts(bound.arguments))[:8]}_{path.name}")
    if path.is_dir():
        raise RuntimeError(f"_cache_fp must be a file; {path} is a folder")
    return path


def _texts(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return arguments as texts; keyword arguments in the order of their names."""
    return {
        name: str(dict(sorted(value.items(), key=str)) if type(value) is dict else value) for name, value in arguments.items()
    }


def _read(path: Path, function: Callable[..., Any], own: Mapping[str, Any]) -> Any:
    kept = pickle.loads(path.read_bytes())
    if own["_verbose"] == 1:
        logger.info("Read cache from %s (saved on %s).", path, kept["save_time"])
    if own["_check_hash"] and kept["hash"] != cal_fn_hash_code(function):
        logger.warning(
            "The source of %s is different from that of the cached result (saved on %s). Pass _refresh=True to run it again.",
            function.__qualname__,
            kept["save_time"],
        )
    return kept["results"]


def _write(path: Path, result: object, function: Callable[..., Any]) -> None:
    if result is None:
        raise RuntimeError(f"{function.__qualname__} returned None, which cannot be cached. Return a value.")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    content = {"results": result, "hash": cal_fn_hash_code(function), "save_time": datetime.now()}
    unfinished.write_bytes(pickle.dumps(content))
    unfinished.replace(path)
    logger.info("Save cache to %s.", path)


def _sources(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the source text of a function, without this decorator, and those of the functions and classes that it uses."""
    inner = inspect.unwrap(function)
    names = sorted(set(_names(inner.__code__)))
    cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
    known = {**inner.__globals__, **{name: cell.cell_contents for name, cell in cells if _is_set(cell)}}
    for name in names:
        if name in known and known[name] is not cache_results:
            yield from _sources_of(known[name], names)
    yield re.sub(r"^@.*cache_results\(.*\)\n", "", textwrap.dedent(_source(inner)), flags=re.MULTILINE)


def _sources_of(value: object, names: Iterable[str]) -> Iterator[str]:
    if isinstance(value, ModuleType):
        for part in (getattr(value, name, None) for name in names):
            if inspect.isfunction(part) or inspect.isclass(part):
                yield _source(part)
    elif inspect.isfunction(value) or inspect.ismethod(value) or inspect.isclass(value):
        yield _source(value)
    else:
        yield _source(type(value))


def _source(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):  # not written in Python, or in no file
        return ""


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function uses, also in the functions inside of it."""
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_set(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # the name is assigned later
        return False
    return True
