"""Language models as pure functions: the decoder, adapters, value heads, tokenizers, and weights of Hugging Face.

A tabular policy for exact tests and a policy that follows a script are here too.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.models import decoder, hf_weights, scripted, tabular
    from jaxmarl_llm.models.batch_invariant import invariant
    from jaxmarl_llm.models.hf_config import read_hf_config
    from jaxmarl_llm.models.lora import init_lora, merge_lora
    from jaxmarl_llm.models.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer
    from jaxmarl_llm.models.value_head import head_value, init_head
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "ByteTokenizer": f"{__name__}.tokenizer",
            "HFTokenizer": f"{__name__}.tokenizer",
            "Tokenizer": f"{__name__}.tokenizer",
            "head_value": f"{__name__}.value_head",
            "init_head": f"{__name__}.value_head",
            "init_lora": f"{__name__}.lora",
            "invariant": f"{__name__}.batch_invariant",
            "merge_lora": f"{__name__}.lora",
            "read_hf_config": f"{__name__}.hf_config",
        },
        modules={
            "decoder": f"{__name__}.decoder",
            "hf_weights": f"{__name__}.hf_weights",
            "scripted": f"{__name__}.scripted",
            "tabular": f"{__name__}.tabular",
        },
    )

__all__ = [
    "ByteTokenizer",
    "HFTokenizer",
    "Tokenizer",
    "decoder",
    "head_value",
    "hf_weights",
    "init_head",
    "init_lora",
    "invariant",
    "merge_lora",
    "read_hf_config",
    "scripted",
    "tabular",
]
