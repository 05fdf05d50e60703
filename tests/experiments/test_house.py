"""The counts of a checkout, on a small one that is counted by hand."""

from experiments.studies import house


def test_counts_of_a_small_checkout(tmp_path):
    long = "def long():\n" + "    x = 0\n" * 80
    nested = "def f():\n    import jaxmarl_llm.early\n    from jaxmarl_llm import early\n"
    files = {
        "jaxmarl_llm/__init__.py": "from jaxmarl_llm.late import part\n",  # a face: no room, no arrow
        "jaxmarl_llm/early.py": long,
        "jaxmarl_llm/late/__init__.py": "",
        "jaxmarl_llm/late/part.py": f"import os\n{nested}",
        "jaxmarl_llm/late/other.py": "from jaxmarl_llm.late import part\nfrom jaxmarl_llm.kernels.k import g\n",
        "jaxmarl_llm/kernels/k.py": "def counted_once():\n    pass\n",
        "kernels/k.py": "class K:\n    def g(self):\n        pass\n" + "\n" * 400,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(house.counts(tmp_path).values()) == [
        "2",
        "3, 2",  # early, late, kernels; late to early and to kernels
        "1 of 3",
        "`long` 81, `f` 3, `g` 2",
        "`K` 3",
        "1 of 6 (at most 403)",
    ]
