"""What to use instead of the names of fastNLP 1.0 that this adapter does not provide (see `cadenza.compat.absent`)."""

from __future__ import annotations

from collections.abc import Mapping

ORIGINAL = "fastNLP"
GUIDE = "docs/guides/from-fastnlp.md"

ABSENT: Mapping[str, Mapping[str, str]] = {
    "io": {"*": "Read the files with `datasets` and pass them to `cadenza.compat.fastnlp.DataSet`."},
}
