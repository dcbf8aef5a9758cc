"""Past steps of a run: repeat them, and ask what other callbacks would have decided."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.timetravel.second_pass import RepeatedStep as RepeatedStep
    from cadenza.timetravel.second_pass import replay_capsule as replay_capsule
    from cadenza.timetravel.step_replay import Difference as Difference
    from cadenza.timetravel.step_replay import Replay as Replay
    from cadenza.timetravel.step_replay import replay_step as replay_step
    from cadenza.timetravel.what_if_answer import Answer as Answer
    from cadenza.timetravel.what_if_answer import Answers as Answers
    from cadenza.timetravel.what_if_answer import what_if as what_if

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)
