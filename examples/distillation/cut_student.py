"""Makes a smaller student from a model: some of its decoder layers, evenly spaced.

python examples/distillation/cut_student.py --model FOLDER_OR_HUB_NAME --layers 20
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def cut(model: Any, count: int) -> None:
    """Keeps `count` of the model's layers, including the first and the last."""
    layers = model.model.layers
    if not 2 <= count <= len(layers):
        raise SystemExit(f"--layers {count}: the model has {len(layers)}, and at least 2 must stay")
    places = [round(i * (len(layers) - 1) / (count - 1)) for i in range(count)]
    model.model.layers = torch.nn.ModuleList(layers[place] for place in places)
    model.config.num_hidden_layers = count
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[place] for place in places]


def main() -> None:
    parser = argparse.ArgumentParser(description="A smaller student, cut out of a model.")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("runs/distillation/cut"))
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    whole = model.num_parameters()
    cut(model, args.layers)
    model.save_pretrained(args.output)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.output)
    print(f"{args.output}: {model.num_parameters():,} of {whole:,} parameters")


if __name__ == "__main__":
    main()
