"""GRPO with clip on GSM8K: a reward for the right number, and a small one for the format.

    python examples/gsm8k/train_gsm8k.py --tiny               # eight rows, a tiny model, on the CPU
    python examples/gsm8k/train_gsm8k.py                      # the data from the hub, on a GPU
    python examples/gsm8k/train_gsm8k.py --data FOLDER        # with train.jsonl and test.jsonl
    python examples/gsm8k/train_gsm8k.py --model Qwen/Qwen2.5-7B-Instruct --port 8000

The run is `train.toml` or `tiny.toml` in this folder; options override it, and any other setting
may follow: training.steps=50. With a port, vLLM samples and gets the new
weights after every update; start it with `ludic serve --model … --port 8000`.
"""

import argparse
import json
from pathlib import Path

from ludic import Run

HERE = Path(__file__).resolve().parent


def overrides(args: argparse.Namespace) -> list[str]:
    """The options as settings of the run file."""
    found: dict[str, object] = {}
    if args.model:
        found["model.name"] = args.model
    if args.data:
        found["env.kwargs.path"] = str((args.data / "train.jsonl").resolve())
        found["eval.env.kwargs.path"] = str((args.data / "test.jsonl").resolve())
    if args.port:
        found["inference.backend"] = "vllm"
        found["inference.servers"] = [f"http://{args.host}:{args.port}"]
    return [*(f"{key}={json.dumps(value)}" for key, value in found.items()), *args.settings]


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on GSM8K.")
    parser.add_argument("settings", nargs="*", help="other settings, as section.key=value")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and eight rows")
    parser.add_argument("--model", help="a folder, a run, or a name on the hub")
    parser.add_argument("--data", type=Path, help="a folder with the JSONL files; default: the hub")
    parser.add_argument("--host", default="127.0.0.1", help="of a vLLM server")
    parser.add_argument("--port", type=int, help="of a vLLM server; default: sample here")
    parser.add_argument("--out", type=Path, help="the run folder to make")
    args = parser.parse_args()
    if args.tiny and args.data:
        parser.error("--tiny has its own rows: leave --data out")
    file = HERE / ("tiny.toml" if args.tiny else "train.toml")
    Run.from_file(file, overrides(args), out=args.out).go()


if __name__ == "__main__":
    main()
