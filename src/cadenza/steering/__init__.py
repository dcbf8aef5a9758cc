"""Watch, ask and steer a run from its directory: `read_run`, `Steering`, and the commands ``ask`` and ``tell``.

The questions read the files of the run, import no torch and change nothing.
"""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.steering.run_reader import RunReader as RunReader
    from cadenza.steering.run_reader import read_run as read_run
    from cadenza.steering.sending import tell as tell
    from cadenza.steering.steering import Steering as Steering

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)
