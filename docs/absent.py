"""Tables of the names that adapters do not provide, for `docs/generate.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cadenza.compat.absent import Entry, entries, entries_in, facts_of


def absent(adapter: str) -> str:
    """Return the table of one adapter."""
    return _table(facts_of(adapter)["original"], {"": entries(adapter)})


def absent_fastnlp(*, of_0_5: bool) -> str:
    """Return the table of fastNLP 1.0, or that of the names that fastNLP 1.0 removed."""
    return _table("fastNLP", {"": entries_in("fastnlp", "absent_of_0_5.toml" if of_0_5 else "absent.toml")})


def absent_nemo() -> str:
    """Return the table of both versions of NeMo. A name that one of them does not have either is marked with the other."""
    both = {"0.11": entries("nemo"), "0.10": entries("nemo10")}
    return _table("nemo", {one: [Entry(*entry[:2], _of_0_11(entry.advice)) for entry in both[one]] for one in both})


def _of_0_11(advice: str) -> str:
    return advice.replace("cadenza.compat.nemo10", "cadenza.compat.nemo")


def _table(original: str, versions: dict[str, Iterable[Entry]]) -> str:
    """Return one row for each advice, with all names that have it."""
    found: dict[Entry, list[str]] = {}
    for version, listed in versions.items():
        for entry in listed:
            found.setdefault(entry, []).append(version)
    by_advice: dict[str, dict[str, list[str]]] = {}
    for (module, name, advice), of in found.items():
        mark = f" ({of[0]})" if len(of) < len(versions) else ""
        path = ".".join(filter(None, (original, module)))
        by_advice.setdefault(advice, {}).setdefault(f"`{path}`", []).append(mark if name == "*" else f"`{name}`{mark}")
    rows = sorted((_names(modules), advice) for advice, modules in by_advice.items())
    return "\n".join(["| names | what to use |", "|---|---|", *(f"| {names} | {advice} |" for names, advice in rows)]) + "\n"


def _names(modules: dict[str, list[str]]) -> str:
    """Return the cell of names; a missing module comes with the names in it."""
    cells = []
    for path, names in sorted(modules.items()):
        marks = [name for name in names if not name.startswith("`")]
        inner = ", ".join(sorted({*names} - {*marks}))
        cells.append(f"{path}{marks[0]}{f' with {inner}' if inner else ''}" if marks else f"{path}: {inner}")
    return "<br>".join(cells)


def of_0_5(old: str, rows: Mapping[str, str]) -> str:
    """Return a table of what became of the parts of fastNLP 0.5."""
    lines = [f"| `{part}` | {new} |" for part, new in rows.items()]
    return "\n".join([f"| {old} | now |", "|---|---|", *lines]) + "\n"
