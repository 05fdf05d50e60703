"""Devices and processes: meshes, sharding rules, the connections between processes, and deadlines.

Without a mesh, every function here returns its argument unchanged.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.distributed.deadlines import Deadlines
    from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh, open_mesh, place_state, use_mesh
    from jaxmarl_llm.distributed.processes import distributed_run
    from jaxmarl_llm.distributed.rendezvous import ClusterSpec, find_cluster
    from jaxmarl_llm.distributed.sharding import param_specs, shardings, to_host
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "ClusterSpec": f"{__name__}.rendezvous",
            "Deadlines": f"{__name__}.deadlines",
            "MeshConfig": f"{__name__}.meshes",
            "distributed_run": f"{__name__}.processes",
            "find_cluster": f"{__name__}.rendezvous",
            "make_mesh": f"{__name__}.meshes",
            "open_mesh": f"{__name__}.meshes",
            "param_specs": f"{__name__}.sharding",
            "place_state": f"{__name__}.meshes",
            "shardings": f"{__name__}.sharding",
            "to_host": f"{__name__}.sharding",
            "use_mesh": f"{__name__}.meshes",
        },
        modules={},
    )

__all__ = [
    "ClusterSpec",
    "Deadlines",
    "MeshConfig",
    "distributed_run",
    "find_cluster",
    "make_mesh",
    "open_mesh",
    "param_specs",
    "place_state",
    "shardings",
    "to_host",
    "use_mesh",
]
