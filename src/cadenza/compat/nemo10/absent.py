"""What to use instead of the names of NeMo 0.10 that this adapter does not provide (see `cadenza.compat.absent`)."""

from __future__ import annotations

from collections.abc import Mapping

ORIGINAL = "nemo"
GUIDE = "docs/guides/from-nemo.md"

ABSENT: Mapping[str, Mapping[str, str]] = {
    "core.callbacks": {
        "ModuleSaverCallback": "Use `cadenza.callbacks.Checkpoint` with `weights_only=True`.",
        "UnfreezeCallback": "Use `cadenza.callbacks.Freeze` with `until=`.",
        "ValueSetterCallback": "Use `cadenza.callbacks.ScheduleValue`.",
    },
    "collections.asr": {"*": "Write your model as a `torch.nn.Module`; use torchaudio for audio."},
}
