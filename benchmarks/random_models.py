"""Models of random weights in known shapes, for benchmarks without a download, and folders of them.

python -m benchmarks.random_models 7b TOKENIZER FOLDER
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from ludic.inference import load_tokenizer


class Shape(NamedTuple):
    """The sizes of a decoder; `tied` if its head has the weights of its embedding."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool = True


SHAPES = {
    "0.5b": Shape(896, 4864, 24, 14, 2),
    "1.5b": Shape(1536, 8960, 28, 12, 2),
    "7b": Shape(3584, 18944, 28, 28, 4, tied=False),
}
"""Those of Qwen2.5."""


def qwen2(shape: Shape, **others: Any) -> Qwen2Config:
    """A configuration in that shape, with a vocabulary and a context as Qwen2.5 has them unless
    `others` say so."""
    usual = {"vocab_size": 151_936 if shape.tied else 152_064, "max_position_embeddings": 32_768}
    return Qwen2Config(**_sizes(shape), **{**usual, **others})


def smollm2() -> LlamaConfig:
    """The configuration of SmolLM2-135M."""
    sizes = _sizes(Shape(576, 1536, 30, 9, 3))
    return LlamaConfig(**sizes, vocab_size=49_152, max_position_embeddings=8192)


def _sizes(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.tied,
    }


def random_weights(config: Any, device: str) -> Any:
    """A model in bfloat16."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def random_model(shape: str, rank: int) -> Any:
    """A model of one of `SHAPES`, or `135m`, on the GPU, with an adapter on every projection where
    `rank` is above 0."""
    model = random_weights(smollm2() if shape == "135m" else qwen2(SHAPES[shape]), "cuda")
    if not rank:
        return model
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    adapted = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    return adapted


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
    tokenizer = load_tokenizer(tokenizer_folder)
    vocabulary = -(-len(tokenizer) // 128) * 128
    tokenizer.add_tokens([f"<unused {n}>" for n in range(len(tokenizer), vocabulary)])
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = qwen2(SHAPES[shape], vocab_size=vocabulary, **ends)
    random_weights(config, "cuda" if torch.cuda.is_available() else "cpu").save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make_folder(*sys.argv[1:])
