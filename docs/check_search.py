"""`python docs/check_search.py FOLDER`: ask a built site's search what people ask, and print where it does not help.

Sphinx's own program answers (searchtools.js under node, with our scorer), so the order is that of the browser.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

# What a reader types -> the pages of which one is to stand among the first three.
QUESTIONS = {
    "QLoRA": ["finetune"],
    "chat jsonl": ["recipe"],
    "quantize a model": ["formats"],
    "LoRA": ["finetune", "adapters"],
    "larger than memory": ["finetune"],
    "which expert": ["telemetry"],
    "which token": ["telemetry"],
    "expert load": ["telemetry"],
    "auxiliary loss": ["gates"],
    "balance loss": ["gates", "tutorials/balance"],
    "load balancing": ["gates", "tutorials/balance"],
    "capacity factor": ["gates"],
    "drop tokens": ["gates"],
    "router": ["gates"],
    "export vllm": ["formats"],
    "gguf": ["formats"],
    "llama.cpp": ["formats"],
    "mixtral": ["formats", "transformers"],
    "FMoETransformerMLP": ["api/layers"],
    "fmoefy": ["fmoefy"],
    "upcycle": ["fmoefy", "tutorials/transformers_model"],
    "dense to moe": ["fmoefy", "tutorials/transformers_model"],
    "several gpus": ["several_processes"],
    "torchrun": ["several_processes", "tutorials/processes"],
    "expert parallelism": ["several_processes"],
    "fsdp": ["several_processes"],
    "resume training": ["checkpoints", "trainer"],
    "save checkpoint": ["checkpoints"],
    "prune experts": ["compress", "tutorials/shrink"],
    "padding mask": ["routing"],
    "gradient checkpointing": ["routing", "compile"],
    "torch.compile": ["compile"],
    "deepspeed": ["from_deepspeed"],
    "megatron": ["megatron", "tutorials/megatron", "from_megatron_moe"],
    "quantized": ["finetune", "operators"],
    "shared expert": ["routing"],
    "install": ["install"],
    "out of memory": ["troubleshooting", "finetune"],
    "hangs": ["troubleshooting"],
    "windows": ["install"],
    # the tasks of tests/test_docs.py, as a new user would type them
    "own model with experts": ["fmoefy"],
    "30B on a laptop": ["finetune"],
    "four gpus": ["several_processes"],
    "which expert got which token": ["telemetry"],
    "mixtral to gguf": ["formats"],
    "mixtral to megatron": ["formats", "megatron"],
    "add experts to my own model": ["fmoefy"],
    "train on 4 gpus": ["several_processes"],
    "which token goes to which expert": ["telemetry"],
    "load imbalance": ["telemetry", "gates"],
    "router collapse": ["gates", "troubleshooting"],
    "moe without aux loss": ["gates"],
    "expert choice": ["gates"],
    "cpu only": ["install"],
    "benchmark": ["measurements"],
    "speed": ["measurements"],
    "memory limit": ["finetune"],
    "ollama": ["formats"],
    "huggingface trainer": ["transformers"],
    "multi node": ["trainer", "several_processes"],
}
PROGRAM = """
const fs = require("fs"), vm = require("vm");
const [site, questions] = [process.argv[1], JSON.parse(process.argv[2])];
const nothing = () => {};
const context = vm.createContext({
  document: { getElementById: () => null, documentElement: { dataset: {} }, readyState: "complete",
              addEventListener: nothing },
  window: {}, localStorage: { setItem: nothing }, SPHINX_HIGHLIGHT_ENABLED: false, _: (text) => text,
  _ready: nothing, console,
});
for (const file of ["_static/language_data.js", "_static/searchtools.js"])
  vm.runInContext(fs.readFileSync(`${site}/${file}`, "utf-8"), context);
vm.runInContext(fs.readFileSync(`${site}/searchindex.js`, "utf-8"), context);
const ask = vm.runInContext("(q) => Search._performSearch(...Search._parseQuery(q))", context);
const found = questions.map((question) => ask(question).reverse().map((item) => [item[0], item[1], item[4]]));
console.log(JSON.stringify(found));
"""


def answers(site: Path, questions: list[str]) -> list[list[tuple[str, str, float]]]:
    """The results of each question, best first: page, title and score."""
    command = ["node", "-e", PROGRAM, str(site.resolve()), json.dumps(questions)]
    return json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )


def unanswered(site: Path) -> list[str]:
    """Questions whose page is not among the first three, with what is."""
    missed = []
    for (question, pages), found in zip(
        QUESTIONS.items(), answers(site, list(QUESTIONS)), strict=True
    ):
        first = list(dict.fromkeys(page for page, *_ in found))[:3]
        if not set(pages) & set(first):
            missed.append(
                f"{question!r} finds {first or 'nothing'}, not {' or '.join(pages)}"
            )
    return missed


if __name__ == "__main__":
    if shutil.which("node") is None:
        print("The search was not checked: node is not installed.")
        sys.exit(0)
    missed = unanswered(Path(sys.argv[1]))
    print("\n".join(missed))
    sys.exit(1 if missed else 0)
