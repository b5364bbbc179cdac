"""Folders with random weights in the shape of Qwen2.5, for benchmarks without a download.

python -m benchmarks.random_models 7b TOKENIZER FOLDER
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.decode import SHAPES
from ludic.inference import load_tokenizer


def random_folder(shape: str, tokenizer: str) -> str:
    """Returns a folder with random bfloat16 weights and the tokenizer of the folder `tokenizer`.
    One that an earlier command made is used again; a new one is made by a process of its own, so
    that nothing of it stays on the GPU."""
    name = Path(tokenizer).resolve().name
    folder = Path(tempfile.gettempdir()) / f"ludic-random-{shape}-{name}"
    if not (folder / "tokenizer_config.json").is_file():
        command = [sys.executable, "-m", "benchmarks.random_models", shape, tokenizer, str(folder)]
        subprocess.run(command, check=True)
    return str(folder)


def make_folder(shape: str, tokenizer_folder: str, folder: str) -> None:
    """Writes the model, then its tokenizer, in which every id of the vocabulary is a token."""
    width, inner, layers, heads, kv_heads, tied = SHAPES[shape]
    tokenizer = load_tokenizer(tokenizer_folder)
    vocabulary = -(-len(tokenizer) // 128) * 128
    tokenizer.add_tokens([f"<unused {n}>" for n in range(len(tokenizer), vocabulary)])
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make_folder(*sys.argv[1:])
