"""A run of tiny byte-level models, as `cli.trained_run.open_run` returns it."""

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
}


def tiny_run(env, recipe="magrpo", **changes):
    """Configuration, recipe and first state.

    env: name of the environment. recipe: name of the recipe. changes: keys of the configuration.
    """
    import importlib

    from jaxmarl_llm.config import from_dict

    made = {
        "env": {"name": env, "workers": 0}, "reward": {"accuracy": 1.0}, "sft": {"steps": 0}, "steps": 1,
        "team": {"max_new_tokens": 5, "backbone": SHAPE}, "batch": 1,
    }  # fmt: skip
    module = importlib.import_module(f"jaxmarl_llm.recipes.{recipe}")
    cfg = from_dict(module.Config, {**made, **changes})
    ready = module.make(cfg)
    return cfg, ready, ready.init(0)
