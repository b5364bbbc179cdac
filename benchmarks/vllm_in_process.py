"""vLLM's engine without HTTP: tokens/s of its `LLM` class, for the Python that has vLLM.

Called by `benchmarks.vllm` with the requests that it sends to the server. `LLM` takes the whole
batch at once and answers when all of it is done. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any


def main() -> None:
    """The command line: one JSON object with the model's folder, sizes and `LLM`'s arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("settings", type=json.loads)
    settings: dict[str, Any] = parser.parse_args().settings
    from vllm import LLM, SamplingParams

    engine = LLM(model=settings["folder"], skip_tokenizer_init=True, **settings["engine"])
    figures, serial = {}, 0
    for many in settings["concurrency"]:
        rates = []
        for round_ in range(settings["rounds"] + 1):
            prompts = [
                {"prompt_token_ids": ids_of(serial + n, settings["prompt"], settings["vocabulary"])}
                for n in range(many)
            ]
            sampling = [
                SamplingParams(
                    max_tokens=settings["completion"],
                    ignore_eos=True,
                    logprobs=0,
                    detokenize=False,
                    seed=serial + n,
                )
                for n in range(many)
            ]
            serial += many
            begin = time.perf_counter()
            answers = engine.generate(prompts, sampling, use_tqdm=False)
            tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
            if round_:  # the first warms up
                rates.append(tokens / (time.perf_counter() - begin))
        figures[f"tokens_s_{many}_in_process"] = round(statistics.median(rates))
    print(json.dumps(figures))


def ids_of(request: int, length: int, vocabulary: int) -> list[int]:
    """The prompt of a request: different for each, so that no prefix is shared."""
    return [10 + (request * 7919 + i * 104729) % (vocabulary - 20) for i in range(length)]


if __name__ == "__main__":
    main()
