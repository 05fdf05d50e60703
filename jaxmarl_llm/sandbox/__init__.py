"""Sandbox for generated programs: jails, system-call filters, and the process in which a program runs.

Tests run outside the jail, only plain data crosses its border, and a verdict is an enumeration.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.sandbox import judge
    from jaxmarl_llm.sandbox.judge import Limits, Report, SandboxUnavailable, Test, Verdict, describe, probe
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "Limits": f"{__name__}.judge",
            "Report": f"{__name__}.judge",
            "SandboxUnavailable": f"{__name__}.judge",
            "Test": f"{__name__}.judge",
            "Verdict": f"{__name__}.judge",
            "describe": f"{__name__}.judge",
            "probe": f"{__name__}.judge",
        },
        modules={"judge": f"{__name__}.judge"},
    )

__all__ = ["Limits", "Report", "SandboxUnavailable", "Test", "Verdict", "describe", "judge", "probe"]
