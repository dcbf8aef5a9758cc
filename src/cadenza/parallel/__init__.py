"""Many ranks: meshes, replica groups, folders of torch's distributed checkpoint (DCP) and behind URLs, SLURM jobs."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.parallel.dcp import export_dcp as export_dcp
    from cadenza.parallel.dcp import load_optimizer as load_optimizer
    from cadenza.parallel.driver import Parallel as Parallel
    from cadenza.parallel.mesh import Mesh as Mesh
    from cadenza.parallel.pipeline import Pipeline as Pipeline
    from cadenza.parallel.replica_groups import ReplicaGroups as ReplicaGroups

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)
