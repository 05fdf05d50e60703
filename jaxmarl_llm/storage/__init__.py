"""Files of a run on disk: checkpoints, data sets, and the working directory.

Every array has a checksum, which reading verifies.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.storage import dataset
    from jaxmarl_llm.storage.checkpoint import Checkpointer, shapes
    from jaxmarl_llm.storage.checksums import digests
    from jaxmarl_llm.storage.workdir import Workdir
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "Checkpointer": f"{__name__}.checkpoint",
            "Workdir": f"{__name__}.workdir",
            "digests": f"{__name__}.checksums",
            "shapes": f"{__name__}.checkpoint",
        },
        modules={"dataset": f"{__name__}.dataset"},
    )

__all__ = ["Checkpointer", "Workdir", "dataset", "digests", "shapes"]
