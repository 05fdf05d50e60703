"""`python -m jaxmarl_llm COMMAND ...`, as the installed command `jaxmarl-llm`."""

from jaxmarl_llm.cli.main import main

main()
