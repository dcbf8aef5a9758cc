"""For tests of callbacks: complete runs in milliseconds, evaluations of given results, requirements on every callback."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.testing.contracts import check_adapter as check_adapter
    from cadenza.testing.contracts import check_callback as check_callback
    from cadenza.testing.launcher import launch as launch
    from cadenza.testing.proof import prove_resume as prove_resume
    from cadenza.testing.sinks import check_sink as check_sink
    from cadenza.testing.tiny import Recorder as Recorder
    from cadenza.testing.tiny import Seen as Seen
    from cadenza.testing.tiny import simulate as simulate
    from cadenza.testing.tiny import tiny_loader as tiny_loader
    from cadenza.testing.tiny import tiny_model as tiny_model
    from cadenza.testing.tiny import tiny_run as tiny_run
    from cadenza.testing.tiny import tiny_trainer as tiny_trainer

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)
